"""The address that a server of pages takes."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from keel.types import KeelError
from keel.view.server import MAX_UNOPENED, forget_unopened, listen

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)]
)
def test_port_that_listens_is_taken(host: str, family: int) -> None:
    with listen(host, None) as first, listen(host, None) as second:
        assert first.family == second.family == family
        ports = [taken.getsockname()[1] for taken in (first, second)]
        assert ports[0] != ports[1]
        for port in ports:
            with pytest.raises(KeelError, match=f"cannot serve on {host}:{port}: Address already"):
                listen(host, port)
    with listen(host, ports[1]) as again:  # a server that ended leaves its port free
        assert again.getsockname()[1] == ports[1]


def test_pages_without_a_browser_are_bounded() -> None:
    simulated = pytest.importorskip("tests.view.simulated")
    from nicegui import Client, ui

    async def use(user: Any) -> None:
        for _ in range(MAX_UNOPENED + 9):
            assert (await user.http_client.get("/")).status_code == 200
        unopened = [one for one in Client.instances.values() if not one.has_socket_connection]
        assert len(unopened) == MAX_UNOPENED + 9
        forget_unopened()
        left = set(Client.instances.values())
        assert left == {*unopened[9:], user.client}

    simulated.simulate(lambda: ui.label("a page"), use)
