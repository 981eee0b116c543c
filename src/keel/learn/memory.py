"""The memory that micro-batches take: how many tokens one of them has, and what to do without."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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


@contextmanager
def keeping_threads(wanted: int | None = None) -> Iterator[None]:
    """Torch has the `wanted` number of threads; afterwards that which it had, whatever is set."""
    before = torch.get_num_threads()
    if wanted is not None:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Bytes of a device that a call took: at its peak, and those that are still taken (`kept`);
    and the bytes that are `free` after it."""

    peak: int
    kept: int
    free: int


Measure = Callable[[Callable[[], Any]], tuple[Any, CallMemory]]
"""The result of a call, and the memory that it took."""


def measure_on(device: torch.device) -> Measure | None:
    """`Measure` of a CUDA device; None of others, which do not count what they allocate."""
    return partial(_on_cuda, device) if device.type == "cuda" else None


def _on_cuda(device: torch.device, call: Callable[[], T]) -> tuple[T, CallMemory]:
    # Counts of the allocator: the host does not wait for the device.
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    after, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - after
    return result, CallMemory(peak - before, after - before, free)


LEAST_FOUND, MOST_FOUND = 4_096, 65_536
"""Tokens that a trial finds at the least and at the most; it finds a multiple of the least."""
FOUND_SHARE = 0.85
"""Of the free memory, for a micro-batch of the tokens that a trial finds."""


class TokenBudget:
    """The largest number of model-input tokens of a micro-batch; a longer sequence is one alone.

    With `measure` the first pass that has a gradient is a trial, whose memory sets the tokens of
    later passes. They are halved for good where memory runs out, and a checkpoint holds them. The
    weights of the loss are set before a batch is cut, so they change results by rounding alone.
    """

    def __init__(
        self,
        tokens: int,
        note: Callable[[str], None] = lambda text: None,
        measure: Measure | None = None,
    ) -> None:
        self.tokens = tokens
        self._asked: int | None = tokens  # None once a trial has found other tokens
        self._note = note
        self._measure = measure

    @property
    def found(self) -> int | None:
        """The tokens that fitted into memory: fewer than was asked for, or found by a trial."""
        return None if self.tokens == self._asked else self.tokens

    def restore(self, found: int) -> None:
        """Go on with what was `found` before, without a trial."""
        if self._measure is None:
            self.tokens = min(found, self.tokens)
        else:
            self.tokens = found
            self._asked = self._measure = None

    def fitting(
        self,
        attempt: Callable[[int], T],
        sizes: PackedSizes,
        undo: Callable[[], None] = lambda: None,
        retry: bool = True,
        pending: Callable[[], int] | None = None,
    ) -> T:
        """The result of `attempt(tokens)`, tried with fewer tokens until there is memory for it.

        `sizes` say how it cuts its batch into micro-batches; `undo` reverts a failed attempt.
        Without `retry` there is one attempt: of several ranks, none alone can begin again. A pass
        with a gradient, which may be the trial, has `pending`: bytes that the optimizers of its
        parameters have yet to take.

        Raises:
            KeelError: there is no memory for a single sequence, or for the one attempt.
        """
        while True:
            try:
                if self._measure is None or pending is None:
                    return attempt(self.tokens)
                return self._try(self._measure, attempt, sizes, pending)
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
            elif torch.backends.mps.is_available():
                torch.mps.empty_cache()
            self._halve(sizes)

    def _try(
        self,
        measure: Measure,
        attempt: Callable[[int], T],
        sizes: PackedSizes,
        pending: Callable[[], int],
    ) -> T:
        """The result of a trial, after which the tokens are set from the memory that it took."""
        made: tuple[T, CallMemory] = measure(lambda: attempt(self.tokens))
        result, memory = made
        entering = [sizes.entering(span) for span in sizes.spans(self.tokens)]
        if max(entering) < self.tokens // 2:
            return result  # what does not grow with tokens would count as theirs: a later pass says
        # The first micro-batch takes its tokens' bytes, with few gradients yet; a later one has all
        # gradients, which are kept, besides its own. The peak is no less than either: two bounds.
        each = memory.peak / entering[0]
        if len(entering) > 1:
            each = min(each, (memory.peak - memory.kept) / max(entering[1:]))
        room = FOUND_SHARE * max(memory.free - pending(), 0)
        count = int(room / max(each, 1)) // LEAST_FOUND * LEAST_FOUND
        # If memory ran out before, more tokens than now have failed.
        most = MOST_FOUND if self.tokens == self._asked else self.tokens
        self.tokens = min(max(count, LEAST_FOUND), most)
        self._asked = self._measure = None
        self._note(f"token_budget: {self.tokens:,} tokens, found by a trial")
        return result

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
