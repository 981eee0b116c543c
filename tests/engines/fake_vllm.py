"""A server with the routes of vLLM's that Keel uses, which fails as VLLM_FAKE says; no model.

`write` makes a program that stands for the Python with vLLM. VLLM_FAKE is JSON: `fails`, paths that
get HTTP 500; `hangs`, how many of the first servers never complete; `fails_first`, how many of them
get HTTP 500 for completions; `seconds` of a completion.
"""

from __future__ import annotations

import sys
from pathlib import Path

SOURCE = """#!{python}
import json, os, sys, time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

fake = json.loads(os.environ["VLLM_FAKE"])
starts = Path(__file__).with_name("starts")
number = len(starts.read_text()) if starts.exists() else 0
with starts.open("a") as file:
    file.write("x")
choice = dict(token_ids=[5, 1], logprobs=dict(token_logprobs=[-1, -1]), finish_reason="stop")


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(dict(data=[dict(id="policy")]))

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        completes = self.path == "/v1/completions"
        if completes and number < fake.get("hangs", 0):
            time.sleep(600)
        if self.path in fake.get("fails", ()) or completes and number < fake.get("fails_first", 0):
            self.send_error(500, "broken")
            return
        time.sleep(fake.get("seconds", 0) if completes else 0)
        self.reply(dict(choices=[choice]))

    def log_message(self, *_):  # a Unix socket's clients have no address
        pass

    def reply(self, body):
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 256


Server(sys.argv[sys.argv.index("--uds") + 1], Handler).serve_forever()
"""


def write(folder: Path) -> Path:
    """The program, which counts its starts in a file `starts` of the folder."""
    path = folder / "fake-vllm"
    path.write_text(SOURCE.replace("{python}", sys.executable))
    path.chmod(0o700)
    return path


def starts(program: Path) -> int:
    """How often it was started."""
    return len(program.with_name("starts").read_text())
