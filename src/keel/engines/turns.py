"""Completions of several turns: their record, whoever leads them, and those that a task leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from keel.engines.sampler import occurrences
from keel.models.chat import ChatEncoder
from keel.models.text import decode, encode_text
from keel.platform.time_limit import raise_if_cancelled
from keel.types import (
    Completion,
    Engine,
    FinishReason,
    Group,
    KeelError,
    Message,
    Prompt,
    Sampling,
    Task,
    text_of,
)


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
        self.states: list[tuple[int, str]] = []
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

    def add_context(self, tokens: Sequence[int], *texts: str, state: str | None = None) -> None:
        """What others said, and its tokens with what the chat template puts around it; and the
        state that the next turn begins at."""
        self.tokens += tokens
        self.log_probs += [0.0] * len(tokens)
        self.written += [False] * len(tokens)
        self.turns += [Message(role="environment", content=text) for text in texts]
        if state is not None:
            self.states.append((len(self.tokens), state))

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
            states=tuple((len(before) + at, state) for at, state in self.states),
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


def generate_multi_turn(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    seed: int,
    *,
    tasks: Mapping[str, Task],
    chat: ChatEncoder,
    max_turns: int,
    reply_role: str = "user",
) -> list[Group]:
    """`n` completions for each prompt, in each of which the policy may have `max_turns` turns.

    When the policy ends a turn before its budget does, the prompt's task is asked for a reply to
    the text so far. The reply's tokens are appended as context (`written` false, log-probability 0)
    after the policy's own, and the policy continues. In a conversation the reply is a message of
    `reply_role`: the chat template closes the policy's turn and opens the next, and the tokens that
    the policy wrote stay. After a prompt of plain text it is text. A task that replies None
    ends the completion, as does the last turn. `sampling.max_tokens` and the engine's context
    limit all tokens of the completion; a reply that does not fit is cut. A special token spelled
    out in a reply is ordinary characters. `text` of a completion is what the policy wrote, `turns`
    has the replies as well. `finish` is that of the last turn, or "length" if a reply used up
    the budget. `states` has those that replies named. An engine that keeps sequences is fed each
    token once.

    Raises KeelError for a reply that the tokenizer cannot encode.
    """
    if max_turns < 1:
        raise KeelError(f"max_turns = {max_turns}: give at least 1")
    if max_turns == 1:
        return engine.sample(prompts, n, sampling, seed)
    with engine.conversation() as sampler:
        groups = sampler.sample(prompts, n, sampling, seed)
        dialogs = []
        written = [completion for group in groups for completion in group.completions]
        for (prompt, _, name), first in zip(conversation_names(prompts, n), written, strict=True):
            limit, context = sampling.max_tokens, engine.capabilities.context
            dialogs.append(Conversation(prompt, name, limit, context))
            dialogs[-1].add_answer(first)
        going = dialogs
        for _ in range(1, max_turns):
            going = [one for one in going if _reply(one, tasks, chat, reply_role) and one.left > 0]
            if not going:
                break
            asked, left = [one.asked() for one in going], [one.left for one in going]
            turns = sample_turns(sampler, asked, left, sampling, seed, chat.tokenizer)
            for one, made in zip(going, turns, strict=True):
                one.add_answer(made)
    whole = [
        first if len(one.turns) == 1 else one.completion()
        for one, first in zip(dialogs, written, strict=True)
    ]
    return [
        Group(group.prompt, tuple(whole[p * n : (p + 1) * n])) for p, group in enumerate(groups)
    ]


def _reply(one: Conversation, tasks: Mapping[str, Task], chat: ChatEncoder, role: str) -> bool:
    """Add the task's reply as context; whether there was one."""
    raise_if_cancelled()
    prompt, left = one.prompt, one.left
    if one.finish == "length" or left <= 0 or prompt.task not in tasks:
        return False
    text = tasks[prompt.task].reply(prompt, one.transcript)
    if text is None:
        return False
    text, state = str(text), getattr(text, "state", None)
    name = f"the reply of task {prompt.task!r} to prompt {prompt.id!r}"
    if isinstance(prompt.content, str):
        found = encode_text(text, name, chat.tokenizer, literal="all", continues=True)
        if len(found) > left:
            text = decode(chat.tokenizer, [found[:left]])[0]
    else:
        turns = [
            Message(
                role=turn["role"] if turn["role"] == "assistant" else role, content=text_of(turn)
            )
            for turn in one.turns
        ]
        messages = [*prompt.content, *turns, Message(role=role, content=text)]
        last = one.tokens[-1] if one.tokens else -1
        found = chat.after(messages, len(messages) - 1, last, name, prompt.tools)
    one.add_context(found[:left], text, state=state)
    if len(found) >= left:
        one.finish = "length"
    return True
