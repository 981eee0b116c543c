"""Metrics of reward models, of DPO, of gates and of an LLM judge."""

from __future__ import annotations

from keel.analysis.metrics import Metric, Section

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
        Metric("eval/accuracy", "The same on the held-out rows; of steps, the first error.",
               "share, 0–1", ""),
        Metric("eval/auc", "Chance that a right answer's score lies above a wrong one's.",
               "share, 0–1", "0.5 knows nothing."),
        Metric("eval/log_loss", "Mean cross-entropy on the held-out rows.", "nats",
               "Rising while the loss falls: stop earlier."),
        Metric("eval/brier", "Mean squared error of the probabilities.", "1", ""),
        Metric("eval/ece", "Expected calibration error in ten bins.", "share, 0–1",
               "Above 0.1: the probabilities do not mean what they say."),
        Metric("eval/f1", "Harmonic mean of the accuracies on wrong and on right answers in steps "
               "(ProcessBench).", "share, 0–1", ""),
        Metric("rewards/chosen", "Mean β times the log-ratio of chosen answers.", "reward",
               "May fall, so long as rewards/rejected falls further."),
        Metric("rewards/rejected", "The same of rejected answers.", "reward", ""),
        Metric("rewards/margins", "Mean of their difference.", "reward", "Should rise."),
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
