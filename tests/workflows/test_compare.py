"""`keel compare`: real runs in processes of their own."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.config.load import load_recipe
from keel.runs.reader import load
from keel.training.run import train
from keel.types import KeelError
from keel.workflows import compare
from keel.workflows.compare import START, Plan, outcome, plan, run
from tests.platform.processes import eventually

SMALL = ("steps=2", "evaluation.prompts=4", "evaluation.every=1")
COMMAND = ("compare", "tiny", "--algorithms", "grpo,ppo", "--seeds", "1", *SMALL)
STAGES = """
[model.build]
family = "llama"
alphabet = "0123456789>"
hidden_size = 32
layers = 1
heads = 2
context = 32

[[stages]]
stage = "sft"
steps = 2
batch_size = 4
demonstration = "keel.data.tasks:careless"
[[stages.tasks]]
name = "sort_digits"

[[stages]]
stage = "rl"
steps = 2
algorithm = "grpo"
[[stages.tasks]]
name = "sort_digits"
[stages.rollout]
prompts_per_step = 2
group_size = 2
max_tokens = 6
[stages.evaluation]
prompts = 4
"""


def small(seeds: int = 2, **changes: object) -> Plan:
    choices: dict[str, object] = {"algorithms": ["grpo", "ppo"], "overrides": SMALL, **changes}
    return plan(["tiny"], seeds=tuple(range(seeds)), **choices)  # type: ignore[arg-type]


def test_arms_are_recipes_by_algorithms_by_values() -> None:
    chosen = small(vary={"optimizer.learning_rate": ["1e-3", "1e-4"]})
    names = [arm.name for arm in chosen.arms]
    assert names == [
        "grpo-optimizer.learning_rate=1e-3",
        "grpo-optimizer.learning_rate=1e-4",
        "ppo-optimizer.learning_rate=1e-3",
        "ppo-optimizer.learning_rate=1e-4",
    ]
    assert [arm.stage.optimizer.learning_rate for arm in chosen.arms] == [1e-3, 1e-4] * 2
    assert chosen.arms[2].stage.algorithm.preset == "ppo"
    assert chosen.arms[2].models == ("policy", "reference", "value")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": []}, "nothing to compare in tiny"),
        ({"algorithms": ["grpo", "grpo"]}, "nothing to compare in grpo, grpo"),
        ({"algorithms": ["grpo", "gppo"]}, "gppo"),
        ({"baseline": "gppo"}, "unknown arm 'gppo'"),
        ({"overrides": ("evaluation.prompts=0",)}, r"rl\.evaluation\.prompts = 0 leaves grpo"),
    ],
)
def test_a_comparison_of_nothing_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        small(**changes)


def test_two_comparisons_in_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second begins while the first has its runs before it."""
    out = tmp_path / "out"
    codes: list[int] = []

    def begin(*_: object) -> str:
        if not codes:
            codes.append(0)
            words = ["compare", "tiny", *SMALL, "--seeds", "1", "--out", str(out), "--algorithms"]
            codes[:] = [main([*words, algorithms]) for algorithms in ("grpo,ppo", "grpo,rloo")]
        return "not trained"

    monkeypatch.setattr(compare, "_train", begin)
    with pytest.raises(KeelError, match="fewer than two arms"):
        run(small(seeds=1), out, jobs=1, note=lambda text: None)
    assert codes == [2, 2]
    in_use, other = capsys.readouterr().err.splitlines()
    assert re.search(rf"{out} is in use by process {os.getpid()}: wait .* --out DIR", in_use)
    assert "holds another comparison" in other


def test_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(KeelError, match="not empty and holds no comparison"):
        run(small(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_runs_have_the_threads_that_are_stated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "usable_cores", lambda: 4)
    for stated, jobs, threads, note in (
        ((), None, 1, "4 at a time, 1 threads each"),
        ((), 2, 2, "2 at a time, 2 threads each"),
        (("threads=1",), 2, 1, "2 at a time, 1 threads each"),
        (("threads=2",), None, 2, "2 at a time, 2 threads each"),
    ):
        seen: list[int | None] = []

        def begin(*given: Any, seen: list[int | None] = seen) -> str:
            _, folder, _, recipe, seed, threads, started = given
            seen.append(compare._seeded(recipe, seed, threads, folder, started).threads)
            return "not trained"

        monkeypatch.setattr(compare, "_train", begin)
        notes: list[str] = []
        out = tmp_path / f"{stated}{jobs}"
        with pytest.raises(KeelError, match="fewer than two arms"):
            run(small(overrides=(*SMALL, *stated)), out, jobs, note=notes.append)
        assert seen == [threads] * 4
        assert any(note in text for text in notes), notes


def test_remains_of_a_killed_start_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (".lock", ".tmp-plan.toml"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(compare, "_train", lambda *_: "not trained")
    with pytest.raises(KeelError, match="fewer than two arms"):
        run(small(), tmp_path, note=lambda text: None)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "plan.toml"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison of one seed."""
    out = tmp_path_factory.mktemp("compared") / "out"
    assert main([*COMMAND, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_runs_are_compared_and_kept_and_failures_named(out: Path) -> None:
    notes = list[str]()
    blocked = out / "runs/ppo/seed-1"
    blocked.write_text("no folder")
    found = run(small(), out, jobs=2, note=notes.append)
    assert [(one.arm, one.seed) for one in found.failed] == [("ppo", 1)]
    assert "is a file" in found.failed[0].why
    assert any("ppo seed 1 failed" in text for text in notes)
    assert "left out, since they failed: ppo seed 1" in found.comparison.notes[-1]
    assert outcome(small(seeds=1), out).comparison.seeds == 1
    blocked.unlink()
    found = run(small(), out, jobs=2, note=notes.append)
    assert found.failed == ()
    assert [one.arm for one in found.comparison.arms] == ["grpo", "ppo"]
    score = load(out / "runs/ppo/seed-1").info()["evaluation"]["rl"]["after"]["mean"]
    assert found.comparison.arms[1].scores[1] == score
    assert all((one.peak_bytes or 0) > 50e6 for one in found.comparison.arms)
    assert found.comparison.pairs[0].by_prompt is not None
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    assert len(stamps) == 4
    again = run(small(), out, note=notes.append)
    assert again.comparison == found.comparison
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}, "runs were repeated"
    with pytest.raises(KeelError, match="holds another comparison"):
        run(small(overrides=("steps=3", *SMALL[1:])), out)


@pytest.mark.slow
def test_a_shared_start_is_trained_once_a_seed(tmp_path: Path) -> None:
    recipe = tmp_path / "two.toml"
    recipe.write_text(STAGES)
    chosen = plan([str(recipe)], ["grpo", "rloo"], seeds=(0,))
    assert chosen.shared is not None
    assert [stage.name for stage in chosen.shared.stages] == ["sft"]
    run(chosen, tmp_path / "out", note=lambda text: None)
    start = tmp_path / "out/runs" / START
    for arm in ("grpo", "rloo"):
        arm_run = load(tmp_path / "out/runs" / arm / "seed-0")
        assert arm_run.stages == ("rl",)
        assert arm_run.recipe()["model"]["name"] == str(start / "seed-0-model")
        assert [r["step"] for r in arm_run.metrics()] == [1, 2]
    before = [
        load(tmp_path / "out/runs" / arm / "seed-0").info()["evaluation"]["rl"]["before"]
        for arm in ("grpo", "rloo")
    ]
    assert before[0] == before[1]
    whole = plan([str(recipe)], ["grpo", "rloo"], seeds=(0,), shared_start=False)
    assert whole.shared is None
    assert len(whole.arms[0].recipe.stages) == 2


@pytest.mark.slow
def test_interrupted_it_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    words = ["compare", "tiny", "--algorithms", "grpo,ppo", "--seeds", "1", "steps=12", "threads=1"]
    words += ["evaluation.prompts=4", "checkpoints.every=2", "--out", str(cut)]
    command = [sys.executable, "-m", "keel", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        begun = "runs/*/seed-0/checkpoints/step-*"
        assert eventually(lambda: any(cut.glob(begun)), 120)
        os.kill(first.pid, signal.SIGTERM)
        printed = first.communicate()[0].decode()
    assert first.returncode == 130
    assert "the same command goes on: keel compare tiny" in printed
    assert main(words) == 0
    for arm in ("grpo", "ppo"):
        whole = train(load_recipe(cut / f"runs/{arm}/seed-0.toml"), tmp_path / arm)
        assert (cut / f"runs/{arm}/seed-0/metrics.jsonl").read_bytes() == whole.metrics.read_bytes()


@pytest.mark.slow
def test_command_writes_its_files(out: Path) -> None:
    with (out / "scores.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["seed"]) for row in rows] == [("grpo", "0"), ("ppo", "0")]
    found = json.loads((out / "comparison.json").read_text())
    assert found["command"].startswith("keel compare tiny steps=2")
    assert found["pairs"][0]["statement"] == "no difference shown"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "comparison.html").read_text()
    assert "<svg" in page
    assert re.search('<script|src=|href="http', page) is None
    assert "no difference shown" in page
    assert main([*COMMAND, "--baseline", "grpo", "--out", str(out)]) == 0
    found = json.loads((out / "comparison.json").read_text())
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [("ppo", "grpo")]
    assert "--baseline grpo" in found["command"]
    assert main(["compare", "steps=2"]) == 2
    assert main(["compare", "tiny", "--vary", "steps=1"]) == 2
