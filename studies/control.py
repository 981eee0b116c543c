"""Returns on classic control over seeds: a CSV a seed and evaluation, IQM and interval, the curve.

    python studies/control.py ppo CartPole-v1 [key=value ...] [--seeds 10] [--out DIR]
    python studies/control.py --table docs/algorithms/control

Every seed is a run of `keel control` in a process of its own, on one thread. Returns are those of
the greedy policy over `evaluation.episodes` episodes that training never sees.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from keel.analysis.metrics import Line, Panel, Series
from keel.analysis.plots import drawing, plot_panel, set_titles
from keel.analysis.statistics import Interval, bootstrap_interval, iqm
from keel.config.control import load_control
from keel.runs.reader import load

FIELDS = ("seed", "environment_steps", "return", "low", "high", "train_return")
POINTS = 20
"""Evaluations along a run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("algorithm", nargs="?")
    parser.add_argument("environment", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--table", type=Path, default=None, help="only show what lies in a folder")
    arguments = parser.parse_args()
    if arguments.table is not None:
        print(table(arguments.table))
        for path in arguments.table.glob("*.csv"):
            draw(path.with_suffix(".png"), read(path), path.stem)
        return
    name = f"{arguments.algorithm}-{arguments.environment}"
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    rows = measure(arguments, list(seeds))
    result = summary(rows)
    interval = f"IQM {result.mean:.1f}, 95 % [{result.low:.1f}, {result.high:.1f}]"
    print(f"{name}: {interval}, {result.n} seeds")
    for seed in seeds:
        print(f"  seed {seed}: {final(rows, seed):.1f}")
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write(arguments.out / f"{name}.csv", rows)
        draw(arguments.out / f"{name}.png", rows, name)


def measure(arguments: argparse.Namespace, seeds: Sequence[int]) -> list[dict[str, float]]:
    """The evaluations of every seed's run."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        runs = pool.map(lambda seed: one(arguments, seed, Path(folder) / str(seed)), seeds)
        return [row for rows in runs for row in rows]


def one(arguments: argparse.Namespace, seed: int, folder: Path) -> list[dict[str, float]]:
    """One run, and its evaluations."""
    recipe = load_control(arguments.algorithm, arguments.environment, arguments.overrides)
    command = [
        *(sys.executable, "-m", "keel", "control", arguments.algorithm),
        *("--env", arguments.environment, "--run", str(folder), "--quiet"),
        *(
            f"seed={seed}",
            f"evaluation.every={max(recipe.stage.steps // POINTS, 1)}",
            "watching.film=false",
        ),
        f"evaluation.episodes={arguments.episodes}",
        *arguments.overrides,
    ]
    subprocess.run(command, check=True)
    rows = load(folder).metrics()
    shown = [row for row in rows if row.get("eval/return") is not None]
    trained = [row.get("episode/return") for row in rows]
    recent = [value for value in trained[-50:] if value is not None]
    found = []
    for row in shown:
        returns = (row[f"eval/return{end}"] for end in ("", "/low", "/high"))
        values = (seed, int(row["environment_steps"]), *returns, np.nan)
        found.append(dict(zip(FIELDS, values, strict=True)))
    found[-1]["train_return"] = float(np.mean(recent)) if recent else np.nan
    return found


def final(rows: Sequence[dict[str, float]], seed: int) -> float:
    """The last evaluation of a seed."""
    return [row["return"] for row in rows if row["seed"] == seed][-1]


def summary(rows: Sequence[dict[str, float]]) -> Interval:
    """IQM of the last evaluations over seeds, with its 95 % bootstrap interval."""
    seeds = sorted({int(row["seed"]) for row in rows})
    return bootstrap_interval([final(rows, seed) for seed in seeds], iqm)


def write(path: Path, rows: Sequence[dict[str, float]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            blank = {k: "" if row[k] != row[k] else round(row[k], 3) for k in FIELDS}
            writer.writerow(blank)


def read(path: Path) -> list[dict[str, float]]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) if v else float("nan") for k, v in row.items()} for row in rows]


def table(folder: Path) -> str:
    """The summary of every CSV in a folder, as Markdown."""
    lines = [
        "| run | steps | IQM | 95 % interval | lowest seed | highest |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.csv")):
        rows = read(path)
        result = summary(rows)
        last = [final(rows, seed) for seed in sorted({int(row["seed"]) for row in rows})]
        steps = int(max(row["environment_steps"] for row in rows))
        interval = f"[{result.low:.1f}, {result.high:.1f}]"
        cells = (path.stem, f"{steps:,}", f"{result.mean:.1f}", interval)
        lines.append(f"| {' | '.join(cells)} | {min(last):.1f} | {max(last):.1f} |")
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[dict[str, float]], title: str) -> None:
    """IQM over seeds of the evaluated return, with its interval, along the run."""
    seeds = sorted({row["seed"] for row in rows})
    by_seed = [[row for row in rows if row["seed"] == seed] for seed in seeds]
    points = min(len(own) for own in by_seed)
    found = [
        bootstrap_interval([own[at]["return"] for own in by_seed], iqm) for at in range(points)
    ]
    line = Line("eval/return", "return")
    curve = Series(
        line,
        f"IQM of {len(seeds)} seeds, 95 % interval",
        np.array([by_seed[0][at]["environment_steps"] for at in range(points)]),
        np.array([interval.mean for interval in found]),
        np.array([interval.low for interval in found]),
        np.array([interval.high for interval in found]),
    )
    with drawing(path, 4.5) as figure:
        axes = figure.subplots()
        plot_panel(axes, Panel("return", title, "", (line,), "return, greedy"), [curve])
        axes.set_xlabel("environment steps")
        axes.legend(loc="best")
        set_titles(figure, title, "")


if __name__ == "__main__":
    main()
