"""Variants of 2025 and 2026 over ten seeds, on the tasks and by the rules of `algorithms`.

Variants that take several optimizer steps a batch, without which their ratio is 1, are compared
with GRPO that takes as many; the others with GRPO.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.algorithms.variants import VARIANTS
from studies.common import keel
from studies.evidence import algorithms
from studies.evidence.algorithms import BASELINE, RATES, RESULTS, SEVERAL, TASKS

OWN_TASK = ("gdpo",)
"""Measured where their idea has something to do."""
MOVING = tuple(one.name for one in VARIANTS if one.minibatches > 1)
STEADY = tuple(one.name for one in VARIANTS if one.minibatches == 1 and one.name not in OWN_TASK)
ARMS: Mapping[str, tuple[str, ...]] = {BASELINE: (BASELINE, *STEADY), SEVERAL: (SEVERAL, *MOVING)}
"""By baseline what is compared with it."""
KEYS: Mapping[str, Mapping[str, Any]] = {SEVERAL: {"minibatches": 4}}
MEASURED = RESULTS / "variants"


def measure(out: Path, seeds: int = 10) -> None:
    """Choose rates that are not known yet, train every arm, and keep the results."""
    for task in TASKS:
        every = [name for names in ARMS.values() for name in names]
        known = tomllib.loads(RATES.read_text())[task]
        if missing := [name for name in every if name not in known]:
            algorithms.choose_rates(out / "variants" / task / "tune", task, missing, KEYS)
        rates = tomllib.loads(RATES.read_text())[task]
        for baseline, names in ARMS.items():
            folder = out / "variants" / task / baseline
            paths = algorithms.write_recipes(folder / "recipes", task, rates, names, KEYS)
            chosen = ("--seeds", seeds, "--baseline", baseline)
            keel("compare", *paths, *chosen, "--out", folder / "arms")
            algorithms.keep(folder / "arms", MEASURED / task / baseline, "variants")
