"""A reward model in a process of its own: `python -m keel.rewards.model_process`."""

from __future__ import annotations

from typing import Any

from keel.rewards.model_scorer import Here, Spec
from keel.sandbox.worker import serve
from keel.types import KeelError


class Server:
    """Loads the model with the first item and keeps it."""

    def __init__(self) -> None:
        self.model: Here | None = None

    def __call__(self, item: Any) -> dict[str, Any]:
        """What the model says of an item's rows, or the line that says what is wrong."""
        try:
            if self.model is None:
                self.model = Here(Spec(**item["spec"]))
            prompts, completions = zip(*item["rows"], strict=True)
            return {"scores": self.model.judge(prompts, completions)}
        except KeelError as error:
            return {"error": str(error)}


if __name__ == "__main__":
    serve(Server())
