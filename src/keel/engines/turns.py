"""The turns of a completion, whoever leads its conversation: a task or a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keel.engines.sampler import occurrences
from keel.models.text import decode
from keel.types import Completion, Engine, FinishReason, Message, Prompt, Sampling, text_of


class Conversation:
    """One completion's turns: what the policy wrote, and the context that arrived in between.

    `name` is unique in the call of the engine. `first` are the tokens before the turns, `limit` is
    that of all tokens after them, and `context` the engine's.
    """

    def __init__(self, prompt: Prompt, name: str, limit: int, context: int | None) -> None:
        self.prompt, self.name = prompt, name
        self.limit, self.context = limit, context
        self.first: list[int] = list(prompt.tokens)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.written: list[bool] = []
        self.turns: list[Message] = []
        self.finish: FinishReason = "eos"
        """That of the policy's last turn."""
        self.count = 0
        """The policy's turns."""

    @property
    def left(self) -> int:
        """How many tokens may follow."""
        room = self.limit if self.context is None else self.context - len(self.first)
        return min(self.limit, room) - len(self.tokens)

    def asked(self, new: Sequence[int] = ()) -> Prompt:
        """The conversation so far, and new tokens, as a prompt whose id names the turn."""
        tokens = (*self.first, *self.tokens, *new)
        return replace(self.prompt, id=f"{self.name}/{self.count}", tokens=tokens)

    @property
    def transcript(self) -> str:
        """The text of all turns."""
        return "".join(map(text_of, self.turns))

    def add_answer(self, made: Completion) -> None:
        """A turn of the policy's."""
        self.tokens += made.tokens.tolist()
        self.log_probs += made.log_probs.tolist()
        self.written += made.written.tolist()
        self.turns.append(Message(role="assistant", content=made.text))
        self.finish = made.finish
        self.count += 1

    def add_context(self, tokens: Sequence[int], *texts: str) -> None:
        """What others said, and its tokens with what the chat template puts around it."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.written += [False] * len(tokens)
        self.turns += [Message(role="environment", content=text) for text in texts]

    def completion(self, before: Sequence[int] = (), **fields: Any) -> Completion:
        """All turns as one completion, after some context; `fields` are its other fields."""
        own = [text_of(turn) for turn in self.turns if turn["role"] == "assistant"]
        record: dict[str, Any] = {"finish": self.finish, **fields}
        return Completion(
            tokens=np.array([*before, *self.tokens], dtype=np.int64),
            log_probs=np.array([0.0] * len(before) + self.log_probs, dtype=np.float32),
            written=np.array([False] * len(before) + self.written, dtype=np.bool_),
            text="".join(own),
            turns=tuple(self.turns),
            **record,
        )


def conversation_names(prompts: Sequence[Prompt], n: int) -> Iterator[tuple[Prompt, int, str]]:
    """The prompt, the index in its group, and the name of each conversation."""
    for prompt, time in zip(prompts, occurrences([p.id for p in prompts]), strict=True):
        for index in range(n):
            yield prompt, index, f"{prompt.id}/{time}/{index}"


def sample_turns(
    engine: Engine,
    prompts: Sequence[Prompt],
    budgets: Sequence[int],
    sampling: Sampling,
    seed: int,
    tokenizer: Any,
) -> list[Completion]:
    """The policy's next turn in each conversation, within its budget.

    One call samples them all with the largest budget; each is cut at its own, where the engine
    would have stopped.
    """
    groups = engine.sample(prompts, 1, replace(sampling, max_tokens=max(budgets)), seed)
    return [
        _cut(group.completions[0], budget, tokenizer)
        for group, budget in zip(groups, budgets, strict=True)
    ]


def _cut(completion: Completion, length: int, tokenizer: Any) -> Completion:
    """The first `length` tokens of a completion."""
    if len(completion) <= length:
        return completion
    return Completion(
        tokens=completion.tokens[:length],
        log_probs=completion.log_probs[:length],
        written=completion.written[:length],
        finish="length",
        text=decode(tokenizer, [completion.tokens[:length].tolist()])[0],
    )
