"""A reward that a server of the user's computes: one POST of JSON for a batch of completions."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from keel.algorithms.terms import FrozenModel
from keel.config.fields import Count, Seconds
from keel.platform.http import check_url, exchange_json
from keel.rewards.registry import RESERVED, RewardContext
from keel.runs.values import plain
from keel.types import KeelError

BUSY = (408, 425, 429)
"""Statuses that are tried again, as all from 500 on are."""
FIRST_WAIT, LONGEST_WAIT = 0.25, 8.0
SHOWN = 200
"""Characters of a server's message that an error repeats."""


class HttpOptions(FrozenModel):
    """The options of `http`."""

    url: str | None = None
    """Address that gets the POST: http:// or https://."""
    url_env: str | None = None
    """Name of the environment variable that holds the address, if it is a secret."""
    api_key_env: str | None = None
    """Name of the environment variable whose value is sent as a bearer token."""
    batch_size: Count | None = None
    """The most completions of a request; None: all of a call, of which a step has several with
    `rollout.overlap_rewards`."""
    timeout: Seconds = 30.0
    """Seconds for one request."""
    retries: Annotated[int, Field(ge=0, le=100)] = 2
    """How often a request is sent again that got no answer, or a status of 408, 425, 429 or 500 and
    above, within `rewards.timeout`."""

    @model_validator(mode="after")
    def _one_url(self) -> HttpOptions:
        if (self.url is None) == (self.url_env is None):
            raise ValueError("set one of url and url_env")
        return self


def http(context: RewardContext, options: HttpOptions) -> HttpReward:
    """What a server of yours answers to a POST of the completions, with their prompts and columns.

    Raises KeelError for a variable that is not set, or a wrong address.
    """
    url = options.url or _variable("url_env", options.url_env)
    try:
        check_url(url)
    except ValueError as error:
        raise KeelError(f"{_where(options)} is not a valid address: {error}") from None
    key = options.api_key_env and _variable("api_key_env", options.api_key_env)
    return HttpReward(url, options, {"Authorization": f"Bearer {key}"} if key else {})


def _variable(option: str, name: str | None) -> str:
    value = os.environ.get(name or "")
    if not value:
        raise KeelError(f"{option}: the environment variable {name!r} is not set")
    return value


def _where(options: HttpOptions) -> str:
    """The address in a message, which must not repeat a secret."""
    return f"the address in ${options.url_env}" if options.url is None else options.url


class HttpReward:
    """The body is {"prompts": [...], "completions": [...], COLUMN: [...]}, the answer
    {"rewards": [...]}, a number or null for each completion.

    Raises KeelError for a server that cannot be reached, refuses, or answers something else.
    """

    def __init__(self, url: str, options: HttpOptions, headers: dict[str, str]) -> None:
        self._url, self._options, self._headers = url, options, headers

    async def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Any]:
        data = {name: values for name, values in columns.items() if name not in RESERVED}
        rows = {"prompts": prompts, "completions": completions, **data}
        size, count = self._options.batch_size or len(completions), len(completions)
        parts = [{k: v[at : at + size] for k, v in rows.items()} for at in range(0, count, size)]
        found = await asyncio.gather(*map(self._rewards, parts))
        return [reward for rewards in found for reward in rewards]

    async def _rewards(self, part: dict[str, Any]) -> list[Any]:
        content, wanted = await self._sent(plain(part)), len(part["completions"])
        try:
            rewards = json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError):
            raise self._wrong(
                f'did not answer {{"rewards": [...]}} but {_shown(content)}'
            ) from None
        if not isinstance(rewards, list) or len(rewards) != wanted:
            count = len(rewards) if isinstance(rewards, list) else "no list of"
            raise self._wrong(f"returned {count} rewards for {wanted} completions")
        return rewards

    async def _sent(self, body: Any) -> bytes:
        """The content of the answer, after as many requests as it takes."""
        options, wait = self._options, FIRST_WAIT
        for left in range(options.retries, -1, -1):
            try:
                status, content = await exchange_json(
                    self._url, body, options.timeout, self._headers
                )
            except TimeoutError:
                why = f"did not answer within {options.timeout:g} s"
            except ConnectionError as error:
                why = f"cannot be reached ({error})"
            else:
                if 200 <= status < 300:
                    return content
                why = f"answered with status {status}: {_shown(content)}"
                if status < 500 and status not in BUSY:
                    raise self._wrong(why)
            if left:
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)
        raise self._wrong(f"{why} ({options.retries + 1} requests)")

    def _wrong(self, why: str) -> KeelError:
        return KeelError(f"{_where(self._options)} {why}: fix the server, or change the options")


def _shown(content: bytes) -> str:
    return repr(" ".join(content.decode(errors="replace").split())[:SHOWN])
