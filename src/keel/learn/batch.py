"""Batches of actions as the loss reads them: tokens of a language model, or moves in a game.

A batch changes its type on the way: `Actions` as they were sampled, with the models' scores;
`Estimates` of their advantages; `TrainBatch`, with the weights of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.learn.anchors import anchors
from keel.models.head import lacks_float64
from keel.models.packed import Packed, PackedSizes, sizes_on, upload
from keel.types import Completion, Group

A = TypeVar("A", bound="Actions")
B = TypeVar("B", bound="Actions | TrainBatch[Any]")
T = TypeVar("T")


@dataclass(frozen=True, eq=False, kw_only=True)
class Actions:
    """Sequences (S) of actions (N), end to end, without padding.

    `lengths` is the number of actions of each sequence; sequences of one of `groups` have their
    start in common, and `versions` are the numbers of the weights that they were begun with. Per
    action there are log-probabilities: of the engine that sampled it; of the policy before the
    update (`old_log_prob_N`; None on an on-policy step with one update, whose current ones are
    equal); of the reference; of the teacher; and values. The last three are None where the
    algorithm has no such model. The policy's entropy and Σ_v π² before the update are there where
    the algorithm asks for them. `anchor_N` is that of `RewardSignals`, None in a game. `lags` are
    the updates by which the `versions` are behind, where a log-linear `old_log_prob_N` is made of
    them in the loss.
    """

    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    engine_log_prob_N: Float[Tensor, " N"]
    old_log_prob_N: Float[Tensor, " N"] | None = None
    reference_log_prob_N: Float[Tensor, " N"] | None = None
    teacher_log_prob_N: Float[Tensor, " N"] | None = None
    old_entropy_N: Float[Tensor, " N"] | None = None
    old_squares_N: Float[Tensor, " N"] | None = None
    value_N: Float[Tensor, " N"] | None = None
    anchor_N: Int[Tensor, " N"] | None = None
    versions: tuple[int, ...] = ()
    lags: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.engine_log_prob_N.device

    @cached_property
    def lengths_S(self) -> Int[Tensor, " S"]:
        """The number of actions of each sequence."""
        return upload(self.lengths, self.device)

    @cached_property
    def groups_S(self) -> Int[Tensor, " S"]:
        """The group of each sequence."""
        return upload(self.groups, self.device)

    @property
    def turn_N(self) -> Int[Tensor, " N"]:
        """The turn of each action within its sequence, from 0: of a game, every action is one."""
        starts_S = self.lengths_S.cumsum(0) - self.lengths_S
        every_N = torch.arange(sum(self.lengths), device=self.device)
        return every_N - starts_S.repeat_interleave(self.lengths_S, output_size=len(every_N))

    @property
    def version_S(self) -> Int[Tensor, " S"] | None:
        """The number of the weights that each sequence was begun with; None in a game."""
        return upload(self.versions, self.device) if self.versions else None

    def of_sequences(self, x_N: Float[Tensor, " N"]) -> Float[Tensor, " S"]:
        """What all actions of a sequence have in common; NaN for a sequence without any."""
        x_N = torch.cat([x_N, x_N.new_full((1,), torch.nan)])
        first = zip(starts(self.lengths), self.lengths, strict=True)
        return x_N[upload([at if n else len(x_N) - 1 for at, n in first], self.device)]

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    def action_index(self, indices: Sequence[int]) -> Int[Tensor, " K"]:
        """The places among the N of the actions of these sequences."""
        return ranges(_spans(self.lengths, indices), self.device)

    def places(self, indices: Sequence[int]) -> slice | Int[Tensor, " K"]:
        """`action_index`, or the same as a slice where the sequences are a range."""
        return _places(self.lengths, indices, self.device)

    def select(self, indices: Sequence[int]) -> Self:
        """These sequences, in this order; sequences are never cut. Those of a range are views."""
        return replace(
            self,
            lengths=tuple(self.lengths[i] for i in indices),
            groups=tuple(self.groups[i] for i in indices),
            versions=tuple(self.versions[i] for i in indices if self.versions),
            lags=tuple(self.lags[i] for i in indices if self.lags),
            **per_action(self, self.places(indices)),
        )


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimates per action from the rewards, in float64.

    `advantage_N` is not whitened; `return_N` is the value model's target, None without one;
    `rewarded_N` marks the actions of sequences with a reward, None where all have one; `outcome_N`
    is the reward of each action's sequence, NaN for none. `state` is that of the advantage after
    the step, where it has one; `distillation_N` is a teacher's term.
    """

    advantage_N: Float[Tensor, " N"]
    return_N: Float[Tensor, " N"] | None = None
    rewarded_N: Bool[Tensor, " N"] | None = None
    outcome_N: Float[Tensor, " N"] | None = None
    state: Mapping[str, float] = field(default_factory=dict)
    distillation_N: Float[Tensor, " N"] | None = None

    def select(self, index_K: Int[Tensor, " K"]) -> Estimates:
        """The estimates of the actions at these places."""
        return replace(self, **per_action(self, index_K))


@dataclass(frozen=True, eq=False)
class TrainBatch(Generic[A]):
    """An optimizer batch, or a micro-batch of one, ready for the loss.

    `advantage_N` is whitened where the algorithm asks for it, and a teacher's term then added where
    it is of the advantage. The weights were set once for the whole optimizer batch:
    `weight_N` for the surrogate and the divergence; `token_weight`, 1/N of
    all its actions, for value loss and entropy; `metric_weight`, 1/N of the actions that enter the
    loss, for metrics. So were the factors of the surrogate: `correction_N`, `kept_N` of the masks
    and `prepared_N` of the surrogate itself, where the algorithm has any that read all of it.
    `auxiliary_K` is what each auxiliary term multiplies the sum over its tokens with, and `share`
    what demonstrations leave to all other terms. `seed` is the optimizer step's.
    """

    actions: A
    advantage_N: Float[Tensor, " N"]
    weight_N: Float[Tensor, " N"]
    return_N: Float[Tensor, " N"] | None
    token_weight: float
    metric_weight: float
    outcome_N: Float[Tensor, " N"] | None = None
    correction_N: Float[Tensor, " N"] | None = None
    kept_N: Bool[Tensor, " N"] | None = None
    prepared_N: Float[Tensor, " N *K"] | None = None
    auxiliary_K: Float[Tensor, " K"] | None = None
    share: float = 1.0
    seed: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.actions.lengths

    @property
    def sequences(self) -> int:
        return self.actions.sequences

    def select(self, indices: Sequence[int]) -> TrainBatch[A]:
        """These sequences, in this order, with the same weights."""
        values = per_action(self, self.actions.places(indices))
        return replace(self, actions=self.actions.select(indices), **values)


def to_device(batch: B, device: torch.device | str) -> B:
    """A `Batch` or `TrainBatch` on another device."""
    moved: dict[str, Any] = {}
    for entry in fields(batch):
        value = getattr(batch, entry.name)
        if isinstance(value, Tensor):
            moved[entry.name] = value.to(device)
        elif isinstance(value, Actions):
            moved[entry.name] = to_device(value, device)
    return replace(batch, **moved)


def per_action(
    part: Actions | Estimates | TrainBatch[Any], index_K: slice | Int[Tensor, " K"]
) -> dict[str, Any]:
    """The fields that have one value per action, at these places."""
    values = {f.name: getattr(part, f.name) for f in fields(part) if "_N" in f.name}
    return {name: value[index_K] for name, value in values.items() if value is not None}


# ---------------------------------------------------------------- of a language model


@dataclass(frozen=True, eq=False)
class Batch(Actions):
    """Sequences with the completion tokens (N) that the policy wrote in them.

    `tokens_T` are the sequences' tokens, `input_lengths` the number of each; `target_N` is the
    place of each completion token among the T. `prompt_lengths` is the number of tokens before each
    completion, which neighbours of one group have in common; () where they have none. Auxiliary
    terms may score more tokens, `extra_target_M`: of replies, or of demonstrations, which are
    sequences without any of the N. `extra_lengths` is their number in each sequence. `taught` has
    the same completions after the prompts that a teacher reads; None where those are the same.
    `teachers` are the places of the sequences' teachers, where there are several.
    """

    tokens_T: Int[Tensor, " T"]
    input_lengths: tuple[int, ...]
    target_N: Int[Tensor, " N"]
    prompt_lengths: tuple[int, ...] = ()
    extra_target_M: Int[Tensor, " M"] | None = None
    extra_lengths: tuple[int, ...] = ()
    taught: Batch | None = None
    teachers: tuple[int, ...] = ()

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """How many tokens each sequence has in common with the one before it."""
        if not self.prompt_lengths:
            return (0,) * self.sequences
        groups = self.groups
        answers = [n > p for n, p in zip(self.input_lengths, self.prompt_lengths, strict=True)]
        return tuple(
            length if i and groups[i] == groups[i - 1] and answers[i] and answers[i - 1] else 0
            for i, length in enumerate(self.prompt_lengths)
        )

    @cached_property
    def packed(self) -> Packed:
        """The model's view of the batch: a prompt once for all its neighbouring answers."""
        if not any(self.shared):
            return Packed(self.tokens_T, self.input_lengths, self.target_N)
        device = self.target_N.device
        spans, follows, moved = _pieces(self.input_lengths, self.shared)
        shift_N = upload(_repeated(moved, self.lengths), device)
        return Packed(
            tokens_T=self.tokens_T[ranges(spans, device)],
            lengths=tuple(length for _, length in spans),
            target_N=self.target_N + shift_N,
            follows=follows,
        )

    @cached_property
    def read(self) -> tuple[Packed, Int[Tensor, " N+M"] | None]:
        """The same with the M scored too, and the places among all of the N and then of the M."""
        if self.extra_target_M is None:
            return self.packed, None
        both, order = torch.cat([self.target_N, self.extra_target_M]).sort()
        lengths = tuple(map(sum, zip(self.lengths, self.extra_lengths, strict=True)))
        return replace(self, target_N=both, lengths=lengths).packed, order.argsort()

    @property
    def turn_N(self) -> Int[Tensor, " N"]:
        """The turn of each token in its sequence, from 0: a new one begins after tool output."""
        first = starts(self.lengths)
        gap_N = torch.diff(self.target_N, prepend=self.target_N[:1] - 1) != 1
        gap_N[upload([at for at, n in zip(first, self.lengths, strict=True) if n], self.device)] = 0
        turn_N = gap_N.cumsum(0)
        places = [min(at, max(len(gap_N) - 1, 0)) for at in first]
        start_S = turn_N[upload(places, self.device)] if len(gap_N) else turn_N
        return turn_N - start_S.repeat_interleave(self.lengths_S, output_size=len(gap_N))

    @property
    def rollouts(self) -> Batch:
        """The sequences that have any of the N; all where none has, as ranks compute together."""
        own = [i for i, length in enumerate(self.lengths) if length]
        return self.select(own) if 0 < len(own) < self.sequences else self

    @property
    def imitated_M(self) -> Bool[Tensor, " M"]:
        """Whether each of the M is of a demonstration."""
        written_M = _repeated(self.lengths, self.extra_lengths)
        return upload(written_M, self.device) == 0

    @property
    def sizes(self) -> PackedSizes:
        """The sizes that decide where micro-batches end: of each sequence the larger one, with its
        own prompt or the teacher's."""
        lengths, shared, other = self.input_lengths, self.shared, self.taught
        if other is not None:
            lengths = tuple(map(max, lengths, other.input_lengths))
            shared = tuple(map(min, shared, other.shared))
        return sizes_on(self.target_N.device, lengths, shared)

    def select(self, indices: Sequence[int]) -> Batch:
        """The batch of these sequences, in this order; sequences are never cut."""
        device = self.target_N.device
        first = starts(self.input_lengths)
        chosen = super().select(indices)
        input_lengths = tuple(self.input_lengths[i] for i in indices)
        at = _places(self.input_lengths, indices, device)
        by = [new - first[i] for new, i in zip(starts(input_lengths), indices, strict=True)]

        def moved(counts: Sequence[int]) -> Tensor | int:
            return -at.start if isinstance(at, slice) else upload(_repeated(by, counts), device)

        extra: dict[str, Any] = {}
        if self.extra_target_M is not None:
            counts = tuple(self.extra_lengths[i] for i in indices)
            own_M = self.extra_target_M[_places(self.extra_lengths, indices, device)]
            extra = {"extra_lengths": counts, "extra_target_M": own_M + moved(counts)}
        return replace(
            chosen,
            tokens_T=self.tokens_T[at],
            input_lengths=input_lengths,
            prompt_lengths=tuple(self.prompt_lengths[i] for i in indices if self.prompt_lengths),
            target_N=chosen.target_N + moved(chosen.lengths),
            taught=None if self.taught is None else self.taught.select(indices),
            teachers=tuple(self.teachers[i] for i in indices if self.teachers),
            **extra,
        )

    def spans(self, token_budget: int) -> list[range]:
        """The sequences of each micro-batch, cut as `PackedSizes` does."""
        every = range(self.sequences)
        return [every[span] for span in self.sizes.spans(token_budget)]

    def micro_batches(self, token_budget: int) -> list[Batch]:
        """The batch in order, in micro-batches."""
        spans = self.spans(token_budget)
        return [self] if len(spans) == 1 else [self.select(span) for span in spans]


def from_groups(
    groups: Sequence[Group], device: torch.device | str = "cpu", *, replies: bool = False
) -> Batch:
    """The batch of all completions of the groups, in order; only written tokens are among the N,
    and with `replies` the others of completions among the M."""
    tokens: list[int] = []
    targets: list[int] = []
    extra: list[int] = []
    extra_lengths: list[int] = []
    engine: list[float] = []
    lengths: list[int] = []
    for group in groups:
        for completion in group.completions:
            tokens.extend(group.prompt.tokens)
            written = completion.written.nonzero()[0]
            targets.extend((written + len(tokens)).tolist())
            replied = _replied(completion)
            extra.extend((replied + len(tokens)).tolist())
            extra_lengths.append(len(replied))
            tokens.extend(completion.tokens.tolist())
            engine.extend(completion.log_probs[written].tolist())
            lengths.append(len(written))
    pairs = [(g, group, c) for g, group in enumerate(groups) for c in group.completions]
    return Batch(
        extra_target_M=torch.tensor(extra, dtype=torch.long, device=device) if replies else None,
        extra_lengths=tuple(extra_lengths) if replies else (),
        tokens_T=torch.tensor(tokens, dtype=torch.long, device=device),
        input_lengths=tuple(len(group.prompt.tokens) + len(c) for _, group, c in pairs),
        prompt_lengths=tuple(len(group.prompt.tokens) for _, group, _ in pairs),
        target_N=torch.tensor(targets, dtype=torch.long, device=device),
        lengths=tuple(lengths),
        groups=tuple(g for g, _, _ in pairs),
        versions=tuple(c.weight_version for _, _, c in pairs),
        anchor_N=torch.tensor(anchors(groups), dtype=torch.long, device=device),
        engine_log_prob_N=torch.tensor(engine, dtype=torch.float32, device=device),
    )


def _replied(completion: Completion) -> npt.NDArray[np.int64]:
    """The places of what answered the policy: not of what stands before its first token."""
    others = (~completion.written).nonzero()[0]
    return others[others > completion.written.argmax()] if completion.written.any() else others[:0]


def _pieces(
    lengths: Sequence[int], shared: Sequence[int]
) -> tuple[list[tuple[int, int]], tuple[int, ...], list[int]]:
    """Sequences as pieces: prompts that neighbours share before their answers, the others whole.

    Returned are the start and length of each piece among the T, the piece that it follows (-1 for
    none), and by how many places the own tokens of each sequence move.
    """
    spans: list[tuple[int, int]] = []
    follows: list[int] = []
    moved: list[int] = []
    used = prompt = 0
    following = [*shared[1:], 0]
    for start, length, own, after in zip(starts(lengths), lengths, shared, following, strict=True):
        if not own and after:  # the first of several
            prompt = len(spans)
            spans.append((start, after))
            follows.append(-1)
            used += after
        common = own or after
        spans.append((start + common, length - common))
        follows.append(prompt if common else -1)
        moved.append(used - start - common)
        used += length - common
    return spans, tuple(follows), moved


def starts(lengths: Sequence[int]) -> list[int]:
    """The start of each of several pieces, end to end."""
    return list(accumulate(lengths, initial=0))[:-1]


def ranges(spans: Sequence[tuple[int, int]], device: torch.device) -> Int[Tensor, " K"]:
    """The numbers of all spans (start, count), one span after the other."""
    first = torch.tensor([start for start, _ in spans], dtype=torch.long)
    counts = torch.tensor([count for _, count in spans], dtype=torch.long)
    total = sum(count for _, count in spans)
    shift = (first + counts - counts.cumsum(0)).repeat_interleave(counts, output_size=total)
    return upload(shift + torch.arange(total), device)


def _repeated(numbers: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Each number as often as its count says."""
    each = torch.tensor(counts, dtype=torch.long)
    each_number = torch.tensor(numbers, dtype=torch.long)
    return each_number.repeat_interleave(each, output_size=sum(counts))


def _spans(lengths: Sequence[int], indices: Sequence[int]) -> list[tuple[int, int]]:
    """The start and the length of some of several pieces, end to end."""
    first = starts(lengths)
    return [(first[i], lengths[i]) for i in indices]


def _places(
    lengths: Sequence[int], indices: Sequence[int], device: torch.device
) -> slice | Int[Tensor, " K"]:
    """Where these pieces lie."""
    if not isinstance(indices, range) or indices.step != 1:
        return ranges(_spans(lengths, indices), device)
    first = [*starts(lengths), sum(lengths)]
    return slice(first[indices.start], first[indices.stop]) if indices else slice(0, 0)


def read(numbers: Sequence[Tensor]) -> list[float]:
    """Single numbers from wherever they are, in one transfer: the host waits for it."""
    device = numbers[0].device
    dtype = torch.float32 if lacks_float64(device) else torch.float64
    found: list[float] = torch.stack([x.detach().to(device, dtype) for x in numbers]).tolist()
    return found
