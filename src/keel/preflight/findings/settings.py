"""Settings that are allowed and do not do what they look like, from the recipe's values."""

from __future__ import annotations

from collections.abc import Iterator

from keel.algorithms.presets import PRESETS
from keel.config.model import Model
from keel.config.optimisation import Optimizer
from keel.config.schema import RLStage
from keel.config.sources import Rewards
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found, percent

FROZEN_SHARE = 0.5
"""More than half of the weights standing still is more than a matter of rounding: in float32 at the
same rate it is a few in a thousand."""
ADAPTER_RATE = 2e-6
"""An adapter's second factor starts at 0 and has to grow by the learning rate alone; rates in use
are 1e-5 and more. Up to twice the default of a whole model (1e-6) was hardly meant for one."""


def warm_up(choice: Optimizer, steps: int, key: str) -> Finding | None:
    """Warm-up that outlasts the stage. `key` is that of the optimizer's table."""
    if choice.warmup_steps <= steps:
        return None
    reached = steps / choice.warmup_steps
    return found(
        "warm-up-never-ends",
        "the learning rate never reaches its value",
        f"warm-up of {choice.warmup_steps} steps in a stage of {steps}: it comes to "
        f"{choice.learning_rate * reached:g}, {percent(reached)} of {choice.learning_rate:g}",
        f"{key}.warmup_steps",
        f"set it under {steps}, a tenth of the steps for example",
    )


def timeouts(rewards: Rewards, key: str) -> Iterator[Finding]:
    """Rewards that may take longer than a call of them may take."""
    for at, source in enumerate(rewards.functions):
        own = source.options.get("timeout")
        built_in = ":" not in source.function
        if not built_in or not isinstance(own, int | float) or own <= rewards.timeout:
            continue
        yield found(
            "timeout-cut",
            f"reward {source.name or source.function!r} is cut off before its own timeout",
            f"functions.{at}.options.timeout = {own:g} s, but a call may take "
            f"rewards.timeout = {rewards.timeout:g} s",
            f"{key}.timeout",
            f"raise it to {own:g} or more, or lower the reward's own",
        )


def shared_interpreters(rewards: Rewards, key: str) -> Iterator[Finding]:
    """Rewards of code that run it in the interpreter of its tests."""
    for at, source in enumerate(rewards.functions):
        if source.function != "code" or source.options.get("isolation") != "shared":
            continue
        name = source.name or source.function
        yield found(
            "shared-interpreter",
            f"reward {name!r} can be earned without solving the task",
            'isolation = "shared" runs the code in the interpreter of its tests: it can return an '
            "object that equals everything, or change what the tests use",
            f"{key}.functions.{at}.options.isolation",
            'leave it out ("process"), unless the tests need classes or other objects of the code',
        )


def overlong(stage: RLStage, key: str) -> Finding | None:
    """A punishment of length that begins before the first token."""
    over, budget = stage.rollout.overlong_buffer, stage.rollout.max_tokens
    if over <= budget:
        return None
    return found(
        "overlong-covers-all",
        "every completion is punished for its length, the shortest too",
        f"overlong_buffer = {over} tokens of a budget of {budget}",
        f"{key}.overlong_buffer",
        f"set it under {budget}; a fifth of the budget is usual",
    )


def reuse(stage: RLStage, key: str) -> Finding | None:
    """Several epochs on a batch under a surrogate without a ratio."""
    if stage.algorithm.ratio != "none" or stage.epochs == 1:
        return None
    if stage.algorithm.surrogate.kind != "log_prob":
        return None
    return found(
        "reuse-without-ratio",
        "each batch is learned from again as though it were fresh",
        f'epochs = {stage.epochs} with surrogate "log_prob", which has no ratio to the policy that '
        "sampled: from the second pass on the gradient is of another policy's samples",
        key,
        'set it to 1, or use a surrogate with a ratio ("clip", ratio "token")',
    )


def still_ratio(stage: RLStage, key: str) -> Finding | None:
    """An objective that bounds the importance ratio, in a loop that keeps it at 1."""
    if not stage.ratio_stays_one:
        return None
    preset = PRESETS[stage.algorithm.preset]
    usual = f" ({preset.name} has {preset.minibatches})" if preset.minibatches > 1 else ""
    return found(
        "ratio-stays-1",
        "the importance ratio never moves from 1, so what bounds it never acts",
        "each batch is used for one optimizer step (epochs = 1, minibatches = 1): the gradient is "
        f'that of a plain policy gradient, whatever surrogate "{stage.algorithm.surrogate.kind}" '
        "and a divergence to the old policy would do",
        key,
        f"set it to 2 or more{usual}, or epochs",
    )


def frozen_weights(dtype: str, share: float, rate: float, key: str) -> Finding | None:
    """`share` of the weights that learn are too large for a step of `rate` to change them."""
    if dtype != "bfloat16" or share <= FROZEN_SHARE:
        return None
    return found(
        "frozen-weights",
        "most weights do not move: bfloat16 rounds the step away",
        f"at learning_rate = {rate:g}, {percent(share)} of the weights are so large that half of "
        "their last bit is more than the step",
        "model.dtype",
        f'set it to "float32" (a GPU still computes in bfloat16, by autocast), or raise {key}',
    )


def adapter_rate(model: Model, choice: Optimizer, key: str) -> Finding | None:
    """A whole model's learning rate on an adapter."""
    if model.lora is None or choice.learning_rate > ADAPTER_RATE:
        return None
    return found(
        "adapter-hardly-moves",
        "the adapter hardly moves",
        f"learning_rate = {choice.learning_rate:g} with LoRA, whose second factor starts at 0 and "
        "changes by about the learning rate a step",
        f"{key}.learning_rate",
        "set ten to a hundred times a whole model's, 1e-5 to 1e-4",
    )


def no_compiler(kernels: str) -> Finding | None:
    """There is compiled code for the model, and no compiler (`kernels` as in run.json)."""
    if kernels != "none":
        return None
    return found(
        "no-compiler",
        "sampling and updates take longer than they need to",
        "this model has compiled steps on a CPU, and no C compiler was found, or none whose code "
        "loads: it runs through its modules",
        "CC",
        "install a C compiler (gcc or clang), or name one in the environment variable CC",
    )
