"""Greedy completions of the native engine against transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from keel.engines.native import NativeEngine
from keel.models.policy import load_policy
from keel.types import Prompt, Sampling
from tests.real.model import spec, stock

NEAR_TIE = 2e-4
"""Two logits closer than this may swap: float32 moves logits of 30 by 7e-5, each its own way."""


@dataclass(frozen=True)
class Greedy:
    """Of one prompt: how many tokens were written, and the first difference from `generate`.

    `gap` is that of the stock model's logits of the two tokens there; None without a difference.
    """

    question: str
    tokens: int
    at: int | None = None
    gap: float | None = None

    @property
    def excused(self) -> bool:
        return self.gap is None or self.gap < NEAR_TIE


def greedy(questions: Sequence[str], max_tokens: int) -> list[Greedy]:
    """Both complete each question as the user's turn of the chat template."""
    policy = load_policy(spec(), 0)
    prompts = [_prompt(policy.tokenizer, number, text) for number, text in enumerate(questions)]
    engine = NativeEngine(policy.model, policy.tokenizer, autocast=False)
    groups = engine.sample(prompts, 1, Sampling(max_tokens=max_tokens, temperature=0.0), 0)
    model = stock()
    out = []
    for question, prompt, group in zip(questions, prompts, groups, strict=True):
        ours = group.completions[0].tokens.tolist()
        out.append(_compared(model, question, list(prompt.tokens), ours, max_tokens))
    return out


def _prompt(tokenizer: object, number: int, question: str) -> Prompt:
    messages = [{"role": "user", "content": question}]
    tokens = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        messages, add_generation_prompt=True, return_dict=False
    )
    return Prompt(f"question/{number}", question, tokens=tuple(tokens))


@torch.no_grad()
def _compared(
    model: PreTrainedModel, question: str, prompt: list[int], ours: list[int], max_tokens: int
) -> Greedy:
    given = torch.tensor([prompt])
    whole = model.generate(
        input_ids=given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=max_tokens,
    )
    theirs = whole[0, len(prompt) :].tolist()
    if ours == theirs:
        return Greedy(question, len(ours))
    at = next(
        (n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
        min(len(ours), len(theirs)),
    )
    if at == min(len(ours), len(theirs)):  # one of them stopped early
        return Greedy(question, len(ours), at, float("inf"))
    logits = model(input_ids=torch.tensor([[*prompt, *ours[:at]]]), use_cache=False).logits[0, -1]
    return Greedy(question, len(ours), at, float((logits[ours[at]] - logits[theirs[at]]).abs()))
