"""A step's rollouts as the rows of its Parquet file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from keel.learn.advantages import outcome_of
from keel.learn.batch import Batch
from keel.runs.rollouts import RolloutRow
from keel.training.rollout import Rollouts
from keel.types import Completion


def rollout_rows(
    rollouts: Rollouts, batch: Batch | None, advantage_N: Tensor | None
) -> list[RolloutRow]:
    """One row a completion, in the order of the batch."""
    if batch is None:
        return []
    old = _pieces(batch, batch.old_log_prob_N)
    advantages = _pieces(batch, advantage_N)
    out: list[RolloutRow] = []
    for g, (group, judged) in enumerate(zip(rollouts.groups, rollouts.verdicts, strict=True)):
        for completion, verdict in zip(group.completions, judged, strict=True):
            at = len(out)
            out.append(
                RolloutRow(
                    group=g,
                    prompt_id=group.prompt.id,
                    task=group.prompt.task,
                    prompt=group.prompt.content,
                    completion=completion.transcript,
                    tokens=completion.tokens,
                    log_probs=completion.log_probs,
                    written=completion.written,
                    finish=completion.finish,
                    reward=verdict.reward,
                    old_log_probs=_placed(completion, next(old)),
                    advantages=_placed(completion, next(advantages)),
                    components=verdict.components,
                    extras={name: values[at] for name, values in rollouts.extras.items()},
                    steps=verdict.steps,
                    outcome=outcome_of(verdict),
                )
            )
    return out


def _pieces(batch: Batch, values_N: Tensor | None) -> Iterator[npt.NDArray[Any] | None]:
    if values_N is None:
        yield from [None] * batch.sequences
        return
    ends = np.cumsum(batch.lengths)[:-1]
    yield from np.split(values_N.detach().cpu().numpy(), ends)


def _placed(
    completion: Completion, written: npt.NDArray[Any] | None
) -> npt.NDArray[np.float32] | None:
    """Values of the written tokens at their places in the completion, 0 at the others."""
    if written is None:
        return None
    out = np.zeros(len(completion), dtype=np.float32)
    out[completion.written] = written
    return out
