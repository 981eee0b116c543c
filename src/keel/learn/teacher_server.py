"""A teacher on a server: log-probabilities of completions from vLLM's completions endpoint."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from keel.config.model import TeacherModel
from keel.config.secrets import variable
from keel.learn.batch import Batch
from keel.models.policy import Policy
from keel.platform.calls import LoopThread
from keel.platform.http import answer_to, check_url, shown
from keel.types import KeelError

PROBED = 64
"""Tokens over the whole vocabulary whose text is compared."""
SAME_MODEL = "serve a model with the policy's tokenizer, or set teacher.name to one"


class TeacherServer:
    """Asks for `prompt_logprobs` of whole sequences, each by a request of its own.

    They are those of temperature 1, over all that the served model has a logit for. Raises
    KeelError for a wrong address, a variable that is not set, and a server that does not answer,
    refuses or has other tokens.
    """

    def __init__(self, choice: TeacherModel) -> None:
        assert choice.url is not None
        self._choice, self._url = choice, choice.url.rstrip("/") + "/completions"
        try:
            check_url(self._url)
        except ValueError as error:
            raise self._wrong(f"is not a valid address: {error}", "correct it") from None
        key = choice.api_key_env and variable("teacher.api_key_env", choice.api_key_env)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def check(self, policy: Policy) -> None:
        """Compare tokens of the whole vocabulary, the last one among them, with the policy's."""
        ids = [*range(0, policy.tokens, -(-policy.tokens // PROBED)), policy.tokens - 1]
        for one in self._choice.each.values():
            with _waiting(self._entries([0, *ids], one.name)) as found:
                self._check(policy, ids, found())

    def _check(
        self, policy: Policy, ids: Sequence[int], entries: Sequence[Mapping[str, Any]]
    ) -> None:
        for token, entry in zip(ids, entries, strict=True):
            there, here = entry.get("decoded_token"), policy.tokenizer.decode([token])
            # Bytes within a character have no text of their own.
            if there and here and "\ufffd" not in there + here and there.strip() != here.strip():
                why = f"has token {token} as {there!r}, which the policy has as {here!r}"
                raise self._wrong(why, SAME_MODEL)

    @contextmanager
    def scoring(self, batch: Batch) -> Iterator[Callable[[], Float[Tensor, " N"]]]:
        """Begin to score the completions of a batch, and cancel that where the block ends; what is
        called for the log-probabilities waits for them."""
        target_N = batch.target_N
        parts = torch.split(batch.tokens_T.cpu(), list(batch.input_lengths))
        sequences = [part.tolist() for part in parts]
        names = [one.name for one in self._choice.each.values()]
        models = [names[at] for at in batch.teachers or (0,) * batch.sequences]
        with _waiting(self._scores(sequences, batch.lengths, models)) as found:
            yield lambda: torch.tensor(found(), device=target_N.device)[target_N]

    async def _scores(
        self,
        sequences: Sequence[Sequence[int]],
        written: Sequence[int],
        models: Sequence[str | None],
    ) -> list[float]:
        """log π of each token after those before it; NaN where nothing is to be scored."""
        turns = asyncio.Semaphore(self._choice.requests)

        async def scores(tokens: Sequence[int], asked: bool, model: str | None) -> list[float]:
            async with turns:
                found = await self._entries(tokens, model) if asked else [{}] * (len(tokens) - 1)
            return [math.nan, *(entry.get("logprob", math.nan) for entry in found)]

        each = zip(sequences, map(bool, written), models, strict=True)
        made = await asyncio.gather(*(scores(*one) for one in each))
        return [value for part in made for value in part]

    async def _entries(self, tokens: Sequence[int], model: str | None) -> list[Mapping[str, Any]]:
        """What the server says of each token but the first."""
        choice = self._choice
        body = {"model": model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        try:
            content = await answer_to(
                self._url, body, choice.timeout, choice.retries, self._headers
            )
        except ConnectionError as error:
            fix = "start the server, or correct teacher.url and teacher.name"
            raise self._wrong(str(error), fix) from None
        try:
            _, *found = json.loads(content)["choices"][0]["prompt_logprobs"]
            pairs = zip(tokens[1:], found, strict=False)
            entries = [(entry.get(str(token)), [*entry]) for token, entry in pairs]
            sound = all(own is None or math.isfinite(own["logprob"]) for own, _ in entries)
        except (ValueError, LookupError, TypeError, AttributeError):
            sound = False
        if not sound:
            why = f"did not answer with finite prompt_logprobs, but with {shown(content)}"
            raise self._wrong(why, "serve the teacher with vLLM")
        if len(found) != len(tokens) - 1:
            why = f"returned {len(found) + 1} log-probabilities for {len(tokens)} tokens"
            raise self._wrong(why, "serve the teacher with vLLM, which takes a prompt of token ids")
        for token, (own, there) in zip(tokens[1:], entries, strict=True):
            if own is None:
                why = f"was asked for token {token} and returned token {', '.join(there)}"
                raise self._wrong(why, SAME_MODEL)
        return [own for own, _ in entries]

    def _wrong(self, why: str, fix: str) -> KeelError:
        return KeelError(f"teacher.url = {self._choice.url!r} {why}: {fix}", key="teacher.url")


@contextmanager
def _waiting(work: Any) -> Iterator[Callable[[], Any]]:
    """A coroutine in a loop of its own, which ends with the block; its outcome."""
    loop = LoopThread()
    try:
        yield loop.run(work)[1].result
    finally:
        loop.close()


def served_teacher(choice: TeacherModel | None, policy: Policy) -> TeacherServer | None:
    """The teacher that a server has, if it is on one, once its tokens are checked."""
    if choice is None or choice.url is None:
        return None
    server = TeacherServer(choice)
    server.check(policy)
    return server
