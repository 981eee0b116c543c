"""The rollouts of steps, sampled before they are trained on.

`rollout.async_level` is how many steps ahead: the rollouts of step n + level are sampled while step
n is trained on, with the weights from before its update, so that no completion is trained on more
than `level` updates after the weights that it was begun with. Which weights those are is a function
of the step and not of time, and prompts are taken in the order of the steps: a run is a function of
recipe and seed. A checkpoint waits for what is being sampled, and holds the rollouts that no step
has trained on yet, so that a resumed run does not sample or score them again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keel.algorithms.spec import Algorithm
from keel.platform.time_limit import cancelled_by, raise_if_cancelled
from keel.runs import checkpoint
from keel.runs.values import plain
from keel.training.rollout import Rollouts, Sampler, collect, expected_answer, take
from keel.types import (
    Completion,
    Group,
    KeelError,
    Prompt,
    RewardResult,
    Step,
)

PENDING = "pending.json"
PATIENCE = 30.0
"""Seconds to wait for cancelled sampling: a decode step, a prefill, a reply are shorter."""
POLL = 0.1
"""Seconds between two checks whether sampling is cancelled."""


Pending = Mapping[int, Rollouts]
"""Rollouts that no step has trained on yet, by their step."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """A step's place among those that are sampled at once: rewards are called step by step."""

    before: threading.Event
    done: threading.Event

    def wait(self) -> None:
        """Until the rewards of the steps before have been called."""
        while not self.before.wait(POLL):
            raise_if_cancelled()


Sample = Callable[[], Rollouts]
Begin = Callable[[int, Ticket], Sample]
"""Takes the prompts of a step, in the order of the steps; returns what samples and scores them."""


def begin_alone(sampler: Sampler, algorithm: Algorithm, step: int, turn: Ticket) -> Sample:
    """A step that is sampled while no other is, with the engine's weights."""
    return partial(collect, sampler, algorithm, step)


def begin_pinned(sampler: Sampler, algorithm: Algorithm, step: int, turn: Ticket) -> Sample:
    """A step that is sampled with the weights of now, whatever the engine takes over meanwhile."""
    first = take(sampler.stream, sampler.config.prompts_per_step)
    sampler = replace(sampler, engine=sampler.engine.pinned(), before_rewards=turn.wait)
    return partial(collect, sampler, algorithm, step, first)


class RolloutPrefetcher:
    """Samples the rollouts of steps, `level` steps ahead.

    With `at_once` sampling goes on while the engines take over new weights, and several steps are
    sampled at once; else a step's update ends only when the rollouts of the next are there.
    `pending` are those that a checkpoint held.
    """

    def __init__(
        self,
        begin: Begin,
        level: int,
        at_once: bool = False,
        pending: Pending | None = None,
    ) -> None:
        self._begin = begin
        self.level = level
        self._at_once = at_once
        self._kept = dict(pending or {})
        self._running: dict[int, _Thread] = {}
        self._last_turn = threading.Event()
        self._last_turn.set()

    @property
    def pending(self) -> Pending:
        """The rollouts that no step has trained on yet, once all are there."""
        with self._ended_on_error():
            for step in list(self._running):
                self._finish(step)
        return dict(sorted(self._kept.items()))

    def __call__(self, step: int, last: int) -> Rollouts:
        """The rollouts of a step, sampled before or now; those of later ones are begun."""
        if not self._at_once:
            kept = self._kept.pop(step, None)
            return self._now(step) if kept is None else kept
        with self._ended_on_error():
            for number in range(step, min(step + self.level - 1, last) + 1):
                self._start(number)
            self._finish(step)
        return self._kept.pop(step)

    @contextmanager
    def prefetch(self, step: int, last: int) -> Iterator[None]:
        """Begin the rollouts that are due while a step trains, unless they are after the `last`.

        Raises what sampling raises, after the block or when its step comes; an error in the block
        cancels the sampling. In either case no thread is left, except one that hangs in a task's or
        a user's code.
        """
        with self._ended_on_error():
            if 0 < self.level <= last - step:
                self._start(step + self.level)
            yield
            if not self._at_once:
                for number in list(self._running):
                    self._finish(number)

    def close(self) -> None:
        """Cancel what is being sampled."""
        running, self._running = list(self._running.values()), {}
        for thread in running:
            thread.cancel()
        for thread in running:
            thread.join(PATIENCE)

    def _now(self, step: int) -> Rollouts:
        sample, turn = self._work(step)
        try:
            return sample()
        finally:
            turn.done.set()

    def _start(self, step: int) -> None:
        if step not in self._kept and step not in self._running:
            sample, turn = self._work(step)
            thread = self._running[step] = _Thread(sample, turn)
            thread.start()

    def _work(self, step: int) -> tuple[Sample, Ticket]:
        turn = Ticket(self._last_turn, threading.Event())
        self._last_turn = turn.done
        return self._begin(step, turn), turn

    def _finish(self, step: int) -> None:
        if step in self._running:
            self._kept[step] = as_kept(self._running[step].result())
            del self._running[step]

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


class _Thread(threading.Thread):
    """Samples with the caller's number of torch threads, which decides the last bits."""

    def __init__(self, sample: Sample, turn: Ticket) -> None:
        super().__init__(name="keel-ahead", daemon=True)
        self._sample, self._turn = sample, turn
        self._threads = torch.get_num_threads()
        self._rollouts: Rollouts | None = None
        self._error: BaseException | None = None
        self._cancelled = threading.Event()

    def run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            with cancelled_by(self._cancelled):
                self._rollouts = self._sample()
        except BaseException as error:
            self._error = error
        finally:
            self._turn.done.set()

    def result(self) -> Rollouts:
        """Wait for the rollouts. Raises what sampling raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._rollouts is not None
        return self._rollouts

    def cancel(self) -> None:
        """End the sampling at its next check (`raise_if_cancelled`)."""
        self._cancelled.set()


# ---------------------------------------------------------------- to the disk and back


def as_kept(rollouts: Rollouts) -> Rollouts:
    """What a step and its records need of rollouts, in a form that a checkpoint can hold.

    Completions lose their columns, which only rewards read, and prompts theirs but the answer,
    which is recorded; what rewards logged becomes plain values.
    """
    return replace(
        rollouts,
        groups=tuple(
            Group(_bare(group.prompt), tuple(replace(c, columns={}) for c in group.completions))
            for group in rollouts.groups
        ),
        extras={name: plain(values) for name, values in rollouts.extras.items()},
    )


def save_pending(folder: Path, pending: Pending) -> None:
    """Write rollouts, as they are kept, into a checkpoint."""
    states = [_state(step, rollouts) for step, rollouts in pending.items()]
    checkpoint.save_json(folder / PENDING, {"pending": states})


def _state(step: int, rollouts: Rollouts) -> dict[str, Any]:
    return {
        "step": step,
        "groups": [_group(group) for group in rollouts.groups],
        "results": [[asdict(result) for result in judged] for judged in rollouts.results],
        "greedy": rollouts.greedy,
        # As text: keys that a user chose must not meet those of the state.
        "extras": json.dumps(rollouts.extras),
        "metrics": rollouts.metrics,
    }


def read_pending(folder: Path | None) -> Pending:
    """The rollouts that a checkpoint holds."""
    if folder is None or not (folder / PENDING).exists():
        return {}
    state = checkpoint.load_json(folder / PENDING)
    try:
        return {one["step"]: _read(one) for one in state["pending"]}
    except (KeyError, TypeError, ValueError) as error:
        raise KeelError(
            f"{folder / PENDING} was written by another version of Keel ({error}): resume with "
            "that version"
        ) from error


def _read(state: Mapping[str, Any]) -> Rollouts:
    return Rollouts(
        groups=tuple(_read_group(group) for group in state["groups"]),
        results=tuple(tuple(_read_result(one) for one in judged) for judged in state["results"]),
        greedy=state["greedy"],
        extras=json.loads(state["extras"]),
        metrics=state["metrics"],
    )


def _bare(prompt: Prompt) -> Prompt:
    # As JSON reads it back; the order of keys stays, since a template may write it.
    content, tools = json.loads(json.dumps((prompt.content, prompt.tools), default=plain))
    answer = expected_answer(prompt)
    columns = {} if answer is None else {"answer": answer}
    return replace(prompt, content=content, columns=columns, tools=tuple(tools))


def _group(group: Group) -> dict[str, Any]:
    return {
        "prompt": {
            **{name: getattr(group.prompt, name) for name in Prompt.__slots__},
            "content": json.dumps(group.prompt.content),
            "tools": json.dumps(group.prompt.tools),
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
    prompt["tools"] = tuple(json.loads(prompt.get("tools", "[]")))
    completions = [
        {**one, "turns": tuple(json.loads(one["turns"]))} for one in state["completions"]
    ]
    return Group(Prompt(**prompt), tuple(Completion(**one) for one in completions))


def _read_result(state: Mapping[str, Any]) -> RewardResult:
    steps = tuple(Step(**step) for step in state["steps"])
    return RewardResult(
        state["reward"], state["components"], steps, state["outcome"], state["unshaped"]
    )
