"""What a synthesis has yet to do, and the models that do it.

Each answer is written to the store as it arrives. A pair is judged in both orders.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from keel.config.model import Model
from keel.data.columns import shown_gold
from keel.graders.formats import answer_part
from keel.preferences.records import (
    CompletionRecord,
    JudgedPair,
    LabelRecord,
    PairRecord,
    PromptRecord,
    Side,
    content_id,
)
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis_options import (
    CompletionModel,
    ModelFolder,
    ModelServer,
    Role,
    SynthesisOptions,
    Unit,
    Usage,
    build_asker,
)
from keel.rewards.judge_questions import SWAPPED, WORTH, Cost, Judgement, Question, pair_question
from keel.rewards.judge_requests import Asker
from keel.runs.values import clean_text
from keel.types import Content, Group, KeelError, Message, Prompt

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
    """Notes how much of a model's work is done, at most once in `NOTE_SECONDS`."""

    def __init__(self, note: Note, work: Sequence[Work]) -> None:
        self.note = note
        self.what = f"{work[0].role} of {work[0].model.model}"
        self.done, self.total = 0, sum(one.size for one in work)
        self._last = time.monotonic()
        note(f"{self.what}: {self.total}")

    def add(self, count: int) -> None:
        """Count more that are done."""
        self.done += count
        now = time.monotonic()
        if self.done < self.total and now - self._last >= NOTE_SECONDS:
            self._last = now
            self.note(f"{self.what}: {self.done} of {self.total} done")


# ---------------------------------------------------------------- the models that do it

T = TypeVar("T")
ORDERS: tuple[Side, Side] = ("first", "second")
"""The side that is shown first in each of the two requests of a pair."""
Costs = Mapping[str, Cost]
"""What requests cost, by their keys."""


def ask_server(
    store: PreferenceStore,
    options: SynthesisOptions,
    server: ModelServer,
    work: Sequence[Work],
    usage: Usage,
    notes: ProgressNotes,
) -> None:
    """Have a server do work of one role. Raises KeelError if it gives no answers, and
    SpendLimitReached."""
    ask = _complete if work[0].pair is None else _judge
    with closing(build_asker(store.path, options, server, work[0].role)) as asker:

        async def one(item: Work) -> None:
            records, costs = await ask(store, options, item, asker)
            store.add(records)
            for key, cost in costs.items():
                usage.add(item.role, server.model, item.prompt.id, _amounts(key, cost, asker))
            notes.add(item.size)

        # A pair is as many requests as labels.
        in_parallel(work, one, math.ceil(asker.options.concurrency / work[0].size))


def _amounts(key: str, cost: Cost, asker: Asker) -> dict[Unit, float]:
    """What a request took, for the forecast; no time, if another process sent it."""
    found: dict[Unit, float] = {
        "dollars": cost.dollars,
        "input_tokens": cost.tokens_in,
        "output_tokens": cost.tokens_out,
    }
    if (seconds := asker.seconds.get(key)) is not None:
        found["hours"] = seconds / 3600 / asker.options.concurrency
    return found


async def _complete(
    store: PreferenceStore, options: SynthesisOptions, work: Work, asker: Asker
) -> tuple[list[CompletionRecord], Costs]:
    """A completion with what it took."""
    key, answer = await asker.answer(chat(work.prompt.content), work.sample)
    record = sample_record(
        options,
        work,
        answer.text,
        tokens=answer.cost.tokens_out,
        seconds=asker.seconds.get(key),
        cost=_dollars(work, [answer.cost]),
        finish=answer.finish or None,
        refusal=answer.refusal or None,
    )
    return [record], {key: answer.cost}


async def _judge(
    store: PreferenceStore, options: SynthesisOptions, work: Work, asker: Asker
) -> tuple[list[LabelRecord], Costs]:
    """The labels of a pair with what they took."""
    assert work.pair is not None
    pair = store.judged_pair(work.pair)
    judgements = await asker.judge(questions(pair, options.rubric, options.reference))
    costs = {key: cost for judgement in judgements for key, cost in judgement.costs.items()}
    return list(_labels(work, judgements, asker, options)), costs


def questions(pair: JudgedPair, rubric: str, reference: str | None) -> list[Question]:
    """The two questions about a pair: its first completion shown first, then its second."""
    known = None if reference is None else pair.prompt.columns.get(reference)
    texts = [answer_part(one.text) or "" for one in (pair.first, pair.second)]
    return [
        pair_question(pair.prompt.content, *shown, rubric=rubric, reference=shown_gold(known))
        for shown in (texts, texts[::-1])
    ]


def _labels(
    work: Work, judgements: Sequence[Judgement], asker: Asker, options: SynthesisOptions
) -> Iterator[LabelRecord]:
    """A label for each order; their mean is the judge's label of the pair.

    Opposite verdicts so have the mean ½. If an order has no verdict both labels are skips: one
    order alone would favour a place. `note` has the judge's reason, or what is wrong.
    """
    assert work.pair is not None
    complete = all(judgement.value is not None for judgement in judgements)
    for shown, judgement in zip(ORDERS, judgements, strict=True):
        choice, value, note = judgement.value, None, judgement.reason
        if choice is None:
            note = f"no verdict: {judgement.wrong}"
        elif not complete:
            note = f"{choice}, but the other order has no verdict: {note}"
        else:
            value = WORTH[str(choice) if shown == "first" else SWAPPED[str(choice)]]
        seconds = [asker.seconds.get(key) for key in judgement.costs]
        yield LabelRecord(
            work.pair,
            value,
            "judge",
            work.model.model,
            options.rubric,
            round=options.round,
            shown_first=shown,
            seconds=None if None in seconds else sum(s for s in seconds if s is not None),
            cost=_dollars(work, judgement.costs.values()),
            note=clean_text(note),
            at=time.time(),
        )


def _dollars(work: Work, costs: Iterable[Cost]) -> float | None:
    """What requests cost; None if the server's price is unknown."""
    assert isinstance(work.model, ModelServer)
    return None if work.model.price is None else math.fsum(cost.dollars for cost in costs)


def chat(prompt: Content) -> Question:
    """A prompt as a request for plain text; a text is the user's turn."""
    turns = [Message(role="user", content=prompt)] if isinstance(prompt, str) else prompt
    return Question(tuple(map(_sent, turns)))


def _sent(turn: Message) -> Mapping[str, Any]:
    """A message as servers take it: the arguments of its calls are JSON texts."""
    sent = {k: v for k, v in turn.items() if k in ("role", "content", "name", "tool_call_id")}
    calls = []
    for call in turn.get("tool_calls") or ():
        function = call.get("function") or call
        given = function.get("arguments", {})
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        named = {"name": function.get("name"), "arguments": text}
        calls.append({"id": call.get("id", ""), "type": "function", "function": named})
    return {**sent, "tool_calls": calls} if calls else sent


def in_parallel(items: Iterable[T], work: Callable[[T], Awaitable[None]], workers: int) -> None:
    """Work on every item, `workers` at a time; within an event loop, as a notebook's, too.

    After a KeelError no other item is begun; those that were are finished, then it is raised.
    """
    errors: list[KeelError] = []

    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            if errors:
                return
            try:
                await work(item)
            except KeelError as error:
                errors.append(error)

    async def every() -> None:
        await asyncio.gather(*(worker() for _ in range(workers)))

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(every())
    else:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, every()).result()
    if errors:
        raise errors[0]


Ready = tuple[Prompt, list[Work]]
"""An encoded prompt, and its samples that are missing."""


def check_folder(model: ModelFolder) -> None:
    """Raise KeelError if there is no such model."""
    from keel.models.loading import read_config

    read_config(_spec(model))


def _spec(model: ModelFolder) -> Model:
    return Model.model_validate({"name": model.model, "device": model.device})


class FolderSampler:
    """A model folder, loaded, and the native engine that samples from it.

    Raises KeelError for a model that does not load.
    """

    def __init__(self, options: SynthesisOptions, model: ModelFolder) -> None:
        from keel.engines.native import NativeEngine
        from keel.models.chat import Encoder
        from keel.models.policy import load_policy
        from keel.training.setup import longest_prompt

        self.options, self.model = options, model
        policy = load_policy(_spec(model), options.seed)
        self.engine = NativeEngine(
            policy.model,
            policy.tokenizer,
            max_num_seqs=model.max_num_seqs,
            autocast=policy.autocast,
        )
        longest = longest_prompt(None, policy.context, options.sampling.max_tokens, "max_tokens")
        self.encode = Encoder(policy.tokenizer, longest, served=policy.served)

    def sample(
        self, store: PreferenceStore, work: Sequence[Work], usage: Usage, notes: ProgressNotes
    ) -> int:
        """Sample what is missing, into the store; how many prompts are too long for the model.

        A completion depends on model, prompt, number and seed alone, so that one that a kill lost
        is sampled again. Raises KeelError if memory runs out.
        """
        from keel.learn.memory import oom_context

        options = self.options
        of_prompts = [list(some) for _, some in groupby(work, key=lambda one: one.prompt.id)]
        ready: list[Ready] = []
        for some in of_prompts:
            record = some[0].prompt
            prompt = self.encode(Prompt(record.id, record.content, tools=record.tools))
            if prompt is not None:
                ready.append((prompt, some))
        size = max(1, self.model.max_num_seqs // options.samples)
        for start in range(0, len(ready), size):
            part = ready[start : start + size]
            begin = time.monotonic()

            def write(place: int, group: Group, part: Sequence[Ready] = part) -> None:
                """The missing completions of a prompt, in one transaction.

                Half of a character, which UTF-8 cannot encode, becomes a question mark.
                """
                nonlocal begin
                now, done = time.monotonic(), part[place][1]
                seconds, begin = now - begin, now
                store.add(
                    sample_record(
                        options,
                        one,
                        completion.text.encode("utf-8", "replace").decode("utf-8"),
                        tokens=len(completion),
                        seconds=seconds / len(done),
                        finish=completion.finish,
                    )
                    for one in done
                    for completion in (group.completions[one.sample],)
                )
                amounts: dict[Unit, float] = {"machine_hours": seconds / 3600}
                usage.add("completions", self.model.model, done[0].prompt.id, amounts)
                notes.add(len(done))

            with oom_context(
                f"{len(part)} prompts were answered", "lower max_num_seqs or max_tokens"
            ):
                prompts = [prompt for prompt, _ in part]
                self.engine.sample(
                    prompts, options.samples, options.sampling, options.seed, on_group=write
                )
        return len(of_prompts) - len(ready)
