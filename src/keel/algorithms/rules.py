"""Which choices do not go together, and why. Read by `Algorithm` when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keel.algorithms.spec import Algorithm

SEQUENCE_RATIOS = frozenset({"sequence", "sequence_product"})


def contradictions(row: Algorithm) -> Iterator[str]:
    """The reasons for which a row is refused; none for a sound one."""
    yield from _ratio_and_surrogate(row)
    yield from _bounds(row)
    yield from _advantage(row)
    yield from _divergence(row)


def _ratio_and_surrogate(row: Algorithm) -> Iterator[str]:
    kind, ratio = row.surrogate.kind, row.ratio
    if kind == "log_prob" and ratio != "none":
        yield f'surrogate "log_prob" has no ratio in it: set ratio = "none", not "{ratio}"'
    if ratio == "none" and kind not in ("log_prob", "custom"):
        yield f'surrogate "{kind}" is a function of the ratio: ratio = "none" leaves it nothing'
    if kind == "geometric" and ratio != "token":
        yield (
            'surrogate "geometric" takes the mean over a sequence itself, of token ratios: '
            f'set ratio = "token", not "{ratio}"'
        )
    if kind == "geometric" and row.per_token_advantage:
        yield (
            'surrogate "geometric" is one number a sequence: advantage '
            f'"{row.advantage.kind}" differs from token to token'
        )
    if kind == "cispo" and ratio in SEQUENCE_RATIOS:
        yield (
            'surrogate "cispo" weighs each token\'s log-probability by its own ratio: '
            f'set ratio = "token" (or "sequence_token"), not "{ratio}"'
        )
    if ratio == "sequence_product" and row.weights.kind == "sequence_sum":
        yield (
            'ratio "sequence_product" is one action a sequence, but weights "sequence_sum" would '
            'count it once for each token: set weights.kind = "sequence_mean"'
        )


def _bounds(row: Algorithm) -> Iterator[str]:
    """Ranges of a ratio must hold 1, which it is on policy."""
    s, c = row.surrogate, row.correction
    if s.kind == "cispo" and not s.floor <= 1 <= s.cap:
        yield (
            f"surrogate.floor = {s.floor:g} and surrogate.cap = {s.cap:g} leave out 1, the ratio "
            "on policy: every token would get the same weight, set floor <= 1 <= cap"
        )
    if c is not None and c.kind == "truncate" and c.cap < 1:
        yield (
            f"correction.cap = {c.cap:g} cuts every weight, that of a token sampled on policy "
            "(1) too: set it to 1 or more"
        )
    if c is not None and c.kind == "mask" and not c.floor <= 1 <= c.cap:
        yield (
            f"correction.floor = {c.floor:g} and correction.cap = {c.cap:g} leave out 1, the "
            "weight on policy: every token would be masked, set floor <= 1 <= cap"
        )


def _advantage(row: Algorithm) -> Iterator[str]:
    kind = row.advantage.kind
    if row.ratio in SEQUENCE_RATIOS and row.per_token_advantage:
        yield (
            f'ratio "{row.ratio}" is one number a sequence and advantage "{kind}" differs from '
            'token to token: set ratio = "sequence_token" or "token", or advantage.kind = '
            '"value_baseline"'
        )
    if row.needs_value and row.value is None:
        yield (
            f'advantage "{kind}" reads a value model and none is trained: give the row a value '
            "loss ([algorithm.value] coefficient = 0.1)"
        )
    if row.value is not None and not row.needs_value:
        yield (
            f'a value loss is set, but advantage "{kind}" never reads the value model: '
            'set value = "none"'
        )


def _divergence(row: Algorithm) -> Iterator[str]:
    d = row.divergence
    if d is None:
        return
    if d.where == "loss" and d.to == "reference" and d.estimator == "k1" and not d.unbiased:
        yield (
            "the gradient of k1 in the loss is zero in expectation: use k2 or k3, "
            'unbiased = true, or where = "reward"'
        )
    if d.where == "reward" and row.advantage.kind == "process_group_relative":
        yield (
            'advantage "process_group_relative" reads the rewards of steps, not of tokens: '
            'a divergence in the reward would be lost, set where = "loss"'
        )
    if d.to == "old" and d.adaptive is not None and d.adaptive.rule == "ziegler":
        yield (
            "Ziegler's rule follows the divergence to the reference: to the old policy set "
            'adaptive.rule = "ppo"'
        )
    if d.to == "reference" and d.adaptive is not None and d.adaptive.rule == "ppo":
        yield (
            "PPO's rule follows the divergence to the old policy: to the reference set "
            'adaptive.rule = "ziegler"'
        )
    if d.where == "reward" and d.to == "old":
        yield (
            "in the reward, the divergence to the old policy is that of the sampling policy to "
            'itself, zero: set to = "reference" or where = "loss"'
        )
    if d.where == "reward" and d.unbiased:
        yield (
            "unbiased weighs a divergence in the loss by the token ratio; in the reward there is "
            "no ratio: set unbiased = false"
        )
    if d.where == "reward" and d.estimator == "full":
        yield (
            'estimator "full" is a gradient through the whole vocabulary, which a reward does '
            'not pass on: set estimator = "k1"'
        )
    if d.to == "old" and d.estimator == "full":
        yield (
            "the full divergence to the old policy would keep its logits for every token: "
            'use estimator = "k3"'
        )
    if d.unbiased and d.estimator == "full":
        yield (
            "the full divergence is exact over the vocabulary: there is no sample to weigh, "
            "set unbiased = false"
        )
    if d.beta == 0 and d.adaptive is not None:
        yield "an adaptive beta is multiplied, and 0 stays 0: start from beta > 0"
