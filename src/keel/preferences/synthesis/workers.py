"""Work that models do: completions and labels from servers, completions from a model folder.

Each answer is written to the store as it arrives. A pair is judged in both orders.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import groupby
from typing import Any, TypeVar

from keel.config.model import Model
from keel.data.columns import shown_gold
from keel.graders.stated import answer_part
from keel.preferences.records import CompletionRecord, JudgedPair, LabelRecord, Side
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis.forecast import Unit, Usage
from keel.preferences.synthesis.options import (
    ModelFolder,
    ModelServer,
    SynthesisOptions,
    build_asker,
)
from keel.preferences.synthesis.work import ProgressNotes, Work, sample_record
from keel.rewards.judge.options import Cost
from keel.rewards.judge.questions import SWAPPED, WORTH, Judgement, Question, pair_question
from keel.rewards.judge.requests import Asker
from keel.runs.values import clean_text
from keel.types import Content, Group, KeelError, Message, Prompt

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
        from keel.learn.token_budget import oom_context

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
