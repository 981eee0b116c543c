"""Tells a command or a webhook what was diagnosed in a run and how the run ended. Torch-free.

Each alert is JSON: `text` (one line of it all, which chat services show), `run` (its folder),
`event` ("diagnosis", "finished", "stopped" or "failed"), `stage` and `step`; of a diagnosis also
`diagnosis` (its id), `severity`, `title`, `evidence` and `hint` (the first key to change); of a
failure `error`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from keel.analysis.diagnosis.table import conditions
from keel.config.fields import unknown
from keel.config.model import Alerts
from keel.config.secrets import without_secrets
from keel.platform.http import exchange_json
from keel.platform.process import output_of
from keel.platform.signals import Interrupted
from keel.runs.callbacks import Callback, RunState
from keel.types import KeelError, one_line

ENDS = ("finished", "stopped", "failed")
SECONDS = 10.0
"""That a command or a webhook may take."""


def check_alerts(wanted: Alerts) -> None:
    """Raise KeelError for a name that is not one of an alert, and if the webhook's variable is not
    set. Nothing is sent."""
    names = (*ENDS, *(one.id for one in conditions()))
    for name in () if wanted.on == "all" else wanted.on:
        if name not in names:
            raise KeelError(f"alerts.on: {unknown('alert', name, names)}", key="alerts.on")
    if wanted.webhook_env is not None and not os.environ.get(wanted.webhook_env):
        raise KeelError(
            f"alerts.webhook_env: there is no environment variable {wanted.webhook_env}: set it to "
            "the webhook's URL",
            key="alerts.webhook_env",
        )


class AlertSender(Callback):
    """Sends the alerts of a run, each in a thread of its own, so that the run waits for none.

    What could not be sent is a note of the run, written after its next step.
    """

    def __init__(self, wanted: Alerts, folder: Path) -> None:
        self._wanted, self._folder = wanted, folder
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []
        self._warn: Callable[..., None] | None = None
        self._place: dict[str, Any] = {"stage": None, "step": 0}

    def attach(self, warn: Callable[..., None]) -> Callable[..., None]:
        """`warn` for the run's diagnoses, which sends them too."""
        self._warn = warn

        def also(text: str, kind: str, **values: Any) -> None:
            warn(text, kind, **values)
            if kind == "diagnosis":
                hints = [f"change {one['key']}: {one['why']}" for one in values["changes"]]
                self._send(
                    kind,
                    text,
                    {"stage": values["stage"], "step": values["last_step"]},
                    diagnosis=values["condition"],
                    **{name: values[name] for name in ("severity", "title", "evidence")},
                    hint=next(iter(hints), None),
                )

        return also

    def on_stage(self, state: RunState) -> None:
        self._place = {"stage": state.stage, "step": state.step}

    def on_record(self, state: RunState) -> None:
        self.on_stage(state)
        while self._failures and self._warn is not None:
            self._warn(self._failures.pop(0), "alert_failed")

    @contextmanager
    def at_end(self, finished: Callable[[], bool]) -> Iterator[None]:
        """Send how the block ends, and wait until all is sent, at most the time of one alert."""
        try:
            yield
        except Interrupted as error:
            self._ended("stopped", error.name)
            raise
        except BaseException as error:
            self._ended("failed", one_line(error, named=not isinstance(error, KeelError)))
            raise
        else:
            self._ended("finished" if finished() else "stopped", "")

    def _ended(self, event: str, error: str) -> None:
        text = f"{self._folder.name} {event}" + (f": {error}" if error else "")
        self._send(event, text, self._place, **({"error": error} if error else {}))
        latest = time.monotonic() + SECONDS
        for thread in self._threads:
            thread.join(max(0.0, latest - time.monotonic()))
        for text in self._failures:
            print(f"keel: WARNING: {text}", file=sys.stderr)

    def _send(self, event: str, text: str, place: dict[str, Any], **values: Any) -> None:
        wanted = self._wanted
        name = values.get("diagnosis", event)
        if not wanted.active or not (wanted.on == "all" or name in wanted.on):
            return
        known = {"text": text, "run": str(self._folder), "event": event, **place, **values}
        thread = threading.Thread(
            target=self._deliver, args=(without_secrets(known),), name="keel-alert", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _deliver(self, alert: dict[str, Any]) -> None:
        wanted = self._wanted
        if wanted.command:
            with self._noting(f"alerts.command ({wanted.command[0]})"):
                output_of(wanted.command, SECONDS, given=json.dumps(alert).encode())
        if wanted.webhook_env is not None:
            with self._noting(f"alerts.webhook_env ({wanted.webhook_env})"):
                reply = exchange_json(os.environ[wanted.webhook_env], alert, SECONDS)
                status, _ = asyncio.run(reply)
                if not 200 <= status < 300:
                    raise OSError(f"it answers {status}")

    @contextmanager
    def _noting(self, what: str) -> Iterator[None]:
        """What fails, without the webhook's URL."""
        try:
            yield
        except Exception as error:
            self._failures.append(
                f"an alert was not sent: {what}: {one_line(error) or type(error).__name__}"
            )
