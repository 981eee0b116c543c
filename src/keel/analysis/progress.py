"""Progress of a run: a live bar on a terminal or in a notebook, else one line per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from keel.analysis.terminal import sparkline
from keel.runs.callbacks import Callback, RunState

SHOWN = {
    "loss": "loss",
    "reward": "reward",
    "episode/return": "return",
    "eval/return": "greedy",
    "epsilon": "ε",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "length",
    "value/explained_variance": "ev",
}
"""The metrics of a line, and what the line calls them."""


@contextmanager
def watching(console: Console) -> Iterator[Lines]:
    """A bar on a terminal, and in a notebook that has ipywidgets; else lines."""
    live = find_spec("ipywidgets") is not None if console.is_jupyter else console.is_terminal
    if live and not console.quiet:
        with Bar(console) as bar:
            yield bar
    else:
        yield Lines(console)


def summary(metrics: Mapping[str, float]) -> str:
    """The few metrics that say how a step went."""
    loss_only = not any(name in metrics for name in ("reward", "episode/return"))
    wanted = {k: v for k, v in SHOWN.items() if loss_only or k != "loss"}
    return "  ".join(
        f"{short} {metrics[name]:.3g}" for name, short in wanted.items() if name in metrics
    )


class Lines(Callback):
    """One line per step, for logs."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def on_stage(self, state: RunState) -> None:
        self.on_note(f"stage {state.stage} ({state.kind}): {state.steps} steps, {state.step} done")

    def on_step(self, state: RunState) -> None:
        of = f"{state.stage} {_done(state)}/{state.steps}"
        self.on_note(f"{of}  {summary(state.metrics)}  {state.seconds:.2f}s")

    def on_evaluation(self, state: RunState, result: Mapping[str, Any]) -> None:
        self.on_note(_evaluation(state.stage, state.step, result))

    def on_note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


class Bar(Lines):
    """A live bar per stage, with the reward so far as a sparkline."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[curve]}", style="cyan"),
            TextColumn("{task.fields[line]}"),
            console=console,
            refresh_per_second=8,
        )
        self.task: TaskID | None = None
        self.curve: list[float] = []
        self.drawn = console.encoding.startswith("utf")

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def on_stage(self, state: RunState) -> None:
        self.curve = []
        self.task = self.bar.add_task(
            state.stage, total=state.steps, completed=state.step, curve="", line=""
        )

    def on_step(self, state: RunState) -> None:
        assert self.task is not None
        names = ("reward", "episode/return", "loss")
        self.curve += [state.metrics[name] for name in names if name in state.metrics][:1]
        self.bar.update(
            self.task,
            completed=_done(state),
            curve=sparkline(self.curve, width=16) if self.drawn else "",
            line=summary(state.metrics),
        )


def _done(state: RunState) -> int:
    """How far a stage has come: in steps, or in steps of its environments."""
    return int(state.metrics.get("environment_steps", state.step))


def _evaluation(stage: str, step: int, result: Mapping[str, Any]) -> str:
    if result.get("kind") == "return":
        interval = f"[{result['low']:.1f}, {result['high']:.1f}]"
        return (
            f"{stage} row {step}: greedy return {result['mean']:.1f} {interval}, n = {result['n']}"
        )
    if "accuracy" in result:
        return _measured(stage, step, result)
    line = f"{stage} after {step} steps: validation greedy {figure(result)}, n = {size(result)}"
    if "sampled" in result:
        sampled = result["sampled"]["mean"]
        form = ".1%" if result.get("measure", "pass@1") == "pass@1" else ".3g"
        line += "; sampled " + ("undefined" if sampled is None else f"{sampled:{form}}")
    for name, value in result.items():
        if name.startswith("pass@"):
            line += f"; {name} {value['mean']:.1%}"
    return line


def figure(result: Mapping[str, Any]) -> str:
    """Accuracy as a share, or the mean reward as a number, with its interval."""
    mean, low, high = (result[key] for key in ("mean", "low", "high"))
    form, name = (".1%", "") if result.get("measure", "pass@1") == "pass@1" else (".3g", "reward ")
    if mean is None:
        return f"{name}undefined"
    if low is None or high is None:
        return f"{name}{mean:{form}}"
    return f"{name}{mean:{form}} [{low:{form}}, {high:{form}}]"


def size(result: Mapping[str, Any]) -> str:
    """Of how many prompts an evaluation is, and how many had no verdict."""
    left = result.get("unjudged", 0)
    return f"{result['n']}" + (f" ({left} without a verdict left out)" if left else "")


def _measured(stage: str, step: int, result: Mapping[str, Any]) -> str:
    """What validation rows say of a reward model, or of a policy's preferences."""
    share = result["accuracy"]
    if share["mean"] is None:
        accuracy = "undefined (no decided row)"
    elif share["low"] <= 0 and share["high"] >= 1:
        right = f"{share['mean'] * share['n']:g} of {share['n']}"
        accuracy = f"{right} (too few prompts for an interval)"
    else:
        accuracy = f"{share['mean']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"
    line = f"{stage} after {step} steps: validation accuracy {accuracy}, n = {result['n']}"
    for name, words in (("log_loss", "log loss"), ("ece", "calibration error"), ("f1", "F1")):
        value = result.get(name)
        if value is not None:
            line += f"; {words} {value:.3f}"
    return line
