"""Asking a judge through the `openai` client: cache of paid answers, spend limit, retries."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import time
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from keel.config.secrets import without_secrets, wrong_key_name
from keel.platform.calls import LoopThread
from keel.platform.extras import install_command
from keel.platform.sqlite import Database, Format
from keel.rewards.judge_questions import (
    Cost,
    Judgement,
    JudgeOptions,
    Question,
    SpendLimitReached,
    StoredAnswer,
    Structured,
    parse,
)
from keel.types import KeelError, one_line

if TYPE_CHECKING:
    import httpx
    from openai import APIError, AsyncOpenAI

R = TypeVar("R")
OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
REFUSALS = (
    "content_filter",
    "content_policy_violation",
    "context_length_exceeded",
    "string_above_max_length",
)
"""Error codes that concern this one text."""
TOO_LONG = re.compile(r"context (length|window|size)|too (long|many tokens)", re.IGNORECASE)
"""What servers without such codes (vLLM, SGLang, llama.cpp) write about too long a prompt."""
CONTEXT = re.compile(r"context length is (\d+)", re.IGNORECASE)
SHOWN = 200
"""Characters of a server's message that an error repeats."""


FORMAT = Format(
    application=0x4B4C4A47,  # "KLJG"
    version=3,
    statements=(
        """CREATE TABLE IF NOT EXISTS answers (
            id INTEGER PRIMARY KEY, key TEXT, model TEXT, text TEXT, finish TEXT, refusal TEXT,
            tokens_in INTEGER, tokens_out INTEGER, dollars REAL
        )""",
        # With the costs, so that a sum over it reads no texts.
        "CREATE INDEX IF NOT EXISTS by_key ON answers (key, tokens_in, tokens_out, dollars)",
    ),
)


@dataclass(frozen=True, slots=True)
class Account:
    """The number of answers in a cache, and their cost."""

    answers: int
    spent: Cost


class JudgeStore:
    """Answers by key; several threads and processes may share a file.

    Every paid answer is a row, so that the sum of the rows is what was billed: if two processes
    ask one question at the same moment, both answers count, and the first is used. `path` None
    keeps all in memory. Raises KeelError if the file cannot be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._db = Database(path, FORMAT, f"cache = {str(path)!r}")

    def find(self, key: str) -> StoredAnswer | None:
        """The stored answer to a question."""
        found = self._db.rows(
            "SELECT text, finish, refusal, tokens_in, tokens_out, dollars FROM answers"
            " WHERE key = ? ORDER BY id LIMIT 1",
            (key,),
        )
        if not found:
            return None
        text, finish, refusal, *cost = found[0]
        return StoredAnswer(text, finish, refusal, Cost(*cost))

    def add(self, key: str, model: str, answer: StoredAnswer) -> None:
        """Store an answer with its cost."""
        cost = answer.cost
        with self._db.transaction():
            self._db.execute(
                "INSERT INTO answers VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(key, model, answer.text, answer.finish, answer.refusal),
                    *(cost.tokens_in, cost.tokens_out, cost.dollars),
                ),
            )

    def account(self) -> Account:
        """What was spent so far, by every process that used the file."""
        ((answers, *spent),) = self._db.rows(
            "SELECT COUNT(DISTINCT key), COALESCE(SUM(tokens_in), 0),"
            " COALESCE(SUM(tokens_out), 0), COALESCE(SUM(dollars), 0) FROM answers"
        )
        return Account(answers, Cost(*spent))

    def close(self) -> None:
        """Close the file."""
        self._db.close()


class Malformed(ValueError):
    """A response that is not a chat completion."""


class Asker:
    """Asks questions in an event loop and a thread of its own, from any number of event loops.

    Each answer is stored before it is used. A request that was sent is waited for and its answer
    stored, even if its caller was cancelled: it is paid for. `seconds` has how long each answer
    took, by its key, of those that this process got. Raises KeelError if the library or the key
    is missing, or the cache (`path`; None: in memory) cannot be used.
    """

    def __init__(self, options: JudgeOptions, path: Path | None) -> None:
        self.options = options
        self.url = OPENAI if options.url is None else options.url
        self.seconds: dict[str, float] = {}
        # OpenAI's key is for OpenAI alone; other servers get the key that was named for them.
        self._key_name = options.api_key_env or (OPENAI_KEY if options.url is None else None)
        self._client = _client(self.url, self._key_name, options)
        self.store = JudgeStore(path)
        self._structured = options.structured
        self._slots = asyncio.Semaphore(options.concurrency)
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._worst: dict[str, Cost] = {}
        self._closing = False
        self._loop = LoopThread()

    async def judge(self, questions: Sequence[Question]) -> list[Judgement]:
        """Ask each until an answer holds a verdict, at most `attempts` times.

        Raises KeelError if the server gives no answers, or the spend limit is reached. Then no
        further question is sent.
        """
        return await self._in_loop(self._judge_all(questions))

    async def answer(self, question: Question, sample: int) -> tuple[str, StoredAnswer]:
        """The key and the answer of a sample, whose seed is the options' plus its number.

        Raises KeelError as `judge` does.
        """
        return await self._in_loop(self._answer(question, sample))

    def close(self) -> None:
        """Cancel what waits, store the answers to what was sent (for at most the time that a
        request may take), and close the cache."""
        if self._closing:
            return
        self._closing = True
        self._loop.run(self._finish())[1].result()
        self._loop.close()
        self.store.close()

    async def _in_loop(self, asking: Coroutine[Any, Any, R]) -> R:
        if self._closing:
            asking.close()
            raise asyncio.CancelledError
        return await asyncio.wrap_future(self._loop.run(asking)[1])

    async def _judge_all(self, questions: Sequence[Question]) -> list[Judgement]:
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
        judgement = Judgement()
        for sample in range(self.options.attempts):
            key, answer = await self._answer(question, sample)
            costs[key] = answer.cost
            judgement = parse(answer, question)
            # A refused text is refused again.
            if judgement.value is not None or answer.refusal:
                break
        return replace(judgement, costs=costs)

    async def _answer(self, question: Question, sample: int) -> tuple[str, StoredAnswer]:
        """The key and the answer of one sample, from the cache or the server."""
        key = self._key(question, sample)
        async with self._locks.setdefault(key, asyncio.Lock()):  # equal questions, one request
            while (answer := self.store.find(key)) is None:
                try:
                    sending = self._sending.get(key) or await self._start(key, question, sample)
                except SpendLimitReached:
                    if self.store.find(key) is None:  # another process has not paid for it either
                        raise
                    continue
                await asyncio.shield(sending)
        return key, answer

    async def _start(self, key: str, question: Question, sample: int) -> asyncio.Task[None]:
        """Wait for a slot and for the spend limit, and send."""
        await self._slots.acquire()
        try:
            worst = self.options.worst(self._body(question, sample, self._structured))
            await self._wait_for_limit(worst)
        except BaseException:
            self._slots.release()
            raise
        sending = asyncio.create_task(self._send(key, question, sample, worst))
        self._sending[key], self._worst[key] = sending, worst
        sending.add_done_callback(partial(self._sent, key))
        return sending

    async def _wait_for_limit(self, worst: Cost) -> None:
        """Until the spend limit covers a request with those under way, which will cost less than
        their worst cases. Raises SpendLimitReached if none is."""
        if self.options.budget is None and self.options.budget_tokens is None:
            return
        while True:
            spent = self.store.account().spent
            if self.options.covers(sum(self._worst.values(), spent + worst)):
                return
            if not self._sending:
                raise self.options.limit_reached(spent, worst)
            await asyncio.wait(self._sending.values(), return_when=asyncio.FIRST_COMPLETED)

    def _sent(self, key: str, sending: asyncio.Task[None]) -> None:
        del self._sending[key], self._worst[key]
        self._slots.release()
        if not sending.cancelled():
            sending.exception()  # its caller may be gone

    async def _send(self, key: str, question: Question, sample: int, worst: Cost) -> None:
        """Ask the server, and store its answer."""
        import openai

        if self.store.find(key) is not None:  # from another process
            return
        start = time.monotonic()
        while True:
            body = self._body(question, sample, self._structured)
            try:
                answer = await self._request(key, body, worst)
                break
            except openai.APIError as error:
                if (reason := _refusal(error, self.options.max_tokens)) is not None:
                    answer = StoredAnswer("", "", reason, Cost())
                    break
                if not ("response_format" in body and _no_format(error)):
                    raise KeelError(self._explain(error)) from None
                self._structured = "text"  # for all that follow
        self.seconds[key] = time.monotonic() - start
        self.store.add(key, self.options.model, answer)

    async def _request(self, key: str, body: Mapping[str, Any], worst: Cost) -> StoredAnswer:
        """The answer to one request; the client repeats it if none comes."""
        import openai

        # Named so that a server may repeat an answer that did not arrive.
        headers: dict[str, Any] = {"Idempotency-Key": key}
        if not self._key_name:
            headers["Authorization"] = openai.Omit()
        reply: Any = await self._client.chat.completions.create(
            model=body["model"], messages=body["messages"], extra_body=body, extra_headers=headers
        )
        choice = reply.choices[0]
        finish = _text(getattr(choice, "finish_reason", None))
        refusal = _text(getattr(choice.message, "refusal", None))
        if finish == "content_filter":
            refusal = refusal or finish
        usage = _usage(reply.usage)
        cost = worst if usage is None else self.options.cost(*usage)
        return StoredAnswer(_text(getattr(choice.message, "content", None)), finish, refusal, cost)

    def _explain(self, error: APIError) -> str:
        """What a failed request means, and the fix."""
        status = getattr(error, "status_code", None)
        if status in (401, 403):
            hint = f"check the key in {self._key_name}" if self._key_name else "set api_key_env"
        elif status == 404:
            hint = "check the options url and model"
        elif status is None or status >= 500 or status in (408, 409, 429):
            hint = "check the server, or raise retries"
        else:
            hint = "check the options model, max_tokens, extra and without"
        shown = error.__cause__ if isinstance(error.__cause__, Malformed) else error
        message = without_secrets(one_line(shown).rstrip("."))[:SHOWN]
        return f"the model {self._name}: {message}: {hint}"

    async def _finish(self) -> None:
        sending = set(self._sending.values())
        for task in asyncio.all_tasks() - sending - {asyncio.current_task()}:
            task.cancel()
        if sending:
            await asyncio.wait(sending, timeout=self.options.timeout)
        for task in sending:
            task.cancel()
        await self._client.close()

    @property
    def _name(self) -> str:
        return f"{self.options.model!r} at {self.url}"

    def _body(self, question: Question, sample: int, form: Structured) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.options.model, "messages": list(question.messages)}
        body |= self.options.parameters(sample)
        if (shape := question.format(form)) is not None:
            body["response_format"] = shape
        return body

    def _key(self, question: Question, sample: int) -> str:
        """The key of a sample: server, model, messages, parameters, format and number."""
        body = self._body(question, sample, self.options.structured)
        whole = {"url": self.url, "body": body, "draw": sample}
        text = json.dumps(whole, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _client(url: str, key_name: str | None, options: JudgeOptions) -> AsyncOpenAI:
    """A client for one server. Raises KeelError if the library or the key is missing."""
    try:
        import openai
    except ImportError:
        raise KeelError(f"a model on a server needs openai: {install_command('judge')}") from None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise KeelError(f"url = {url!r} is not a valid address: write http://HOST:PORT/v1")
    key = "none"
    if key_name:
        if (wrong := wrong_key_name(key_name)) is not None:
            raise KeelError(wrong)
        key = os.environ.get(key_name, "").strip()
        if not key:
            raise KeelError(
                f"the environment variable {key_name} holds no API key: set it, or name another in "
                "api_key_env"
            )
    client = openai.AsyncOpenAI(
        base_url=url,
        api_key=key,
        timeout=options.timeout,
        max_retries=options.retries,
        http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [_check_shape]}),
    )
    if url != OPENAI:  # the library reads them from the environment
        client.organization = client.project = None
    return client


async def _check_shape(response: httpx.Response) -> None:
    """Raise Malformed, so that the client asks again, if a reply is not a chat completion."""
    if not response.is_success:
        return
    try:
        if isinstance(json.loads(await response.aread())["choices"][0]["message"], dict):
            return
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    raise Malformed("a malformed answer (not a chat completion)")


def _refusal(error: APIError, max_tokens: int) -> str | None:
    """Why the server will not judge this one text; None if the error is another."""
    if error.code in REFUSALS:
        return error.code
    message = one_line(error)
    context = CONTEXT.search(message)
    # Not if the limit on answers alone is too high.
    if TOO_LONG.search(message) and not (context and int(context[1]) <= max_tokens):
        return "context_length_exceeded" if getattr(error, "status_code", 0) == 400 else None
    return None


def _no_format(error: APIError) -> bool:
    """Whether the server does not know the `response_format`."""
    return "response_format" in error.message or "json_" in error.message


def _usage(usage: Any) -> tuple[int, int] | None:
    """The tokens read and written, if the server reported them."""
    tokens = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
    if all(type(n) is int and n >= 0 for n in tokens):
        return tokens  # type: ignore[return-value]
    return None


def _text(value: Any) -> str:
    """A string of a reply as valid UTF-8; empty for anything else."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else ""
