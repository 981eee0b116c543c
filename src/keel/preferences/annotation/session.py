"""One annotator's work on a store: the pair at hand, its label, undo. No page, no browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from keel.preferences.annotation.gold import gold_labels, gold_order
from keel.preferences.annotation.settings import (
    AnnotationSettings,
    annotator_name,
    choose,
)
from keel.preferences.store.records import JudgedPair, LabelRecord, Lease, Side
from keel.preferences.store.store import PreferenceStore
from keel.types import Content, KeelError

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
