"""The process of a trial run: `python -m keel.preflight.trial_child`.

It reads one line of JSON (`TrialJob`) from its standard input, trains the trial's recipe and writes
what each phase took to `events.jsonl` in the trial's folder, a line at a time, so that they can be
read after the process was killed.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from keel.config.load import load_run_recipe, to_toml
from keel.engines.registry import ENGINES
from keel.learn.token_budget import out_of_memory
from keel.preflight.memory import PROC, resident_memory
from keel.preflight.trial import full_length
from keel.preflight.trial_process import OUTSIDE, TrialJob
from keel.runs import lifecycle
from keel.runs.callbacks import Callback, RunState
from keel.runs.writer import Clock, RunWriter
from keel.training.run import run_stages
from keel.training.state import Progress
from keel.types import KeelError, one_line


class PeakMeter:
    """The most memory since the last reset: torch's allocations on a GPU, else the process's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            # Before it there are no statistics to reset.
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self.resets = self.reset()
        """Whether there are peaks of parts of a run, not only of all until now."""

    def peak(self) -> int:
        """In bytes."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        found = resident_memory("VmHWM")
        if found is not None:
            return found
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset(self) -> bool:
        """Start over; False where the system does not allow it."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return True
        try:
            (PROC / "self/clear_refs").write_text("5")
        except OSError:
            return False
        return True


class TrialMonitor(Clock, Callback):
    """Records the peak and the seconds of each phase: the run's clock and a callback of it."""

    def __init__(self, meter: PeakMeter, events: Path) -> None:
        super().__init__()
        self.meter = meter
        self.events = events.open("a", encoding="utf-8")
        self.name = ""
        self.tokens = 0.0
        self.seconds: dict[str, float] = {}

    def emit(self, **event: Any) -> None:
        """Append an event; on the disk when this returns."""
        self.events.write(json.dumps({"stage": self.name, **event}) + "\n")
        self.events.flush()

    def end_phase(self, phase: str) -> None:
        """Record the peak since the last phase ended, as that of this one."""
        self.emit(phase=phase, peak=self.meter.peak())
        self.meter.reset()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.end_phase(OUTSIDE)
        self.emit(begins=phase)
        start = time.perf_counter()
        with super().__call__(phase):
            yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start
        self.end_phase(phase)

    def on_stage(self, state: RunState) -> None:
        if self.name:
            self.end_phase(OUTSIDE)
        self.name = state.stage
        self.emit(begins=OUTSIDE)

    def on_step(self, state: RunState) -> None:
        tokens = state.metrics["num_tokens"] - self.tokens
        self.emit(step=state.step, tokens=tokens, seconds=self.seconds)
        self.tokens, self.seconds = state.metrics["num_tokens"], {}

    def on_evaluation(self, state: RunState, result: Mapping[str, Any]) -> None:
        self.end_phase("evaluation")

    def on_note(self, text: str) -> None:
        if text.startswith("out of memory"):  # a run would go on with a smaller token budget
            raise KeelError(text)


def run_trial(job: TrialJob) -> None:
    """Run the trial; its last event is how it ends."""
    folder, device = Path(job.folder), torch.device(job.device)
    monitor = TrialMonitor(PeakMeter(device), folder / "events.jsonl")
    monitor.emit(resets=monitor.meter.resets)
    for name in job.engines:
        ENGINES[name] = full_length(name, lambda: job.sampled[monitor.name])
    if device.type == "cuda":
        # A checkpoint takes no memory of the device, and many gigabytes of the disk.
        RunWriter.checkpoint = lambda *_, **__: None  # type: ignore[method-assign]
    try:
        recipe = load_run_recipe(folder / "recipe.toml")
        place = lifecycle.create_run(to_toml(recipe), recipe.name, folder / "run")
        with lifecycle.run_lifecycle(place, False, [monitor]) as (writer, _):
            run_stages(recipe, replace(writer, clock=monitor), Progress(stage=0), None)
        monitor.end_phase(OUTSIDE)
        monitor.emit(finished=True)
    except Exception as caught:
        # The cause is without the advice on how to resume.
        error = caught.__cause__ if isinstance(caught.__cause__, KeelError) else caught
        line = one_line(error)
        full = out_of_memory(error) or line.startswith("out of memory")
        kind = "" if isinstance(error, KeelError) else f"{type(error).__name__}: "
        monitor.emit(**{"full" if full else "error": f"{kind}{line}"})
    finally:
        monitor.events.close()


def main() -> None:
    """Wait for the job, which does not come where there is nothing to measure."""
    line = sys.stdin.readline()
    if not line:
        return
    job = TrialJob(**json.loads(line))
    with suppress(OSError):  # where memory is short the kernel ends this process first
        (PROC / "self/oom_score_adj").write_text("1000")
    if job.limit is not None and sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (job.limit, hard))
    run_trial(job)


if __name__ == "__main__":
    main()
