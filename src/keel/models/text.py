"""Text as tokens, tokens as text, and a tokenizer's chat template as text.

Control tokens frame text: the beginning and end of a sequence, padding, and what the chat template
opens and closes turns with. They are never part of a text. Every other token is, also one that the
tokenizer calls special, such as `<sol>` or `<think>`: what a policy writes is what rewards read.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Literal

from keel.platform.time_limit import Hung, time_limit
from keel.types import KeelError, Message, one_line

QUESTIONS = (
    (Message(role="user", content="a question"),),
    (Message(role="system", content="a task"), Message(role="user", content="a question")),
)
"""Conversations to find what a template writes; some need a system message, others refuse it."""
TEMPLATE_SECONDS = 30.0
"""Limit for one conversation, which usually takes less than a thousandth of a second.

A chat template comes with a model. transformers renders it in a sandbox without files and
attributes, but nested loops could still run for hours."""
_ARGUMENTS = frozenset({
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    "sanitize_control_tokens",
})  # fmt: skip
"""Of `apply_chat_template` itself."""
_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_PREFIXES = ("▁", "Ġ")
"""How tokenizers spell the blank that they put before a text."""


def limited_template(what: str) -> AbstractContextManager[None]:
    """Raise `Hung`, which names `what`, if the block exceeds `TEMPLATE_SECONDS`."""
    hint = "does it loop? Set model.chat_template to another"
    return time_limit(f"the chat template of {what}", TEMPLATE_SECONDS, hint)


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    generate: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the chat template writes it.

    With `generate` the header of the assistant's next turn follows. `tools` are described to the
    model; `template_kwargs` are the template's own keywords. Raises KeelError, with the example's
    `name`, if there is no template, or it fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise KeelError(
            f"{name} is a conversation, but the tokenizer has no chat template: set "
            "model.chat_template, or write the prompt as text"
        )
    try:
        with limited_template(name):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generate,
                **(template_kwargs or {}),
            )
        return str(text)
    except Hung:
        raise
    except Exception as error:  # a template raises what it likes
        raise KeelError(f"{name}: the chat template fails: {one_line(error, named=True)}") from None


def check_keywords(keywords: Any) -> Mapping[str, Any]:
    """Keywords of a chat template that someone gives. Raises KeelError if they are none."""
    if not isinstance(keywords, Mapping):
        raise KeelError(f"{keywords!r:.40} are no keywords of a chat template: give an object")
    if taken := sorted(_ARGUMENTS & keywords.keys()):
        raise KeelError(f"{', '.join(taken)}: not a keyword of the chat template: leave it out")
    return keywords


def control_tokens(tokenizer: Any) -> Mapping[str, int]:
    """The control tokens: how each is spelled, and its id."""
    named = tuple(str(getattr(tokenizer, f"{name}_token", None) or "") for name in _NAMES)
    template = getattr(tokenizer, "chat_template", None)
    return _control_tokens(tokenizer, named, str(template or ""))


@lru_cache(maxsize=16)
def _control_tokens(tokenizer: Any, named: tuple[str, ...], template: str) -> Mapping[str, int]:
    """Of the template, what it writes around turns, and the first token that opens an assistant's:
    the others may open a thought, which is text, and so is what a policy writes before its answer.
    So is what the template says to the model on its own, which it leaves out if there is a system
    message."""
    special = special_tokens(tokenizer)
    found = {text for text in special if text in named}
    if not template:
        return {text: number for text, number in special.items() if text in found}
    for turns in reversed(QUESTIONS):
        question, answer = turns[-1]["content"], "an answer"
        talk = [*turns, Message(role="assistant", content=answer)]
        try:
            asked = render(tokenizer, turns, "a probe", generate=False)
            begun = render(tokenizer, turns, "a probe", generate=True)
            whole = render(tokenizer, talk, "a probe", generate=False)
            break
        except KeelError:  # a template that takes no system message
            continue
    else:
        return special
    # The end of a turn may be an added token that is not called special.
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    framing = {str(t): int(n) for n, t in added if str(t).startswith("<")} | special
    spelled = re.compile("|".join(map(re.escape, framing)) or r"(?!)")
    head, _, tail = whole.rpartition(answer)
    after = spelled.findall(asked.rpartition(question)[2])
    opens = spelled.findall(head.rpartition(question)[2])
    known = common_prefix(opens, after)
    header = [one for one in opens[known : known + 1] if f"{one[0]}/{one[1:]}" not in opens]
    writes = begun != asked and head.startswith(begun)
    own = spelled.findall(head[len(begun) :]) if writes else []
    found |= {*spelled.findall(asked), *spelled.findall(tail), *header} - set(own)
    return {text: number for text, number in framing.items() if text in found}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens and their ids, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    found = {str(token): int(number) for number, token in added if token.special}
    found |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    return dict(sorted(found.items(), key=lambda one: len(one[0]), reverse=True))


def encode_text(
    text: str,
    name: str,
    tokenizer: Any,
    *,
    literal: bool | Literal["all"] = False,
    continues: bool = False,
) -> list[int]:
    """The text's own tokens, nothing added; `name` is what an error calls the text.

    With `literal` a control token spelled out in the text is ordinary characters, with "all" every
    special token too, as in what the policy did not write. With `continues` the text goes on from
    another, so that it gets no blank in front, as some tokenizers put one.
    Raises KeelError with the character that the tokenizer does not know.
    """
    try:
        bare = _bare(text, tokenizer, literal, continues)
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is None or unknown not in bare:
            return bare
        # The unknown token may be spelled out in the text: check what is around it.
        pieces = [piece for piece in text.split(tokenizer.unk_token) if piece]
        lost = len(pieces) == 1 and pieces[0] == text
        if not lost and all(unknown not in _bare(p, tokenizer, literal) for p in pieces):
            return bare
        error = None
    except Exception as raised:  # tokenizers raises bare Exception
        error = raised
    raise _unreadable(text, name, tokenizer, error)


def _bare(
    text: str, tokenizer: Any, literal: bool | Literal["all"], continues: bool = False
) -> list[int]:
    if continues and _adds_prefix(tokenizer):
        for anchor in ("\n", "a", "0", text[:1]):
            before = _ids(anchor, tokenizer)
            if not before or getattr(tokenizer, "unk_token_id", None) in before:
                continue
            whole = _bare(anchor + text, tokenizer, literal)
            if whole[: len(before)] == before:
                return whole[len(before) :]
    special, control = special_tokens(tokenizer), control_tokens(tokenizer) if literal else {}
    control = {**control, **special} if literal == "all" else control
    if not any(spelled in text for spelled in control):
        return _ids(text, tokenizer)
    # Special tokens that are text stay tokens; between them every character counts. Tokens that are
    # added and not special are cut: the tokenizer would find them everywhere.
    kept = [re.escape(one) for one in special if one not in control]
    pattern = re.compile(f"({'|'.join(kept)})" if kept else r"((?!))")
    added = [f"(?<={re.escape(t[0])})(?={re.escape(t[1:])})" for t in control if t not in special]
    cuts = re.compile("|".join(added) or "(?!)")
    found: list[int] = []
    pieces = pattern.split(text)
    for at, piece in enumerate(pieces):
        if at and at % 2 == 0 and joins(pieces[at - 1], tokenizer):
            found += _bare(piece, tokenizer, literal, continues=True)
        elif piece:
            first, *rest = cuts.split(piece) if at % 2 == 0 else [piece]
            found += _ids(first, tokenizer, split=at % 2 == 0)
            for part in rest:
                found += _bare(part, tokenizer, literal, continues=True)
    return found


def _ids(text: str, tokenizer: Any, split: bool = False) -> list[int]:
    found = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=split,
        verbose=False,  # texts that are too long are reported elsewhere
    )
    return list(found["input_ids"])


@lru_cache(maxsize=16)
def _adds_prefix(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a blank before every text that it encodes."""
    for text in ("=", "a", "0"):
        try:
            tokens = tokenizer.convert_ids_to_tokens(_ids(text, tokenizer))
        except Exception:  # a character that it does not know
            continue
        if tokens and str(tokens[0]).startswith(_PREFIXES):
            return True
    return False


def joins(special: str, tokenizer: Any) -> bool:
    """Whether a text right behind this special token gets no blank in front, though it would get
    one at the beginning."""
    own = _ids("a", tokenizer)
    return _adds_prefix(tokenizer) and _ids(f"{special}a", tokenizer)[-len(own) :] != own


def _unreadable(text: str, name: str, tokenizer: Any, error: Exception | None) -> KeelError:
    """The error for a text, with the first character that the tokenizer does not know."""
    for character in dict.fromkeys(text):
        try:
            tokens = tokenizer(character, add_special_tokens=False)["input_ids"]
            if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokens:
                continue
        except Exception:
            pass
        return KeelError(
            f"{name} holds {character!r}, which the tokenizer does not know: add it to "
            "model.build.alphabet, or use another tokenizer",
            key="model.build.alphabet",
        )
    if error is None:
        return KeelError(
            f"{name} holds a word that the tokenizer does not know: use another tokenizer"
        )
    return KeelError(f"{name} cannot be encoded: {' '.join(str(error).split())[:300]}")


def decode(tokenizer: Any, sequences: Sequence[Sequence[int]]) -> list[str]:
    """The exact text of the sequences, without control tokens."""
    control = frozenset(control_tokens(tokenizer).values())
    texts: list[str] = tokenizer.batch_decode(
        [[one for one in sequence if one not in control] for sequence in sequences],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )
    return texts


class GrowingText:
    """The text of tokens that arrive one after the other, without control tokens: `add` and `end`
    return what is new, whole characters only."""

    HELD, WINDOW = 3, 64
    """Characters of replacement at the end that more tokens may complete, and tokens after which
    the text before them no longer counts."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._clean = self._sent = 0
        """Where decoding starts, a token before which all text is shown, and the number of
        characters from the start that are. Decoding starts one such place earlier, since tokenizers
        drop the blank before a first word."""

    def add(self, tokens: Iterable[int]) -> str:
        """Text that these tokens complete."""
        return "".join(self._next([token]) for token in tokens)

    def end(self) -> str:
        """What is left: part of a character's bytes, as the replacement character."""
        return self._next([], whole=True)

    def _next(self, tokens: list[int], whole: bool = False) -> str:
        self._ids += tokens
        text = self._decode()
        held = 0 if whole else min(len(text) - len(text.rstrip("\ufffd")), self.HELD)
        sent, self._sent = self._sent, max(len(text) - held, self._sent)
        new = text[sent : self._sent]
        if (new and not held) or len(self._ids) - self._start > self.WINDOW:
            self._start, self._clean = self._clean, len(self._ids)
            self._sent = len(self._decode()) - held
        return new

    def _decode(self) -> str:
        return decode(self._tokenizer, [self._ids[self._start :]])[0]


def unsettled(text: str, markers: Iterable[str]) -> int:
    """How many of a text's last characters may be the beginning of a marker that goes on."""
    return max(
        (n for one in markers for n in range(1, len(one)) if text.endswith(one[:n])), default=0
    )


def token_texts(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    """The text of each token as it stands within a text, special tokens included.

    Decoded after another token, since tokenizers drop the blank before a first word. Part of a
    character's bytes is the replacement character.
    """

    def decoded(sequences: list[list[int]]) -> list[str]:
        texts: list[str] = tokenizer.batch_decode(
            sequences, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return texts

    alone = dict(zip(ids, decoded([[one] for one in ids]), strict=True))
    first = next((one for one in ids if alone[one].strip("\ufffd ")), None)
    if first is None:
        return alone
    start = alone[first]
    pairs = zip(ids, decoded([[first, one] for one in ids]), strict=True)
    return {
        one: pair.removeprefix(start) if pair.startswith(start) else alone[one]
        for one, pair in pairs
    }


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning of two texts or lists."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def token_ends(tokenizer: Any, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """For each ascending position in the text of `ids`, the token that completes the text up to it.

    A position after the text belongs to the last token; without tokens there are no positions.
    """
    if not ids:
        return []
    runs = _runs(tokenizer, ids)
    starts = list(itertools.accumulate((len(run) for run, _ in runs), initial=0))
    reach = list(itertools.accumulate((len(text) for _, text in runs), initial=0))
    found: list[int] = []
    for end in ends:
        # The first run that reaches this position.
        at = bisect.bisect_left(reach, end, lo=1) - 1
        if at == len(runs):
            found.append(len(ids) - 1)
        else:
            found.append(starts[at] + _token_of_run(tokenizer, *runs[at], end - reach[at]))
    return found


def _runs(tokenizer: Any, ids: Sequence[int]) -> list[tuple[list[int], str]]:
    """The tokens in runs whose concatenated texts are the text of every beginning.

    Tokens with part of a character's bytes form one run with their neighbours; where a token's text
    depends on more than that, all tokens are one run.
    """
    distinct = list(dict.fromkeys(ids))
    alone = dict(zip(distinct, decode(tokenizer, [[one] for one in distinct]), strict=True))
    runs: list[list[int]] = []
    for broken, neighbours in itertools.groupby(ids, lambda one: "\ufffd" in alone[one]):
        tokens = list(neighbours)
        runs += [tokens] if broken else [[one] for one in tokens]
    *texts, whole = decode(tokenizer, [*(run for run in runs if len(run) > 1), ids])
    rest = iter(texts)
    parts = [next(rest) if len(run) > 1 else alone[run[0]] for run in runs]
    return list(zip(runs, parts, strict=True)) if "".join(parts) == whole else [(list(ids), whole)]


def _token_of_run(tokenizer: Any, run: Sequence[int], text: str, end: int) -> int:
    """The first token of a run that completes its text up to `end`, by bisection."""

    def reaches(token: int) -> bool:
        # Part of a character decodes to another one, so its length is not enough.
        beginning = decode(tokenizer, [run[: token + 1]])[0]
        return len(beginning) >= end and beginning[:end] == text[:end]

    return bisect.bisect_left(range(len(run) - 1), True, key=reaches)


def split_steps(text: str, separator: str) -> list[tuple[int, int]]:
    """Spans (start, end) of the steps, which cover the text without gaps.

    A step holds the separator that closes it; a blank one belongs to the step before it (the first
    to the one after it). No span for an empty text. Raises KeelError for an empty separator.
    """
    if not separator:
        raise KeelError('separator = "" divides nothing: give what stands between two steps')
    spans: list[tuple[int, int]] = []
    start = at = 0
    while at < len(text):
        found = text.find(separator, at)
        end = len(text) if found < 0 else found + len(separator)
        if text[at:end].removesuffix(separator).strip():
            spans.append((start, end))
            start = end
        elif spans:
            spans[-1] = (spans[-1][0], end)
            start = end
        at = end
    if start < len(text):
        spans.append((start, len(text)))
    return spans
