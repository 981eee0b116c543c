"""What a synthesis has yet to do: completions, pairs, and labels of pairs. Torch-free."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keel.preferences.records import CompletionRecord, PairRecord, PromptRecord, content_id
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis.forecast import Role
from keel.preferences.synthesis.options import CompletionModel, ModelFolder, SynthesisOptions

Note = Callable[[str], None]
"""Takes a line about how far it is."""
NOTE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Work:
    """A completion that a model has yet to write, by the number of its sample; or a pair (by id)
    that the judge has yet to compare in both orders."""

    model: CompletionModel
    prompt: PromptRecord
    sample: int = 0
    pair: str | None = None

    @property
    def role(self) -> Role:
        """What the model is asked for."""
        return "completions" if self.pair is None else "labels"

    @property
    def size(self) -> int:
        """How many completions or labels it is."""
        return 1 if self.pair is None else 2


def missing_completions(
    store: PreferenceStore, options: SynthesisOptions, prompts: Sequence[PromptRecord]
) -> list[Work]:
    """The samples that are not in the store with these settings, by model and prompt."""
    sampling = {model.model: options.sampling_of(model) for model in options.models}
    there = [
        {
            (one.model, one.columns.get("sample"))
            for one in store.completions(prompt.id)
            if one.sampling == sampling.get(one.model)
        }
        for prompt in prompts
    ]
    return [
        Work(model, prompt, sample)
        for model in options.models
        for prompt, found in zip(prompts, there, strict=True)
        for sample in range(options.samples)
        if (model.model, sample) not in found
    ]


def missing_pairs(
    store: PreferenceStore, options: SynthesisOptions, prompts: Sequence[PromptRecord]
) -> list[PairRecord]:
    """The pairs of prompts that are to be added."""
    known: dict[str, list[PairRecord]] = {}
    for pair in store.pairs():
        known.setdefault(pair.prompt, []).append(pair)
    return [
        pair
        for prompt in prompts
        for pair in new_pairs(
            list(store.completions(prompt.id)),
            known.get(prompt.id, []),
            options.pairs,
            round=options.round,
            seed=options.seed,
        )
    ]


def different_texts(completions: Sequence[CompletionRecord]) -> list[CompletionRecord]:
    """The first completion of every text that is not blank."""
    first: dict[str, CompletionRecord] = {}
    for completion in completions:
        if completion.text.strip():
            first.setdefault(completion.text, completion)
    return list(first.values())


def new_pairs(
    completions: Sequence[CompletionRecord],
    pairs: Sequence[PairRecord],
    most: int,
    *,
    round: int = 0,
    seed: int = 0,
) -> list[PairRecord]:
    """Pairs to add to those of a prompt, so that it has at most `most`.

    Two completions of one text are never a pair, nor two texts that are one already. The next pair
    is the one whose busier completion is in the fewest pairs, then whose other one is, then by a
    hash of the two and the seed. So all completions are compared about equally often, and a larger
    `most` keeps the pairs of a smaller one.
    """
    text = {completion.id: completion.text for completion in completions}
    known = {frozenset((text[pair.first], text[pair.second])) for pair in pairs}
    used = Counter(text[side] for pair in pairs for side in (pair.first, pair.second))
    candidates = {
        content_id(seed, a.text, b.text): (a, b)
        for a, b in itertools.combinations(
            sorted(different_texts(completions), key=lambda one: one.text), 2
        )
        if frozenset((a.text, b.text)) not in known
    }
    found: list[PairRecord] = []
    while candidates and len(pairs) + len(found) < most:
        name = min(
            candidates,
            key=lambda key: (*sorted((used[c.text] for c in candidates[key]), reverse=True), key),
        )
        one, other = candidates.pop(name)
        used.update((one.text, other.text))
        # As in imports, which one is first depends on the two alone.
        first, second = sorted((one.id, other.id))
        found.append(PairRecord(one.prompt, first, second, round=round))
    return found


def missing_labels(
    store: PreferenceStore, options: SynthesisOptions, prompts: Sequence[PromptRecord]
) -> list[Work]:
    """The pairs in the store that the judge has not labelled by this rubric."""
    if (judge := options.judge) is None:
        return []
    by_id = {prompt.id: prompt for prompt in prompts}
    found = store.unlabelled("judge", annotator=judge.model, rubric=options.rubric)
    return [Work(judge, by_id[pair.prompt], pair=pair.id) for pair in found if pair.prompt in by_id]


def sample_record(
    options: SynthesisOptions,
    work: Work,
    text: str,
    *,
    tokens: int,
    seconds: float | None,
    cost: float | None = None,
    **columns: Any,
) -> CompletionRecord:
    """The record of a completion; equal texts of two samples are two records."""
    prompt, model, sample = work.prompt.id, work.model.model, work.sample
    sampling = options.sampling_of(work.model)
    return CompletionRecord(
        prompt,
        text,
        model,
        sampling,
        options.round,
        tokens,
        seconds,
        cost,
        kind="gpu" if isinstance(work.model, ModelFolder) else "api",
        columns={"sample": sample, **{k: v for k, v in columns.items() if v is not None}},
        id=content_id("sample", prompt, model, sampling, sample, text),
    )


class ProgressNotes:
    """Notes how much of a model's work is done, at most once in `every` seconds."""

    def __init__(self, note: Note, work: Sequence[Work], every: float = NOTE_SECONDS) -> None:
        self.note, self.every = note, every
        self.what = f"{work[0].role} of {work[0].model.model}"
        self.done, self.total = 0, sum(one.size for one in work)
        self._last = time.monotonic()
        note(f"{self.what}: {self.total}")

    def add(self, count: int) -> None:
        """Count more that are done."""
        self.done += count
        now = time.monotonic()
        if self.done < self.total and now - self._last >= self.every:
            self._last = now
            self.note(f"{self.what}: {self.done} of {self.total} done")
