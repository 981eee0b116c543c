"""All conditions in one table, and the diagnosis of a run by it.

A further condition is a further entry of `CONDITIONS`; the page docs/howto/diagnosis.md is made
from it, by `python -m keel.analysis.diagnosis.page > docs/howto/diagnosis.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from keel.analysis.diagnosis import lengths, models, policy, rewards, signal, text
from keel.analysis.diagnosis.history import StageHistory
from keel.analysis.diagnosis.load import histories
from keel.analysis.diagnosis.values import Advice, Condition, Diagnosis
from keel.runs.reader import Run

RATE = "optimizer.learning_rate"
BETA = "algorithm.divergence.beta"
FUNCTIONS = "rewards.functions"

CONDITIONS: Final[tuple[Condition, ...]] = (
    Condition(
        "no-signal",
        "Groups have no two different rewards: there is nothing to learn from",
        signal.no_signal,
        (
            "The task is too hard or too easy for the policy as it is",
            "The reward gives everything the same value, or is all or nothing",
            "The policy writes the same answer again and again",
        ),
        (
            Advice("rollout.group_size", "more answers to a prompt differ more often", factor=2),
            Advice("rollout.dynamic_sampling", "drops such groups and samples others", value=True),
            Advice("tasks", "prompts of which some are answered rightly"),
            Advice(FUNCTIONS, "a reward that also counts part of an answer tells bad from worse"),
        ),
        severity="error",
    ),
    Condition(
        "saturated-reward",
        "The reward is at its maximum: nothing is left to learn",
        signal.saturated_reward,
        (
            "The task is learned, or was from the start",
            "The reward pays for something that every completion has",
        ),
        (
            Advice("steps", "end the stage when the reward has reached its maximum", factor=0.5),
            Advice("tasks", "harder prompts"),
            Advice(FUNCTIONS, "a reward that tells good answers from better ones"),
        ),
    ),
    Condition(
        "entropy-collapse",
        "Entropy is gone before the task is learned: the policy explores no more",
        policy.entropy_collapse,
        (
            "The learning rate is too high for the noise in the advantages",
            "Nothing holds the policy back: no divergence, no entropy bonus, a low upper clip edge",
            "The reward pays one answer, whatever the prompt",
        ),
        (
            Advice(RATE, "smaller updates lose entropy more slowly", factor=0.3),
            Advice(
                "algorithm.surrogate.high",
                "a higher upper edge lets rare tokens gain (DAPO: 0.28)",
                value=0.28,
                where=("algorithm.surrogate.high", 0.2),
            ),
            Advice(
                "algorithm.entropy",
                "a bonus pays for exploration",
                value=0.01,
                where=("algorithm.entropy", 0.0),
            ),
            Advice(BETA, "holds the policy near the reference", factor=3),
        ),
        severity="error",
    ),
    Condition(
        "learning-rate-high",
        "Updates are too large: the reward fell back, or a step moves the policy too far",
        policy.learning_rate_high,
        (
            "The learning rate is too high",
            "Too many updates per batch: later ones are far off policy",
            "The advantages are noisy: few completions, or a value model that knows nothing",
        ),
        (
            Advice(RATE, "updates of a third move a third as far", factor=0.3),
            Advice(
                "epochs", "fewer passes over a batch stay nearer to the policy it is of", factor=0.5
            ),
            Advice("rollout.prompts_per_step", "more prompts make advantages less noisy", factor=2),
            Advice("optimizer.max_grad_norm", "bounds single updates", factor=0.5),
            Advice(
                "optimizer.warmup_steps",
                "the first updates of AdamW are the largest",
                value=10,
                where=("optimizer.warmup_steps", 0),
            ),
        ),
        severity="error",
    ),
    Condition(
        "learning-rate-low",
        "Nothing moves, although there is something to learn",
        policy.learning_rate_low,
        (
            "The learning rate is too low for this model, or for LoRA, which needs more",
            "A divergence with a large coefficient holds the policy where it is",
            "Weights in bfloat16 round the updates away",
        ),
        (
            Advice(RATE, "ten times, then see whether kl and entropy move", factor=10),
            Advice(BETA, "a weaker pull to the reference", factor=0.3),
        ),
    ),
    Condition(
        "kl-runaway",
        "The policy has left what the reference would write",
        policy.kl_runaway,
        (
            "No divergence in the objective, or one with a small coefficient",
            "The reward has a maximum far from natural answers: it is being gamed",
            "The learning rate is too high",
        ),
        (
            Advice(BETA, "holds the policy nearer to the reference", factor=5),
            Advice(BETA, "GRPO's coefficient", value=0.04, where=(BETA, 0.0)),
            Advice(
                "algorithm.divergence",
                'a divergence to the reference, as {to = "reference", where = "loss", beta = 0.04}',
                where=("algorithm.divergence", None),
            ),
            Advice(RATE, "smaller updates", factor=0.3),
            Advice("steps", "stop before the policy is far away", factor=0.5),
        ),
    ),
    Condition(
        "clip-idle",
        "The clip never acts: further updates on a batch do not move the policy",
        policy.clip_idle,
        ("The learning rate is too low for several updates per batch to matter",),
        (
            Advice(RATE, "ten times, until some ratios reach the clip range", factor=10),
            Advice("minibatches", "one update per batch gives the same for less time", value=1),
            Advice("epochs", "one pass gives the same for less time", value=1),
        ),
    ),
    Condition(
        "clip-saturated",
        "The clip cuts much of every batch",
        policy.clip_saturated,
        (
            "The learning rate is too high",
            "Too many updates per batch",
            "A clip range that is too narrow for this kind of ratio",
        ),
        (
            Advice(RATE, "smaller updates stay within the range", factor=0.3),
            Advice("epochs", "fewer passes over a batch", factor=0.5),
            Advice("minibatches", "fewer updates per pass", factor=0.5),
        ),
    ),
    Condition(
        "length-explosion",
        "Completions grow and nothing is gained by it",
        lengths.length_explosion,
        (
            "The weight of a completion is shared among its tokens, so long wrong ones cost less",
            "An entropy bonus or a high learning rate makes the end-of-sequence token rarer",
            "The reward pays for length, or for what long answers hold by chance",
        ),
        (
            Advice(
                "algorithm.weights.kind",
                "every token has the same weight",
                value="token_mean",
                where=("algorithm.weights.kind", "sequence_mean"),
            ),
            Advice(
                "rollout.overlong_buffer",
                "a soft penalty at the end of the budget",
                direction="higher",
            ),
            Advice("algorithm.entropy", "a weaker bonus", factor=0.1),
            Advice(RATE, "smaller updates", factor=0.3),
        ),
    ),
    Condition(
        "length-bias",
        "Wrong answers grow longer and right ones do not",
        lengths.length_bias,
        (
            "weights.kind = sequence_mean: a token of a long wrong answer is punished less",
            "Answers that are cut or ramble are wrong anyway, so length costs nothing",
        ),
        (
            Advice(
                "algorithm.weights.kind",
                "the same weight for each token (DAPO)",
                value="token_mean",
            ),
            Advice(
                "algorithm.advantage.scale",
                "no division by the std, as Dr. GRPO",
                value="none",
                where=("algorithm.advantage.scale", "std"),
            ),
            Advice(
                "rollout.overlong_buffer",
                "a soft penalty at the end of the budget",
                direction="higher",
            ),
        ),
    ),
    Condition(
        "length-reward",
        "The reward rises through length alone",
        rewards.length_reward,
        (
            "The reward, or the model that gives it, prefers long answers",
            "A rule counts things of which a longer text has more",
        ),
        (
            Advice(FUNCTIONS, "add a penalty of length, or judge answers of equal length"),
            Advice(
                "rollout.max_tokens",
                "a budget just above what right answers need",
                direction="lower",
            ),
            Advice(BETA, "holds the lengths near the reference's", factor=3),
        ),
    ),
    Condition(
        "truncation",
        "Completions are cut at the budget, and that costs the signal",
        lengths.truncation,
        (
            "rollout.max_tokens is below what answers need",
            "The policy does not write its end-of-sequence token",
        ),
        (
            Advice("rollout.max_tokens", "twice the budget", factor=2),
            Advice("rollout.mask_truncated", "lets cut answers count", value=False),
            Advice(
                "rollout.overlong_buffer",
                "makes the policy shorten its answers",
                direction="higher",
            ),
        ),
    ),
    Condition(
        "gold-falls",
        "The reward rises while a score that is not trained on falls",
        rewards.gold_falls,
        (
            "The reward is a proxy, and the policy has found where it is wrong",
            "The training prompts are learned by heart",
        ),
        (
            Advice(
                "steps",
                "stop where the score was best (evaluation selects that checkpoint)",
                factor=0.5,
            ),
            Advice(BETA, "holds the policy where the reward was made for", factor=3),
            Advice(FUNCTIONS, "train on the score that counts, or on several rewards"),
        ),
        severity="error",
    ),
    Condition(
        "gold-still",
        "The reward rises while the score that counts stands still",
        rewards.gold_still,
        (
            "The reward pays for something else than right answers",
            "Its model was trained on few pairs, or on answers of another policy",
        ),
        (
            Advice(FUNCTIONS, "train on the score that counts as well"),
            Advice(BETA, "holds the policy where the reward was made for", factor=3),
        ),
    ),
    Condition(
        "format-hacking",
        "The form of answers is learned and the content is not",
        rewards.format_hacking,
        (
            "The reward of format is easier to get than that of content, and pays as much",
            "The task is too hard: only the format gives a signal",
        ),
        (
            Advice(FUNCTIONS, "a smaller weight for the format, or gate_below on it"),
            Advice("tasks", "prompts of which some are answered rightly"),
        ),
    ),
    Condition(
        "repetition",
        "Completions repeat themselves more and more",
        text.repetition,
        (
            "The reward counts something that can be repeated",
            "The policy is far from the reference, or its entropy is gone",
        ),
        (
            Advice(FUNCTIONS, "count each thing once, or subtract repetitions"),
            Advice(BETA, "holds the policy near the reference", factor=3),
            Advice(RATE, "smaller updates", factor=0.3),
        ),
    ),
    Condition(
        "environment-words",
        "The reward is paid for words that the environment wrote",
        text.environment_words,
        (
            "The reward looks for the answer in the whole conversation, not in the policy's turns",
            "The environment gives the answer away",
        ),
        (
            Advice(FUNCTIONS, "judge what the policy wrote (completions, not turns)"),
            Advice("tasks", "a reply that does not hold the answer"),
        ),
        severity="error",
    ),
    Condition(
        "value-model",
        "The value model explains nothing of the returns",
        models.value_model_idle,
        (
            "Its learning rate is too low, or its warm-up too short",
            "Its coefficient or clip is too small for the size of the returns",
        ),
        (
            Advice(
                "value.optimizer.learning_rate", "ten times, until it explains something", factor=10
            ),
            Advice(
                "value.warmup_steps", "let it learn before the policy moves", direction="higher"
            ),
            Advice("algorithm.value.clip", "a wider range", factor=5),
        ),
    ),
    Condition(
        "engine-mismatch",
        "The engine that samples and the trainer disagree about the model",
        models.engine_mismatch,
        (
            "The engine has other weights: an old copy, a quantised one, another checkpoint",
            "The engine samples by other rules: temperature, a mask, another template",
            "The engine computes in a coarser number format",
        ),
        (
            Advice("rollout.engine", "see whether the difference goes", value="native"),
            Advice("rollout.dtype", "sample with the trainer's weights", value="model"),
            Advice(
                "algorithm.correction",
                'weighs the difference: {kind = "truncate"}',
                where=("algorithm.correction", None),
            ),
        ),
    ),
)


def diagnose(run: Run, damaged: list[str] | None = None) -> tuple[Diagnosis, ...]:
    """What is wrong with the stages of reinforcement learning of a run: errors, then warnings, each
    by their first step. Empty where nothing is found, or the run is too short to tell.

    With the list `damaged`, rollout files that cannot be read are left out and named in it.

    Raises:
        KeelError: the folder's recipe or metrics, or without the list rollouts, cannot be read.
    """
    found = [one for history in histories(run, damaged) for one in conditions_of(history)]
    return tuple(sorted(found, key=lambda d: (d.severity != "error", d.first_step)))


def conditions_of(
    history: StageHistory, conditions: Sequence[Condition] = CONDITIONS
) -> list[Diagnosis]:
    """The diagnoses of one stage, in the order of the table."""
    found = (condition.diagnose(history) for condition in conditions)
    return [one for one in found if one is not None]
