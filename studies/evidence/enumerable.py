"""A language model small enough that every expectation is a sum over all of its completions.

Two letters and an end token, at most `LENGTH` tokens: a table of logits for each prefix. The
reward of a completion is drawn at random, so values and advantages have no simple form.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.objective import segments

LETTERS, LENGTH = 2, 6
END = LETTERS


def _completions() -> list[tuple[int, ...]]:
    """All of them, in a fixed order: those that end, and those cut at the length."""
    words = [w for n in range(LENGTH) for w in itertools.product(range(LETTERS), repeat=n)]
    return [(*w, END) for w in words] + list(itertools.product(range(LETTERS), repeat=LENGTH))


@dataclass(frozen=True, eq=False)
class EnumerableLM:
    """A tabular policy and a reward, with its completions S laid end to end as N tokens.

    Z counts prefixes; `state_N` is the prefix that a token was written after.
    """

    logits_ZV: Tensor
    reward_S: Tensor
    state_N: Tensor
    token_N: Tensor
    lengths_S: Tensor

    @classmethod
    def drawn(cls, seed: int, right: float = 1 / 3) -> EnumerableLM:
        """Logits of deviation 1; a share `right` of the completions has reward 1, else 0."""
        rng = torch.Generator().manual_seed(seed)
        completions = _completions()
        prefixes = {c[:k] for c in completions for k in range(len(c))}
        index = {p: i for i, p in enumerate(sorted(prefixes))}
        states = [index[c[:k]] for c in completions for k in range(len(c))]
        return cls(
            torch.randn(len(index), LETTERS + 1, generator=rng, dtype=torch.float64),
            (torch.rand(len(completions), generator=rng) < right).double(),
            torch.tensor(states),
            torch.tensor([token for c in completions for token in c]),
            torch.tensor([len(c) for c in completions]),
        )

    @property
    def probability_S(self) -> Tensor:
        """Of each completion."""
        log_ZV = self.logits_ZV.log_softmax(-1)
        return segments.segment_sum(log_ZV[self.state_N, self.token_N], self.lengths_S).exp()

    def expectation_ZV(self, x_N: Tensor) -> Tensor:
        """E[x | prefix, token], x a number of each token and of the completion it stands in."""
        p_N = segments.spread(self.probability_S, self.lengths_S)
        return self._cells(p_N * x_N) / self._cells(p_N)

    @property
    def visits_ZV(self) -> Tensor:
        """How often a completion writes a token after a prefix."""
        return self._cells(segments.spread(self.probability_S, self.lengths_S))

    @property
    def value_Z(self) -> Tensor:
        """The exact value of each prefix: the mean reward of completions that go on from it."""
        p_N = segments.spread(self.probability_S, self.lengths_S)
        reward_N = segments.spread(self.reward_S, self.lengths_S)
        return self._cells(p_N * reward_N).sum(-1) / self._cells(p_N).sum(-1)

    @property
    def advantage_ZV(self) -> Tensor:
        """The exact advantage of each token after each prefix, Q − V."""
        q_ZV = self.expectation_ZV(segments.spread(self.reward_S, self.lengths_S))
        return q_ZV - self.value_Z[:, None]

    def score_SK(self, weight_N: Tensor) -> Tensor:
        """Σ_n weight_n ∇ log π(o_n) of each completion, over the K logits."""
        probability_NV = self.logits_ZV.softmax(-1)[self.state_N]
        ahead_NV = torch.nn.functional.one_hot(self.token_N, LETTERS + 1) - probability_NV
        sequence_N = segments.sequence_index(self.lengths_S)
        found = torch.zeros(len(self.lengths_S), *self.logits_ZV.shape, dtype=torch.float64)
        found.index_put_((sequence_N, self.state_N), weight_N[:, None] * ahead_NV, accumulate=True)
        return found.flatten(1)

    def _cells(self, x_N: Tensor) -> Tensor:
        cell_N = self.state_N * (LETTERS + 1) + self.token_N
        found = torch.zeros(self.logits_ZV.numel(), dtype=x_N.dtype).index_add(0, cell_N, x_N)
        return found.reshape(self.logits_ZV.shape)
