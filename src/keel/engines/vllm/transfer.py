"""How weights go to a vLLM server: by a file, by CUDA IPC on one GPU, by NCCL between GPUs.

Each way is a backend of vLLM's weight transfer. `ipc` and `nccl` are vLLM's own; here is their
trainer's side, since Keel's environment has no vLLM. They have never been run: no test has a GPU.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import tempfile
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from keel.engines.vllm.server import VllmClient
from keel.models.lora import adapter_factors as factors
from keel.models.lora import base_weights, lora_layers
from keel.types import KeelError

# Of these torch has no types.
cuda: Any = torch.cuda
nccl: Any = torch.cuda.nccl
reductions: Any = torch.multiprocessing.reductions


class WeightTransfer(Protocol):
    """The trainer's side of one backend; `backend` is vLLM's name for it."""

    backend: str

    def prepare(self, client: VllmClient) -> None:
        """Set the transfer up with a server that has just started."""
        ...

    def send(self, client: VllmClient, weights: Mapping[str, Tensor], version: int) -> None:
        """Give the server new weights, with generation paused. Returns when it has them."""
        ...


class FileTransfer:
    """By a safetensors file, in memory if the system has /dev/shm; for every device.

    `base` are the weights of the layers with adapters, and of all that vLLM may fuse them with. The
    server keeps them, so that the factors of adapters are all that has to be sent.
    """

    backend = "keel_file"

    def __init__(self, base: Mapping[str, Tensor]) -> None:
        self.base = base

    def prepare(self, client: VllmClient) -> None:
        if not self.base:
            client.prepare_updates({})
            return
        with _in_file(self.base) as path:
            client.prepare_updates({"base": path})

    def send(self, client: VllmClient, weights: Mapping[str, Tensor], version: int) -> None:
        with _in_file(weights) as path, client.updating(version):
            client.update_weights({"path": path})


class IpcTransfer:
    """By handles of the trainer's own memory, which a server on the same GPU reads."""

    backend = "ipc"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def prepare(self, client: VllmClient) -> None:
        client.prepare_updates({"packed": False})

    def send(self, client: VllmClient, weights: Mapping[str, Tensor], version: int) -> None:
        kept = _contiguous(weights)  # until the server has read them
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        handles = [{gpu: reductions.reduce_tensor(weight)[1]} for weight in kept.values()]
        torch.cuda.synchronize(self.device)
        update = {
            **described(kept),
            "ipc_handles_pickled": b64encode(pickle.dumps(handles)).decode(),
        }
        with client.updating(version):
            client.update_weights(update)
        cuda.ipc_collect()


class NcclTransfer:
    """By broadcasts to a server on other GPUs; the trainer is rank 0 of the group."""

    backend = "nccl"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._communicator: Any = None

    def prepare(self, client: VllmClient) -> None:
        count = 1 + int(client.request("GET", "/get_world_size")["world_size"])
        unique = nccl.unique_id()
        # All ranks enter at the same time, and each then adds up one number, as vLLM's ranks do.
        with ThreadPoolExecutor(1) as pool, torch.cuda.device(self.device):
            joined = pool.submit(client.prepare_updates, nccl_group(count, unique))
            self._communicator = nccl.init_rank(count, unique, 0)
            nccl.all_reduce([torch.zeros(1, device=self.device)], comms=[self._communicator])
            torch.cuda.synchronize(self.device)
            joined.result()

    def send(self, client: VllmClient, weights: Mapping[str, Tensor], version: int) -> None:
        kept = _contiguous(weights)
        with (
            client.updating(version),
            ThreadPoolExecutor(1) as pool,
            torch.cuda.device(self.device),
        ):
            received = pool.submit(client.update_weights, described(kept))
            for weight in kept.values():
                nccl.broadcast([weight], comms=[self._communicator])
            torch.cuda.synchronize(self.device)
            received.result()


def choose_transfer(
    device: torch.device, gpus: Sequence[int], base: Mapping[str, Tensor], started: bool
) -> WeightTransfer:
    """The way for a trainer on `device` and a server on `gpus` (none: the trainer's device).

    A file serves adapters, whose factors are small, servers that the user started, whose GPUs are
    unknown, and servers that share only some GPUs with the trainer.
    """
    if device.type != "cuda" or base or not started:
        return FileTransfer(base)
    own = device.index or 0
    if tuple(gpus) in ((), (own,)):
        return IpcTransfer(device)
    return FileTransfer(base) if own in gpus else NcclTransfer(device)


def shares_gpu(device: torch.device, gpus: Sequence[int]) -> bool:
    """Whether a server on `gpus` (none: the trainer's) runs on the GPU of a trainer on `device`."""
    return device.type == "cuda" and (not gpus or (device.index or 0) in gpus)


def new_folder(size: int, shared: Path = Path("/dev/shm")) -> Path:
    """A new folder of this user's for a file of `size` bytes: in memory if the system has
    /dev/shm and it has space for twice as many, else in the temporary folder."""
    inside = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 2 * size
    return Path(tempfile.mkdtemp(prefix="keel-vllm-", dir=shared if inside else None))


def server_variables(device: torch.device, gpus: Sequence[int]) -> dict[str, str]:
    """What a server on `gpus` (none: on the trainer's `device`) needs in its environment.

    GPUs are counted as torch counts them. Raises KeelError for one that this machine has not.
    """
    if device.type != "cuda":
        return {}
    chosen = tuple(gpus) or (device.index or 0,)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    visible = visible or [str(number) for number in range(torch.cuda.device_count())]
    if max(chosen) >= len(visible):
        raise KeelError(
            f"rollout.vllm.gpus = {list(gpus)}, but there are {len(visible)} GPUs, counted from 0"
        )
    # vLLM takes pickled handles of the trainer's memory only with the second of these.
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(visible[number] for number in chosen),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }


def adapters_base(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights that adapters are added to, with all others of their blocks; none without LoRA.

    A block is what has the same number in its name. vLLM fuses layers within one, and a fused layer
    has to be loaded as a whole, with its biases.
    """
    blocks = {_block(name) for name, _ in lora_layers(model)}
    inside = {n: w for n, w in base_weights(model).items() if _block(n) in blocks}
    return checkpoint_weights(model, inside)


def adapter_factors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The factors of all adapters, under the names that `worker.merged` reads; none without LoRA"""
    found: dict[str, Tensor] = {}
    for layer, (left, right) in factors(model).items():
        found |= {f"{layer}.left": left, f"{layer}.right": right}
    return found


def checkpoint_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the model under the names of its checkpoints, which vLLM reads.

    They differ from the model's if transformers joins tensors, as those of experts. Weights that
    are another one under a second name are left out; a file cannot hold both.
    """
    first: dict[tuple[int, torch.Size], str] = {}
    for name, weight in weights.items():
        first.setdefault((weight.data_ptr(), weight.shape), name)
    return dict(revert_weight_conversion(model, {name: weights[name] for name in first.values()}))


def _block(name: str) -> str:
    """Up to the first number in a name; without any, the name of its module."""
    found = re.match(r".*?\.\d+(?=\.|$)", name)
    return found[0] if found else name.removesuffix(".weight").removesuffix(".bias")


def described(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names, dtypes and shapes, as vLLM's updates state them."""
    return {
        "names": list(weights),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
    }


def nccl_group(count: int, unique: bytes) -> dict[str, Any]:
    """How a server joins a group of `count` ranks of which the trainer is the first."""
    return {
        "rank_offset": 1,
        "world_size": count,
        "packed": False,
        "nccl_unique_id_b64": b64encode(unique).decode(),
    }


def _contiguous(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().contiguous() for name, weight in weights.items()}


@contextmanager
def _in_file(weights: Mapping[str, Tensor]) -> Iterator[str]:
    """The path of a file with the weights, which is there within the block.

    Raises KeelError if they cannot be written.
    """
    kept = {name: weight.cpu() for name, weight in _contiguous(weights).items()}
    folder = new_folder(sum(weight.nbytes for weight in kept.values()))
    path = folder / "weights.safetensors"
    try:
        with writing(folder):
            save_file(kept, path)
        del kept
        yield str(path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turns an error of the block, which writes weights into the folder, into a KeelError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise KeelError(
            f"the weights for the vLLM server cannot be written to {folder.parent} ({error}): free "
            "some space there"
        ) from None
