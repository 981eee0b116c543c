"""A reward with TRL's signature: it gets only the arguments that it names."""

from __future__ import annotations

from typing import Any


def brevity(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the completion is no longer than the gold answer."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [float(len(text) <= len(gold)) for text, gold in zip(texts, answer, strict=True)]
