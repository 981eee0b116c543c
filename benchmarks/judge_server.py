"""A chat completion server that takes its time: `python benchmarks/judge_server.py SECONDS`.

It prints its port, and serves on loopback until its standard input ends.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Verdicts(BaseHTTPRequestHandler):
    """Answers a chat completion after a while: a score by the length of the question's text."""

    protocol_version = "HTTP/1.1"
    # Else the body waits for the acknowledgement of the headers, 40 ms.
    disable_nagle_algorithm = True
    latency = 0.05

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def do_POST(self) -> None:
        """The one request there is."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.latency)
        reported = json.loads(body["messages"][-1]["content"])["answer"]
        text = json.dumps({"reason": "by length", "score": len(reported) % 10 + 1})
        message = {"role": "assistant", "content": text}
        printed: dict[str, Any] = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
        }
        sent = json.dumps(printed).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)


def serve(latency: float) -> None:
    """Serve on loopback until standard input ends; the port comes first."""
    Verdicts.latency = latency
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer(("127.0.0.1", 0), Verdicts)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    serve(float(sys.argv[1]))
