"""At which step, sequence and token two runs first differ, and in what. Torch-free.

`diff("runs/a", "runs/b").first` says where; what lies there is in `rows`, `rollouts`, `metrics` or
`checkpoint` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from keel.runs.diff import checkpoints as diff_checkpoints
from keel.runs.diff import rollouts as diff_rollouts
from keel.runs.diff.checkpoints import CheckpointDifference
from keel.runs.diff.rollouts import RolloutsDifference
from keel.runs.diff.values import Change, Phase, changes, document, row, rows, same_bytes
from keel.runs.layout import Place, RunFolder
from keel.runs.reader import Run
from keel.types import KeelError, Side

Where = Literal["rows", "rollouts", "metrics", "checkpoint"]
SURROUNDINGS = ("versions", "threads")
SIDES: tuple[Side, ...] = ("train", "heldout")
_SAMPLED = ("completions/", "rollout/", "prompts/", "step/tokens", "num_tokens")
_SCORED = ("reward", "frac_reward_zero_std", "groups/")


@dataclass(frozen=True, slots=True)
class Point:
    """A step of a stage; step 0 is before the first."""

    stage: str
    step: int


@dataclass(frozen=True, slots=True)
class First:
    """The first point at which two runs differ, and which part of the step that is.

    `only_in` ("a" or "b") where one run lacks what the other has there.
    """

    stage: str
    step: int
    where: Where
    phase: Phase
    only_in: str | None = None


@dataclass(frozen=True, slots=True)
class MetricsDifference:
    """The first row of metrics.jsonl that differs, and the metrics that do."""

    stage: str
    step: int
    phase: Phase
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class RowsDifference:
    """The first row (from 1) that a stage sampled to learn from which differs."""

    stage: str
    side: Side
    row: int
    phase: Phase
    changes: tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two runs beside each other.

    `stages` are those that both recipes begin with: no other can be compared. `recipe` has the keys
    that differ, `surroundings` the versions and the number of threads that
    do. `reach_a` and `reach_b` are the last steps on record. `first` is the first point in the
    order of cause at which what the runs did differs: what a stage samples before its steps, then
    step for step the rollouts, the metrics, the checkpoint. Rollouts are looked at up to the first
    row of metrics that differs, checkpoints (`checkpoints` of them) up to the first step that does,
    for all that comes later follows from it. `rollouts_only` counts the steps of which one run
    alone kept the rollouts. Checkpoints that one run alone kept make no difference.
    """

    a: str
    b: str
    stages: tuple[str, ...]
    recipe: tuple[Change, ...]
    surroundings: tuple[Change, ...]
    reach_a: Point | None
    reach_b: Point | None
    first: First | None
    rows: RowsDifference | None
    rollouts: RolloutsDifference | None
    metrics: MetricsDifference | None
    checkpoint: CheckpointDifference | None
    rollouts_only: tuple[int, int]
    checkpoints: int

    @property
    def same(self) -> bool:
        """One recipe, and the same on record, as far as either goes; whatever the surroundings."""
        further = self.reach_a != self.reach_b or any(self.rollouts_only)
        return not self.recipe and self.first is None and not further

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it, `same` first."""
        return {"same": self.same, **document(asdict(self))}


Found = tuple[Place, First]


def diff(a: Path | str, b: Path | str) -> Difference:
    """What two run folders hold beside each other, and where they first part.

    Floats are compared by their bits, so NaN equals NaN. Files of the same bytes are not read any
    further.

    Raises:
        KeelError: there is no run in a folder, or a file that must be read is damaged.
    """
    try:
        pair = _Pair(Run(RunFolder.open(a)), Run(RunFolder.open(b)))
        return _compared(pair)
    except PermissionError as error:
        raise KeelError(f"cannot read {error.filename}: {error.strerror}: fix it") from error


def _compared(pair: _Pair) -> Difference:
    found: list[Found] = []
    sampled = _rows(pair, found)
    metrics, reaches = _metrics(pair, found)
    rollouts, only = _rollouts(pair, found, reaches)
    weights, looked = _checkpoints(pair, found)
    return Difference(
        a=str(pair.a.folder.path),
        b=str(pair.b.folder.path),
        stages=tuple(pair.stages),
        recipe=tuple(_recipes(pair)),
        surroundings=tuple(_surroundings(pair)),
        reach_a=_point(pair.a, reaches[0]),
        reach_b=_point(pair.b, reaches[1]),
        first=min(found, key=_order)[1] if found else None,
        rows=sampled,
        rollouts=rollouts,
        metrics=metrics,
        checkpoint=weights,
        rollouts_only=only,
        checkpoints=looked,
    )


@dataclass(frozen=True, slots=True)
class _Pair:
    a: Run
    b: Run

    @property
    def both(self) -> tuple[RunFolder, RunFolder]:
        return self.a.folder, self.b.folder

    @property
    def stages(self) -> Sequence[str]:
        """The stages that both recipes begin with."""
        pairs = list(zip(self.a.stages, self.b.stages, strict=False))
        count = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        return self.a.stages[:count]


def _order(found: Found) -> tuple[Place, int]:
    """Within a step sampling comes before learning, and that before the checkpoint."""
    place, first = found
    return place, ("rows", "rollouts", "metrics", "checkpoint").index(first.where)


def _point(run: Run, place: Place | None) -> Point | None:
    return None if place is None else Point(run.stages[place.stage], place.step)


# ---------------------------------------------------------------- recipe


def _recipes(pair: _Pair) -> Iterator[Change]:
    """The keys that differ: stages, shared ones, then each stage's under the stage's name."""
    left, right = pair.a.recipe(), pair.b.recipe()
    stages = left.pop("stages"), right.pop("stages")
    if pair.a.stages != pair.b.stages:
        yield Change("stages", ", ".join(pair.a.stages), ", ".join(pair.b.stages))
    yield from changes(left, right)
    for name, x, y in zip(pair.stages, *stages, strict=False):
        yield from changes(x, y, name)


def _surroundings(pair: _Pair) -> Iterator[Change]:
    known = []
    for run in (pair.a, pair.b):
        info = run.info()
        known.append({key: info[key] for key in SURROUNDINGS if key in info})
    yield from changes(known[0], known[1])


# ---------------------------------------------------------------- sampled rows


def _rows(pair: _Pair, found: list[Found]) -> RowsDifference | None:
    """What stages sampled before their first step, where both have it."""
    for number, stage in enumerate(pair.stages):
        for side in SIDES:
            a, b = (folder.rows(stage, side) for folder in pair.both)
            if not a.exists() or not b.exists() or same_bytes(a, b):
                continue
            first = _first_row(a, b, stage, side)
            if first is not None:
                place = Place(number, 0)
                found.append((place, First(stage, 0, "rows", first.phase)))
                return first
    return None


def _first_row(a: Path, b: Path, stage: str, side: Side) -> RowsDifference | None:
    left, right = rows(a), rows(b)
    for at in range(max(len(left), len(right))):
        pair = [
            row(path, at + 1, lines[at]) if at < len(lines) else {}
            for path, lines in ((a, left), (b, right))
        ]
        differing = tuple(changes(pair[0], pair[1]))
        if differing:
            names = {change.name.split("[")[0] for change in differing}
            told = {(x.get("chosen"), x.get("rejected")) for x in pair}
            turned = len({frozenset(answers) for answers in told}) == 1 and names <= {
                *("chosen", "rejected", "label", "labels"),
            }
            return RowsDifference(
                stage, side, at + 1, "scoring" if turned else "sampling", differing
            )
    return None


# ---------------------------------------------------------------- metrics


def _metrics(
    pair: _Pair, found: list[Found]
) -> tuple[MetricsDifference | None, tuple[Place | None, Place | None]]:
    """The first row that differs, and how far either run goes."""
    lines = [rows(folder.metrics) for folder in pair.both]
    shared = next(
        (i for i, (x, y) in enumerate(zip(*lines, strict=False)) if x != y),
        min(map(len, lines)),
    )
    # The last of the rows that are the same bytes says how far these go.
    start = max(0, shared - 1)
    left, right = (
        dict(_placed(folder, own, start)) for folder, own in zip(pair.both, lines, strict=True)
    )
    reaches = max(left, default=None), max(right, default=None)
    met = min((reach for reach in reaches if reach is not None), default=None)
    for place in sorted(left.keys() | right.keys()):
        if place.stage >= len(pair.stages) or None in reaches or (met and place > met):
            break
        stage = pair.stages[place.stage]
        if place not in left or place not in right:
            only = "a" if place in left else "b"
            found.append((place, First(stage, place.step, "metrics", "record", only)))
            return None, reaches
        differing = tuple(changes(left[place], right[place]))
        if differing:
            phase = _phase(pair, place, [change.name for change in differing])
            found.append((place, First(stage, place.step, "metrics", phase)))
            return MetricsDifference(stage, place.step, phase, differing), reaches
    return None, reaches


def _placed(
    folder: RunFolder, lines: Sequence[bytes], start: int
) -> Iterator[tuple[Place, dict[str, Any]]]:
    for number, text in enumerate(lines[start:], start=start + 1):
        record = row(folder.metrics, number, text)
        try:
            place = Place(folder.stages.index(record.pop("stage")), int(record.pop("step")))
        except (KeyError, ValueError, TypeError) as error:
            raise KeelError(f"{folder.metrics}:{number} is damaged ({error}): fix it") from error
        yield place, record


def _phase(pair: _Pair, place: Place, names: Sequence[str]) -> Phase:
    """Learning, where rollouts of the step (or a stage without any) leave nothing else.

    Without them the metrics must say it: sampling where what they say of the completions differs.
    """
    samples = _every(pair.a, place.stage) is not None
    if not samples or all(folder.rollouts(*_at(place)).exists() for folder in pair.both):
        return "learning"
    if any(name.startswith(_SAMPLED) for name in names):
        return "sampling"
    return "scoring" if any(name.startswith(_SCORED) for name in names) else "learning"


def _at(place: Place) -> tuple[int, int]:
    return place.stage, place.step


def _every(run: Run, stage: int) -> int | None:
    """Of how many steps a stage keeps the rollouts of one; None where it samples none."""
    every = run.recipe()["stages"][stage].get("rollouts_every")
    return every if isinstance(every, int) else None


# ---------------------------------------------------------------- rollouts


def _rollouts(
    pair: _Pair, found: list[Found], reaches: tuple[Place | None, Place | None]
) -> tuple[RolloutsDifference | None, tuple[int, int]]:
    """The first step whose rollouts differ, up to the first row of metrics that does."""
    until = min(found, key=_order)[0] if found else None
    left, right = ({e.place: e.path for e in f.list_rollouts()} for f in pair.both)
    only = (_alone(left, right, pair), _alone(right, left, pair))
    for place in sorted(left.keys() | right.keys()):
        if place.stage >= len(pair.stages) or (until is not None and place > until):
            break
        stage = pair.stages[place.stage]
        if place in left and place in right:
            if same_bytes(left[place], right[place]):
                continue
            first = diff_rollouts.compare(left[place], right[place], stage, place.step)
            if first is not None:
                found.append((place, First(stage, place.step, "rollouts", first.phase)))
                return first, only
        elif _is_hole(pair, place, reaches[1 if place in left else 0]):
            only_in = "a" if place in left else "b"
            found.append((place, First(stage, place.step, "rollouts", "record", only_in)))
            return None, only
    return None, only


def _alone(own: Mapping[Place, Path], other: Mapping[Place, Path], pair: _Pair) -> int:
    return sum(place.stage < len(pair.stages) for place in own.keys() - other.keys())


def _is_hole(pair: _Pair, place: Place, reach: Place | None) -> bool:
    """Whether a run that lacks a step's rollouts must have had some.

    It went on past the step, and keeps those of the same steps as the other does.
    """
    kept = _every(pair.a, place.stage) == _every(pair.b, place.stage)
    return kept and reach is not None and reach > place


# ---------------------------------------------------------------- checkpoints


def _checkpoints(pair: _Pair, found: list[Found]) -> tuple[CheckpointDifference | None, int]:
    """The first checkpoint of both that differs, before the first step that does."""
    until = min(found, key=_order)[0] if found else None
    left, right = ({e.place: e.path for e in f.list_checkpoints()} for f in pair.both)
    looked = 0
    for place in sorted(left.keys() & right.keys()):
        if place.stage >= len(pair.stages) or (until is not None and place >= until):
            break
        stage, looked = pair.stages[place.stage], looked + 1
        first = diff_checkpoints.compare(left[place], right[place], stage, place.step)
        if first is not None:
            found.append((place, First(stage, place.step, "checkpoint", "learning")))
            return first, looked
    return None, looked
