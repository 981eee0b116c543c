"""Conversations of several turns between the policy and its task, within one completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keel.engines.sampler import occurrences
from keel.models.chat import ChatEncoder
from keel.models.text import decode, encode_text
from keel.platform.time_limit import raise_if_cancelled
from keel.types import (
    Completion,
    Engine,
    Group,
    KeelError,
    Message,
    Prompt,
    Sampling,
    Task,
    text_of,
)


@dataclass(frozen=True, eq=False)
class _Conversation:
    """One conversation: its prompt, a name that is unique in the call, and the turns so far."""

    prompt: Prompt
    name: str
    budget: int
    completion: Completion

    @property
    def left(self) -> int:
        return self.budget - len(self.completion)


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
    has the replies as well. `finish` is that of the last turn, or "length" where a reply used up
    the budget. An engine that keeps sequences is fed each token once.

    Raises KeelError for a reply that the tokenizer cannot encode.
    """
    if max_turns < 1:
        raise KeelError(f"max_turns = {max_turns}: give at least 1")
    if max_turns == 1:
        return engine.sample(prompts, n, sampling, seed)
    with engine.conversation() as sampler:
        groups = sampler.sample(prompts, n, sampling, seed)
        dialogs = _begin(groups, sampling, engine.capabilities.context)
        going = list(range(len(dialogs)))
        for turn in range(1, max_turns):
            replies = {number: _reply(dialogs[number], tasks) for number in going}
            answered = {number: text for number, text in replies.items() if text is not None}
            for number, text in answered.items():
                dialogs[number] = _with_reply(dialogs[number], text, chat, reply_role)
            going = [number for number in answered if dialogs[number].left > 0]
            if not going:
                break
            turns = _next_turns(
                sampler, [dialogs[number] for number in going], turn, sampling, seed, chat
            )
            for number, words in zip(going, turns, strict=True):
                dialogs[number] = _extended(dialogs[number], words, words.text)
    return [
        Group(
            group.prompt,
            tuple(dialog.completion for dialog in dialogs[p * n : (p + 1) * n]),
        )
        for p, group in enumerate(groups)
    ]


def _begin(groups: Sequence[Group], sampling: Sampling, context: int | None) -> list[_Conversation]:
    """The conversations after the first turn, in order of prompts and of their groups."""
    dialogs = []
    times = occurrences([group.prompt.id for group in groups])
    for group, time in zip(groups, times, strict=True):
        prompt = group.prompt
        room = sampling.max_tokens if context is None else context - len(prompt.tokens)
        for index, completion in enumerate(group.completions):
            name = f"{prompt.id}/{time}/{index}"
            dialogs.append(_Conversation(prompt, name, min(sampling.max_tokens, room), completion))
    return dialogs


def _reply(dialog: _Conversation, tasks: Mapping[str, Task]) -> str | None:
    """The task's reply; None where the conversation is over."""
    raise_if_cancelled()
    if dialog.completion.finish == "length" or dialog.left <= 0 or dialog.prompt.task not in tasks:
        return None
    return tasks[dialog.prompt.task].reply(dialog.prompt, dialog.completion.transcript)


def _with_reply(dialog: _Conversation, text: str, chat: ChatEncoder, role: str) -> _Conversation:
    """The conversation with the task's reply as context."""
    prompt, so_far = dialog.prompt, dialog.completion
    name = f"the reply of task {prompt.task!r} to prompt {prompt.id!r}"
    if isinstance(prompt.content, str):
        found = encode_text(text, name, chat.tokenizer, literal="all", continues=True)
        if len(found) > dialog.left:
            text = decode(chat.tokenizer, [found[: dialog.left]])[0]
    else:
        turns = [
            Message(
                role=turn["role"] if turn["role"] == "assistant" else role, content=text_of(turn)
            )
            for turn in so_far.conversation
        ]
        messages = [*prompt.content, *turns, Message(role=role, content=text)]
        last = int(so_far.tokens[-1]) if len(so_far) else -1
        found = chat.after(messages, len(messages) - 1, last, name, prompt.tools)
    tokens = np.array(found[: dialog.left], dtype=np.int64)
    context = Completion(
        tokens=tokens,
        log_probs=np.zeros(len(tokens), dtype=np.float32),
        written=np.zeros(len(tokens), dtype=np.bool_),
        finish="length" if len(tokens) == dialog.left else so_far.finish,
        text="",
    )
    return _extended(dialog, context, text)


def _next_turns(
    sampler: Engine,
    dialogs: Sequence[_Conversation],
    turn: int,
    sampling: Sampling,
    seed: int,
    chat: ChatEncoder,
) -> list[Completion]:
    """The policy's next turn in each conversation.

    One call samples them all with the largest remaining budget; each is cut at its own, where the
    engine would have stopped.
    """
    prompts = [
        replace(
            dialog.prompt,
            id=f"{dialog.name}/{turn}",
            tokens=(*dialog.prompt.tokens, *dialog.completion.tokens.tolist()),
        )
        for dialog in dialogs
    ]
    budget = max(dialog.left for dialog in dialogs)
    groups = sampler.sample(prompts, 1, replace(sampling, max_tokens=budget), seed)
    return [
        cut(group.completions[0], dialog.left, chat.tokenizer)
        for group, dialog in zip(groups, dialogs, strict=True)
    ]


def cut(completion: Completion, length: int, tokenizer: Any) -> Completion:
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


def _extended(dialog: _Conversation, more: Completion, text: str) -> _Conversation:
    """The conversation with one more turn at its end."""
    so_far = dialog.completion
    role = "assistant" if more.written.all() else "environment"
    completion = Completion(
        tokens=np.concatenate([so_far.tokens, more.tokens]),
        log_probs=np.concatenate([so_far.log_probs, more.log_probs]),
        written=np.concatenate([so_far.written, more.written]),
        finish=more.finish,
        text=so_far.text + more.text,
        turns=(*so_far.conversation, Message(role=role, content=text)),
    )
    return replace(dialog, completion=completion)
