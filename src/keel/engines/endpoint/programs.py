"""Completions by programs: each talks to the policy over an endpoint of its own.

A batch has one request of every running program: what is sampled together, and from which cached
sequences, does not depend on how long programs take.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any

from keel.config.secrets import without_secrets
from keel.engines.endpoint.requests import MODEL, TOO_LONG, ChatRequest, RefusedRequest
from keel.engines.endpoint.server import Endpoint, PendingResponse
from keel.engines.endpoint.session import Session, check_length
from keel.engines.turns import conversation_names, sample_turns
from keel.models.chat import ChatEncoder
from keel.platform.calls import POLL, LoopThread, Served
from keel.platform.time_limit import (
    Hung,
    heartbeat,
    place,
    raise_if_cancelled,
    seconds_since,
    stack_of,
    stack_of_task,
)
from keel.types import Engine, Group, KeelError, Program, ProgramInput, Prompt, Sampling, one_line

ENDING = 2.0
"""Seconds that programs get to end once they are no longer needed."""
MAX_REPEATS = 20
"""How often a request may be repeated after its answer: more than clients try again."""


@dataclass(frozen=True, slots=True)
class ProgramConfig:
    """A program by its name in the recipe, how many run at once, and its time limit: seconds
    without a request. `skips`: what it raises after an answer does not end the call."""

    name: str
    function: Program
    limit: int
    timeout: float
    skips: bool = False


def sample_with_program(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    seed: int,
    *,
    program: ProgramConfig,
    chat: ChatEncoder,
    loop: LoopThread,
) -> list[Group]:
    """`n` completions for each prompt, each of which a run of the program leads.

    Programs that are coroutines run in `loop`.

    `sampling.max_tokens` limits all tokens after a completion's first request; a program that
    raises if none are left has ended. The prompt of a group has the tokens that its first
    requests begin with. Raises KeelError for a program that raises or makes no request, and Hung
    for one that makes none in time.
    """
    if not getattr(chat.tokenizer, "chat_template", None):
        raise KeelError(
            f"rollout.program = {program.name!r} needs a chat template, and the tokenizer has "
            "none: set model.chat_template"
        )
    runs: list[_ProgramRun] = []
    context = engine.capabilities.context
    for prompt, index, name in conversation_names(prompts, n):
        session = Session(prompt, name, chat, sampling.max_tokens, context)
        runs.append(_ProgramRun(session, index))
    _Programs(engine, runs, program, sampling, seed, loop).run()
    groups = []
    for at, prompt in enumerate(prompts):
        own = runs[at * n : (at + 1) * n]
        shared = _shared([run.session.first for run in own])
        completions = tuple(
            replace(run.session.whole(shared, run.columns), failed=run.failed) for run in own
        )
        tokens = tuple(own[0].session.first[:shared])
        groups.append(Group(replace(prompt, tokens=tokens), completions))
    return groups


def _shared(several: Sequence[Sequence[int]]) -> int:
    """How many tokens all begin with."""
    together = zip(*several, strict=False)
    return next((at for at, ids in enumerate(together) if len({*ids}) > 1), min(map(len, several)))


def _is_refusal(error: BaseException) -> bool:
    """Whether a program raised what a client raises for a refused request, or raised from it: its
    text has the error's code or HTTP status."""
    seen: list[BaseException | None] = [None]
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        if TOO_LONG in str(one) or "400" in str(one):
            return True
        seen.append(one)
        left += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
    return False


class _ProgramRun:
    """One run of the program: its session, and the answers to the request that waits for the
    engine, since a client that tries again waits for the same one.

    A function runs in a thread, a coroutine in the event loop.
    """

    def __init__(self, session: Session, index: int) -> None:
        self.session, self.index = session, index
        self.key = secrets.token_urlsafe(16)
        self.answers: list[PendingResponse] = []
        self.budget = self.repeats = 0
        self.silent = 0.0
        self.refusal = self.failed = ""
        self.columns: Mapping[str, Any] = {}
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._served: Served | None = None
        self._task: asyncio.Task[Any] | None = None

    def receive(self, request: ChatRequest, answer: PendingResponse) -> None:
        """Take a request over. Raises RefusedRequest."""
        again = request == self.session.request
        if self.answers:
            if not again:
                raise RefusedRequest("a request of this completion is being answered: wait for it")
            self.answers.append(answer)
        elif again:
            self.repeats += 1
            if self.repeats > MAX_REPEATS:
                raise RefusedRequest(
                    f"the same request {self.repeats} times after its answer, which stays the "
                    "same: append a message to the conversation"
                )
            answer.set_result(self.session.response)
        else:
            self._bound(request)
            self.budget = self.session.prepare(request)
            self.answers.append(answer)
            self.repeats, self.refusal = 0, ""

    def _bound(self, request: ChatRequest) -> None:
        """Refuse what has more characters than the tokens that are left can hold."""
        session, begun = self.session, self.session.request is not None
        room = len(session.first) + session.limit if begun else session.context
        left = f" (rollout.max_tokens = {session.limit})"
        try:
            check_length(request.characters, room, session.chat.tokenizer, left)
        except RefusedRequest:
            session.full = begun
            raise

    def refuse(self, error: RefusedRequest) -> None:
        """Refuse the request that waits, if any."""
        for answer in self.answers:
            answer.set_exception(error)
        self.answers = []

    def start(
        self, function: Program, given: ProgramInput, loop: LoopThread, ended: Callable[[], Any]
    ) -> None:
        """Call the program; `ended` is called at its end."""

        async def wait(work: Any) -> None:
            self._task = asyncio.current_task()
            try:
                self.result = await work
            except BaseException as error:
                self.error = error
            end()

        def call() -> None:
            try:
                self.result = function(given)
            except BaseException as error:
                self.error = error
            if inspect.isawaitable(self.result):
                self._served = loop.run(wait(self.result))[0]
            else:
                end()

        def end() -> None:
            self.done = True
            ended()

        self._thread = threading.Thread(target=call, name="keel-program", daemon=True)
        self._thread.start()

    @property
    def blocks(self) -> bool:
        """Whether a coroutine occupies the event loop."""
        task, served = self._task, self._served
        return task is not None and served is not None and asyncio.current_task(served[0]) is task

    def stack(self) -> str:
        """Where it is now."""
        if self.blocks:
            assert self._served is not None
            return stack_of(self._served[1].ident)
        return stack_of(self._thread.ident) if self._task is None else stack_of_task(self._task)

    def cancel(self) -> None:
        """Cancel a coroutine; a function ends at its next request."""
        if self._served is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._served[0].call_soon_threadsafe(self._task.cancel)


class _Programs:
    """Runs the programs of a call. Everything but the programs and HTTP is in the caller's thread,
    which gets requests and ends as events."""

    def __init__(
        self,
        engine: Engine,
        runs: Sequence[_ProgramRun],
        config: ProgramConfig,
        sampling: Sampling,
        seed: int,
        loop: LoopThread,
    ) -> None:
        self._engine, self._config, self._loop = engine, config, loop
        self._sampling, self._seed = sampling, seed
        self._left = list(reversed(runs))
        self._live: dict[str, _ProgramRun] = {}
        self._events: queue.SimpleQueue[tuple[str, ChatRequest | None, PendingResponse]] = (
            queue.SimpleQueue()
        )
        self._closed = False

    def run(self) -> None:
        with Endpoint(self._submit) as endpoint, self._engine.conversation() as source:
            try:
                self._start(endpoint)
                while self._live:
                    self._gather(endpoint)
                    self._sample(source)
            finally:
                self._end()

    def _submit(self, key: str, request: ChatRequest | None) -> PendingResponse:
        answer = PendingResponse()
        self._events.put((key, request, answer))
        if self._closed:
            self._drain()
        return answer

    def _start(self, endpoint: Endpoint) -> None:
        """Start programs up to the limit."""
        while self._left and len(self._live) < self._config.limit:
            run = self._left.pop()
            prompt, key = run.session.prompt, run.key
            content = prompt.content
            turns = [{"role": "user", "content": content}] if isinstance(content, str) else content
            given = ProgramInput(
                messages=[dict(turn) for turn in turns],
                columns=dict(prompt.columns),
                base_url=endpoint.url,
                api_key=key,
                model=MODEL,
                prompt_id=prompt.id,
                index=run.index,
            )
            self._live[key] = run
            run.start(self._config.function, given, self._loop, partial(self._submit, key, None))

    def _gather(self, endpoint: Endpoint) -> None:
        """Wait until every running program has a request. Raises what ends the call."""
        while not all(run.answers for run in self._live.values()):
            start = time.monotonic()
            with suppress(queue.Empty):
                key, request, answer = self._events.get(timeout=POLL)
                if request is None:
                    self._ended(self._live.pop(key))
                    self._start(endpoint)
                else:
                    self._receive(key, request, answer)
            heartbeat()
            raise_if_cancelled()
            passed = seconds_since(start)
            for run in self._live.values():
                run.silent = 0.0 if run.answers else run.silent + passed
            hung = [run for run in self._live.values() if run.silent > self._config.timeout]
            if hung:
                raise self._hung(next((run for run in hung if run.blocks), hung[0]))

    def _receive(self, key: str, request: ChatRequest, answer: PendingResponse) -> None:
        run = self._live.get(key)
        try:
            if run is None:
                raise RefusedRequest("api_key: it is of no running program", "invalid_api_key", 401)
            run.receive(request, answer)
        except RefusedRequest as error:
            if run is not None:
                run.refusal = str(error)
            answer.set_exception(error)

    def _sample(self, source: Engine) -> None:
        """Answer one request of each running program."""
        runs = sorted(self._live.values(), key=lambda run: run.session.name)
        if not runs:
            return
        made = sample_turns(
            source,
            [run.session.next_turn() for run in runs],
            [run.budget for run in runs],
            self._sampling,
            self._seed,
            runs[0].session.chat.tokenizer,
        )
        for run, completion in zip(runs, made, strict=True):
            response = run.session.add(completion)
            for answer in run.answers:
                answer.set_result(response)
            run.answers = []

    def _ended(self, run: _ProgramRun) -> None:
        """Take what a program returned. Raises KeelError for one that failed."""
        error, result = run.error, run.result
        run.refuse(RefusedRequest("the program has ended", "not_found", 404))
        if error is not None and not (run.session.full and _is_refusal(error)):
            line = without_secrets(one_line(error, named=True))
            if not self._config.skips or not run.session.response:
                raise KeelError(f"{self._name(run)} raised {line}") from error
            run.failed = line
        if not run.session.response:
            made = "made no request" if run.session.request is None else "waited for no answer"
            raise KeelError(f"{self._name(run)} {made}: send a request to base_url, and wait")
        if error is not None or result is None:
            return
        if isinstance(result, Mapping):
            run.columns = dict(result)
        elif isinstance(result, Real):
            run.columns = {"reward": float(result)}
        else:
            kind = type(result).__name__
            raise KeelError(
                f"{self._name(run)} returned a {kind}: return None, a number or a mapping"
            )

    def _hung(self, run: _ProgramRun) -> Hung:
        stack, last = run.stack(), ""
        if run.refusal:
            last = f"; its last one was refused: {run.refusal}"
        elif run.repeats:
            last = "; its last one repeats the one before, and gets the same answer"
        return Hung(
            f"{self._name(run)} makes no request within {self._config.timeout:g} s{last} (it is "
            f"{place(stack)}): fix it, or raise rollout.timeout",
            stack,
        )

    def _name(self, run: _ProgramRun) -> str:
        prompt = run.session.prompt.id
        return f"rollout.program {self._config.name!r} (prompt {prompt!r}, completion {run.index})"

    def _end(self) -> None:
        """End the programs that still run, after an error, and what waits for an answer."""
        runs = list(self._live.values())
        for run in runs:
            run.refuse(_stopped())
        self._closed = True
        self._drain()
        for run in runs:
            run.cancel()
        until = time.monotonic() + ENDING
        while not all(run.done for run in runs) and time.monotonic() < until:
            time.sleep(POLL / 10)

    def _drain(self) -> None:
        """Refuse the requests that nothing takes over any more."""
        with suppress(queue.Empty):
            while True:
                self._events.get_nowait()[2].set_exception(_stopped())


def _stopped() -> RefusedRequest:
    return RefusedRequest("the run has stopped", "not_found", 404)
