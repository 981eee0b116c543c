"""The trial run from outside: its process, what it wrote down, and whether it fits."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from keel.config.load import to_toml
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found
from keel.preflight.memory.child import EVENTS, EXAMPLES, OUTSIDE, RECIPE, TrialJob
from keel.preflight.memory.process import TrialProcess
from keel.preflight.memory.trial import Trial

GIB = 2**30
RAISED = 1.01
"""A phase that raises the peak by less than this does not decide it: freed memory stays with the
process, and is in every later phase too."""


@dataclass(frozen=True)
class StageMemory:
    """What a stage took in the trial: the peak of its process, or of torch on a GPU, in bytes.

    `phases` are the peaks by phase (none where the system does not tell them apart), `phase` is the
    one that decides. `seconds` are those of the last step by phase, `tokens` what it learned from.
    """

    peak: int
    phase: str
    phases: Mapping[str, int]
    seconds: Mapping[str, float]
    tokens: float


@dataclass(frozen=True)
class TrialResult:
    """By stage what it took, and how the run ended where not well: `stopped` is the stage, `phase`
    what it was at, `full` says that memory ran out, and `why` how."""

    stages: Mapping[str, StageMemory] = field(default_factory=dict)
    stopped: str = ""
    phase: str = ""
    full: bool = False
    why: str = ""


def run_trial(
    process: TrialProcess, trial: Trial, device: torch.device, limit: int | None
) -> TrialResult:
    """Run a trial to its end, in `limit` bytes of memory."""
    folder = process.folder
    examples = {name: one.data for name, one in trial.examples.items()}
    (folder / EXAMPLES).write_text(json.dumps(examples), "utf-8")
    (folder / RECIPE).write_text(to_toml(trial.recipe), "utf-8")
    plans = [stage.sampling for stage in trial.recipe.stages if stage.sampling is not None]
    engines = {"native", *(plan.rollout.engine for plan in plans)}
    job = TrialJob(str(folder), str(device), limit, trial.sampled, tuple(sorted(engines)))
    status = process.run(json.dumps(asdict(job)))
    path = folder / EVENTS
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return read_result([json.loads(line) for line in lines if line.endswith("}")], status)


def read_result(events: Sequence[Mapping[str, Any]], status: int) -> TrialResult:
    """What the events of a trial say; `status` is the exit status of its process."""
    by_stage: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        by_stage.setdefault(event["stage"], []).append(event)
    resets = any(event.get("resets") for event in events)
    begins = next((e for e in reversed(events) if "begins" in e), {"stage": "", "begins": ""})
    last = events[-1] if events else {}
    finished = "finished" in last
    done = {
        name: _stage_memory(own, resets)
        for name, own in by_stage.items()
        if name and (finished or name != begins["stage"])
    }
    if finished:
        return TrialResult(done)
    why = last.get("full") or last.get("error") or _ended(status)
    full = "error" not in last
    return TrialResult(done, begins["stage"], begins["begins"] or "start", full, why)


def _stage_memory(events: Sequence[Mapping[str, Any]], resets: bool) -> StageMemory:
    phases: dict[str, int] = {}
    peak, deciding = 0, OUTSIDE
    for event in events:
        if "peak" not in event:
            continue
        phase, size = event["phase"], event["peak"]
        phases[phase] = max(phases.get(phase, 0), size)
        if size > peak * RAISED:
            deciding = phase
        peak = max(peak, size)
    none: Mapping[str, Any] = {"tokens": 0.0, "seconds": {}}
    step = next((event for event in reversed(events) if "tokens" in event), none)
    kept = phases if resets else {}
    return StageMemory(peak, deciding, kept, step["seconds"], step["tokens"])


def _ended(status: int) -> str:
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process ended with exit status {status}"


def out_of_memory(peak: int | None, room: int | None, evidence: str, key: str) -> Finding:
    """A stage for which there is no room; a peak of None was not reached."""
    need = "more than there is" if peak is None else f"{peak / GIB:.2f} GiB"
    free = "" if room is None else f", and {room / GIB:.2f} GiB are free"
    return found(
        "out-of-memory",
        f"the stage needs {need}{free}",
        evidence,
        key,
        "lower token_budget, rollout.max_rows or the batch; set model.activation_checkpointing = "
        "true, or [model.lora]",
        "error",
    )
