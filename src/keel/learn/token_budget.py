"""How many tokens a micro-batch has, and what happens where memory runs out."""

from __future__ import annotations

import errno
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
"""torch has no type for these: a RuntimeError with such a message."""
LESS = (
    "set model.activation_checkpointing = true, learn adapters alone (model.lora), or take a "
    "smaller model"
)
"""What lowers the memory that a smaller micro-batch does not."""


class TokenBudget:
    """The largest number of model-input tokens of a micro-batch; a longer sequence is one alone.

    It is halved for good where memory runs out, and a checkpoint holds it. The weights of the loss
    are set before a batch is cut, so a smaller budget changes results by rounding alone.
    """

    def __init__(self, tokens: int, note: Callable[[str], None] = lambda text: None) -> None:
        self.asked = self.tokens = tokens
        self._note = note

    @property
    def found(self) -> int | None:
        """The tokens that fitted into memory, where they are fewer than was asked for."""
        return None if self.tokens == self.asked else self.tokens

    def fitting(
        self,
        attempt: Callable[[int], T],
        sizes: PackedSizes,
        undo: Callable[[], None] = lambda: None,
        retry: bool = True,
    ) -> T:
        """The result of `attempt(tokens)`, tried with fewer tokens until there is memory for it.

        `sizes` say how it cuts its batch into micro-batches; `undo` reverts a failed attempt.
        Without `retry` there is one attempt: of several ranks, none alone can begin again.

        Raises:
            KeelError: there is no memory for a single sequence, or for the one attempt.
        """
        while True:
            try:
                return attempt(self.tokens)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                if not retry:
                    raise KeelError(
                        f"out of memory while models computed a batch: lower token_budget, {LESS}"
                    ) from error
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
        self._note(
            f"out of memory with {tokens} tokens at a time (token_budget {before}): going on with "
            f"{self.tokens}; set token_budget = {self.tokens}"
        )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error is a lack of memory, on whatever device."""
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _REFUSALS)


@contextmanager
def oom_context(action: str, hint: str) -> Iterator[None]:
    """Turns a lack of memory into an error that names what the memory was for and what needs less.

    For what a smaller micro-batch does not help.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise KeelError(f"out of memory while {action}: {hint}") from error
