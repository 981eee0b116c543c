"""What a call leaves to the next: keys and values of sequences that its prompts may begin with."""

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

    They are true of the weights that made them. A call of the engine `take`s those that its prompts
    begin with, and the others are forgotten; it `hold`s the pages of at most `most` of the
    sequences that end in it, and `name`s these by their tokens when it is through.
    """

    def __init__(self, most: int = 0) -> None:
        self._most = most
        self._pool: PagePool | None = None
        self._held: dict[int, list[int]] = {}
        self._named: dict[bytes, list[list[int]]] = {}
        self._lengths: set[int] = set()

    @property
    def full(self) -> bool:
        """Whether no other sequence is held."""
        return len(self._held) >= self._most

    def pool(self, numbers: int, like: Tensor) -> PagePool:
        """Where all pages are from; made when it is first asked for."""
        if self._pool is None:
            self._pool = PagePool(numbers, like)
        return self._pool

    def take(self, prompts: Sequence[Ints]) -> tuple[Ints, list[list[int]]]:
        """How many of each prompt's first tokens have keys and values, the last never among them;
        and the pages of these, for those prompts that have any.

        Prompts choose in order, each the longest beginning, which is then no other's.
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
        """Pages that the call's sequence of this number leaves, numbered as in `Batch`."""
        self._held[sequence] = pages

    def name(self, groups: Sequence[Group]) -> None:
        """What is held by its tokens: of a completion all but the last, which was never fed."""
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
        """Forget all, and give the memory back; nothing is held from now on."""
        self.clear()
        self._most = 0

    def clear(self) -> None:
        """Forget all, and give the memory back: after a call that was cut short, whose pages
        nobody knows."""
        self._pool, self._held, self._named, self._lengths = None, {}, {}, set()

    def _forget(self) -> None:
        """What no prompt began with."""
        for entries in self._named.values():
            for pages in entries:
                assert self._pool is not None
                self._pool.give(pages)
        self._named, self._lengths = {}, set()


def _names(tokens: Ints, lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Each length, ascending, and a name of so many first tokens."""
    digest, done = sha256(), 0
    for length in lengths:
        digest.update(tokens[done:length].tobytes())
        done = length
        yield length, digest.copy().digest()
