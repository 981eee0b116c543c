"""Questions to a judge, each paid for once: cache, budget, retries, and so many at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sqlite3
import weakref
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from keel.rewards.judge.client import Client, Failure, Refused, Reply, Unstructured
from keel.rewards.judge.parsing import ParsedReply, parse
from keel.rewards.judge.prompts import Question, Structured
from keel.rewards.judge.spending import Cost, Prices, SpendLimit
from keel.rewards.judge.store import JudgeStore, StoredAnswer, Ticket
from keel.rewards.judge.writer import Disk
from keel.types import KeelError

POLL = 0.05
"""Seconds between looks at a question that another process is asking."""
LONGEST_BACKOFF = 60.0
IN_HAND = 5.0
"""Seconds beyond a request's own that its answer may take to be on record."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """How questions are asked.

    `sampling` are the keys of a request beside messages, format and seed. `retries` follow a first
    attempt that brought nothing, the n-th after `backoff · 2^(n−1)` seconds, less up to half. An
    answer that says nothing is followed by up to `attempts − 1` further draws.
    """

    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int = 512
    seed: int | None = 0
    structured: Structured = "json_schema"
    concurrency: int = 8
    retries: int = 6
    backoff: float = 1.0
    attempts: int = 2
    prices: Prices = field(default_factory=Prices)
    budget: SpendLimit = field(default_factory=SpendLimit)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of a question: the last draw, and the costs of all of them by their keys.

    The costs are those of when they were paid for, be that now or in an earlier run.
    """

    parsed: ParsedReply
    costs: Mapping[str, Cost]


@dataclass(slots=True, eq=False)
class _Pending:
    """A question under way, and how many wait for it."""

    waiters: int = 0
    task: asyncio.Task[StoredAnswer] | None = None


class _Loop:
    """What belongs to one event loop."""

    def __init__(self, concurrency: int) -> None:
        self.slots = asyncio.Semaphore(concurrency)
        self.pending: dict[str, _Pending] = {}
        self.sends: set[asyncio.Task[StoredAnswer | None]] = set()


class Asker:
    """Asks questions. Where nobody waits any longer, requests on their way are still kept.

    `sleep` is what it waits with.
    """

    def __init__(self, client: Client, store: JudgeStore, plan: RequestPlan) -> None:
        self.client = client
        self.store = store
        self.plan = plan
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._structured = plan.structured
        self._disk = Disk(store)
        self._ending = False
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = (
            weakref.WeakKeyDictionary()
        )

    async def judge(self, question: Question) -> Judgement:
        """Ask until an answer says something, at most `attempts` times.

        Raises KeelError where the server gives none at all, or the budget ends.
        """
        costs: dict[str, Cost] = {}
        parsed = ParsedReply()
        for draw in range(self.plan.attempts):
            key, answer = await self.ask(question, draw)
            costs[key] = answer.cost
            parsed = parse(answer, question)
            # A refused text is refused again.
            if parsed.value is not None or answer.refusal:
                break
        return Judgement(parsed, costs)

    async def ask(self, question: Question, draw: int = 0) -> tuple[str, StoredAnswer]:
        """The answer of one draw, from the cache or the server, and its key."""
        forms: list[Structured] = ["text"]
        if self.plan.structured != "text":
            forms.insert(0, self.plan.structured)
        for form in forms:
            body = self._body(question, draw, form)
            key = key_of(body, draw)
            if (answer := await self._run(self.store.find, key)) is not None:
                return key, answer
        while True:
            form = self._structured
            body = self._body(question, draw, form)
            key = key_of(body, draw)
            try:
                return key, await self._shared(key, body)
            except Unstructured:
                continue

    async def drain(self) -> None:
        """Wait for requests that are on their way, whoever asked."""
        if sends := list(self._mine().sends):
            await asyncio.wait(sends)

    def finish(self) -> None:
        """Send nothing more, give up what waits, and wait for what was sent: it is paid for.

        At most as long as a request may take; not to be called in an event loop's own thread.
        """
        self._ending = True
        for loop in list(self._loops):
            if loop.is_running():
                ended = asyncio.run_coroutine_threadsafe(self._give_up(), loop)
                # Something blocks the loop, or it ends just now, and with it what it had sent.
                with suppress(TimeoutError, CancelledError):
                    ended.result(self.client.timeout + IN_HAND)

    def close(self) -> None:
        """Let go of the cache."""
        self._disk.close()
        self.store.close()

    async def _give_up(self) -> None:
        for entry in self._mine().pending.values():
            if entry.task is not None:
                entry.task.cancel()
        await self.drain()

    async def _shared(self, key: str, body: Mapping[str, Any]) -> StoredAnswer:
        """Ask once, however many in this event loop ask the same."""
        if self._ending:
            raise asyncio.CancelledError
        pending = self._mine().pending
        entry = pending.get(key)
        if entry is None:
            entry = pending[key] = _Pending()
            entry.task = asyncio.create_task(self._fetch(key, body, entry))
            entry.task.add_done_callback(_seen)
        assert entry.task is not None
        entry.waiters += 1
        try:
            return await asyncio.shield(entry.task)
        finally:
            entry.waiters -= 1
            if entry.waiters == 0:
                del pending[key]
                entry.task.cancel()

    async def _fetch(self, key: str, body: Mapping[str, Any], entry: _Pending) -> StoredAnswer:
        """Attempts until one brings an answer. Cancelled, it lets the one on its way go on."""
        mine = self._mine()
        jitter = random.Random(key)
        failed = 0
        sending: asyncio.Task[StoredAnswer | None] | None = None
        await mine.slots.acquire()
        try:
            while True:
                sending = asyncio.create_task(self._attempt(key, body, entry))
                mine.sends.add(sending)
                sending.add_done_callback(mine.sends.discard)
                sending.add_done_callback(_seen)
                try:
                    answer = await asyncio.shield(sending)
                except Failure as failure:
                    failed += 1
                    if failed > self.plan.retries:
                        raise KeelError(
                            f"the judge {self.plan.model!r} at {self.client.url} gave no answer in "
                            f"{failed} attempts, last {failure}: see to the server, or raise "
                            "retries"
                        ) from None
                    backoff = min(self.plan.backoff * 2.0 ** (failed - 1), LONGEST_BACKOFF)
                    # Never before the server said; and not all at the same moment.
                    await self.sleep(max(failure.wait, backoff / 2) + jitter.random() * backoff / 2)
                else:
                    if answer is not None:
                        return answer
                    await asyncio.sleep(POLL)
        finally:
            # A request on its way keeps its slot.
            if sending is None or sending.done():
                mine.slots.release()
            else:
                sending.add_done_callback(lambda _: mine.slots.release())

    async def _attempt(
        self, key: str, body: Mapping[str, Any], entry: _Pending
    ) -> StoredAnswer | None:
        """Reserve and send; None where it has to wait, or nobody waits for it any longer."""
        if "response_format" in body and self._structured == "text":
            raise Unstructured  # the server has said so meanwhile
        worst = self.plan.prices.worst(body, self.plan.max_tokens)
        got = await self._run(self.store.reserve, key, worst, self.plan.budget)
        if not isinstance(got, Ticket):
            return got
        if entry.waiters == 0 or self._ending:
            await self._run(self.store.release, got)
            return None
        return await self._send(got, body, worst)

    async def _send(self, ticket: Ticket, body: Mapping[str, Any], worst: Cost) -> StoredAnswer:
        """One request, and its end on record."""
        try:
            reply = await self.client.post(body, ticket.name)
        except Failure as failure:
            if failure.billed:
                await self._run(self.store.lose, ticket, failure.answered)
            else:
                await self._run(self.store.release, ticket)
            raise
        except Refused as refusal:
            answer = StoredAnswer("", "", str(refusal), Cost())
        except (Unstructured, KeelError) as error:
            if isinstance(error, Unstructured):
                self._structured = "text"  # for all that follow
            await self._run(self.store.release, ticket)
            raise
        except BaseException:
            # The loop ends: nothing may wait any more, so not in the other thread.
            self.store.lose(ticket, answered=False)
            raise
        else:
            answer = StoredAnswer(reply.text, reply.finish, reply.refusal, self._cost(reply, worst))
        return await self._settle(ticket, answer)

    async def _settle(self, ticket: Ticket, answer: StoredAnswer) -> StoredAnswer:
        """Put an answer on record; where that fails, that it was paid for and is lost."""
        try:
            return await self._run(self.store.settle, ticket, answer, self.plan.model)
        except BaseException:
            # Not in the other thread: the loop may be ending. What was settled all the same, and
            # a disk that takes nothing, leave nothing to do.
            with suppress(sqlite3.Error):
                self.store.lose(ticket, answered=True)
            raise

    def _cost(self, reply: Reply, worst: Cost) -> Cost:
        """What an answer cost; the worst case where the server does not tell."""
        return worst if reply.usage is None else self.plan.prices.cost(*reply.usage)

    def _body(self, question: Question, draw: int, form: Structured) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.plan.model, "messages": list(question.messages)}
        body |= self.plan.sampling
        if self.plan.seed is not None:
            body["seed"] = self.plan.seed + draw
        if (shape := question.format(form)) is not None:
            body["response_format"] = shape
        return body

    def _mine(self) -> _Loop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            self._loops[loop] = _Loop(self.plan.concurrency)
        return self._loops[loop]

    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._disk.run(partial(work, *args, **kwargs))


def key_of(body: Mapping[str, Any], draw: int) -> str:
    """The key of a question: model, messages, sampling, format and draw, in one order of keys."""
    whole = json.dumps({"body": body, "draw": draw}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(whole.encode()).hexdigest()


def _seen(task: asyncio.Task[Any]) -> None:
    """Take note of how a task ended, though nobody may wait for it any longer."""
    if not task.cancelled():
        task.exception()
