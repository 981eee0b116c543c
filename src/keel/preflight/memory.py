"""How much memory there is, and how much memory and time the stages of a trial took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Any

import torch

from keel.platform.memory import free_memory
from keel.preflight.context import StageContext
from keel.preflight.finding import Finding
from keel.preflight.trial import LIMIT, TrialProcess, trial_recipe

GIB = 2**30
OUTSIDE = "setup, checkpoints, plots"
"""The phase between those that a stage's clock names."""
RAISED = 1.01
"""A phase that raises the peak by less than this does not decide it: freed memory stays with the
process, and is in every later phase too."""


def available_memory(device: torch.device) -> int | None:
    """Bytes that a run could take in this process's place; None if the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return free_memory()


# ---------------------------------------------------------------- the trial's result


@dataclass(frozen=True)
class StageMeasure:
    """What a stage took in the trial: the peak of its process, or of torch on a GPU, in bytes.

    `phases` are the peaks by phase (none if the system does not separate them), `phase` is the one
    that decides. `seconds` are those of the last step by phase.
    """

    peak: int
    phase: str
    phases: Mapping[str, int]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class TrialResult:
    """What each stage took, and how a trial ended early: in the stage `stopped` and its `phase`,
    with the reason `why`; `full`: memory ran out."""

    stages: Mapping[str, StageMeasure] = field(default_factory=dict)
    stopped: str = ""
    phase: str = ""
    full: bool = False
    why: str = ""


def read_result(report: Mapping[str, Any], status: int | None) -> TrialResult:
    """The result that a trial's report gives; `status` is the exit status of its process, None if
    it took too long."""
    stages = {name: StageMeasure(**own) for name, own in report.get("stages", {}).items()}
    end, stopped, phase = (report.get(name, "") for name in ("end", "stage", "phase"))
    if end == "finished":
        return TrialResult(stages)
    stages.pop(stopped, None)
    if status is None:
        end, why = "error", f"two steps took longer than {LIMIT:.0f} s, in {phase!r}"
    elif end:
        why = report["why"]
    else:
        ended = f"with exit status {status}" if status >= 0 else f"by {Signals(-status).name}"
        why = f"its process was ended {ended}"
    return TrialResult(stages, stopped, phase, end != "error", why)


# ---------------------------------------------------------------- the stages' reports


def measure(
    contexts: Sequence[StageContext], device: torch.device, process: TrialProcess | None = None
) -> list[dict[str, Any]]:
    """What a trial of each stage took, in JSON types; empty if it was not run.

    A lack of memory is added to the stage's findings. `process` may have been started before.
    """
    examples = {c.stage.name: c.longest for c in contexts if c.longest is not None}
    prompts = {c.stage.name: c.step_prompts for c in contexts if c.step_prompts is not None}
    with process or TrialProcess() as process:
        recipe = trial_recipe(contexts[0].recipe, examples, prompts, process.folder)
        if recipe is None:
            return [{} for _ in contexts]
        room = available_memory(device)
        report, status = process.run(recipe, examples, str(device), room)
    result = read_result(report, status)
    return [_measured(context, result, device, room) for context in contexts]


def _measured(
    context: StageContext, result: TrialResult, device: torch.device, room: int | None
) -> dict[str, Any]:
    """What the trial of a stage took; findings and what was left out go into its context."""
    name, key = context.stage.name, f"{context.prefix}token_budget"
    found = result.stages.get(name)
    if result.full and name == (result.stopped or context.recipe.stages[0].name):
        evidence = f"a step stopped in the phase {result.phase!r}: {result.why}"
        context.add(out_of_memory(None, room, evidence, key))
    if found is None:
        if context.longest is not None:
            why = " ran out of memory" if result.full else f": {result.why}"
            context.skipped_checks.append(
                f"memory and time: {result.stopped or 'its process'!r}{why}"
            )
        return {}
    if room is not None and found.peak > room:
        context.add(out_of_memory(found.peak, room, f"in the phase {found.phase!r}", key))
    step = dict(found.seconds)
    if context.scoring:
        step["rewards"] = context.scoring
    share = 1.0
    if context.stage.prompts_in_step and context.step_prompts is not None:
        share = context.stage.prompts_in_step / context.step_prompts
    seconds = {phase: round(share * time, 3) for phase, time in step.items()}
    return {
        "memory": {
            "device": str(device),
            "peak": found.peak,
            "phase": found.phase,
            "phases": dict(found.phases),
            "room": room,
        },
        "step": seconds,
        "seconds": round(context.stage.steps * sum(seconds.values()), 1),
    }


def out_of_memory(peak: int | None, room: int | None, evidence: str, key: str) -> Finding:
    """A stage that needs more memory than there is; a peak of None was not reached."""
    need = "more than there is" if peak is None else f"{peak / GIB:.2f} GiB"
    free = "" if room is None else f", and {room / GIB:.2f} GiB are free"
    return Finding(
        "out-of-memory",
        f"the stage needs {need}{free}",
        evidence,
        key,
        "lower token_budget, rollout.max_num_seqs or the batch; set "
        "model.activation_checkpointing = true, or [model.lora]",
        "error",
    )
