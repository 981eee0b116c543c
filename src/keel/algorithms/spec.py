"""An algorithm as data: five choices, and optional masks, distillation, value loss, entropy bonus,
corrections, auxiliary terms.

    J(θ) = Σ_n w_n m_n c_n · s(ρ_n(θ), A_n)  −  β Σ_n w_n · D_n(θ)

The terms are classes in the modules of this package; `keel.learn.loss` adds up what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from keel.algorithms import group_advantages, turn_advantages, weighted  # noqa: F401  (their kinds)
from keel.algorithms.advantages import AdvantageTerm
from keel.algorithms.auxiliary import AuxiliaryTerm, DemonstrationNLL
from keel.algorithms.corrections import CorrectionTerm
from keel.algorithms.losses import (
    AdaptiveEntropy,
    AdvantageDistillation,
    Bonus,
    Divergence,
    LossDistillation,
    ValueLoss,
)
from keel.algorithms.masks import MaskTerm
from keel.algorithms.ratios import RATIOS, Ratio, RatioKind, Weights
from keel.algorithms.surrogates import SurrogateTerm
from keel.algorithms.terms import (
    SINGLE_UPDATE,
    AsTuple,
    FrozenModel,
    Teacher,
    UnusedIf,
    one_of,
)

_IDLE = UnusedIf(
    lambda key: key.stage.single_update and not key.value.acts_on_policy,
    SINGLE_UPDATE.why,
    but=SINGLE_UPDATE.but,
)
_OFF = UnusedIf(
    lambda key: key.value is not None and not key.value.active,
    "algorithm.divergence.beta = 0 switches the divergence off",
    but=("beta", "adaptive"),
)


if TYPE_CHECKING:
    Advantage = AdvantageTerm
    Surrogate = SurrogateTerm
    Mask = MaskTerm
    Correction = CorrectionTerm
    Auxiliary = AuxiliaryTerm
else:
    Advantage = one_of(AdvantageTerm)
    Surrogate = one_of(SurrogateTerm)
    Mask = one_of(MaskTerm)
    Correction = one_of(CorrectionTerm)
    Auxiliary = one_of(AuxiliaryTerm)


def _truncating(corrections: Any) -> Any:
    """A correction without a kind truncates."""
    if not isinstance(corrections, tuple):
        return corrections
    return tuple(
        {"kind": "truncate", **one} if isinstance(one, dict) else one for one in corrections
    )


def _in_advantage(term: Any) -> Any:
    """A teacher's term without a place is of the advantage."""
    return {"place": "advantage", **term} if isinstance(term, dict) else term


class Algorithm(FrozenModel):
    """`divergence`, `distillation` and `value` are absent where None (`"none"` in TOML); masks and
    corrections are applied in their order."""

    advantage: Advantage
    ratio: Ratio
    surrogate: Annotated[Surrogate, _IDLE]
    weights: Weights
    divergence: Annotated[Divergence | None, _OFF] = None
    distillation: (
        Annotated[
            AdvantageDistillation | LossDistillation,
            Field(discriminator="place"),
            BeforeValidator(_in_advantage),
        ]
        | None
    ) = None
    value: ValueLoss | None = None
    entropy: Bonus = 0.0
    masks: Annotated[tuple[Mask, ...], AsTuple] = ()
    corrections: Annotated[tuple[Correction, ...], BeforeValidator(_truncating), AsTuple] = ()
    auxiliary: Annotated[tuple[Auxiliary, ...], AsTuple] = ()

    @model_validator(mode="after")
    def _goes_together(self) -> Algorithm:
        for reason in contradictions(self):
            raise ValueError(reason)
        return self

    @property
    def bonus(self) -> float:
        """The coefficient of the entropy bonus, of an adaptive one the first."""
        entropy = self.entropy
        return entropy.coefficient if isinstance(entropy, AdaptiveEntropy) else entropy

    @property
    def ratio_kind(self) -> RatioKind:
        """The ratio's function and equation."""
        return RATIOS[self.ratio]

    @property
    def ratio_per_sequence(self) -> bool:
        """Whether a sequence has one ratio."""
        return self.ratio_kind.per_sequence

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy must be in memory (β = 0 needs none)."""
        d = self.divergence
        held = d is not None and d.to == "reference" and d.active
        return held or self.surrogate.reads_reference

    @property
    def needs_teacher(self) -> bool:
        """Whether a teacher must be there."""
        return self.distillation is not None or self.advantage.uses_teacher

    @property
    def scores_teacher(self) -> bool:
        """Whether the advantage reads a teacher's log-probabilities."""
        return self.advantage.uses_teacher or self.advantage_distillation is not None

    @property
    def advantage_distillation(self) -> AdvantageDistillation | None:
        """The teacher's term, if it is added to the advantage."""
        return self.distillation if isinstance(self.distillation, AdvantageDistillation) else None

    @property
    def loss_distillation(self) -> LossDistillation | None:
        """The teacher's term, if it is one of the loss."""
        return self.distillation if isinstance(self.distillation, LossDistillation) else None

    @property
    def needs_reward(self) -> bool:
        """Whether the advantage is made of rewards; where not, they are optional."""
        return self.advantage.reads_reward

    @property
    def reads_components(self) -> bool:
        """Whether the advantage reads each reward for itself."""
        return self.advantage.reads_components

    @property
    def needs_positive(self) -> bool:
        """Whether the advantage divides by a mean of rewards."""
        return self.advantage.needs_positive

    @property
    def needs_value(self) -> bool:
        """Whether the advantage reads a value model."""
        return self.advantage.uses_value

    @property
    def needs_groups(self) -> bool:
        """Whether the advantage compares completions of one prompt (group size at least 2)."""
        return self.advantage.uses_groups

    @property
    def bootstraps(self) -> bool:
        """Whether the advantage puts V of the next state for what comes after it, so that an
        episode may be cut anywhere."""
        return self.advantage.bootstraps

    @property
    def per_action(self) -> bool:
        """Whether the loss of an action reads nothing of the others in its sequence."""
        return (
            self.ratio in ("none", "token")
            and self.weights.kind == "token_mean"
            and not self.surrogate.per_sequence
            and not self.surrogate.reads_sequence
            and self.surrogate.kind != "custom"
            and not self.whole_batch
            and not self.masks
            and all(correction.per_token for correction in self.corrections)
        )

    @property
    def whole_batch(self) -> bool:
        """Whether a term reads the whole optimizer batch, with the current policy's numbers."""
        return self.surrogate.whole_batch or any(mask.whole_batch for mask in self.masks)

    @property
    def demonstrations(self) -> DemonstrationNLL | None:
        """The term that imitates demonstrations, if there is one."""
        found = (t for t in self.auxiliary if t.of == "demonstrations")
        return next(found, None)  # type: ignore[return-value]

    @property
    def weighs(self) -> bool:
        """Whether a correction weighs tokens by the policy against the engine."""
        return any(one.weighs or one.kind == "custom" for one in self.corrections)

    @property
    def custom(self) -> bool:
        """Whether the surrogate, a mask or a correction is a user's own."""
        terms = (self.surrogate, *self.masks, *self.corrections)
        return any(term.kind == "custom" for term in terms)

    @property
    def reads_entropy(self) -> bool:
        """Whether a term of the whole batch reads the entropy of each token."""
        return any(mask.reads_entropy for mask in self.masks)

    @property
    def needs_greedy(self) -> bool:
        """Whether a greedy completion of each prompt must be sampled and scored too."""
        return self.advantage.reads_greedy

    @property
    def needs_steps(self) -> bool:
        """Whether rewards must come per step."""
        return self.advantage.reads_steps

    @property
    def reads_steps(self) -> bool:
        """Whether rewards of steps differ in effect from one of the whole answer.

        They do for a return to go, where the loss has one advantage for each token.
        """
        per_sequence = self.ratio_per_sequence or self.surrogate.per_sequence
        return self.needs_steps or (self.advantage.places_steps and not per_sequence)

    @property
    def reward_divergence(self) -> Divergence | None:
        """The divergence, if it is part of the reward."""
        d = self.divergence
        return d if d is not None and d.where == "reward" else None

    @property
    def loss_divergence(self) -> Divergence | None:
        """The divergence, if it is a term of the loss."""
        d = self.divergence
        return d if d is not None and d.where == "loss" else None

    @property
    def per_token_advantage(self) -> bool:
        """Whether advantages may differ between the tokens of one sequence, before a teacher's
        term is added."""
        return self.advantage.varies(self)


Choice = Literal[
    "advantage",
    "ratio",
    "surrogate",
    "masks",
    "weights",
    "divergence",
    "distillation",
    "value",
    "entropy",
    "auxiliary",
    "epochs",
]


@dataclass(frozen=True, slots=True)
class Preset:
    """An algorithm, the loop settings that its paper goes with, and where each comes from."""

    name: str
    title: str
    paper: str
    algorithm: Algorithm
    sources: Mapping[Choice, str]
    epochs: int = 1
    minibatches: int = 1
    """Optimizer steps per epoch. With one, and one epoch, the ratio stays 1 and no clip acts."""
    dynamic_sampling: bool = False
    overlong_share: float = 0.0
    """Share of the completion budget over which length is punished (DAPO)."""
    teacher: Teacher = "model"


def contradictions(algorithm: Algorithm) -> Iterator[str]:
    """Why choices do not go together, each with what to set instead; nothing where they do."""
    if algorithm.ratio == "none" and algorithm.surrogate.needs_ratio:
        yield (
            f'surrogate "{algorithm.surrogate.kind}" is a function of the ratio: ratio = "none" '
            "leaves it nothing"
        )
    yield from algorithm.surrogate.refusals(algorithm)
    if algorithm.ratio == "sequence_product" and algorithm.weights.kind == "sequence_sum":
        yield (
            'ratio "sequence_product" is one action a sequence, but weights "sequence_sum" would '
            'count it once for each token: set weights.kind = "sequence_mean"'
        )
    for mask in algorithm.masks:
        yield from mask.refusals(algorithm)
    if algorithm.surrogate.reads_groups and algorithm.weights.kind != "sequence_mean":
        yield (
            f'surrogate "{algorithm.surrogate.kind}" is a loss of a whole group, of which each '
            'completion has a share: set weights.kind = "sequence_mean"'
        )
    yield from _of_corrections(algorithm)
    kinds = [term.kind for term in algorithm.auxiliary]
    for at, name in enumerate(kinds):
        if name in kinds[:at]:
            yield f'auxiliary.{at} = "{name}" is there a second time: leave one out'
    imitated = algorithm.demonstrations
    if imitated and imitated.weighting == "teacher" and algorithm.loss_distillation is None:
        yield (
            'auxiliary "demonstrations" with weighting = "teacher" reads the divergence to a '
            'teacher: set distillation.place = "loss", or weighting = "none"'
        )
    kind = algorithm.advantage.kind
    if algorithm.ratio_per_sequence and algorithm.per_token_advantage:
        yield (
            f'ratio "{algorithm.ratio}" is one number a sequence and advantage "{kind}" differs '
            'from token to token: set ratio = "sequence_token" or "token", or advantage.kind = '
            '"value_baseline"'
        )
    if algorithm.needs_value and algorithm.value is None:
        yield (
            f'advantage "{kind}" reads a value model and none is trained: add a value loss '
            "([algorithm.value] coefficient = 0.1)"
        )
    if algorithm.value is not None and not algorithm.needs_value:
        yield (
            f'a value loss is set, but advantage "{kind}" never reads the value model: '
            'set value = "none"'
        )
    if algorithm.divergence is not None:
        yield from algorithm.divergence.refusals(algorithm)
    whole = algorithm.ratio_per_sequence or algorithm.surrogate.per_sequence
    if whole and algorithm.advantage_distillation is not None:
        yield (
            'distillation.place = "advantage" differs from token to token, and the ratio or the '
            'surrogate is one number a sequence: set it to "loss", or ratio = "token" and '
            'surrogate.kind = "clip"'
        )
    if (
        kind == "zero"
        and not algorithm.needs_teacher
        and not any(term.active for term in algorithm.auxiliary)
    ):
        yield (
            'advantage "zero" learns nothing, and no other term says what is to be learned: set '
            'distillation = { place = "loss" } and a teacher, or advantage.kind = "group_relative"'
        )


def _of_corrections(algorithm: Algorithm) -> Iterator[str]:
    for at, correction in enumerate(algorithm.corrections):
        key = "corrections" if len(algorithm.corrections) == 1 else f"corrections.{at}"
        yield from correction.refusals(key)
        if correction.kind == "normalise" and at == 0:
            yield (
                f'{key} = "normalise" divides the weights of what stands before it by their mean, '
                'and nothing does: put "truncate" or "mask" before it'
            )
        if correction in algorithm.corrections[:at]:
            yield f'{key} = "{correction.kind}" is there twice: leave one out'
        elif correction.weighs and any(one.weighs for one in algorithm.corrections[:at]):
            yield (
                f'{key} = "{correction.kind}" would multiply by the importance weight a second '
                'time: leave it out, or set kind = "reject", which leaves out without a weight'
            )
