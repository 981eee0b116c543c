"""`keel eval` of reward models: what rows cannot tell, a stage's own keys, options in vain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.analysis.progress import _measured
from keel.cli.main import main
from keel.config.load import to_toml
from keel.config.model import Model
from keel.models.policy import load_policy
from keel.models.reward import Kind, reward_model_from
from keel.runs.layout import RunFolder
from keel.training.run import train
from tests.cli.test_wrong_inputs import tried
from tests.training.judged import MODEL, data, labelled, ones, recipe, traces, write
from tests.training.small import info, small

Capture = pytest.CaptureFixture[str]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, str]:
    """An outcome and a process model whose heads say something, as plain folders."""
    folder = tmp_path_factory.mktemp("models")
    policy = load_policy(Model(**MODEL), 0)
    policy.save(folder / "policy")
    kinds: tuple[Kind, ...] = ("outcome", "process")
    for kind in kinds:
        made = reward_model_from(policy, kind, 0)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            made.head.weight.copy_(torch.randn(made.head.weight.shape, generator=generator))
        made.save(folder / kind)
    return {kind: str(folder / kind) for kind in kinds}


@pytest.fixture(scope="module")
def process_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose process model reads steps by a separator and a threshold of its own."""
    folder = tmp_path_factory.mktemp("process")
    stage = {
        "stage": "process_reward_model",
        "name": "marks",
        "separator": " ",
        "threshold": 0.75,
        "steps": 4,
        "batch_size": 8,
        "optimizer": {"learning_rate": 4e-3},
        "data": data(folder, traces(32, 1), traces(24, 2)),
    }
    return train(recipe(stage), folder / "run")


def message(words: list[str], capsys: Capture) -> str:
    capsys.readouterr()  # progress bars of what was loaded before
    assert main(words) == 0
    return capsys.readouterr().out


def strict(words: list[str], capsys: Capture) -> dict[str, Any]:
    """The result as JSON that any reader takes: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found: dict[str, Any] = json.loads(message([*words, "--json"], capsys), parse_constant=refuse)
    return found


TIES = [{**row, "probability": 0.5} for row in ones(4, 3)]
ALL_RIGHT = [{**row, "first_error": None} for row in traces(4, 3)]
ALL_WRONG = [{**row, "first_error": 1} for row in traces(4, 3)]
EDGES: dict[str, tuple[str, Rows, list[str], list[str]]] = {
    # rows, which of them, undefined figures, defined ones
    "one class": (
        "labels",
        [{**row, "label": True} for row in labelled(4, 3)],
        ["auc"],
        ["accuracy", "log_loss"],
    ),
    "all ties": ("pairs", TIES, ["accuracy"], ["log_loss", "ece"]),
    "no wrong trace": ("steps", ALL_RIGHT, ["on_wrong", "f1"], ["on_right", "accuracy", "gain"]),
    "one trace": ("steps", ALL_WRONG[:1], ["on_right", "f1"], ["on_wrong", "accuracy", "gain"]),
}


@pytest.mark.parametrize("case", EDGES)
def test_what_rows_cannot_tell_is_undefined(
    case: str, models: dict[Kind, str], tmp_path: Path, capsys: Capture
) -> None:
    rows, made, undefined, defined = EDGES[case]
    model = models["process" if rows == "steps" else "outcome"]
    path = write(tmp_path / "rows.jsonl", made)
    words = ["eval", model, f"--{rows}", path, "--pictures", str(tmp_path / "pictures")]
    # These traces lie without separators, as their tokens do.
    words += ["--separator", " "] if rows == "steps" else []
    lines = dict(re.split(r"\s+", line, maxsplit=1) for line in message(words, capsys).splitlines())
    for name in undefined:
        assert lines[name].startswith("undefined"), name
    for name in defined:
        assert re.match(r"-?\d", lines[name]), name
    found = strict(words, capsys)
    for name in undefined:
        assert (found[name]["mean"] if isinstance(found[name], dict) else found[name]) is None
    assert (tmp_path / "pictures" / "rows-reliability.png").is_file()


def test_an_interval_without_ends_is_a_dash(
    models: dict[Kind, str], tmp_path: Path, capsys: Capture
) -> None:
    path = write(tmp_path / "rows.jsonl", ALL_WRONG[:1])
    out = message(["eval", models["process"], "--steps", path, "--separator", " "], capsys)
    assert re.search(r"^gain +-?\d\.\d{3}   – +1$", out, re.MULTILINE), out
    assert re.search(r"^on_right +undefined   – +0$", out, re.MULTILINE), out
    path = write(tmp_path / "more.jsonl", labelled(8, 3))
    out = message(["eval", models["outcome"], "--labels", path], capsys)
    head, *rest = out.splitlines()
    assert head == "                    mean   95 % interval        n"
    assert re.match(r"accuracy           \d\.\d{3}   \[\d\.\d{3}, \d\.\d{3}\]       8$", rest[0])


def by_turns(completions: list[str], **columns: Any) -> list[float]:
    """Right, wrong, right, …: as answers are in order, whatever they say."""
    return [float(number % 2 == 0) for number in range(len(completions))]


def test_one_prompt_sampled_is_plain_json(capsys: Capture, tmp_path: Path) -> None:
    """The mean of one prompt's samples has no interval; one that is infinite is no JSON."""
    train(small("steps=1"), tmp_path / "run")
    words = ["eval", str(tmp_path / "run"), "--prompts", "1", "--samples", "3"]
    words += ["--reward", "tests.cli.test_eval_judged:by_turns"]
    assert strict(words, capsys)["sampled"] == {"mean": 2 / 3, "low": None, "high": None, "n": 1}
    assert re.search(r"^sampled +0\.667   – +1$", message(words, capsys), re.MULTILINE)


def test_a_run_whose_validation_rows_are_all_ties(tmp_path: Path, capsys: Capture) -> None:
    stage = {
        "stage": "reward_model",
        "steps": 1,
        "batch_size": 4,
        "data": data(tmp_path, ones(8, 1), TIES),
    }
    (tmp_path / "ties.toml").write_text(to_toml(recipe(stage)))
    out = message(["train", str(tmp_path / "ties.toml"), "--run", str(tmp_path / "run")], capsys)
    line = "validation accuracy undefined (no decided row), n = 4; log loss 0.693"
    assert f"reward_model after 0 steps: {line}" in out
    assert f"reward_model after 1 steps: {line[:50]}" in out


def test_an_accuracy_of_one_prompt_is_a_count() -> None:
    result: dict[str, Any] = {"accuracy": {"mean": 6 / 7, "low": 0.0, "high": 1.0, "n": 7}, "n": 7}
    line = _measured(result)
    assert line == "validation accuracy 6 of 7 (too few prompts for an interval), n = 7"
    result["accuracy"] |= {"low": 0.42, "high": 0.99}
    assert "validation accuracy 85.7% [42.0%, 99.0%], n = 7" in _measured(result)


# ---------------------------------------------------------------- a stage's own keys


def test_steps_of_a_run_are_read_as_its_stage_read_them(
    process_run: RunFolder, capsys: Capture
) -> None:
    path = str(process_run.path.parent / "validation.jsonl")
    words = ["eval", str(process_run.path), "--steps", path]
    after = info(process_run)["measured"]["marks"]["after"]
    found = strict(words, capsys)
    # What the stage reported at its end, of the same rows; batches may differ in the last bits.
    for name in ("accuracy", "auc", "on_wrong"):
        assert found[name] == pytest.approx(after[name], abs=1e-6), name
    assert found["log_loss"] == pytest.approx(after["log_loss"], abs=1e-6)
    assert strict([*words, "--stage", "marks"], capsys) == found
    assert strict([*words, "--separator", " ", "--threshold", "0.75"], capsys) == found
    # The plain folder says nothing of steps: a newline (which this alphabet lacks), and a half.
    model = ["eval", str(process_run.model("marks")), "--steps", path]
    assert "'\\n'" in tried(model, capsys)
    half = strict([*model, "--separator", " "], capsys)
    assert half == strict([*words, "--threshold", "0.5"], capsys)
    assert half["accuracy"] != found["accuracy"]
    none = strict([*words, "--threshold", "0"], capsys)
    assert none["on_right"]["mean"] == 1.0
    assert none["on_wrong"]["mean"] == 0.0


@pytest.mark.parametrize("value", ["1.5", "nan", "half"])
def test_a_threshold_is_a_probability(value: str, capsys: Capture) -> None:
    line = tried(["eval", "./none", "--steps", "x.jsonl", f"--threshold={value}"], capsys)
    assert "--threshold" in line
    assert value in line


# ---------------------------------------------------------------- options without effect


WITHOUT: dict[str, tuple[list[str], str]] = {
    "of tasks": (
        ["--pairs", "f", "--task", "x", "--reward", "a:b", "--checkpoint", "last"],
        "--task, --reward, --checkpoint: without effect on judged rows (--pairs)",
    ),
    "numbers": (
        ["--labels", "f", "--prompts", "3", "--top-k", "0", "--seed", "0"],
        "--prompts, --top-k, --seed: without effect on judged rows (--labels)",
    ),
    "keys of a task": (["--steps", "f", "--set", "a=b"], "--set: without effect"),
    "separator of pairs": (
        ["--pairs", "f", "--separator", "zz"],
        "--separator: of answers in steps only: leave out, or give --steps",
    ),
    "threshold of labels": (
        ["--labels", "f", "--threshold", "0", "--separator", ""],
        "--separator, --threshold: of answers in steps only",
    ),
    "all of judged rows": (
        ["--stage", "x", "--separator", "a", "--threshold", "0.5", "--pictures", "d"],
        "--stage, --separator, --threshold, --pictures: of judged rows only: give --pairs",
    ),
    "two files": (["--pairs", "f", "--steps", "g"], "--pairs, --steps: give one file"),
    "a model's checkpoint": (
        ["--task", "sort_digits", "--checkpoint", "best"],
        "./none is not a run folder, so it has no checkpoint 'best': drop --checkpoint",
    ),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_options_without_effect_are_named(case: str, capsys: Capture) -> None:
    words, part = WITHOUT[case]
    assert part in tried(["eval", "./none", *words], capsys)


# ---------------------------------------------------------------- folders for pictures


def test_pictures_where_no_folder_can_be(
    models: dict[Kind, str], tmp_path: Path, capsys: Capture
) -> None:
    path = write(tmp_path / "rows.jsonl", ones(2, 3))
    for wrong in ("/proc/pictures", path, f"{path}/below"):
        # The model is never loaded: with one that is not there the folder is named all the same.
        for model in (models["outcome"], "./none"):
            words = ["eval", model, "--pairs", path, "--pictures", wrong]
            line = tried(words, capsys)
            assert re.search(f"cannot make {re.escape(wrong)}: .+: give another --pictures", line)
