"""Every reasoning-gym data set as a task, run in a sandbox of its own.

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
from keel.data.tasks.base import BaseTask, Presentation, prompt_id, split_and_index, split_of
from keel.data.tasks.generated import ATTEMPTS, no_draw
from keel.graders.formats import tag_content
from keel.graders.stated import answer_part
from keel.platform.process import Restarting
from keel.platform.sandbox.bubblewrap import Resident
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
MODULES = ("gym_worker", "gym_expression")


class GymProcess:
    """The process, started when first asked, ended and started again when it hangs.

    Calls from several threads take turns. It lives in the sandbox
    (`keel.platform.sandbox.bubblewrap`), and forks a process for each answer that it scores.
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
    files = {f"{PACKAGE}/{name}.py": Path(__file__).with_name(f"{name}.py") for name in MODULES}
    found = importlib.util.find_spec("reasoning_gym")
    assert found is not None
    assert found.origin is not None
    try:
        process = Resident(f"{PACKAGE}.gym_worker", files, Path(found.origin).resolve().parents[1])
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


class GymTask(BaseTask):
    """One data set of reasoning-gym; endless, its verdict that of its own scorer.

    The prompt at (seed, split, index) is the first of the items drawn by
    `SeedSequence([seed, split, index, attempt])` from the block of `index` whose question the hash
    puts on that split. The answer is what stands in `<answer>…</answer>`, else the whole text.
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
        self._addresses: dict[tuple[Split, int], dict[str, Any]] = {}

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at an index; the item's `answer` and `metadata` are among its columns."""
        for attempt in range(ATTEMPTS):
            address = self._address(split, index, attempt)
            item = self._item(address)
            if split_of(item["question"]) == split:
                if len(self._addresses) >= ADDRESSES_KEPT:
                    self._addresses.clear()
                self._addresses[split, index] = address
                columns = {"prompt": item["question"], **item}
                body = self.presentation.body(columns, self.name)
                content = self.presentation.frame(body, self.name)
                return Prompt(prompt_id(self.name, split, index), content, columns, self.name)
        raise no_draw(self.name, split, ATTEMPTS)

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

    def _address(self, split: Split, index: int, attempt: int) -> dict[str, Any]:
        block = np.random.SeedSequence([self.seed, index // BLOCK]).generate_state(1)[0]
        key = [self.seed, int(split == "validation"), index, attempt]
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
    """Every data set with one line on it. Raises KeelError if reasoning-gym is absent."""
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
