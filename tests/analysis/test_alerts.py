"""Alerts of a run: sent once to a real command and a real webhook, and never in its way."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.analysis import alerts
from keel.analysis.alerts import AlertSender, check_alerts
from keel.config.load import load_recipe
from keel.config.model import Alerts
from keel.runs.callbacks import RunControl, RunState
from keel.runs.reader import load
from keel.types import KeelError
from tests.analysis.test_diagnosis_monitor import train

URL_IN = "KEEL_TEST_HOOK"
APPEND = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"


class Hook(HTTPServer):
    """A webhook that keeps what is posted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Posted)
        self.got: list[dict[str, Any]] = []
        self.status = 200


class Posted(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append({"path": self.path, **json.loads(body)})
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    with Hook() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        monkeypatch.setenv(URL_IN, f"http://127.0.0.1:{server.server_port}/secret-path")
        yield server
        server.shutdown()
        thread.join()


class StopAt(keel.Callback):
    def on_step(self, state: keel.RunState) -> None:
        if state.step == 30:
            state.control.stop("enough")


@pytest.mark.slow
def test_alerts_reach_command_and_webhook_once(hook: Hook, tmp_path: Path) -> None:
    kept, folder = tmp_path / "alerts.jsonl", tmp_path / "run"
    command = [sys.executable, "-c", APPEND, str(kept)]
    wanted = {"command": command, "webhook_env": URL_IN}
    train(folder, alerts=wanted, callbacks=[StopAt()])
    train(folder, alerts=wanted, resume=True)  # from step 30, after the diagnosis
    got = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [one["event"] for one in got] == ["diagnosis", "stopped", "finished"]
    assert [{"path": "/secret-path", **one} for one in got] == hook.got
    first = got[0]
    (event,) = [one for one in load(folder).events() if one["event"] == "diagnosis"]
    assert (first["diagnosis"], first["stage"], first["step"], first["run"]) == (
        *("saturated-reward", "rl", event["last_step"], str(folder)),
    )
    assert (first["text"], first["evidence"]) == (event["text"], event["evidence"])
    assert first["hint"].startswith(f"change {event['changes'][0]['key']}: ")
    assert [one["step"] for one in got[1:]] == [30, 36]
    content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"secret-path" not in content


def sender(folder: Path, warn: Any = lambda *_, **__: None, **keys: Any) -> AlertSender:
    """One that has sent a diagnosis."""
    made = AlertSender(Alerts.model_validate({"webhook_env": URL_IN, **keys}), folder)
    found = {"condition": "truncation", "stage": "rl", "last_step": 5, "severity": "warning"}
    found |= {"title": "cut", "evidence": ("half of them",), "changes": ()}
    made.attach(warn)("half are cut", "diagnosis", **found)
    return made


@pytest.mark.parametrize("on", [["finished"], ["truncation", "failed"]])
def test_alerts_are_those_named(hook: Hook, tmp_path: Path, on: list[str]) -> None:
    with sender(tmp_path, on=on).at_end(lambda: True):
        pass
    assert [one.get("diagnosis", one["event"]) for one in hook.got] == on[:1]


def test_alert_of_a_run_that_fails(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEL_TEST_TOKEN", "a-very-secret-token")
    made = sender(tmp_path, on=["failed"])
    with pytest.raises(KeyError), made.at_end(lambda: False):
        raise KeyError("a-very-secret-token")
    (alert,) = hook.got
    assert (alert["event"], alert["error"]) == ("failed", "KeyError: '$KEEL_TEST_TOKEN'")
    assert alert["text"] == f"{tmp_path.name} failed: {alert['error']}"


def test_alert_that_fails_or_hangs_stops_nothing(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alerts, "SECONDS", 1.0)
    hook.status = 500
    noted: list[str] = []
    start = time.monotonic()
    warn = lambda text, kind, **_: noted.append(f"{kind}: {text}")  # noqa: E731
    made = sender(tmp_path, warn, command=["sleep", "60"], on=["truncation"])
    assert time.monotonic() - start < 0.5
    with made.at_end(lambda: True):
        time.sleep(1.5)
        made.on_record(RunState(tmp_path, "rl", "rl", 6, 9, RunControl(print)))
    assert noted[0] == "diagnosis: half are cut"
    assert noted[1].startswith("alert_failed: an alert was not sent: alerts.command (sleep): ")
    assert noted[2].endswith(f"alerts.webhook_env ({URL_IN}): it answers 500")
    assert "secret-path" not in " ".join(noted)
    with sender(tmp_path, command=["no-such-program"]).at_end(lambda: True):
        pass
    assert "alerts.command (no-such-program): " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (Alerts(command=("true",), on=("finish",)), "unknown alert 'finish': did you mean"),
        (Alerts(webhook_env="KEEL_NO_HOOK"), "no environment variable KEEL_NO_HOOK"),
    ],
)
def test_wrong_alerts_are_refused(wanted: Alerts, why: str) -> None:
    with pytest.raises(KeelError, match=why):
        check_alerts(wanted)


def test_url_of_a_webhook_is_refused_unseen() -> None:
    with pytest.raises(KeelError, match="wants the NAME of an environment variable") as caught:
        load_recipe("tiny", ["alerts.webhook_env=https://hooks.example/secret-path"])
    assert "secret-path" not in str(caught.value)
