"""How much memory there is, and how much the stages of a trial run took."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from keel.config.load import to_toml
from keel.preflight.finding import Finding
from keel.preflight.trial import Trial
from keel.preflight.trial_process import OUTSIDE, TrialJob, TrialProcess

GIB = 2**30
CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")
RAISED = 1.01
"""A phase that raises the peak by less than this does not decide it: freed memory stays with the
process, and is in every later phase too."""


def available_memory(
    device: torch.device, *, proc: Path = PROC, cgroups: Path = CGROUPS
) -> int | None:
    """Bytes that a run could take: what is free now, and what this process holds, which a run in
    its place would have. None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    free_kb = _table(proc / "meminfo").get("MemAvailable")
    if free_kb is None:
        return None
    free = min([free_kb, *(max(limit - used, 0) for limit, used in _limits(cgroups))])
    return free + (resident_memory("VmRSS", proc=proc) or 0)


def resident_memory(field: str, *, proc: Path = PROC) -> int | None:
    """Bytes of this process in memory: now (`VmRSS`), or at most so far (`VmHWM`); None where the
    system does not say."""
    return _table(proc / "self/status").get(field)


def _table(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of the kernel, in bytes."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError:
        return {}
    words = [(line.partition(":")[0], line.partition(":")[2].split()) for line in lines]
    return {name: int(value[0]) * 1024 for name, value in words if value[1:] == ["kB"]}


def _limits(cgroups: Path) -> list[tuple[int, int]]:
    """Limit and use of the control group that this process is in, in versions 2 and 1."""
    found = []
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            numbers = [(cgroups / name).read_text("utf-8").strip() for name in (limit, used)]
        except OSError:
            continue
        if all(number.isdigit() for number in numbers):
            found.append((int(numbers[0]), int(numbers[1])))
    return found


# ---------------------------------------------------------------- the trial's result


@dataclass(frozen=True)
class StageMemory:
    """What a stage took in the trial: the peak of its process, or of torch on a GPU, in bytes.

    `phases` are the peaks by phase (none where the system does not separate them), `phase` is the
    one that decides. `seconds` are those of the last step by phase, `tokens` what it learned from.
    """

    peak: int
    phase: str
    phases: Mapping[str, int]
    seconds: Mapping[str, float]
    tokens: float


@dataclass(frozen=True)
class TrialResult:
    """What each stage took, and how a trial ended early: in the stage `stopped` and its `phase`,
    with the reason `why`; `full`: memory ran out."""

    stages: Mapping[str, StageMemory] = field(default_factory=dict)
    stopped: str = ""
    phase: str = ""
    full: bool = False
    why: str = ""


def run_trial(
    process: TrialProcess, trial: Trial, device: torch.device, limit: int | None
) -> TrialResult:
    """Run a trial to its end, in `limit` bytes of memory."""
    examples = {name: one.data for name, one in trial.examples.items()}
    process.examples.write_text(json.dumps(examples), "utf-8")
    process.recipe.write_text(to_toml(trial.recipe), "utf-8")
    plans = [stage.sampling for stage in trial.recipe.stages if stage.sampling is not None]
    engines = tuple(sorted({"native", *(plan.rollout.engine for plan in plans)}))
    job = TrialJob(str(process.folder), str(device), limit, trial.sampled, engines)
    status = process.run(json.dumps(asdict(job)))
    lines = process.events.read_text("utf-8").splitlines() if process.events.exists() else []
    return read_result([json.loads(line) for line in lines if line.endswith("}")], status)


def read_result(events: Sequence[Mapping[str, Any]], status: int) -> TrialResult:
    """The result that a trial's events give; `status` is the exit status of its process."""
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
    ended = f"with exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
    why = last.get("full") or last.get("error") or f"its process was ended {ended}"
    return TrialResult(done, begins["stage"], begins["begins"] or "start", "error" not in last, why)


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
    return StageMemory(peak, deciding, phases if resets else {}, step["seconds"], step["tokens"])


def out_of_memory(peak: int | None, room: int | None, evidence: str, key: str) -> Finding:
    """A stage that needs more memory than there is; a peak of None was not reached."""
    need = "more than there is" if peak is None else f"{peak / GIB:.2f} GiB"
    free = "" if room is None else f", and {room / GIB:.2f} GiB are free"
    return Finding(
        "out-of-memory",
        f"the stage needs {need}{free}",
        evidence,
        key,
        "lower token_budget, rollout.max_rows or the batch; set model.activation_checkpointing = "
        "true, or [model.lora]",
        "error",
    )
