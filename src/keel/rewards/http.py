"""A reward that a server of the user's computes: one POST of JSON for a batch of completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, model_validator

from keel.algorithms.terms import FrozenModel
from keel.config.fields import Count, Seconds
from keel.config.secrets import variable
from keel.platform.http import answer_to, check_url, shown
from keel.rewards.registry import RESERVED, RewardContext
from keel.runs.values import plain
from keel.types import KeelError


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
    url = options.url or variable("url_env", options.url_env)
    try:
        check_url(url)
    except ValueError as error:
        raise KeelError(f"{_where(options)} is not a valid address: {error}") from None
    key = options.api_key_env and variable("api_key_env", options.api_key_env)
    return HttpReward(url, options, {"Authorization": f"Bearer {key}"} if key else {})


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
        options, wanted = self._options, len(part["completions"])
        try:
            content = await answer_to(
                self._url, plain(part), options.timeout, options.retries, self._headers
            )
        except ConnectionError as error:
            raise self._wrong(str(error)) from None
        try:
            rewards = json.loads(content)["rewards"]
        except (ValueError, KeyError, TypeError):
            raise self._wrong(f'did not answer {{"rewards": [...]}} but {shown(content)}') from None
        if not isinstance(rewards, list) or len(rewards) != wanted:
            count = len(rewards) if isinstance(rewards, list) else "no list of"
            raise self._wrong(f"returned {count} rewards for {wanted} completions")
        return rewards

    def _wrong(self, why: str) -> KeelError:
        return KeelError(f"{_where(self._options)} {why}: fix the server, or change the options")
