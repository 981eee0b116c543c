"""Completions of the store's prompts: from servers, many requests at a time, or the native engine.

Each is written to the store as it arrives. torch is imported only if a model folder samples.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, TypeVar

from keel.preferences.store.records import (
    CompletionRecord,
    CostRecord,
    PromptRecord,
    Record,
    content_id,
)
from keel.preferences.store.store import PreferenceStore
from keel.preferences.synthesis.forecast import ModelUsage, Unit
from keel.preferences.synthesis.options import (
    CompletionModel,
    ModelFolder,
    ModelServer,
    SynthesisOptions,
    build_asker,
)
from keel.rewards.judge.prompts import Question
from keel.rewards.judge.requests import Asker
from keel.rewards.judge.store import Cost
from keel.types import Content, Group, KeelError, Message, Prompt

T = TypeVar("T")
Missing = Sequence[tuple[PromptRecord, tuple[int, ...]]]
"""Prompts, and the numbers of their samples that are not in the store."""
Note = Callable[[str], None]
"""Takes a line about how far it is."""
NOTE_SECONDS = 30.0


def missing_samples(
    store: PreferenceStore,
    options: SynthesisOptions,
    model: CompletionModel,
    prompts: Iterable[PromptRecord],
) -> Missing:
    """The samples that a model has yet to write with these settings."""
    sampling = options.sampling_of(model)
    found = []
    for prompt in prompts:
        there = {
            completion.columns.get("sample")
            for completion in store.completions(prompt.id)
            if completion.model == model.model and completion.sampling == sampling
        }
        if missing := tuple(n for n in range(options.samples) if n not in there):
            found.append((prompt, missing))
    return found


class ProgressNotes:
    """Notes how many of `total` items are done, at most once in `every` seconds."""

    def __init__(self, note: Note, what: str, total: int, every: float = NOTE_SECONDS) -> None:
        self.note, self.what, self.total, self.every = note, what, total, every
        self.done = 0
        self._last = time.monotonic()
        note(f"{what}: {total}")

    def add(self, count: int) -> None:
        """Count more that are done."""
        self.done += count
        now = time.monotonic()
        if self.done < self.total and now - self._last >= self.every:
            self._last = now
            self.note(f"{self.what}: {self.done} of {self.total} done")


def in_parallel(items: Iterable[T], work: Callable[[T], Awaitable[None]], workers: int) -> None:
    """Work on every item, `workers` at a time; within an event loop, as a notebook's, too.

    After a KeelError no other item is begun; those that were are finished, then it is raised.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(_in_parallel(items, work, workers))
        return
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _in_parallel(items, work, workers)).result()


async def _in_parallel(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], workers: int
) -> None:
    waiting = iter(items)
    errors: list[KeelError] = []

    async def worker() -> None:
        for item in waiting:
            try:
                await work(item)
            except KeelError as error:
                errors.append(error)
            if errors:
                return

    await asyncio.gather(*(worker() for _ in range(workers)))
    if errors:
        raise errors[0]


def sample_server(
    store: PreferenceStore,
    options: SynthesisOptions,
    server: ModelServer,
    missing: Missing,
    usage: ModelUsage,
    notes: ProgressNotes,
) -> None:
    """Ask a server for the missing samples. Raises KeelError if it gives no answers, and
    SpendLimitReached."""
    with closing(build_asker(store.path, options, server, judges=False)) as asker:
        work = [(prompt, sample) for prompt, samples in missing for sample in samples]

        async def one(item: tuple[PromptRecord, int]) -> None:
            await _ask(store, options, server, asker, *item, usage)
            notes.add(1)

        in_parallel(work, one, asker.options.concurrency)


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


async def _ask(
    store: PreferenceStore,
    options: SynthesisOptions,
    server: ModelServer,
    asker: Asker,
    prompt: PromptRecord,
    sample: int,
    usage: ModelUsage,
) -> None:
    """One completion with what it took."""
    key, answer = await asker.answer(chat(prompt.content), sample)
    columns = {"finish": answer.finish or None, "refusal": answer.refusal or None}
    record = _record(
        options,
        server,
        prompt,
        sample,
        answer.text,
        tokens=answer.cost.tokens_out,
        seconds=asker.seconds.get(key),
        cost=None if server.price is None else answer.cost.dollars,
        columns={name: value for name, value in columns.items() if value is not None},
    )
    store.add([record])
    usage.add(prompt.id, request_amounts(answer.cost, record.seconds, asker))


def request_amounts(cost: Cost, seconds: float | None, asker: Asker) -> dict[Unit, float]:
    """What a request took, for the forecast; `seconds` is None if another process sent it."""
    found: dict[Unit, float] = {
        "dollars": cost.dollars,
        "input_tokens": cost.tokens_in,
        "output_tokens": cost.tokens_out,
    }
    if seconds is not None:
        found["hours"] = seconds / 3600 / asker.options.concurrency
    return found


def check_folder(model: ModelFolder) -> None:
    """Raise KeelError if there is no such model."""
    from keel.config.model import Model
    from keel.models.loading import read_config

    read_config(Model.model_validate({"name": model.model, "device": model.device}))


class FolderSampler:
    """A model folder, loaded, and the native engine that samples from it.

    Raises KeelError for a model that does not load.
    """

    def __init__(self, options: SynthesisOptions, model: ModelFolder) -> None:
        from keel.config.model import Model
        from keel.engines.native import NativeEngine
        from keel.models.chat import Encoder
        from keel.models.policy import load_policy
        from keel.training.setup import longest_prompt

        self.options, self.model = options, model
        spec = Model.model_validate({"name": model.model, "device": model.device})
        policy = load_policy(spec, options.seed)
        self.engine = NativeEngine(
            policy.model,
            policy.tokenizer,
            max_num_seqs=model.max_num_seqs,
            autocast=policy.autocast,
        )
        longest = longest_prompt(None, policy.context, options.sampling.max_tokens, "max_tokens")
        self.encode = Encoder(policy.tokenizer, longest, served=policy.served)

    def sample(
        self, store: PreferenceStore, missing: Missing, usage: ModelUsage, notes: ProgressNotes
    ) -> int:
        """Sample what is missing, into the store; how many prompts are too long for the model.

        A completion depends on model, prompt, number and seed alone, so that one that a kill lost
        is sampled again. Raises KeelError if memory runs out.
        """
        from keel.learn.token_budget import oom_context

        options = self.options
        encoded = [
            (self.encode(Prompt(p.id, p.content, tools=p.tools)), p, set(wanted))
            for p, wanted in missing
        ]
        ready = [(prompt, record, wanted) for prompt, record, wanted in encoded if prompt]
        size = max(1, self.model.max_num_seqs // options.samples)
        for start in range(0, len(ready), size):
            part = ready[start : start + size]
            begin = [time.monotonic()]

            def write(place: int, group: Group, part: Any = part, begin: Any = begin) -> None:
                now = time.monotonic()
                seconds, begin[0] = now - begin[0], now
                _write_group(store, options, self.model, group, part[place], seconds, usage)
                notes.add(len(part[place][2]))

            with oom_context(
                f"{len(part)} prompts were answered", "lower max_num_seqs or max_tokens"
            ):
                prompts = [prompt for prompt, *_ in part]
                self.engine.sample(
                    prompts, options.samples, options.sampling, options.seed, on_group=write
                )
        return len(encoded) - len(ready)


def _write_group(
    store: PreferenceStore,
    options: SynthesisOptions,
    model: ModelFolder,
    group: Group,
    wanted: tuple[Prompt, PromptRecord, set[int]],
    seconds: float,
    usage: ModelUsage,
) -> None:
    """The completions of a prompt that are missing, in one transaction; `seconds` is of them all.

    A text of half a character, which UTF-8 cannot encode, gets a question mark in its place.
    """
    _, prompt, samples = wanted
    each = seconds / len(samples)
    purpose = f"completions of {model.model}"
    records: list[Record] = []
    for sample in sorted(samples):
        completion = group.completions[sample]
        record = _record(
            options,
            model,
            prompt,
            sample,
            completion.text.encode("utf-8", "replace").decode("utf-8"),
            tokens=len(completion),
            seconds=each,
            columns={"finish": completion.finish},
        )
        id = f"{record.id}/hours"
        records += [record, CostRecord(id, "gpu", each / 3600, "hours", purpose, options.round)]
    store.add(records)
    usage.add(prompt.id, {"machine_hours": seconds / 3600})


def _record(
    options: SynthesisOptions,
    model: CompletionModel,
    prompt: PromptRecord,
    sample: int,
    text: str,
    *,
    tokens: int,
    seconds: float | None,
    columns: Mapping[str, Any],
    cost: float | None = None,
) -> CompletionRecord:
    """The record of a sample; equal texts of two samples are two records."""
    sampling = options.sampling_of(model)
    return CompletionRecord(
        prompt.id,
        text,
        model.model,
        sampling,
        options.round,
        tokens,
        seconds,
        cost,
        columns={"sample": sample, **columns},
        id=content_id("sample", prompt.id, model.model, sampling, sample, text),
    )
