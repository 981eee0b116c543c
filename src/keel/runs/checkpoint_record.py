"""The record in a checkpoint: the run's recipe and inputs, and its metrics and rollouts so far.

`record.json` in a checkpoint:

    {"recipe": the resolved recipe, "inputs": see `runs.fingerprints`, "metrics": SHA-256 of
     metrics.jsonl so far, "files": {"rollouts/step-000001.parquet": SHA-256, ...}}

`files` are the rollouts so far and the rows that stages sampled. Torch-free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.runs import files
from keel.runs.layout import FolderEntry, Place, RunFolder
from keel.runs.values import changes
from keel.types import KeelError

RECORD = "record.json"
SHOWN = 3
"""Differences that a message lists."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The content of record.json."""

    recipe: Mapping[str, Any]
    inputs: Mapping[str, str]
    metrics: str
    files: Mapping[str, str]

    def write(self, checkpoint: Path) -> None:
        """Write record.json into a checkpoint that is being written."""
        text = json.dumps(asdict(self), ensure_ascii=False, indent=1, sort_keys=True)
        (checkpoint / RECORD).write_text(text + "\n", "utf-8")


def read(checkpoint: Path) -> Recorded | None:
    """The record of a whole checkpoint; None of one that an earlier version of Keel wrote."""
    try:
        return Recorded(**json.loads((checkpoint / RECORD).read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise KeelError(
            f"cannot read {checkpoint / RECORD}: {error}: resume with the version that wrote it"
        ) from error


def changed(known: Recorded, recipe: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """How recipe and inputs differ from those of a checkpoint; empty if they do not."""
    parts = [f"{c.name} = {c.b} (was {c.a})" for c in changes(known.recipe, recipe)]
    # A name that only one of them has is a change of the recipe.
    both = sorted(known.inputs.keys() & inputs.keys())
    parts += [f"the content of {name}" for name in both if known.inputs[name] != inputs[name]]
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return ", ".join(parts[:SHOWN]) + more


def records_until(folder: RunFolder, last: Place) -> list[tuple[Place, bytes]]:
    """The complete records of metrics.jsonl up to a place, in the order of the file.

    Raises:
        KeelError: a record is damaged.
    """
    found = []
    for number, line, record in files.read_jsonl(folder.metrics):
        try:
            place = Place(folder.stages.index(record["stage"]), int(record["step"]))
        except (ValueError, KeyError, TypeError) as error:
            raise files.damaged_line(folder.metrics, number, error) from error
        if place <= last:
            found.append((place, line))
    return found


def check(folder: RunFolder, newest: FolderEntry, known: Recorded) -> list[str]:
    """Compares the run folder with its newest checkpoint's record; returns the rollouts lost since.

    Nothing that follows depends on the rollouts before a checkpoint: those that are missing or
    changed are only reported, each as `PATH is missing` or `PATH is damaged`.

    Raises:
        KeelError: a row of metrics or sampled rows from before the checkpoint are missing or
            changed.
    """
    rows = records_until(folder, newest.place)
    if hashlib.sha256(b"".join(row for _, row in rows)).hexdigest() != known.metrics:
        odd, what = _odd(folder, newest, [place for place, _ in rows])
        raise KeelError(f"{folder.metrics} {what}: {_way_out(folder, odd)}")
    lost = []
    for name, digest in known.files.items():
        path = folder.path / name
        if path.is_file() and files.sha256(path) == digest:
            continue
        what = "is damaged" if path.is_file() else "is missing"
        if path.parent != folder.rollouts_folder:
            raise KeelError(f"{path} {what}: restore it from a copy")
        lost.append(f"{name} {what}")
    return lost


def odd_row(folder: RunFolder, newest: FolderEntry) -> str | None:
    """The first step up to a checkpoint whose row is missing or there twice, in words.

    Nothing else can be compared with a checkpoint that has no record.
    """
    odd, what = _odd(folder, newest, [place for place, _ in records_until(folder, newest.place)])
    return None if odd is None else f"{folder.metrics.name} {what}"


def _odd(
    folder: RunFolder, newest: FolderEntry, places: Sequence[Place]
) -> tuple[Place | None, str]:
    """The first step whose row is missing or there twice, and which of these it is."""
    for stage, name in enumerate(folder.stages[: newest.place.stage + 1]):
        steps = [place.step for place in places if place.stage == stage]
        last = newest.place.step if stage == newest.place.stage else max(steps, default=0)
        for step in range(1, last + 1):
            if steps.count(step) != 1:
                what = "has two rows" if step in steps else "lacks the row"
                return Place(stage, step), f"{what} of {name} step {step}"
    return None, f"is not what checkpoint {newest.path.name} was written with"


def _way_out(folder: RunFolder, odd: Place | None) -> str:
    """How to continue where the record of a step is lost."""
    later = [e for e in folder.list_checkpoints() if odd is None or e.place >= odd]
    which = later[0].path.name
    if len(later) > 1:
        which += f" to {later[-1].path.name}"
    return (
        f"restore it from a copy, or delete checkpoints {which}, and --resume repeats what they "
        "hold"
    )
