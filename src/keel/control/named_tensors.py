"""Groups of named tensors within one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def prefixed(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as `name/key`."""
    return {f"{name}/{key}": tensor for key, tensor in tensors.items()}


def within(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `name/key`, by key."""
    head = f"{name}/"
    return {k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}
