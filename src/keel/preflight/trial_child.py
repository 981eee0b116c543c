"""The process of a trial: `python -m keel.preflight.trial_child`.

It reads one line of JSON from its standard input, trains the trial's recipe, and keeps what each
phase took in `report.json` in the trial's folder, where it can be read after the process was
killed.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from keel.config.load import load_recipe, to_toml
from keel.learn.memory import out_of_memory
from keel.platform.files import write_text
from keel.platform.signals import PROC, resident_memory
from keel.runs import lifecycle
from keel.runs.callbacks import Callback, RunState
from keel.runs.writer import Clock, RunWriter
from keel.training.run import run_stages
from keel.training.state import Progress
from keel.types import KeelError, one_line

OUTSIDE = "setup, checkpoints, plots"
"""The phase between those that a stage's clock names."""
RAISED = 1.01
"""A phase that raises the peak by less than this does not decide it: freed memory stays with the
process, and is in every later phase too."""


class TrialMonitor(Clock, Callback):
    """Records the peak and the seconds of each phase: the run's clock and a callback of it.

    The peak is that of torch's allocations on a GPU, else of the process's memory. `report` is what
    the trial's file holds (`keel.preflight.trial.read_result`), rewritten as phases begin and end.
    """

    def __init__(self, device: torch.device, path: Path) -> None:
        super().__init__()
        self.device = device
        self.path = path
        self.seconds: dict[str, float] = {}
        if device.type == "cuda":
            # Before it there are no statistics to reset.
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self.separate = self.reset()
        self.report: dict[str, Any] = {"stage": "", "phase": "start", "stages": {}, "end": ""}

    def write(self, **changes: Any) -> None:
        """Change the report, and write it to its file."""
        self.report |= changes
        write_text(self.path, json.dumps(self.report))

    def peak(self) -> int:
        """The most bytes since the last reset, or of all until now if there are no resets."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        found = resident_memory("VmHWM")
        unit = 1 if sys.platform == "darwin" else 1024
        return found or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset(self) -> bool:
        """Start over; False if the system does not allow it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            (PROC / "self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def end_phase(self, phase: str) -> None:
        """Record the peak since the last phase ended, as that of this one."""
        own, size = self.report["stages"].get(self.report["stage"]), self.peak()
        if own is not None:
            if size > own["peak"] * RAISED:
                own["phase"] = phase
            own["peak"] = max(own["peak"], size)
            if self.separate:
                own["phases"][phase] = max(own["phases"].get(phase, 0), size)
        self.reset()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.end_phase(OUTSIDE)
        self.write(phase=phase)
        start = time.perf_counter()
        with super().__call__(phase):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        self.end_phase(phase)

    def on_stage(self, state: RunState) -> None:
        self.end_phase(OUTSIDE)
        nothing = {"peak": 0, "phase": OUTSIDE, "phases": {}, "seconds": {}}
        self.report["stages"][state.stage] = nothing
        self.write(stage=state.stage, phase=OUTSIDE)

    def on_step(self, state: RunState) -> None:
        self.report["stages"][state.stage]["seconds"] = self.seconds
        self.report["stages"][state.stage]["metrics"] = sorted(state.metrics)
        self.seconds = {}

    def on_note(self, text: str) -> None:
        if text.startswith("out of memory"):  # a run would go on with a smaller token budget
            raise KeelError(text)


class WithoutCheckpoints(RunWriter):
    """Of a GPU: a checkpoint takes no memory of it, and many gigabytes of the disk."""

    def checkpoint(self, *_: Any, **__: Any) -> None:
        """Write nothing."""


def run(job: Mapping[str, Any]) -> None:
    """Run the trial; its report says how it ends."""
    folder, device = Path(job["folder"]), torch.device(job["device"])
    monitor = TrialMonitor(device, folder / "report.json")
    kind = WithoutCheckpoints if device.type == "cuda" else RunWriter
    try:
        recipe = load_recipe(folder / "recipe.toml")
        place = lifecycle.create_run(to_toml(recipe), recipe.name, folder / "run")
        with lifecycle.run_lifecycle(place, False, [monitor]) as (writer, _):
            watched = kind(**{**vars(writer), "clock": monitor})
            run_stages(recipe, watched, Progress(stage=0), None)
        monitor.end_phase(OUTSIDE)
        monitor.write(end="finished")
    except Exception as caught:
        # The cause is without the advice on how to resume.
        error = caught.__cause__ if isinstance(caught.__cause__, KeelError) else caught
        line = one_line(error, named=not isinstance(error, KeelError))
        full = out_of_memory(error) or line.startswith("out of memory")
        monitor.write(end="full" if full else "error", why=line)


def main() -> None:
    """Wait for the job, which does not come if there is nothing to run."""
    line = sys.stdin.readline()
    if not line:
        return
    job = json.loads(line)
    with suppress(OSError):  # if memory is short the kernel ends this process first
        (PROC / "self/oom_score_adj").write_text("1000")
    if job["limit"] is not None and sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (job["limit"], hard))
    run(job)


if __name__ == "__main__":
    main()
