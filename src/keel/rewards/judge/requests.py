"""Asking a judge: cache, spend limit, retries, and a bounded number of requests at a time."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from keel.rewards.judge.client import Client, Failure, Refused, Unstructured
from keel.rewards.judge.options import JudgeOptions
from keel.rewards.judge.prompts import Chat, ParsedReply, Question, Structured, parse
from keel.rewards.judge.store import Cost, JudgeStore, StoredAnswer
from keel.types import KeelError

R = TypeVar("R")
LONGEST_BACKOFF = 60.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """The last sample of a question, and the costs of all its samples by their keys.

    The costs are those at the time of payment, in this run or an earlier one.
    """

    parsed: ParsedReply
    costs: Mapping[str, Cost]

    @property
    def value(self) -> int | str | None:
        """The score or the choice; None without a verdict."""
        return self.parsed.value


class Asker:
    """Asks questions in an event loop and a thread of its own, from any number of event loops.

    A request that was sent is waited for and its answer stored, even where its caller was
    cancelled: it is paid for. The n-th request without an answer is followed by another after
    `backoff · 2^(n−1)` seconds, less up to half, at most `retries` times. `sleep` waits for that.
    `seconds` has how long each answer took, by its key, of those that this process got.
    """

    def __init__(self, client: Client, store: JudgeStore, options: JudgeOptions) -> None:
        self.client = client
        self.store = store
        self.options = options
        self.seconds: dict[str, float] = {}
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._structured = options.structured
        self._slots = asyncio.Semaphore(options.concurrency)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def judge(self, questions: Sequence[Question]) -> list[Judgement]:
        """Ask each until an answer holds a verdict, at most `attempts` times.

        Raises KeelError where the server gives no answers, or the spend limit is reached. Then no
        further question is sent.
        """
        return await self._in_loop(self._judge_all(questions))

    async def complete(self, chat: Chat, sample: int) -> tuple[str, StoredAnswer]:
        """The key and the answer of a sample, whose seed is the options' plus its number.

        Raises KeelError as `judge` does.
        """
        return await self._in_loop(self._answer(chat, sample))

    def close(self) -> None:
        """Cancel what waits, store the answers to what was sent (for at most the time that a
        request may take), and close the cache."""
        self._closing = True
        loop = self._loop
        if loop is not None and not loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._finish(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()
            loop.close()
        self.store.close()

    async def _in_loop(self, asking: Coroutine[Any, Any, R]) -> R:
        """Run in the thread of its own."""
        try:
            loop = self._own_loop()
        except asyncio.CancelledError:
            asking.close()
            raise
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, loop))

    async def _judge_all(self, questions: Sequence[Question]) -> list[Judgement]:
        if self._closing:
            raise asyncio.CancelledError
        tasks = [asyncio.create_task(self._judge(question)) for question in questions]
        try:
            return list(await asyncio.gather(*tasks))
        except Exception:
            for task in tasks:
                task.cancel()
            await asyncio.wait([*tasks, *self._sending.values()])
            raise

    async def _judge(self, question: Question) -> Judgement:
        costs: dict[str, Cost] = {}
        parsed = ParsedReply()
        for sample in range(self.options.attempts):
            key, answer = await self._answer(question, sample)
            costs[key] = answer.cost
            parsed = parse(answer, question)
            # A refused text is refused again.
            if parsed.value is not None or answer.refusal:
                break
        return Judgement(parsed, costs)

    async def _answer(self, question: Question | Chat, sample: int) -> tuple[str, StoredAnswer]:
        """The key and the answer of one sample, from the cache or the server."""
        key = self._key(question, sample)
        jitter = random.Random(key)
        failures = useless = 0
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with lock:  # equal questions share one request
            while (answer := self.store.find(key)) is None:
                try:
                    sending = self._sending.get(key)
                    if sending is None:
                        # Named so that a server may repeat an answer, but never a useless one.
                        sending = await self._start(key, question, sample, f"{key}-{useless}")
                    if sending is not None:
                        await asyncio.shield(sending)
                except Unstructured:
                    continue
                except Failure as failure:
                    failures += 1
                    useless += failure.answered
                    if failures > self.options.retries:
                        raise KeelError(
                            f"the model {self.options.model!r} at {self.client.url} gave no answer "
                            f"in {failures} attempts, last {failure}: check the server, or raise "
                            "retries"
                        ) from None
                    backoff = min(self.options.backoff * 2.0 ** (failures - 1), LONGEST_BACKOFF)
                    # Not before Retry-After, and not all at the same time.
                    await self.sleep(max(failure.wait, backoff / 2) + jitter.random() * backoff / 2)
        return key, answer

    async def _start(
        self, key: str, question: Question | Chat, sample: int, name: str
    ) -> asyncio.Task[None] | None:
        """Wait for a slot, reserve the worst case and send; None where the answer arrived."""
        await self._slots.acquire()
        try:
            if self.store.find(key) is not None:  # from another process
                self._slots.release()
                return None
            body = self._body(question, sample, self._structured)
            worst = self.options.prices.worst(body, self.options.max_tokens)
            while (reservation := self.store.reserve(worst, self.options.limit)) is None:
                if not self._sending:
                    account = self.store.account()
                    raise self.options.limit.error(account.spent, account.lost_cost, worst)
                # They reserved their worst cases and will cost less.
                await asyncio.wait(self._sending.values(), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            self._slots.release()
            raise
        sending = asyncio.create_task(self._send(reservation, key, body, worst, name))
        self._sending[key] = sending
        sending.add_done_callback(partial(self._sent, key))
        return sending

    async def _send(
        self, reservation: int, key: str, body: Mapping[str, Any], worst: Cost, name: str
    ) -> None:
        """One request; its answer is stored, or its reservation dropped or, if billed, left."""
        start = time.monotonic()
        try:
            reply = await self.client.post(body, name)
            cost = worst if reply.usage is None else self.options.prices.cost(*reply.usage)
            answer = StoredAnswer(reply.text, reply.finish, reply.refusal, cost)
        except Refused as refusal:
            answer = StoredAnswer("", "", str(refusal), Cost())
        except (Failure, Unstructured, KeelError) as error:
            if isinstance(error, Unstructured):
                self._structured = "text"  # for all that follow
            if not (isinstance(error, Failure) and error.billed):
                self.store.release(reservation)
            raise
        self.seconds[key] = time.monotonic() - start
        self.store.commit(reservation, key, answer, self.options.model)

    def _sent(self, key: str, sending: asyncio.Task[None]) -> None:
        del self._sending[key]
        self._slots.release()
        if not sending.cancelled():
            sending.exception()  # its caller may be gone

    async def _finish(self) -> None:
        sending = set(self._sending.values())
        for task in asyncio.all_tasks() - sending - {asyncio.current_task()}:
            task.cancel()
        if sending:
            await asyncio.wait(sending)
        await self.client.close()

    def _body(self, question: Question | Chat, sample: int, form: Structured) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.options.model, "messages": list(question.messages)}
        body |= self.options.sampling
        if "seed" not in self.options.without:
            body["seed"] = self.options.seed + sample
        if (shape := question.format(form)) is not None:
            body["response_format"] = shape
        return body

    def _key(self, question: Question | Chat, sample: int) -> str:
        """The key of a sample: server, model, messages, parameters, format and number."""
        body = self._body(question, sample, self.options.structured)
        whole = {"url": self.client.url, "body": body, "draw": sample}
        text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._closing:
                raise asyncio.CancelledError
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="keel-judge", daemon=True
                )
                self._thread.start()
            return self._loop
