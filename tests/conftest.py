"""One thread in every test, so that no figure depends on how many cores are free."""

from __future__ import annotations

import base64
import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, BinaryIO

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from matplotlib.figure import Figure

torch.set_num_threads(1)
# Hundreds of test modules, and what their processes import, are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
gc.disable()  # until all is imported: little of that is garbage, and all of it is searched

RENDERED = ("analysis", "control", "durability", "view", "workflows", "test_twice.py")
"""Folders and files whose tests get plots as users do."""
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `quick(*ids)`, the parameters that are not named are slow. Files with slow
    tests come first: at the end no worker waits for one."""
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick is not None and item.callspec.id not in quick.args:  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason for which tests were skipped: what to install, or to set."""
    skipped = terminalreporter.stats.get("skipped", [])
    for reason, count in Counter(report.longrepr[2] for report in skipped).most_common():
        terminalreporter.line(f"{count} tests: {reason}")


@pytest.fixture(scope="module", autouse=True)
def unrendered_plots(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plots are drawn but saved as one pixel: rendering takes longer than a small run itself."""

    def save(figure: Figure, file: BinaryIO, **_: Any) -> None:
        file.write(PIXEL)

    with pytest.MonkeyPatch.context() as patched:
        if not set(RENDERED) & set(request.path.parts):
            patched.setattr(Figure, "savefig", save)
        yield
