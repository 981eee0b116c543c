"""Conversations of several turns between the policy and its task, within one completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from keel.engines.turns import Conversation, conversation_names, sample_turns
from keel.models.chat import ChatEncoder
from keel.models.text import decode, encode_text
from keel.platform.time_limit import raise_if_cancelled
from keel.types import Engine, Group, KeelError, Message, Prompt, Sampling, Task, text_of


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
    one.add_context(found[:left], text)
    if len(found) >= left:
        one.finish = "length"
    return True
