"""The rewards of a step asked for while its last completions are still being drawn.

A step's groups, in the order of its prompts, are cut into at most `PARTS` parts of equal numbers of
groups. A part is asked about once all its groups are there and all parts before it have been begun.
So what a function is called with, and in which order, is a function of the step and not of time.
Functions that are not async are called one at a time, as ever; coroutines of several parts go on
side by side, in one event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from keel.rewards.batch import RewardBatch, column_names
from keel.rewards.calls import BatchSlice, RewardCall
from keel.rewards.executor import LOOK
from keel.runs.cancel import Cancelled, GivesUp, raise_if_cancelled
from keel.types import Group, Prompt

PARTS = 8
"""Calls of each function in a step, at the most: a call may do its work side by side, and does it
the better the more it gets, so that many small ones could take longer than they save."""


class Failed(BaseException):
    """A part could not be judged: nothing more needs to be drawn. `Overlap` raises what it was."""


class Overlap:
    """A step being judged while it is drawn. To be entered; on leaving, no thread of it is left but
    that of a function which hangs (`rewards.executor`).

    Leaving with an error of whoever draws gives up what is under way.
    """

    def __init__(
        self, ask: Callable[[BatchSlice, GivesUp], RewardCall], prompts: Sequence[Prompt], step: int
    ) -> None:
        self._ask = ask
        self._step = step
        self._names = column_names(prompts)
        self._size = max(1, -(-len(prompts) // PARTS))
        self._groups: list[Group | None] = [None] * len(prompts)
        self._first = self._before = 0
        """Groups that have gone into parts, and the completions in them."""
        self._parts: list[_Judged] = []
        self._given_up = False

    def add(self, place: int, group: Group) -> None:
        """Take over a group by the place of its prompt.

        Raises Failed where those before could not be judged.
        """
        self._groups[place] = group
        if self._failed_before(len(self._parts)):
            raise Failed
        while self._first < len(self._groups):
            ready = [g for g in self._groups[self._first :][: self._size] if g is not None]
            if len(ready) < min(self._size, len(self._groups) - self._first):
                return
            self._begin(ready)

    def asked(self) -> list[RewardCall]:
        """The outputs of each part, once all groups are in.

        Raises what the first part raised that could not be judged.
        """
        if self._first < len(self._groups):
            raise ValueError("not every group was handed over")
        while self._running():
            raise_if_cancelled()
        self._raise()
        return [part.asking for part in self._parts]

    def __enter__(self) -> Overlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._given_up = kind is not None and kind is not Failed
        while self._running():
            pass
        if kind is Failed:
            self._raise()

    def _begin(self, groups: Sequence[Group]) -> None:
        """Ask about a part in a thread of its own, when the one before has been begun."""
        number = len(self._parts)
        batch = RewardBatch(
            tuple(group.prompt for group in groups for _ in group.completions),
            tuple(completion for group in groups for completion in group.completions),
            self._step,
        )

        def given_up() -> bool:
            return self._given_up or self._failed_before(number)

        asking = self._ask(BatchSlice(batch, self._before, self._names), given_up)
        turn = self._parts[-1].begun if self._parts else None
        self._first += len(groups)
        self._before += len(batch)
        self._parts.append(_Judged(asking, turn, given_up))
        self._parts[-1].thread.start()

    def _failed_before(self, number: int) -> bool:
        """Whether a part before this one failed, which is then what is reported."""
        return any(part.error is not None for part in self._parts[:number])

    def _running(self) -> bool:
        """Wait a while for the threads; whether one still goes on."""
        for part in self._parts:
            if part.thread.is_alive():  # one that could not be started is not
                part.thread.join(LOOK)
                return True
        return False

    def _raise(self) -> None:
        for part in self._parts:
            if part.error is not None:
                raise part.error


class _Judged:
    """A part, and the thread that asks about it."""

    def __init__(self, asking: RewardCall, turn: threading.Event | None, given_up: GivesUp) -> None:
        self.asking = asking
        self.error: BaseException | None = None
        self.begun = threading.Event()
        self._turn, self._given_up = turn, given_up
        self.thread = threading.Thread(target=self._run, name="keel-overlap", daemon=True)

    def _run(self) -> None:
        try:
            # Whoever is before lets go in any case.
            if self._turn is not None:
                self._turn.wait()
            if self._given_up():
                return
            self.asking.begin()
            self.begun.set()
            self.asking.end()
        except Cancelled:
            self.asking.cancel()
        except BaseException as error:
            self.error = error
            self.asking.cancel()
        finally:
            self.begun.set()
