"""Glossary entries: what the policy says, in training and on the held-out side."""

from __future__ import annotations

from keel.analysis.metrics import Metric, Section

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
            "",
        ),
        Metric(
            "completions/max_terminated_length",
            "Longest completion that ended by itself.",
            "tokens",
            "",
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
            "Mean over tokens of |log π_trainer − log π_engine| under the weights sampled from.",
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
            "",
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
            "",
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
            "Tokens that the policy wrote in this step, dropped groups among them.",
            "tokens",
            "",
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
            "",
        ),
    ),
)

EVALUATION = Section(
    "Held-out evaluation",
    (
        Metric(
            "eval/pass@1",
            "Share of held-out prompts whose greedy completion passes "
            "(reward ≥ evaluation.threshold), where a reward is declared as correctness.",
            "share, 0–1",
            "The figure that counts. Training reward rising alone is overfitting or gaming.",
        ),
        Metric(
            "eval/pass@*",
            "Probability that one of k sampled completions passes, estimated without bias and "
            "averaged over held-out prompts [2107.03374].",
            "share, 0–1",
            "Falling while pass@1 rises: the policy loses breadth.",
        ),
        Metric(
            "eval/reward",
            "Mean reward of the greedy held-out completions, where no reward is declared as "
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
            "Share of sampled held-out completions that pass, or their mean reward where there is "
            "no pass@1.",
            "share, 0–1, or reward",
            "Comes close to the greedy figure as entropy falls.",
        ),
        Metric(
            "eval/mean_length",
            "Mean length of the greedy held-out completions.",
            "tokens",
            "As completions/mean_length.",
        ),
    ),
)
