"""What ends a completion, and what a chat template makes of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from keel.models.chat import PROBE, encode
from keel.models.text import render
from keel.platform.time_limit import Hung
from keel.preflight.finding import Finding, found, shorten
from keel.types import KeelError, Message, Prompt, Tools, text_of

THINKING = ("<think>", "</think>")
"""Templates of thinking models write these only if a turn begins, or drop them after it."""


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
