"""The trial of a recipe: against real runs, within limits, and what it runs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from keel.cli.main import main
from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe
from keel.engines.native import NativeEngine
from keel.models.policy import load_policy
from keel.preflight import trial, trial_child
from keel.preflight.check import Report, check
from keel.preflight.trial import LongestExample, read_result, trial_recipe
from keel.runs.callbacks import RunState
from keel.training.stages.rl import RLStage
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


# ---------------------------------------------------------------- measured


@pytest.fixture(scope="module")
def tiny() -> Report:
    return check("tiny", SHORT, price=3.6)


def test_memory_time_and_cost_are_measured(tiny: Report) -> None:
    measured = tiny.stages[0].measured
    assert 0 < measured["memory"]["peak"] < measured["memory"]["room"]
    assert {"rollout", "update", "rewards"} <= set(measured["step"])
    assert measured["seconds"] == pytest.approx(3 * sum(measured["step"].values()), abs=0.06)
    assert measured["cost"] == pytest.approx(measured["seconds"] / 1000, abs=1e-3)
    assert tiny.total == {"seconds": measured["seconds"], "cost": measured["cost"]}
    assert tiny.findings == ()


def test_recipe_for_another_machine_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its findings are reported all the same."""
    monkeypatch.setattr("keel.preflight.check.measure", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for key, why in (
        ("cluster.processes=2", "cluster.processes = 2"),
        ("cluster.ray=auto", "cluster.ray"),
        ("model.device=cuda", "no GPU here"),
    ):
        report = check("tiny", [*SHORT, key, "optimizer.warmup_steps=99"])
        (line,) = report.stages[0].skipped_checks
        assert line.startswith("memory and time: not run, since")
        assert why in line
        assert [one.kind for one in report.findings] == ["warm-up-never-ends"]


@pytest.mark.slow
def test_stop_rule_of_a_metric_that_never_occurs() -> None:
    right = ["kl", "loss", "rewards/place_match/mean", "eval/pass@1/low", "num_tokens"]
    wrong = {
        "value/loss": None,
        "eval/pass@4": "eval/pass@1",
        "rewards/place_mach/mean": right[2],
    }
    rules = [f"{{metric='{name}'}}" for name in (*right, *wrong)]
    report = check("tiny", [*SHORT, f"stop_when=[{', '.join(rules)}]", "evaluation.prompts=4"])
    findings = [one for one in report.findings if one.kind == "never-stops"]
    assert [one.key for one in findings] == [f"stop_when.{at}.metric" for at in (5, 6, 7)]
    for one, meant in zip(findings, wrong.values(), strict=True):
        assert one.evidence.endswith(f"did you mean {meant!r}?" if meant else "…")
    unrun = check("tiny", [*SHORT, "cluster.processes=2", "stop_when=[{metric='los'}]"])
    assert [one.kind for one in unrun.findings] == ["never-stops"]


def test_trial_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "LIMIT", 0.01)
    (stage,) = check("tiny", SHORT).stages
    assert stage.measured == {}
    assert any("took longer than" in line for line in stage.skipped_checks)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], [WIDE[0]]], ids=["tiny", "512 wide"])
def test_measured_peak_is_that_of_the_run(
    overrides: list[str], tiny: Report, tmp_path: Path
) -> None:
    """Within a tenth: a run has more steps, and so more holes in its heap."""
    report = check("tiny", [*SHORT, *overrides]) if overrides else tiny
    memory = report.stages[0].measured["memory"]
    words = [sys.executable, "-c", REAL, str(tmp_path / "run"), *SHORT, *overrides]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert memory["peak"] == pytest.approx(int(done.stdout.splitlines()[-1]), rel=0.1)
    assert memory["device"] == "cpu"
    assert {"rollout", "score", "update"} <= set(memory["phases"])
    assert memory["peak"] == max(memory["phases"].values())


@linux
@pytest.mark.slow
@pytest.mark.parametrize("limit", [300, 450])
def test_recipe_that_does_not_fit_is_a_finding(
    limit: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether its peak is above the limit, or it does not come so far."""
    room = limit * MIB
    monkeypatch.setattr("keel.preflight.check.available_memory", lambda device: room)
    words = WIDE if limit == 450 else []
    assert main(["check", "tiny", *SHORT, *words]) == 1
    out = capsys.readouterr().out
    assert f"and {room / 2**30:.2f} GiB are free [out-of-memory]" in out
    assert "token_budget: lower token_budget" in out
    assert ("memory and time: 'rl' ran out of memory" in out) == (limit == 450)


@linux
@pytest.mark.slow
def test_every_kind_of_stage_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"{at}>", "chosen": str(at), "rejected": "1" * (at % 7 + 1)}
        for at in range(20, 60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 4}}
    sampled = {"tasks": [task], "max_tokens": 10, "train": 20, "validation": 5}
    data = {"name": "jsonl", "path": str(path)}

    def scored(*functions: dict[str, Any]) -> dict[str, Any]:
        return {"functions": list(functions)}

    place, steps = scored({"function": "place_match"}), scored({"function": "step_match"})
    learned = scored(
        {"function": "outcome", "options": {"stage": "reward_model"}},
        {"function": "process", "options": {"stage": "process_reward_model"}},
    )
    stages = [
        {"stage": "sft", "tasks": [task]},
        {"stage": "reward_model", "sampled": {**sampled, "rewards": place}},
        {"stage": "reward_model", "name": "again", "base": {"stage": "reward_model"}, "data": data},
        {"stage": "process_reward_model", "sampled": {**sampled, "rewards": steps}},
        {"stage": "dpo", "data": data},
        {
            "stage": "rl",
            "algorithm": "grpo_process",
            "tasks": [task],
            "rollout": {"max_tokens": 10, "prompts_per_step": 4, "group_size": 3},
            "rewards": learned,
        },
    ]
    build = load_recipe("tiny").model.model_dump()["build"]
    report = check({"threads": 1, "model": {"build": build}, "stages": stages})
    assert [stage.name for stage in report.stages if not stage.measured] == []
    assert [
        what for stage in report.stages for what in stage.skipped_checks if "memory" in what
    ] == []
    peaks = [stage.measured["memory"]["peak"] for stage in report.stages]
    assert peaks == sorted(peaks)  # one process, which keeps what it has freed


# ---------------------------------------------------------------- the trial's report

SFT: dict[str, Any] = {"peak": 201, "phase": "update", "phases": {"update": 200}, "seconds": {}}
RL: dict[str, Any] = {"peak": 150, "phase": "setup", "phases": {"setup": 150}, "seconds": {}}
STAGES = {"sft": SFT, "rl": RL}
REPORT: dict[str, Any] = {"stage": "rl", "phase": "rollout", "stages": STAGES, "end": ""}


def test_trial_has_the_columns_that_a_teacher_is_shown() -> None:
    keys = ["algorithm=sdft", "teacher={prompt='{prompt}{answer}', weights='live'}"]
    (stage,) = check("tiny", [*SHORT, *keys]).stages
    assert stage.skipped_checks == ()
    assert stage.measured["seconds"] > 0


def test_report_of_an_ended_trial_names_the_reason() -> None:
    finished = read_result({**REPORT, "end": "finished"}, 0)
    assert (finished.stages, finished.full) == (STAGES, False)
    killed = read_result(REPORT, -9)
    assert (killed.stopped, killed.phase, killed.full) == ("rl", "rollout", True)
    assert "SIGKILL" in killed.why
    assert set(killed.stages) == {"sft"}
    full = read_result({**REPORT, "end": "full", "why": "out of memory with 9 tokens"}, 0)
    assert (full.full, full.why) == (True, "out of memory with 9 tokens")
    wrong = read_result({**REPORT, "end": "error", "why": "no such thing"}, 0)
    assert (wrong.full, wrong.why) == (False, "no such thing")
    assert read_result({}, 1).full
    late = read_result(REPORT, None)
    assert (late.full, late.why) == (False, "two steps took longer than 300 s, in 'rollout'")


def test_peak_is_of_the_phase_that_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later phase that has hardly more does not decide it."""
    monitor = trial_child.TrialMonitor(torch.device("cpu"), tmp_path / "report.json")
    monitor.on_stage(cast(RunState, SimpleNamespace(stage="sft")))
    for phase, size in (("setup", 100), ("update", 200), ("plots", 201)):
        monkeypatch.setattr(monitor, "peak", lambda size=size: size)
        monitor.end_phase(phase)
    own = monitor.report["stages"]["sft"]
    assert (own["peak"], own["phase"]) == (201, "update")


# ---------------------------------------------------------------- the trial's recipe


def short(recipe: Recipe, prompts: int = 8, *, without: str = "") -> Recipe | None:
    """The recipe to run, of stages with an example."""
    names = [stage.name for stage in recipe.stages if stage.name != without]
    examples = {name: LongestExample(9, {"prompt": "12>"}) for name in names}
    return trial_recipe(recipe, examples, dict.fromkeys(names, prompts), Path("/trial"))


def short_stage(*overrides: str, prompts: int = 8, **keys: Any) -> RLStage:
    found = short(load_recipe({"extends": "tiny", **keys}, overrides), prompts)
    assert found is not None
    # What the process reads is a recipe like any other.
    assert load_recipe(tomllib.loads(to_toml(found))) == found
    return cast(RLStage, found.stages[0])


def test_trial_pays_logs_and_calls_nothing() -> None:
    functions = [
        {"function": "judge", "options": {"model": "m", "url": "http://127.0.0.1:9/v1"}},
        {"function": "own:reward"},
        {"function": "outcome", "options": {"model": "folder"}, "gate_below": 0.5},
        {"function": "outcome", "name": "apart", "options": {"model": "folder", "process": True}},
    ]
    stage = short_stage(
        "trackers.tensorboard=true", "evaluation.component=judge", rewards={"functions": functions}
    )
    assert [f.function for f in stage.rewards.functions][:-1] == ["outcome"]
    assert stage.rewards.functions[0].gate_below is None
    assert stage.rewards.functions[-1].function.endswith(":alternating_reward")
    assert not stage.trackers.tensorboard
    assert stage.evaluation.component is None


def test_trial_has_two_steps_of_full_completions() -> None:
    stage = short_stage("epochs=3", "rollout.stop=['=']", "rollout.mask_truncated=true")
    assert (stage.steps, stage.epochs, stage.rollout.prompts_per_step) == (2, 3, 8)
    assert stage.rollout.ignore_eos
    assert stage.rollout.stop == ()
    assert not stage.rollout.mask_truncated
    assert short_stage(prompts=4).rollout.prompts_per_step == 4
    ahead = ["rollout.async_level=1", "algorithm.corrections.kind=truncate"]
    assert short_stage(*ahead).steps == 3
    assert short_stage("steps=1").steps == 1


def test_trial_leaves_out_stages_without_an_example() -> None:
    model = {"stage": "reward_model", "name": "first", "data": {"name": "own:rows"}}
    again = {**model, "name": "second", "base": {"stage": "first"}}
    recipe = load_recipe({"model": {"build": {}}, "stages": [model, again]})
    assert short(recipe, without="first") is None
    alone = short(recipe, without="second")
    assert alone is not None
    assert [stage.name for stage in alone.stages] == ["first"]


def test_completions_that_ignore_the_end_fill_the_budget() -> None:
    policy = load_policy(load_recipe("tiny").model, 0)
    prompts = [Prompt("a", "12>", tokens=(3, 4, 5)), Prompt("b", "1>", tokens=(3, 5))]
    engine = NativeEngine(policy.model, policy.tokenizer)
    groups = engine.sample(prompts, 4, Sampling(max_tokens=12, ignore_eos=True), 0)
    completions = [c for group in groups for c in group.completions]
    assert [(len(c), c.finish) for c in completions] == [(12, "length")] * 8
    assert any(engine.eos[0] in c.tokens[:-1] for c in completions)


# ---------------------------------------------------------------- a GPU, by its name alone


def test_trial_on_a_gpu_measures_every_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a new process: torch has no statistics of a GPU before it is initialised."""
    ready: list[str] = []

    def reset(device: torch.device) -> None:
        if not ready:
            raise RuntimeError("Invalid device argument 0: did you call init?")

    monkeypatch.setattr(torch.cuda, "init", lambda: ready.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    recipe = load_recipe("tiny", ["steps=2", "model.device=cpu", "evaluation.prompts=2"])
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    trial_child.run({"folder": str(tmp_path), "device": "cuda:0"})
    result = read_result(json.loads((tmp_path / "report.json").read_text()), 0)
    assert not result.stopped
    memory = result.stages["rl"]
    assert {"rollout", "update"} <= memory["phases"].keys()
    assert memory["peak"] == 7
    assert not any((tmp_path / "run/checkpoints").iterdir())
