"""Glossary entries: what a run on environments receives and does."""

from __future__ import annotations

from keel.analysis.metrics import Metric, Section

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
            "Mean return of the greedy policy over held-out episodes; `/low` and `/high` are its "
            "95 % bootstrap interval over the episodes.",
            "reward",
            "What to report, over several seeds.",
        ),
        Metric("eval/return/*", "End of the interval of eval/return.", "reward", ""),
        Metric("eval/length", "Mean length of the held-out episodes.", "steps", ""),
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
