"""Stages that learn from preferences and labels: rules, their opposites, and what they leave.

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
from keel.config.schema import Recipe
from keel.models.policy import load_policy
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.export import export
from keel.training.run import train
from keel.types import KeelError
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
SLOWER = {"steps": 30, "optimizer": {"learning_rate": 2e-3, "schedule": "linear"}}
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


IPO = {"stage": "dpo", "loss": "ipo"}
HINGE = {"stage": "dpo", "loss": "hinge"}


@pytest.mark.quick("sigmoid")
@pytest.mark.parametrize("keys", [{"stage": "dpo"}, IPO, HINGE], ids=["sigmoid", "ipo", "hinge"])
def test_policy_learns_to_prefer_chosen_answers(keys: dict[str, Any], tmp_path: Path) -> None:
    """Over three seeds validation accuracy came to 86 % and more."""
    source = data(tmp_path, ones(400, 1), ones(150, 7))
    folder = train(recipe({**keys, "data": source, **LEARNS, **SLOWER}), tmp_path / "run")
    before, after = (measured(folder, "dpo")[when] for when in ("before", "after"))
    assert headline(before, "accuracy") == 0.5
    assert before["margins"]["mean"] == before["score"]["mean"] == 0.0
    assert headline(after, "accuracy") > 0.75
    assert after["margins"]["mean"] > 0.02
    assert [path.name for path in folder.path.rglob("*reference*")]
    every = rows(folder, "dpo")
    assert every[-1]["rewards/margins"] > every[5]["rewards/margins"] > 0
    assert every[-1]["loss"] < every[0]["loss"]
    assert every[-1]["rewards/accuracies"] > 0.75


@pytest.mark.quick("simpo")
@pytest.mark.parametrize("loss", ["cpo", "simpo", "orpo"])
def test_losses_without_a_reference_learn(loss: str, tmp_path: Path) -> None:
    """No reference is kept, in memory or in a checkpoint; the rewards are of log-probabilities."""
    source = data(tmp_path, ones(400, 1), ones(150, 7))
    stage = {"stage": "dpo", "loss": loss, "data": source, **LEARNS, **SLOWER}
    folder = train(recipe(stage), tmp_path / "run")
    assert not [path.name for path in folder.path.rglob("*reference*")]
    first, *_, last = rows(folder, "dpo")
    assert first["rewards/chosen"] < 0
    assert last["rewards/margins"] > first["rewards/margins"]
    assert ("nll" in last) == (loss != "simpo")
    # CPO's are sums, in which the lengths, at random, outweigh what 30 steps teach.
    assert loss == "cpo" or headline(measured(folder, "dpo")["after"], "accuracy") > 0.75


def test_kto_learns_from_labels(tmp_path: Path) -> None:
    """The rows of a reward model of labels; the accuracy is of the implied reward's sign."""
    source = data(tmp_path, labelled(400, 1), labelled(150, 7))
    stage = {"stage": "dpo", "loss": "kto", "data": source, **LEARNS, "beta": 0.5}
    folder = train(recipe(stage), tmp_path / "run")
    found = measured(folder, "dpo")
    assert found["before"]["kind"] == found["after"]["kind"] == "labels"
    assert headline(found["after"], "auc") > 0.8
    first, *_, last = rows(folder, "dpo")
    assert first["rewards/margins"] == first["kl/mismatched"] == 0.0
    assert first["loss"] == pytest.approx(0.5, rel=1e-6)
    assert last["rewards/margins"] > 0.1


FLIPPED: dict[str, tuple[dict[str, Any], Rows, Rows]] = {
    "pairs": ({"stage": "reward_model"}, exchanged(ones(400, 1)), ones(150, 7)),
    "dpo": ({"stage": "dpo", **SLOWER}, exchanged(ones(400, 1)), ones(150, 7)),
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
BELOW = {"pairs": 0.15, "dpo": 0.25, "labels": 0.2, "steps": 0.15}


@pytest.mark.quick("labels", "dpo")
@pytest.mark.parametrize("kind", FLIPPED)
def test_flipped_labels_are_learned(kind: str, tmp_path: Path) -> None:
    keys, train_rows, validation = FLIPPED[kind]
    stage = {**LEARNS, **keys, "data": data(tmp_path, train_rows, validation)}
    after = measured(train(recipe(stage), tmp_path / "run"), keys["stage"])["after"]
    assert headline(after, "accuracy") < BELOW[kind]
    assert kind != "dpo" or after["margins"]["mean"] < -0.02


def test_threshold_decides_which_steps_are_wrong(tmp_path: Path) -> None:
    """Before training every probability is exactly ½: not under ½, but under 0.6."""
    held = traces(24, 2)
    source = data(tmp_path, traces(24, 1), held)
    none, first = (sum(row["first_error"] == at for row in held) for at in (None, 0))
    assert none != first
    stage = {"stage": "process_reward_model", "data": source, "separator": " ", **BRIEF}
    stages = [{**stage, "name": f"s{n}", "threshold": n} for n in (0.5, 0.6)]
    folder = train(recipe(*stages), tmp_path / "run")
    for one, right in zip(stages, (none, first), strict=True):
        before = measured(folder, one["name"])["before"]
        assert headline(before, "accuracy") == pytest.approx(right / 24)


# ---------------------------------------------------------------- stages after one another

IMITATE: dict[str, Any] = {
    "stage": "sft",
    "name": "imitate",
    "steps": 2,
    "batch_size": 4,
    "tasks": [{"name": "sort_digits"}],
    "optimizer": {"learning_rate": 1e-2},
}
KEPT = {"every": 1000, "keep": 9}
"""Checkpoints: the end of every stage."""
NARROW = {"lora": {"rank": 2, "targets": ["q_proj"]}}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not the recipe's."""
    folder = tmp_path_factory.mktemp("other") / "model"
    build = {**MODEL["build"], "hidden_size": 16, "layers": 1}
    load_policy(Model.model_validate({"build": build}), 3).save(folder)
    return folder


@pytest.fixture(scope="module")
def chain(other: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Imitation, then reward models of 48 pairs, each from another start, and imitation again."""
    folder = tmp_path_factory.mktemp("chain")
    stages = [
        IMITATE,
        pairs(folder, name="first", base=NARROW, steps=6, evaluation={"every": 2, "rows": 10}),
        pairs(folder, name="second", base={"stage": "first"}),
        pairs(folder, name="third", base={"stage": "second", "lora": {"rank": 2}}),
        # At this learning rate a weight moves by less than 1e-8 in three steps.
        pairs(
            folder,
            name="apart",
            base={"name": str(other)},
            evaluation={"rows": 0},
            optimizer={"learning_rate": 1e-9},
        ),
        {**IMITATE, "name": "again"},
    ]
    stages = [{**stage, "checkpoints": KEPT} for stage in stages]
    return train(recipe(*stages), folder / "run")


def test_card_of_a_reward_model_s_adapter(chain: RunFolder, tmp_path: Path) -> None:
    """Whose backbone is the policy that the run trained before."""
    folder = export(chain.path, tmp_path / "adapter", stage="first", adapter=True)
    card = (folder / "README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained('BASE', num_labels=1)" in card
    assert "pipeline_tag: text-classification" in card
    assert "base_model" not in card
    assert "6 steps of reward_model (first)" in card


def test_stage_writes_metrics_and_plots(chain: RunFolder) -> None:
    found = measured(chain, "first")
    assert sorted(found) == ["after", "before"]
    assert found["before"]["n"] == found["after"]["n"] == 10
    assert found["before"] != found["after"]
    every = rows(chain, "first")
    assert [row["step"] for row in every if "eval/accuracy" in row] == [2, 4, 6]
    assert every[-1]["eval/accuracy"] == headline(found["after"], "accuracy")
    assert every[-1]["eval/log_loss"] == headline(found["after"], "log_loss")
    by_length = found["after"]["by_length"]
    assert sum(one["accuracy"]["n"] for one in by_length) == 10
    # The stage without validation rows has neither figures nor pictures.
    assert info(chain)["measured"].keys() == {"first", "second", "third"}
    pictures = sorted(path.name for path in chain.pictures.iterdir() if path.name[0] in "afst")
    kinds = ("accuracy-by-length", "margins", "reliability")
    wanted = [f"{name}-{kind}.png" for name in ("first", "second", "third") for kind in kinds]
    assert [name for name in pictures if name.partition("-")[2][:-4] in kinds] == wanted
    assert all((chain.pictures / name).read_bytes().startswith(PNG) for name in wanted)
    assert info(chain)["finished"] is True


def test_first_step_and_count_of_tokens(chain: RunFolder) -> None:
    """The head starts at zero; tokens include the end of each answer."""
    every = rows(chain, "first")  # 6 steps of 8 are one epoch of the 48
    assert every[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert every[0]["margin"] == every[0]["mean_reward"] == 0.0
    assert every[0]["grad_norm"] > 0
    read = sum(
        len(row["prompt"]) + len(row[split]) + 1
        for row in ones(48, 1)
        for split in ("chosen", "rejected")
    )
    assert every[-1]["num_tokens"] - rows(chain, "imitate")[-1]["num_tokens"] == read
    assert info(chain)["tokens"] == rows(chain, "again")[-1]["num_tokens"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def end(run: RunFolder, stage: int, step: int) -> dict[str, torch.Tensor]:
    """The policy at the end of a stage."""
    return weights(run.checkpoint(stage, step) / "policy")


def test_reward_model_starts_from_the_policy(chain: RunFolder) -> None:
    """With a frozen backbone under an adapter that hardly moves, the rest is the policy's."""
    policy, model = end(chain, 0, 2), weights(chain.model("first"))
    same = [name for name in policy if name in model and "q_proj" not in name]
    assert len(same) > 10
    assert all(torch.equal(policy[name], model[name]) for name in same)
    assert any(not torch.equal(policy[name], model[name]) for name in policy if "q_proj" in name)


@pytest.mark.parametrize(("earlier", "later"), [("first", "second"), ("second", "third")])
def test_reward_model_starts_from_an_earlier_one(
    earlier: str, later: str, chain: RunFolder
) -> None:
    began = measured(chain, later)["before"]
    # Saved in float32: the same scores to the last few digits. The first measured ten of the rows.
    if earlier != "first":
        ended = measured(chain, earlier)["after"]
        assert headline(began, "log_loss") == pytest.approx(headline(ended, "log_loss"), abs=1e-6)
    assert abs(headline(began, "log_loss") - math.log(2)) > 1e-4
    assert headline(measured(chain, later)["after"], "log_loss") != headline(began, "log_loss")
    assert (chain.model(later) / "adapter").is_dir() == (later == "third")


def test_reward_model_from_another_base(chain: RunFolder, other: Path) -> None:
    config = json.loads((chain.model("apart") / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (16, 1)
    ours, theirs = weights(chain.model("apart")), weights(other)
    name = "model.embed_tokens.weight"
    assert torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-8)
    policy = chain.checkpoint(4, 3) / "policy" / "config.json"
    assert json.loads(policy.read_text())["hidden_size"] == 32


def test_saved_reward_model_as_base_name_is_refused(chain: RunFolder, tmp_path: Path) -> None:
    stage = pairs(tmp_path, base={"name": str(chain.model("second"))})
    with pytest.raises(KeelError, match=r"ForSequenceClassification.*learns on by base\.stage"):
        train(recipe(stage), tmp_path / "run")


def test_next_stage_learns_as_without_the_reward_models(chain: RunFolder, tmp_path: Path) -> None:
    alone = train(recipe(IMITATE, {**IMITATE, "name": "again"}), tmp_path / "alone")
    left, right = end(chain, 5, 2), end(alone, 1, 2)
    assert all(torch.equal(left[name], right[name]) for name in left)
    losses = [[row["loss"] for row in rows(run, "again")] for run in (chain, alone)]
    assert losses[0] == losses[1]


def test_adapter_of_the_policy_does_not_change(tmp_path: Path) -> None:
    made = recipe(pairs(tmp_path), lora={"rank": 2})
    before = {
        name: tensor.clone() for name, tensor in load_policy(made.model, 0).named_parameters()
    }
    folder = train(made, tmp_path / "run")
    last = load(folder.path).checkpoints()[-1].path
    checkpoint = load_file(last / "trainable.safetensors")
    own = {k: v for k, v in checkpoint.items() if not k.startswith("reward_model/")}
    assert own
    assert all(torch.equal(own[name], before[name]) for name in own)
    saved = weights(export(folder.path, tmp_path / "exported", checkpoint=last.name))
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(saved[embeddings], before[f"model.{embeddings}"])
    # The reward model is another: it moved.
    made_of = weights(export(folder.path, tmp_path / "reward_model"))
    assert not torch.equal(made_of[embeddings], saved[embeddings])


@pytest.fixture(scope="module", params=[{}, {"lora": {"rank": 4}}], ids=["full", "lora"])
def policies(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recipe, RunFolder]:
    """Three stages of DPO: the second by IPO, the third of ties only."""
    folder = tmp_path_factory.mktemp("dpo")
    ties = folder / "ties"
    ties.mkdir()
    source = data(ties, [{**row, "probability": 0.5} for row in ones(48, 1)], ones(24, 2))
    stages = (
        pairs(folder, stage="dpo", name="a", token_budget=50, optimizer={"learning_rate": 1e-2}),
        pairs(folder, **IPO, name="b", beta=0.25),
        pairs(folder, stage="dpo", name="c", data=source),
    )
    made = recipe(*({**stage, "checkpoints": KEPT} for stage in stages), **request.param)
    return made, train(made, folder / "run")


def test_dpo_starts_at_its_reference(policies: tuple[Recipe, RunFolder]) -> None:
    """Where the stage before ended: log 2 (rounded to float32), and (1/(2β))² for IPO."""
    _, folder = policies
    for stage, loss in (("a", math.log(2)), ("b", 4.0)):
        first, second, _ = rows(folder, stage)
        assert first["loss"] == pytest.approx(loss, rel=1e-7)
        assert first["rewards/chosen"] == first["rewards/rejected"] == 0.0
        assert first["rewards/margins"] == 0.0
        assert first["grad_norm"] > 0
        assert second["rewards/margins"] != 0.0
        assert measured(folder, stage)["after"]["margins"]["mean"] != 0.0


def test_ties_do_not_change_the_policy(policies: tuple[Recipe, RunFolder]) -> None:
    """½ asks for no margin: the gradient of −½ log σ(h) − ½ log σ(−h) is 0 at h = 0."""
    _, folder = policies
    assert all(row["grad_norm"] == 0.0 for row in rows(folder, "c"))
    assert measured(folder, "c")["after"]["margins"]["mean"] == 0.0
    a, b, c = (
        load_file(entry.path / "trainable.safetensors") for entry in load(folder.path).checkpoints()
    )
    assert any(not torch.equal(a[name], b[name]) for name in a)
    assert all(torch.equal(b[name], c[name]) for name in b)


@pytest.mark.parametrize("policies", [{}], ids=["full"], indirect=True)
def test_saved_policy_is_the_trained_one(policies: tuple[Recipe, RunFolder]) -> None:
    made, folder = policies
    name = "model.embed_tokens.weight"
    before = dict(load_policy(made.model, 0).model.named_parameters())[name]
    assert not torch.equal(end(folder, 0, 3)[name], before)
    # The reference is next to it, and is where the policy began.
    reference = load_file(folder.checkpoint(0, 3) / "reference.safetensors")
    assert torch.equal(reference[name], before)
    assert not folder.model("a").exists()
    kinds = ("accuracy-by-length", "margins", "reliability")
    pictures = {path.name for path in folder.pictures.iterdir()}
    assert {f"{stage}-{kind}.png" for stage in "abc" for kind in kinds} <= pictures


# ---------------------------------------------------------------- more steps


def test_only_the_last_stage_takes_more_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its reward model is written again, as that of a longer run."""
    constant = {"optimizer": {"learning_rate": 4e-3, "schedule": "constant"}}
    long, run = (
        train(
            recipe(pairs(tmp_path, name="a"), pairs(tmp_path, name="b", steps=n, **constant)),
            tmp_path / f"of {n}",
        )
        for n in (5, 3)
    )
    path = run.model("b") / "model.safetensors"
    before = path.read_bytes()
    for words in (["--run", str(run.path)], [str(run.path)]):
        assert main(["train", "--resume", *words, "a.steps=5"]) == 2
        assert "a.steps is 5, but the run in" in capsys.readouterr().err
    assert main(["train", "quickstart", "--resume", "--run", str(run.path)]) == 2
    assert "name no other" in capsys.readouterr().err
    assert main(["train", "--resume", str(run.path), "steps=5", "--quiet"]) == 0
    assert path.read_bytes() != before
    assert path.read_bytes() == (long.model("b") / "model.safetensors").read_bytes()
    assert info(run)["changes"] == [{"stage": "b", "step": 3, "key": "b.steps", "from": 3, "to": 5}]
