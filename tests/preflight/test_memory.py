"""Memory measured by a trial run: against real runs, within limits, and what the trial is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.cli.main import main
from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe, RLStage
from keel.engines.native import NativeEngine
from keel.models.policy import load_policy
from keel.preflight.check import check
from keel.preflight.context import LongestExample, StageContext
from keel.preflight.memory.machine import available_memory, resident_memory
from keel.preflight.memory.measure import read_result
from keel.preflight.memory.stand_ins import full_length
from keel.preflight.memory.trial import Trial, trial_of
from keel.preflight.trial_batch import Load
from keel.types import Prompt, Sampling

linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
MIB = 2**20
SHORT = ["steps=3", "evaluation.prompts=8"]
WIDE = ["model.build.hidden_size=512", "model.build.layers=4"]
REAL = """
import sys
from pathlib import Path
from keel.config.load import load_recipe
from keel.training.run import train
train(load_recipe("tiny", sys.argv[2:]), sys.argv[1])
# Not ru_maxrss, which begins with the parent's.
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) * 1024)
"""
SMALL = Load(800_000, 4, 4, "cpu")


def real_peak(folder: Path, overrides: list[str]) -> int:
    """The most memory of a process that runs the recipe."""
    words = [sys.executable, "-c", REAL, str(folder / "run"), *overrides]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


@linux
@pytest.mark.parametrize("overrides", [[], WIDE], ids=["tiny", "512 wide"])
def test_the_predicted_peak_is_that_of_the_run(overrides: list[str], tmp_path: Path) -> None:
    """Within a tenth: a run has more steps, and so more holes in its heap."""
    (stage,) = check("tiny", [*SHORT, *overrides]).stages
    memory = stage.predicted["memory"]
    assert memory["peak"] == pytest.approx(real_peak(tmp_path, [*SHORT, *overrides]), rel=0.1)
    assert memory["device"] == "cpu"
    assert {"rollout", "score", "update"} <= set(memory["phases"])
    assert memory["peak"] == max(memory["phases"].values())


@linux
@pytest.mark.parametrize("limit", [300, 450])
def test_a_recipe_that_does_not_fit_is_a_finding(
    limit: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its peak is above the limit, or it does not come so far."""
    room = limit * MIB
    monkeypatch.setattr("keel.preflight.prediction.available_memory", lambda device: room)
    words = WIDE if limit == 450 else []
    assert main(["check", "tiny", *SHORT, *words]) == 1
    out = capsys.readouterr().out
    assert f"and {room / 2**30:.2f} GiB are free [out-of-memory]" in out
    assert "token_budget: lower token_budget" in out
    assert ("memory and time: 'rl' ran out of memory" in out) == (limit == 450)


@linux
def test_every_kind_of_stage_is_measured_with_the_models_of_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"{at}>", "chosen": str(at), "rejected": "1" * (at % 7 + 1)}
        for at in range(20, 60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 4}}
    sampled = {"tasks": [task], "max_tokens": 10, "train": 20, "heldout": 5}
    place = {"functions": [{"function": "place_match"}]}
    steps = {"functions": [{"function": "step_match"}]}
    data = {"name": "jsonl", "path": str(path)}
    process = {"stage": "process_reward_model"}
    learned = [
        {"function": "outcome", "options": {"stage": "reward_model"}},
        {"function": "process", "options": {"stage": "process_reward_model"}},
    ]
    stages = [
        {"stage": "sft", "tasks": [task]},
        {"stage": "reward_model", "sampled": {**sampled, "rewards": place}},
        {"stage": "reward_model", "name": "again", "base": {"stage": "reward_model"}, "data": data},
        {**process, "sampled": {**sampled, "rewards": steps}},
        {"stage": "dpo", "data": data},
        {
            "stage": "rl",
            "algorithm": "grpo_process",
            "tasks": [task],
            "rollout": {"max_tokens": 10, "prompts_per_step": 4, "group_size": 3},
            "rewards": {"functions": learned},
        },
    ]
    build = load_recipe("tiny").model.model_dump()["build"]
    report = check({"threads": 1, "model": {"build": build}, "stages": stages})
    assert [stage.name for stage in report.stages if not stage.predicted] == []
    assert [what for stage in report.stages for what in stage.unseen if "memory" in what] == []
    peaks = [stage.predicted["memory"]["peak"] for stage in report.stages]
    assert peaks == sorted(peaks)  # one process, which keeps what it has freed


# ---------------------------------------------------------------- what the trial writes down


def event(stage: str, **keys: Any) -> dict[str, Any]:
    return {"stage": stage, **keys}


EVENTS: list[Mapping[str, Any]] = [
    event("", resets=True),
    event("sft", begins="setup"),
    event("sft", phase="setup", peak=100),
    event("sft", begins="update"),
    event("sft", phase="update", peak=200),
    event("sft", step=2, tokens=64.0, seconds={"update": 0.5}),
    event("sft", phase="checkpoints", peak=201),
    event("rl", begins="setup"),
    event("rl", phase="setup", peak=150),
    event("rl", begins="rollout"),
]


def test_what_a_stage_took() -> None:
    """A later phase that has hardly more does not decide the peak."""
    result = read_result([*EVENTS, event("rl", finished=True)], 0)
    memory = result.stages["sft"]
    assert (memory.peak, memory.phase) == (201, "update")
    assert memory.phases == {"setup": 100, "update": 200, "checkpoints": 201}
    assert (memory.tokens, memory.seconds) == (64.0, {"update": 0.5})
    assert result.stages["rl"].peak == 150
    assert not result.full
    every = read_result([event("", resets=False), *EVENTS[1:], event("rl", finished=True)], 0)
    assert every.stages["sft"].phases == {}
    assert every.stages["sft"].peak == 201


def test_a_trial_that_did_not_end_well() -> None:
    killed = read_result(EVENTS, -9)
    assert (killed.stopped, killed.phase, killed.full) == ("rl", "rollout", True)
    assert "SIGKILL" in killed.why
    assert set(killed.stages) == {"sft"}
    full = read_result([*EVENTS, event("rl", full="out of memory with 9 tokens")], 0)
    assert (full.full, full.why) == (True, "out of memory with 9 tokens")
    wrong = read_result([*EVENTS, event("rl", error="no such thing")], 0)
    assert (wrong.full, wrong.why) == (False, "no such thing")
    assert read_result([], 1).full


# ---------------------------------------------------------------- what the trial is


def trial(recipe: Recipe, load: Load = SMALL, *, tokens: int = 9) -> Trial | None:
    contexts = []
    for stage in recipe.stages:
        context = StageContext(stage.name, stage.stage)
        context.work.longest = LongestExample(tokens, {"prompt": "12>"})
        contexts.append(context)
    return trial_of(recipe, contexts, load, Path("examples.json"))


def trial_stage(*overrides: str, load: Load = SMALL, **keys: Any) -> tuple[RLStage, Trial]:
    found = trial(load_recipe({"extends": "tiny", **keys}, overrides), load)
    assert found is not None
    # What the process reads is a recipe like any other.
    assert load_recipe_text(found.recipe) == found.recipe
    (stage,) = found.recipe.stages
    assert isinstance(stage, RLStage)
    return stage, found


def load_recipe_text(recipe: Recipe) -> Recipe:
    import tomllib

    return load_recipe(tomllib.loads(to_toml(recipe)))


def test_nothing_is_paid_logged_or_called_in_a_trial() -> None:
    functions = [
        {"function": "judge", "options": {"model": "m", "url": "http://127.0.0.1:9/v1"}},
        {"function": "own:reward"},
        {"function": "outcome", "options": {"model": "folder"}, "gate_below": 0.5},
        {"function": "outcome", "name": "apart", "options": {"model": "folder", "process": True}},
    ]
    stage, found = trial_stage(
        "trackers.tensorboard=true", "evaluation.component=judge", rewards={"functions": functions}
    )
    assert [f.function for f in stage.rewards.functions][:-1] == ["outcome"]
    assert stage.rewards.functions[0].gate_below is None
    assert stage.rewards.functions[-1].function.endswith("alternating_reward")
    assert not stage.trackers.tensorboard
    assert stage.evaluation.component is None
    assert found.omitted["rl"] == ("memory of reward 'apart'",)


def test_a_trial_has_two_steps_of_what_fills_memory() -> None:
    stage, found = trial_stage(
        "rollout.max_rows=8", "token_budget=640", "epochs=3", "minibatches=1"
    )
    assert (stage.steps, stage.epochs, found.sampled["rl"]) == (2, 1, 10)
    assert stage.rollout.prompts_per_step == 8
    # Of a prompt of 9 tokens and four answers of 10, six fit into 300; two passes, and one more.
    many, _ = trial_stage("rollout.max_rows=8", "token_budget=300", "rollout.prompts_per_step=500")
    assert many.rollout.prompts_per_step == 13
    # Or as many as are sampled at a time.
    wide, _ = trial_stage("token_budget=300", "rollout.prompts_per_step=500")
    assert wide.rollout.prompts_per_step == 256 // 4
    ahead, _ = trial_stage("rollout.async_level=1", "algorithm.correction.kind=truncate")
    assert ahead.steps == 3
    one, _ = trial_stage("steps=1")
    assert one.steps == 1
    large, omitted = trial_stage(
        "rollout.max_tokens=4000", "model.build.context=4096", load=Load(10**9, 4, 24, "cpu")
    )
    assert omitted.sampled["rl"] < 4000
    assert "take minutes" in omitted.omitted["rl"][0]
    assert large.rollout.max_tokens == 4000


def test_a_stage_without_an_example_is_left_out_and_so_is_what_needs_it() -> None:
    data = {"name": "own:rows"}
    model = {"stage": "reward_model", "name": "first", "data": data}
    again = {**model, "name": "second", "base": {"stage": "first"}}
    recipe = load_recipe({"model": {"build": {}}, "stages": [model, again]})
    contexts = [StageContext(stage.name, stage.stage) for stage in recipe.stages]
    contexts[1].work.longest = LongestExample(9, {})
    assert trial_of(recipe, contexts, SMALL, Path("examples.json")) is None


def test_completions_are_as_long_as_their_budget() -> None:
    """Sampled on beyond the end, then repeated; no longer than the context."""
    policy = load_policy(load_recipe("tiny").model, 0)
    prompts = [Prompt("a", "12>", tokens=(3, 4, 5)), Prompt("b", "1>", tokens=(3, 5))]
    engine = full_length("native", lambda: 6)(policy.model, policy.tokenizer, dtype=None)
    groups = engine.sample(prompts, 4, Sampling(max_tokens=12), 0)
    assert {len(c) for group in groups for c in group.completions} == {12}
    for completion in (c for group in groups for c in group.completions):
        assert set(completion.tokens[6:]) == {completion.tokens[5]}
        assert completion.written.all()
    context = NativeEngine(policy.model, policy.tokenizer).context
    assert context is not None
    long = engine.sample(prompts[:1], 1, Sampling(max_tokens=10**6), 0)
    assert len(long[0].completions[0]) == context - 3


# ---------------------------------------------------------------- what there is

KB, CPU = 1024, torch.device("cpu")


def test_memory_that_is_free_and_that_this_process_has(tmp_path: Path) -> None:
    proc, group = tmp_path / "proc", tmp_path / "group"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n")
    (proc / "self/status").write_text("Name:\tpython\nVmHWM:\t 99 kB\nVmRSS:\t 50 kB\n")
    assert available_memory(CPU, proc=proc, cgroups=group) == 650 * KB
    assert resident_memory("VmHWM", proc=proc) == 99 * KB
    assert available_memory(CPU, proc=tmp_path, cgroups=group) is None


@pytest.mark.parametrize(
    ("limit", "used"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_control_group_bounds_it(tmp_path: Path, limit: str, used: str) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 600 kB\n")
    (tmp_path / "memory").mkdir()
    for most, now, found in ((400, 100, 300), (400, 900, 0), ("max", 100, 600)):
        (tmp_path / limit).write_text(f"{most * KB if isinstance(most, int) else most}\n")
        (tmp_path / used).write_text(f"{now * KB}\n")
        assert available_memory(CPU, proc=tmp_path, cgroups=tmp_path) == found * KB
