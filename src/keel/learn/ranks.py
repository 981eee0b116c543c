"""The processes that share an update: each computes some sequences of the batch.

Every rank holds the whole batch and the same results; what is shared is the models' work. As the
weights of the loss are set before a batch is cut, the gradient is the sum over the ranks, and no
result depends on their number but by rounding.

Sharded tensors lie on disk in a safetensors file for each rank, which says where each of its parts
begins within the whole tensor, in the form of `HuggingFaceStorageWriter` of
torch.distributed.checkpoint, whose reader therefore reads them too. Any number of ranks reads what
any other number has written, each just the parts that it holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from keel.learn.optimizer import WeightOptimizer
from keel.models.reference import Reference
from keel.runs import checkpoint
from keel.types import KeelError, Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process's number among the `count` of its group."""

    number: int
    count: int
    group: Any = None

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in order. All ranks have to call; tensors go over the CPU."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found


ONE = Ranks(0, 1)
"""A process alone."""


def spans(costs: Sequence[int], count: int) -> list[range]:
    """`count` ranges of neighbours whose costs are nearly equal; some are empty where few are left.

    Neighbours stay together, since completions of one prompt share its computation. A range ends
    where the sum so far is nearest to its share, so no sum is further from the mean than the
    largest cost.
    """
    total, ends, done = sum(costs), [], 0
    place = 0
    for part in range(1, count):
        target = total * part / count
        while place < len(costs) and abs(done + costs[place] - target) <= abs(done - target):
            done += costs[place]
            place += 1
        ends.append(place)
    bounds = [0, *ends, len(costs)]
    return [range(bounds[at], bounds[at + 1]) for at in range(count)]


def prompt_units(prompts: Sequence[Prompt], max_tokens: int, count: int) -> list[list[int]]:
    """`count` lists of places of prompts, for which sampling costs nearly the same.

    All occurrences of a prompt are in one, since their random numbers depend on their order.
    """
    costs: Counter[str] = Counter()
    for prompt in prompts:
        costs[prompt.id] += len(prompt.tokens) + max_tokens
    ids = list(costs)
    units = []
    for span in spans(list(costs.values()), count):
        own = {ids[at] for at in span}
        units.append([at for at, prompt in enumerate(prompts) if prompt.id in own])
    return units


# ---------------------------------------------------------------- sharded tensors on disk

PARTS = "DCP_SHARDING_INFO"
"""The entry of a file's metadata with the offsets, as torch.distributed.checkpoint names it."""
OFFSETS = "saved_offsets"
REFERENCE = "reference"
"""The reference's name among the files."""


def save_learned(
    folder: Path,
    optimizers: Mapping[str, WeightOptimizer],
    modules: Mapping[str, nn.Module],
    reference: Reference | None,
    ranks: Ranks = ONE,
) -> None:
    """Write the optimizers' moments, the modules that learn with the policy, and the reference.

    Each is a file of its name, or with several ranks one of each rank. The reference is not written
    where it is the policy's own base.
    """
    parts: dict[str, Mapping[str, Tensor]] = {
        **{name: module.state_dict() for name, module in modules.items()},
        **{name: optimizer.state() for name, optimizer in optimizers.items()},
    }
    if reference is not None and (state := reference.state()):
        parts[REFERENCE] = state
    for name, tensors in parts.items():
        save_parts(folder, name, tensors, ranks)


def save_parts(folder: Path, name: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Write a rank's parts of tensors; rank 0 also writes those that are not sharded.

    Not all ranks have to call, and none waits for another.
    """
    if ranks.count == 1:
        checkpoint.save_tensors(folder / f"{name}.safetensors", tensors)
        return
    parts: dict[str, Tensor] = {}
    offsets: dict[str, Any] = {}
    for key, tensor in tensors.items():
        part, start = _own(tensor)
        sharded = isinstance(tensor, DTensor)
        if part.numel() and (sharded or ranks.number == 0):
            parts[key] = part
            offsets[key] = {OFFSETS: list(start)}
    file = folder / f"{name}-{ranks.number + 1:05d}-of-{ranks.count:05d}.safetensors"
    # One entry: safetensors writes several in an order that differs from file to file.
    checkpoint.save_tensors(file, parts, {PARTS: json.dumps(offsets, sort_keys=True)})


def files_of(folder: Path, name: str) -> list[Path]:
    """The files that hold the tensors of this name: one of a process alone, or one of each rank.

    Raises KeelError if there are some of the ranks' only.
    """
    alone = folder / f"{name}.safetensors"
    if alone.exists():
        return [alone]
    found = sorted(folder.glob(f"{name}-*-of-*.safetensors"))
    if found and len(found) != int(found[0].stem.rpartition("-")[2]):
        raise KeelError(
            f"checkpoint {folder} has {len(found)} of the files {name}-*: resume from another"
        )
    return found


def described(folder: Path, name: str) -> dict[str, Tensor]:
    """The whole tensors that the files hold, by name: shape and dtype without values (meta)."""
    sizes: dict[str, list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for file in files_of(folder, name):
        with _opened(file) as (content, offsets):
            for key, start in offsets.items():
                part = content.get_slice(key)
                ends = [a + n for a, n in zip(start, part.get_shape(), strict=True)]
                sizes[key] = [max(pair) for pair in zip(sizes.get(key, ends), ends, strict=True)]
                # The dtype is that of no values, or of the number itself.
                dtypes[key] = (part[0:0] if ends else content.get_tensor(key)).dtype
    return {key: torch.empty(sizes[key], dtype=dtypes[key], device="meta") for key in sorted(sizes)}


@torch.no_grad()
def load_parts(folder: Path, name: str, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors, of which sharded ones take this rank's part.

    Raises KeelError if the files do not hold all of them, or in other shapes.
    """
    there = described(folder, name)
    missing = {key: _own(target)[0].numel() for key, target in targets.items()}
    for file in files_of(folder, name):
        with _opened(file) as (content, offsets):
            for key in sorted(offsets.keys() & targets.keys()):
                if there[key].shape == targets[key].shape:
                    missing[key] -= _copy_overlap(content, key, offsets[key], targets[key])
    odd = [key for key in sorted(missing) if missing[key]]
    if odd:
        raise KeelError(
            f"checkpoint {folder} does not hold all of {name}'s {odd[0]} in the model's shape: "
            "resume from another checkpoint"
        )


def _copy_overlap(content: Any, key: str, start: list[int], target: Tensor) -> int:
    """Copy what a file's part and this rank's part of a target share; how many values that is."""
    own, at = _own(target)
    if not own.dim():
        own.copy_(content.get_tensor(key))
        return 1
    part = content.get_slice(key)
    spans = [
        (max(a, b), min(a + n, b + m))
        for a, n, b, m in zip(start, part.get_shape(), at, own.shape, strict=True)
    ]
    if any(low >= high for low, high in spans):
        return 0
    there = tuple(slice(low - a, high - a) for (low, high), a in zip(spans, start, strict=True))
    here = tuple(slice(low - b, high - b) for (low, high), b in zip(spans, at, strict=True))
    shared = own[here]
    shared.copy_(part[there])
    return shared.numel()


def _own(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a tensor, and where it begins in the whole."""
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tensor.to_local(), tuple(chunk.offsets)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[Any, dict[str, list[int]]]]:
    """A file, and where each of its tensors begins in the whole one."""
    try:
        with safe_open(file, framework="pt") as content:
            known = json.loads((content.metadata() or {}).get(PARTS, "{}"))
            yield (
                content,
                {
                    key: known[key][OFFSETS]
                    if key in known
                    else [0] * len(content.get_slice(key).get_shape())
                    for key in content.keys()  # noqa: SIM118 - it is no mapping
                },
            )
    except (OSError, SafetensorError, ValueError) as error:
        raise KeelError(f"cannot read {file}: {error}: resume from another checkpoint") from error
