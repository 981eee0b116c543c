"""Every reasoning-gym data set as a task, run in a process of its own.

Three reasons for the process: some of its scorers evaluate the answer as Python, so that an answer
such as `9**9**9**9` hangs whoever runs them beyond the reach of a thread; some of its generators
depend on Python's hash seed, which only a new process can fix; and its import takes seconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.suggest import unknown
from keel.tasks.base import BaseTask, Presentation, side_and_index, side_of
from keel.tasks.generated import ATTEMPTS, no_draw
from keel.types import Completion, KeelError, Prompt, Side
from keel.verify.formats import tag_content
from keel.verify.lifeline import Lifeline

PREFIX = "reasoning_gym:"
BLOCK = 2048
"""Items per data set of reasoning-gym (some build them all at once); a new seed for each block."""
START_SECONDS = 120.0
SCORE_SECONDS = 3.0
"""An answer that keeps its scorer computing longer is wrong, however busy the machine is."""
SCORE_PATIENCE = 30.0
"""The same by the clock, for systems that do not limit computing time."""
ADDRESSES_KEPT = 16_384
PASSED_ON = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that the process sees: no tokens or keys, since it runs answers."""


class GymProcess:
    """The process, started when first asked, ended and started anew when it hangs.

    Calls from several threads take turns. What a scorer or an answer starts in it is of its group
    and ends with it; all of it ends with this process, however that ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._end_of_it: Callable[[], object] = lambda: None
        self._replies: queue.Queue[str] = queue.Queue()

    def ask(self, seconds: float, **request: Any) -> Any:
        """The reply to a request. Raises TimeoutError where none comes, GymError for a refusal."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
                try:  # the import is not the request's
                    self._exchange(START_SECONDS, {"op": "names"})
                except TimeoutError:
                    raise KeelError(
                        "the reasoning-gym process does not start: try "
                        "python -c 'import reasoning_gym', or leave its tasks out"
                    ) from None
            reply = self._exchange(seconds, request)
        if "error" in reply:
            raise GymError(reply["error"], reply["known"])
        return reply["ok"]

    def _exchange(self, seconds: float, request: Mapping[str, Any]) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=seconds)
        except (queue.Empty, BrokenPipeError):
            line = ""
        except BaseException:
            self._end()  # interrupted in between: the reply would answer the next request
            raise
        if not line:
            self._end()
            raise TimeoutError
        return json.loads(line)

    def _start(self) -> None:
        environment = {k: v for k in PASSED_ON if (v := os.environ.get(k)) is not None}
        # One thread: the pools of numerical libraries reserve memory and are of no use here.
        environment |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._end()  # one that died by itself may have left others of its group
        lifeline = Lifeline()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("gym_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            pass_fds=(lifeline.inner,),
            start_new_session=True,  # Ctrl-C is for the run, which ends this process itself
        )
        # Before it is asked anything: until then it ends with its standard input.
        lifeline.tie(self._process.pid)
        lifeline.give()
        self._replies = queue.Queue()
        threading.Thread(
            target=_read, args=(self._process, self._replies), name="gym-replies", daemon=True
        ).start()
        self._end_of_it = weakref.finalize(self, _stop, self._process, lifeline)

    def _end(self) -> None:
        self._end_of_it()
        self._process = None


class GymError(Exception):
    """What reasoning-gym refused, and the options that it knows."""

    def __init__(self, message: str, known: list[str]) -> None:
        super().__init__(message)
        self.known = known


def _read(process: subprocess.Popen[str], replies: queue.Queue[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        replies.put(line)
    replies.put("")  # the process has ended


def _stop(process: subprocess.Popen[str], lifeline: Lifeline) -> None:
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    lifeline.cut()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


class GymTask(BaseTask):
    """One data set of reasoning-gym; endless, its verdict that of its own scorer.

    The prompt at (seed, side, index) is the first of the items drawn by
    `SeedSequence([seed, side, index, attempt])` from the block of `index` whose question the hash
    puts on that side. The answer is what stands in `<answer>…</answer>`, else the whole text.
    """

    correctness = True

    def __init__(
        self,
        name: str,
        seed: int,
        presentation: Presentation,
        options: Mapping[str, Any],
        process: GymProcess,
    ) -> None:
        self.name = name
        self.seed = seed
        self.presentation = presentation
        self.dataset = name.removeprefix(PREFIX)
        self.options = dict(options)
        self.process = process
        self._addresses: dict[tuple[Side, int], dict[str, Any]] = {}

    def prompt(self, side: Side, index: int) -> Prompt:
        """The prompt at an index; the item's `answer` and `metadata` are among its columns."""
        for attempt in range(ATTEMPTS):
            address = self._address(side, index, attempt)
            item = self._item(address)
            if side_of(item["question"]) == side:
                if len(self._addresses) >= ADDRESSES_KEPT:
                    self._addresses.clear()
                self._addresses[side, index] = address
                columns = {"prompt": item["question"], **item}
                body = self.presentation.body(columns, self.name)
                content = self.presentation.frame(body, self.name)
                return Prompt(f"{self.name}/{side}/{index}", content, columns, self.name)
        raise no_draw(self.name, side, ATTEMPTS)

    def gold(self, prompt: Prompt) -> str | None:
        """The item's own answer, where it has one."""
        answer = prompt.columns["answer"]
        return None if answer is None else str(answer)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """What the data set's scorer says; 0 where it fails or takes too long."""
        where = side_and_index(prompt)
        if where not in self._addresses:
            self.prompt(*where)
        text = tag_content(completion.text, "answer")
        text = completion.text.strip() if text is None else text
        try:
            request = {"op": "score", "text": text, "cpu": SCORE_SECONDS, **self._addresses[where]}
            return float(self.process.ask(SCORE_PATIENCE, **request))
        except TimeoutError:
            return 0.0
        except GymError as error:
            raise self._refused(error) from None

    def _address(self, side: Side, index: int, attempt: int) -> dict[str, Any]:
        block = np.random.SeedSequence([self.seed, index // BLOCK]).generate_state(1)[0]
        key = [self.seed, int(side == "heldout"), index, attempt]
        draw = np.random.default_rng(np.random.SeedSequence(key)).integers(BLOCK)
        return {
            "name": self.dataset,
            "options": self.options,
            "seed": int(block) >> 1,
            "size": BLOCK,
            "index": int(draw),
        }

    def _item(self, address: Mapping[str, Any]) -> dict[str, Any]:
        try:
            item: dict[str, Any] = self.process.ask(START_SECONDS, op="item", **address)
        except TimeoutError:
            raise KeelError(
                f"task {self.name!r}: no item within {START_SECONDS:.0f} s: change its options"
            ) from None
        except GymError as error:
            raise self._refused(error) from None
        return item

    def _refused(self, error: GymError) -> KeelError:
        for option in self.options:
            if error.known and option not in error.known:
                return KeelError(f"task {self.name!r}: {unknown('option', option, error.known)}")
        known = f" (options: {', '.join(error.known)})" if error.known else ""
        return KeelError(f"task {self.name!r}: reasoning-gym refuses it: {error}{known}")


def gym_installed() -> bool:
    """Whether reasoning-gym is there, without importing it."""
    return importlib.util.find_spec("reasoning_gym") is not None


def gym_names(process: GymProcess) -> dict[str, str]:
    """Every data set with one line on it. Raises KeelError where reasoning-gym is absent."""
    if not gym_installed():
        raise KeelError("reasoning-gym is not installed: pip install 'keel-rl[tasks]'")
    names: dict[str, str] = process.ask(START_SECONDS, op="names")
    return names


def gym_task(
    name: str,
    seed: int,
    presentation: Presentation,
    options: Mapping[str, Any],
    process: GymProcess,
) -> GymTask:
    """The task `reasoning_gym:NAME`. Raises KeelError for a wrong name or option."""
    known = gym_names(process)
    dataset = name.removeprefix(PREFIX)
    if dataset not in known:
        raise KeelError(unknown("reasoning-gym data set", dataset, known))
    for fixed in ("seed", "size"):
        if fixed in options:
            raise KeelError(f"task {name!r}: {fixed} is not an option: the recipe's seed decides")
    return GymTask(name, seed, presentation, options, process)
