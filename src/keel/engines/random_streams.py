"""A random stream for each sequence, so that what shares a batch does not choose its draws."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BLOCK = 32
"""Uniform numbers made ahead for a sequence at a time; two blocks of each are there."""

AHEAD = _BLOCK
"""Steps whose numbers can be taken at a time."""

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10: (…, 4) counters and (…, 2) keys of 32-bit words to (…, 4) random words.

    Ten rounds of (c0, c1, c2, c3) → (hi(M1·c2) ⊕ c1 ⊕ k0, lo(M1·c2), hi(M0·c0) ⊕ c3 ⊕ k1,
    lo(M0·c0)), the key raised by the Weyl constants after each. Source: Salmon et al. 2011,
    "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table 2.
    """
    c0, c1, c2, c3 = np.moveaxis(counter, -1, 0)
    k0, k1 = np.moveaxis(key, -1, 0)
    first, second = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
    for _ in range(10):
        left, right = c0 * first, c2 * second
        c0, c1, c2, c3 = (
            (right >> _HALF) ^ c1 ^ k0,
            right & _LOW,
            (left >> _HALF) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return np.stack([c0, c1, c2, c3], axis=-1)


def name_words(seed: int, prompt_id: str, occurrence: int) -> npt.NDArray[np.uint64]:
    """The four 32-bit words that name a group's streams: a hash of seed, prompt and occurrence."""
    digest = hashlib.sha256(f"{seed}/{occurrence}/{prompt_id}".encode()).digest()
    return np.frombuffer(digest[:16], dtype="<u4").astype(np.uint64)


def occurrences(ids: Sequence[str]) -> list[int]:
    """How often each id came before in the list."""
    seen: Counter[str] = Counter()
    counts = []
    for name in ids:
        counts.append(seen[name])
        seen[name] += 1
    return counts


class Uniforms:
    """One uniform number in [0, 1) for each token of each sequence, made a block ahead.

    Sequence s is completion s mod n of prompt s div n. The number of a token is a function of the
    seed, the prompt's id, which of that id's occurrences in the call this is, the completion's
    index in its group, and the token's place; of nothing else.
    """

    def __init__(self, ids: Sequence[str], n: int, seed: int) -> None:
        self._n = n
        self._words = np.array(
            [
                name_words(seed, name, occurrence)
                for name, occurrence in zip(ids, occurrences(ids), strict=True)
            ],
            dtype=np.uint64,
        ).reshape(-1, 4)
        self._blocks = np.empty((len(ids) * n, 2 * _BLOCK))
        self._made = np.zeros(len(ids) * n, dtype=np.int64)

    def take(
        self, sequences: npt.NDArray[np.int64], places: npt.NDArray[np.int64], steps: int = 1
    ) -> npt.NDArray[np.float64]:
        """The numbers of the tokens at `places` of `sequences`, and of those behind them: (steps,
        sequences), at most `AHEAD` steps. Places are from 0 and never fall."""
        short = self._made[sequences] < places + steps
        if short.any():
            self._fill(sequences[short])
        columns = (places + np.arange(steps)[:, None]) % (2 * _BLOCK)
        numbers: npt.NDArray[np.float64] = self._blocks[sequences, columns]
        return numbers

    def _fill(self, sequences: npt.NDArray[np.int64]) -> None:
        """The next block of each: two numbers of 53 bits from each counter."""
        places = self._made[sequences]
        words = self._words[sequences // self._n]
        counter = np.empty((len(sequences), _BLOCK // 2, 4), dtype=np.uint64)
        counter[..., 0] = places[:, None] // 2 + np.arange(_BLOCK // 2)
        counter[..., 1] = (sequences % self._n)[:, None]
        counter[..., 2:] = words[:, None, 2:]
        random = philox(counter, words[:, None, :2])
        high, low = random[..., 0::2] >> np.uint64(5), random[..., 1::2] >> np.uint64(6)
        numbers = (high * 67108864.0 + low) / 9007199254740992.0
        columns = (places[:, None] + np.arange(_BLOCK)) % (2 * _BLOCK)
        self._blocks[sequences[:, None], columns] = numbers.reshape(len(sequences), _BLOCK)
        self._made[sequences] += _BLOCK
