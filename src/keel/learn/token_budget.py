"""How many tokens enter a pass, and what happens where memory runs out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from keel.models.packed import PackedSizes
from keel.types import KeelError

T = TypeVar("T")

_REFUSALS = (
    "DefaultCPUAllocator: can't allocate memory",
    "MPS backend out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDA driver error: out of memory",
    "CUDA error: out of memory",
)
"""torch has no type for these: a RuntimeError that says so."""
LESS = (
    "set model.activation_checkpointing = true, learn adapters alone (model.lora), or take a "
    "smaller model"
)
"""What lowers the memory that a smaller micro-batch does not."""


class TokenBudget:
    """Model-input tokens of a micro-batch, of which a longer sequence goes alone.

    Halved where memory runs out, for good: so it is part of what a checkpoint holds. Weights are
    set before a batch is cut, so a smaller budget changes a result by rounding alone.
    """

    def __init__(self, tokens: int, told: Callable[[str], None] = lambda text: None) -> None:
        self.asked = self.tokens = tokens
        self.told = told

    @property
    def found(self) -> int | None:
        """The tokens that there was room for, where they are fewer than was asked for."""
        return None if self.tokens == self.asked else self.tokens

    def fitting(
        self,
        attempt: Callable[[int], T],
        sizes: PackedSizes,
        undo: Callable[[], None] = lambda: None,
    ) -> T:
        """What `attempt(tokens)` gives, with fewer tokens at a time until there is memory for it.

        `sizes` say how what is attempted is cut into micro-batches; `undo` takes back what an
        attempt left behind.

        Raises:
            KeelError: the largest micro-batch is a single sequence, and there is no memory for it.
        """
        while True:
            try:
                return attempt(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
            # Not in the handler: the error holds the frames, and they the tensors, of the pass.
            undo()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._halve(sizes)

    def _halve(self, sizes: PackedSizes) -> None:
        tokens, count = max(
            (sizes.entering(span), span.stop - span.start) for span in sizes.spans(self.tokens)
        )
        if count == 1:
            raise KeelError(
                f"out of memory with one sequence of {tokens} tokens alone: lower max_tokens, set "
                "model.activation_checkpointing = true, or take a smaller model"
            )
        before, self.tokens = self.tokens, tokens // 2
        self.told(
            f"out of memory with {tokens} tokens at a time (token_budget {before}): going on with "
            f"{self.tokens}; set token_budget = {self.tokens}"
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _REFUSALS)


@contextmanager
def needing_memory(doing: str, mend: str) -> Iterator[None]:
    """Where no smaller micro-batch would help: what the memory was for, and what needs less.

    Raises:
        KeelError: there was not enough.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise KeelError(f"out of memory while {doing}: {mend}") from error
