"""One call of `sample` over static buffers: what enters, the pages, and what was sampled.

The host is one read behind the device: it reads the tokens of some steps while the next ones run.
So a row that ended takes part in a few steps more, whose tokens are dropped.

Answers to one prompt share its full pages; its last, partly filled page is copied for each. A
sequence enters if there are pages for it. If they run out, those kept for a later call go first,
then the youngest sequences go back to the queue: what they made is kept, and computed again when
they enter again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from keel.engines.sampler import GOING, LENGTH
from keel.engines.scheduler import PrefixCache, Request
from keel.engines.static import Record, StaticDecoder
from keel.models.paged import PAGE_TOKENS
from keel.types import KeelError

Ints = npt.NDArray[np.int64]


@dataclass(eq=False)
class Row:
    """A sequence that is being decoded.

    `made` are the tokens sampled by all steps that were asked for; fewer, if it ended in between.
    """

    sequence: int
    length: int
    """Tokens of the prompt."""
    limit: int
    pages: list[int]
    made: int
    ended: bool = False

    @property
    def position(self) -> int:
        """Of the token that is fed next."""
        return self.length + self.made - 1


@dataclass(eq=False)
class SharedPrompt:
    """A prompt whose keys and values are computed, with answers that have not entered yet."""

    pages: list[int]
    logits: Tensor
    """After its last token, (1, V)."""
    waiting: int


@dataclass(eq=False)
class Entry:
    """Tokens that go through the model before a sequence or a prompt can be sampled from."""

    tokens: Ints
    known: int
    pages: list[int]
    row: Row | None = None
    """The sequence; None for a prompt."""
    prompt: int = -1


@dataclass(eq=False)
class AskedSteps:
    """Steps that were asked for: their rows, and how many tokens each had before."""

    record: Record
    rows: list[Row]
    before: Ints


@dataclass(eq=False)
class _Admission:
    """What enters at once."""

    entries: list[Entry] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pages to copy before the entries are computed."""


class PagedRun:
    """One call of `sample`: `step` while it is `live`."""

    def __init__(self, decoder: StaticDecoder, request: Request, cache: PrefixCache) -> None:
        self.decoder, self.answers = decoder, request.answers
        self._request, self._cache = request, cache
        self._prompts, self._n = request.prompts, request.n
        self._pages = cache.pool(lambda: decoder.allocator)
        if self._pages is not decoder.allocator:  # a call that failed has freed all pages
            cache.clear()
            self._pages = cache.pool(lambda: decoder.allocator)
        known, taken = cache.take(request.prompts)
        places = iter(taken)
        self._recalled = {p: (int(k), next(places)) for p, k in enumerate(known) if k}
        self._queue: deque[int] = deque(range(request.n * len(request.prompts)))
        self._shared: dict[int, SharedPrompt] = {}
        self._left = np.full(len(request.prompts), request.n, dtype=np.int64)
        self._rows: list[Row] = []
        self._steps: deque[AskedSteps] = deque()
        self._over: list[int] = []

    @property
    def live(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._queue or self._rows or self._steps)

    def step(self) -> Ints:
        """Let sequences enter and ask for some steps; read the ones before.

        Returns the prompts whose last answer is now done, in order.
        """
        self._close_rows()
        self._admit()
        asked = self._decode()
        self._read(1 if asked else 0)
        over, self._over = np.array(sorted(self._over), dtype=np.int64), []
        return over

    def suspend(self) -> None:
        """End what is left where it is; a later call may go on with the sequences."""
        self._read(0)
        for row in self._rows:
            if not row.ended:
                self._finish(row, LENGTH, kept=True)
        for _, pages in self._recalled.values():
            self._pages.give(pages)
        for sequence in self._queue:
            self.answers.codes[sequence] = LENGTH
        self._rows, self._recalled = [], {}
        self._queue.clear()

    # ------------------------------------------------------------ entering

    def _admit(self) -> None:
        """Compute prompts that enter, and sample the first token of each sequence that does."""
        while self._queue and len(self._rows) < self._request.rows:
            found = self._next_entries()
            if not found.rows and not found.entries:
                if self._rows or self._steps:
                    return
                raise KeelError(
                    "the engine has no pages for a single sequence: lower rollout.max_tokens"
                )
            logits = self._compute(found)
            self._sample_first(found.rows, logits)

    def _next_entries(self) -> _Admission:
        """As many sequences of the queue as rows, pages and tokens of a pass allow."""
        found, budget = _Admission(), self._request.prefill_tokens
        computed: set[int] = set()
        while self._queue and len(self._rows) + len(found.rows) < self._request.rows:
            prompt, own = self._queue[0] // self._n, self.answers.tokens[self._queue[0]]
            ready = prompt in self._shared
            if own and prompt in computed:
                break  # its prompt has to be computed first
            row = Row(
                self._queue[0],
                len(self._prompts[prompt]),
                int(self._request.limits_P[prompt]),
                [],
                len(own),
            )
            entry = None
            if own:
                entry = self._again(row, row.length if ready else 0)
            elif not ready and prompt not in computed:
                known, pages = self._recalled.get(prompt, (0, []))
                entry = Entry(self._prompts[prompt][known:], known, list(pages), prompt=prompt)
            if entry is not None and len(entry.tokens) > budget and found.entries:
                break
            full = row.length // PAGE_TOKENS if ready or not own else 0
            need = total_pages(row.length + row.made) - full
            if entry is not None and entry.row is None:
                need += total_pages(row.length) - len(entry.pages)
            # One page more for each other row, so that not all have to be put back at once.
            if not self._room(need + len(self._rows) + len(found.rows), prompt):
                break
            self._queue.popleft()
            found.rows.append(row)
            if entry is None:
                continue
            budget -= len(entry.tokens)
            found.entries.append(entry)
            if entry.row is None:
                self._recalled.pop(prompt, None)
                entry.pages += self._pages.take(total_pages(row.length) - len(entry.pages))
                computed.add(prompt)
                continue
            if ready:
                self._share(row, self._shared[prompt], found.copies)
            row.pages += self._pages.take(total_pages(row.length + row.made) - len(row.pages))
            entry.pages = row.pages
        return found

    def _again(self, row: Row, known: int) -> Entry:
        """What has to be computed of a sequence that was put back."""
        prompt = row.sequence // self._n
        own = np.array(self.answers.tokens[row.sequence], dtype=np.int64)
        whole = np.concatenate([self._prompts[prompt], own])
        return Entry(whole[known:], known, [], row, prompt)

    def _share(self, row: Row, prompt: SharedPrompt, copies: list[tuple[int, int]]) -> None:
        """Give a row the full pages of its prompt, and a copy of the last one."""
        full = row.length // PAGE_TOKENS
        row.pages = prompt.pages[:full]
        self._pages.keep(row.pages)
        if row.length % PAGE_TOKENS:
            row.pages += self._pages.take(1)
            copies.append((prompt.pages[full], row.pages[full]))

    def _compute(self, found: _Admission) -> dict[int, Tensor]:
        """Feed the entries; the logits (1, V) by sequence of those that were put back."""
        decoder, own = self.decoder, {}
        decoder.copy_pages(
            *map(list, zip(*found.copies, strict=True)) if found.copies else ([], [])
        )
        entries = found.entries
        for entry in entries:
            while len(entry.tokens) > self._request.prefill_tokens:
                part, entry.tokens = np.split(entry.tokens, [self._request.prefill_tokens])
                self._feed([Entry(part, entry.known, entry.pages)])
                entry.known += len(part)
        # Beginnings first, which attend to themselves alone.
        order = sorted(entries, key=lambda entry: entry.known > 0)
        if order:
            logits = self._feed(order)
            for number, entry in enumerate(order):
                last = logits[number : number + 1]
                if entry.row is None:
                    self._shared[entry.prompt] = SharedPrompt(entry.pages, last, self._n)
                else:
                    own[entry.row.sequence] = last
        return own

    def _feed(self, entries: Sequence[Entry]) -> Tensor:
        width = max(len(entry.pages) for entry in entries)
        pages = np.zeros((len(entries), width), dtype=np.int32)
        for number, entry in enumerate(entries):
            pages[number, : len(entry.pages)] = entry.pages
        return self.decoder.enter(
            np.concatenate([entry.tokens for entry in entries]),
            np.array([entry.known for entry in entries], dtype=np.int64),
            np.array([len(entry.tokens) for entry in entries], dtype=np.int64),
            pages,
        )

    def _sample_first(self, rows: list[Row], own: dict[int, Tensor]) -> None:
        """Sample the next token of sequences that enter, which are then the last rows."""
        copies: list[tuple[int, int]] = []
        parts = []
        for row in rows:
            if row.sequence in own:
                parts.append(own[row.sequence])
                continue
            prompt = row.sequence // self._n
            shared = self._shared[prompt]
            parts.append(shared.logits)
            self._share(row, shared, copies)
            shared.waiting -= 1
        self.decoder.copy_pages(*map(list, zip(*copies, strict=True)) if copies else ([], []))
        for prompt in {row.sequence // self._n for row in rows}:
            if prompt in self._shared and not self._shared[prompt].waiting:
                self._pages.give(self._shared.pop(prompt).pages)
        made = np.array([row.made for row in rows], dtype=np.int64)
        limits = np.array([row.limit for row in rows], dtype=np.int64)
        sequences = np.array([row.sequence for row in rows], dtype=np.int64)
        numbers = self._request.uniforms.take(sequences, made)[0]
        record = self.decoder.first(
            torch.cat(parts), numbers, len(self._rows), (made + 1 < limits).astype(np.int64)
        )
        self._rows += rows
        for row in rows:
            row.made += 1
        self._steps.append(AskedSteps(record, rows, made))

    # ------------------------------------------------------------ decoding

    def _close_rows(self) -> None:
        """Remove rows that ended, and those whose budget the steps asked for use up."""
        going = [not row.ended and row.made < row.limit for row in self._rows]
        if all(going):
            return
        self.decoder.close_rows(np.flatnonzero(going))
        self._rows = [row for row, stays in zip(self._rows, going, strict=True) if stays]

    def _decode(self) -> bool:
        """Ask for as many steps as the longest budget needs; whether there was a row."""
        self._close_rows()
        if not self._rows:
            return False
        steps = min(self.decoder.steps, max(row.limit - row.made for row in self._rows))
        while not self._reserve(steps):
            if self._steps:
                self._read(0)
                self._close_rows()
            else:
                self._put_back()
            if not self._rows:
                return False
        rows = list(self._rows)
        made = np.array([row.made for row in rows], dtype=np.int64)
        pages = np.zeros((len(rows), max(len(row.pages) for row in rows)), dtype=np.int32)
        for number, row in enumerate(rows):
            pages[number, : len(row.pages)] = row.pages
        record = self.decoder.decode(
            steps,
            position=np.array([row.position for row in rows], dtype=np.int64),
            last=np.array([row.length + row.limit - 2 for row in rows], dtype=np.int64),
            pages=pages,
            uniform=self._request.uniforms.take(
                np.array([row.sequence for row in rows], dtype=np.int64), made, steps
            ),
        )
        for row in rows:
            row.made += min(steps, row.limit - row.made)
        self._steps.append(AskedSteps(record, rows, made))
        return True

    def _reserve(self, steps: int) -> bool:
        """Give each row pages for so many steps, if there are any."""
        need = [
            total_pages(row.position + min(steps, row.limit - row.made)) - len(row.pages)
            for row in self._rows
        ]
        if not self._room(sum(count for count in need if count > 0)):
            return False
        for row, count in zip(self._rows, need, strict=True):
            if count > 0:
                row.pages += self._pages.take(count)
        return True

    def _room(self, pages: int, entering: int = -1) -> bool:
        """Whether so many pages are free, after those of other calls are given up if need be."""
        if pages <= self._pages.free:
            return True
        self._cache.drop_held()
        for prompt in sorted(self._recalled.keys() - {entering}, reverse=True):
            if pages <= self._pages.free:
                break
            self._pages.give(self._recalled.pop(prompt)[1])
        return pages <= self._pages.free

    def _put_back(self) -> None:
        """Return the youngest row to the queue. Nothing is asked for, so all it made is known."""
        row = self._rows.pop()
        self._pages.give(row.pages)
        self._queue.appendleft(row.sequence)

    # ------------------------------------------------------------ reading

    def _read(self, most: int) -> None:
        """Read what was asked for, until at most `most` of it is left."""
        while len(self._steps) > most:
            step = self._steps.popleft()
            tokens, log_probs = step.record.read()
            self._take(step, tokens.astype(np.int64), log_probs)

    def _take(self, step: AskedSteps, tokens: Ints, log_probs: npt.NDArray[np.float32]) -> None:
        """Append the tokens (K, R) of rows that had not ended before."""
        going = np.array([not row.ended for row in step.rows])
        columns = np.flatnonzero(going)
        limits = np.array([row.limit for row in step.rows], dtype=np.int64)
        sequences = np.array([row.sequence for row in step.rows], dtype=np.int64)
        counts = np.full(len(step.rows), len(tokens), dtype=np.int64)
        codes = np.full(len(step.rows), GOING, dtype=np.int8)
        for k in range(len(tokens)):
            if not len(columns):
                break
            spent = step.before[columns] + k + 1 >= limits[columns]
            found = self._request.stops.check(sequences[columns], tokens[k, columns], spent)
            done = found != GOING
            codes[columns[done]], counts[columns[done]] = found[done], k + 1
            columns = columns[~done]
        for column in np.flatnonzero(going).tolist():
            row, count = step.rows[column], int(counts[column])
            own = tokens[:count, column].tolist(), log_probs[:count, column].tolist()
            self.answers.extend(row.sequence, *own)
            if codes[column] != GOING:
                self._finish(row, int(codes[column]))

    def _finish(self, row: Row, code: int, kept: bool = False) -> None:
        row.ended = True
        self.answers.codes[row.sequence] = code
        prompt = row.sequence // self._n
        self._left[prompt] -= 1
        if not self._left[prompt]:
            self._over.append(prompt)
        # Nothing continues a sequence whose budget is used up.
        pages = 0
        if (kept or code != LENGTH) and not self._cache.full:
            pages = total_pages(row.length + len(self.answers.tokens[row.sequence]) - 1)
            self._cache.hold(row.sequence, row.pages[:pages])
        self._pages.give(row.pages[pages:])


def total_pages(tokens: int) -> int:
    """The pages of so many tokens."""
    return -(-tokens // PAGE_TOKENS)
