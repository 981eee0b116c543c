"""Small batches of loose log-probabilities, for tests of the loss without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keel.algorithms.spec import Algorithm
from keel.learn.batch import Batch, Estimates
from keel.learn.loss import loss, prepare, whole_batch
from keel.models.head import Scores
from keel.types import Completion

PROMPT = 2


def answer(
    tokens: Sequence[int], written: Sequence[bool] | None = None, log_probs: Any = None
) -> Completion:
    """A completion of these tokens, all of them the policy's unless `written` says which."""
    count = len(tokens)
    return Completion(
        tokens=np.array(tokens, dtype=np.int64),
        log_probs=np.zeros(count, np.float32) if log_probs is None else log_probs,
        written=np.ones(count, bool) if written is None else np.array(written, dtype=bool),
        finish="eos",
        text="",
    )


@dataclass(frozen=True, eq=False)
class Sample:
    """A batch with estimates, and a model's scores of it."""

    batch: Batch
    estimates: Estimates
    log_prob_N: Tensor
    entropy_N: Tensor
    value_N: Tensor


def blank(lengths: Sequence[int], groups: Sequence[int]) -> Batch:
    """A batch of these completion lengths, each after a prompt of two tokens."""
    targets, start = [], 0
    for length in lengths:
        targets += list(range(start + PROMPT, start + PROMPT + length))
        start += PROMPT + length
    count = sum(lengths)
    return Batch(
        tokens_T=torch.arange(start),
        input_lengths=tuple(PROMPT + length for length in lengths),
        target_N=torch.tensor(targets),
        lengths=tuple(lengths),
        groups=tuple(groups),
        engine_log_prob_N=torch.zeros(count, dtype=torch.float64),
    )


def sample(lengths: Sequence[int], groups: Sequence[int], seed: int, *, shift: float) -> Sample:
    """Random numbers; `shift` is how far the policy is from the old one."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    old_N = -normal().abs() - 0.1
    batch = replace(
        blank(lengths, groups),
        old_log_prob_N=old_N,
        engine_log_prob_N=old_N + normal(0.2),
        reference_log_prob_N=old_N + normal(0.3),
        value_N=normal(),
    )
    estimates = Estimates(return_N=normal(), advantage_N=normal())
    outcome_S = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    estimates = replace(estimates, outcome_N=outcome_S.repeat_interleave(batch.lengths_S))
    return Sample(batch, estimates, old_N + normal(shift), normal().abs(), normal())


def per_sequence(made: Sample, seed: int = 0) -> Sample:
    """The sample with one advantage a sequence."""
    generator = torch.Generator().manual_seed(seed)
    each = torch.randn(made.batch.sequences, generator=generator, dtype=torch.float64)
    advantage_N = each.repeat_interleave(made.batch.lengths_S)
    return replace(made, estimates=replace(made.estimates, advantage_N=advantage_N))


def gradient(
    algorithm: Algorithm, made: Sample, parts: Sequence[Sequence[int]], budget: int = 16
) -> tuple[Tensor, Tensor]:
    """Loss and its gradient in (log-probs, entropies, values), summed over micro-batches.

    `parts` are the sequences of each micro-batch; the gradient is in the order of the whole batch.
    """
    leaves = [
        tensor.clone().requires_grad_()
        for tensor in (made.log_prob_N, made.entropy_N, made.value_N)
    ]
    whole = prepare(algorithm, made.batch, made.estimates, budget)
    if algorithm.whole_batch:
        whole = whole_batch(algorithm, whole, made.log_prob_N, made.entropy_N)
    ends = torch.tensor(whole.lengths).cumsum(0).tolist()
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        index = torch.cat([torch.arange(ends[i] - whole.lengths[i], ends[i]) for i in part])
        log_prob_N, entropy_N, value_N = (leaf[index] for leaf in leaves)
        scores = Scores(log_prob_N, entropy_N, value_N, None, distillation_N=log_prob_N.square())
        out = loss(algorithm, whole.select(list(part)), scores, 0.04)
        out.total.backward()  # type: ignore[no-untyped-call]
        total = total + out.total.detach()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    return total, torch.cat(grads)
