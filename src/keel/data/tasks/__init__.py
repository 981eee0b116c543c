"""Tasks: prompts with their references, and how answers are scored."""

from keel.data.tasks.build import build_task, build_tasks, catalogue, stored
from keel.data.tasks.mixture import PromptStream, validation_prompts

__all__ = ["PromptStream", "build_task", "build_tasks", "catalogue", "stored", "validation_prompts"]
