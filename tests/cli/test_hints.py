"""What mistaken names are answered with, and the lists of rewards and models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from keel.cli.main import main
from keel.config.errors import models_in
from keel.config.fields import nearest
from keel.config.foreign import FRAMEWORKS, hints, programs
from keel.config.load import load_recipe
from keel.config.schema import Recipe
from keel.data.tables import read_table
from keel.models.families import FAMILIES
from keel.rewards.registry import BUILT_IN, MADE, TASK
from keel.types import KeelError

Capture = pytest.CaptureFixture[str]
NO_SEQUENCE = ("cohere", "cohere2", "ernie4_5", "granite", "olmoe")
NO_TOKEN = (*NO_SEQUENCE, "gemma3_text", "hunyuan_v1_dense", "olmo", "olmo2", "olmo3", "opt")
"""Families without the class in transformers 5."""


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "control"], "keel control ALGORITHM --env ID"),
        (["train", "gpro"], "algorithm=grpo"),
        (["train", "tiy"], "did you mean 'tiny'?"),
        (["train", "recipe.yaml"], "recipes are TOML"),
        (["train", "./recipe.yml"], "recipes are TOML"),
        (["train", "tiny", "use_vllm=true"], "engine of its own"),
        (["train", "tiny", "algorithm=dpo"], 'stage = "dpo"'),
        (["train", "tiny", "algorithm=sft"], 'stage = "sft"'),
        (["train", "tiny", "algorithm=dqn"], "keel control dqn"),
        (["train", "tiny", "algorithm=gpro"], "did you mean 'grpo'?"),
        (["explain", "gpro"], "did you mean 'grpo'?"),
        (["train", "tiny", "per_device_train_batch_size=8"], "over rollout.group_size"),
        (["train", "quickstart", "checkpoint.every=5"], "did you mean 'rl.checkpoints.every'?"),
        (["train", "tiny", "checkpoint.every=5"], "did you mean 'checkpoints.every'?"),
        (["train", "tiny", "checkpoint.evry=5"], "did you mean 'checkpoints.every'?"),
        (["train", "tiny", "eval.every=5"], "did you mean 'evaluation.every'?"),
        (["train", "tiny", "every=5"], "mean 'checkpoints.every' or 'evaluation.every'?"),
        (["train", "tiny", "modle.name=x"], "did you mean 'model.name'?"),
        (["train", "quickstart", "modle.name=x"], "did you mean 'model.name'?"),
        (["train", "quickstart", "sfft.steps=5"], "did you mean 'sft.steps'?"),
        (["train", "tiny", "task.path=x"], "did you mean 'tasks.path'?"),
        (["train", "tiny", "algorithm.surrogat.kind=x"], "mean 'algorithm.surrogate.kind'?"),
        (["train", "tiny", "rollouts.n=4"], "in Keel it is 'rollout.group_size'"),
        (["train", "tiny", "a.rollout.val_kwargs.n=4"], "in Keel it is 'evaluation.samples'"),
        (["train", "tiny", "actor.model.path=x"], "in Keel it is 'model.name'"),
        (["train", "tiny", "critic.optim.warmup_ratio=0.1"], "value.optimizer.warmup_ratio"),
        (["train", "tiny", "critic.model.lora_rank=8"], 'value.kind = "head"'),
        (["train", "tiny", "adam_beta1=0.8"], "set optimizer.betas = ["),
        (["train", "tiny", "processing_class=x"], "in keel.train it is tokenizer"),
        (["train", "tiny", "stages.1.steps=3"], "stages has 1 entries, from stages.0"),
        (["train", "tiny", "tasks=sort_digits"], "set one of them, such as tasks.name"),
        (["train", "tiny", "evaluation=off"], "set one of them, such as evaluation.prompts"),
        (["train", "tiny", "data.train_batch_size=4"], "it is 'rollout.prompts_per_step'"),
        (["train", "tiny", "critic.optim.lr=1e-5"], "it is 'value.optimizer.learning_rate'"),
        (["train", "quickstart", "critic.optim.weight_decay=0"], "'value.optimizer.weight_decay'"),
        (["train", "tiny", "reward_model.enable=true"], "a reward model in rewards.functions"),
        (["train", "tiny", "trainer.n_gpus_per_node=8"], "it is 'cluster.processes'"),
        (["train", "tiny", "a.actor.use_kl_loss=true"], "algorithm.divergence.beta (0 is off)"),
        (["train", "tiny", "a.tensor_model_parallel_size=2"], "rollout.vllm.arguments"),
        (["train", "tiny", "logging_steps=10"], "every step is recorded"),
        (["train", "tiny", "warmup_ratio=0.1"], "optimizer.warmup_ratio"),
        (
            ["train", "tiny", "optimizer.lr_warmup_steps_ratio=0.1"],
            "in Keel it is 'optimizer.warmup_ratio'",
        ),
        (["train", "tiny", "num_train_epochs=3"], "steps = 0 drops that of a recipe"),
        (["train", "tiny", "gradient_accumulation_steps=2"], "the tokens of a micro-batch"),
        (["train", "tiny", "tasks.heldout_path=x"], "it is 'tasks.validation_path'"),
        (["train", "tiny", "tasks.promt=x"], "key 'tasks.0.promt': did you mean 'prompt'?"),
        (["control", "ppo", "--env", "CartPole-v1", "checkpoint.every=5"], "'checkpoints.every'"),
        (["train", "tiny", "stage=grpo"], "stage = 'grpo': choose one of 'dpo'"),
        (["train", "tiny", "algorithm.surrogate.kind=foo"], "algorithm.surrogate.kind = 'foo'"),
    ],
)
def test_a_mistaken_name_is_answered_with_the_right_one(
    words: list[str], hint: str, capsys: Capture
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_a_stage_key_under_the_model_table_is_sent_above_it(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[model]\nname = "x"\nsteps = 5\n')
    with pytest.raises(KeelError, match=r"'model.steps': 'steps' is a key of the stage"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("per_device_train_batch_size", "set batch_size to that number"),
        ("train_batch_size", "in Keel it is 'batch_size'"),
        ("max_seq_length", "in Keel it is 'max_tokens'"),
        ("max_length", "in Keel it is 'max_tokens'"),
        ("dataset_text_field", 'set columns = { text = "NAME" }'),
        ("dataset_name", 'set name = "datasets" and path in data'),
        ("epochs", "in Keel it is 'num_train_epochs'"),
    ],
)
def test_hints_are_those_of_the_kind_of_stage(key: str, hint: str) -> None:
    stage = {"stage": "sft", "data": [{"path": "a.jsonl"}], key: 8}
    with pytest.raises(KeelError, match=hint):
        load_recipe({"model": {"name": "m"}, "stages": [stage]})


@pytest.mark.parametrize("name", ["reverse.tml", "revers.toml", "./reverse.tml", "reverse"])
def test_a_recipe_file_of_a_mistyped_name_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reverse.toml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeelError, match=r"did you mean 'reverse\.toml'\?"):
        load_recipe(name)


def own_keys() -> set[str]:
    """Keel's keys that the tables of foreign ones name."""
    found = {hint.strip("'") for hint in hints().values() if hint.startswith("'")}
    keys = [key for name in FRAMEWORKS for one in programs(name) for key in one.keys.values()]
    for key in keys:
        values = (key.values or {}).values()
        found |= {own for value in values if not isinstance(value, str) for own in value}
        found |= {key.to} if key.to else set()
    return found - {"surrogate.table", "divergence.after_group", "check"}  # for rules


@pytest.mark.parametrize("own", sorted(own_keys()))
def test_every_hint_names_a_key_of_the_recipe(own: str) -> None:
    models: list[type[BaseModel]] = [Recipe, *models_in(Recipe.model_fields["stages"])]
    for part in own.split("."):
        infos = [m.model_fields[part] for m in models if part in m.model_fields]
        assert infos, f"{own}: {part}"
        models = [inner for info in infos for inner in models_in(info)]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("gpro", ["gspo", "grpo", "ppo"], "grpo"),  # two letters swapped
        ("grop", ["gspo", "grpo"], "grpo"),
        ("dapoo", ["dapo", "ppo"], "dapo"),
        ("GRPO", ["gspo", "grpo"], "grpo"),
        ("zzz", ["grpo"], None),
    ],
)
def test_the_nearest_name_has_the_fewest_typing_errors(
    name: str, known: list[str], meant: str | None
) -> None:
    assert nearest(name, known) == meant


def test_keel_rewards_lists_every_built_in_with_a_line(capsys: Capture) -> None:
    assert main(["rewards", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == {TASK, *BUILT_IN, *MADE}
    assert all(listed.values())
    assert main(["rewards"]) == 0
    assert "numeric_match  " in capsys.readouterr().out


@pytest.mark.parametrize(("text", "column"), [('{"a": ', 7), ('{"é": 1, "b": }', 15)])
def test_a_json_error_names_the_column_within_its_line(
    tmp_path: Path, text: str, column: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"a": 1}}\n{text}\n', encoding="utf-8")
    with pytest.raises(KeelError, match=rf"rows.jsonl:2: .* at column {column}$"):
        read_table("jsonl", str(path), {}, "train")


@pytest.mark.slow
def test_check_finds_a_tracker_without_login(tmp_path: Path) -> None:
    """In a process of its own: wandb keeps the settings that it has first read."""
    pytest.importorskip("wandb")
    code = """if True:
        import json
        from keel.preflight.check import check
        found = check("tiny", ["trackers.wandb=true"], runs=False).as_dict()["findings"]
        print(json.dumps([one for one in found if one["key"] == "trackers.wandb"]))
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**kept, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_SILENT": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (finding,) = json.loads(done.stdout)
    assert finding["severity"] == "error"
    assert "wandb login" in finding["evidence"]


def test_models_lists_every_family_and_its_reward_models(capsys: Capture) -> None:
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == FAMILIES.keys()
    assert {name for name, has in found.items() if not has["outcome"]} == set(NO_SEQUENCE)
    assert {name for name, has in found.items() if not has["process"]} == set(NO_TOKEN)
    assert main(["models"]) == 0
    rows = capsys.readouterr().out.splitlines()[1 : len(FAMILIES) + 1]
    assert [row.split()[0] for row in rows] == sorted(FAMILIES)
    assert [row.split()[-1] == "no" for row in rows] == [
        name in NO_TOKEN for name in sorted(FAMILIES)
    ]
