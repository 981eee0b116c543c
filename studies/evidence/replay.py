"""Iterative GRPO with different shares of replayed rows: what reward models forget, and what the
policy's true score is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.comparison import difference_interval, iqm_interval
from keel.analysis.statistics import Array
from studies.common import keel, markdown, shown
from studies.evidence.algorithms import HERE, RESULTS

SHARES = ("0", "0.1", "1")
KEPT = RESULTS / "replay.json"
KEY = "update.base.replay"
LAST = "update-3"


def measure(out: Path, seeds: int = 10) -> None:
    """Run all shares and write results/replay.json: of each, by seed, the accuracy of the last
    version of the reward model on each version's validation rows, and the policy's accuracy."""
    vary = ("--vary", f"{KEY}={','.join(SHARES)}", "--seeds", seeds)
    keel("compare", HERE / "replay.toml", *vary, "--out", out / "replay")
    compared = json.loads((out / "replay" / "comparison.json").read_text())["arms"]
    found: dict[str, Any] = {}
    for share, arm in zip(SHARES, compared, strict=True):
        folders = [out / "replay" / "runs" / arm["arm"] / f"seed-{seed}" for seed in range(seeds)]
        kept = [json.loads((one / "run.json").read_text())["forgetting"] for one in folders]
        matrices = [one[LAST]["accuracy"] for one in kept]
        means = [[[cell["mean"] for cell in row] for row in one] for one in matrices]
        found[share] = {"accuracy": means, "score": arm["scores"]}
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


def table(path: Path = KEPT) -> str:
    """Accuracy of the last version on old and on new rows, and the policy's, in percent, with the
    difference from no replay on the same seeds."""
    values = {share: _figures(one) for share, one in json.loads(path.read_text()).items()}
    none = values[SHARES[0]]
    rows = []
    for share, figures in values.items():
        cells = [f"{100 * float(share):.0f} %"]
        for figure, base in zip(figures, none, strict=True):
            cells.append(shown(iqm_interval(figure)))
            same = share == SHARES[0]
            cells.append("–" if same else shown(difference_interval(figure, base)))
        rows.append(cells)
    head = ("old rows", "less none", "new rows", "less none", "policy", "less none")
    return markdown(("replay", *head), rows)


def _figures(found: dict[str, Any]) -> tuple[Array, Array, Array]:
    """By seed: accuracy on the rows of earlier versions, on those of the last, and the policy's."""
    accuracy = 100 * np.array(found["accuracy"])
    return accuracy[:, -1, :-1].mean(axis=1), accuracy[:, -1, -1], 100 * np.array(found["score"])
