"""Callbacks, which receive what a run reports as plain values, and can ask it to stop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keel.types import KeelError, one_line


class StopRun(Exception):
    """A callback raises it to end the run after the current step, with a checkpoint."""


@dataclass(frozen=True, slots=True)
class RunState:
    """The progress of a run.

    `kind` is the kind of the stage, `step` counts its steps from 1 (0 before the first), `metrics`
    and `seconds` are those of the last step.
    """

    folder: Path
    stage: str
    kind: str
    step: int
    steps: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class Callback:
    """The methods that a callback may have; any object with some of them will do."""

    def on_stage(self, state: RunState) -> None:
        """A stage begins or is resumed."""

    def on_step(self, state: RunState) -> None:
        """A step is over and recorded."""

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

    `stop` is called with the reason when one of them raises StopRun, `event` when one is removed
    because what it writes to is closed.

    Raises:
        KeelError: a callback raised something else than StopRun or OSError.
    """

    def __init__(
        self,
        folder: Path,
        callbacks: Iterable[object],
        stop: Callable[[str], None],
        event: Callable[..., None],
    ) -> None:
        self.state = RunState(folder, "", "", 0, 0)
        self._callbacks = list(callbacks)
        self._stop, self._event = stop, event

    def add(self, callback: object) -> None:
        """Call one more, after the others."""
        self._callbacks.append(callback)

    def stage(self, name: str, kind: str, steps: int, done: int) -> None:
        self.state = RunState(self.state.folder, name, kind, done, steps)
        self._call("on_stage", self.state)

    def step(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        self.state = replace(
            self.state, step=step, metrics=MappingProxyType(dict(metrics)), seconds=seconds
        )
        self._call("on_step", self.state)

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
            except StopRun as request:
                self._stop(str(request))
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
