"""Where prompts come from, and what an answer is worth."""

from keel.tasks.build import build_task, build_tasks, catalogue, stored
from keel.tasks.mixture import PromptStream, heldout

__all__ = ["PromptStream", "build_task", "build_tasks", "catalogue", "heldout", "stored"]
