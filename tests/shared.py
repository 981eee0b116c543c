"""Where tests find the outside numbers and the real data that the project does not carry."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")


def _needs(package: str, program: str | None) -> pytest.MarkDecorator:
    """Skips where a program is absent; with `KEEL_REQUIRE_SHARED` the test runs, and fails."""
    return pytest.mark.skipif(
        program is None and not os.environ.get("KEEL_REQUIRE_SHARED"),
        reason=f"{package} is not installed: apt install {package}",
    )


needs_bubblewrap = _needs("bubblewrap", shutil.which("bwrap"))
needs_chromium = _needs("chromium", CHROMIUM)


def shared_path(relative: str) -> Path:
    """A file of the shared folder (`KEEL_SHARED`, else `../shared`).

    The test skips where it is absent, or fails if `KEEL_REQUIRE_SHARED` is set.
    """
    folder = Path(os.environ.get("KEEL_SHARED") or ROOT.parent / "shared")
    path = folder / relative
    if not path.exists():
        reason = f"{relative} is not there: set KEEL_SHARED to the folder that holds it"
        if os.environ.get("KEEL_REQUIRE_SHARED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def oracle_cases() -> Path:
    """The outside numbers: the file that `KEEL_ORACLES` names, else the shared one."""
    named = os.environ.get("KEEL_ORACLES")
    return Path(named) if named else shared_path("oracles/cases.json")
