"""Kills runs of every kind at every step and at random instants; resumed, they must end the same.

Each case of tests/soak/cases.py runs once whole. Then it runs again and is killed (SIGKILL) after
each of its rows, and at instants drawn by chance: before any operation on the run folder, in the
middle of a write, after so many seconds; up to three times before it may end. What it leaves is
compared with the whole run byte for byte: all but timings.jsonl, events.jsonl, trackers/, .lock.

    python -m studies.soak [--kills 300] [--seed 0] [--jobs 2] [--minutes N] [--case NAME]

Ends with 1 where a run differs, and keeps both folders, for `keel runs diff`.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from keel.config.fields import derive
from keel.config.schema import Recipe
from keel.runs.reader import load
from tests.soak import killing
from tests.soak.cases import CASES, Case
from tests.soak.killing import Ended, Instant, Outcome

MEMORY = Path("/dev/shm")
"""A disk in memory, where there is one: what a killed process wrote is there without it."""
AGAIN = (0.5, 0.3, 0.2)
"""How often a run that is killed by chance is killed once, twice and three times."""


@dataclass
class Soaked:
    """A case, its run that was never killed, and what came of those that were."""

    case: Case
    recipe: Recipe
    folder: Path
    ended: Ended
    outcomes: list[Outcome] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    def count(self) -> tuple[int, int, int]:
        """Kills, resumes, and the runs that differ."""
        outcomes = self.outcomes
        kills = sum(len(outcome.kills) for outcome in outcomes)
        resumes = sum(outcome.resumes for outcome in outcomes)
        return kills, resumes, sum(bool(outcome.differences) for outcome in outcomes)


def begun(case: Case, folder: Path) -> Soaked:
    """The case with its whole run. Raises RuntimeError where that fails or shows nothing."""
    folder.mkdir(parents=True)
    recipe = case.make(folder)
    soaked = Soaked(case, recipe, folder, killing.whole(recipe, folder / "whole"))
    if not case.shows(load(soaked.whole)):
        raise RuntimeError(f"{case.name}: the run does not do what the case is there for")
    return soaked


def planned(soaked: Soaked, plan: str) -> list[list[Instant]]:
    """After every row, before every operation on the run folder, or none."""
    if plan == "rows":
        return [[Instant("row", at + 1)] for at in range(soaked.ended.rows)]
    count = soaked.ended.operations if plan == "operations" else 0
    return [[Instant("operation", at + 1)] for at in range(count)]


def by_chance(soaked: Soaked, rng: np.random.Generator) -> list[Instant]:
    """One to three instants, each of any kind but the rows."""
    return [_instant(soaked, rng) for _ in range(1 + int(rng.choice(len(AGAIN), p=AGAIN)))]


def _instant(soaked: Soaked, rng: np.random.Generator) -> Instant:
    kind = rng.choice(["operation", "second", "byte"], p=[0.5, 0.3, 0.2])
    if kind == "operation":
        return Instant("operation", int(rng.integers(1, soaked.ended.operations + 1)))
    if kind == "second":
        return Instant("second", float(rng.random() * soaked.ended.seconds))
    sizes = sorted(p.stat().st_size for p in soaked.whole.rglob("*") if p.is_file())
    return Instant("byte", int(rng.integers(1, 1 + max(1, int(rng.choice(sizes))))))


def soak(soaked: Soaked, plan: Sequence[Instant]) -> None:
    """A run killed after a plan; its folder is kept where it differs."""
    folder = soaked.folder / f"killed-{len(soaked.outcomes) + 1}"
    outcome = killing.killed(soaked.recipe, folder, soaked.whole, plan)
    soaked.outcomes.append(outcome)
    if outcome.differences:
        soaked.kept.append(folder)
        at = ", ".join(map(str, plan))
        print(f"{soaked.case.name}: killed at {at}: {outcome.differences[0]}", flush=True)
    else:
        shutil.rmtree(folder)


def everything(cases: Sequence[Case], folder: Path, options: argparse.Namespace) -> list[Soaked]:
    """All cases killed by plan, then by chance until there are kills enough."""
    ends = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")

    def first(case: Case) -> Soaked:
        soaked = begun(case, folder / case.name)
        for plan in planned(soaked, options.plan):
            if time.monotonic() < ends:
                soak(soaked, plan)
        e, (kills, _, different) = soaked.ended, soaked.count()
        message = f"{e.rows} rows, {e.operations} operations, {e.seconds:.1f} s; {kills} kills"
        print(f"{soaked.case.name}: {message}, {different} differ", flush=True)
        return soaked

    def again(soaked: Soaked, number: int) -> None:
        """At instants of chance, unless the time is up."""
        if time.monotonic() < ends:
            rng = np.random.default_rng(derive(options.seed, soaked.case.name, number))
            soak(soaked, by_chance(soaked, rng))

    with ThreadPoolExecutor(options.jobs) as pool:
        every = list(pool.map(first, cases))
        for number in itertools.count():
            if sum(s.count()[0] for s in every) >= options.kills and number:
                break
            list(pool.map(functools.partial(again, number=number), every))
            if time.monotonic() >= ends:
                break
    return every


def table(every: Sequence[Soaked]) -> str:
    """A line a case and the totals."""
    head = f"{'case':<28} {'runs':>5} {'kills':>6} {'resumes':>8} {'differ':>7}   killed at"
    lines = [head, "-" * len(head), *(_line(one.case.name, [one]) for one in every)]
    return "\n".join([*lines, "-" * len(head), _line("all", every)])


def _line(name: str, soaked: Sequence[Soaked]) -> str:
    outcomes = [outcome for one in soaked for outcome in one.outcomes]
    where = Counter(instant.kind for outcome in outcomes for instant in outcome.kills)
    kills, resumes, different = map(sum, zip(*(one.count() for one in soaked), strict=True))
    at = ", ".join(f"{n} {kind}" for kind, n in sorted(where.items()))
    return f"{name:<28} {len(outcomes):>5} {kills:>6} {resumes:>8} {different:>7}   {at}"


def main() -> int:
    """Soaks, prints the table; 1 where a run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=300, help="at least so many")
    parser.add_argument("--seed", type=int, default=0, help="of the random instants")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so many")
    parser.add_argument("--case", action="append", choices=list(CASES), metavar="NAME")
    parser.add_argument(
        "--plan",
        choices=["rows", "operations", "chance"],
        default="rows",
        help="first after each row, or before each operation on the run folder (thousands), or "
        "by chance at once",
    )
    parser.add_argument("--folder", type=Path, help="where the runs go, and stay")
    options = parser.parse_args()
    start = time.monotonic()
    parent = MEMORY if MEMORY.is_dir() else None
    folder = options.folder or Path(tempfile.mkdtemp(prefix="keel-soak-", dir=parent))
    every = everything([CASES[name] for name in options.case or CASES], folder, options)
    print(f"\n{table(every)}\n{time.monotonic() - start:.0f} s")
    for soaked in every:
        for kept in soaked.kept:
            print(f"keel runs diff {soaked.whole} {kept}")
    different = any(soaked.kept for soaked in every)
    if not different and options.folder is None:
        shutil.rmtree(folder)
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
