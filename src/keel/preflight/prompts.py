"""The prompts of a stage, as its first step would read them, and what is wrong with them.

Their number, length and rows, what a chat template makes of them, and what an environment replies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

from keel.config.fields import derive
from keel.config.sources import Prompts, TaskSource
from keel.data.mixture import build_tasks, stored
from keel.data.splits import position
from keel.data.tasks import names_of
from keel.models.chat import PROBE, Encoder, encode
from keel.models.text import render
from keel.platform.time_limit import Hung
from keel.preflight.context import (
    Finding,
    PromptStats,
    SamplingPlan,
    StageContext,
    StageStops,
    found,
    percent,
    quantile,
    surely_more,
)
from keel.runs.rows import WORDS, LeftOut
from keel.training.setup import prompt_source
from keel.types import KeelError, Message, Prompt, Task, Tools, shorten, text_of

STORED, GENERATED = 1_000, 128
"""Prompts whose length is measured: of a task with rows, and of one without end. A share of 5 %
is then known to within 1.4 % (95 %); a prompt of reasoning-gym takes milliseconds."""
RARE = 0.01
"""One example in a hundred that is too long or unreadable may well be left out; more is data
lost."""
REPEATED = 0.2
"""Public sets repeat a few prompts in a hundred. A fifth is a file that was joined with itself."""
PROBED = 32
"""Prompts whose environment is called."""
SPELLED = 0.1
"""A reply may hold an answer by chance; from one in ten on, surely (the interval's lower end), it
gives answers away."""
THINKING = ("<think>", "</think>")
"""Templates of thinking models write these only if a turn begins, or drop them after it."""


def read_prompts(
    context: StageContext,
    sources: Sequence[TaskSource],
    choice: Prompts,
    stage_seed: int,
    *,
    prefix: str,
    answer_key: str,
    answer_tokens: int,
    take: int,
    validation: int = 0,
) -> PromptStats:
    """The prompts of a stage, of which the first step takes `take`; also in `context.prompts`.

    `prefix` is that of the keys of tasks and prompts; `answer_key` sets `answer_tokens`.
    Raises StageStops if the first step has no prompts.
    """
    key, tokenizer = f"{prefix}tasks", context.policy.tokenizer
    with context.stops("as its tasks are read", key):
        chat = context.policy.tokenizer.chat_template is not None
        tasks = {task.name: task for task in build_tasks(sources, context.recipe.seed, chat=chat)}
        source = prompt_source(
            context.policy, tasks, sources, choice, derive(stage_seed, "prompts"),
            max_tokens=answer_tokens, key=answer_key,
        )  # fmt: skip
    encoder, limit = source.encoder, source.encoder.max_tokens
    unlimited = copy(encoder)
    unlimited.max_tokens = None
    prompts: dict[str, list[Prompt]] = {name: [] for name in tasks}
    first: list[Prompt] = []
    held: list[Prompt] = []
    stopped: KeelError | None = None
    try:
        for name, task in tasks.items():
            prompts[name] = encoded_prompts(task, unlimited)
        taken = source.stream.take(take)
        _check_task_names(taken, tasks)
        first = taken
        held = source.validation(validation) if validation else []
    except KeelError as error:
        stopped = error
    sizes = [task.size("train") for task in tasks.values()]
    rows = None if None in sizes else sum(n for n in sizes if n is not None)
    if rows is not None:
        context.figures["train rows"] = rows
        context.add(few_rows(rows, context.stage.prompts_in_step or 1, f"{key}.0.path"))
    lengths = {name: [len(p.tokens) for p in own] for name, own in prompts.items()}
    fits = _check_lengths(context, lengths, limit, choice, prefix, (answer_key, answer_tokens))
    read = how_read(tokenizer, any(source.raw for source in sources))
    context.figures["plain prompts are read"] = read
    differs = unlimited.differs or encoder.differs
    if differs is not None:
        context.figures["tokenizer.json"] = (
            f"read otherwise by AutoTokenizer, whose class is used: {differs}"
        )
    if stopped is not None and fits:
        context.add_stop("as its prompts are read", stopped, key)
    _check_rows(context, list(tasks.values()), rows, key)
    if not first:
        raise StageStops
    within = [p for own in prompts.values() for p in own if limit is None or len(p.tokens) <= limit]
    longest = max(within, key=lambda p: len(p.tokens), default=None)
    keys = {name: f"{key}.{at}.prompt" for at, name in enumerate(tasks)}
    check_tokens(context, tokenizer, first, choice.chat_template, keys)
    context.prompts = PromptStats(source, first, held, longest, rows)
    if context.stage.unresolved and context.stage.prompts_in_step is not None:
        context.resolve(source.size(), context.stage.prompts_in_step)
    _show_columns(context, tasks, sources)
    return context.prompts


def _show_columns(
    context: StageContext, tasks: Mapping[str, Task], sources: Sequence[TaskSource]
) -> None:
    """The columns of each stored task, and what they are taken for."""
    for (name, task), source in zip(tasks.items(), sources, strict=True):
        data = stored(task)
        if data is not None and data.splits["train"]:
            taken = dict.fromkeys(names_of(source.prompt), "prompt") | {"tools": "tools"}
            taken |= {} if source.answer is None else {source.answer: "answer"}
            columns = data.splits["train"][0].row.values
            if data.conversation is not None:
                made = ["prompt", *(["answer"] if source.answer is None and data.answer else [])]
                taken[data.conversation] = " and ".join(made)
                columns = {name: columns[name] for name in columns if name not in made}
            context.figures[f"columns of {name}"] = columns_read(columns, taken)


def check_tokens(
    context: StageContext,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    template: Mapping[str, Any],
    keys: Mapping[str, str],
) -> None:
    """Findings of prompts as tokens. `keys` are the recipe keys of the prompts, by task."""
    specials = [str(token) for token in tokenizer.all_special_tokens]
    for name, key in keys.items():
        own = [prompt for prompt in prompts if prompt.task == name]
        context.add(
            doubled_bos(own, tokenizer.bos_token_id, key),
            special_in_messages(own, specials, key),
        )
    shown = prompts[:8]
    context.add(
        template_text(tokenizer, shown, template, "model.chat_template"),
        template_prefix(tokenizer, shown, template, "model.chat_template"),
    )
    context.unread |= unread(tokenizer, shown, template)


def _check_lengths(
    context: StageContext,
    by_task: Mapping[str, Sequence[int]],
    limit: int | None,
    choice: Prompts,
    prefix: str,
    answer: tuple[str, int],
) -> bool:
    """Figures and findings of the prompts' lengths; whether any prompt of each task fits."""
    context.add_lengths("prompt tokens", [n for own in by_task.values() for n in own])
    if choice.max_tokens is not None:
        key = bound = f"{prefix}prompts.max_tokens"
        fix = "raise it to {held}, or give shorter prompts"
    else:
        key = f"{context.prefix}{answer[0]}"
        bound = f"what {answer[1]} tokens of answer leave of the context"
        fix = (
            "leave {held} tokens for prompts: lower the budget for answers, use a longer context, "
            "or give shorter prompts"
        )
    found = [
        over_length("prompts-over-length", f"prompts of task {name!r}", n, limit, bound, key, fix)
        for name, n in by_task.items()
    ]
    context.add(*found)
    return not any(one and one.severity == "error" for one in found)


def _check_rows(context: StageContext, tasks: Sequence[Task], rows: int | None, key: str) -> None:
    """Findings of stored rows that are left out or repeated."""
    kept = [(at, data) for at, task in enumerate(tasks) if (data := stored(task)) is not None]
    left = [row for _, data in kept for row in data.left_out]
    report_left_out(context, left)
    first = next((at for at, data in kept if data.left_out), 0)
    entries = sum(len(split) for _, data in kept for split in data.splits.values())
    trained = [position(one.body) for _, data in kept for one in data.splits["train"]]
    context.add(
        unreadable(left, entries, f"{key}.{first}.bad_rows"),
        repeated(len(trained) - len(set(trained)), rows or 0, f"{key}.0.path"),
    )


def encoded_prompts(task: Task, encoder: Encoder) -> list[Prompt]:
    """The train prompts of a task that are inspected: all, or some of them, evenly spread."""
    encoded = (encoder(task.prompt("train", at)) for at in inspected_places(task))
    return [prompt for prompt in encoded if prompt is not None]


def inspected_places(task: Task) -> list[int]:
    """The indices of the train prompts that are inspected."""
    size = task.size("train")
    return list(range(GENERATED)) if size is None else spread(size, STORED)


def spread(size: int, most: int) -> list[int]:
    """At most `most` indices below `size`, evenly spread."""
    step = max(size / most, 1.0)
    return [int(at * step) for at in range(min(size, most))]


def columns_read(columns: Iterable[str], taken: Mapping[str, str]) -> str:
    """The columns of a data set, in words; `taken` says what those that are read are taken for."""
    own = [f"{c} ({taken[c]})" if taken[c] != c else c for c in columns if c in taken]
    others = [str(column) for column in columns if column not in taken]
    return ", ".join(own) + (f"; not read: {', '.join(others)}" if others else "")


def how_read(tokenizer: Any, raw: bool) -> str:
    """How plain prompts are read, in words."""
    if not getattr(tokenizer, "chat_template", None):
        return "as they stand: the tokenizer has no chat template"
    return "as they stand (raw = true)" if raw else "as the user's turn of the chat template"


def report_left_out(context: StageContext, left: Sequence[LeftOut]) -> None:
    """How many rows are left out, by reason, and the first of them."""
    if left:
        counts = Counter(WORDS[row.why] for row in left)
        listed = ", ".join(f"{n} {word}" for word, n in counts.items())
        context.figures["rows left out"] = f"{listed}; the first: {left[0].reason}"


def _check_task_names(prompts: Sequence[Prompt], tasks: Mapping[str, Task]) -> None:
    for prompt in prompts:
        if prompt.task not in tasks:
            raise KeelError(
                f"prompt {prompt.id!r} is of task {prompt.task!r}: give the Prompt "
                f"its task's name ({', '.join(map(repr, tasks))}), by which its answers are judged"
            )


# ---------------------------------------------------------------- findings of prompts and rows


def over_length(
    kind: str, of: str, lengths: Sequence[int], limit: int | None, bound: str, key: str, fix: str
) -> Finding | None:
    """Examples longer than `limit`; `of` and `bound` are examples and limit in words, and `fix`
    may name the length `{held}` that holds 95 %."""
    over = 0 if limit is None else sum(n > limit for n in lengths)
    every = over == len(lengths)
    if over == 0 or not (every or surely_more(over, len(lengths), RARE)):
        return None
    held = quantile(lengths, 0.95)
    lost = f"{percent(over / len(lengths))} of the {of} are left out for their length"
    return found(
        kind, key, "error" if every else "warning",
        lost=f"none of the {of} fits: each is left out" if every else lost,
        over=over, n=len(lengths), limit=limit, bound=bound, held=held, longest=max(lengths),
        fix=fix.format(held=held),
    )  # fmt: skip


def unreadable(left: Sequence[LeftOut], rows: int, key: str) -> Finding | None:
    """Rows that are left out because they cannot be read."""
    bad = [row for row in left if row.why == "bad"]
    every = rows + len(bad)
    if not surely_more(len(bad), every, RARE):
        return None
    return found(
        "unreadable-rows", key, share=percent(len(bad) / every), bad=len(bad), n=every,
        reason=bad[0].reason,
    )  # fmt: skip


def few_rows(rows: int, step: int, key: str) -> Finding | None:
    """Fewer train rows than a step takes."""
    if not 0 < rows < step:
        return None
    return found("few-rows", key, step=step, rows=rows, times=step / rows)


def no_validation(name: str, why: str, key: str) -> Finding | None:
    """A set of examples without any of the validation split; `why` is empty if it has some."""
    return found("no-validation", key, name=name, why=why) if why else None


def repeated(count: int, rows: int, key: str) -> Finding | None:
    """Rows with the prompt of an earlier row."""
    if not surely_more(count, rows, REPEATED):
        return None
    facts = {"count": count, "rows": rows, "different": rows - count}
    return found("duplicate-prompts", key, share=percent(count / rows), **facts)


# ---------------------------------------------------------------- replies of an environment


def reply_holds_answer(stats: PromptStats, plan: SamplingPlan) -> Finding | None:
    """An environment that spells the gold answer in reply to words that do not hold it.

    It is called with no words and with another prompt's gold answer, as many times as a completion
    has turns. An answer that is in the prompt, or in the reply to a prompt of another answer as
    well (an option, a count), is no sign.
    """
    golds = [(p, stats.source.tasks[p.task].gold(p)) for p in stats.first[:PROBED]]
    known = [(prompt, gold) for prompt, gold in golds if gold is not None and gold.strip()]
    if len({gold for _, gold in known}) < 2:
        return None
    others = [
        next(gold for _, gold in (*known[at:], *known[:at]) if gold != own)
        for at, (_, own) in enumerate(known)
    ]
    replies = [
        _probe(
            stats.source.tasks[prompt.task], prompt, ("", other), plan.sampling.rollout.max_turns
        )
        for (prompt, _), other in zip(known, others, strict=True)
    ]
    hits = [at for at in range(len(known)) if _spells(at, known, replies)]
    if not surely_more(len(hits), len(known), SPELLED):
        return None
    prompt, gold = known[hits[0]]
    reply = next(text for _, text in replies[hits[0]] if _holds(text, gold))
    return found(
        "reply-holds-answer", f"{plan.key}{stats.task_key(prompt)}.name",
        hits=len(hits), n=len(known), prompt=prompt.id, gold=gold[:40], reply=reply[:80],
    )  # fmt: skip


def _probe(
    task: Task, prompt: Prompt, probes: Sequence[str], max_turns: int
) -> list[tuple[str, str]]:
    """The environment's replies to a policy that writes a probe in each turn: probe and reply."""
    replies: list[tuple[str, str]] = []
    for probe in probes:
        text = ""
        for _ in range(max_turns - 1):
            text += probe
            try:
                reply = task.reply(prompt, text)
            except KeelError:  # words that the environment does not accept
                break
            if reply is None:
                break
            replies.append((probe, reply))
            text += reply
    return replies


def _spells(
    at: int,
    known: Sequence[tuple[Prompt, str]],
    replies: Sequence[Sequence[tuple[str, str]]],
) -> bool:
    prompt, gold = known[at]
    content = prompt.content
    asked = content if isinstance(content, str) else "\n".join(map(text_of, content))
    elsewhere = any(
        _holds(text, gold)
        for own, (_, other) in zip(replies, known, strict=True)
        if not _holds(other, gold)
        for probe, text in own
        if not _holds(probe, gold)  # it may only have repeated it
    )
    spelled = any(_holds(text, gold) for _, text in replies[at])
    return spelled and not elsewhere and not _holds(asked, gold)


def _holds(text: str, gold: str) -> bool:
    """Whether the answer is in the text as whole words."""
    return re.search(rf"(?<!\w){re.escape(gold.strip())}(?!\w)", text) is not None


# ---------------------------------------------------------------- prompts as tokens


def end_of_turn(
    closing: tuple[str, int | None],
    tokenizer: Any,
    stops: Sequence[int],
    stop_texts: Sequence[str],
    key: str,
) -> Finding | None:
    """The end of a turn (`ChatEncoder.closing`) that does not end a completion; `key` is that of
    the rollout table."""
    text, token = closing
    if not text.strip() or token in stops or any(stop in text for stop in stop_texts):
        return None
    if token is None:
        spelled, number, name = text.strip(), "", "stop"
        fix = f'set {key}.stop = ["{spelled}"]'
    else:
        spelled, number, name = tokenizer.convert_ids_to_tokens(token), f" (id {token})", "stop_ids"
        fix = (
            f"set {key}.stop_ids = [{token}], or name it in eos_token_id of the model's "
            "generation_config.json"
        )
    return found(
        "end-of-turn-not-stop", f"{key}.{name}",
        spelled=spelled, number=number, stops=", ".join(map(str, stops)), fix=fix,
    )  # fmt: skip


def doubled_bos(prompts: Sequence[Prompt], bos: int | None, key: str) -> Finding | None:
    """Prompts that begin with two begin-of-sequence tokens."""
    doubled = [p for p in prompts if bos is not None and p.tokens[:2] == (bos, bos)]
    if not doubled:
        return None
    return found("bos-doubled", key, doubled=len(doubled), n=len(prompts), first=doubled[0].id)


def special_in_messages(
    prompts: Sequence[Prompt], specials: Sequence[str], key: str
) -> Finding | None:
    """Messages whose words are special tokens: a turn may end, or another begin, inside of them."""
    texts = [
        (prompt.id, text_of(turn))
        for prompt in prompts
        if not isinstance(prompt.content, str)
        for turn in prompt.content
    ]
    what = "a message spells a special token, and the model reads it as one"
    fix = "the template sets these itself"
    return _spelled(texts, specials, f"{len(prompts)} prompts", what, key, fix)


def special_in_answers(
    answers: Sequence[tuple[str, str]], specials: Sequence[str], key: str, letters: bool = False
) -> Finding | None:
    """Answers to learn from, each with its row's name, whose words are special tokens.

    `letters`: they are read as the characters that they are spelled with, as judged rows are.
    """
    learned = "to spell it letter by letter" if letters else "to write it there"
    what = f"an answer spells a special token, and the model learns {learned}"
    fix = "the end of an answer is added to it"
    return _spelled(answers, specials, f"{len(answers)} answers", what, key, fix)


def _spelled(
    texts: Sequence[tuple[str, str]],
    specials: Sequence[str],
    of: str,
    what: str,
    key: str,
    fix: str,
) -> Finding | None:
    """Texts, each with its row's name, that spell a special token."""
    those = [(name, token) for name, text in texts for token in specials if token and token in text]
    if not those:
        return None
    first, token = those[0]
    rows = len({name for name, _ in those})
    facts = {"rows": rows, "of": of, "first": first, "token": token}
    return found("special-token-in-message", key, what=what, fix=fix, **facts)


def template_text(
    tokenizer: Any, prompts: Sequence[Prompt], template: Mapping[str, Any], key: str
) -> Finding | None:
    """Words that the template drops or changes, or that the tokenizer cannot give back.

    Blanks do not count: templates trim, and some tokenizers put one in front.
    """
    for prompt in prompts:
        if isinstance(prompt.content, str):
            continue
        turns = list(prompt.content)
        text = _rendered(tokenizer, turns, template, prompt.tools, prompt=True)
        if text is None:
            continue
        lost = next((t for t in turns if _squeezed(text_of(t)) not in _squeezed(text)), None)
        if lost is not None:
            return found(
                "template-loses-text", key, prompt=prompt.id,
                what=f"the chat template drops or changes the {lost['role']}'s words",
                detail=f"{shorten(text_of(lost))!r} is not in {shorten(text, 160)!r}",
                fix="use a template that shows every message as it is (model.chat_template), or "
                "put the words into another role",
            )  # fmt: skip
        a, b = _squeezed(text), _squeezed(_back(tokenizer, prompt, template) or text)
        if a != b:
            same = next((i for i in range(len(a)) if a[i] != b[i : i + 1]), len(a))
            part = slice(max(same - 10, 0), same + 20)
            return found(
                "template-loses-text", key, prompt=prompt.id,
                what="a prompt in tokens does not read as the chat template wrote it",
                detail=f"{a[part]!r} comes back as {b[part]!r}",
                fix="use the tokenizer that the model was trained with, or leave these characters "
                "out",
            )  # fmt: skip
    return None


def template_prefix(
    tokenizer: Any, prompts: Sequence[Prompt], template: Mapping[str, Any], key: str
) -> Finding | None:
    """A prompt that is not how the conversation with an answer in it begins.

    A server that gets the conversation reads other tokens than those that were learned from. What
    thinking models put round their thoughts does not count.
    """
    first = next((p for p in prompts if not isinstance(p.content, str)), None)
    if first is None:
        return None
    assert not isinstance(first.content, str)
    turns = list(first.content)
    asked = _rendered(tokenizer, turns, template, first.tools, prompt=True)
    answer = Message(role="assistant", content=PROBE)
    whole = _rendered(tokenizer, [*turns, answer], template, first.tools, prompt=False)
    if asked is None or whole is None:
        return None
    if _thoughtless(whole).startswith(_thoughtless(asked) + _squeezed(PROBE)):
        return None
    facts = {"prompt": first.id, "end": asked[-60:], "whole": whole[-120:]}
    return found("template-not-prefix", key, **facts)


def unread(
    tokenizer: Any, prompts: Sequence[Prompt], template: Mapping[str, Any]
) -> frozenset[str]:
    """The keywords without which the template writes the same of each conversation."""
    talks = [(list(p.content), p.tools) for p in prompts if not isinstance(p.content, str)]
    if not talks:
        return frozenset()

    def texts(words: Mapping[str, Any]) -> list[str | None]:
        return [_rendered(tokenizer, turns, words, tools, prompt=True) for turns, tools in talks]

    every = texts(template)
    return frozenset(
        word
        for word in template
        if None not in every and texts({k: v for k, v in template.items() if k != word}) == every
    )


def _rendered(
    tokenizer: Any,
    turns: Sequence[Message],
    template: Mapping[str, Any],
    tools: Tools = (),
    *,
    prompt: bool,
) -> str | None:
    """The conversation as the template's text; None if it has none, or it fails."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    try:
        return render(
            tokenizer, turns, "a prompt", tools=tools, generate=prompt, template_kwargs=template
        )
    except Hung:
        raise
    except KeelError:  # as a prompt it is reported elsewhere
        return None


def _back(tokenizer: Any, prompt: Prompt, template: Mapping[str, Any]) -> str | None:
    """The prompt's tokens as text, special ones too."""
    try:
        tokens = encode(prompt, tokenizer, template).tokens
    except Hung:
        raise
    except KeelError:
        return None
    text: str = tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return text


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _thoughtless(text: str) -> str:
    for mark in THINKING:
        text = text.replace(mark, "")
    return _squeezed(text)
