"""How long a stage will take, and what it will cost, from what a check has timed."""

from __future__ import annotations

from dataclasses import dataclass

from keel.config.judging import DPOStage
from keel.config.schema import RLStage, SFTStage, Stage

BACKWARD = 2.0
"""A backward pass, in forward passes: one for the inputs, one for the weights."""
OPTIMIZER_SECONDS = 3e-9
"""Of an AdamW step, for each parameter that learns: 28 bytes go through one core on a CPU."""
DISK_BYTES = 300e6
"""Written, read again for the checksum and synced in a second."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What the check has timed on a step's rows, or on a part of them.

    `tokens` are the model-input tokens of those rows and `forward` the seconds of the policy's
    forward pass over them without gradients; `sampling` and `scoring` are those of the
    `sequences` that were sampled (0 where nothing is).
    """

    tokens: int
    forward: float
    sequences: int = 0
    sampling: float = 0.0
    scoring: float = 0.0


@dataclass(frozen=True, slots=True)
class StageSizes:
    """What the stage works with: model-input tokens and sequences of a step and of an evaluation,
    parameters that learn, and bytes of a checkpoint."""

    step_tokens: int
    step_sequences: int = 0
    evaluation_tokens: int = 0
    evaluation_sequences: int = 0
    trained: int = 0
    checkpoint_bytes: int = 0
    adapters: bool = False
    """Only adapters learn: the backward pass leaves the weights out."""
    recomputes: bool = False
    """With activation checkpointing the backward pass goes forward once more."""
    critic: bool = False
    """A critic with a backbone of its own learns too."""


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds of a stage, by what they go into."""

    parts: tuple[tuple[str, float], ...]

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.parts)

    def cost(self, price: float) -> float:
        """At a price for an hour."""
        return self.seconds / 3600 * price


def stage_duration(stage: Stage, timed: Timed, sizes: StageSizes) -> Duration:
    """The seconds of a whole stage whose steps are as the one that was timed.

    Loading is left out, and so is what a longer answer would take.
    """
    token = timed.forward / max(timed.tokens, 1)
    one = max(timed.sequences, 1)
    sample, score = timed.sampling / one, timed.scoring / one
    forward = token * sizes.step_tokens
    learns = 1 + BACKWARD - sizes.adapters + sizes.recomputes
    updates = 1
    parts: dict[str, float] = {}
    if isinstance(stage, RLStage):
        updates = stage.epochs * stage.minibatches
        parts["sampling"] = sample * sizes.step_sequences * stage.steps
        parts["scoring"] = score * sizes.step_sequences * stage.steps
        parts["measuring"] = forward * _measured(stage, sizes.critic) * stage.steps
        learning = forward * stage.epochs * (learns + (1 + BACKWARD) * sizes.critic)
    else:
        learning = forward * (learns + isinstance(stage, DPOStage))
    step = learning + OPTIMIZER_SECONDS * sizes.trained * updates
    parts["learning"] = step * stage.steps
    parts["evaluation"] = _evaluation(stage, token, sample + score, sizes)
    parts["checkpoints"] = checkpoints_of(stage) * sizes.checkpoint_bytes / DISK_BYTES
    return Duration(tuple((name, seconds) for name, seconds in parts.items() if seconds))


def evaluations_of(stage: Stage) -> int:
    """How often a stage evaluates, if it does: before, every so many steps, and after."""
    if isinstance(stage, SFTStage):
        return 0
    every = stage.evaluation.every
    return 2 + ((stage.steps - 1) // every if every else 0)


def checkpoints_of(stage: Stage) -> int:
    """How many checkpoints a stage leaves: every so many steps, and at the end."""
    return (stage.steps - 1) // stage.checkpoints.every + 1


def _measured(stage: RLStage, critic: bool) -> int:
    """Forward passes of a step before the first update."""
    row = stage.algorithm
    on_engine = stage.rollout.old_log_probs == "engine"
    adaptive = row.divergence is not None and row.divergence.adaptive is not None
    needed = (
        stage.epochs * stage.minibatches > 1
        or adaptive
        or row.reward_divergence is not None
        or stage.reference.measured
    )
    head = row.value is not None and not critic
    return int((needed and not on_engine) or head) + stage.keeps_reference + critic


def _evaluation(stage: Stage, token: float, answered: float, sizes: StageSizes) -> float:
    times = evaluations_of(stage)
    if isinstance(stage, RLStage):
        each = 1 + stage.evaluation.samples
        return answered * sizes.evaluation_sequences * each * times
    return token * sizes.evaluation_tokens * (1 + isinstance(stage, DPOStage)) * times
