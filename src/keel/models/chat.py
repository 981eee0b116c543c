"""Prompts as tokens: by the tokenizer's chat template, or as plain text."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from keel.models.tokenizer_round_trip import Served, apart, differing
from keel.runs.watchdog import Hung, limited
from keel.types import Content, KeelError, Message, Prompt

TEMPLATE_SECONDS = 30.0
"""Limit for one conversation, which usually takes less than a thousandth of a second.

A chat template comes with a model. transformers renders it in a sandbox without files and
attributes, but nested loops could still run for hours."""


def limited_template(what: str) -> AbstractContextManager[None]:
    """Raise `Hung`, which names `what`, where the block exceeds `TEMPLATE_SECONDS`."""
    hint = "does it loop? Set model.chat_template to another"
    return limited(f"the chat template of {what}", TEMPLATE_SECONDS, hint)


def encode(
    prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any], *, raw: bool = False
) -> Prompt:
    """The prompt with its tokens.

    Messages get the chat template with the header of the assistant's turn. Plain text is the user's
    turn of such a conversation (and so is the returned prompt's content) where the tokenizer has a
    chat template; with `raw`, or without a template, it gets what the tokenizer puts in front (a
    BOS where it has one) but never an EOS after it. `template_kwargs` are the template's keyword
    arguments. Raises KeelError, naming the prompt, for what cannot be encoded.
    """
    prompt = dataclasses.replace(prompt, content=as_turns(prompt.content, tokenizer, raw))
    if isinstance(prompt.content, str):
        tokens = _text(prompt.content, prompt.id, tokenizer)
    else:
        tokens = _messages(prompt, tokenizer, template_kwargs)
    if not tokens:
        raise KeelError(f"prompt {prompt.id!r} has no tokens: leave the empty prompt out")
    return dataclasses.replace(prompt, tokens=tuple(int(t) for t in tokens))


def as_turns(content: Content, tokenizer: Any, raw: bool) -> Content:
    """Plain text as the user's turn where the tokenizer has a chat template, unless `raw`."""
    if raw or not isinstance(content, str) or not getattr(tokenizer, "chat_template", None):
        return content
    return (Message(role="user", content=content),)


class Encoder:
    """Encodes prompts and leaves out those longer than `max_tokens`; for PromptStream's `prepare`.

    A prompt that cannot be encoded raises, unless its task is in `forgiven`: then it is left out.
    The first prompt left out of a task is reported to `note`, except for tasks in `known`. Plain
    prompts of tasks in `raw` go without the chat template. A prompt that the saved tokenizer of
    `served` encodes differently raises; one that only the source's tokenizer.json encodes
    differently is reported once.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        forgiven: Collection[str] = (),
        note: Callable[[str], None] | None = None,
        raw: Collection[str] = (),
        served: Served | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.template_kwargs = dict(template_kwargs or {})
        self.forgiven = frozenset(forgiven)
        self.note = note
        self.known: set[str] = set()
        self.raw = frozenset(raw)
        self.served = served or Served()
        self.differs: str | None = None
        """How tokenizer.json and AutoTokenizer first differed on a prompt."""

    def __call__(self, prompt: Prompt) -> Prompt | None:
        """The prompt with its tokens; None where it is left out."""
        encoded = self._attempt(prompt, self.tokenizer)
        if isinstance(encoded, KeelError):
            if prompt.task not in self.forgiven:
                raise encoded
            self._leave_out(prompt, str(encoded))
            return None
        self._compare(prompt, encoded)
        long = self.too_long(encoded)
        if long is None:
            return encoded
        self._leave_out(prompt, long)
        return None

    def too_long(self, encoded: Prompt) -> str | None:
        """The message for a prompt with too many tokens; None for others."""
        n = len(encoded.tokens)
        if self.max_tokens is None or n <= self.max_tokens:
            return None
        return f"prompt {encoded.id!r} is {n} tokens long, more than the {self.max_tokens} allowed"

    def wrong(self, prompt: Prompt) -> tuple[str, Literal["bad", "long"]] | None:
        """Why a prompt cannot be used: it cannot be encoded (bad), or is too long."""
        encoded = self._attempt(prompt, self.tokenizer)
        if isinstance(encoded, KeelError):
            return str(encoded), "bad"
        long = self.too_long(encoded)
        return None if long is None else (long, "long")

    def _attempt(self, prompt: Prompt, tokenizer: Any) -> Prompt | KeelError:
        """The encoded prompt, or why it cannot be encoded. A template that hangs raises."""
        try:
            return encode(prompt, tokenizer, self.template_kwargs, raw=prompt.task in self.raw)
        except Hung:
            raise
        except KeelError as error:
            return error

    def _compare(self, prompt: Prompt, encoded: Prompt) -> None:
        """Raise KeelError where the saved tokenizer encodes the prompt differently."""
        saved, written = self.served.saved, self.served.written
        if saved is not None and (other := self._other(prompt, saved)) != encoded.tokens:
            where = apart(_shown(prompt), list(encoded.tokens), list(other))
            raise KeelError(differing(prompt.id, where))
        if written is None or self.differs is not None:
            return
        if (other := self._other(prompt, written)) != encoded.tokens:
            self.differs = apart(_shown(prompt), list(other), list(encoded.tokens))
            if self.note is not None:
                self.note(
                    f"the model's tokenizer.json and AutoTokenizer read prompt {prompt.id!r} "
                    f"differently ({self.differs}): the run uses what AutoTokenizer loads, as "
                    "wherever the model is served"
                )

    def _other(self, prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
        encoded = self._attempt(prompt, tokenizer)
        return () if isinstance(encoded, KeelError) else encoded.tokens

    def _leave_out(self, prompt: Prompt, why: str) -> None:
        if self.note is not None and prompt.task not in self.known:
            self.known.add(prompt.task)
            self.note(f"prompt left out, others of {prompt.task!r} like it are counted only: {why}")


def _shown(prompt: Prompt) -> str:
    content = prompt.content
    return content if isinstance(content, str) else str(content[-1]["content"])


def encode_text(
    text: str, name: str, tokenizer: Any, *, split_special_tokens: bool = False
) -> list[int]:
    """The text's own tokens, nothing added; `name` is what an error calls the text.

    With `split_special_tokens` a special token spelled out in the text is ordinary characters.
    Raises KeelError with the character that the tokenizer does not know.
    """
    try:
        bare = _bare(text, tokenizer, split_special_tokens)
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is None or unknown not in bare:
            return bare
        # The unknown token may be spelled out in the text: check what is around it.
        pieces = [piece for piece in text.split(tokenizer.unk_token) if piece]
        lost = len(pieces) == 1 and pieces[0] == text
        if not lost and all(
            unknown not in _bare(p, tokenizer, split_special_tokens) for p in pieces
        ):
            return bare
        error = None
    except Exception as raised:  # tokenizers raises bare Exception
        error = raised
    raise KeelError(_unreadable(text, name, tokenizer, error))


def _bare(text: str, tokenizer: Any, split_special_tokens: bool) -> list[int]:
    found = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=split_special_tokens,
        verbose=False,  # texts that are too long are reported elsewhere
    )
    return list(found["input_ids"])


def _text(text: str, name: str, tokenizer: Any) -> list[int]:
    bare = encode_text(text, f"prompt {name!r}", tokenizer)
    tokens: list[int] = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
    # Some tokenizers close every text with an EOS; nothing would follow it. One that the text
    # itself ends with stays.
    eos = tokenizer.eos_token_id
    own = bool(bare) and bare[-1] == eos
    if tokens and tokens[-1] == eos and (not own or tokens[-len(bare) - 1 : -1] == bare):
        tokens.pop()
    return tokens


def _messages(prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> list[int]:
    turns = [dict(turn) for turn in prompt.content]  # type: ignore[arg-type]
    if not turns:
        raise KeelError(f"prompt {prompt.id!r} has no messages: leave the empty prompt out")
    if not getattr(tokenizer, "chat_template", None):
        raise KeelError(
            f"prompt {prompt.id!r} is a conversation, but the tokenizer has no chat template: set "
            "model.chat_template, or write the prompt as text"
        )
    if turns[-1]["role"] == "assistant":
        raise KeelError(
            f"prompt {prompt.id!r} ends with the assistant's turn, which is the answer: end it "
            "with the user's"
        )
    try:
        with limited_template(f"prompt {prompt.id!r}"):
            encoded = tokenizer.apply_chat_template(
                turns,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=True,
                tokenizer_kwargs={"verbose": False},
                **template_kwargs,
            )
    except Hung:
        raise
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise KeelError(f"prompt {prompt.id!r}: the chat template fails: {message}") from None
    return list(encoded["input_ids"])


PROBE = "An answer to close"
"""An answer that no template changes."""


def encode_answered(
    turns: Sequence[Message],
    answer: str,
    name: str,
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
) -> tuple[list[int], int] | None:
    """A conversation and its answer by the chat template; how many tokens close the answer.

    None where the template is of prompts only: it does not show the assistant's turn.

    The tokens are those of `apply_chat_template`, except that special tokens spelled out in the
    answer are ordinary characters. Raises KeelError with the example's name where the template
    fails.
    """

    def rendered(text: str) -> str:
        whole = [*(dict(turn) for turn in turns), {"role": "assistant", "content": text}]
        try:
            with limited_template(name):
                text = tokenizer.apply_chat_template(whole, tokenize=False, **template_kwargs)
            return str(text)
        except Hung:
            raise
        except Exception as error:  # a template raises what it likes
            message = " ".join(f"{type(error).__name__}: {error}".split())
            raise KeelError(f"{name}: the chat template fails: {message}") from None

    text, probe = rendered(answer), rendered(PROBE)
    if PROBE not in probe:
        return None
    head, _, tail = probe.rpartition(PROBE)
    what = f"the answer of {name}"
    closing = len(encode_text(tail, what, tokenizer)) if tail else 0
    specials = re.compile("|".join(map(re.escape, special_texts(tokenizer))) or r"(?!)")
    if specials.findall(text) == specials.findall(probe):
        return encode_text(text, what, tokenizer), closing
    # Only special tokens outside of the answer are the template's.
    start = _common(text, head)
    stop = _common(text[start:][::-1], tail[::-1])
    own = [(m.start(), m.end()) for m in specials.finditer(text)]
    own = [(a, b) for a, b in own if b <= start or a >= len(text) - stop]
    tokens: list[int] = []
    at = 0
    for a, b in [*own, (len(text), len(text))]:
        if text[at:a]:
            tokens += encode_text(text[at:a], what, tokenizer, split_special_tokens=True)
        if a < b:
            tokens.append(int(tokenizer.convert_tokens_to_ids(text[a:b])))
        at = b
    return tokens, closing


def _common(a: str, b: str) -> int:
    """Length of the common beginning of two texts."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def special_texts(tokenizer: Any) -> list[str]:
    """The special tokens as they are spelled, longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    spelled = {str(token) for token in added if getattr(token, "special", True)}
    return sorted(spelled | set(map(str, tokenizer.all_special_tokens)), key=len, reverse=True)


def _unreadable(text: str, name: str, tokenizer: Any, error: Exception | None) -> str:
    """The error for a text, with the first character that the tokenizer does not know."""
    for character in dict.fromkeys(text):
        try:
            tokens = tokenizer(character, add_special_tokens=False)["input_ids"]
            if tokenizer.unk_token_id is None or tokenizer.unk_token_id not in tokens:
                continue
        except Exception:
            pass
        return (
            f"{name} holds {character!r}, which the tokenizer does not know: add it to "
            "model.build.alphabet, or use another tokenizer"
        )
    if error is None:
        return f"{name} holds a word that the tokenizer does not know: use another tokenizer"
    return f"{name} cannot be encoded: {' '.join(str(error).split())[:300]}"


def decode(tokenizer: Any, sequences: Sequence[Sequence[int]]) -> list[str]:
    """The exact text of the sequences, without special tokens."""
    texts: list[str] = tokenizer.batch_decode(
        sequences, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return texts


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
    low, high = 0, len(run) - 1
    while low < high:
        middle = (low + high) // 2
        # Part of a character decodes to another one, so its length is not enough.
        beginning = decode(tokenizer, [run[: middle + 1]])[0]
        if len(beginning) >= end and beginning[:end] == text[:end]:
            high = middle
        else:
            low = middle + 1
    return low
