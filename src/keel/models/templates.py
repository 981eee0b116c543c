"""A bound on what a chat template may compute: it comes with a model, and may loop.

transformers renders templates in a sandbox that keeps them from files and attributes, not from
nested loops that run for hours. Counting the lines that a template executes bounds it the same way
on every machine, which a clock would not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from transformers import PreTrainedTokenizerBase

from keel.types import KeelError

MAX_LINES = 2_000_000
"""Lines of compiled template that one conversation may take: some 50 are usual for a message."""


class TemplateTooLong(RuntimeError):
    """A chat template executed more than `MAX_LINES` lines for one conversation."""


@contextmanager
def bounded_template() -> Iterator[None]:
    """Raise `TemplateTooLong` within a template rendered in this block once it passes the bound."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        if lines > MAX_LINES:
            raise TemplateTooLong(f"it executes more than {MAX_LINES:,} lines: does it loop?")
        return count

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return count if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


def check_template_names(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse named chat templates that could not be saved as files. Raises KeelError."""
    templates = tokenizer.chat_template
    for template in templates if isinstance(templates, dict) else ():
        if not str(template).replace("-", "_").isidentifier():
            raise KeelError(
                f"model {name!r} has a chat template named {template!r}, which is no file name: "
                "rename it in tokenizer_config.json to letters, digits, - and _"
            )
