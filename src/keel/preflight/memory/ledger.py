"""What a computation takes, without taking it: a dry run on tensors without memory.

A twin of a model is made of fake tensors, on which the project's own code runs at full size: the
packed forward of whatever family, its backward, adapters, recomputed activations, the engine's
store. The ledger watches each storage come and go, and has malloc do the same with a block of that
size that is never written. So no family needs a formula of its own.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from keel.preflight.memory.heap import Heap

M = TypeVar("M", bound=nn.Module)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of all storages alive, and the most there were.

    With a heap: `top` is the most that malloc had of the system meanwhile. What a kernel allocates
    and frees within itself is not seen, but for the operators of `_WITHIN`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.top = 0
        self.heap: Heap | None = None
        self._alive: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if name in _WITHIN:
            self.note(_WITHIN[name](args[0]))
        out = _SHAPED.get(name, func)(*args, **(kwargs or {}))
        for leaf in tree_iter(out):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return out

    def note(self, tensor: Tensor) -> None:
        """Count a tensor's storage, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size, block = storage.nbytes(), 0
        if self.heap is not None:
            block = self.heap.take(size)
            self.top = max(self.top, self.heap.taken)
        self._alive[key] = size, block
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key, self.heap).atexit = False

    def restart(self) -> None:
        """Look for the most from now on."""
        self.peak = self.now
        self.top = 0 if self.heap is None else self.heap.taken

    def _gone(self, key: int, heap: Heap | None) -> None:
        size, block = self._alive.pop(key)
        self.now -= size
        if heap is not None:
            heap.give(block, size)


class DryRun:
    """Where twins live and run; `ledger` says what they take.

    `twin` counts the weights of what it copies; on leaving nothing real has changed.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.ledger = Ledger()

    def twin(self, module: M) -> M:
        """The module with fake tensors in the place of its own, no gradient on any; its tokenizer
        is shared."""
        memo: dict[int, Any] = {}
        tokenizer = getattr(module, "tokenizer", None)
        if tokenizer is not None:
            memo[id(tokenizer)] = tokenizer
        for tensor in tensors_of(module):
            fake: Tensor = self.mode.from_tensor(tensor.detach())
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            memo[id(tensor)] = fake
            self.ledger.note(fake)
        return copy.deepcopy(module, memo)

    @contextmanager
    def running(self, heap: Heap | None = None) -> Iterator[Ledger]:
        """Within it every tensor made is fake, and in the ledger; with a heap it has a block."""
        self.ledger.heap = heap
        self.ledger.restart()
        try:
            with self.mode, self.ledger:
                yield self.ledger
        finally:
            self.ledger.heap = None


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and the plain tensors that some modules keep beside them."""
    for part in module.modules():
        for held in (part._parameters, part._buffers, vars(part)):
            for value in held.values():
                if isinstance(value, Tensor):
                    yield value


def bytes_of(module: nn.Module, trainable: bool = False) -> int:
    """Of the parameters and buffers, shared ones once; of those that take gradients alone."""
    storages: dict[int, int] = {}
    for tensor in tensors_of(module):
        if not trainable:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif tensor.requires_grad:
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
    return sum(storages.values())


def _grouped(left: Tensor, right: Tensor, offs: Tensor | None = None, **_: Any) -> Tensor:
    """What a grouped matrix product fills."""
    if left.dim() == 3 and right.dim() == 3:
        return left.new_empty(*left.shape[:2], right.shape[2])
    if left.dim() == 3:
        return left.new_empty(left.shape[1], right.shape[1])
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    assert offs is not None
    return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])


_SHAPED = {"aten._grouped_mm.default": _grouped}
"""Operators that torch has shape functions of for bfloat16 alone."""

_WITHIN = {"aten.logsumexp.default": torch.empty_like}
"""Operators that torch puts together of others out of a mode's sight, and what they make of their
input meanwhile: e^(x − max x) is as large as a chunk of logits."""
