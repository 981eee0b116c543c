"""Requests of many clients to one engine: their sequences are decoded together.

Sequences with the same settings of sampling share a call of the engine, which ends when another
request arrives, or, while others wait, after a while; their keys and values are kept for the next
call. What a sequence is does not depend on the others, beyond the order of sums.
"""

from __future__ import annotations

import math
import queue
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np

from keel.engines.endpoint.requests import TOO_LONG, ChatRequest, RefusedRequest
from keel.engines.endpoint.responses import (
    CALL_TAG,
    ResponseHead,
    assistant_message,
    chat_choice,
    delta_of,
    usage_of,
)
from keel.engines.endpoint.server import PendingResponse
from keel.engines.endpoint.session import check_length, encode_request
from keel.engines.native import NativeEngine
from keel.engines.sampler import EOS, GOING, LENGTH, REASONS, Answers, check, split_stops
from keel.models.chat import ChatEncoder, encode_prompt
from keel.models.text import GrowingText, token_texts, unsettled
from keel.platform.calls import POLL
from keel.types import Completion, KeelError, Prompt, Sampling, one_line

QUANTUM = 0.5
"""Seconds of a call while sequences with other settings wait."""
CODES = {finish: code for code, finish in REASONS.items()}
TEXT_TOKENS = 16
"""Of `/v1/completions`, unless the request says: OpenAI's default."""


class LiveResponse(PendingResponse):
    """The answer to a served request: a body once all its sequences are done, or chunks before."""

    def __init__(self, request: ChatRequest, model: str) -> None:
        super().__init__()
        assert request.options is not None
        self.request, self.options = request, request.options
        chat = not request.prompts
        name = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.head = ResponseHead(name, int(time.time()), model, chat)
        self.sequences: list[LiveSequence] = []
        self.prompt_tokens = 0
        self.gone = False
        """Whether the client has gone."""
        self._chunks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def parts(self, stream: bool) -> Iterator[dict[str, Any] | None]:
        """See `PendingResponse`."""
        if not stream:
            yield from super().parts(False)
            return
        while not (self.done() and self._chunks.empty()):
            try:
                yield self._chunks.get(timeout=POLL)
            except queue.Empty:
                yield None
        self.result()

    def leave(self) -> None:
        """The client has gone: the sequences end."""
        self.gone = True

    def send(self, choice: dict[str, Any]) -> None:
        """A part of a choice, if the request wants a stream."""
        if self.request.stream:
            self._chunks.put(self.head.body([choice], chunk=True))

    def close_if_done(self) -> None:
        """Give the whole once no sequence is live."""
        if not all(one.finish for one in self.sequences):
            return
        usage = usage_of(self.prompt_tokens, sum(len(one.tokens) for one in self.sequences))
        if self.request.stream and self.options.usage:
            self._chunks.put(self.head.body([], usage, chunk=True))
        self.set_result(self.head.body([one.choice() for one in self.sequences], usage))


class LiveSequence:
    """One choice of an answer while it is decoded."""

    def __init__(
        self, answer: LiveResponse, prompt: Prompt, index: int, sampling: Sampling, tokenizer: Any
    ) -> None:
        self.answer, self.prompt, self.index = answer, prompt, index
        self.sampling = replace(sampling, max_tokens=1)
        """What calls are shared by; `limit` is its own."""
        self.limit = sampling.max_tokens
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.text, self.finish = "", ""
        self._tokenizer, self._growing = tokenizer, GrowingText(tokenizer)
        self._tools = bool(answer.request.tools)
        self._sent = self._logged = 0
        """Characters, and tokens with their log-probabilities, that were sent."""
        self._first = 0
        """Tokens before this call."""

    def begin(self) -> Prompt:
        """The prompt of the next call."""
        self._first = len(self.tokens)
        return replace(self.prompt, tokens=(*self.prompt.tokens, *self.tokens))

    def take(self, tokens: Sequence[int], log_probs: Sequence[float], code: int) -> None:
        """Take over what a call has sampled so far; `code` as in `Answers`."""
        known = len(self.tokens) - self._first
        new = list(tokens[known:])
        if self.finish or not new:
            return
        if not all(map(math.isfinite, log_probs[known:])):
            raise KeelError("the model's logits are not finite: its weights are broken")
        self.tokens += new
        self.log_probs += log_probs[known:]
        self.text += self._growing.add(new[:-1] if code == EOS else new)
        if code != GOING:
            self.text += self._growing.end()
            found = [at for stop in self.sampling.stop if (at := self.text.find(stop)) >= 0]
            self.text = self.text[: min(found, default=None)]
            self.finish = "length" if code == LENGTH else "stop"
        self._send()
        if self.finish:
            self.answer.close_if_done()

    def take_whole(self, made: Completion) -> None:
        """Take over what a call has sampled in all."""
        done = made.finish != "length" or self._first + len(made) >= self.limit
        own = made.tokens.tolist(), made.log_probs.tolist()
        self.take(*own, CODES[made.finish] if done else GOING)

    def choice(self) -> dict[str, Any]:
        """The whole choice."""
        log_probs = self._log_probs(0)
        if not self.answer.head.chat:
            return self._part(self.text, log_probs, self.finish)
        return chat_choice(self._message(), self.finish, self.index, log_probs)

    def _message(self) -> dict[str, Any]:
        return assistant_message(self.text, self.answer.head.id[-8:] + str(self.index), self._tools)

    def _send(self) -> None:
        """Send what is settled: text that no stop or tool call may take back."""
        if not self.answer.request.stream:
            return
        message = self._message() if self.finish and self._tools else {}
        markers = (*self.sampling.stop, CALL_TAG) if self._tools else self.sampling.stop
        settled = len(self.text) - (0 if self.finish else unsettled(self.text, markers))
        if self._tools and CALL_TAG in self.text and (not self.finish or "tool_calls" in message):
            settled = min(settled, self.text.index(CALL_TAG))
        if settled <= self._sent and not self.finish:
            return
        new, log_probs = self.text[self._sent : settled], self._log_probs(self._logged)
        self._logged = len(self.tokens)
        if not self.answer.head.chat:
            self.answer.send(self._part(new, log_probs, self.finish or None))
        else:
            role = {} if self._sent else {"role": "assistant"}
            self._change({**role, "content": new}, log_probs)
        self._sent = max(settled, self._sent)
        if self.finish and self.answer.head.chat:
            choice = chat_choice(message or self._message(), self.finish)
            if "tool_calls" in message:
                self._change(delta_of(choice["message"], self._sent))
            self._change({}, None, choice["finish_reason"])

    def _change(self, delta: Any, log_probs: Any = None, finish: str | None = None) -> None:
        head = {"index": self.index, "delta": delta}
        self.answer.send({**head, "finish_reason": finish, "logprobs": log_probs})

    def _part(self, text: str, log_probs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": self.index, "text": text, "finish_reason": finish, "logprobs": log_probs}

    def _log_probs(self, first: int) -> dict[str, Any] | None:
        """Those of the tokens from `first` on, if the request asks for them."""
        if not self.answer.options.log_probs:
            return None
        ids, values = self.tokens[first:], self.log_probs[first:]
        named = token_texts(self._tokenizer, list(dict.fromkeys(ids)))
        texts = [named[token] for token in ids]
        if not self.answer.head.chat:
            return {"tokens": texts, "token_logprobs": values, "top_logprobs": None}
        known = [None if "\ufffd" in text else list(text.encode()) for text in texts]
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": own, "top_logprobs": []}
                for text, value, own in zip(texts, values, known, strict=True)
            ]
        }


class RequestBatcher:
    """Answers requests with an engine. `submit` is called by any thread; all else runs in the
    thread of `run`, so that a signal to it ends everything.

    `sampling` is what a request gets unless it says otherwise, with `max_tokens` the most that any
    may have; `name` is the model's.
    """

    def __init__(
        self, engine: NativeEngine, chat: ChatEncoder, name: str, sampling: Sampling
    ) -> None:
        self._engine, self._chat, self._name, self._sampling = engine, chat, name, sampling
        self._queue: queue.SimpleQueue[LiveResponse] = queue.SimpleQueue()
        self.live: list[LiveSequence] = []
        """Sequences that are decoded or wait, in the order of their turns."""

    def submit(self, key: str, request: ChatRequest) -> LiveResponse:
        """Take a request over."""
        answer = LiveResponse(request, self._name)
        self._queue.put(answer)
        return answer

    def run(self) -> None:
        """Answer requests until interrupted."""
        with self._engine.conversation() as source:
            while True:
                self._receive()
                if batch := self._next_batch():
                    self._decode(source, batch)

    def _receive(self) -> None:
        """Take over new requests, and drop the sequences of clients that have gone; wait if there
        is nothing else to do."""
        self.live = [one for one in self.live if not one.finish and not one.answer.gone]
        with suppress(queue.Empty):
            while True:
                answer = self._queue.get(block=not self.live)
                try:
                    self._begin(answer)
                except Exception as error:
                    self._fail(answer, error)

    def _begin(self, answer: LiveResponse) -> None:
        """Encode a request into its sequences. Raises RefusedRequest."""
        request, options = answer.request, answer.options
        context, tokenizer = self._engine.capabilities.context, self._chat.tokenizer
        check_length(request.characters, context, tokenizer)
        sampling = replace(self._sampling, **options.sampling)
        prompts = self._encoded(request)
        most = request.max_tokens
        if most is None:
            most = sampling.max_tokens if answer.head.chat else TEXT_TOKENS
        try:
            sampling = replace(sampling, top_k=min(sampling.top_k, self._engine.tokens))
            check(sampling, 1)
            split_stops(sampling.stop, tokenizer)
        except KeelError as error:
            raise RefusedRequest(str(error)) from None
        seed = secrets.randbits(63) if options.seed is None else options.seed
        for number, tokens in enumerate(prompts):
            room = most if context is None else context - len(tokens)
            if room < 1:
                line = f"the prompt has {len(tokens)} tokens, and the context is {context}"
                raise RefusedRequest(line, TOO_LONG)
            own = replace(sampling, max_tokens=min(most, room, sampling.max_tokens))
            for index in range(number * options.n, (number + 1) * options.n):
                name = sha256(repr((seed, index, tokens)).encode()).hexdigest()
                prompt = Prompt(name, "", tokens=tokens)
                answer.sequences.append(LiveSequence(answer, prompt, index, own, tokenizer))
        answer.prompt_tokens = sum(map(len, prompts))
        self.live += answer.sequences

    def _encoded(self, request: ChatRequest) -> list[tuple[int, ...]]:
        """The tokens of each prompt. Raises RefusedRequest."""
        if not request.prompts:
            if not getattr(self._chat.tokenizer, "chat_template", None):
                raise RefusedRequest("the model has no chat template: ask /v1/completions")
            return [tuple(encode_request(self._chat, request))]
        found = []
        for text in request.prompts:
            if isinstance(text, str):
                try:
                    text = encode_prompt(Prompt("prompt", text), self._chat, raw=True).tokens
                except KeelError as error:
                    raise RefusedRequest(str(error)) from None
            elif not all(0 <= token < self._engine.tokens for token in text):
                raise RefusedRequest(f"prompt: give tokens from 0 to {self._engine.tokens - 1}")
            found.append(text)
        return found

    def _next_batch(self) -> list[LiveSequence]:
        """The sequences of the next call: those with the settings of the first, which then go to
        the end of the queue; begun ones come first."""
        if not self.live:
            return []
        shared = self.live[0].sampling
        alike = [one for one in self.live if one.sampling == shared]
        self.live = [*(one for one in self.live if one.sampling != shared), *alike]
        if shared.temperature > 0:  # of two with one name the second would get other numbers
            alike = list({one.prompt.id: one for one in reversed(alike)}.values())[::-1]
        return sorted(alike, key=lambda one: not one.tokens)[: self._engine.max_num_seqs]

    def _decode(self, source: NativeEngine, batch: Sequence[LiveSequence]) -> None:
        """Decode a batch until its end, or until others should join or follow it."""
        until = time.monotonic() + QUANTUM
        waiting = [one for one in self.live if one not in batch]
        names = {one.prompt.id for one in batch}
        joins = any(
            one.sampling == batch[0].sampling and one.prompt.id not in names for one in waiting
        )

        def on_step(answers: Answers) -> bool:
            for at, one in enumerate(batch):
                own = answers.tokens[at], answers.log_probs[at]
                one.take(*own, int(answers.codes[at]))
            going = int(np.sum(answers.codes == GOING))
            room = going < self._engine.max_num_seqs
            return (
                any(one.answer.gone and not one.finish for one in batch)
                or not self._queue.empty()
                or (joins and room)
                or (bool(waiting) and time.monotonic() > until)
            )

        try:
            found = source.decode(
                [one.begin() for one in batch],
                batch[0].sampling,
                0,
                budgets=[one.limit - len(one.tokens) for one in batch],
                made=[len(one.tokens) for one in batch],
                on_step=on_step,
                waiting=[one.begin() for one in waiting if one.tokens],
            )
            for one, group in zip(batch, found, strict=True):
                one.take_whole(group.completions[0])
        except Exception as error:  # no request ends the server
            for one in batch:
                self._fail(one.answer, error)

    def _fail(self, answer: LiveResponse, error: Exception) -> None:
        """Refuse a request, whatever else it has."""
        if not isinstance(error, RefusedRequest):
            line = one_line(error, named=not isinstance(error, KeelError))
            error = RefusedRequest(line, "engine_failed", 500)
        if not answer.done():
            answer.set_exception(error)
        answer.leave()
