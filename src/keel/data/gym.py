"""Every reasoning-gym data set as a task, run in its own sandbox.

Three reasons: some of its scorers evaluate the answer as Python, and some of its data sets run code
that a model wrote; some of its generators depend on Python's hash seed, which only a new process
can fix; and its import takes seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.fields import unknown
from keel.data.tasks import Generated, Presentation, split_and_index
from keel.graders.formats import answer_part, tag_content
from keel.platform.extras import install_command
from keel.platform.process import Restarting
from keel.platform.sandbox import Resident
from keel.types import Completion, KeelError, Prompt, Split

PREFIX = "reasoning_gym:"
BLOCK = 2048
"""Items per data set of reasoning-gym (some build them all at once); a new seed for each block."""
START_SECONDS = 120.0
SCORE_SECONDS = 3.0
"""An answer that keeps its scorer computing longer is wrong, however busy the machine is."""
SCORE_PATIENCE = 30.0
"""The same by the clock, for an answer that waits."""
ADDRESSES_KEPT = 16_384
PACKAGE = "keel_gym"
WORKER = "gym_worker"


class GymProcess:
    """The process, started when first asked, ended and started again when it hangs.

    Calls from several threads take turns. It lives in the sandbox
    (`keel.platform.sandbox`), and forks a process for each answer that it scores.
    Raises KeelError if there is no sandbox.
    """

    def __init__(self) -> None:
        self.process = Restarting(_started)

    def ask(self, seconds: float, **request: Any) -> Any:
        """The reply to a request. Raises TimeoutError if none comes, GymError for a refusal."""
        reply = self.process.ask(seconds, request)
        if "error" in reply:
            raise GymError(reply["error"], reply["known"])
        return reply["ok"]


def _started() -> Resident:
    files = {f"{PACKAGE}/{WORKER}.py": Path(__file__).with_name(f"{WORKER}.py")}
    found = importlib.util.find_spec("reasoning_gym")
    assert found is not None
    assert found.origin is not None
    try:
        process = Resident(f"{PACKAGE}.{WORKER}", files, Path(found.origin).resolve().parents[1])
        # The import is not the request's.
        process.first(START_SECONDS, {"op": "names"})
    except KeelError as error:
        raise KeelError(
            f"tasks of reasoning-gym are made and scored in a sandbox only: {error}"
        ) from None
    return process


class GymError(Exception):
    """What reasoning-gym refused, and the options that it knows."""

    def __init__(self, message: str, known: list[str]) -> None:
        super().__init__(message)
        self.known = known


class GymTask(Generated):
    """The task `reasoning_gym:NAME`; its verdict is that of the data set's own scorer.

    A draw is an item of the block of the prompt's index. The answer is what stands in
    `<answer>…</answer>`, else the whole text. Raises KeelError for a wrong name or option.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        presentation: Presentation,
        options: Mapping[str, Any],
        process: GymProcess,
    ) -> None:
        super().__init__(name, seed, presentation)
        self.dataset = name.removeprefix(PREFIX)
        known = gym_names(process)
        if self.dataset not in known:
            raise KeelError(unknown("reasoning-gym data set", self.dataset, known))
        for fixed in ("seed", "size"):
            if fixed in options:
                raise KeelError(
                    f"task {name!r}: {fixed} is not an option: the recipe's seed decides"
                )
        self.options = dict(options)
        self.process = process
        self._addresses: dict[tuple[Split, int], dict[str, Any]] = {}

    def columns(self, rng: np.random.Generator, split: Split, index: int) -> dict[str, Any]:
        """The item's columns, `answer` and `metadata` among them; its address is kept."""
        block = np.random.SeedSequence([self.seed, index // BLOCK]).generate_state(1)[0]
        address = {
            "name": self.dataset,
            "options": self.options,
            "seed": int(block) >> 1,
            "size": BLOCK,
            "index": int(rng.integers(BLOCK)),
        }
        if len(self._addresses) >= ADDRESSES_KEPT:
            self._addresses.clear()
        self._addresses[split, index] = address
        try:
            item: dict[str, Any] = self.process.ask(START_SECONDS, op="item", **address)
        except TimeoutError:
            raise KeelError(
                f"task {self.name!r}: no item within {START_SECONDS:.0f} s: change its options"
            ) from None
        except GymError as error:
            raise self._refused(error) from None
        return {"prompt": item["question"], **item}

    def gold(self, prompt: Prompt) -> str | None:
        """The item's own answer, if it has one."""
        answer = prompt.columns["answer"]
        return None if answer is None else str(answer)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        """What the data set's scorer says; 0 if it fails or takes too long."""
        where = split_and_index(prompt)
        if where not in self._addresses:
            self.prompt(*where)
        stated = answer_part(completion.text, prompt.opening) or ""
        text = tag_content(stated, "answer")
        text = stated.strip() if text is None else text
        try:
            limits = {"cpu": SCORE_SECONDS, "patience": SCORE_PATIENCE}
            request = {"op": "score", "text": text, **limits, **self._addresses[where]}
            return float(self.process.ask(SCORE_PATIENCE + START_SECONDS, **request))
        except TimeoutError:
            return 0.0
        except GymError as error:
            raise self._refused(error) from None

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
    """Every data set with one line on it. Raises KeelError if reasoning-gym is absent."""
    if not gym_installed():
        raise KeelError(f"reasoning-gym is not installed: {install_command('tasks')}")
    names: dict[str, str] = process.ask(START_SECONDS, op="names")
    return names
