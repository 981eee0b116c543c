"""The address that a server of pages takes."""

from __future__ import annotations

import socket

import pytest

from keel.types import KeelError
from keel.view.server import listen

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
