"""The completions of a step, as the arguments of a reward function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from keel.graders.stated import before_stop
from keel.rewards.logs import Log
from keel.rewards.registry import RESERVED, NamedReward
from keel.types import Completion, Group, Message, Prompt, text_of


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """Completions of a step with the prompt of each, and their `places` among all of the step.

    `names` are the columns of the step's prompts.
    """

    prompts: tuple[Prompt, ...]
    completions: tuple[Completion, ...]
    places: tuple[int, ...]
    names: tuple[str, ...]
    step: int

    @classmethod
    def of(
        cls, groups: Sequence[Group], step: int, names: tuple[str, ...], first: int = 0
    ) -> RewardBatch:
        """The completions of groups, the first of which is number `first` of the step."""
        pairs = [(group.prompt, one) for group in groups for one in group.completions]
        places = tuple(range(first, first + len(pairs)))
        return cls(tuple(p for p, _ in pairs), tuple(c for _, c in pairs), places, names, step)

    def __len__(self) -> int:
        return len(self.completions)

    def select(self, indices: Sequence[int]) -> RewardBatch:
        """Some of them, in this order."""
        return RewardBatch(
            tuple(self.prompts[i] for i in indices),
            tuple(self.completions[i] for i in indices),
            tuple(self.places[i] for i in indices),
            self.names,
            self.step,
        )


def without_stop(group: Group, stop: Sequence[str]) -> Group:
    """The group with the texts of its completions up to the stop string that ended them."""

    def cut(one: Completion) -> Completion:
        *turns, last = one.conversation
        written = text_of(last)
        left = before_stop(written, stop)
        if one.finish != "stop" or left == written or last["role"] != "assistant":
            return one
        changed: Message = {**last, "content": left}
        text = one.text.removesuffix(written) + left
        return replace(one, text=text, turns=(*turns, changed) if one.turns else ())

    return replace(group, completions=tuple(map(cut, group.completions)))


def column_names(prompts: Iterable[Prompt | Completion]) -> tuple[str, ...]:
    """Every column that some prompt, or completion, has."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return tuple(name for name in names if name not in RESERVED)


def arguments(function: NamedReward, batch: RewardBatch, log: Log) -> dict[str, Any]:
    """The keyword arguments of a call: the bound options, and what the function wants.

    Of each column a value for each completion, None if its prompt has none.
    """
    any_tools = any(p.tools for p in batch.prompts)
    given: dict[str, Any] = {
        **dict.fromkeys(function.required, [None] * len(batch)),
        **{
            name: [
                c.columns.get(name, p.columns.get(name))
                for p, c in zip(batch.prompts, batch.completions, strict=True)
            ]
            for name in (*batch.names, *column_names(batch.completions))
        },
        # As the chat template gets them, also if the data have JSON text.
        **({"tools": [list(p.tools) for p in batch.prompts]} if any_tools else {}),
        "prompts": [
            p.content if isinstance(p.content, str) else _turns(p.content) for p in batch.prompts
        ],
        # What the policy wrote: a reply of the environment may spell the answer.
        "completions": [
            c.text
            if isinstance(p.content, str)
            else [turn for turn in _turns(c.conversation) if turn["role"] == "assistant"]
            for p, c in zip(batch.prompts, batch.completions, strict=True)
        ],
        "completion_ids": [c.tokens[c.written].tolist() for c in batch.completions],
        "openings": [p.opening for p in batch.prompts],
        "turns": [_turns(c.conversation) for c in batch.completions],
        "trainer_state": SimpleNamespace(global_step=batch.step),
        "log_extra": log.extra,
        "log_metric": log.metric,
        "log_summary": log.summarise,
    }
    # Copies: what one function does to its arguments, no other sees, and no later step.
    return {
        **function.options,
        **{name: _copy(value) for name, value in given.items() if function.wants(name)},
    }


def _turns(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [dict(turn) for turn in messages]


def _copy(value: Any) -> Any:
    """Lists and dicts copied all the way down; what else there is stays the same object."""
    if isinstance(value, list):
        return [_copy(one) for one in value]
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return value
