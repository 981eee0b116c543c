"""`keel control`"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rich.console import Console

from keel.analysis.progress import curve
from keel.cli.train import run_and_report
from keel.config.control import ControlRecipe, load_control
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.types import KeelError


def run(arguments: argparse.Namespace) -> int:
    """Run on an environment, or resume a run; prints its results."""
    recipe = _recipe(arguments)
    try:
        from keel.control.run import control
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise KeelError("keel control needs gymnasium: pip install 'keel-rl[control]'") from error

    start = partial(control, recipe, arguments.run, resume=arguments.resume)
    return run_and_report(arguments, "control", start, show)


def show(console: Console, folder: RunFolder) -> None:
    """The return curve and the last evaluation."""
    run = load(folder.path)
    found = [row.get("episode/return") for row in run.metrics()]
    returns = [value for value in found if value is not None]
    if len(returns) > 1 and console.encoding.startswith("utf"):
        console.print("\nreturn by row")
        console.print(curve(returns), highlight=False)
    evaluation = run.info().get("evaluation", {}).get(run.stages[-1], {})
    after: dict[str, Any] | None = evaluation.get("after")
    if after is not None:
        interval = f"[{after['low']:.1f}, {after['high']:.1f}]"
        console.print(
            f"\ngreedy return {after['mean']:.1f} (95 % {interval}, n = {after['n']})",
            highlight=False,
        )
    console.print(f"\nrun folder  {folder.path}")
    for path in (folder.curve, folder.film):
        if path.exists():
            console.print(f"{path.stem:<10}  {path}")


def _recipe(arguments: argparse.Namespace) -> ControlRecipe | None:
    if not arguments.resume:
        if arguments.algorithm is None:
            raise KeelError("which algorithm? name one, as in: keel control ppo --env CartPole-v1")
        return load_control(arguments.algorithm, arguments.env, arguments.overrides)
    if arguments.run is None:
        raise KeelError("--resume goes on with a run: name its folder with --run DIR")
    if arguments.algorithm is not None or arguments.env is not None or arguments.overrides:
        raise KeelError(
            "--resume runs the recipe that the run folder holds: name no algorithm, environment "
            "or key"
        )
    return None
