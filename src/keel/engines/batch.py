"""Which sequences are being decoded, which wait, and what enters next: numbers on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Entry:
    """What enters at a step: `sequences` in order, the first `held` of which belong to a prompt
    that was computed before; and `prompts`, to be computed now."""

    prompts: range
    sequences: range
    held: int


class Batch:
    """The live rows, and the queue of sequences before them.

    Sequence s is completion s mod n of prompt s div n. Sequences enter in order, so at any time at
    most one prompt has entered in part; it is computed once all the same. Row r of the arrays is
    row r of the store.
    """

    def __init__(
        self, lengths_P: Ints, limits_P: Ints, n: int, max_rows: int, prefill_tokens: int
    ) -> None:
        self.n = n
        self._lengths_P = lengths_P
        self._limits_P = limits_P
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._total = n * len(lengths_P)
        self._next = 0
        self.sequence = np.empty(0, dtype=np.int64)
        self.made = np.empty(0, dtype=np.int64)
        """Tokens sampled so far."""
        self.token = np.empty(0, dtype=np.int64)
        """The last token sampled, which is the next to enter the model."""

    @property
    def live(self) -> bool:
        """Whether anything is left to do."""
        return self._next < self._total or len(self.sequence) > 0

    @property
    def place(self) -> Ints:
        """Where each row's last token goes: as many tokens lie before it."""
        places: Ints = self._lengths_P[self.sequence // self.n] + self.made - 1
        return places

    @property
    def limit(self) -> Ints:
        """The budget of each row, in sampled tokens."""
        limits: Ints = self._limits_P[self.sequence // self.n]
        return limits

    def waiting(self) -> Entry:
        """What enters now: as many sequences as rows are free and the token budget lets in."""
        first = self._next
        stop = min(first + self._max_rows - len(self.sequence), self._total)
        computed = -(-first // self.n)  # prompts before this one have been computed
        budget = self._prefill_tokens
        prompt = computed
        while prompt * self.n < stop:
            budget -= int(self._lengths_P[prompt])
            if budget < 0 and prompt > computed:
                stop = prompt * self.n
                break
            prompt += 1
        held = min(computed * self.n, stop) - first
        return Entry(range(computed, prompt), range(first, stop), held)

    def add(self, entry: Entry) -> None:
        """The entry's sequences become the last rows, with nothing sampled yet."""
        none = np.zeros(len(entry.sequences), dtype=np.int64)
        self._next = entry.sequences.stop
        self.sequence = np.concatenate([self.sequence, np.array(entry.sequences, dtype=np.int64)])
        self.made = np.concatenate([self.made, none])
        self.token = np.concatenate([self.token, none])

    def drop(self, done: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Take out the rows that are done; the last rows move into the holes.

        Returns the rows that moved and where they went, for the store to follow.
        """
        left = len(done) - int(np.count_nonzero(done))
        holes = np.flatnonzero(done[:left])
        movers = left + np.flatnonzero(~done[left:])
        for name in ("sequence", "made", "token"):
            values = getattr(self, name)
            kept = values[:left].copy()
            kept[holes] = values[movers]
            setattr(self, name, kept)
        return movers, holes
