"""The recipes `smollm2-*` over seeds: a trained model of 135 M parameters on two cores."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.plots import COLOURS
from keel.analysis.statistics import Array
from studies.common import ROOT, keel, markdown, read_lines
from studies.evidence.algorithms import RESULTS

MODEL = ROOT / ".models" / "smollm2-135m-instruct"
KEPT = RESULTS / "trained.json"
GREEDY = "eval/pass@1"


@dataclass(frozen=True)
class Measured:
    """A recipe: what its last stage's figure is called, and whether more is asked of its model."""

    metric: str
    what: str
    scale: int = 100
    on_sums: bool = False
    """Whether the model is evaluated on the sums after the run, which does not do so itself."""


RECIPES: Mapping[str, Measured] = {
    "smollm2-sft": Measured("eval/loss", "validation loss", 1, on_sums=True),
    "smollm2-grpo": Measured(GREEDY, "sums right, %"),
    "smollm2-gspo": Measured(GREEDY, "sums right, %"),
    "smollm2-ppo": Measured(GREEDY, "sums right, %"),
    "smollm2-dpo": Measured("eval/accuracy", "pairs in order, %", on_sums=True),
    "smollm2-reward-model": Measured("eval/accuracy", "pairs in order, %"),
    "smollm2-tool": Measured(GREEDY, "products right, %"),
}


def measure(out: Path, seeds: int = 3) -> None:
    """Run every recipe over the seeds and write results/trained.json; needs `make real-model`."""
    for seed in range(seeds):
        for name in RECIPES:
            folder = out / "trained" / f"{name}-{seed}"
            if not _finished(folder):
                resume = ("--resume",) if folder.exists() else (name, f"model.name={MODEL}")
                keel("train", *resume, f"seed={seed}", "threads=1", "--run", folder)
    collect(out / "trained")


def collect(folder: Path) -> None:
    """Write results/trained.json: by recipe and seed the figure over the steps, and its end."""
    found: dict[str, dict[str, Any]] = {}
    for name, one in RECIPES.items():
        for run in sorted(folder.glob(f"{name}-[0-9]*")):
            if _finished(run):
                found.setdefault(name, {})[run.name.rpartition("-")[2]] = _course(run, one)
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


def _finished(run: Path) -> bool:
    path = run / "run.json"
    return path.is_file() and bool(json.loads(path.read_text()).get("finished"))


def _course(run: Path, one: Measured) -> dict[str, Any]:
    """The last stage's figure before its first step and after others; minutes of all stages."""
    last = read_lines(run / "metrics.jsonl")[-1]["stage"]
    known = json.loads((run / "run.json").read_text())
    figures = (known.get("evaluation") or known["measured"])[last]["before"]
    found = figures if one.metric == GREEDY else figures[one.metric.removeprefix("eval/")]
    before = found["mean"] if isinstance(found, dict) else found
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["stage"] == last]
    kept = [(row["step"], row[one.metric]) for row in rows if one.metric in row]
    seconds = sum(row["total"] for row in read_lines(run / "timings.jsonl"))
    course: dict[str, Any] = {"course": [(0, before), *kept], "minutes": seconds / 60}
    return course | ({"sums": _greedy(run)} if one.on_sums else {})


def _greedy(run: Path) -> float:
    """The share of 200 validation sums that the run's model gets right."""
    task = ("--task", "keel.data.sums:sums", "--reward", "numeric_match", "--prompts", "200")
    task += ("--set", "validation_fraction=0.1")
    command = [sys.executable, "-m", "keel", "eval", str(run), *task, "--json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(json.loads(out)["mean"])


def table(path: Path = KEPT) -> str:
    """Before and after of each recipe, the mean of the seeds and their range."""
    rows = []
    for name, seeds in json.loads(path.read_text()).items():
        one, runs = RECIPES[name], list(seeds.values())
        ends = [run["course"][-1][1] for run in runs]
        begins = [run["course"][0][1] for run in runs]
        sums = [run["sums"] for run in runs if "sums" in run]
        rows.append((
            f"`{name}`", one.what, _figure(begins, one.scale), _figure(ends, one.scale),
            _figure(sums, 100) if sums else "", len(runs),
        ))  # fmt: skip
    return markdown(("recipe", "figure", "before", "after", "sums right, %", "seeds"), rows)


def _figure(values: list[float], scale: int) -> str:
    """The mean, and the range if there are several."""
    digits = 1 if scale == 100 else 3
    low, mean, high = (f"{scale * f(values):.{digits}f}" for f in (min, np.mean, max))
    return mean if low == high else f"{mean} ({low} to {high})"


def panels(path: Path = KEPT) -> dict[str, dict[str, tuple[str, Array]]]:
    """The curves of the recipes with rollouts: steps, mean, lowest and highest."""
    found = json.loads(path.read_text())
    made: dict[str, dict[str, tuple[str, Array]]] = {}
    for name, seeds in found.items():
        one = RECIPES[name]
        if one.metric == GREEDY:
            courses = np.array([run["course"] for run in seeds.values()])
            steps, values = courses[0, :, 0], 100 * courses[:, :, 1]
            curve = np.array([steps, values.mean(0), values.min(0), values.max(0)])
            panel = made.setdefault(one.what.removesuffix(", %"), {})
            panel[name.removeprefix("smollm2-")] = (COLOURS[len(panel)], curve)
    return made
