"""Where the checkpoints of two runs part: file, tensor, element. Torch-free."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from keel.runs import checkpoint
from keel.runs.diff.values import changes, plain, reading, same_bytes, ulps
from keel.types import KeelError

STATE = "state.json"
TENSORS = ".safetensors"
_FIRST = "trainable" + TENSORS
_SHOWN: dict[str, str] = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "BF16": "bf16", "BOOL": "?"},
    **{"I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"},
    **{"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1"},
}


@dataclass(frozen=True, slots=True)
class CheckpointDifference:
    """The first checkpoint of both runs that differs.

    `file` and, in it, `name`: a tensor, or a key of state.json; None where a run lacks the file.
    `index` is the first element of the tensor that differs, `a` and `b` its values, `ulps` how
    many floats they are apart; where shapes or types differ, `index` is None and these are `a` and
    `b`. `differing` of `elements` differ in the tensor, `tensors` in the file (keys, of
    state.json).
    """

    stage: str
    step: int
    file: str
    name: str | None
    index: tuple[int, ...] | None
    a: Any
    b: Any
    ulps: int | None = None
    differing: int | None = None
    elements: int | None = None
    tensors: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of a file: its type's name in safetensors, its shape, its bytes."""

    kind: str
    shape: tuple[int, ...]
    bytes: npt.NDArray[np.uint8]

    def __str__(self) -> str:
        return f"{self.kind} {list(self.shape)}"

    def bits(self) -> npt.NDArray[Any]:
        """The elements as whole numbers of their size."""
        size = self.bytes.size // max(1, prod(self.shape))
        return self.bytes.view(f"<u{size}") if size in (1, 2, 4, 8) else self.bytes

    def element(self, at: int) -> Any:
        """An element as a Python value; bits, in hexadecimal, of a type that numpy has not."""
        bits, shown = self.bits()[at : at + 1], _SHOWN.get(self.kind)
        if shown == "bf16":
            return plain((bits.astype(np.uint32) << 16).view(np.float32)[0])
        return hex(int(bits[0])) if shown is None else plain(bits.view(shown)[0])


def compare(a: Path, b: Path, stage: str, step: int) -> CheckpointDifference | None:
    """What first differs between two checkpoints in weights, moments and state; None: nothing.

    Files of the model beside its weights (configuration, tokenizer) follow from the recipe and the
    versions, and are not looked at.

    Raises:
        KeelError: they differ, and one of them is damaged.
    """
    left, right = _files(a), _files(b)
    for file in sorted(left | right, key=_order):
        if file not in left or file not in right:
            found: dict[str, Any] = {"name": None, "index": None}
            found |= {"a": _there(file in left), "b": _there(file in right)}
        elif same_bytes(a / file, b / file):
            continue
        else:
            for path in (a, b):
                wrong = checkpoint.damage(path)
                if wrong is not None:
                    raise KeelError(f"checkpoint {path} is damaged ({wrong}): delete it")
            told = (_state if file == STATE else _tensors)(a / file, b / file)
            if told is None:
                continue
            found = told
        return CheckpointDifference(stage=stage, step=step, file=file, **found)
    return None


def _files(folder: Path) -> set[str]:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*" + TENSORS)}
    return found | ({STATE} if (folder / STATE).exists() else set())


def _order(file: str) -> tuple[bool, int, bool, str]:
    """What is trained first, copies of it in the model's folder late, state last."""
    return file == STATE, file.count("/"), file != _FIRST, file


def _there(is_there: bool) -> str | None:
    return "there" if is_there else None


def _state(a: Path, b: Path) -> dict[str, Any] | None:
    trees: list[Any] = []
    for path in (a, b):
        try:
            with reading(path):
                trees.append(json.loads(path.read_bytes()))
        except ValueError as error:
            raise KeelError(f"cannot read {path}: {error}: delete this checkpoint") from error
    found = list(changes(trees[0], trees[1]))
    if not found:
        return None
    first = found[0]
    return {"name": first.name, "index": None, "a": first.a, "b": first.b, "tensors": len(found)}


def _tensors(a: Path, b: Path) -> dict[str, Any] | None:
    left, right = read(a), read(b)
    names = sorted(left.keys() | right.keys(), key=_natural)
    wrong = [n for n in names if not _same(left.get(n), right.get(n))]
    if not wrong:
        return None
    name = wrong[0]
    x, y = left.get(name), right.get(name)
    out: dict[str, Any] = {"name": name, "index": None, "tensors": len(wrong)}
    if x is None or y is None or (x.kind, x.shape) != (y.kind, y.shape):
        return out | {"a": None if x is None else str(x), "b": None if y is None else str(y)}
    unequal = x.bits() != y.bits()
    at = int(unequal.argmax())
    value, other = x.element(at), y.element(at)
    kinds: dict[str, type[np.floating[Any]]] = {"F64": np.float64, "F32": np.float32}
    return out | {
        "index": tuple(int(i) for i in np.unravel_index(at, x.shape)) if x.shape else (),
        "a": value,
        "b": other,
        "ulps": ulps(value, other, kinds[x.kind]) if x.kind in kinds else None,
        "differing": int(unequal.sum()),
        "elements": int(unequal.size),
    }


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or (a.kind, a.shape) != (b.kind, b.shape):
        return False
    return bool(np.array_equal(a.bytes, b.bytes))


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, read as they are looked at.

    Its form is eight bytes that count those of a JSON header, the header (name to dtype, shape and
    offsets behind it), the data. safetensors' numpy reader has no bfloat16.

    Raises:
        KeelError: it is no safetensors file.
    """
    try:
        with reading(path):
            content: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        return {name: _tensor(facts, content[start:]) for name, facts in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KeelError(f"cannot read {path}: {error}: delete this checkpoint") from error


def _tensor(facts: Any, data: npt.NDArray[np.uint8]) -> Tensor:
    begin, end = facts["data_offsets"]
    if not 0 <= begin <= end <= data.size:
        raise ValueError(f"a tensor at {begin} to {end} of {data.size} bytes")
    # np.asarray: a memmap would make each slice a memmap, with its cost.
    return Tensor(facts["dtype"], tuple(facts["shape"]), np.asarray(data[begin:end]))
