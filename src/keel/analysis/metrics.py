"""Glossary entries of every metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of them: what it is, its unit, what to watch for."""

    name: str
    meaning: str
    unit: str
    watch: str


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    metrics: tuple[Metric, ...]


REWARD = Section(
    "Reward",
    (
        Metric(
            "reward",
            "Mean over the step's completions of the weighted sum of all rewards, before any KL "
            "penalty. Completions without a reward are left out.",
            "reward",
            "Should rise, with noise. Flat from the start: see frac_reward_zero_std.",
        ),
        Metric(
            "reward_std",
            "Mean over groups of the standard deviation (n − 1) of the reward within a group; over "
            "the whole batch where the advantage is scaled by the batch.",
            "reward",
            "The signal of group-relative advantages. Near 0 there is nothing to learn from.",
        ),
        Metric(
            "frac_reward_zero_std",
            "Share of groups whose completions all got the same reward, so that their "
            "group-relative advantages are exactly 0.",
            "share, 0–1",
            "Near 1: the task is too easy or too hard; change it, raise rollout.group_size or "
            "the temperature, or set rollout.dynamic_sampling.",
        ),
        Metric(
            "rewards/*/mean",
            "Mean of one reward function, unweighted, over the completions it scored.",
            "reward",
            "One that rises while the others fall is being gamed.",
        ),
        Metric(
            "rewards/*/std",
            "Standard deviation (n − 1) of one reward function over the step's completions.",
            "reward",
            "0: this reward says nothing.",
        ),
        Metric(
            "rewards/*/failures",
            "Completions that this reward function failed on and left without its verdict "
            "(rewards.on_error = skip).",
            "completions",
            "Should be 0.",
        ),
        Metric(
            "reward/greedy",
            "Mean reward of the prompts' greedy completions, the baseline of ReMax.",
            "reward",
            "",
        ),
    ),
)

POLICY = Section(
    "Policy update",
    (
        Metric(
            "loss",
            "What the optimizer step minimised: minus the surrogate, plus β times the divergence "
            "in the loss, plus the value loss, minus the entropy bonus. Mean over the step's "
            "updates.",
            "objective",
            "Says little: near 0 on policy by construction. Watch the reward.",
        ),
        Metric(
            "loss/policy",
            "The surrogate's part of the loss, −Σ w·s(ρ, A).",
            "objective",
            "0 in the first update of a step where advantages sum to 0 and weights are even.",
        ),
        Metric(
            "entropy",
            "Mean over completion tokens of the policy's entropy at the sampling temperature.",
            "nats per token",
            "A fast fall to 0 ends exploration: lower the learning rate, raise clip high, or add "
            "an entropy bonus. A steep rise: the policy falls apart.",
        ),
        Metric(
            "kl",
            "Mean per token of the row's divergence estimate (to the reference, or to the old "
            "policy where the row says so), as it enters loss or reward, without β.",
            "nats per token",
            "A slow climb is normal; a jump says that the policy ran away. Negative values are "
            "possible for the k1 estimate.",
        ),
        Metric(
            "kl/reference",
            "Mean per token of k1 = log π_old − log π_ref, of the policy that sampled.",
            "nats per token",
            "How far the policy is from the reference. Noisy, and at times negative.",
        ),
        Metric(
            "kl/sequence",
            "Mean over completions of the summed k1 to the reference; what Ziegler's rule steers.",
            "nats per completion",
            "Should come to the rule's target.",
        ),
        Metric(
            "kl/old",
            "Estimate of KL(old‖policy), the movement within one step.",
            "nats per token",
            "Above 0.1: too many epochs or too high a learning rate.",
        ),
        Metric(
            "kl/after",
            "KL(old‖policy) after the last update of the step; what PPO's adaptive rule steers.",
            "nats per token",
            "Should come to the rule's target.",
        ),
        Metric(
            "beta",
            "Coefficient of the divergence; moves where it is adaptive.",
            "1",
            "Running off to either side: the target cannot be met.",
        ),
        Metric(
            "ratio/mean",
            "Mean of the probability ratio of the policy to the old policy.",
            "1",
            "About 1. Far off: the updates of a step move too far.",
        ),
        Metric(
            "clip_ratio/low_mean",
            "Share of tokens whose ratio is under the lower edge while the advantage is negative: "
            "their gradient is cut.",
            "share, 0–1",
            "0 with one epoch and one mini-batch. Above 0.3: the updates move too far.",
        ),
        Metric(
            "clip_ratio/high_mean",
            "Share of tokens whose ratio is over the upper edge while the advantage is positive.",
            "share, 0–1",
            "As clip_ratio/low_mean.",
        ),
        Metric(
            "clip_ratio/region_mean",
            "Share of tokens cut on either side.",
            "share, 0–1",
            "GSPO's sequence ratios clip 0.1–0.2 by design; token ratios far fewer.",
        ),
        Metric(
            "grad_norm",
            "Euclidean norm of the gradient before it is clipped to optimizer.max_grad_norm.",
            "objective per weight",
            "0: nothing to learn in this batch. Spikes: lower the learning rate.",
        ),
        Metric(
            "learning_rate",
            "The optimizer's learning rate at this step, after warm-up and schedule.",
            "1",
            "",
        ),
        Metric(
            "steps_skipped",
            "Optimizer steps of the stage so far that were not taken, since the loss or a gradient "
            'was NaN or infinite; with on_nonfinite = "skip". The first 8 left their batch '
            "in faults/.",
            "optimizer steps",
            "Rising: see the causes in events.jsonl; lower the learning rate.",
        ),
    ),
)

VALUE = Section(
    "Value model",
    (
        Metric(
            "value/loss",
            "Mean squared error of the values to the returns (half of it, the larger of clipped "
            "and unclipped), before its coefficient.",
            "reward²",
            "Should fall, then follow the reward's variance.",
        ),
        Metric(
            "value/explained_variance",
            "1 − Var(return − value) / Var(return) over the step's tokens, before the update.",
            "share, ≤ 1",
            "Near 1: the critic knows. 0: no better than a constant. Negative: worse than that.",
        ),
        Metric(
            "value/clip_ratio",
            "Share of tokens where the clipped value loss was the larger one.",
            "share, 0–1",
            "Above 0.3: the value model moves too far in one step.",
        ),
        Metric("value/mean", "Mean value over completion tokens, before the update.", "reward", ""),
        Metric(
            "value/grad_norm",
            "Norm, before clipping, of the gradient of the weights that value.optimizer trains.",
            "reward² per weight",
            "As grad_norm.",
        ),
        Metric(
            "value/learning_rate",
            "The value model's learning rate at this step, where it has an optimizer of its own; "
            "learning_rate is 0 while only the value model learns (value.warmup_steps).",
            "1",
            "",
        ),
    ),
)

SUPERVISED = Section(
    "Supervised fine-tuning",
    (
        Metric(
            "mean_token_probability",
            "Mean probability that the model gives a token of the demonstrations, before the "
            "update.",
            "share, 0–1",
            "Should rise; at 1 the demonstrations are known by heart.",
        ),
    ),
)
