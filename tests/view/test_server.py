"""The address that a server of pages takes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from keel.types import KeelError
from keel.view.server import MAX_UNOPENED, forget_unopened, listen
from tests.runs.example import one_stage


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


WAITS = """
import sys
from nicegui import ui
from keel.cli.main import main

serve = ui.run
def run(**options):
    print(options["port"], flush=True)
    input()
    serve(**options)

ui.run = run
sys.exit(main(sys.argv[1:]))
"""
"""A command that has its port, and serves once a line is written to it."""


@contextmanager
def view(program: Sequence[str], folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`keel view` in a process of its own."""
    command = [sys.executable, *program, "view", str(folder), "--no-browser", *options]
    # NiceGUI serves its own tests differently.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_servers_that_start_at_once_have_an_address_each(tmp_path: Path) -> None:
    one_stage(tmp_path)
    with ExitStack() as stack:
        servers = [stack.enter_context(view(["-c", WAITS], tmp_path / "run")) for _ in range(2)]
        ports = [read(server).strip() for server in servers]
        assert ports[0] != ports[1]
        for server, port in zip(servers, ports, strict=True):
            assert server.stdin is not None
            print(file=server.stdin, flush=True)
            address = f"http://127.0.0.1:{port}"
            assert read(server) == f"keel view: {address}/curves (Ctrl-C stops it)\n"
            with urlopen(f"{address}/objective", timeout=60) as answer:
                assert answer.status == 200
        options = ("--port", ports[0])
        third = stack.enter_context(view(["-m", "keel"], tmp_path / "run", *options))
        out, err = third.communicate(timeout=60)
        assert (third.returncode, out) == (2, "")
        assert err.startswith(f"keel: error: cannot serve on 127.0.0.1:{ports[0]}: ")
        assert err.count("\n") == 1


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
