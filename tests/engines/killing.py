"""A reward of a vLLM run that kills the run's server while it samples, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.platform.processes import Process, children

KILL_AT = "KEEL_TEST_KILL_AT"
"""Variable with the step in which the server is killed; without it nothing is."""
DONE = "KEEL_TEST_KILLED"
"""Variable with the path of a file that is written when it was killed."""


def right(
    *, completions: Sequence[str], answer: Sequence[str], trainer_state: Any, **_: Any
) -> list[float]:
    """Whether answers are right. Called while the server samples the last groups of a step."""
    step, done = os.environ.get(KILL_AT), Path(os.environ.get(DONE, ""))
    if step == str(trainer_state.global_step) and not done.is_file():
        done.write_text(str(kill_server()))
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def kill_server() -> int:
    """Kill the vLLM server that this process started, and return its number."""
    for child in children():
        if "vllm.entrypoints" in Process(child, 0).command:
            os.kill(child, signal.SIGKILL)
            return child
    raise AssertionError("this process has no server")
