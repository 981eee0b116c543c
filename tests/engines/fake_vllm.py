"""A server with the routes of vLLM's that Keel uses, with answers that a test chooses; no model.

`serving` runs one in this process, and `write` makes a program that stands for the Python with
vLLM. Its n-th start answers as the n-th entry of VLLM_FAKE says (JSON; the last one stays).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer, ThreadingUnixStreamServer
from typing import Any

Replies = Mapping[str, tuple[int, object, float]]
"""Status, body and seconds of delay, by path."""
CHOICE = {"token_ids": [5, 1], "logprobs": {"token_logprobs": [-1, -1]}, "finish_reason": "stop"}
USUAL: Replies = {
    "/v1/models": (200, {"data": [{"id": "policy"}]}, 0.0),
    "/v1/completions": (200, {"choices": [CHOICE]}, 0.0),
}
HANGS = (200, None, 600.0)


class Handler(BaseHTTPRequestHandler):
    replies: Replies
    record: Path | None = None
    """A file that gets the path of each POST as a line."""

    def do_GET(self) -> None:
        status, body, seconds = self.replies.get(self.path, (200, None, 0.0))
        time.sleep(seconds)
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.record is not None:
            with self.record.open("a") as text:
                text.write(f"{self.path}{_sent(self.path, body)}\n")
        self.do_GET()

    def log_message(self, *_: object) -> None:  # a Unix socket's clients have no address
        pass


def _sent(path: str, body: bytes) -> str:
    """The number of tensors in an update's safetensors file, as text."""
    if path != "/update_weights":
        return ""
    with Path(json.loads(body)["update_info"]["path"]).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        names = json.loads(file.read(size))
    return f" {len(names.keys() - {'__metadata__'})}"


class UnixServer(ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 256


@contextmanager
def serving(replies: Replies, socket: str | None = None) -> Iterator[str]:
    """The address of a server, by TCP or at a path."""
    handler = type("Answering", (Handler,), {"replies": {**USUAL, **replies}})
    server: BaseServer
    if socket is None:
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    else:
        server = UnixServer(socket, handler)
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        address: Any = server.server_address  # type: ignore[attr-defined]
        yield f"http://127.0.0.1:{address[1]}" if socket is None else f"unix:{socket}"
        server.shutdown()
        thread.join()


def main(program: str) -> None:
    """What the program does."""
    file = Path(program).with_name("starts")
    with file.open("a") as text:
        text.write("x")
    answers = json.loads(os.environ["VLLM_FAKE"])
    Handler.record = Path(program).with_name("requests")
    Handler.replies = {**USUAL, **answers[min(starts(Path(program)), len(answers)) - 1]}
    UnixServer(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()


def write(folder: Path) -> Path:
    """The program, which counts its starts in a file `starts` of the folder."""
    path, root = folder / "fake-vllm", Path(__file__).parents[2]
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path[:0] = [{str(root)!r}]\n"
        "from tests.engines.fake_vllm import main\nmain(__file__)\n"
    )
    path.chmod(0o700)
    return path


def starts(program: Path) -> int:
    """How often it was started."""
    return len(program.with_name("starts").read_text())


def requests(program: Path) -> list[str]:
    """What it was sent to do, in order: paths, and for weights the number of tensors."""
    return program.with_name("requests").read_text().splitlines()
