"""All rollouts of a run as one table, to search and filter them over all steps.

The table is kept as Arrow files in the folder `view/` of the run, `CHUNK` or more rows each, and
read as memory maps. Each lists the rollout files that it was made of, with size and time, and is
made again where one has changed. The rows of newer steps are in memory. Torch-free.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from keel.runs.layout import FolderEntry, RunFolder

CHUNK = 20_000
"""Rows from which on a part of the table is written to disk."""
SOURCES = b"keel-sources"
_TEXT = ("prompt_id", "task", "prompt", "completion", "finish")
_COLUMNS = ("group", *_TEXT, "reward", "written")


@dataclass(frozen=True, slots=True)
class Query:
    """What to look for: every condition that is set must hold.

    `text` is searched for, without regard to case, in completions and prompts. Limits include
    their ends; `prompt_id` names one prompt.
    """

    text: str = ""
    stage: str | None = None
    prompt_id: str | None = None
    finish: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    first_step: int | None = None
    last_step: int | None = None


@dataclass(frozen=True, slots=True)
class Hits:
    """The number of rows that fit a query, and the first of them in the order of the run.

    Each is a dict with stage, step, row (its place in the step), prompt_id, prompt, completion,
    reward, length (tokens that the policy wrote) and finish.
    """

    total: int
    rows: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class _IndexPart:
    """Rows of some rollout files, and what those files were: path, size and time of each."""

    sources: tuple[tuple[str, int, int], ...]
    table: pa.Table


class RolloutIndex:
    """The rollouts of a run, searchable. `update` reads what is new; safe to use from threads."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._parts: list[_IndexPart] = []
        self._lock = threading.Lock()
        self._loaded = False
        self._seen = -1
        self.damaged: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """The number of rollouts in the index."""
        return sum(part.table.num_rows for part in self._parts)

    def update(self) -> None:
        """Read the rollout files that are new or have changed.

        A file that is damaged is left out, and named in `damaged`.

        Takes about 1 ms a file; a later call, also of another process, reads the parts on disk.
        """
        with self._lock:
            if not self._loaded:
                self._parts = list(self._stored())
                self._loaded = True
            changed = _changed(self.folder.rollouts_folder)
            if changed == self._seen:
                return
            listed = self.folder.list_rollouts()
            there = {entry.path.name: _identity(entry.path) for entry in listed}
            parts = [
                part
                for part in self._parts
                if all(there.get(source[0]) == source for source in part.sources)
            ]
            known = {source[0] for part in parts for source in part.sources}
            fresh: list[_IndexPart] = []
            damaged = []
            for entry in listed:
                if entry.path.name in known:
                    continue
                try:
                    fresh.append(self._read(entry))
                except (OSError, pa.ArrowException):
                    damaged.append(entry.path.name)
                    continue
                if sum(part.table.num_rows for part in fresh) >= CHUNK:
                    parts += self._store(fresh)
                    fresh = []
            small = [part for part in parts if part.table.num_rows < CHUNK]
            if fresh:
                kept = [part for part in parts if part not in small]
                parts = [*kept, *self._store([*small, *fresh])]
            self._parts = parts  # at once: a search may be reading the list
            self.damaged = tuple(damaged)
            self._seen = changed

    def search(self, query: Query, limit: int = 100) -> Hits:
        """The rollouts that fit a query."""
        total = 0
        found: list[dict[str, Any]] = []
        text = pc.utf8_lower(pa.scalar(query.text)).as_py()
        for part in sorted(self._parts, key=lambda part: part.sources[0][0]):
            mask = _mask(part.table, query, text)
            fitting = part.table if mask is None else part.table.filter(mask)
            total += fitting.num_rows
            if len(found) < limit:
                shown = fitting.slice(0, limit - len(found)).drop(["folded"])
                found += shown.to_pylist()
        found.sort(key=lambda row: (self.folder.stages.index(row["stage"]), row["step"]))
        return Hits(total, found)

    def _read(self, entry: FolderEntry) -> _IndexPart:
        identity = _identity(entry.path)
        stage = self.folder.stages[entry.place.stage]
        raw = pq.read_table(entry.path, columns=list(_COLUMNS), use_threads=False)
        return _IndexPart((identity,), _row_table(raw, stage, entry.place.step))

    def _store(self, parts: Sequence[_IndexPart]) -> list[_IndexPart]:
        """The parts as one, on disk where it has as many rows as a chunk."""
        sources = tuple(source for part in parts for source in part.sources)
        table = pa.concat_tables([part.table for part in parts]).combine_chunks()
        joined = _IndexPart(sources, table)
        if table.num_rows < CHUNK:
            return [joined]
        path = self.folder.path / "view" / f"{sources[0][0].removesuffix('.parquet')}.arrow"
        temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
        try:
            path.parent.mkdir(exist_ok=True)
            schema = table.schema.with_metadata({SOURCES: json.dumps(sources).encode()})
            with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                writer.write_table(table)
            temporary.replace(path)
            return [_open(path)]
        except OSError:  # a folder that may not be written to is read again each time
            temporary.unlink(missing_ok=True)
            return [joined]

    def _stored(self) -> list[_IndexPart]:
        found: list[_IndexPart] = []
        for path in sorted((self.folder.path / "view").glob("[!.]*.arrow")):
            try:
                part = _open(path)
                # Two servers of a run that goes on may have written parts that overlap.
                known = {source[0] for one in found for source in one.sources}
                found += [] if known & {source[0] for source in part.sources} else [part]
            except (OSError, pa.ArrowException, ValueError, KeyError, TypeError):
                continue  # made again
        return found


def _changed(folder: Path) -> int:
    """When a file was added to the folder or replaced: all are written by renaming."""
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return -1


def _identity(path: Path) -> tuple[str, int, int]:
    try:
        facts = path.stat()
    except OSError:  # a resumed run deletes what came after its checkpoint
        return path.name, -1, -1
    return path.name, facts.st_size, facts.st_mtime_ns


def _open(path: Path) -> _IndexPart:
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    sources = tuple(
        (str(n), int(s), int(t)) for n, s, t in json.loads(table.schema.metadata[SOURCES])
    )
    wanted = {"stage", "step", "row", "group", "reward", "length", "folded", *_TEXT}
    if not wanted <= set(table.column_names):
        raise ValueError("another version's index")
    return _IndexPart(sources, table.replace_schema_metadata(None))


def _row_table(raw: pa.Table, stage: str, step: int) -> pa.Table:
    """The columns of the index, from those of a rollout file."""
    count = raw.num_rows
    written = raw["written"].combine_chunks() if count else pa.array([], pa.list_(pa.bool_()))
    lengths = np.zeros(count, np.int32)
    if count:
        flat = np.concatenate([[0], np.cumsum(written.flatten().to_numpy(zero_copy_only=False))])
        offsets = written.offsets.to_numpy() - written.offsets[0].as_py()
        lengths = (flat[offsets[1:]] - flat[offsets[:-1]]).astype(np.int32)
    texts = {name: raw[name].cast(pa.string()) for name in _TEXT}
    both = pc.binary_join_element_wise(texts["completion"], texts["prompt"], "\n")
    return pa.table(
        {
            "stage": pa.array([stage] * count, pa.string()),
            "step": pa.array([step] * count, pa.int32()),
            "row": pa.array(range(count), pa.int32()),
            "group": raw["group"].cast(pa.int32()),
            **texts,
            "reward": raw["reward"].cast(pa.float64()),
            "length": pa.array(lengths),
            "folded": pc.utf8_lower(both),
        }
    )


def _mask(table: pa.Table, query: Query, text: str) -> Any:
    """Which rows fit; None where all do. The cheap conditions go first."""
    equal = {"stage": query.stage, "prompt_id": query.prompt_id, "finish": query.finish}
    masks = [pc.equal(table[name], value) for name, value in equal.items() if value is not None]
    for name, low, high in (
        ("reward", query.min_reward, query.max_reward),
        ("length", query.min_length, query.max_length),
        ("step", query.first_step, query.last_step),
    ):
        masks += [] if low is None else [pc.greater_equal(table[name], low)]
        masks += [] if high is None else [pc.less_equal(table[name], high)]
    if text:
        masks.append(pc.match_substring(table["folded"], text))
    return reduce(pc.and_, masks) if masks else None
