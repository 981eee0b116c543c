"""Loads weights from a safetensors file into vLLM; runs inside vLLM's own environment.

Imports nothing of Keel: the server gets a copy of this file on its PYTHONPATH, and imports it by
`--worker-extension-cls`, before it builds the weight transfer engine that this file registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "keel_file"
LEFT, RIGHT = ".left", ".right"
"""Ends of the names of an adapter's factors; before them stands the name of its layer."""


class WorkerExtension:
    """Adds nothing to vLLM's worker; naming it makes vLLM import this file."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The file with the weights that adapters are added to, if there are adapters."""

    base: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The file with weights under the names of the Hugging Face checkpoint, or with factors."""

    path: str


class FileWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Reads the weights of an update from a file, in memory if the path is in /dev/shm."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    base: dict[str, torch.Tensor] = {}  # noqa: RUF012 (replaced, never changed)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.base = {} if init_info.base is None else load_file(init_info.base)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """As vLLM's own, whose `torch.accelerator.synchronize` needs a GPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        sent = load_file(update_info.path, device=str(self.device))
        self.model.load_weights(merged(self.base, sent))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # On a CPU a head multiplies by a packed copy of its weights, which vLLM packs again only if
        # they were sent; those of a head that is tied to the embeddings are not.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        self.base = {}


def merged(
    base: dict[str, torch.Tensor], sent: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that were sent; of layers with factors, those of the base plus left @ right.

    With factors all of the base is loaded, since vLLM fuses layers, and a fused one that gets only
    some of its weights loses the others.
    """
    rest = dict(sent)
    device = next(iter(sent.values())).device
    for name, weight in base.items() if any(name.endswith(LEFT) for name in sent) else ():
        layer = name.removesuffix(".weight")
        whole = rest.pop(name, weight).to(device)
        if layer + LEFT in rest:
            delta = rest.pop(layer + LEFT) @ rest.pop(layer + RIGHT)
            whole = (whole.to(delta.dtype) + delta).to(whole.dtype)
        yield name, whole
    yield from rest.items()


WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)
