"""A task that a user wrote: its exceptions are reported as its own."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any, cast

from keel.data.tasks.base import BaseTask
from keel.types import Completion, KeelError, Prompt, Split, one_line


class UserTask(BaseTask):
    """Hands every question on to the user's object; the defaults hold for what it lacks.

    If it is given another `name`, the ids of its prompts get it too.
    """

    def __init__(self, name: str, inner: Any) -> None:
        self.entry = name
        self.inner = inner
        self.name = self.own_name = str(getattr(inner, "name", name))
        self.correctness = bool(getattr(inner, "correctness", False))

    def size(self, split: Split) -> int | None:
        return cast("int | None", self._ask("size", split))

    def prompt(self, split: Split, index: int) -> Prompt:
        made = self._ask("prompt", split, index)
        if not isinstance(made, Prompt):
            raise KeelError(
                f"task {self.entry!r}: prompt({split!r}, {index}) returned a "
                f"{type(made).__name__}: return a keel.types.Prompt(id, content, columns, task)"
            )
        if self.name == self.own_name:
            return made
        rest = made.id.removeprefix(self.own_name)
        return replace(made, id=self.name + rest, task=self.name)

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        return cast("float | None", self._ask("score", prompt, completion))

    def gold(self, prompt: Prompt) -> str | None:
        return cast("str | None", self._ask("gold", prompt))

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return cast("str | None", self._ask("reply", prompt, text))

    def _ask(self, what: str, *arguments: Any) -> Any:
        method = getattr(self.inner, what, None)
        if method is None:
            return None
        try:
            return method(*arguments)
        except KeelError:
            raise
        except Exception as error:
            message = one_line(error, named=True)
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise KeelError(
                f"task {self.entry!r}: {what} raised {message} ({at.filename}:{at.lineno})"
            ) from error
