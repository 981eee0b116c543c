"""One request to an OpenAI-compatible server: what came of it, and what may have been paid."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import re
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from keel.config.secrets import wrong_address, wrong_key_name
from keel.types import KeelError

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
GATEWAY = (408, 502, 504)
"""Somebody between here and the model gave up; the model may have worked all the same."""
AGAIN = (408, 409, 425, 429)
"""Statuses under 500 after which the same request may succeed."""
REFUSALS = (
    "content_filter",
    "content_policy_violation",
    "context_length_exceeded",
    "string_above_max_length",
)
"""Error codes that are about this one text."""
TOO_LONG = re.compile(r"context (length|window|size)|too (long|many tokens)", re.IGNORECASE)
"""What servers without such codes say of too long a prompt: vLLM, SGLang, llama.cpp."""
CONTEXT = re.compile(r"context length is (\d+)", re.IGNORECASE)
MOST_TOKENS = 2**53
"""No count of tokens; what is beyond it is nonsense, and no file of answers could hold it."""
LONGEST_NAME = 30
"""Characters beyond which what should name a variable may be the key itself."""
SHORTEST_KEY = 8
"""Characters of a key below which it may be a word of the answers; such a key is no secret."""
PART_OF_KEY = 12
"""Characters of a key that are cut out of what a server says also where the rest is not there."""
MASKED = re.compile(r"[^\s\"']*(?:\*{3,}|\.{3,}|…)[^\s\"']*")
"""A word with its middle left out, as servers show a key that they refuse."""
CLOSING = 5.0
"""Seconds in which an event loop that nothing blocks has closed its connections."""
LONGEST_WAIT = 120.0
"""Seconds beyond which a server's `Retry-After` ends the run."""
SHOWN = 200
"""Characters of a server's own words that an error repeats."""
MAX_BODY = 4 * 2**20
"""Bytes of a response that are read: of a million tokens' text, and more than any verdict takes."""
ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|([/\"'\\]))")
"""A character written as JSON or Python may escape it."""
ESCAPED_TWICE = 3
"""How often a text is unescaped in the search for the key: JSON in JSON in JSON."""


class Failure(Exception):
    """A request that brought nothing, and may be repeated.

    `billed` says that it may have been billed all the same, `answered` that the server's answer
    was there and useless, `wait` for how many seconds it asks.
    """

    def __init__(
        self, why: str, *, billed: bool = False, answered: bool = False, wait: float = 0.0
    ) -> None:
        super().__init__(why)
        self.billed = billed
        self.answered = answered
        self.wait = wait


class _Unbounded(Exception):
    """A response that may not be read to its end."""


class Refused(Exception):
    """The server will not judge this text; unbilled. The message is its error code."""


class Unstructured(Exception):
    """The server does not know the `response_format`; unbilled."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a chat completion says. `usage` is prompt and completion tokens, None where not told."""

    text: str
    finish: str
    refusal: str
    usage: tuple[int, int] | None


class Client:
    """Sends single requests; neither retries nor counts. One connection pool an event loop.

    The library's own retries are off: each of its attempts may cost money, and none of them shows.
    `key_from` names the environment variable of the API key, which is held in memory alone and cut
    out of whatever the server says. Raises KeelError where the library or the key is missing.
    """

    def __init__(self, url: str | None, key_from: str | None, timeout: float) -> None:
        try:
            import openai
        except ImportError:
            raise KeelError("an LLM judge needs openai: pip install 'keel-rl[judge]'") from None
        self._openai = openai
        self.url = OPENAI if url is None else url
        _check_address(self.url)
        # A key of OpenAI's is for OpenAI: no other server is sent one that was not named for it.
        self.key_from = key_from or (OPENAI_KEY if url is None else None)
        self._key = _key_in(self.key_from) if self.key_from else ""
        self.timeout = timeout
        # Nor does it hear the rest of what the library reads from the environment.
        omitted = [] if url is None else ["OpenAI-Organization", "OpenAI-Project"]
        omitted += [] if self._key else ["Authorization"]
        self._left_out: dict[str, Any] = {header: openai.Omit() for header in omitted}
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = (
            weakref.WeakKeyDictionary()
        )

    async def post(self, body: Mapping[str, Any], name: str) -> Reply:
        """Send a chat completion request under an idempotency key.

        Raises Failure where it may be repeated, Refused and Unstructured, and KeelError where
        repeating will not help.
        """
        try:
            async with asyncio.timeout(self.timeout):
                text = await self._client().post(
                    "/chat/completions",
                    cast_to=str,
                    body=dict(body),
                    options={
                        "headers": {
                            "Idempotency-Key": name,
                            "Accept-Encoding": "identity",
                            **self._left_out,
                        }
                    },
                )
        except (TimeoutError, self._openai.APITimeoutError):
            raise Failure(f"no answer within {self.timeout:g} s", billed=True) from None
        except self._openai.APIConnectionError as error:
            if isinstance(error.__cause__, _Unbounded):
                raise Failure(str(error.__cause__), billed=True, answered=True) from None
            # The cause is httpx's; where no connection stood, nothing was asked.
            cause = type(error.__cause__).__name__
            sent = cause not in ("ConnectError", "ConnectTimeout", "PoolTimeout")
            raise Failure(f"the connection failed ({cause})", billed=sent) from None
        except self._openai.APIStatusError as error:
            raise self._status(error, body) from None
        return self._read(text)

    def close(self) -> None:
        """Close the connections; from any thread but an event loop's own."""
        for loop, client in list(self._clients.items()):
            if loop.is_running():
                closed = asyncio.run_coroutine_threadsafe(client.close(), loop)
                with suppress(TimeoutError):  # something blocks the loop
                    closed.result(CLOSING)
        self._clients.clear()

    async def leave(self) -> None:
        """Close the connections of the event loop that runs, which is about to end."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    def _client(self) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            # No redirect is followed: another host would get prompt and answer, or the key.
            http = self._openai.DefaultAsyncHttpxClient(
                follow_redirects=False,
                timeout=self.timeout,
                event_hooks={"response": [_bound]},
            )
            self._clients[loop] = self._openai.AsyncOpenAI(
                api_key=self._key or "none",
                base_url=self.url,
                timeout=self.timeout,
                max_retries=0,
                http_client=http,
            )
        return self._clients[loop]

    def _status(self, error: Any, body: Mapping[str, Any]) -> Exception:
        """What to raise for an HTTP status that is none of the good ones."""
        status = int(error.status_code)
        said = self._clean(_message(error.body))
        if status in (401, 403):
            said = MASKED.sub("[key]", said)
        why = f"HTTP {status}: {said}" if said else f"HTTP {status}"
        if error.code in REFUSALS:
            return Refused(str(error.code))
        if status == 400 and _too_long(said, body):
            return Refused("context_length_exceeded")
        if status == 429 and error.code == "insufficient_quota":
            return KeelError(f"the account at {self.url} has no money left ({why}): fill it")
        if status in AGAIN or status >= 500:
            wait = _retry_after(error.response.headers)
            if wait > LONGEST_WAIT:
                return KeelError(
                    f"the judge at {self.url} wants {wait:.0f} s of rest ({why}): resume then"
                )
            return Failure(why, billed=status in GATEWAY, wait=wait)
        if "response_format" in body and ("response_format" in said or "json_" in said):
            return Unstructured(why)
        if 300 <= status < 400:
            return KeelError(
                f"the judge at {self.url} redirects to another address ({why}), which is not "
                "followed: set url to the server itself"
            )
        mend = {
            401: f"check the key in {self.key_from}" if self.key_from else "set api_key_env",
            403: f"check the key in {self.key_from}" if self.key_from else "set api_key_env",
            404: "check the options url and model",
        }.get(status, "check the options model, max_tokens, extra and without")
        return KeelError(f"the judge at {self.url} refuses the request ({why}): {mend}")

    def _read(self, text: str) -> Reply:
        """The reply in a body. A body that is none was probably billed."""
        start = self._hide(text)[:60]
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise Failure(f"a malformed answer: {start!r}", billed=True, answered=True) from None
        try:
            choice = found["choices"][0]
            message = choice["message"]
            said, refusal = message.get("content"), message.get("refusal")
            finish = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Failure(
                f"an answer that is no chat completion: {start!r}", billed=True, answered=True
            ) from None
        if finish == "content_filter":
            refusal = refusal or finish
        return Reply(
            text=self._text(said),
            finish=self._text(finish),
            refusal=self._text(refusal),
            usage=_usage(found.get("usage")),
        )

    def _text(self, said: Any) -> str:
        """A string of an answer without the key, and as a file can hold it; of no string, none."""
        if not isinstance(said, str):
            return ""
        return self._hide(said).encode("utf-8", "replace").decode("utf-8")

    def _clean(self, text: str) -> str:
        return " ".join(self._hide(text).split())[:SHOWN]

    def _hide(self, text: str) -> str:
        """A text without the key, and without any larger part of it."""
        if len(self._key) < SHORTEST_KEY:
            return text
        text = self._unescaped_where_it_hides(text).replace(self._key, "[key]")
        starts = range(len(self._key) - PART_OF_KEY + 1)
        parts = {part for at in starts if (part := self._key[at : at + PART_OF_KEY]) in text}
        if not parts:
            return text
        hidden: set[int] = set()
        for at in range(len(text)):
            if text[at : at + PART_OF_KEY] in parts:
                hidden.update(range(at, at + PART_OF_KEY))
        marked = "".join("\0" if at in hidden else one for at, one in enumerate(text))
        return re.sub("\0+", "[key]", marked)

    def _unescaped_where_it_hides(self, text: str) -> str:
        """The text, unescaped where that shows a part of the key that it did not show before."""
        plain = text
        for _ in range(ESCAPED_TWICE):
            if "\\" not in plain:
                break
            plain = ESCAPE.sub(_escaped, plain)
            starts = range(len(self._key) - PART_OF_KEY + 1)
            parts = [self._key[at : at + PART_OF_KEY] for at in starts] or [self._key]
            if any(part in plain and part not in text for part in parts):
                return plain
        return text


async def _bound(response: Any) -> None:
    """Make reading a response end at `MAX_BODY` bytes; nothing is decompressed."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise _Unbounded("a compressed response, though none was asked for")
    response.stream = _bounded_stream(response.stream)


def _bounded_stream(stream: Any) -> Any:
    """The stream, which raises once it has given more than `MAX_BODY` bytes."""
    import httpx2

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            read = 0
            async for chunk in stream:
                read += len(chunk)
                if read > MAX_BODY:
                    raise _Unbounded(f"a response of more than {MAX_BODY // 2**20} MiB")
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _escaped(match: re.Match[str]) -> str:
    code = match[1] or match[2]
    return chr(int(code, 16)) if code else match[3]


def _check_address(url: str) -> None:
    """Raise KeelError where a server cannot be asked at `url`, or where that may hold a secret."""
    if (wrong := wrong_address(url)) is not None:
        raise KeelError(wrong)
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        raise KeelError(f"url = {url!r} is no address: write http://HOST:PORT/v1")


def _key_in(name: str) -> str:
    """The API key in an environment variable. No error repeats what may be a key itself."""
    if (wrong := wrong_key_name(name)) is not None:
        raise KeelError(wrong)
    if name not in os.environ and (len(name) > LONGEST_NAME or name.lower().startswith("sk")):
        raise KeelError(
            "no environment variable has the name in api_key_env: set it, or, where that is "
            "the key itself, write the NAME of a variable that holds it"
        )
    key = os.environ.get(name, "").strip()
    if not key:
        raise KeelError(
            f"the environment variable {name} holds no API key: set it, or name another in "
            "api_key_env"
        )
    if not (key.isascii() and key.isprintable()):
        raise KeelError(
            f"the environment variable {name} holds characters that no header can carry: set it "
            "to the key alone"
        )
    return key


def _too_long(said: str, body: Mapping[str, Any]) -> bool:
    """Whether a text is too long for the model; not where the limit on answers alone is."""
    limit = body.get("max_tokens", body.get("max_completion_tokens", 0))
    context = CONTEXT.search(said)
    return bool(TOO_LONG.search(said)) and not (context and int(context[1]) <= limit)


def _message(body: Any) -> str:
    """A server's own words in the body of an error."""
    if isinstance(body, Mapping):
        for key in ("message", "detail", "error"):
            if isinstance(body.get(key), str):
                return str(body[key])
    return body if isinstance(body, str) else ("" if body is None else json.dumps(body))


def _usage(usage: Any) -> tuple[int, int] | None:
    if not isinstance(usage, Mapping):
        return None
    tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if all(type(n) is int and 0 <= n < MOST_TOKENS for n in tokens):
        return tokens  # type: ignore[return-value]
    return None


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks to wait: a number of them, or a date. 0 where it does not."""
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        told = headers.get(name)
        if told is None:
            continue
        try:
            seconds = float(told) * unit
        except ValueError:
            try:
                seconds = email.utils.parsedate_to_datetime(told).timestamp() - time.time()
            except (ValueError, OverflowError):
                continue
        if not math.isnan(seconds):
            return max(0.0, seconds)
    return 0.0
