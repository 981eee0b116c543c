"""Glossary entries of every metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or a family of them: what it is, its unit, what to watch for."""

    name: str
    meaning: str
    unit: str
    watch: str = ""


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
            "teacher/kl",
            "Mean per token of k1 = log π_old − log π_teacher, of the policy that sampled; minus "
            "the mean advantage of on-policy distillation at γ = 0.",
            "nats per token",
            "Should fall towards 0. Flat and high: the teacher never agrees with what the policy "
            "samples; begin with an sft stage. Noisy, and at times negative.",
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
            "Near 1: the value model predicts the returns. 0: no better than a constant. "
            "Negative: worse than that.",
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


COMPLETIONS = Section(
    "Completions",
    (
        Metric(
            "completions/mean_length",
            "Mean length of the step's completions, in tokens that the policy wrote.",
            "tokens",
            "A climb without a rise in reward is padding; a fall to a few tokens is collapse.",
        ),
        Metric("completions/min_length", "Shortest completion of the step.", "tokens", ""),
        Metric(
            "completions/max_length",
            "Longest completion of the step.",
            "tokens",
            "At most rollout.max_tokens.",
        ),
        Metric(
            "completions/mean_terminated_length",
            "Mean length of the completions that ended by themselves.",
            "tokens",
            "Below mean_length while clipped_ratio is above 0.",
        ),
        Metric(
            "completions/min_terminated_length",
            "Shortest completion that ended by itself.",
            "tokens",
        ),
        Metric(
            "completions/max_terminated_length",
            "Longest completion that ended by itself.",
            "tokens",
        ),
        Metric(
            "completions/clipped_ratio",
            "Share of completions cut off at rollout.max_tokens.",
            "share, 0–1",
            "Above 0.1: raise rollout.max_tokens, or rewards judge half an answer.",
        ),
    ),
)

SAMPLING = Section(
    "Sampling",
    (
        Metric(
            "sampling/sampling_logp_difference/mean",
            "Mean over tokens of |log π_trainer − log π_engine| before the update; with "
            'rollout.old_log_probs = "engine" over those of the first mini-batch.',
            "nats",
            "Under 1e-5 with the native engine in float32; about 1e-2 with bfloat16 engines. More: "
            "engine and trainer disagree about the model.",
        ),
        Metric(
            "sampling/sampling_logp_difference/max",
            "The largest such difference.",
            "nats",
            "One token of several nats: a wrong template, mask or sampling setting.",
        ),
        Metric(
            "sampling/importance_sampling_ratio/min",
            "Smallest ratio π_trainer / π_engine of the step.",
            "1",
        ),
        Metric(
            "sampling/importance_sampling_ratio/mean",
            "Mean over tokens (or sequences) of π_trainer / π_engine, truncated where the row "
            "corrects for it.",
            "1",
            "About 1.",
        ),
        Metric(
            "sampling/importance_sampling_ratio/max",
            "Largest ratio π_trainer / π_engine of the step.",
            "1",
        ),
        Metric(
            "rollout/staleness/mean",
            "Updates between the weights that completions were begun with and those they are "
            "trained on; mean over completions, where rollout.async_level is set.",
            "updates",
            "At most rollout.async_level.",
        ),
        Metric(
            "rollout/staleness/max",
            "The same of the completion with the oldest weights.",
            "updates",
        ),
        Metric(
            "rollout/refills",
            "How often the step sampled again because groups without variance were dropped.",
            "refills",
            "At rollout.max_refills the step goes on with what it has.",
        ),
        Metric(
            "groups/dropped",
            "Groups left out of the step: none has a reward, or (rollout.dynamic_sampling) all "
            "rewards were equal.",
            "groups",
            "Sampling spent on nothing: see frac_reward_zero_std.",
        ),
        Metric(
            "prompts/left_out",
            "Prompts passed over so far because they were longer than prompts.max_tokens, or than "
            "what the context leaves besides the answer, or could not be encoded.",
            "prompts",
            "A rising count trains on the short questions only.",
        ),
        Metric(
            "rollout/tokens",
            "Tokens that the policy wrote in this step, in dropped groups and greedily too.",
            "tokens",
        ),
        Metric(
            "step/tokens",
            "Tokens of the sequences that the step learned from: prompts and completions.",
            "tokens",
            "0: nothing was learned from in this step.",
        ),
        Metric(
            "num_tokens",
            "Tokens of the sequences learned from so far in the run.",
            "tokens",
        ),
    ),
)

EVALUATION = Section(
    "Evaluation on the validation split",
    (
        Metric(
            "eval/pass@1",
            "Share of validation prompts whose greedy completion passes "
            "(reward ≥ evaluation.threshold), where a reward is declared as correctness.",
            "share, 0–1",
            "The figure that counts. Training reward rising alone is overfitting or gaming.",
        ),
        Metric(
            "eval/pass@*",
            "Probability that one of k sampled completions passes, estimated without bias and "
            "averaged over validation prompts [2107.03374].",
            "share, 0–1",
            "Falling while pass@1 rises: the policy loses breadth.",
        ),
        Metric(
            "eval/reward",
            "Mean reward of the greedy validation completions, where no reward is declared as "
            "correctness and pass@k is undefined.",
            "reward",
            "As for training rewards: a learned one may be gamed.",
        ),
        Metric(
            "eval/*/low",
            "Lower end of the 95 % interval of the metric before it: Wilson's for pass@1, "
            "Student's t otherwise.",
            "as the metric",
            "Two curves differ where their intervals part.",
        ),
        Metric("eval/*/high", "Upper end of that interval.", "as the metric", ""),
        Metric(
            "eval/sampled",
            "Share of sampled validation completions that pass, or their mean reward where there "
            "is no pass@1.",
            "share, 0–1, or reward",
            "Comes close to the greedy figure as entropy falls.",
        ),
        Metric(
            "eval/mean_length",
            "Mean length of the greedy validation completions.",
            "tokens",
            "As completions/mean_length.",
        ),
    ),
)


JUDGING = Section(
    "Reward models and DPO",
    (
        Metric(
            "accuracy",
            "Share of the step's pairs, or judged places, that the model gets right, before the "
            "update.",
            "share, 0–1",
            "Far above eval/accuracy: the rows are known by heart.",
        ),
        Metric("margin", "Mean score of chosen less that of rejected answers.", "reward", ""),
        Metric("mean_reward", "Mean score, or log-odds of right, of the step's rows.", "1", ""),
        Metric("eval/accuracy", "Share of the validation pairs or answers that the model gets "
               "right; of answers in steps, of those whose first wrong step it finds.",
               "share, 0–1", ""),
        Metric("eval/auc", "Chance that a right answer's score lies above a wrong one's.",
               "share, 0–1", "0.5 knows nothing."),
        Metric("eval/log_loss", "Mean cross-entropy on the validation rows.", "nats",
               "Rising while the loss falls: stop earlier."),
        Metric("eval/brier", "Mean squared error of the probabilities.", "1", ""),
        Metric("eval/ece", "Expected calibration error in ten bins.", "share, 0–1",
               "Above 0.1: the probabilities do not mean what they say."),
        Metric("eval/f1", "Harmonic mean of the accuracies on wrong and on right answers in steps "
               "(ProcessBench).", "share, 0–1", ""),
        Metric("rewards/chosen", "Mean β times the log-ratio of chosen answers.", "reward",
               "May fall, so long as rewards/rejected falls further."),
        Metric("rewards/rejected", "The same of rejected answers.", "reward", ""),
        Metric("rewards/margins", "Mean reward of chosen answers less that of rejected ones "
               "(in DPO the implied rewards).", "reward", "Should rise."),
        Metric("rewards/accuracies", "Share of pairs whose difference is above 0.", "share, 0–1",
               ""),
        Metric("rewards/*/shut", "Share of completions that a gate shut out.", "share, 0–1",
               "Near 1: nothing else is learned from."),
    ),
)  # fmt: skip

JUDGE = Section(
    "LLM judge",
    (
        Metric("judge/asked", "Questions put to the judge for the step, refills and greedy "
               "answers (ReMax) included, each draw of a call once; cached ones among them.",
               "questions", ""),
        Metric("judge/tokens", "Tokens read and written for the step's verdicts, as when they were "
               "paid for.", "tokens", ""),
        Metric("judge/dollars", "What the step's verdicts cost when they were paid for.",
               "dollars", "0 without price_in and price_out."),
        Metric("eval/judge/*", "Questions, tokens and dollars of the evaluation after the step, as "
               "judge/asked, judge/tokens and judge/dollars are of its rollouts.", "as the metric",
               "Not part of judge/dollars; the account at the end of the stage holds both."),
        Metric("judge/unparsed", "Share of answers (pairwise: of pairs) without a verdict.",
               "share, 0–1", "Above 0.05: raise max_tokens, or read judge_unparsed in the "
               "rollouts."),
        Metric("judge/ties", "Share of judged pairs worth ½: ties, and orders that differ.",
               "share, 0–1", "Near 1: the judge tells nothing apart."),
        Metric("judge/inconsistent", "Share of pairs asked in both orders of which the two "
               "verdicts differ.", "share, 0–1", "Above 0.3: place weighs more than content."),
        Metric("judge/position_bias", "Share of pairs in which the first place won in both orders, "
               "less that of the second.", "−1 to 1", "0 is fair."),
    ),
)  # fmt: skip


CONTROL = Section(
    "Classic control",
    (
        Metric(
            "environment_steps",
            "Steps taken so far in all copies of the environment.",
            "steps",
            "The axis to compare algorithms on.",
        ),
        Metric(
            "episode/return",
            "Mean undiscounted return of the training episodes that ended in this row, exploration "
            "and all.",
            "reward",
            "Should rise. It lags: what ends now began under an older policy.",
        ),
        Metric(
            "episode/length", "Mean length of those episodes.", "steps", "Its limit: truncation."
        ),
        Metric("episode/finished", "How many there were.", "episodes", ""),
        Metric(
            "eval/return",
            "Mean return of the greedy policy over evaluation episodes; `/low` and `/high` are its "
            "95 % bootstrap interval over the episodes.",
            "reward",
            "What to report, over several seeds.",
        ),
        Metric("eval/return/*", "End of the interval of eval/return.", "reward", ""),
        Metric("eval/length", "Mean length of the evaluation episodes.", "steps", ""),
        Metric(
            "updates",
            "Optimizer steps in this row.",
            "steps",
            "Fewer than epochs × minibatches: target_kl ended the iteration early.",
        ),
        Metric(
            "epsilon", "Share of actions taken at random (ε-greedy) at the end of the row.", "1", ""
        ),
        Metric(
            "q/mean",
            "Mean value of the actions taken in the batches drawn.",
            "reward",
            "Far above what an episode can return: overestimation; set double = true.",
        ),
    ),
)

SECTIONS = (
    *(REWARD, COMPLETIONS, POLICY, VALUE, SAMPLING, EVALUATION, SUPERVISED),
    *(JUDGING, JUDGE, CONTROL),
)
