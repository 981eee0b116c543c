"""Returns on classic control over seeds: a CSV a seed and evaluation, IQM and interval, the curve.

    python -m studies.control ppo CartPole-v1 [key=value ...] [--seeds 10] [--out DIR]
    python -m studies.control --table docs/algorithms/control

Every seed is a run of `keel control` in its own process, on one thread. Returns are those of the
greedy policy over `evaluation.episodes` episodes that training never sees.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.metrics import Line, Panel, Series
from keel.analysis.plots import drawing, plot_panel, set_titles
from keel.analysis.statistics import bootstrap_interval, iqm
from keel.config.control import load_control
from keel.runs.reader import load
from studies.common import keel, markdown, read_csv, shown, write_csv

FIELDS = ("seed", "environment_steps", "return", "low", "high", "train_return")
POINTS = 20
"""Evaluations along a run."""
Rows = Sequence[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("algorithm", nargs="?")
    parser.add_argument("environment", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, help="keep the CSV and the picture here")
    parser.add_argument("--table", type=Path, default=None, help="only show what lies in a folder")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(arguments.table))
        for path in arguments.table.glob("*.csv"):
            plot(path.with_suffix(".png"), read_csv(path))
        return
    with tempfile.TemporaryDirectory() as scratch:
        name = f"{arguments.algorithm}-{arguments.environment}.csv"
        path = (arguments.out or Path(scratch)) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(path, FIELDS, measure(arguments, Path(scratch)))
        rows = read_csv(path)
        plot(path.with_suffix(".png"), rows)
    print(f"{path.stem}: IQM {shown(bootstrap_interval([*finals(rows).values()], iqm))}")
    for seed, last in finals(rows).items():
        print(f"  seed {seed}: {last:.1f}")


def measure(arguments: argparse.Namespace, scratch: Path) -> list[tuple[float | str, ...]]:
    """The evaluations of every seed's run."""
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        runs = pool.map(lambda seed: [*one(arguments, seed, scratch / str(seed))], seeds)
        return [row for rows in runs for row in rows]


def one(
    arguments: argparse.Namespace, seed: int, folder: Path
) -> Iterator[tuple[float | str, ...]]:
    """One run, and its evaluations; with the last, the mean of the last training returns."""
    names = (arguments.algorithm, arguments.environment)
    steps = load_control(*names, arguments.overrides).stage.steps
    keys = (f"evaluation.every={max(steps // POINTS, 1)}", f"seed={seed}", "watching.film=false")
    keys += (f"evaluation.episodes={arguments.episodes}", *arguments.overrides)
    keel("control", names[0], "--env", names[1], "--run", folder, "--quiet", *keys)
    rows = load(folder).metrics()
    recent = [row["episode/return"] for row in rows[-50:] if row.get("episode/return") is not None]
    *earlier, last = (row for row in rows if row.get("eval/return") is not None)
    trained = round(float(np.mean(recent)), 3) if recent else ""
    for row, mean in [*((row, "") for row in earlier), (last, trained)]:
        returns = (round(row[f"eval/return{end}"], 3) for end in ("", "/low", "/high"))
        yield seed, int(row["environment_steps"]), *returns, mean


def finals(rows: Rows) -> dict[int, float]:
    """The last evaluation of each seed."""
    return {row["seed"]: row["return"] for row in rows}


def table(folder: Path) -> str:
    """IQM over seeds of the last evaluations of every CSV in a folder, as Markdown."""
    lines = []
    for path in sorted(folder.glob("*.csv")):
        rows = read_csv(path)
        last = [*finals(rows).values()]
        steps, result = max(row["environment_steps"] for row in rows), bootstrap_interval(last, iqm)
        numbers = (result.mean, result.low, result.high, min(last), max(last))
        mean, low, high, lowest, highest = (f"{number:.1f}" for number in numbers)
        lines.append((path.stem, f"{steps:,}", mean, f"[{low}, {high}]", lowest, highest))
    head = ("run", "steps", "IQM", "95 % interval", "lowest seed", "highest")
    return markdown(head, lines)


def plot(path: Path, rows: Rows) -> None:
    """IQM over seeds of the evaluated return, with its interval, along the run."""
    by_seed = [[row for row in rows if row["seed"] == seed] for seed in finals(rows)]
    at_steps = [*zip(*by_seed, strict=False)]
    found = [bootstrap_interval([row["return"] for row in at], iqm) for at in at_steps]
    line = Line("eval/return", "return")
    curve = Series(
        line,
        f"IQM of {len(by_seed)} seeds, 95 % interval",
        np.array([float(at[0]["environment_steps"]) for at in at_steps]),
        np.array([interval.mean for interval in found]),
        np.array([interval.low for interval in found]),
        np.array([interval.high for interval in found]),
    )
    with drawing(path, 4.5) as figure:
        axes = figure.subplots()
        plot_panel(axes, Panel("return", path.stem, "", (line,), "return, greedy"), [curve])
        axes.set_xlabel("environment steps")
        axes.legend(loc="best")
        set_titles(figure, path.stem, "")


if __name__ == "__main__":
    main()
