"""The first step, sequence, token or tensor at which two runs differ. Torch-free.

Runs are compared in the order in which a run produces things: recipe and environment, the samples
that a stage makes before its first step, then for each step its rollouts, metrics and checkpoint.
What comes after the first difference follows from it, and is not read.
"""

from __future__ import annotations

import filecmp
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile, zip_longest
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from keel.runs import checkpoint, files
from keel.runs.checkpoint import records_until
from keel.runs.layout import Place, RunFolder
from keel.runs.reader import Run
from keel.runs.rollouts import COMPONENT, read_table
from keel.runs.values import Change, change, changes, first_unequal, plain, same
from keel.types import KeelError, Split

if TYPE_CHECKING:
    import pyarrow as pa

Where = Literal["samples", "rollouts", "metrics", "checkpoint"]
ENVIRONMENT = ("versions", "threads")
SPLITS: tuple[Split, ...] = ("train", "validation")
STATE = "state.json"
TENSORS = ".safetensors"
_DTYPES: Final = {
    **{"F64": "f8", "F32": "f4", "F16": "f2", "BOOL": "?"},
    **{"I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1"},
    **{"U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1"},
}
"""numpy's types of safetensors' types; it has no bfloat16 and no 8-bit floats."""

# Columns of rollouts in causal order: within a sequence the prompt, then token by token, the end.
_PROMPT = ("group", "prompt_id", "task", "prompt_format", "prompt")
_SAMPLED = ("tokens", "written", "log_probs")
_END = ("completion", "finish")
_SCORED = ("step_ends", "step_rewards", "outcome", "reward")
_LEARNED = ("old_log_probs", "advantages")
_KNOWN = frozenset((*_PROMPT, *_SAMPLED, *_END, *_SCORED, *_LEARNED))
_NEEDED = frozenset({"prompt_id", "tokens", "log_probs", "completion"})


@dataclass(frozen=True, slots=True)
class Point:
    """A step of a stage; step 0 is before the first."""

    stage: str
    step: int


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first place at which two runs differ.

    `file` is the name in the run folder of a file that differs. `changes` are the values that
    differ there, in causal order: each column of the rollouts where it first differs, each tensor
    at its first element that does. `prompt_id` is of the first one's sequence. Where one run lacks
    what the other must have had too, `only_in` ("a" or "b") is the other and `changes` is empty.
    """

    stage: str
    step: int
    where: Where
    file: str
    changes: tuple[Change, ...] = ()
    prompt_id: str | None = None
    only_in: Literal["a", "b"] | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of two runs.

    `stages` are those that both recipes begin with; no others are compared. `recipe` has the keys
    that differ, `environment` the versions and numbers of threads that do. `reach_a` and `reach_b`
    are the last recorded steps. `rollouts_only` counts the steps whose rollouts only one run has
    kept, `checkpoints` the checkpoints that were compared: those that both runs have kept.
    """

    a: str
    b: str
    stages: tuple[str, ...]
    recipe: tuple[Change, ...]
    environment: tuple[Change, ...]
    reach_a: Point | None
    reach_b: Point | None
    first: FirstDifference | None
    rollouts_only: tuple[int, int]
    checkpoints: int

    @property
    def same(self) -> bool:
        """Whether recipe, reach and all recorded values are equal, in whatever environment."""
        further = self.reach_a != self.reach_b or any(self.rollouts_only)
        return not self.recipe and self.first is None and not further

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it, `same` first."""
        out: dict[str, Any] = _json_safe({"same": self.same, **asdict(self)})
        return out


def diff(a: Path | str, b: Path | str) -> Difference:
    """Compare two run folders up to the first difference.

    Floats are compared by their bits, so NaN equals NaN. Files of equal bytes are not parsed.

    Raises:
        KeelError: there is no run in a folder, or a file that must be read is damaged.
    """
    filecmp.clear_cache()
    try:
        return _Comparison(Run(RunFolder.open(a)), Run(RunFolder.open(b))).result()
    except OSError as error:
        raise KeelError(f"cannot read {error.filename}: {error.strerror}: fix it") from error


class _Comparison:
    def __init__(self, a: Run, b: Run) -> None:
        self.runs = a, b
        self.folders = a.folder, b.folder
        self.recipes = a.recipe(), b.recipe()
        names = zip(a.stages, b.stages, strict=False)
        self.stages = tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], names))
        end = Place(len(a.stages) + len(b.stages), 0)
        self.records = [dict(records_until(folder, end)) for folder in self.folders]
        self.reach = [max(records, default=None) for records in self.records]
        self.rollouts = [{e.place: e.path for e in f.list_rollouts()} for f in self.folders]
        self.checkpoints = [{e.place: e.path for e in f.list_checkpoints()} for f in self.folders]
        self.compared = 0

    def result(self) -> Difference:
        left, right = (
            {k: v for k, v in run.info().items() if k in ENVIRONMENT} for run in self.runs
        )
        a, b = ({p for p in paths if p.stage < len(self.stages)} for paths in self.rollouts)
        return Difference(
            a=str(self.folders[0].path),
            b=str(self.folders[1].path),
            stages=self.stages,
            recipe=tuple(self.recipe()),
            environment=tuple(changes(left, right)),
            reach_a=self.point(0),
            reach_b=self.point(1),
            first=next(self.differences(), None),
            rollouts_only=(len(a - b), len(b - a)),
            checkpoints=self.compared,
        )

    def point(self, run: int) -> Point | None:
        place = self.reach[run]
        return None if place is None else Point(self.runs[run].stages[place.stage], place.step)

    def recipe(self) -> Iterator[Change]:
        """The keys that differ: the stages' names, shared keys, then keys of the shared stages."""
        a, b = (
            {"stages": ", ".join(run.stages)} | {k: v for k, v in recipe.items() if k != "stages"}
            for run, recipe in zip(self.runs, self.recipes, strict=True)
        )
        yield from changes(a, b)
        for at, name in enumerate(self.stages):
            yield from changes(self.recipes[0]["stages"][at], self.recipes[1]["stages"][at], name)

    def differences(self) -> Iterator[FirstDifference]:
        """The differences in causal order. All but the first may follow from it."""
        places = {place for records in self.records for place in records}
        for paths in (*self.rollouts, *self.checkpoints):
            places |= set(paths)
        for number, stage in enumerate(self.stages):
            yield from self._samples(stage)
            for place in sorted(place for place in places if place.stage == number):
                yield from self._rollouts(stage, place)
                yield from self._metrics(stage, place)
                yield from self._checkpoint(stage, place)

    def _samples(self, stage: str) -> Iterator[FirstDifference]:
        for split in SPLITS:
            a, b = (folder.rows(stage, split) for folder in self.folders)
            if a.exists() and b.exists() and not _same_bytes(a, b):
                file = a.relative_to(self.folders[0].path).as_posix()
                lines = zip_longest(files.read_jsonl(a), files.read_jsonl(b))
                for x, y in lines:
                    number, left, right = (x or y)[0], x[2] if x else {}, y[2] if y else {}
                    found = tuple(changes(left, right, f"line {number}"))
                    if found:
                        yield FirstDifference(stage, 0, "samples", file, found)

    def _rollouts(self, stage: str, place: Place) -> Iterator[FirstDifference]:
        a, b = (paths.get(place) for paths in self.rollouts)
        if a is not None and b is not None:
            if not _same_bytes(a, b):
                yield from _compare_rollouts(a, b, stage, place.step)
        elif (only := a or b) is not None:
            every = {r["stages"][place.stage].get("rollouts_every") for r in self.recipes}
            if len(every) == 1:  # else runs keep the rollouts of different steps
                yield from self._lacking(place, stage, "rollouts", f"rollouts/{only.name}", a)

    def _metrics(self, stage: str, place: Place) -> Iterator[FirstDifference]:
        a, b = (records.get(place) for records in self.records)
        if a is None or b is None:
            if a is not b:
                yield from self._lacking(place, stage, "metrics", "metrics.jsonl", a)
        elif a != b and (found := tuple(changes(json.loads(a), json.loads(b)))):
            yield FirstDifference(stage, place.step, "metrics", "metrics.jsonl", found)

    def _lacking(
        self, place: Place, stage: str, where: Where, file: str, a: Any
    ) -> Iterator[FirstDifference]:
        """What only one run has is a difference if the other run has gone further."""
        reach = self.reach[0 if a is None else 1]
        if reach is not None and reach > place:
            only_in: Literal["a", "b"] = "b" if a is None else "a"
            yield FirstDifference(stage, place.step, where, file, only_in=only_in)

    def _checkpoint(self, stage: str, place: Place) -> Iterator[FirstDifference]:
        a, b = (paths.get(place) for paths in self.checkpoints)
        if a is None or b is None:
            return
        self.compared += 1
        left, right = _weight_files(a), _weight_files(b)
        for name in sorted(left | right, key=_file_order):
            found: list[Change] = []
            if name not in left or name not in right:
                found = [change(name, ("there" if name in f else None for f in (left, right)))]
            elif not _same_bytes(a / name, b / name):
                for path in (a, b):
                    if (wrong := checkpoint.damage(path)) is not None:
                        raise KeelError(f"checkpoint {path} is damaged ({wrong}): delete it")
                compare = _compare_state if name == STATE else _compare_tensors
                try:
                    found = list(compare(a / name, b / name))
                except (ValueError, KeyError, TypeError, AttributeError) as error:
                    raise KeelError(f"cannot read {name} of {a} or {b}: {error}") from error
            if found:
                file = f"checkpoints/{a.name}/{name}"
                yield FirstDifference(stage, place.step, "checkpoint", file, tuple(found))


def _same_bytes(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)


def _json_safe(value: Any) -> Any:
    """A tree of plain values with floats that are not finite as words."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- rollouts


def _compare_rollouts(a: Path, b: Path, stage: str, step: int) -> Iterator[FirstDifference]:
    """What was sampled comes first, then what was scored, then what was learned from it. Of the
    samples the first sequence, and in it the first token, comes first: the token's id before its
    log-prob. Extras of rewards, which nothing else reads, come last."""
    tables = _columns(a), _columns(b)
    names = [*_PROMPT, *_SAMPLED, *_END]
    rest = sorted({name for table in tables for name in table} - _KNOWN)
    components = [name for name in rest if name.startswith(COMPONENT)]
    names += [*components, *_SCORED, *_LEARNED, *(n for n in rest if n not in components)]
    found = []
    for order, name in enumerate(names):
        cells = zip_longest(*(table.get(name, ()) for table in tables))
        first = next(_differing(name, cells), None)
        if first is not None:
            found.append((_rank(first, order), first))
    counts = [len(table["tokens"]) for table in tables]
    if counts[0] != counts[1]:
        end = min(counts)
        found.append(((0, end, -2, 0), change("sequences", counts, (end,))))
    if not found:
        return
    found.sort(key=lambda item: item[0])
    first = found[0][1]
    ids = max((table["prompt_id"] for table in tables), key=len)
    file = f"rollouts/{a.name}"
    only = tuple(change for _, change in found)
    yield FirstDifference(stage, step, "rollouts", file, only, str(ids[first.at[0]]))


def _differing(name: str, cells: Iterator[tuple[Any, Any]]) -> Iterator[Change]:
    """The sequences in which a column differs."""
    for sequence, (x, y) in enumerate(cells):
        if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            token = first_unequal(x, y)
            if token is not None:
                values = [plain(c[token]) if token < len(c) else None for c in (x, y)]
                yield change(name, values, (sequence, token))
        elif isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            values = [None if c is None or not len(c) else plain(c[0]) for c in (x, y)]
            yield change(name, values, (sequence, 0))
        elif not same(x, y):
            yield change(name, (x, y), (sequence,))


def _rank(found: Change, order: int) -> tuple[float, ...]:
    """Phase, sequence, position within the sequence and column of a change, in causal order."""
    if found.name in _SAMPLED:
        return 0, found.at[0], found.at[1], order
    if found.name in (*_PROMPT, *_END):
        return 0, found.at[0], -1 if found.name in _PROMPT else math.inf, order
    scored = found.name in _SCORED or found.name.startswith(COMPONENT)
    phase = 2 if found.name in _LEARNED else 1 if scored else 3
    return phase, found.at[0], 0, order


def _columns(path: Path) -> dict[str, list[Any]]:
    """The columns of a rollouts file: an array for each list of numbers, else plain values."""
    import pyarrow as pa

    table = read_table(path)
    lacking = sorted(_NEEDED - set(table.column_names))
    if lacking:
        raise KeelError(f"{path} holds no rollouts (no column {lacking[0]}): delete it")

    def values(column: pa.ChunkedArray) -> list[Any]:
        kind = column.type
        if not (pa.types.is_list(kind) and pa.types.is_primitive(kind.value_type)):
            return list(column.to_pylist())
        return [c.values.to_numpy(zero_copy_only=False) if c.is_valid else None for c in column]

    names = [name for name in table.column_names if name not in ("stage", "step")]
    columns = {name: values(table.column(name)) for name in names}
    for name in _SAMPLED:
        if not all(isinstance(cell, np.ndarray) for cell in columns.get(name, [])):
            raise KeelError(f"{path} holds no rollouts (column {name} has no lists): delete it")
    return columns


# ---------------------------------------------------------------- checkpoints


def _weight_files(folder: Path) -> set[str]:
    """Weights, optimizer moments and state. Other files follow from the recipe and versions."""
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*" + TENSORS)}
    return found | ({STATE} if (folder / STATE).exists() else set())


def _file_order(name: str) -> tuple[bool, int, bool, str]:
    """What is trained first; copies of it in the model's folder late, and the state last."""
    return name == STATE, name.count("/"), name != "trainable" + TENSORS, name


def _compare_state(a: Path, b: Path) -> Iterator[Change]:
    return changes(json.loads(a.read_bytes()), json.loads(b.read_bytes()))


@dataclass(frozen=True, slots=True, eq=False)
class _Tensor:
    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

    def __str__(self) -> str:
        return f"{self.kind} {list(self.shape)}"

    def element(self, at: int) -> Any:
        """An element as a Python value; its bits where numpy has no such type."""
        size = self.data.size // prod(self.shape)
        raw = self.data[at * size : (at + 1) * size].tobytes()
        if self.kind == "BF16":
            return plain(np.frombuffer(b"\0\0" + raw, "<f4")[0])
        if self.kind in _DTYPES:
            return plain(np.frombuffer(raw, "<" + _DTYPES[self.kind])[0])
        return hex(int.from_bytes(raw, "little"))


def _compare_tensors(a: Path, b: Path) -> Iterator[Change]:
    left, right = _tensors(a), _tensors(b)
    for name in sorted(left.keys() | right.keys(), key=_natural):
        x, y = left.get(name), right.get(name)
        if x is None or y is None or str(x) != str(y):
            yield change(name, (None if tensor is None else str(tensor) for tensor in (x, y)))
            continue
        unequal = x.data != y.data
        if unequal.any():
            at = int(unequal.argmax()) * prod(x.shape) // unequal.size
            index = tuple(int(i) for i in np.unravel_index(at, x.shape)) if x.shape else ()
            yield change(name, (x.element(at), y.element(at)), index)


def _natural(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _tensors(path: Path) -> dict[str, _Tensor]:
    """The tensors of a safetensors file, which is mapped into memory, not loaded.

    The file is eight bytes with the length of a JSON header, the header, then the data;
    safetensors' own numpy reader has no bfloat16.
    """
    content: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    out = {}
    for name, info in header.items():
        if name != "__metadata__":
            begin, end = info["data_offsets"]
            if not 0 <= begin <= end <= content.size - start:
                raise ValueError(f"a tensor at {begin} to {end} of {content.size - start} bytes")
            data = np.asarray(content[start + begin : start + end])
            out[name] = _Tensor(info["dtype"], tuple(info["shape"]), data)
    return out
