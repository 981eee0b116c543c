"""Loads weights from a safetensors file into vLLM; runs inside vLLM's own environment.

Imports nothing of Keel: the server gets a copy of this file on its PYTHONPATH, and imports it by
`--worker-extension-cls`, before it builds the weight transfer engine that this file registers.
"""

from __future__ import annotations

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "keel_file"


class WorkerExtension:
    """Adds nothing to vLLM's worker; naming it makes vLLM import this file."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing has to be agreed on before the first update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The file with weights under the names of the Hugging Face checkpoint."""

    path: str


class FileWeightTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Reads the weights of an update from a file, in memory where the path is in /dev/shm."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, str]) -> None:
        """As vLLM's own, without its `torch.accelerator.synchronize`, which needs a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        weights = load_file(update_info.path, device=str(self.device))
        self.model.load_weights(iter(weights.items()))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Nothing is held between updates."""


WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransfer)
