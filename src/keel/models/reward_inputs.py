"""The inputs of a reward model: prompts with answers, and the tokens at which they are scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from keel.graders.steps import split_steps
from keel.models.chat import as_turns, encode, encode_answered, encode_text
from keel.models.packed import Packed, pack
from keel.types import Content, KeelError, Prompt


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and its answer in tokens.

    The answer begins at `begins`; `ends` are the indices of the tokens at which it is scored.
    """

    tokens: tuple[int, ...]
    begins: int
    ends: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedAnswers:
    """Answers end to end; `at_K` are the indices among the T of the tokens that are scored."""

    packed: Packed
    at_K: Int[Tensor, " K"]


class Reader:
    """Encodes prompts and answers with the reward model's own tokenizer.

    The answer follows the prompt as a policy would have written it, and then an end-of-sequence
    token, even if the policy did not write one. With `closing` an answer in a conversation is
    rendered and closed by the tokenizer's chat template, as other trainers' reward models read it.
    What closes an answer is cut where it does not fit the `context`. `template` are keywords for
    the chat template, and with `raw` plain prompts go without it. An outcome is scored at the last
    token that is not `pad` (the tokenizer's padding token unless given; -1 for none).
    """

    def __init__(
        self,
        tokenizer: Any,
        context: int | None = None,
        template: Mapping[str, Any] | None = None,
        pad: int | None = None,
        *,
        raw: bool = False,
        closing: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.context = context
        self._template = dict(template or {})
        self._pad = tokenizer.pad_token_id if pad is None else pad
        self._raw, self._closing = raw, closing
        self._prompts: dict[Any, tuple[int, ...]] = {}

    def answer(self, prompt: Content, completion: str, name: str) -> Answered:
        """An answer with one score, at the last token that is not the padding token.

        The stock classes read it there, also where padding and end of sequence are one token.
        `name` is the example's in an error.
        """
        before = self._prompt(prompt, name)
        tokens = self._rendered(prompt, completion, name)
        if tokens is None:
            tokens = self._closed([*before, *self._text(completion, name)])
        last = len(tokens) - 1
        while last > 0 and tokens[last] == self._pad:
            last -= 1
        return Answered(tuple(tokens), min(len(before), len(tokens) - 1), (last,))

    def prompt(self, content: Content, name: str) -> Prompt:
        """An example's prompt with its tokens."""
        return encode(Prompt(name, content), self.tokenizer, self._template, raw=self._raw)

    def _rendered(self, prompt: Content, completion: str, name: str) -> list[int] | None:
        """The conversation with its answer, closed by the template; None where none closes it."""
        turns = as_turns(prompt, self.tokenizer, self._raw)
        if not self._closing or isinstance(turns, str):
            return None
        found = encode_answered(turns, completion, name, self.tokenizer, self._template)
        if found is None:
            return None
        tokens, closing = found
        fits = self.context is not None and len(tokens) - closing <= self.context
        return tokens[: self.context] if fits else tokens

    def steps(self, prompt: Content, steps: Sequence[str], name: str) -> Answered:
        """An answer with a score at the last token of each step; steps include their separators."""
        before = self._prompt(prompt, name)
        tokens = list(before)
        ends = []
        for number, step in enumerate(steps, start=1):
            tokens += self._text(step, name)
            if number == len(steps):
                tokens = self._closed(tokens)
            ends.append(len(tokens) - 1)
        if len(set(ends)) < len(ends) or (ends and ends[0] < 1):
            raise KeelError(f"{name}: a step without tokens: leave the empty step out")
        return Answered(tuple(tokens), len(before), tuple(ends))

    def split(self, prompt: Content, completion: str, separator: str, name: str) -> Answered:
        """`steps` of a text that is cut after each separator."""
        spans = split_steps(completion, separator)
        return self.steps(prompt, [completion[a:b] for a, b in spans], name)

    def _prompt(self, content: Content, name: str) -> tuple[int, ...]:
        key = content if isinstance(content, str) else repr(content)
        if key not in self._prompts:
            if len(self._prompts) >= 4096:
                self._prompts.clear()
            self._prompts[key] = self.prompt(content, name).tokens
        return self._prompts[key]

    def _text(self, text: str, name: str) -> list[int]:
        return encode_text(text, f"the answer of {name}", self.tokenizer, split_special_tokens=True)

    def _closed(self, tokens: list[int]) -> list[int]:
        eos = self.tokenizer.eos_token_id
        return tokens if eos is None or len(tokens) == self.context else [*tokens, eos]


def joined(steps: Sequence[str], separator: str) -> list[str]:
    """Steps with the separator after each but the last."""
    return [*(step + separator for step in steps[:-1]), *steps[-1:]]


def pack_answers(answers: Sequence[Answered], device: torch.device | str = "cpu") -> PackedAnswers:
    """Pack answers end to end."""
    starts = accumulate((len(answer.tokens) for answer in answers), initial=0)
    at = [
        start + end for answer, start in zip(answers, starts, strict=False) for end in answer.ends
    ]
    none = torch.zeros(0, dtype=torch.long)
    packed = pack([torch.tensor(a.tokens) for a in answers], [none] * len(answers), device)
    return PackedAnswers(packed, torch.tensor(at, dtype=torch.long, device=device))
