"""What people do who label a store: settings, gold pairs, sessions and their progress.

A gold pair has a known label, which shows how well a person judges: one of source "rule" by the
annotator "gold".
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from keel.analysis.statistics import Interval, share_interval
from keel.preferences.agreement import label_agreement, verdict
from keel.preferences.files import Attribution, import_file
from keel.preferences.records import JudgedPair, LabelRecord, Lease, Side, Source
from keel.preferences.statistics import labels_by
from keel.preferences.store import PreferenceStore, where
from keel.types import Content, KeelError

LONGEST_NAME = 60
"""Characters of an annotator's name."""
LONGEST_RUBRIC = 100_000
"""Bytes of a rubric."""


@dataclass(frozen=True, slots=True)
class Rubric:
    """The instructions of the annotators; `id` is stored with each label."""

    text: str
    id: str


@dataclass(frozen=True, slots=True)
class AnnotationSettings:
    """How pairs are given to people.

    Each pair goes to `overlap` people, those of one `round` only unless it is None. `seed` decides
    which answer is shown first, and when a pair with a known label comes, at the share `gold_rate`.
    `wage` is in dollars an hour.
    """

    overlap: int = 1
    round: int | None = None
    seed: int = 0
    gold_rate: float = 0.1
    wage: float | None = None
    rubric: Rubric | None = None


def read_text(path: Path, option: str) -> tuple[str, bytes]:
    """Text and bytes of a file that an option names. Raises KeelError if it has no text."""
    try:
        data = path.read_bytes()  # once: it may be a pipe
        text = data.decode("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise KeelError(f"{option} {path}: cannot be read: {why}: name a text file") from None
    if not text:
        raise KeelError(f"{option} {path}: it is empty: write what makes an answer better")
    return text, data


def read_rubric(path: Path) -> Rubric:
    """A rubric of Markdown or text; its id is its name and the first of its SHA-256.

    Raises KeelError if it cannot be read, is empty, or is not text.
    """
    text, data = read_text(path, "--rubric")
    if len(data) > LONGEST_RUBRIC:
        raise KeelError(
            f"--rubric {path}: {len(data):,} bytes: shorten it to {LONGEST_RUBRIC:,} at most"
        )
    name = path.name.encode("utf-8", "replace").decode()
    return Rubric(text, f"{name} sha256:{hashlib.sha256(data).hexdigest()[:12]}")


def annotator_name(text: str) -> str:
    """A name that a person gave, blanks taken together. Raises KeelError if it is not valid."""
    name = " ".join(text.split())
    if not name:
        raise KeelError("the name is empty: enter yours")
    if not name.isprintable():
        raise KeelError("the name has characters that do not print: use letters and digits")
    if len(name) > LONGEST_NAME:
        raise KeelError(f"the name has {len(name)} characters: use {LONGEST_NAME} at most")
    return name


def choose(share: float, *parts: object) -> bool:
    """True for a `share` of all values of the parts, and always the same for the same values.

    h / 2⁶⁴ < share,   h = the first 8 bytes of BLAKE2b of the parts
    """
    return int.from_bytes(digest(*parts)[:8], "big") < share * 2**64


def digest(*parts: object) -> bytes:
    """16 bytes that depend on each part alone."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()


GOLD_SOURCE: Source = "rule"
GOLD_ANNOTATOR = "gold"


def add_gold(store: PreferenceStore, path: Path, round: int) -> int:
    """Add rows of prompt/chosen/rejected (JSONL or Parquet) as gold pairs; how many there are.

    Raises KeelError, with nothing added, if the file or a row of it cannot be read.
    """
    if not path.is_file():
        raise KeelError(f"--gold {path}: there is no such file: fix the path")
    return import_file(
        store, "trl", path, Attribution(GOLD_SOURCE, GOLD_ANNOTATOR, round), "stop"
    ).rows


def gold_labels(store: PreferenceStore) -> dict[str, float]:
    """The known label of each gold pair (by id); of several the last."""
    sql = "SELECT pair, value FROM labels WHERE source = ? AND annotator = ? AND value IS NOT NULL"
    return dict(store.database.rows(f"{sql} ORDER BY seq", (GOLD_SOURCE, GOLD_ANNOTATOR)))


def gold_order(gold: Mapping[str, float], seed: int, annotator: str) -> list[str]:
    """The gold pairs in the order in which a person gets them."""
    return sorted(gold, key=lambda pair: digest("gold", seed, annotator, pair))


Choice = Literal["left", "right", "tie", "skip"]
"""What a person says of a pair, as it is shown."""
LONGEST_NOTE = 2_000
"""Characters of a note."""


@dataclass(frozen=True, slots=True)
class ShownPair:
    """A leased pair as a person sees it: texts alone, and no word of who wrote them."""

    lease: Lease
    prompt: Content
    left: str
    right: str
    shown_first: Side
    note: str


class AnnotationSession:
    """What one person does, in one window or several; safe to use from threads.

    The time of a label is that for which its pair is open in a window, in seconds of `clock`; that
    of a label which was taken back counts too. `now` is the time of leases.
    """

    def __init__(
        self,
        store: PreferenceStore,
        settings: AnnotationSettings,
        gold: Mapping[str, float],
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.store, self.settings, self.name = store, settings, annotator_name(name)
        self._gold = gold_order(gold, settings.seed, self.name)
        self._clock, self._now = clock, now
        self._lock = threading.RLock()
        # Apart, so that a window that comes or goes never waits for the disk.
        self._times = threading.RLock()
        self._windows: set[str] = set()
        self._open: int | None = None
        self._since = 0.0
        self._spent: dict[int, float] = {}
        self._notes: dict[int, str] = {}

    # ------------------------------------------------------------ windows

    def connect(self, window: str) -> None:
        """Time goes on while a window is connected."""
        with self._times:
            if not self._windows:
                self._since = self._clock()
            self._windows.add(window)

    def disconnect(self, window: str) -> None:
        """A window was closed, or cannot be reached."""
        with self._times:
            if window in self._windows:
                self._count()
            self._windows.discard(window)

    def _count(self) -> None:
        """Add the time since the last count to the open pair."""
        with self._times:
            now = self._clock()
            if self._windows and self._open is not None:
                self._spent[self._open] = self._spent.get(self._open, 0.0) + now - self._since
            self._since = now

    # ------------------------------------------------------------ pairs

    def current(self) -> ShownPair | None:
        """The pair that the person has, or the next one; None if there is none for them."""
        settings = self.settings
        with self._lock:
            lease = self.store.lease_next(
                self.name,
                self._now(),
                overlap=settings.overlap,
                round=settings.round,
                gold=self._gold,
                gold_next=self._gold_next(),
            )
            if lease is None or lease.id != self._open:
                self._count()
                self._open = None if lease is None else lease.id
            return None if lease is None else self._shown(lease)

    def _gold_next(self) -> bool:
        """Whether the person's next pair is gold: by how many labels they have made."""
        if not self._gold:
            return False
        sql = "SELECT COUNT(*) FROM labels WHERE source = 'human' AND annotator = ?"
        made = self.store.database.rows(sql, (self.name,))[0][0]
        return choose(self.settings.gold_rate, "gold", self.settings.seed, self.name, made)

    def _shown(self, lease: Lease) -> ShownPair:
        judged = self.store.judged_pair(lease.pair)
        first = self._shown_first(judged)
        texts = judged.first.text, judged.second.text
        left, right = texts if first == "first" else texts[::-1]
        note = self._notes.get(lease.id, "")
        return ShownPair(lease, judged.prompt.content, left, right, first, note)

    def _shown_first(self, judged: JudgedPair) -> Side:
        """Half of the pairs the other way round, by seed, annotator and pair."""
        swap = choose(0.5, "side", self.settings.seed, self.name, judged.pair.id)
        return "second" if swap else "first"

    def note(self, shown: ShownPair) -> str:
        """The note on a pair as it is now: another window may have changed it."""
        with self._lock:
            return self._notes.get(shown.lease.id, "")

    def set_note(self, shown: ShownPair, note: str) -> None:
        """Keep a note until its pair is labelled. Raises KeelError if it is too long."""
        note = note.strip()
        if len(note) > LONGEST_NOTE:
            raise KeelError(f"the note has {len(note):,} characters: use {LONGEST_NOTE:,} at most")
        with self._lock:
            self._notes[shown.lease.id] = note

    def submit(self, shown: ShownPair, choice: Choice) -> LabelRecord:
        """Store a label; when this returns it is on disk.

        Raises KeelError if the pair was withdrawn or has another label, or the store cannot be
        written.
        """
        if choice not in get_args(Choice):
            raise KeelError(f"choice = {choice!r}: one of {', '.join(get_args(Choice))}")
        lease, settings = shown.lease, self.settings
        sides = {"left": 1.0, "right": 0.0, "tie": 0.5, "skip": None}
        value = sides[choice]
        if shown.shown_first == "second" and value is not None:
            value = 1 - value
        with self._lock:
            self._count()
            seconds = round(self._spent.get(lease.id, 0.0), 3)
            label = LabelRecord(
                lease.pair,
                value,
                "human",
                self.name,
                rubric="" if settings.rubric is None else settings.rubric.id,
                round=self.store.judged_pair(lease.pair).pair.round,
                shown_first=shown.shown_first,
                seconds=seconds,
                cost=None if settings.wage is None else seconds * settings.wage / 3600,
                note=self._notes.get(lease.id, ""),
                at=self._now(),
            )
            self.store.submit(lease, label)
            for kept in (self._spent, self._notes):
                kept.pop(lease.id, None)
            self._open = None
        return label

    def undo(self) -> LabelRecord | None:
        """Take back the person's last label, with its note and time; None if there is none."""
        with self._lock:
            self._count()
            label = self.store.undo(self.name, self._now(), overlap=self.settings.overlap)
            if label is None:
                return None
            self._open = None
            again = self.current()
            if again is not None and again.lease.pair == label.pair:
                self._spent[again.lease.id] = label.seconds or 0.0
                self._notes[again.lease.id] = label.note
            return label


class AnnotationProject:
    """The sessions of the people who label a store at the same time, one for each name."""

    def __init__(self, store: PreferenceStore, settings: AnnotationSettings) -> None:
        self.store, self.settings = store, settings
        self.gold = gold_labels(store)
        self._sessions: dict[str, AnnotationSession] = {}
        self._lock = threading.Lock()

    def session(self, name: str) -> AnnotationSession:
        """The session of a name, in whichever window. Raises KeelError if it is not valid."""
        name = annotator_name(name)
        with self._lock:
            if name not in self._sessions:
                self._sessions[name] = AnnotationSession(self.store, self.settings, self.gold, name)
            return self._sessions[name]


@dataclass(frozen=True, slots=True)
class LabelProgress:
    """Labels made and wanted, and those that one person made, skips included.

    `overlap` labels are wanted of each pair, and of each gold pair one of this person.
    """

    made: int
    wanted: int
    own: int


@dataclass(frozen=True, slots=True)
class AnnotationSummary:
    """Labels made and wanted, gold apart, and how good they are.

    `annotators` is `labels_by` of people, each with `gold`, the share of known labels that they
    found; `gold` is that of all, their labels of one pair taken together as a cluster; `agreement`
    has an entry for each number of labels a pair, as `keel prefs stats`.
    """

    made: int
    wanted: int
    annotators: tuple[Mapping[str, Any], ...]
    gold: Interval
    agreement: tuple[Mapping[str, Any], ...]


def progress(project: AnnotationProject, name: str) -> LabelProgress:
    """Where the work is, for one person. A label of a gold pair counts as any other does."""
    made, wanted = _places(project)
    rows = project.store.database.rows(
        "SELECT COUNT(*), COUNT(value) FILTER (WHERE pair IN (SELECT value FROM json_each(?)))"
        " FROM labels WHERE source = 'human' AND annotator = ?",
        (json.dumps(list(project.gold)), name),
    )
    own, of_gold = rows[0]
    return LabelProgress(made + of_gold, wanted + len(project.gold), own)


def summarise_annotation(project: AnnotationProject) -> AnnotationSummary:
    """Progress, each annotator's figures, and how far they agree."""
    store, gold, round = project.store, project.gold, project.settings.round
    hits = store.database.rows(
        "SELECT annotator, pair, value FROM labels WHERE source = 'human' AND value IS NOT NULL"
        " AND pair IN (SELECT value FROM json_each(?)) ORDER BY seq",
        (json.dumps(list(gold)),),
    )
    right = [(name, pair, verdict(value) == verdict(gold[pair])) for name, pair, value in hits]
    people = [
        {**row, "gold": share_interval([hit for name, _, hit in right if name == row["annotator"]])}
        for row in labels_by(store, "annotator", "human", round)
    ]
    every = share_interval([hit for *_, hit in right], [pair for _, pair, _ in right])
    agreement = label_agreement(store, "human", round).get("human", ())
    made, wanted = _places(project)
    return AnnotationSummary(made, wanted, tuple(people), every, tuple(agreement))


def _places(project: AnnotationProject) -> tuple[int, int]:
    """Labels that were made and are wanted, gold apart; more than `overlap` count no further."""
    store, settings = project.store, project.settings
    clause, values = where(**{"p.round": settings.round})
    clause += " AND p.id NOT IN (SELECT value FROM json_each(?))"
    values.append(json.dumps(list(project.gold)))
    made = store.database.rows(
        "SELECT COALESCE(SUM(MIN(n, ?)), 0) FROM (SELECT COUNT(*) n FROM labels l"
        " JOIN pairs p ON p.id = l.pair WHERE l.source = 'human' AND l.value IS NOT NULL"
        f"{clause} GROUP BY l.pair)",
        (settings.overlap, *values),
    )[0][0]
    pairs = store.database.rows(f"SELECT COUNT(*) FROM pairs p WHERE 1{clause}", values)[0][0]
    return made, pairs * settings.overlap
