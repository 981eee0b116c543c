"""One browser for the tests of a module, and a page of the module's own server."""

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


@pytest.fixture
def page(browser: Any, served: Any) -> Iterator[Any]:
    """A page that may reach its server alone, and must log no error."""
    from tests.view.chromium import tab

    with tab(browser, served.url) as opened:
        yield opened
