"""Keys and values of finished sequences, for later prompts that begin with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np
import numpy.typing as npt
from torch import Tensor

from keel.engines.slots import PagePool
from keel.types import Group

Ints = npt.NDArray[np.int64]


class PrefixCache:
    """Sequences by their tokens, each with the pages of its keys and values.

    They are valid for one set of weights. A call of the engine `take`s those that its prompts begin
    with, and the others are freed; it `hold`s the pages of at most `most` of its own sequences, and
    `name`s these by their tokens at its end.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._pool: PagePool | None = None
        self._held: dict[int, list[int]] = {}
        self._named: dict[bytes, list[list[int]]] = {}
        self._lengths: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether no further sequence can be held."""
        return len(self._held) >= self._most

    def pool(self, numbers: int, like: Tensor) -> PagePool:
        """The pool of all pages, created at the first call."""
        if self._pool is None:
            self._pool = PagePool(numbers, like)
        return self._pool

    def take(self, prompts: Sequence[Ints]) -> tuple[Ints, list[list[int]]]:
        """How many of each prompt's first tokens have keys and values (never the last one), and
        their pages, for those prompts that have any.

        In order, each prompt takes the longest beginning that is left.
        """
        known = np.zeros(len(prompts), dtype=np.int64)
        taken = []
        lengths = sorted(self._lengths)
        for number, tokens in enumerate(prompts):
            names = list(_names(tokens, [n for n in lengths if n < len(tokens)]))
            for length, name in reversed(names):
                if pages := self._named.get(name):
                    known[number] = length
                    taken.append(pages.pop())
                    break
        self._forget()
        return known, taken

    def hold(self, sequence: int, pages: list[int]) -> None:
        """Keep the pages of a sequence, numbered as in `DecodeBatch`."""
        self._held[sequence] = pages

    def name(self, groups: Sequence[Group]) -> None:
        """File held pages by their tokens: all but a completion's last, which was not fed."""
        for sequence, pages in self._held.items():
            prompt, index = divmod(sequence, len(groups[0].completions))
            group = groups[prompt]
            own = group.completions[index].tokens[:-1]
            tokens = np.concatenate([np.array(group.prompt.tokens, dtype=np.int64), own])
            ((length, name),) = _names(tokens, [len(tokens)])
            self._named.setdefault(name, []).append(pages)
            self._lengths.add(length)
        self._held = {}

    def close(self) -> None:
        """Free all memory; nothing is held from now on."""
        self.clear()
        self._most = 0

    def clear(self) -> None:
        """Free all memory, as after an interrupted call whose pages are unknown."""
        self._pool, self._held, self._named, self._lengths = None, {}, {}, set()

    def _forget(self) -> None:
        """Free what no prompt begins with."""
        for entries in self._named.values():
            for pages in entries:
                assert self._pool is not None
                self._pool.give(pages)
        self._named, self._lengths = {}, set()


def _names(tokens: Ints, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Each length, ascending, and a hash of so many first tokens."""
    digest, done = sha256(), 0
    for length in lengths:
        digest.update(tokens[done:length].tobytes())
        done = length
        yield length, digest.copy().digest()
