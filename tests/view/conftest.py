"""One browser for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.view.chromium import launch, sync_api

    with sync_api.sync_playwright() as playwright:
        launched = launch(playwright)
        yield launched
        launched.close()
