"""Recorded completions: of one step, of all steps to search, and as lines of tables. Torch-free."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from keel.analysis.text import Measure, Tokens, visible
from keel.runs.layout import FolderEntry, RunFolder
from keel.runs.reader import Run, rows_of
from keel.runs.rows import COMPONENT, EXTRA, TERMS
from keel.types import shown_text
from keel.view.address import Address

KEPT = 2**30
"""Bytes of tables that a search keeps; the files of what is beyond are read at each search."""
STEPS = 4
"""Steps that are kept whole, of all runs and tabs together: a large one has 100 MB."""
WINDOW = 64
"""Files that are read at a time."""
_COLUMNS = ("prompt_id", "prompt", "completion", "finish", "reward", "written")
_Identity = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Hits:
    """The number of rows that fit, the first of them in the order of the run, the number of rows
    searched, and the files that are damaged and left out.

    Each row is a dict with stage, step, row (its place in the step), prompt_id, prompt, completion,
    reward, length (tokens that the policy wrote) and finish.
    """

    total: int
    rows: list[dict[str, Any]]
    searched: int
    damaged: tuple[str, ...]


class RolloutIndex:
    """The rollouts of a run, searchable; safe to use from threads."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._kept: dict[_Identity, pa.Table] = {}
        self._lock = threading.Lock()

    def search(self, wanted: Address, limit: int = 100) -> Hits:
        """The rollouts that fit the conditions of an address: all that are set must hold.

        `text` is searched for, without regard to case, in completions and prompts. Limits include
        their ends. The first search takes about 1 ms a file; later ones read what is new.
        """
        total = searched = 0
        rows: list[dict[str, Any]] = []
        damaged = []
        for entry, table in self._tables(self.folder.list_rollouts()):
            if table is None:
                damaged.append(entry.path.name)
                continue
            searched += table.num_rows
            mask = _mask(table, wanted)
            fitting = table if mask is None else table.filter(mask)
            total += fitting.num_rows
            if fitting.num_rows and len(rows) < limit:
                rows += fitting.slice(0, limit - len(rows)).to_pylist()
        return Hits(total, rows, searched, tuple(damaged))

    def _tables(
        self, entries: Sequence[FolderEntry]
    ) -> Iterator[tuple[FolderEntry, pa.Table | None]]:
        """The table of each file; None if it is damaged, or was deleted since."""
        names = [_identity(entry.path) for entry in entries]
        with self._lock, ThreadPoolExecutor() as pool:  # several tabs read a file once
            kept = {name: self._kept[name] for name in names if name in self._kept}
            self._kept, size = kept, sum(table.nbytes for table in kept.values())
            for start in range(0, len(entries), WINDOW):
                part = slice(start, start + WINDOW)
                tables = list(pool.map(self._table, names[part], entries[part]))
                for name, entry, table in zip(names[part], entries[part], tables, strict=True):
                    if table is not None and name not in kept and size + table.nbytes <= KEPT:
                        kept[name] = table
                        size += table.nbytes
                    yield entry, table

    def _table(self, name: _Identity, entry: FolderEntry) -> pa.Table | None:
        if name in self._kept:
            return self._kept[name]
        try:
            raw = pq.read_table(entry.path, columns=list(_COLUMNS), use_threads=False)
            return _row_table(raw, self.folder.stages[entry.place.stage], entry.place.step)
        except (OSError, pa.ArrowException):
            return None


def _identity(path: Path) -> _Identity:
    try:
        facts = path.stat()
    except OSError:  # a resumed run deletes what came after its checkpoint
        return path.name, -1, -1
    return path.name, facts.st_size, facts.st_mtime_ns


def _row_table(raw: pa.Table, stage: str, step: int) -> pa.Table:
    """The columns of the index, from those of a rollout file."""
    count = raw.num_rows
    lengths = [sum(written) for written in raw["written"].to_pylist()]
    texts = {name: raw[name].cast(pa.string()) for name in ("prompt_id", "prompt", "completion")}
    return pa.table(
        {
            "stage": pa.array([stage] * count, pa.string()),
            "step": pa.array([step] * count, pa.int32()),
            "row": pa.array(range(count), pa.int32()),
            **texts,
            "finish": raw["finish"].cast(pa.string()),
            "reward": raw["reward"].cast(pa.float64()),
            "length": pa.array(lengths, pa.int32()),
        }
    )


def _mask(table: pa.Table, wanted: Address) -> Any:
    """Which rows fit; None if all do. The cheap conditions go first."""
    equal = {"stage": wanted.stage, "prompt_id": wanted.prompt, "finish": wanted.finish}
    masks = [pc.equal(table[name], value) for name, value in equal.items() if value is not None]
    for name, low, high in (
        ("reward", wanted.min_reward, wanted.max_reward),
        ("length", wanted.min_length, wanted.max_length),
        ("step", wanted.first_step, wanted.last_step),
    ):
        masks += [] if low is None else [pc.greater_equal(table[name], low)]
        masks += [] if high is None else [pc.less_equal(table[name], high)]
    if wanted.text:
        found = (
            pc.match_substring(table[name], wanted.text, ignore_case=True)
            for name in ("completion", "prompt")
        )
        masks.append(pc.or_(*found))
    return reduce(pc.and_, masks) if masks else None


# ---------------------------------------------------------------- one step


class StepRows:
    """The completions of a step. Each row is made when it is asked for: as Python objects a step
    takes many times the memory of its table."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.groups: list[int] = table["group"].to_pylist()
        self.scores = [
            -math.inf if reward is None or math.isnan(reward) else float(reward)
            for reward in table["reward"].to_pylist()
        ]
        """The rewards to rank by: a completion without one comes last."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, at: int) -> Row:
        if not 0 <= at < len(self):
            raise IndexError(at)
        return rows_of(self.table.slice(at, 1))[0]

    @cached_property
    def by_group(self) -> dict[int, list[int]]:
        """The places of the completions of each group, best first."""
        found: dict[int, list[int]] = {}
        for at in sorted(range(len(self)), key=lambda at: -self.scores[at]):
            found.setdefault(self.groups[at], []).append(at)
        return {group: found[group] for group in dict.fromkeys(self.groups)}

    @property
    def widest(self) -> list[list[int]]:
        """The groups, those first whose rewards differ most."""

        def spread(members: list[int]) -> float:
            rewards = [self.scores[at] for at in members if math.isfinite(self.scores[at])]
            return max(rewards, default=0.0) - min(rewards, default=0.0)

        return sorted(self.by_group.values(), key=spread, reverse=True)

    @property
    def loss(self) -> dict[str, float]:
        """The terms of the loss, summed over all tokens of the step: what the step logged."""
        found: dict[str, float] = {}
        for name in TERMS:
            if name in self.table.column_names:
                values = pc.list_flatten(self.table[name]).cast(pa.float64())
                found[name] = pc.sum(values).as_py() or 0.0
        return {**found, "loss": sum(found.values())} if found else {}


def step_rows(run: Run, stage: str, step: int) -> StepRows:
    """The rollouts of a step, of which the last few are kept.

    Raises KeelError if it has none, or the file is damaged.
    """
    try:
        facts = run.folder.rollouts(run.stages.index(stage), step).stat()
        version = facts.st_size, facts.st_mtime_ns
    except OSError:
        version = -1, -1  # reading it says what is wrong
    return _read(run, stage, step, version)


@lru_cache(maxsize=STEPS)
def _read(run: Run, stage: str, step: int, version: tuple[int, int]) -> StepRows:
    return StepRows(run.rollout_table(step, stage))


PREVIEW = 160
"""Characters of a text in a table."""
Row = Mapping[str, Any]


def summary(row: Row) -> dict[str, Any]:
    """A completion in a line of a table: only texts and numbers, None if there is none."""
    components = {name: figure(value) for name, value in row.items() if name.startswith(COMPONENT)}
    own = [a for a, w in zip(row.get("advantages") or [], row["written"], strict=False) if w]
    mean = sum(own) / len(own) if own else None
    written = row["written"]
    starts = sum(w and not before for before, w in zip([False, *written], written, strict=False))
    out: dict[str, Any] = {"reward": figure(row["reward"])}
    out |= components if len(components) > 1 else {}
    out |= {"advantage": figure(mean), "length": sum(written), "finish": row["finish"]}
    if row.get(EXTRA + "extracted") is not None:
        out["extracted"] = visible(str(row[EXTRA + "extracted"]), 60)
    return {**out, "turns": starts, "completion": visible(row["completion"], PREVIEW)}


def legend(tokens: Tokens, measure: Measure) -> str:
    """What the colours mean."""
    full = tokens.scale(measure)
    if measure.key == "ratios":
        return f"blue above 1, vermilion below; full colour at a factor of {math.exp(full):.3g}"
    if measure.signed:
        return f"blue above 0, vermilion below; full colour at ±{full:.3g} {measure.unit}"
    sign = "−" if measure.key == "log_probs" else ""
    return f"no colour at 0, full colour at {sign}{full:.3g} {measure.unit}"


def prompt_text(content: Any) -> str:
    """A prompt as text; of a conversation each message with its role."""
    if isinstance(content, str):
        return content
    return "\n".join(f"{turn['role']}: {shown_text(turn)}" for turn in content)


def figure(value: float | None) -> float | None:
    """A number of four figures, whole from 10,000 on, which a table sorts as a number."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}") if abs(value) < 10_000 else float(round(value))


def number(value: float | None) -> str:
    """A number as text; a dash if there is none."""
    return "–" if value is None else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one reward says of a completion: its score, and what it recorded with it."""

    name: str
    score: float | None
    words: tuple[tuple[str, str], ...]


def verdicts(row: Row) -> list[Verdict]:
    """Each component of the reward with its words, as a judge's `judge_reason`; then the rest.

    An extra belongs to the component with the longest name that it begins with. Empty texts are
    left out.
    """
    extras = {
        name.removeprefix(EXTRA): str(value)
        for name, value in row.items()
        if name.startswith(EXTRA) and value not in (None, "")
    }
    scores = {
        column.removeprefix(COMPONENT): value
        for column, value in row.items()
        if column.startswith(COMPONENT)
    }
    words: dict[str, list[tuple[str, str]]] = {name: [] for name in scores}
    for key in [*extras]:
        owners = [name for name in scores if key.startswith((f"{name}_", f"{name}/"))]
        if owners:
            owner = max(owners, key=len)
            words[owner].append((key[len(owner) + 1 :], extras.pop(key)))
    found = [Verdict(name, score, tuple(words[name])) for name, score in scores.items()]
    return found + [Verdict(name, None, (("", text),)) for name, text in extras.items()]
