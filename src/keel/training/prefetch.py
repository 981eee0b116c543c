"""The next step's rollouts, sampled while this one is trained on: one step off policy.

They are sampled with the weights from before the update, so that they are a function of recipe and
seed and not of time. A checkpoint holds those that no step has trained on yet, so that a resumed
run does not sample or score them again.
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
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Step

PENDING = "pending.json"
PATIENCE = 30.0
"""Seconds to wait for cancelled sampling: a decode step, a prefill, a reply are shorter."""


@dataclass(frozen=True, eq=False)
class Pending:
    """Rollouts for a step."""

    step: int
    rollouts: Rollouts


class RolloutPrefetcher:
    """Samples the rollouts of steps; with `ahead` those of the next step too, while one trains.

    `sample` gives those of a step, with the engine's weights. `pending` are those of the next step
    that a checkpoint held.
    """

    def __init__(
        self, sample: Callable[[int], Rollouts], ahead: bool, pending: Pending | None = None
    ) -> None:
        self.sample = sample
        self.ahead = ahead
        self.pending = pending

    def __call__(self, step: int) -> Rollouts:
        """The rollouts of a step, sampled before or now."""
        pending, self.pending = self.pending, None
        if pending is not None and pending.step == step:
            return pending.rollouts
        return self.sample(step)

    @contextmanager
    def prefetch(self, step: int, last: int) -> Iterator[None]:
        """Sample the rollouts of a step, unless it is after the `last`, while the block runs.

        Raises what sampling raises, after the block; an error in the block cancels the sampling.
        In either case no thread is left, except one that hangs in a task's or a user's code.
        """
        if not self.ahead or step > last:
            yield
            return
        thread = _Thread(lambda: self.sample(step))
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
    """Samples with the caller's number of torch threads, which decides the last bits."""

    def __init__(self, sample: Callable[[], Rollouts]) -> None:
        super().__init__(name="keel-ahead", daemon=True)
        self._sample = sample
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

    def result(self) -> Rollouts:
        """Wait for the rollouts. Raises what sampling raised."""
        self.join()
        if self._error is not None:
            raise self._error
        assert self._rollouts is not None
        return self._rollouts

    def give_up(self) -> None:
        """Cancel the sampling (`raise_if_cancelled`), and wait `PATIENCE` for its end."""
        self._cancelled.set()
        self.join(PATIENCE)


# ---------------------------------------------------------------- to the disk and back


def as_kept(rollouts: Rollouts) -> Rollouts:
    """What a step and its records need of rollouts, in a form that a checkpoint can hold.

    Prompts and completions lose their columns, which only rewards read; what rewards
    logged becomes plain values.
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
    rollouts = pending.rollouts
    state = {
        "step": pending.step,
        "groups": [_group(group) for group in rollouts.groups],
        "results": [[asdict(result) for result in judged] for judged in rollouts.results],
        "greedy": rollouts.greedy,
        # As text: keys that a user chose must not meet those of the state.
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
        results=tuple(tuple(_read_result(one) for one in judged) for judged in state["results"]),
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


def _read_result(state: Mapping[str, Any]) -> RewardResult:
    steps = tuple(Step(**step) for step in state["steps"])
    return RewardResult(
        state["reward"], state["components"], steps, state["outcome"], state["unshaped"]
    )
