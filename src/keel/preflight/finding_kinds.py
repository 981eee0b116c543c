"""The kinds of findings: a short name that stays, and what each means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from keel.preflight.finding import Finding, Severity

Kind = Literal[
    "would-stop",
    "no-effect",
    "warm-up-never-ends",
    "timeout-cut",
    "shared-interpreter",
    "overlong-covers-all",
    "reuse-without-ratio",
    "ratio-stays-1",
    "closed-not-punished",
    "frozen-weights",
    "adapter-hardly-moves",
    "no-compiler",
    "prompts-over-length",
    "rows-over-length",
    "unreadable-rows",
    "duplicate-prompts",
    "trained-on-held-out",
    "special-token-in-message",
    "bos-doubled",
    "eos-differs",
    "eos-never",
    "end-of-turn-not-stop",
    "template-loses-text",
    "template-not-prefix",
    "truncated",
    "reply-holds-answer",
    "gold-over-budget",
    "gold-unwritable",
    "gold-refused",
    "gold-worth-less",
    "threshold-unreached",
    "reward-none",
    "reward-zero",
    "reward-constant",
    "zero-variance",
    "out-of-memory",
    "judge-over-budget",
]

KINDS: Final[Mapping[Kind, str]] = {
    "would-stop": "the stage stops: a row, a model, a reward or a demonstration cannot be used",
    "no-effect": "a key that was set does nothing in this combination",
    "warm-up-never-ends": "the learning rate never reaches its value",
    "timeout-cut": "rewards.timeout ends a call before the reward's own timeout can",
    "shared-interpreter": "code shares the interpreter of its tests, and can pass unsolved",
    "overlong-covers-all": "the punishment of length reaches every length",
    "reuse-without-ratio": "a batch is learned from again, and no ratio corrects for it",
    "ratio-stays-1": "the loop never lets the importance ratio move, so nothing bounds it",
    "closed-not-punished": "a shut gate is worth as much as the mean of the open ones",
    "frozen-weights": "bfloat16 weights round most optimizer steps away",
    "adapter-hardly-moves": "a LoRA adapter with the learning rate of a whole model",
    "no-compiler": "a model that compiled code would run runs through its modules",
    "prompts-over-length": "prompts are left out because no answer fits behind them",
    "rows-over-length": "judged rows are left out because they are too long",
    "unreadable-rows": "rows are left out because they cannot be read",
    "duplicate-prompts": "the same prompt stands in many rows",
    "trained-on-held-out": "a stage learns from prompts that it, or a later one, holds out",
    "special-token-in-message": "a message spells a special token, which is read as one",
    "bos-doubled": "prompts begin with two begin-of-sequence tokens",
    "eos-differs": "what ends a demonstration is not what the saved model stops at",
    "eos-never": "no completion comes to an end by itself",
    "end-of-turn-not-stop": "what the chat template closes a turn with does not end a completion",
    "template-loses-text": "the chat template or the tokenizer drops or changes what was said",
    "template-not-prefix": "the prompt is not how a conversation with the answer begins",
    "truncated": "completions are cut at the budget",
    "reply-holds-answer": "the environment's reply spells the right answer",
    "gold-over-budget": "right answers are longer than the budget",
    "gold-unwritable": "the tokenizer cannot write right answers",
    "gold-refused": "the reward does not accept the gold answer",
    "gold-worth-less": "the whole reward of a gold answer is less than that of most samples",
    "threshold-unreached": "no gold answer passes evaluation.threshold",
    "reward-none": "no sample gets a reward at all",
    "reward-zero": "no sample earns the reward, though the gold answer does",
    "reward-constant": "every sample has the same reward",
    "zero-variance": "most groups have equal rewards, and teach nothing",
    "judge-over-budget": "a judge's budget is below what the run will probably cost",
    "out-of-memory": "the stage needs more memory than the machine has free",
}


def found(
    kind: Kind, what: str, evidence: str, key: str, mend: str, severity: Severity = "warning"
) -> Finding:
    """A finding of a known kind."""
    return Finding(kind, severity, what, evidence, key, mend)


def percent(share: float) -> str:
    """A share in words, as `42 %`; small ones with a digit more."""
    return (
        f"{share:.1%}".replace("%", " %") if 0 < share < 0.1 else f"{share:.0%}".replace("%", " %")
    )
