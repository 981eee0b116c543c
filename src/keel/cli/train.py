"""`keel train` and `keel control`: a run, watched to its end."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

from rich.console import Console
from rich.filesize import decimal

from keel.analysis.diagnosis.table import Diagnosis, diagnose
from keel.analysis.progress import curve, describe_evaluation, figure, size, watching
from keel.analysis.text import visible
from keel.cli.runs import NOTHING
from keel.config.control import ControlRecipe, load_control
from keel.config.load import expected_of, load_recipe
from keel.config.schema import Recipe
from keel.platform.extras import install_command
from keel.runs.layout import RunFolder
from keel.runs.reader import Run, load
from keel.types import KeelError, shorten, text_of

LARGE = 10**9
"""Bytes of a run folder from which on its size is shown."""


class Start(Protocol):
    """Starts or resumes a run, and returns its folder when it has ended."""

    def __call__(self, *, callbacks: Sequence[object]) -> RunFolder: ...


def run(arguments: argparse.Namespace) -> int:
    """Run, or resume a run; prints its results. With torchrun on each rank, of which 0 drives."""
    driving: AbstractContextManager[None] = nullcontext()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        recipe = _recipe(arguments)
    else:
        from keel.cluster import ranks as torchrun

        ranks = torchrun.ranks_of(os.environ)
        if ranks.number > 0:
            return torchrun.serve_launched(ranks)
        recipe = _recipe(arguments)
        if recipe is not None and "processes" not in recipe.cluster.model_fields_set:
            count = f"cluster.processes={ranks.count}"
            recipe = load_recipe(arguments.recipe, [*arguments.overrides, count])
        resumed = recipe or load_recipe(RunFolder.open(arguments.run).recipe)
        torchrun.check(resumed.cluster.processes, resumed.cluster.ray, ranks)
        driving = torchrun.driving(ranks)
    if recipe is not None and recipe.description:
        console = Console(stderr=arguments.json, quiet=arguments.quiet)
        console.print(f"{recipe.name}: {recipe.description}", highlight=False, soft_wrap=True)
    from keel.preferences.labeller import PeopleLabeller
    from keel.training.run import train

    people = PeopleLabeller()
    start = partial(train, recipe, arguments.run, resume=arguments.resume, labeller=people)
    with driving:
        return run_and_report(arguments, "train", start, show)


def run_and_report(
    arguments: argparse.Namespace,
    command: str,
    start: Start,
    show: Callable[[Console, RunFolder], None],
) -> int:
    """Watch a run to its end and show it, or say how to resume it; the exit code."""
    from keel.platform.signals import Interrupted

    console = _Output(stderr=arguments.json, quiet=arguments.quiet)
    try:
        with watching(console) as progress:
            folder = start(callbacks=[progress])
    except Interrupted as caught:
        how = f"keel {command} --resume --run {caught.folder}"
        console.print(f"stopped by {caught.name}; resume with: {how}", soft_wrap=True)
        return 128 + caught.signum
    if arguments.json:
        run = load(folder.path)
        about = {"run": str(folder.path), "seconds": round(run.seconds(), 3), **run.info()}
        found, why = _diagnosed(run)
        about["diagnoses"] = None if why else [one.as_dict() for one in found]
        print(json.dumps(about, ensure_ascii=False))
    else:
        show(console, folder)
    return 0


class _Output(Console):
    def on_broken_pipe(self) -> None:
        """Go on without output, as in `keel train | head`."""
        with suppress(SystemExit):
            super().on_broken_pipe()


def show(console: Console, folder: RunFolder) -> None:
    """The reward curve, the validation split before and after each stage, and a few completions."""
    run = load(folder.path)
    rewards = [row["reward"] for row in run.metrics() if row.get("reward") is not None]
    if len(rewards) > 1 and console.encoding.startswith("utf"):
        console.print("\nreward by step")
        console.print(curve(rewards), highlight=False)
    info = run.info()
    stages = [stage for stage in run.stages if stage in info.get("evaluation", {})]
    for stage in stages:
        for when in ("before", "after"):
            examples = info.get("examples", {}).get(stage, {}).get(when, [])
            if not examples:
                continue
            head = f"{when} {stage}" if len(stages) > 1 else when
            console.print(f"\n[bold]{head}[/bold]" + _share(info["evaluation"][stage].get(when)))
            if when == "after" and stage == stages[-1]:
                _expected(console, run)
            for example in examples:
                console.print(_example(example), highlight=False, markup=False)
    for stage, found in info.get("measured", {}).items():
        head = f"{stage}, " if len(run.stages) > 1 else ""
        console.print()
        for when in ("before", "after"):
            if when in found:
                console.print(f"{head}{when}: {describe_evaluation(found[when])}", highlight=False)
    _diagnoses(console, run)
    console.print(f"\nrun folder  {folder.path}")
    if (taken := run.disk_use()) >= LARGE:
        free = f"keel runs delete {folder.path} --keep-last-checkpoint"
        console.print(f"disk use    {decimal(taken)} (less: {free})", soft_wrap=True)
    if folder.curve.exists():
        console.print(f"curve       {folder.curve}")
    console.print("next")
    path, model = str(folder.path), f"{folder.path.name}-model"
    commands = [["report", path], ["export", path, model]]
    if not run.checkpoints():
        commands = [["rollouts", path, "--step", "0"], ["report", path]]
    elif folder.model(run.stages[-1]).is_dir():
        commands[1] += ["--stage", run.stages[-1]]
    elif any(stage.get("tasks") for stage in run.recipe()["stages"]):
        commands.insert(1, ["eval", path, "--samples", "4"])
    for words in commands:
        console.print(f"  {shlex.join(['keel', *words])}", soft_wrap=True, markup=False)


def _diagnoses(console: Console, run: Run) -> None:
    """What went wrong, as text."""
    found, why = _diagnosed(run)
    if why:
        console.print(f"\nno diagnosis: {why}", highlight=False, markup=False, soft_wrap=True)
        return
    console.print("\ndiagnosis" if found else f"\ndiagnosis   {NOTHING}", highlight=False)
    for one in found:
        text = [f"{one.severity}: {one.title}", *(f"- {line}" for line in one.evidence)]
        text += [f"change {change}" for change in one.changes[:1]]
        for line in text:
            console.print(f"  {visible(line)}", highlight=False, markup=False, soft_wrap=True)
    if found:
        console.print(f"  more: keel diagnose {run.folder.path}", soft_wrap=True)


def _diagnosed(run: Run) -> tuple[Sequence[Diagnosis], str]:
    """The diagnoses, and why there are none: the run is over and good whatever this finds."""
    try:
        return diagnose(run), ""
    except KeelError as error:
        return (), str(error)


def _recipe(arguments: argparse.Namespace) -> Recipe | None:
    if not arguments.resume:
        if arguments.recipe is None:
            raise KeelError("which recipe? name a TOML file or a shipped one (keel recipes)")
        return load_recipe(arguments.recipe, arguments.overrides)
    words = [word for word in (arguments.recipe, *arguments.overrides) if word is not None]
    if words and "=" not in words[0] and arguments.run is None:
        arguments.run = words.pop(0)
    if arguments.run is None:
        raise KeelError("--resume goes on with a run: name its folder with --run DIR")
    if words and "=" not in words[0]:
        raise KeelError("--resume runs the recipe that the run folder holds: name no other")
    return load_recipe(load(arguments.run).recipe(), words) if words else None


def _share(result: dict[str, Any] | None) -> str:
    if result is None:
        return ""
    every = {"validation greedy": result, **result.get("sets", {})}
    interval = "(95 % interval, n = {})".format
    shown = (f"{name} {figure(one)} {interval(size(one))}" for name, one in every.items())
    return f": {'; '.join(shown)}"


def _expected(console: Console, run: Run) -> None:
    """What the shipped recipe that ran says to expect."""
    found = expected_of(load_recipe(run.recipe()))
    if found is not None and found.after is not None:
        console.print(f"expected: {found.after}", highlight=False)


def _example(example: dict[str, Any]) -> str:
    prompt = example["prompt"]
    text = prompt if isinstance(prompt, str) else text_of(prompt[-1])
    mark = "-" if example["reward"] is None else f"{example['reward']:g}"
    passed = example.get("passed")
    if passed is not None and float(passed) != example["reward"]:
        # Accuracy is of another reward than the one that is trained on.
        mark = f"{'right' if passed else 'wrong'}, reward {mark}"
    return f"  [{mark}] {_short(text, 200)} {_short(example['completion'], 200)}"


def _short(text: str, width: int) -> str:
    return shorten(visible(" ".join(text.split())), width)


# ---------------------------------------------------------------- control


def run_control(arguments: argparse.Namespace) -> int:
    """Run on an environment, or resume a run; prints its results."""
    recipe = _control_recipe(arguments)
    try:
        from keel.control.run import control
    except ModuleNotFoundError as error:
        if error.name != "gymnasium":
            raise
        raise KeelError(f"keel control needs gymnasium: {install_command('control')}") from error

    start = partial(control, recipe, arguments.run, resume=arguments.resume)
    return run_and_report(arguments, "control", start, show_control)


def show_control(console: Console, folder: RunFolder) -> None:
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


def _control_recipe(arguments: argparse.Namespace) -> ControlRecipe | None:
    if not arguments.resume:
        if arguments.algorithm is None:
            raise KeelError("which algorithm? name one, as in: keel control ppo --env CartPole-v1")
        return load_control(arguments.algorithm, arguments.env, arguments.overrides)
    if arguments.algorithm is not None or arguments.env is not None or arguments.overrides:
        raise KeelError(
            "--resume runs the recipe that the run folder holds: name no algorithm, environment "
            "or key"
        )
    return None
