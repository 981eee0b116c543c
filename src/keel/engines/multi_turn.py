"""Conversations of several turns between the policy and its task, within one completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keel.engines.sampler import occurrences
from keel.engines.turns import TurnRecord, sample_turns
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
    first: Completion
    record: TurnRecord

    @property
    def left(self) -> int:
        return self.budget - len(self.record)

    def asked(self, turn: int) -> Prompt:
        """The conversation so far as a prompt."""
        tokens = (*self.prompt.tokens, *self.record.tokens)
        return replace(self.prompt, id=f"{self.name}/{turn}", tokens=tokens)

    def completion(self) -> Completion:
        return self.first if len(self.record.turns) == 1 else self.record.completion()


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
                _add_reply(dialogs[number], text, chat, reply_role)
            going = [number for number in answered if dialogs[number].left > 0]
            if not going:
                break
            prompts = [dialogs[number].asked(turn) for number in going]
            left = [dialogs[number].left for number in going]
            turns = sample_turns(sampler, prompts, left, sampling, seed, chat.tokenizer)
            for number, made in zip(going, turns, strict=True):
                dialogs[number].record.add_answer(made)
    return [
        Group(
            group.prompt,
            tuple(dialog.completion() for dialog in dialogs[p * n : (p + 1) * n]),
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
            record = TurnRecord()
            record.add_answer(completion)
            name, budget = f"{prompt.id}/{time}/{index}", min(sampling.max_tokens, room)
            dialogs.append(_Conversation(prompt, name, budget, completion, record))
    return dialogs


def _reply(dialog: _Conversation, tasks: Mapping[str, Task]) -> str | None:
    """The task's reply; None if the conversation is over."""
    raise_if_cancelled()
    record, prompt = dialog.record, dialog.prompt
    if record.finish == "length" or dialog.left <= 0 or prompt.task not in tasks:
        return None
    return tasks[prompt.task].reply(prompt, record.transcript)


def _add_reply(dialog: _Conversation, text: str, chat: ChatEncoder, role: str) -> None:
    """Add the task's reply as context."""
    prompt, record, left = dialog.prompt, dialog.record, dialog.left
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
            for turn in record.turns
        ]
        messages = [*prompt.content, *turns, Message(role=role, content=text)]
        last = record.tokens[-1] if record.tokens else -1
        found = chat.after(messages, len(messages) - 1, last, name, prompt.tools)
    record.add_context(found[:left], text)
    if len(found) >= left:
        record.finish = "length"
