"""Which sequences are being decoded, which wait, and which enter next."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class DecodeEntry:
    """What enters at a step: `sequences`, the first `held` of which answer a prompt that is
    computed already; and `prompts`, to be computed now."""

    prompts: range
    sequences: range
    held: int


Moves = tuple[Ints, Ints]
"""The old and the new numbers of entries that move."""


class DecodeBatch:
    """The live rows with their prompts, and the queue of sequences before them.

    Sequence s is completion s mod n of prompt s div n. Sequences enter in order, so at
    most one group has entered in part; its prompt is computed only once. The first `known_P` tokens
    of prompt p need not be computed. Row r of the arrays is entry r of the answers' keys and
    values, and slot g entry g of the prompts': those with an unfinished answer.
    """

    def __init__(
        self,
        lengths_P: Ints,
        limits_P: Ints,
        n: int,
        max_num_seqs: int,
        prefill_tokens: int,
        known_P: Ints | int = 0,
    ) -> None:
        self.n = n
        self._lengths_P = lengths_P
        self._entering_P = lengths_P - known_P
        self._limits_P = limits_P
        self._max_num_seqs = max_num_seqs
        self._prefill_tokens = prefill_tokens
        self._total = n * len(lengths_P)
        self._next = 0
        self._left_P = np.full(len(lengths_P), n, dtype=np.int64)
        self._slot_P = np.full(len(lengths_P), -1, dtype=np.int64)
        self.prompt = np.empty(0, dtype=np.int64)
        """The prompt of each slot."""
        self.sequence = np.empty(0, dtype=np.int64)
        self.made = np.empty(0, dtype=np.int64)
        """Tokens sampled so far."""
        self.token = np.empty(0, dtype=np.int64)
        """The last token sampled, which is the next to enter the model."""
        self._update()

    def _update(self) -> None:
        """Derive what changes only when rows enter or leave."""
        prompts = self.sequence // self.n
        self._before: Ints = self._lengths_P[prompts]
        self.slot: Ints = self._slot_P[prompts]
        """The slot of each row's prompt; the array is replaced, never written to."""
        self.limit: Ints = self._limits_P[prompts]
        """The budget of each row, in sampled tokens."""
        self.length: Ints = self._lengths_P[self.prompt]
        """Tokens of the prompt in each slot."""

    @property
    def live(self) -> bool:
        """Whether anything is left to do."""
        return self._next < self._total or len(self.sequence) > 0

    @property
    def place(self) -> Ints:
        """The position of each row's last token."""
        return self._before + self.made - 1

    @property
    def ahead(self) -> int:
        """The most rows that can be live from now on."""
        return min(self._max_num_seqs, len(self.sequence) + self._total - self._next)

    def prompts_ahead(self, entry: DecodeEntry) -> int:
        """The most slots that will be in use from this entry on."""
        now = len(self.prompt) + len(entry.prompts)
        return (
            now
            if entry.sequences.stop == self._total
            else max(now, self._max_num_seqs // self.n + 2)
        )

    def left(self, prompts: Ints) -> Ints:
        """How many answers of each of these prompts are unfinished."""
        left: Ints = self._left_P[prompts]
        return left

    def waiting(self) -> DecodeEntry:
        """What enters now: as many sequences as free rows and the token budget allow."""
        first = self._next
        stop = min(first + self._max_num_seqs - len(self.sequence), self._total)
        computed = -(-first // self.n)  # prompts before this one have been computed
        budget = self._prefill_tokens
        prompt = computed
        while prompt * self.n < stop:
            budget -= int(self._entering_P[prompt])
            if budget < 0 and prompt > computed:
                stop = prompt * self.n
                break
            prompt += 1
        held = min(computed * self.n, stop) - first
        return DecodeEntry(range(computed, prompt), range(first, stop), held)

    def add(self, entry: DecodeEntry) -> None:
        """The entry's sequences become the last rows, with nothing sampled yet."""
        if not entry.sequences:
            return
        none = np.zeros(len(entry.sequences), dtype=np.int64)
        new = np.array(entry.prompts, dtype=np.int64)
        self._slot_P[new] = len(self.prompt) + np.arange(len(new))
        self.prompt = np.concatenate([self.prompt, new])
        self._next = entry.sequences.stop
        self.sequence = np.concatenate([self.sequence, np.array(entry.sequences, dtype=np.int64)])
        self.made = np.concatenate([self.made, none])
        self.token = np.concatenate([self.token, none])
        self._update()

    def drop(self, done: npt.NDArray[np.bool_]) -> tuple[Moves, Moves]:
        """Remove finished rows, and prompts without rows; the last entries move to their places.

        Returns the moves of rows and of slots.
        """
        np.subtract.at(self._left_P, self.sequence[done] // self.n, 1)
        rows = _moves(done)
        for name in ("sequence", "made", "token"):
            setattr(self, name, _closed(getattr(self, name), rows, len(done) - done.sum()))
        over = self._left_P[self.prompt] == 0
        slots = _moves(over)
        self.prompt = _closed(self.prompt, slots, len(over) - over.sum())
        self._slot_P[self.prompt] = np.arange(len(self.prompt))
        self._update()
        return rows, slots


def _moves(gone: npt.NDArray[np.bool_]) -> Moves:
    """The last entries that stay, and the places of removed ones before them."""
    left = len(gone) - int(np.count_nonzero(gone))
    return left + np.flatnonzero(~gone[left:]), np.flatnonzero(gone[:left])


def _closed(values: Ints, moves: Moves, left: int) -> Ints:
    movers, holes = moves
    kept = values[:left].copy()
    kept[holes] = values[movers]
    return kept
