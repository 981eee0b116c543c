"""Pages in this process, without a browser: NiceGUI's simulated user."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

app = pytest.importorskip("nicegui").app
testing = pytest.importorskip("nicegui.testing")
SECONDS = 60.0
"""For which a test may use a page: the machine may be busy."""


def simulate(build: Callable[[], object], use: Callable[[Any], Awaitable[None]]) -> None:
    """Open the page that `build` builds, and let `use` do with its user what a test is about.

    No exception may be left to NiceGUI, which would print it.
    """
    errors: list[Exception] = []
    failed: list[Exception] = []

    async def whole() -> None:
        async with testing.user_simulation(build) as user:
            app.on_exception(errors.append)
            # Kept, since the simulation ends its timers only if no exception passes through it.
            try:
                async with asyncio.timeout(SECONDS):
                    await user.open("/")
                    await use(user)
            except Exception as error:
                failed.append(error)

    asyncio.run(whole())
    if failed:
        raise failed[0]
    assert errors == []


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds, at most as long as the whole test may take."""
    while not condition():
        await asyncio.sleep(0.01)


def marked(user: Any, name: str) -> list[Any]:
    """The elements that have the name as their test id, in the order of the page."""
    elements = user.client.elements.values()
    return [one for one in elements if one.props.get("data-testid") == name and one.visible]


def trigger(user: Any, event: str, key: str, name: str) -> None:
    """Cause an event of the element whose property `key` is `name`."""
    found = {one for one in user.client.elements.values() if one.props.get(key) == name}
    testing.UserInteraction(user, found, None).trigger(event)
