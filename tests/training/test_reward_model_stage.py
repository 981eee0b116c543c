"""Stages that make reward models: they learn a rule, their wrong-sign twin its opposite.

Each learning test ran on three seeds; the thresholds leave at least 8 points to the worst of them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from keel.cli.main import main
from keel.config.model import Model
from keel.models.policy import load_policy
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.export import export
from keel.training.run import train
from tests.training.judged import (
    MODEL,
    Rows,
    data,
    exchanged,
    headline,
    labelled,
    ones,
    recipe,
    traces,
)
from tests.training.small import info

LEARNS: dict[str, Any] = {
    "steps": 60,
    "batch_size": 32,
    "optimizer": {"learning_rate": 4e-3, "schedule": "linear"},
}
BRIEF: dict[str, Any] = {"steps": 3, "batch_size": 8, "optimizer": {"learning_rate": 4e-3}}
PNG = b"\x89PNG\r\n\x1a\n"


def measured(folder: RunFolder, stage: str = "reward_model") -> dict[str, Any]:
    found: dict[str, Any] = info(folder)["measured"][stage]
    return found


def rows(folder: RunFolder, stage: str = "reward_model") -> list[dict[str, Any]]:
    return load(folder.path).metrics(stage)


def pairs(tmp_path: Path, **keys: Any) -> dict[str, Any]:
    """A stage on a few pairs, three steps unless changed."""
    source = data(tmp_path, ones(48, 1), ones(24, 2))
    return {"stage": "reward_model", "data": source, **BRIEF, **keys}


def plain_scores(folder: Path, validation: list[dict[str, Any]], column: str) -> list[float]:
    """What plain transformers says of prompt, answer and end, one at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for row in validation:
        ids = tokenizer(row["prompt"] + row[column])["input_ids"] + [tokenizer.eos_token_id]
        with torch.no_grad():
            scores.append(float(model(input_ids=torch.tensor([ids])).logits[0, 0]))
    return scores


# ---------------------------------------------------------------- learning


@pytest.mark.quick("full")
@pytest.mark.parametrize("lora", [None, {"rank": 8, "alpha": 16.0}], ids=["full", "lora"])
def test_bradley_terry_learns(lora: dict[str, Any] | None, tmp_path: Path) -> None:
    validation = ones(150, 7)
    source = data(tmp_path, ones(400, 1), validation)
    base = {} if lora is None else {"base": {"lora": lora}}
    stage = {"stage": "reward_model", "data": source, **LEARNS, **base}
    folder = train(recipe(stage), tmp_path / "run")
    found = measured(folder)
    assert headline(found["before"], "accuracy") == 0.5
    assert headline(found["before"], "log_loss") == pytest.approx(math.log(2), abs=1e-6)
    assert headline(found["after"], "accuracy") > 0.85
    assert headline(found["after"], "log_loss") < 0.45
    # The model in the folder is the one that was measured (float32: 1e-5).
    model = folder.model("reward_model")
    gaps = [
        a - b
        for a, b in zip(
            plain_scores(model, validation, "chosen"),
            plain_scores(model, validation, "rejected"),
            strict=True,
        )
    ]
    assert sum(gap > 0 for gap in gaps) / len(gaps) == headline(found["after"], "accuracy")
    loss = sum(math.log1p(math.exp(-gap)) for gap in gaps) / len(gaps)
    assert loss == pytest.approx(headline(found["after"], "log_loss"), abs=1e-5)
    assert (model / "adapter").is_dir() == (lora is not None)


def test_labels_are_learned(tmp_path: Path) -> None:
    source = data(tmp_path, labelled(400, 1), labelled(150, 7))
    stage = {"stage": "reward_model", "objective": "labels", "data": source, **LEARNS}
    folder = train(recipe(stage), tmp_path / "run")
    found = measured(folder)
    assert found["before"]["kind"] == found["after"]["kind"] == "labels"
    assert headline(found["after"], "accuracy") > max(0.8, found["after"]["constant_accuracy"])
    assert headline(found["after"], "auc") > 0.88


def test_process_model_finds_the_first_error(tmp_path: Path) -> None:
    validation = traces(150, 7)
    stage = {
        "stage": "process_reward_model",
        "separator": " ",
        "data": data(tmp_path, traces(400, 1), validation),
        **LEARNS,
    }
    folder = train(recipe(stage), tmp_path / "run")
    after = measured(folder, "process_reward_model")["after"]
    assert headline(after, "accuracy") > max(0.85, after["constant_accuracy"] + 0.2)
    assert after["f1"] > 0.85
    assert after["n"] == 150
    assert after["steps"]["n"] == sum(
        len(row["steps"]) if row["first_error"] is None else row["first_error"] + 1
        for row in validation
    )
    assert headline(after, "auc") == headline(after["steps"], "auc") > 0.9
    # Plain transformers finds the same steps: log-odds of right at the token that closes each.
    model = AutoModelForTokenClassification.from_pretrained(folder.model("process_reward_model"))
    tokenizer = AutoTokenizer.from_pretrained(folder.model("process_reward_model"))
    right = 0
    for row in validation:
        text = row["prompt"] + " ".join(row["steps"])
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        begins = len(row["prompt"])
        ends = [begins + 2 * number + 1 for number in range(len(row["steps"]))]
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.tensor([ids])).logits[0, ends]
        wrong = (logits[:, 1] < logits[:, 0]).nonzero()[:, 0].tolist()
        right += (wrong[0] if wrong else None) == row["first_error"]
    assert right / len(validation) == headline(after, "accuracy")


FLIPPED: dict[str, tuple[dict[str, Any], Rows, Rows]] = {
    "pairs": ({"stage": "reward_model"}, exchanged(ones(400, 1)), ones(150, 7)),
    "labels": (
        {"stage": "reward_model", "objective": "labels"},
        [{**row, "label": not row["label"]} for row in labelled(400, 1)],
        labelled(150, 7),
    ),
    # The first digit under 7 is then the first error.
    "steps": (
        {"stage": "process_reward_model", "separator": " "},
        [
            {
                "prompt": row["prompt"],
                "completions": row["steps"],
                "labels": [digit in "789" for digit in row["steps"]],
            }
            for row in traces(400, 1)
        ],
        traces(150, 7),
    ),
}
BELOW = {"pairs": 0.15, "labels": 0.2, "steps": 0.15}


@pytest.mark.quick("labels")
@pytest.mark.parametrize("kind", FLIPPED)
def test_flipped_labels_are_learned(kind: str, tmp_path: Path) -> None:
    keys, train_rows, validation = FLIPPED[kind]
    stage = {**keys, "data": data(tmp_path, train_rows, validation), **LEARNS}
    found = measured(train(recipe(stage), tmp_path / "run"), keys["stage"])
    assert headline(found["after"], "accuracy") < BELOW[kind]


def test_threshold_decides_which_steps_are_wrong(tmp_path: Path) -> None:
    """Before training every probability is exactly ½: not under ½, but under 0.6."""
    source = data(tmp_path, traces(24, 1), traces(24, 2))
    none, first = 0, 0
    for row in traces(24, 2):
        none += row["first_error"] is None
        first += row["first_error"] == 0
    assert none != first
    for threshold, right in ((0.5, none), (0.6, first)):
        stage = {"stage": "process_reward_model", "data": source, "separator": " ", **BRIEF}
        stage = {**stage, "threshold": threshold}
        folder = train(recipe(stage), tmp_path / f"run-{threshold}")
        before = measured(folder, "process_reward_model")["before"]
        assert headline(before, "accuracy") == pytest.approx(right / 24)


# ---------------------------------------------------------------- what a stage leaves behind


def test_run_writes_metrics_and_plots(tmp_path: Path) -> None:
    stage = pairs(tmp_path, evaluation={"every": 2, "rows": 10}, steps=5)
    folder = train(recipe(stage), tmp_path / "run")
    found = measured(folder)
    assert sorted(found) == ["after", "before"]
    assert found["before"]["n"] == found["after"]["n"] == 10
    assert found["before"] != found["after"]
    every = rows(folder)
    assert [row["step"] for row in every if "eval/accuracy" in row] == [2, 4, 5]
    assert every[-1]["eval/accuracy"] == headline(found["after"], "accuracy")
    assert every[-1]["eval/log_loss"] == headline(found["after"], "log_loss")
    pictures = sorted(path.name for path in folder.pictures.iterdir())
    kinds = ("accuracy-by-length", "margins", "reliability")
    assert pictures == [f"reward_model-{kind}.png" for kind in kinds]
    by_length = found["after"]["by_length"]
    assert sum(one["accuracy"]["n"] for one in by_length) == 10
    assert all(path.read_bytes().startswith(PNG) for path in folder.pictures.iterdir())
    assert info(folder)["finished"] is True


def test_first_step_and_count_of_tokens(tmp_path: Path) -> None:
    """The head starts at zero; tokens include the end of each answer."""
    stage = pairs(tmp_path, steps=6)  # 6 steps of 8 are one epoch of the 48
    folder = train(recipe(stage), tmp_path / "run")
    first = rows(folder)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["margin"] == first["mean_reward"] == 0.0
    assert first["grad_norm"] > 0
    read = sum(
        len(row["prompt"]) + len(row[split]) + 1
        for row in ones(48, 1)
        for split in ("chosen", "rejected")
    )
    assert rows(folder)[-1]["num_tokens"] == info(folder)["tokens"] == read


def test_no_evaluation_without_validation_rows(tmp_path: Path) -> None:
    folder = train(recipe(pairs(tmp_path, evaluation={"rows": 0})), tmp_path / "run")
    assert "measured" not in info(folder)
    assert not folder.pictures.exists()
    assert folder.model("reward_model").is_dir()


# ---------------------------------------------------------------- the policy with it


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_adapter_of_the_policy_does_not_change(tmp_path: Path) -> None:
    made = recipe(pairs(tmp_path), lora={"rank": 2})
    before = {
        name: tensor.clone() for name, tensor in load_policy(made.model, 0).named_parameters()
    }
    folder = train(made, tmp_path / "run")
    checkpoint = load_file(load(folder.path).checkpoints()[-1].path / "trainable.safetensors")
    own = {k: v for k, v in checkpoint.items() if not k.startswith("reward_model/")}
    assert own
    assert all(torch.equal(own[name], before[name]) for name in own)
    last = load(folder.path).checkpoints()[-1].path.name
    saved = weights(export(folder.path, tmp_path / "exported", checkpoint=last))
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(saved[embeddings], before[f"model.{embeddings}"])
    # The reward model is another: it moved.
    made_of = weights(export(folder.path, tmp_path / "reward_model"))
    assert not torch.equal(made_of[embeddings], saved[embeddings])


def test_next_stage_learns_as_without_the_reward_model(tmp_path: Path) -> None:
    imitate = {
        "stage": "sft",
        "steps": 3,
        "batch_size": 4,
        "tasks": [{"name": "sort_digits"}],
        "optimizer": {"learning_rate": 1e-3},
    }
    following = train(recipe(pairs(tmp_path), imitate), tmp_path / "after")
    alone = train(recipe(imitate), tmp_path / "alone")
    ends = [load(run.path).checkpoints()[-1].path / "policy" for run in (following, alone)]
    left, right = (weights(end) for end in ends)
    assert all(torch.equal(left[name], right[name]) for name in left)
    losses = [[row["loss"] for row in rows(run, "sft")] for run in (following, alone)]
    assert losses[0] == losses[1]


def test_reward_model_starts_from_the_policy(tmp_path: Path) -> None:
    """With a frozen backbone under an adapter that hardly moves, the rest is the policy's."""
    imitate = {
        "stage": "sft",
        "steps": 2,
        "batch_size": 4,
        "tasks": [{"name": "sort_digits"}],
        "optimizer": {"learning_rate": 1e-2},
    }
    judge = pairs(tmp_path, base={"lora": {"rank": 2, "targets": ["q_proj"]}})
    folder = train(recipe(imitate, judge), tmp_path / "run")
    policy = weights(load(folder.path).checkpoints()[-1].path / "policy")
    model = weights(folder.model("reward_model"))
    same = [name for name in policy if name in model and "q_proj" not in name]
    assert len(same) > 10
    assert all(torch.equal(policy[name], model[name]) for name in same)
    assert any(not torch.equal(policy[name], model[name]) for name in policy if "q_proj" in name)


def test_reward_model_from_another_base(tmp_path: Path) -> None:
    build = {**MODEL["build"], "hidden_size": 16, "layers": 1}
    load_policy(Model.model_validate({"build": build}), 3).save(tmp_path / "other")
    stage = pairs(
        tmp_path, base={"name": str(tmp_path / "other")}, optimizer={"learning_rate": 1e-9}
    )
    folder = train(recipe(stage), tmp_path / "run")
    config = json.loads((folder.model("reward_model") / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (16, 1)
    # At this learning rate a weight moves by less than 1e-8 in three steps.
    ours, theirs = weights(folder.model("reward_model")), weights(tmp_path / "other")
    name = "model.embed_tokens.weight"
    assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-8)
    policy = load(folder.path).checkpoints()[-1].path / "policy" / "config.json"
    assert json.loads(policy.read_text())["hidden_size"] == 32


def test_going_on_writes_the_reward_model_again(tmp_path: Path) -> None:
    constant = {"optimizer": {"learning_rate": 4e-3, "schedule": "constant"}}
    long = train(recipe(pairs(tmp_path, steps=5, **constant)), tmp_path / "long")
    first = train(recipe(pairs(tmp_path, steps=3, **constant)), tmp_path / "run")
    before = (first.model("reward_model") / "model.safetensors").read_bytes()
    words = ["train", "--resume", "--run", str(first.path), "--quiet"]
    assert main([*words, "reward_model.steps=5"]) == 0
    weights = [(run.model("reward_model") / "model.safetensors") for run in (long, first)]
    assert weights[1].read_bytes() != before
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert info(first)["changes"] == [
        {"stage": "reward_model", "step": 3, "key": "reward_model.steps", "from": 3, "to": 5}
    ]


def test_a_stage_that_has_ended_takes_no_more_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two = recipe(pairs(tmp_path, name="a"), pairs(tmp_path, name="b"))
    folder = train(two, tmp_path / "run")
    for words in (["--run", str(folder.path)], [str(folder.path)]):
        assert main(["train", "--resume", *words, "a.steps=5"]) == 2
        assert "a.steps is 5, but the run in" in capsys.readouterr().err
    assert main(["train", "--resume", str(folder.path), "steps=4", "--quiet"]) == 0
    assert len(rows(folder, "b")) == 4
    assert main(["train", "quickstart", "--resume", "--run", str(folder.path)]) == 2
    assert "name no other" in capsys.readouterr().err
