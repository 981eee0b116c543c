"""The time that chat templates are given (`strftime_now`): within a run that of its first start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from transformers.utils import chat_template_utils

from keel.runs.layout import RunFolder
from keel.runs.reader import read_run_json
from keel.runs.writer import update_run_json

KEY = "template_time"
"""The key of run.json."""
_CLOCK: Any = chat_template_utils
"""The module whose clock transformers renders with: it passes no functions to a template."""


@contextmanager
def templates_at(
    time: str | None = None, run: RunFolder | None = None, *, record: bool = False
) -> Iterator[None]:
    """Chat templates that are rendered in the block are given this time (ISO 8601), or the one of a
    run, which with `record` begins when a template first asks for it; else the present one."""
    before = _CLOCK.datetime

    def now() -> datetime:
        nonlocal time
        if time is None and run is not None:
            time = read_run_json(run).get(KEY)
            if time is None and record:
                time = before.now().isoformat(timespec="seconds")
                update_run_json(run, {KEY: time})
        found: datetime = before.now() if time is None else datetime.fromisoformat(time)
        return found

    _CLOCK.datetime = SimpleNamespace(now=now)
    try:
        yield
    finally:
        _CLOCK.datetime = before


def time_read_by(template: Any) -> str | None:
    """The time that a chat template is given now; None for one that does not ask for it."""
    return _CLOCK.datetime.now().isoformat() if "strftime_now" in str(template) else None
