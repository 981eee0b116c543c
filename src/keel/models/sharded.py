"""Weights spread over the ranks of a process group (FSDP2), whole while their model computes.

torch.distributed.fsdp.fully_shard: each rank keeps 1/R of every weight, its gradient and its
moments. The weights of a layer are gathered before it computes and freed after; gradients are
added over the ranks, not averaged, since the loss's weights were set for the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from keel.models.head import Scores

T = TypeVar("T")
COMPUTE = "computes"
"""The method that `within` calls on a sharded model."""

pytree.register_dataclass(Scores)  # FSDP2 looks for the tensors of a model's outputs


def mesh_of(device: torch.device, count: int) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh(device.type, (count,))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered one by one."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def shard(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None, offload: bool = False
) -> None:
    """Spread a model's weights over the ranks of a mesh, in place: layer by layer, then the rest.

    Do it before an optimizer is made. Its weights are whole only inside `within`. With `dtype` a
    layer is gathered and computes in it, while its weights, the sums of gradients and the rest
    (embeddings, last norm, head) stay as they are; inputs keep their dtype, as under autocast. With
    `offload` weights, gradients and moments of a GPU's share are in the machine's memory.
    """
    for module in model.modules():
        module._compiled_call_impl = None  # not tried with gathered weights
    mixed = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    place = CPUOffloadPolicy() if offload and mesh.device_type != "cpu" else OffloadPolicy()
    for module in (*layers_of(model), model):
        # True for the root too: a pass without gradients would leave it whole, and the next one
        # after an optimizer step would compute with the old weights.
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=exact if module is model or dtype is None else mixed,
            offload_policy=place,
        )
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    setattr(model, COMPUTE, MethodType(lambda self, compute: compute(), model))
    register_fsdp_forward_method(model, COMPUTE)


def within(model: nn.Module, compute: Callable[[], T]) -> T:
    """`compute()`, which may read the model's weights; they are gathered where they are sharded.

    Calls for the same model do not nest.
    """
    if not isinstance(model, FSDPModule):
        return compute()
    result: T = getattr(model, COMPUTE)(compute)
    return result


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its values: gathered where it is sharded (all ranks have to call), and on
    the device that computes."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor().to(tensor.device_mesh.device_type)


def wholes(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`whole` of each by its name, one after the other."""
    for name, tensor in tensors.items():
        yield name, whole(tensor).detach()
