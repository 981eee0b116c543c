"""vLLM's HTTP API: completions in token ids, health, and its weight transfer endpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from keel.platform.http import HttpClient, HttpFailure, transport_to
from keel.types import KeelError

SHOWN = 300
"""Characters of a server's message that an error repeats."""


class ServerFailure(Exception):
    """The server gave no usable reply; another server may."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the server sampled for one request, and vLLM's reason for its end."""

    tokens: list[int]
    log_probs: list[float]
    finish: str


def check_address(url: str) -> None:
    """Raise KeelError unless `url` is http://HOST:PORT or unix:PATH."""
    try:
        transport_to(url)
    except ValueError:
        raise KeelError(
            f"rollout.vllm.url = {url!r} is not an address: write http://HOST:PORT or unix:PATH"
        ) from None


class VllmClient:
    """Sends requests; `timeout` seconds limit each. vLLM aborts one that is cancelled."""

    def __init__(self, url: str, timeout: float) -> None:
        self._http = HttpClient(url)
        self.url = url.rstrip("/")
        self.timeout = timeout

    def complete(
        self, model: str, prompt: list[int], settings: Mapping[str, Any]
    ) -> Future[Sampled]:
        """Begin to sample one completion of a prompt in token ids."""
        return self._http.start(self._complete(model, prompt, settings))

    async def _complete(
        self, model: str, prompt: list[int], settings: Mapping[str, Any]
    ) -> Sampled:
        body = {
            "model": model,
            "prompt": prompt,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,  # they are text, as in the native engine
            **settings,
        }
        found = await self._request("POST", "/v1/completions", body, self.timeout)
        try:
            choice = found["choices"][0]
            tokens = [int(number) for number in choice["token_ids"]]
            scores = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            finish = str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise KeelError(
                f"the server at {self.url} returns no token ids with log-probs "
                f"({type(error).__name__}: {error}): it needs vLLM 0.32"
            ) from None
        if finish not in ("stop", "length") or len(tokens) != len(scores) or not tokens:
            raise ServerFailure(f"a completion ended with finish reason {finish!r}")
        return Sampled(tokens, scores, finish)

    def healthy(self) -> bool:
        """Whether the server answers and its engine runs."""
        try:
            self.request("GET", "/health", timeout=5.0)
        except (ServerFailure, KeelError):
            return False
        return True

    def model(self) -> str:
        """The name of the model that the server has. Raises KeelError if it lists none."""
        found = self.request("GET", "/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise KeelError(
                f"rollout.vllm.url = {self.url!r}: the server there lists no model in /v1/models; "
                "give the address of a vLLM server"
            ) from None

    def prepare_updates(self, info: Mapping[str, Any]) -> None:
        """Set the weight transfer up. Raises KeelError if the server was started without it."""
        self.request("POST", "/init_weight_transfer_engine", {"init_info": info})

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """One update of the weights, within the block; generation is paused, then without cache."""
        self.request("POST", "/pause?mode=wait")
        try:
            self.request("POST", "/start_weight_update")
            yield
            self.request("POST", "/finish_weight_update", {"weight_version": str(version)})
            self.request("POST", "/reset_prefix_cache")
        finally:
            self.request("POST", "/resume")

    def update_weights(self, info: Mapping[str, Any]) -> None:
        """Let the server take weights in, as its backend reads `info`; only within `updating`."""
        self.request("POST", "/update_weights", {"update_info": info})

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 0.0
    ) -> Any:
        """The JSON of a reply, None if it has no content; waits for it.

        Raises ServerFailure if the connection fails, the deadline passes or the server reports
        an error of its own, KeelError if it refuses the request.
        """
        return self._http.start(self._request(method, path, body, timeout or self.timeout)).result()

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit: float
    ) -> Any:
        try:
            status, content = await self._http.request(method, path, body, limit)
        except TimeoutError:
            raise ServerFailure(
                f"{path} of {self.url} gives no answer within {limit:g} s (rollout.timeout)"
            ) from None
        except HttpFailure as error:
            raise ServerFailure(
                f"the connection to {self.url} failed in {path} ({error})"
            ) from None
        if status >= 500:
            raise ServerFailure(f"{path} of {self.url}: HTTP {status}: {_shown(content)}")
        if status >= 300:
            raise KeelError(
                f"the server at {self.url} refuses {path} (HTTP {status}: "
                f"{_shown(content)}): see docs/howto/vllm.md for how it has to be started"
            )
        try:
            return json.loads(content) if content.strip() else None
        except ValueError:
            raise ServerFailure(f"{path} of {self.url}: a reply that is not JSON") from None


def _shown(content: bytes) -> str:
    return " ".join(content.decode("utf-8", "replace").split())[:SHOWN]
