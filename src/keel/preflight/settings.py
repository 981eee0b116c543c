"""Settings that are allowed and do not do what they seem to, from the recipe's values alone."""

from __future__ import annotations

from collections.abc import Iterator

from keel.algorithms.presets import PRESETS
from keel.config.model import Model
from keel.config.rl import RolloutStage
from keel.config.sources import Rewards
from keel.config.stage import Optimizer
from keel.engines.registry import capabilities_of
from keel.preflight.finding import Finding, percent

FROZEN_SHARE = 0.5
"""More than half of the weights not moving is more than rounding: in float32 at the same rate it
is a few in a thousand."""
ADAPTER_RATE = 2e-6
"""An adapter's second factor starts at 0 and has to grow by the learning rate alone; rates in use
are 1e-5 and more. Up to twice the default of a whole model (1e-6) was hardly meant for one."""


def of_optimizer(optimizer: Optimizer, steps: int, key: str) -> Iterator[Finding]:
    """A warm-up that is longer than the stage."""
    if optimizer.warmup_steps > steps:
        reached = steps / optimizer.warmup_steps
        rate = optimizer.learning_rate
        yield Finding(
            "warm-up-never-ends",
            "the learning rate never reaches its value",
            f"warm-up of {optimizer.warmup_steps} steps in a stage of {steps}: it comes to "
            f"{rate * reached:g}, {percent(reached)} of {rate:g}",
            f"{key}.warmup_steps",
            f"set it under {steps}, a tenth of the steps for example",
        )


def of_adapter(model: Model, optimizer: Optimizer, key: str) -> Iterator[Finding]:
    """A whole model's learning rate on an adapter."""
    if model.lora is not None and optimizer.learning_rate <= ADAPTER_RATE:
        yield Finding(
            "adapter-hardly-moves",
            "the adapter hardly moves",
            f"learning_rate = {optimizer.learning_rate:g} with LoRA, whose second factor starts at "
            "0 and changes by about the learning rate a step",
            f"{key}.learning_rate",
            "set ten to a hundred times a whole model's, 1e-5 to 1e-4",
        )


def of_rewards(rewards: Rewards, key: str) -> Iterator[Finding]:
    """Timeouts that cut a reward off, and code that shares the interpreter of its tests."""
    for at, source in enumerate(rewards.functions):
        name, own = source.name or source.function, source.options.get("timeout")
        built_in = ":" not in source.function
        if built_in and isinstance(own, int | float) and own > rewards.timeout:
            yield Finding(
                "timeout-cut",
                f"reward {name!r} is cut off before its own timeout",
                f"functions.{at}.options.timeout = {own:g} s, but a call may take "
                f"rewards.timeout = {rewards.timeout:g} s",
                f"{key}.timeout",
                f"raise it to {own:g} or more, or lower the reward's own",
            )
        if source.function == "code" and source.options.get("isolation") == "shared":
            yield Finding(
                "shared-interpreter",
                f"reward {name!r} can be earned without solving the task",
                'isolation = "shared" runs the code in the interpreter of its tests: it can return '
                "an object that equals everything, or change what the tests use",
                f"{key}.functions.{at}.options.isolation",
                'leave it out ("process"), unless the tests need classes or other objects of the '
                "code",
            )


def of_objective(stage: RolloutStage, prefix: str) -> Iterator[Finding]:
    """Length penalties, and reuse of a batch that the surrogate does not account for."""
    over, budget = stage.rollout.overlong_buffer, stage.rollout.max_tokens
    algorithm = stage.algorithm
    if over > budget:
        yield Finding(
            "overlong-covers-all",
            "every completion is punished for its length, the shortest too",
            f"overlong_buffer = {over} tokens of a budget of {budget}",
            f"{prefix}rollout.overlong_buffer",
            f"set it under {budget}; a fifth of the budget is usual",
        )
    no_ratio = algorithm.ratio == "none" and algorithm.surrogate.kind == "log_prob"
    if no_ratio and stage.epochs > 1:
        yield Finding(
            "reuse-without-ratio",
            "each batch is learned from again as if it were fresh",
            f'epochs = {stage.epochs} with surrogate "log_prob", which has no ratio to the policy '
            "that sampled: from the second pass on the gradient is of another policy's samples",
            f"{prefix}epochs",
            'set it to 1, or use a surrogate with a ratio ("clip", ratio "token")',
        )
    if stage.ratio_stays_one:
        preset = PRESETS[algorithm.preset]
        usual = f" ({preset.name} has {preset.minibatches})" if preset.minibatches > 1 else ""
        yield Finding(
            "ratio-stays-1",
            "the importance ratio never moves from 1, so what bounds it never acts",
            "each batch is used for one optimizer step (epochs = 1, minibatches = 1): the gradient "
            f'is that of a plain policy gradient, whatever surrogate "{algorithm.surrogate.kind}" '
            "and a divergence to the old policy would do",
            f"{prefix}minibatches",
            f"set it to 2 or more{usual}, or epochs",
        )
    if not capabilities_of(stage.rollout.engine).exact:
        yield Finding(
            "resume-not-exact",
            "a resumed run may sample other tokens than one that was not interrupted",
            f"{stage.rollout.engine} sums in an order that depends on what is sampled at the same "
            "time, so near-ties fall either way; seeds and weights are restored exactly",
            f"{prefix}rollout.engine",
            'set it to "native" if a resumed run has to be equal bit for bit',
        )


def frozen_weights(share: float, rate: float, key: str) -> Finding | None:
    """`share` of the trained bfloat16 weights are too large for a step of `rate` to change them."""
    if share <= FROZEN_SHARE:
        return None
    return Finding(
        "frozen-weights",
        "most weights do not move: bfloat16 rounds the step away",
        f"at learning_rate = {rate:g}, {percent(share)} of the weights are so large that half of "
        "their last bit is more than the step",
        "model.dtype",
        f'set it to "float32" (a GPU still computes in bfloat16, by autocast), or raise {key}',
    )


def uncorrected(effect: str, key: str) -> Finding:
    """A CPU samples in float32 and learns in bfloat16, and no weight corrects for the gap."""
    return Finding(
        "bfloat16-uncorrected",
        "the policy that learns is rounded, the one that samples is not",
        f"model.autocast computes the update in bfloat16: {effect}",
        key,
        'set it to "truncate", or leave model.autocast out',
    )


def no_compiler(kernels: str) -> Finding | None:
    """There is compiled code for the model, and no compiler (`kernels` as in run.json)."""
    if kernels != "none":
        return None
    return Finding(
        "no-compiler",
        "sampling and updates take longer than they need to",
        "this model has compiled steps on a CPU, and no C compiler was found, or none whose code "
        "loads: it runs through its modules",
        "CC",
        "install a C compiler (gcc or clang), or name one in the environment variable CC",
    )
