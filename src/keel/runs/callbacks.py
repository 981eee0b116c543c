"""What a run calls while it goes on: callbacks, what they see of it, and what they can ask of it.
Torch-free.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keel.types import KeelError, one_line

RESERVED = ("stage", "step", "total", "eval", "speed", "mfu", "memory", "judge")
"""Beginnings of the names of metrics that not every step records."""
IN_STEP, UNTIL_RECORDED = ("log", "evaluate"), ("checkpoint", "scale_learning_rate")


@dataclass(eq=False)
class Requests:
    """What callbacks ask of the run at one step, of which `metrics` are taken names."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluates: bool = False
    """Whether the stage has something to evaluate on."""
    possible: tuple[str, ...] = ()
    """What can be asked for now."""
    logged: dict[str, float] = field(default_factory=dict)
    checkpoint: bool = False
    evaluate: bool = False
    rate_scale: float = 1.0


def _number(value: Any, what: str) -> float:
    """A number of any type, such as a tensor's, but not one in text. Raises KeelError."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise KeelError(f"{what} is {value!r:.60}: give a number") from None


class RunControl:
    """What a callback can ask of its run, as `state.control`.

    `stop` can be called at any time. The others become part of a step, so that a resumed run ends
    the same: `log` and `evaluate` in `on_step`, `checkpoint` and `scale_learning_rate` also in
    `on_evaluation` after a step.

    Raises:
        KeelError: they are called elsewhere, or with what cannot be used.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self.requests = Requests()

    def log(self, metrics: Mapping[str, float]) -> None:
        """Record numbers with the metrics of this step.

        A name may not begin as one of Keel's metrics does: `probe/accuracy`, but not `eval/probe`.
        """
        requests = self._requests("log")
        taken = {*RESERVED, *(name.partition("/")[0] for name in requests.metrics)}
        for name, value in metrics.items():
            if not isinstance(name, str) or not name or name.partition("/")[0] in taken:
                raise KeelError(
                    f"control.log: {name!r} is not a free name for a metric: choose one that "
                    "begins otherwise than Keel's, such as probe/accuracy"
                )
            requests.logged[name] = _number(value, f"control.log: {name}")

    def checkpoint(self) -> None:
        """Write a checkpoint after this step."""
        self._requests("checkpoint").checkpoint = True

    def evaluate(self) -> None:
        """Evaluate on the validation split after this step, as `evaluation.every` does."""
        requests = self._requests("evaluate")
        if not requests.evaluates:
            raise KeelError(
                "control.evaluate: the stage evaluates nothing: give it a validation "
                "split (evaluation)"
            )
        requests.evaluate = True

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the learning rates of all later steps of this stage.

        The factor is part of the checkpoint, so a resumed run has it without this call.
        """
        requests = self._requests("scale_learning_rate")
        scale = _number(factor, "control.scale_learning_rate: the factor")
        if not 0 <= scale < math.inf:
            raise KeelError(f"control.scale_learning_rate: {scale} is not a finite factor >= 0")
        requests.rate_scale *= scale

    def stop(self, reason: str) -> None:
        """End the run after the current step, with a checkpoint to continue from."""
        self._stop(reason)

    def _requests(self, name: str) -> Requests:
        if name not in self.requests.possible:
            raise KeelError(f"control.{name} cannot be called here: call it in on_step")
        return self.requests


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run.

    `kind` is the kind of the stage, `step` counts its steps from 1 (0 before the first), `metrics`,
    `seconds` and `speeds` (tokens a second, MFU: docs/metrics.md) are those of the last step.
    `control` takes requests; all else is a copy.
    """

    folder: Path
    stage: str
    kind: str
    step: int
    steps: int
    control: RunControl = field(repr=False, compare=False)
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    speeds: Mapping[str, float] = field(default_factory=dict)


class Callback:
    """The methods that a callback may have; any object with some of them will do."""

    def on_stage(self, state: RunState) -> None:
        """A stage begins or is resumed."""

    def on_step(self, state: RunState) -> None:
        """A step is over, before its evaluation; it can be asked for more (`state.control`)."""

    def on_record(self, state: RunState) -> None:
        """The step is recorded: its metrics are complete, and in the run folder."""

    def on_evaluation(self, state: RunState, result: Mapping[str, Any]) -> None:
        """The validation split was evaluated."""

    def on_checkpoint(self, state: RunState, checkpoint: Path) -> None:
        """A checkpoint was written."""

    def on_note(self, text: str) -> None:
        """One line of information."""


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raise KeelError for an object that has no method of a callback, or a class."""
    names = [name for name in vars(Callback) if name.startswith("on_")]
    for one in callbacks:
        own = [name for name in names if callable(getattr(one, name, None))]
        if isinstance(one, Callback):
            own = [name for name in own if getattr(type(one), name) is not vars(Callback)[name]]
        if not own or isinstance(one, type):
            raise KeelError(
                f"callback {one!r} would never be called: pass an object with one of the methods "
                f"{', '.join(names)} (keel.Callback)"
            )


class Callbacks:
    """Calls the callbacks of a run, in order.

    `stop` is called with the reason when one of them asks to stop, `event` when one is removed
    because what it writes to is closed.

    Raises:
        KeelError: a callback raised something else than OSError.
    """

    def __init__(
        self,
        folder: Path,
        callbacks: Iterable[object],
        stop: Callable[[str], None],
        event: Callable[..., None],
    ) -> None:
        self.state = RunState(folder, "", "", 0, 0, RunControl(stop))
        self._callbacks = list(callbacks)
        self._event = event

    @property
    def requests(self) -> Requests:
        """What was asked of the last step."""
        return self.state.control.requests

    def add(self, callback: object) -> None:
        """Call one more, after the others."""
        self._callbacks.append(callback)

    def stage(self, name: str, kind: str, steps: int, done: int) -> None:
        self.state = RunState(self.state.folder, name, kind, done, steps, self.state.control)
        self.state.control.requests = Requests()
        self._call("on_stage", self.state)

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        seconds: float,
        speeds: Mapping[str, float] = MappingProxyType({}),
        *,
        evaluates: bool,
    ) -> Requests:
        """What is asked of a step that is over; what is logged is added to its metrics."""
        asked = Requests(metrics, evaluates, (*IN_STEP, *UNTIL_RECORDED))
        self.state.control.requests = asked
        self._taken(step, metrics, seconds, speeds)
        self._call("on_step", self.state)
        asked.possible = UNTIL_RECORDED
        metrics |= asked.logged
        return asked

    def record(
        self, step: int, metrics: Mapping[str, float], seconds: float, speeds: Mapping[str, float]
    ) -> None:
        self.requests.possible = ()
        self._taken(step, metrics, seconds, speeds)
        self._call("on_record", self.state)

    def _taken(
        self, step: int, metrics: Mapping[str, float], seconds: float, speeds: Mapping[str, float]
    ) -> None:
        self.state = replace(
            self.state,
            step=step,
            metrics=MappingProxyType(dict(metrics)),
            seconds=seconds,
            speeds=MappingProxyType(dict(speeds)),
        )

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        self.state = replace(self.state, step=step)
        self._call("on_evaluation", self.state, copy.deepcopy(dict(result)))

    def checkpoint(self, step: int, path: Path) -> None:
        self._call("on_checkpoint", replace(self.state, step=step), path)

    def note(self, text: str) -> None:
        self._call("on_note", text)

    def _call(self, method: str, *values: Any) -> None:
        for callback in tuple(self._callbacks):
            try:
                getattr(callback, method, _nothing)(*values)
            except OSError as error:
                self._callbacks.remove(callback)
                self._event("output_lost", why=error.strerror or str(error))
            except KeelError:
                raise
            except Exception as error:
                what = one_line(error, named=True)
                name = f"{type(callback).__name__}.{method}"
                raise KeelError(f"callback {name} raised {what}: fix it") from error


def _nothing(*_: object) -> None: ...
