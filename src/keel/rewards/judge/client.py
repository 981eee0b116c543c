"""One request to an OpenAI-compatible server: its reply, or why there is none and who pays."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keel.config.secrets import wrong_key_name
from keel.types import KeelError

OPENAI = "https://api.openai.com/v1"
OPENAI_KEY = "OPENAI_API_KEY"
GATEWAY = (408, 502, 504)
"""A proxy gave up; the model may have answered, and billed."""
AGAIN = (408, 409, 425, 429)
"""Statuses under 500 after which the same request may succeed."""
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
SHORTEST_KEY = 8
"""A shorter key may be a word of the answers and is not redacted."""
LONGEST_WAIT = 120.0
"""Seconds beyond which a server's `Retry-After` ends the run."""
SHOWN = 200
"""Characters of a server's message that an error repeats."""
MAX_BODY = 4 * 2**20
"""Bytes of a response that are read: the text of a million tokens."""


class Failure(Exception):
    """A request without a usable reply, which may be repeated.

    `billed`: it may have been billed. `answered`: the server replied, with nothing of use. `wait`:
    the seconds that the server asks for.
    """

    def __init__(
        self, why: str, *, billed: bool = False, answered: bool = False, wait: float = 0.0
    ) -> None:
        super().__init__(why)
        self.billed = billed
        self.answered = answered
        self.wait = wait


class Refused(Exception):
    """The server will not judge this text; unbilled. The message is its error code."""


class Unstructured(Exception):
    """The server does not know the `response_format`; unbilled."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A chat completion. `usage` is prompt and completion tokens, None where not reported."""

    text: str
    finish: str
    refusal: str
    usage: tuple[int, int] | None


class Client:
    """Sends single requests, without retries: each may cost money and is accounted for.

    `key_from` names the environment variable of the API key, which is kept in memory alone and
    redacted in all that the server writes. Raises KeelError where the library or the key is
    missing.
    """

    def __init__(self, url: str | None, key_from: str | None, timeout: float) -> None:
        try:
            import httpx2
        except ImportError:
            raise KeelError(
                "a model on a server needs httpx2: pip install 'keel-rl[judge]'"
            ) from None
        self.url = OPENAI if url is None else url
        _check_address(self.url)
        # OpenAI's key is for OpenAI alone; other servers get the key that was named for them.
        self.key_from = key_from or (OPENAI_KEY if url is None else None)
        key = _read_key(self.key_from) if self.key_from else ""
        self.timeout = timeout
        self._key = key if len(key) >= SHORTEST_KEY else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx2.AsyncClient(
            headers=headers, timeout=None, limits=httpx2.Limits(max_connections=None)
        )

    async def post(self, body: Mapping[str, Any], name: str) -> Reply:
        """Send a chat completion request under an idempotency key.

        Raises Failure where it may be repeated, Refused and Unstructured, and KeelError where
        repeating will not help.
        """
        import httpx2

        address = self.url.rstrip("/") + "/chat/completions"
        headers = {"Idempotency-Key": name}
        try:
            async with (
                asyncio.timeout(self.timeout),
                self._http.stream("POST", address, json=dict(body), headers=headers) as response,
            ):
                text = await _read_bounded(response)
        except TimeoutError:
            raise Failure(f"no answer within {self.timeout:g} s", billed=True) from None
        except httpx2.RequestError as error:
            sent = not isinstance(error, httpx2.ConnectError)
            raise Failure(f"the connection failed ({type(error).__name__})", billed=sent) from None
        if response.status_code != 200:
            raise self._status_error(response.status_code, response.headers, text, body)
        return self._parse(text)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _status_error(
        self, status: int, headers: Mapping[str, str], text: str, body: Mapping[str, Any]
    ) -> Exception:
        message, code = _error_of(text)
        message = " ".join(self._redact(message).split())[:SHOWN]
        why = f"HTTP {status}: {message}" if message else f"HTTP {status}"
        if code in REFUSALS:
            return Refused(code)
        if status == 400 and _too_long(message, body):
            return Refused("context_length_exceeded")
        if status == 429 and code == "insufficient_quota":
            return KeelError(f"the account at {self.url} has no money left ({why}): top it up")
        if status in AGAIN or status >= 500:
            wait = _retry_after(headers)
            if wait > LONGEST_WAIT:
                return KeelError(
                    f"the server at {self.url} asks to wait {wait:.0f} s ({why}): resume then"
                )
            return Failure(why, billed=status in GATEWAY, wait=wait)
        if "response_format" in body and ("response_format" in message or "json_" in message):
            return Unstructured(why)
        hint = "check the options model, max_tokens, extra and without"
        if status in (401, 403):
            hint = f"check the key in {self.key_from}" if self.key_from else "set api_key_env"
        elif status == 404 or status < 400:  # a redirect is not followed
            hint = "check the options url and model"
        return KeelError(f"the server at {self.url} refuses the request ({why}): {hint}")

    def _parse(self, text: str) -> Reply:
        """The reply in a body. A request with another body was probably billed."""
        start = self._redact(text)[:60]
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise Failure(f"a malformed answer: {start!r}", billed=True, answered=True) from None
        try:
            choice = found["choices"][0]
            message = choice["message"]
            text, refusal = message.get("content"), message.get("refusal")
            finish = choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise Failure(
                f"an answer that is no chat completion: {start!r}", billed=True, answered=True
            ) from None
        if finish == "content_filter":
            refusal = refusal or finish
        return Reply(
            text=self._text(text),
            finish=self._text(finish),
            refusal=self._text(refusal),
            usage=_usage(found.get("usage")),
        )

    def _text(self, value: Any) -> str:
        """A string of a reply, redacted and valid UTF-8; empty for anything else."""
        if not isinstance(value, str):
            return ""
        return self._redact(value).encode("utf-8", "replace").decode("utf-8")

    def _redact(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text


async def _read_bounded(response: Any) -> str:
    """The body. Raises Failure if it is larger than `MAX_BODY`."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_BODY:
            why = f"a response of more than {MAX_BODY // 2**20} MiB"
            raise Failure(why, billed=True, answered=True)
    return content.decode("utf-8", "replace")


def _check_address(url: str) -> None:
    """Raise KeelError if `url` is not the address of a server."""
    import httpx2

    try:
        parts = httpx2.URL(url)
        fits = parts.scheme in ("http", "https") and bool(parts.host) and parts.port != 0
    except httpx2.InvalidURL:
        fits = False
    if not fits:
        raise KeelError(f"url = {url!r} is no address: write http://HOST:PORT/v1")


def _read_key(name: str) -> str:
    """The API key in an environment variable. No error repeats what may be a key itself."""
    if (wrong := wrong_key_name(name)) is not None:
        raise KeelError(wrong)
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


def _too_long(message: str, body: Mapping[str, Any]) -> bool:
    """Whether a text is too long for the model, and not the limit on answers alone."""
    limit = body.get("max_tokens", body.get("max_completion_tokens", 0))
    context = CONTEXT.search(message)
    return bool(TOO_LONG.search(message)) and not (context and int(context[1]) <= limit)


def _error_of(text: str) -> tuple[str, str]:
    """The message and the code in the body of an error."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text, ""
    if isinstance(found, dict) and found.get("error"):
        found = found["error"]
    if not isinstance(found, dict):
        return found if isinstance(found, str) else json.dumps(found), ""
    messages = (found.get(key) for key in ("message", "detail"))
    message = next((one for one in messages if isinstance(one, str)), json.dumps(found))
    return message, str(found.get("code") or "")


def _usage(usage: Any) -> tuple[int, int] | None:
    if not isinstance(usage, Mapping):
        return None
    tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if all(type(n) is int and n >= 0 for n in tokens):
        return tokens  # type: ignore[return-value]
    return None


def _retry_after(headers: Mapping[str, str]) -> float:
    """The seconds that a server asks to wait, as a number or a date; 0 without them."""
    value = headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return 0.0
    return 0.0 if math.isnan(seconds) else max(0.0, seconds)
