"""The process of a trial run, from outside. Torch-free, so that it can start before torch is there.

The process imports what a run needs, which takes seconds, and then waits for its job.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from keel.sandbox.lifeline import Lifeline

OUTSIDE = "setup, checkpoints, plots"
"""The phase between those that a stage's clock names."""


@dataclass(frozen=True, slots=True)
class TrialJob:
    """What the process is to do.

    `folder` holds the recipe and is where the run goes. `limit` bounds the memory of the process
    (None: unbounded, as on a GPU). `sampled` gives by stage how many tokens of a completion are
    sampled, `engines` are the names of all engines.
    """

    folder: str
    device: str
    limit: int | None
    sampled: Mapping[str, int]
    engines: tuple[str, ...]


class TrialProcess:
    """A process with a folder of its own; both are gone after the `with` block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="keel-check-")
        self.folder = Path(self._folder.name)
        self._lifeline = Lifeline()
        path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        with (self.folder / "log").open("w") as log:
            self._process = subprocess.Popen(
                # -P: no file of the working folder replaces a module.
                [sys.executable, "-P", "-m", "keel.preflight.trial_child"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(self._lifeline.inner,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
                start_new_session=True,
                text=True,
            )
        self._lifeline.tie(self._process.pid)
        self._lifeline.give()
        self.examples = self.folder / "examples.json"
        self.recipe = self.folder / "recipe.toml"
        self.events = self.folder / "events.jsonl"

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._lifeline.cut()
        self._folder.cleanup()

    def run(self, job: str) -> int:
        """Send the job, one line, and wait for the end: the exit status."""
        self._process.communicate(job + "\n")  # passes over a process that has ended
        return self._process.returncode
