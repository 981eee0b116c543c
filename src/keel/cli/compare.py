"""`keel compare`"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from rich.console import Console
from rich.table import Table

from keel.runs.values import plain
from keel.types import KeelError
from keel.workflows import compare
from keel.workflows.comparison_files import lines, table, write_files

FAILED = 1
INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Compare; returns 1 if runs failed, 130 after an interruption."""
    console = Console(stderr=arguments.json, highlight=False)
    recipes = [word for word in arguments.recipes if "=" not in word]
    overrides = [*(word for word in arguments.recipes if "=" in word), *arguments.overrides]
    if not recipes:
        raise KeelError("which recipe? name a TOML file or a shipped one (keel recipes)")
    vary = dict(_varied(word) for word in arguments.vary)
    algorithms = [name for name in (arguments.algorithms or "").split(",") if name]
    first = arguments.first_seed
    seeds = range(first, first + arguments.seeds)
    shared = not arguments.no_shared_start
    chosen = compare.plan(
        recipes, algorithms, overrides, vary, tuple(seeds), shared, arguments.baseline
    )
    name = "-".join([*(Path(one).stem for one in recipes), *algorithms])
    folder = Path(arguments.out or f"comparisons/{name}")
    command = _command(arguments)
    try:
        outcome = compare.run(
            chosen, folder, arguments.jobs, note=lambda text: _note(console, text)
        )
    except KeyboardInterrupt:
        _note(console, f"stopped; the same command goes on: {command}")
        return INTERRUPTED
    write_files(folder, outcome.comparison, outcome.runs, command)
    if arguments.json:
        print(json.dumps(plain(outcome.comparison.as_dict()), ensure_ascii=False))
    else:
        head, *rows = table(outcome.comparison)
        shown = Table(box=None)
        for name in [*head[:-1], "models"]:
            shown.add_column(name, overflow="fold", no_wrap=bool(name))
        for row in rows:
            shown.add_row(*row[:-1], row[-1].partition(" ")[0])
        console.print(shown)
        for line in lines(outcome.comparison):
            _note(console, line)
        _note(console, f"files       {folder}/comparison.html, .json, scores.csv, curves.csv, .png")
    return FAILED if outcome.failed else 0


def _note(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _varied(word: str) -> tuple[str, list[str]]:
    key, _, values = word.partition("=")
    found = [value for value in values.split(",") if value]
    if not key or len(found) < 2:
        raise KeelError(f"--vary {word}: give a key and two values or more, as KEY=A,B")
    return key, found


def _command(arguments: argparse.Namespace) -> str:
    """The command that makes the same comparison."""
    words = ["keel", "compare", *arguments.recipes, *arguments.overrides]
    words += ["--algorithms", arguments.algorithms] if arguments.algorithms else []
    words += [part for one in arguments.vary for part in ("--vary", one)]
    words += ["--seeds", str(arguments.seeds)]
    words += ["--first-seed", str(arguments.first_seed)] if arguments.first_seed else []
    words += ["--baseline", arguments.baseline] if arguments.baseline else []
    words += ["--out", arguments.out] if arguments.out else []
    words += ["--no-shared-start"] if arguments.no_shared_start else []
    return shlex.join(words)
