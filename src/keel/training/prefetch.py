"""The next step's rollouts, sampled while this one is trained on: one step off policy.

They are sampled while an update runs, with the weights from before it, so that they are
a function of recipe and seed and not of time. A checkpoint holds those that no step has learned
from yet: nothing is drawn, and no reward asked, a second time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keel.runs import checkpoint
from keel.runs.values import plain
from keel.runs.watchdog import cancelled_by
from keel.training.rollout import Rollouts
from keel.types import Completion, Group, KeelError, Prompt, Step, Verdict

PENDING = "pending.json"
PATIENCE = 30.0
"""Seconds that cancelled sampling gets to end: a decode step, a prefill, a reply are shorter."""


@dataclass(frozen=True, eq=False)
class Pending:
    """Rollouts that a step is to learn from."""

    step: int
    rollouts: Rollouts


class RolloutPrefetcher:
    """Draws the rollouts of steps, where `ahead` one step before they are wanted.

    `draw` gives those of a step, with the weights that the engine has. `pending` are those of the
    next step, where they are there.
    """

    def __init__(
        self, draw: Callable[[int], Rollouts], ahead: bool, pending: Pending | None = None
    ) -> None:
        self.draw = draw
        self.ahead = ahead
        self.pending = pending

    def __call__(self, step: int) -> Rollouts:
        """The rollouts of a step, drawn before or now."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.step == step:
            return pending.rollouts
        return self.draw(step)

    @contextmanager
    def prefetch(self, step: int, last: int) -> Iterator[None]:
        """Sample the rollouts of a step, unless it is after the `last`, while the block lasts.

        Raises what the drawing raises, once the block is done; an error of the block's own ends the
        drawing. In either case no thread is left but one that hangs in code that is not Keel's.
        """
        if not self.ahead or step > last:
            yield
            return
        thread = _Thread(lambda: self.draw(step))
        thread.start()
        try:
            yield
        except BaseException:
            thread.give_up()
            raise
        try:
            self.pending = Pending(step, as_kept(thread.result()))
        except BaseException:
            thread.give_up()
            raise


class _Thread(threading.Thread):
    """Draws with as many threads of torch as whoever made it: how many decides the last bits."""

    def __init__(self, draw: Callable[[], Rollouts]) -> None:
        super().__init__(name="keel-ahead", daemon=True)
        self._draw = draw
        self._threads = torch.get_num_threads()
        self._rollouts: Rollouts | None = None
        self._error: BaseException | None = None
        self._cancelled = threading.Event()

    def run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            with cancelled_by(self._cancelled):
                self._rollouts = self._draw()
        except BaseException as error:
            self._error = error

    def result(self) -> Rollouts:
        """Wait for the rollouts. Raises what drawing them raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._rollouts is not None
        return self._rollouts

    def give_up(self) -> None:
        """Cancel the sampling (`raise_if_cancelled`), and wait until it has ended.

        A thread that hangs in code that is not Keel's, as in a task's, is not waited for longer.
        """
        self._cancelled.set()
        self.join(PATIENCE)


# ---------------------------------------------------------------- to the disk and back


def as_kept(rollouts: Rollouts) -> Rollouts:
    """All that a step and its records need of rollouts, and a checkpoint can hold.

    Of prompts that leaves out the columns, which only rewards read, and they have; what rewards
    recorded becomes what the table of rollouts will have.
    """
    return replace(
        rollouts,
        groups=tuple(Group(_bare(group.prompt), group.completions) for group in rollouts.groups),
        extras={name: plain(values) for name, values in rollouts.extras.items()},
    )


def save_pending(folder: Path, pending: Pending) -> None:
    """Write rollouts, as they are kept, into a checkpoint."""
    rollouts = pending.rollouts
    state = {
        "step": pending.step,
        "groups": [_group(group) for group in rollouts.groups],
        "verdicts": [[asdict(verdict) for verdict in judged] for judged in rollouts.verdicts],
        "greedy": rollouts.greedy,
        # Plain already, and whatever keys a user gave: text, for state has keys of its own.
        "extras": json.dumps(rollouts.extras),
        "metrics": rollouts.metrics,
    }
    checkpoint.save_json(folder / PENDING, state)


def read_pending(folder: Path | None) -> Pending | None:
    """The rollouts that a checkpoint holds, if any."""
    if folder is None or not (folder / PENDING).exists():
        return None
    state = checkpoint.load_json(folder / PENDING)
    try:
        return Pending(state["step"], _read(state))
    except (KeyError, TypeError, ValueError) as error:
        raise KeelError(
            f"{folder / PENDING} was written by another version of Keel ({error}): resume with "
            "that version"
        ) from error


def _read(state: Mapping[str, Any]) -> Rollouts:
    return Rollouts(
        groups=tuple(_read_group(group) for group in state["groups"]),
        verdicts=tuple(tuple(_read_verdict(one) for one in judged) for judged in state["verdicts"]),
        greedy=state["greedy"],
        extras=json.loads(state["extras"]),
        metrics=state["metrics"],
    )


def _bare(prompt: Prompt) -> Prompt:
    content = prompt.content
    if not isinstance(content, str):
        content = plain(list(content))
    return replace(prompt, content=content, columns={})


def _group(group: Group) -> dict[str, Any]:
    return {
        "prompt": {
            **{name: getattr(group.prompt, name) for name in Prompt.__slots__},
            "content": json.dumps(group.prompt.content),
        },
        "completions": [
            {
                **{name: getattr(completion, name) for name in Completion.__slots__},
                "turns": json.dumps(completion.turns),
            }
            for completion in group.completions
        ],
    }


def _read_group(state: Mapping[str, Any]) -> Group:
    prompt = {**state["prompt"], "content": json.loads(state["prompt"]["content"])}
    completions = [
        {**one, "turns": tuple(json.loads(one["turns"]))} for one in state["completions"]
    ]
    return Group(Prompt(**prompt), tuple(Completion(**one) for one in completions))


def _read_verdict(state: Mapping[str, Any]) -> Verdict:
    steps = tuple(Step(**step) for step in state["steps"])
    return Verdict(state["reward"], state["components"], steps, state["outcome"], state["unshaped"])
