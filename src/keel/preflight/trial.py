"""The recipe itself for two steps at its longest sequences, run by a separate process.

Only its data and rewards are replaced: each example is the longest, completions go on to
`max_tokens`, and rewards differ, so that each completion is learned from. Torch-free, so that the
process can start, and import what a run needs, before torch is imported here.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from keel.config.load import to_toml
from keel.config.model import Alerts
from keel.config.schema import Recipe, Stage
from keel.config.sources import LEARNED, PreferenceData, Rewards, RewardSource, TaskSource
from keel.config.stage import Checkpoints, Trackers
from keel.data.tasks import BaseTask
from keel.platform.process import Child, python_environment, python_module
from keel.types import Prompt, Split

STEPS = 2
"""Of a stage: an optimizer's state is there from the second on."""
LIMIT = 300.0
"""Seconds after which the process is ended."""


@dataclass(frozen=True, slots=True)
class LongestExample:
    """The longest example of a stage: its tokens, without those of a completion that is sampled,
    and its columns; `raw`: a plain prompt is not put through the chat template."""

    tokens: int
    data: Mapping[str, Any]
    raw: bool = False


class TrialProcess:
    """The process, which waits for its job, with its own folder; both are gone after the
    `with` block."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="keel-check-")
        self.folder = Path(self._folder.name)
        with (self.folder / "log").open("w") as log:
            self._child = Child(
                python_module("keel.preflight.trial_child"),
                environment=python_environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.end()
        self._folder.cleanup()

    def run(
        self, recipe: Recipe, examples: Mapping[str, LongestExample], device: str, room: int | None
    ) -> TrialResult:
        """Run a recipe of `trial_recipe` for `LIMIT` at the most, in `room` bytes of the machine's
        memory."""
        data = {name: one.data for name, one in examples.items()}
        (self.folder / "examples.json").write_text(json.dumps(data), "utf-8")
        (self.folder / "recipe.toml").write_text(to_toml(recipe), "utf-8")
        job = json.dumps({"folder": str(self.folder), "device": device, "limit": room})
        process = self._child.process
        try:
            process.communicate(f"{job}\n".encode(), timeout=LIMIT)
            status: int | None = process.returncode
        except subprocess.TimeoutExpired:
            status = None
        report = self.folder / "report.json"
        return read_result(json.loads(report.read_text("utf-8")) if report.exists() else {}, status)


# ---------------------------------------------------------------- its recipe


def trial_recipe(
    recipe: Recipe,
    examples: Mapping[str, LongestExample],
    prompts: Mapping[str, int],
    folder: Path,
) -> Recipe | None:
    """The recipe to run: the stages with an example, with at most `prompts` prompts a step.

    None if there is none. A stage whose reward model starts from that of a stage without an example
    is left out too.
    """
    stages: list[Stage] = []
    for stage in recipe.stages:
        base, known = stage.base_model, {one.name for one in stages}
        if stage.name in examples and not (base and base.stage and base.stage not in known):
            most = prompts.get(stage.name)
            stages.append(_short(stage, examples[stage.name].raw, most, folder, known))
    changes = {"stages": tuple(stages), "alerts": Alerts()}
    return recipe.model_copy(update=changes) if stages else None


def _short(
    stage: Stage, raw: bool, prompts: int | None, folder: Path, known: Collection[str]
) -> Stage:
    options = {"path": str(folder / "examples.json"), "stage": stage.name}
    sampling = stage.sampling
    algorithm = None if sampling is None else sampling.algorithm
    ahead = 0 if sampling is None else sampling.rollout.async_level
    of_steps = stage.records == "steps" or (algorithm is not None and algorithm.needs_steps)
    reward = alternating_step_reward if of_steps else alternating_reward
    kept = () if sampling is None else sampling.rewards.functions
    plain = {"gate_below": None, "gated_reward": 0.0, "clip": None, "normalise": "none"}
    functions = [one.model_copy(update=plain) for one in kept if _in_memory(one, known)]
    functions.append(RewardSource(function=f"{__name__}:{reward.__name__}", name="trial"))
    short: Stage = stage.on_examples(
        tasks=(TaskSource(name=f"{__name__}:task", options=options, raw=raw),),
        data=PreferenceData(name=f"{__name__}:rows", options=options, raw=raw, empty="keep"),
        rewards=Rewards(functions=tuple(functions)),
        prompts=prompts,
    ).model_copy(
        update={
            "steps": STEPS + ahead if stage.unresolved else min(stage.steps, STEPS + ahead),
            "num_train_epochs": None,
            "on_nonfinite": "skip",
            "checkpoints": Checkpoints(every=1000, keep=1),
            "trackers": Trackers(),
            "stop_when": (),
        }
    )
    return short


def _in_memory(source: RewardSource, known: Collection[str]) -> bool:
    """Whether a reward is a model in the run's own process, which takes memory."""
    stage = source.options.get("stage")
    here = source.function in LEARNED and not source.options.get("process")
    return here and (stage is None or stage in known)


# ---------------------------------------------------------------- what the recipe names


class RepeatedPrompt(BaseTask):
    """One prompt, repeated, with its answer; validation may have another prompt."""

    def __init__(self, name: str, example: dict[str, Any]) -> None:
        self.name = name
        self.example = example

    def prompt(self, split: Split, index: int) -> Prompt:
        content = self.example["prompt"]
        if split == "validation":
            content = self.example.get("validation", content)
        tools = tuple(self.example.get("tools", ()))
        columns = self.example.get("columns", {})  # what a teacher or an advantage reads
        return Prompt(f"{self.name}/{split}/{index}", content, columns, self.name, tools=tools)

    def gold(self, prompt: Prompt) -> str | None:
        answer: str | None = self.example.get("answer")
        return answer


def task(*, path: str, stage: str) -> RepeatedPrompt:
    """The task of a stage: its longest prompt."""
    return RepeatedPrompt(stage, _example(path, stage))


def rows(*, path: str, stage: str) -> list[dict[str, Any]]:
    """The preference data of a stage: its longest example, which steps repeat."""
    return [_example(path, stage)]


def _example(path: str, stage: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text("utf-8"))[stage]
    return found


def alternating_reward(*, completions: Sequence[Any], **_: Any) -> list[float]:
    """0 and 1 in turn."""
    return [float(at % 2) for at in range(len(completions))]


def alternating_step_reward(
    *, completion_ids: Sequence[Sequence[int]], **_: Any
) -> list[list[tuple[int, float]]]:
    """The same, as the reward of a completion's only step."""
    return [[(len(ids) - 1, float(at % 2))] for at, ids in enumerate(completion_ids)]


# ---------------------------------------------------------------- its result


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended: early in the stage `stopped` and its `phase`, with the reason `why`, or
    not; `full`: memory ran out.

    `stages` has what each finished stage took: its `peak` in bytes, of the process, or of torch on
    a GPU; the peaks of its `phases` (none if the system does not separate them) and the `phase`
    that decides; the `seconds` of the last step by phase, and the names of its `metrics`.
    """

    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stopped: str = ""
    phase: str = ""
    full: bool = False
    why: str = ""


def read_result(report: Mapping[str, Any], status: int | None) -> TrialResult:
    """The result that a trial's report gives; `status` is the exit status of its process, None if
    it took too long."""
    stages = dict(report.get("stages", {}))
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
