"""The first step, sequence, token or tensor at which two runs differ. Torch-free.

Runs are compared in the order in which a run produces things: recipe and environment, the samples
that a stage makes before its first step, then for each step its rollouts, metrics and checkpoint.
What comes after the first difference follows from it, and is not read.
"""

from __future__ import annotations

import filecmp
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from keel.platform import files
from keel.runs import checkpoint
from keel.runs.checkpoint import records_until
from keel.runs.layout import Place, RunFolder
from keel.runs.reader import Run
from keel.runs.rows import COMPONENT, LEARNED, SCORED, TERMS, read_table
from keel.runs.values import Change, change, changes, same
from keel.types import KeelError, Split

ENVIRONMENT = ("versions", "threads", "autocast")
SPLITS: tuple[Split, ...] = ("train", "validation")
STATE = "state.json"
TRAINED = "trainable.safetensors"

# Columns of rollouts in causal order: what was sampled (prompt, then token by token, the end), what
# was scored, what was learned from it. Extras of rewards, which nothing else reads, come last.
_PROMPT = ("group", "prompt_id", "task", "prompt_format", "prompt", "expected")
_TOKENS = ("tokens", "pieces", "written", "log_probs")
_END = ("completion", "finish")
_SCORED = ("step_ends", "step_rewards", "outcome", "reward")
_LEARNED = (*SCORED, *LEARNED, *TERMS)
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1"}
"""numpy's names of the types of safetensors."""
_KNOWN = {*_PROMPT, *_TOKENS, *_END, *_SCORED, *_LEARNED, "stage", "step"}


@dataclass(frozen=True, slots=True)
class Point:
    """A step of a stage; step 0 is before the first."""

    stage: str
    step: int


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first place at which two runs differ.

    `file` is the name in the run folder of a file that differs, `change` the first value in it that
    does: its `at` is (sequence,) or (sequence, token) of rollouts, the element of a tensor. If
    one run lacks what it must have had, the change is of "present" and None. `prompt_id` is the
    sequence's.
    """

    stage: str
    step: int
    file: str
    change: Change
    prompt_id: str | None = None


@dataclass(frozen=True, slots=True)
class Difference:
    """The comparison of two runs.

    `stages` are those that both recipes begin with; no others are compared. `recipe` has the keys
    that differ, `environment` the versions and numbers of threads that do, `inputs` the models and
    files whose content does (their SHA-256, by key, when the oldest checkpoint was written).
    `reach_a` and `reach_b`
    are the last recorded steps, `checkpoints` the number of those compared: that both have kept.
    """

    a: str
    b: str
    stages: tuple[str, ...]
    recipe: tuple[Change, ...]
    environment: tuple[Change, ...]
    inputs: tuple[Change, ...]
    reach_a: Point | None
    reach_b: Point | None
    first: FirstDifference | None
    checkpoints: int

    @property
    def same(self) -> bool:
        """Whether recipe, inputs, reach and all recorded values are equal, in whatever
        environment."""
        equal = not self.recipe and not self.inputs and self.first is None
        return equal and self.reach_a == self.reach_b

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
        return _Comparison(_Recorded(a), _Recorded(b)).result()
    except OSError as error:
        raise KeelError(f"cannot read {error.filename}: {error.strerror}: fix it") from error


class _Recorded:
    """What one of the two runs has recorded, by place."""

    def __init__(self, path: Path | str) -> None:
        self.folder = RunFolder.open(path)
        run = Run(self.folder)
        self.stages = run.stages
        self.recipe = run.recipe()
        info = run.info()
        self.environment = {key: info[key] for key in ENVIRONMENT if key in info}
        self.records = dict(records_until(self.folder, Place(len(self.stages), 0)))
        self.rollouts = {entry.place: entry.path for entry in self.folder.list_rollouts()}
        self.checkpoints = {entry.place: entry.path for entry in self.folder.list_checkpoints()}
        known = [r for path in self.checkpoints.values() if (r := checkpoint.read(path))][:1]
        hashes = known[0].inputs if known else {}
        self.inputs = {key.partition(" (")[0]: digest for key, digest in hashes.items()}
        self.reach = max(self.records, default=None)

    @property
    def point(self) -> Point | None:
        return None if self.reach is None else Point(self.stages[self.reach.stage], self.reach.step)


class _Comparison:
    def __init__(self, a: _Recorded, b: _Recorded) -> None:
        self.a, self.b = self.runs = a, b
        pairs = zip(a.stages, b.stages, strict=False)
        self.stages = tuple(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self.compared = 0

    def result(self) -> Difference:
        a, b = self.a, self.b
        return Difference(
            a=str(a.folder.path),
            b=str(b.folder.path),
            stages=self.stages,
            recipe=tuple(self.recipe()),
            environment=tuple(changes(a.environment, b.environment)),
            inputs=tuple(
                change(key, a.inputs[key], b.inputs[key])
                for key in sorted(a.inputs.keys() & b.inputs.keys())
                if a.inputs[key] != b.inputs[key]
            ),
            reach_a=a.point,
            reach_b=b.point,
            first=next(self.differences(), None),
            checkpoints=self.compared,
        )

    def recipe(self) -> Iterator[Change]:
        """The keys that differ: the stages' names, shared keys, then keys of the shared stages."""
        a, b = ({**run.recipe, "stages": ", ".join(run.stages)} for run in self.runs)
        yield from changes(a, b)
        for at, name in enumerate(self.stages):
            yield from changes(self.a.recipe["stages"][at], self.b.recipe["stages"][at], name)

    def differences(self) -> Iterator[FirstDifference]:
        """The differences in causal order. All but the first may follow from it."""
        places = {
            place
            for run in self.runs
            for found in (run.records, run.rollouts, run.checkpoints)
            for place in found
        }
        for number, stage in enumerate(self.stages):
            for file, found in self._samples(stage):
                yield FirstDifference(stage, 0, file, found)
            for place in sorted(place for place in places if place.stage == number):
                yield from self._rollouts(stage, place)
                for file, found in chain(self._metrics(place), self._checkpoint(place)):
                    yield FirstDifference(stage, place.step, file, found)

    def _samples(self, stage: str) -> Iterator[tuple[str, Change]]:
        for split in SPLITS:
            a, b = (run.folder.rows(stage, split) for run in self.runs)
            if a.exists() and b.exists() and not _same_bytes(a, b):
                for x, y in zip_longest(files.read_jsonl(a), files.read_jsonl(b)):
                    number, left, right = (x or y)[0], x[2] if x else {}, y[2] if y else {}
                    for found in changes(left, right, f"line {number}"):
                        yield f"rows/{a.name}", found

    def _rollouts(self, stage: str, place: Place) -> Iterator[FirstDifference]:
        a, b = self.a.rollouts.get(place), self.b.rollouts.get(place)
        if a is not None and b is not None:
            if not _same_bytes(a, b):
                left, right = (read_table(path).to_pylist() for path in (a, b))
                found = _first_in_rollouts(left, right)
                if found is not None:
                    prompts = max(left, right, key=len)
                    prompt_id = str(prompts[found.at[0]].get("prompt_id"))
                    file = f"rollouts/{a.name}"
                    yield FirstDifference(stage, place.step, file, found, prompt_id)
        elif (only := a or b) is not None:
            every = [run.recipe["stages"][place.stage].get("rollouts_every") for run in self.runs]
            if every[0] == every[1]:  # else runs keep the rollouts of different steps
                for missing in self._missing(place, "rollouts", a, b):
                    yield FirstDifference(stage, place.step, f"rollouts/{only.name}", missing)

    def _metrics(self, place: Place) -> Iterator[tuple[str, Change]]:
        a, b = self.a.records.get(place), self.b.records.get(place)
        found = self._missing(place, "record", a, b)
        if a is not None and b is not None:
            found = changes(json.loads(a), json.loads(b))
        for one in found:
            yield "metrics.jsonl", one

    def _missing(self, place: Place, name: str, a: object, b: object) -> Iterator[Change]:
        """What only one run has is a difference if the other run has come as far."""
        reach = (self.a if a is None else self.b).reach
        if (a is None) != (b is None) and reach is not None and reach >= place:
            yield _only_in_one(name, a is not None)

    def _checkpoint(self, place: Place) -> Iterator[tuple[str, Change]]:
        """Weights, optimizer moments and state. Other files follow from the recipe and versions."""
        a, b = self.a.checkpoints.get(place), self.b.checkpoints.get(place)
        if a is None or b is None:
            return
        self.compared += 1
        names = {p.relative_to(f).as_posix() for f in (a, b) for p in f.rglob("*.safetensors")}
        # What is trained first; copies of it in the model's folder late, and the state last.
        names |= {STATE} & {path.name for folder in (a, b) for path in folder.iterdir()}
        order = sorted(names, key=lambda n: (n == STATE, n.count("/"), n != TRAINED, n))
        for name in order:
            x, y = a / name, b / name
            if _same_bytes(x, y):
                continue
            for path in (a, b):
                if (wrong := checkpoint.damage(path)) is not None:
                    raise KeelError(f"checkpoint {path} is damaged ({wrong}): delete it")
            for found in _compare_files(name, x, y):
                yield f"checkpoints/{a.name}/{name}", found


def _only_in_one(name: str, in_a: bool) -> Change:
    return change(name, "present" if in_a else None, None if in_a else "present")


def _same_bytes(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and filecmp.cmp(a, b, shallow=False)


def _json_safe(value: Any) -> Any:
    """A tree of plain values with floats that are not finite as words."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _first_in_rollouts(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> Change | None:
    """The first phase, in it the first sequence, in it the first token or column that differs."""
    names = sorted({name for rows in (a, b) for row in rows[:1] for name in row} - _KNOWN)
    components = [name for name in names if name.startswith(COMPONENT)]
    extras = [name for name in names if name not in components]
    sampled = (_PROMPT, _TOKENS, _END)
    for phase in (sampled, ((*components, *_SCORED),), (_LEARNED,), (extras,)):
        for sequence, (x, y) in enumerate(zip(a, b, strict=False)):
            for columns in phase:
                cells = (_in_cell(name, sequence, x.get(name), y.get(name)) for name in columns)
                found = [one for one in cells if one is not None]
                if found:
                    return min(found, key=lambda one: (*one.at, 0)[1])
        if phase is sampled and len(a) != len(b):
            return change("sequences", len(a), len(b), (min(len(a), len(b)),))
    return None


def _in_cell(name: str, sequence: int, a: Any, b: Any) -> Change | None:
    """How two cells of a table differ; of lists the first token at which they do."""
    if same(a, b):
        return None
    if not isinstance(a, list) and not isinstance(b, list):
        return change(name, a, b, (sequence,))
    tokens = [*zip_longest(a or (), b or ())] or [(None, None)]
    at = next((at for at, (x, y) in enumerate(tokens) if not same(x, y)), 0)
    return change(name, *tokens[at], (sequence, at))


def _compare_files(name: str, a: Path, b: Path) -> Iterator[Change]:
    """The values of state that differ, or the tensors, each with its first element that does."""
    if not a.exists() or not b.exists():
        yield _only_in_one(name, a.exists())
        return
    if name == STATE:
        yield from changes(json.loads(a.read_bytes()), json.loads(b.read_bytes()))
        return
    # As bytes, since this module does without torch, and numpy has no bfloat16.
    left, right = (
        dict(deserialize(path.read_bytes()))  # type: ignore[no-untyped-call]
        for path in (a, b)
    )
    for name in sorted({*left, *right}):
        x, y = left.get(name), right.get(name)
        if x is None or y is None or _kind(x) != _kind(y):
            yield change(name, x and _kind(x), y and _kind(y))
        elif x["data"] != y["data"]:
            yield _first_element(name, x, y)


def _kind(tensor: Mapping[str, Any]) -> str:
    """Type and shape of a tensor, such as `F32 [64, 2]`."""
    return f"{tensor['dtype']} {tensor['shape']}"


def _first_element(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Change:
    """The first element in which two tensors of one type and shape differ."""
    x, y = (np.frombuffer(tensor["data"], np.uint8) for tensor in (a, b))
    size = len(x) // math.prod(a["shape"])
    at = int((x != y).argmax()) // size
    place = tuple(int(i) for i in np.unravel_index(at, a["shape"]))
    one, other = (_number(a["dtype"], part[at * size :][:size].tobytes()) for part in (x, y))
    return change(name, one, other, place)


def _number(dtype: str, element: bytes) -> Any:
    """The value of an element; its bytes in hexadecimal if numpy does not have its type."""
    if dtype == "BF16":  # the upper half of a float32
        dtype, element = "F32", b"\0\0" + element
    return np.frombuffer(element, _NUMPY[dtype])[0].item() if dtype in _NUMPY else element.hex()
