"""When a completion ends: end-of-sequence ids, stop ids, stop strings, budget and context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.models.text import control_tokens, decode, encode_text, special_tokens
from keel.types import FinishReason, KeelError, Prompt, Sampling

GOING, EOS, STOP, LENGTH = range(4)
"""What the last token of a row means for it."""

REASONS: dict[int, FinishReason] = {EOS: "eos", STOP: "stop", LENGTH: "length"}


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a sequence: those of the generation config, or if it has none of the
    model's config; and the tokenizer's.

    Raises KeelError if there is none: completions would always use their whole budget.
    """
    config = model.config.get_text_config()
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    named = config.eos_token_id if named is None else named
    found = {*_ids(named), *_ids(tokenizer.eos_token_id)}
    inside = tuple(sorted(number for number in found if 0 <= number < config.vocab_size))
    if not inside:
        raise KeelError(
            f"{type(model).__name__} has no end-of-sequence token: "
            "set eos_token on its tokenizer, or eos_token_id in its config.json"
        )
    return inside


def _ids(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def budgets(
    prompts: Sequence[Prompt], sampling: Sampling, context: int | None
) -> npt.NDArray[np.int64]:
    """How many tokens may be sampled for each prompt: the budget, or what the context leaves.

    Raises KeelError for a prompt that was not encoded or that leaves no room in the context.
    """
    for prompt in prompts:
        if not prompt.tokens:
            raise KeelError(f"prompt '{prompt.id}' has no tokens: encode it before sampling")
        if context is not None and len(prompt.tokens) >= context:
            raise KeelError(
                f"prompt '{prompt.id}' has {len(prompt.tokens)} tokens, which leaves no room in "
                f"the model's context of {context}: shorten it, or set prompts.max_tokens",
                key="prompts.max_tokens",
            )
    room = [sampling.max_tokens] * len(prompts)
    if context is not None:
        room = [min(sampling.max_tokens, context - len(prompt.tokens)) for prompt in prompts]
    return np.array(room, dtype=np.int64)


def split_stops(stop: Sequence[str], tokenizer: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The stop strings that are text, and the ids of those that are one special token.

    Raises KeelError for a string that cannot match: one with a control token inside it, since
    these are not part of the text, or with a character that the tokenizer cannot write.
    """
    if not stop:
        return (), ()
    special, control = special_tokens(tokenizer), control_tokens(tokenizer)
    texts: list[str] = []
    for text in stop:
        if text in special:
            continue
        inside = next((token for token in control if token in text), None)
        if inside is not None:
            raise KeelError(
                f"stop = {text!r} never matches: {inside!r} in it is a control token, which is not "
                f"part of the text: give {inside!r} alone, or its id {special[inside]} in stop_ids"
            )
        encode_text(text, f"stop = {text!r}", tokenizer)
        texts.append(text)
    return tuple(texts), tuple(special[text] for text in stop if text in special)


class Stops:
    """Finds after each step which rows ended, and why.

    Ids, and stop strings that are one special token, are looked up in a table. Other stop strings
    are searched for in the decoded last tokens of each row, so that one across several tokens is
    found; control tokens are not text. The end-of-sequence token has precedence over a stop, and a
    stop over the budget. Raises KeelError for a stop that cannot match.
    """

    def __init__(
        self, eos: Sequence[int], sampling: Sampling, tokenizer: Any, vocabulary: int
    ) -> None:
        self.strings, special = split_stops(sampling.stop, tokenizer)
        stops = [*sampling.stop_ids, *special]
        outside = [number for number in stops if not 0 <= number < vocabulary]
        if outside:
            raise KeelError(
                f"sampling.stop_ids holds {outside[0]}, which is not a token: "
                f"give ids from 0 to {vocabulary - 1}",
                key="rollout.stop_ids",
            )
        self._table = np.full(vocabulary, GOING, dtype=np.int8)
        self._table[stops] = STOP
        self._table[list(eos)] = EOS
        self.by_token = None if self.strings else self._table
        """The code of each token (int8, V), if only tokens and the budget end a row."""
        self._tokenizer = tokenizer
        self._control = frozenset(control_tokens(tokenizer).values())
        # A token of text has at least one byte. The first tokens of a window may lose a space or
        # half a character, so a few more are decoded than a string can span.
        longest = max((len(text.encode()) for text in self.strings), default=0)
        self._window = longest + 8
        self._tails: dict[int, list[int]] = {}

    def ids(self) -> list[int]:
        """The token ids that end a completion, end-of-sequence ids included."""
        return [int(number) for number in np.flatnonzero(self._table)]

    def check(
        self,
        sequences: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        spent: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int8]:
        """The code of each row's new token; `spent` marks rows whose budget is used up."""
        codes = self._table[tokens]
        if spent.any():
            codes[(codes == GOING) & spent] = LENGTH
        if self.strings:
            self._check_strings(sequences, tokens, codes)
        return codes

    def _check_strings(
        self,
        sequences: npt.NDArray[np.int64],
        tokens: npt.NDArray[np.int64],
        codes: npt.NDArray[np.int8],
    ) -> None:
        tails = [self._tails.setdefault(sequence, []) for sequence in sequences.tolist()]
        for tail, token in zip(tails, tokens.tolist(), strict=True):
            if token not in self._control:
                tail.append(token)
                del tail[: -self._window]
        for row, text in enumerate(decode(self._tokenizer, tails)):
            if codes[row] in (GOING, LENGTH) and any(stop in text for stop in self.strings):
                codes[row] = STOP


def completion_texts(
    tokenizer: Any, sequences: Sequence[Sequence[int]], codes: Iterable[int]
) -> list[str]:
    """The texts of completions, without the token that ended a sequence."""
    pairs = zip(sequences, codes, strict=True)
    return decode(tokenizer, [ids[:-1] if code == EOS else ids for ids, code in pairs])
