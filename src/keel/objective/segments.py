"""Sums, copies and recurrences over sequences that lie end to end.

No function loops over tokens in Python. Sums over a sequence do not depend on where it lies in the
batch, bit for bit, nor on the order in which a GPU's threads finish. Lengths may be 0; those that
do not add up to N raise on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad


class _Sum(torch.autograd.Function):
    """Segment sums; `_Spread` is its adjoint, and it is that of `_Spread`.

    index_add and the gradient of index_select would add in the order of the GPU's threads.
    """

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, lengths_S: Tensor) -> Tensor:
        ctx.save_for_backward(lengths_S)
        ctx.total = x_N.numel()
        # The library's own check of the lengths fails where there is no sequence at all, and on a
        # GPU the host would wait for it.
        unchecked = (lengths_S.numel() == 0 and x_N.numel() == 0) or lengths_S.is_cuda
        return torch.segment_reduce(x_N, "sum", lengths=lengths_S, initial=0.0, unsafe=unchecked)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (lengths_S,) = ctx.saved_tensors
        return _spread(gradients[0], lengths_S, ctx.total), None


class _Spread(torch.autograd.Function):
    """Copies a sequence's number to each of its tokens."""

    @staticmethod
    def forward(ctx: Any, x_S: Tensor, lengths_S: Tensor, total: int | None) -> Tensor:
        ctx.save_for_backward(lengths_S)
        return x_S.repeat_interleave(lengths_S, output_size=total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (lengths_S,) = ctx.saved_tensors
        return segment_sum(gradients[0].contiguous(), lengths_S), None, None


def _spread(x_S: Tensor, lengths_S: Tensor, total: int | None) -> Tensor:
    return cast(Tensor, _Spread.apply(x_S, lengths_S, total))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, eq=False)
class Groups:
    """Sums and maxima over groups of sequences in any order, given to each of their members."""

    groups_S: Tensor

    @property
    def index_S(self) -> Tensor:
        """The number of each sequence's group, from 0."""
        return self._places[0]

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        _, index_S, size_P = torch.unique(self.groups_S, return_inverse=True, return_counts=True)
        return index_S, index_S.argsort(stable=True), size_P

    def sum(self, x_S: Tensor) -> Tensor:
        """The sum over the sequence's group."""
        index_S, order_S, size_P = self._places
        return segment_sum(x_S[order_S], size_P)[index_S]

    def max(self, x_S: Tensor) -> Tensor:
        """The maximum over the sequence's group."""
        index_S, _, size_P = self._places
        start_P = x_S.new_full(size_P.shape, -torch.inf)
        return start_P.scatter_reduce(0, index_S, x_S, "amax")[index_S]


def sequence_index(lengths_S: Int[Tensor, " S"]) -> Int[Tensor, " N"]:
    """The sequence that each token belongs to.

        i(n) = #{ s : L_0 + … + L_s ≤ n }

    Source: Blelloch 1990, "Prefix sums and their applications", §1.5 (segments).
    """
    return torch.arange(lengths_S.numel(), device=lengths_S.device).repeat_interleave(lengths_S)


def segment_sum(x_N: Float[Tensor, " N"], lengths_S: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """The sum over each sequence; 0 for an empty one.

        y_i = Σ_{n : i(n) = i} x_n

    Source: Blelloch 1990, "Prefix sums and their applications", §1.5 (segmented sum).
    """
    return cast(Tensor, _Sum.apply(x_N, lengths_S))  # type: ignore[no-untyped-call]


def segment_mean(x_N: Float[Tensor, " N"], lengths_S: Int[Tensor, " S"]) -> Float[Tensor, " S"]:
    """The mean over each sequence; 0 for an empty one.

        y_i = (1/L_i) Σ_{n : i(n) = i} x_n

    Source: the 1/|o_i| Σ_t of GRPO, arXiv:2402.03300 eq. 3.
    """
    return segment_sum(x_N, lengths_S) / lengths_S.clamp(min=1)


def spread(
    x_S: Shaped[Tensor, " S"], lengths_S: Int[Tensor, " S"], *, total: int | None = None
) -> Shaped[Tensor, " N"]:
    """A sequence's number, at each of its tokens; `total` is N, which a GPU else waits for.

        y_n = x_{i(n)}

    Source: Blelloch 1990, "Prefix sums and their applications", §1.5 (segmented copy).
    """
    return _spread(x_S, lengths_S, total)


def continues(lengths_S: Int[Tensor, " S"]) -> Bool[Tensor, " N"]:
    """Whether the sequence goes on after the token: false on its last.

        c_n = [ i(n) = i(n+1) ]

    Source: the (1 − done_t) of GAE's recursion, arXiv:1506.02438 §3.
    """
    index_N = sequence_index(lengths_S)
    if index_N.numel() == 0:
        return index_N.bool()
    return pad(index_N[1:] == index_N[:-1], (0, 1), value=False)


def on_last(x_S: Float[Tensor, " S"], lengths_S: Int[Tensor, " S"]) -> Float[Tensor, " N"]:
    """A sequence's number on its last token, 0 before; an empty sequence has nowhere to put it.

        r_n = x_{i(n)} [ n is the last token of i(n) ]

    Source: the outcome reward of InstructGPT, arXiv:2203.02155 §3.5.
    """
    x_N = spread(x_S, lengths_S)
    return torch.where(continues(lengths_S), torch.zeros_like(x_N), x_N)


def shift(x_N: Float[Tensor, " N"], lengths_S: Int[Tensor, " S"]) -> Float[Tensor, " N"]:
    """What the next token of the same sequence has; 0 on the last.

        y_n = x_{n+1} [ i(n+1) = i(n) ]

    Source: V(s_{t+1}) with V = 0 after the end, Sutton and Barto 2018 §3.4.
    """
    return torch.where(continues(lengths_S), _ahead(x_N, 1), torch.zeros_like(x_N))


def linear_recurrence(
    decay_N: Float[Tensor, " N"], input_N: Float[Tensor, " N"], *, horizon: int | None = None
) -> Float[Tensor, " N"]:
    """A linear recurrence from the end, by doubling: O(log N) operations on tensors.

        x_n = b_n + a_n x_{n+1},   x_{N+1} = 0
        with a horizon h:  x_n = Σ_{l<h} (Π_{j<l} a_{n+j}) b_{n+l}

    A decay of exactly 0 ends a segment: nothing after it, infinite or NaN, is seen before it. (So
    no gradient flows into a decay that is 0.)

    Source: Hillis and Steele 1986, "Data parallel algorithms"; Blelloch 1990 §1.4.1.
    """
    total = input_N.numel()
    # Windows reach past the end, where there is nothing: round up to a power of two.
    wanted = 1 << max(total - 1, 0).bit_length() if horizon is None else min(horizon, total)
    # A window maps what comes after it to the sum at its start: x -> state + decay · x.
    decay, state, window = decay_N, input_N, 1
    head_decay, head, covered = torch.ones_like(decay_N), torch.zeros_like(input_N), 0
    while True:
        if wanted & window:
            head = head + _through(head_decay, _ahead(state, covered))
            head_decay = head_decay * _ahead(decay, covered)
            covered += window
        if covered >= wanted:
            return head
        state = state + _through(decay, _ahead(state, window))
        decay = decay * _ahead(decay, window)
        window *= 2


def to_go(x_N: Float[Tensor, " N"], lengths_S: Int[Tensor, " S"]) -> Float[Tensor, " N"]:
    """The sum from each token to the end of its sequence.

        y_n = Σ_{m ≥ n, i(m) = i(n)} x_m

    Source: the reward to go, Williams 1992; Sutton and Barto 2018 eq. 3.7.
    """
    return linear_recurrence(continues(lengths_S).to(x_N.dtype), x_N)


def _ahead(x_N: Tensor, steps: int) -> Tensor:
    """x_{n+steps}, 0 past the end."""
    return pad(x_N[steps:], (0, min(steps, x_N.numel())))


def _through(decay_N: Tensor, x_N: Tensor) -> Tensor:
    return torch.where(decay_N == 0, torch.zeros_like(x_N), decay_N * x_N)


def whiten(
    x_N: Float[Tensor, " N"],
    present_N: Bool[Tensor, " N"] | None = None,
    *,
    epsilon: float = 1e-8,
) -> Float[Tensor, " N"]:
    """The numbers less their mean, over the root of their unbiased variance.

        y_n = (x_n − μ) / √(σ² + ε),   μ = (1/N) Σ x_n,   σ² = 1/(N−1) Σ (x_n − μ)²

    Over all tokens of all ranks: hand in the whole optimizer batch. Where `present_N` is false a
    number leaves μ and σ² and becomes 0. A single number becomes 0.

    Source: advantage normalisation, Engstrom et al. 2020 (arXiv:2005.12729); ε within the root as
    in arXiv:2403.17031.
    """
    present_N = torch.ones_like(x_N, dtype=torch.bool) if present_N is None else present_N
    zero = torch.zeros_like(x_N)
    count = present_N.sum().clamp(min=1)
    mean = torch.where(present_N, x_N, zero).sum() / count
    centred_N = torch.where(present_N, x_N - mean, zero)
    variance = centred_N.square().sum() / (count - 1).clamp(min=1)
    return centred_N / (variance + epsilon).sqrt()
