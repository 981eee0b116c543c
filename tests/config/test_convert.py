"""Configurations of TRL, verl and OpenRLHF, as their documentation shows them, as recipes."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.config.conversion.convert import Conversion, Converted, convert
from keel.config.conversion.read import Unread
from keel.config.foreign import FRAMEWORKS, Program, programs
from keel.config.load import load_recipe
from keel.config.schema import Recipe
from keel.preflight.check import check
from keel.types import KeelError
from tests.source_tree import ROOT

Capture = pytest.CaptureFixture[str]
CONFIGS = Path(__file__).parent / "foreign_configs"
REFUSED: dict[str, set[str]] = {
    "openrlhf-dpo.sh": set(),
    "openrlhf-group-norm.sh": {"max_samples"},
    "openrlhf-ppo.sh": {"max_samples", "normalize_reward"},
    "openrlhf-reinforce-baseline.sh": {"max_samples", "normalize_reward"},
    "trl-dapo.py": {"reward_funcs"},
    "trl-dpo-lora.sh": set(),
    "trl-dpo.sh": set(),
    "trl-dr-grpo.json": set(),
    "trl-grpo.yaml": set(),
    "trl-gspo.py": set(),
    "trl-lite-ppo.py": {"top_k", "top_p"},
    "trl-reward.sh": set(),
    "trl-rloo.yaml": set(),
    "trl-sft-lora.sh": set(),
    "trl-sft.sh": set(),
    "verl-dapo.sh": {"data.truncation"},
    "verl-gpg.sh": set(),
    "verl-grpo-lora.sh": set(),
    "verl-grpo.sh": set(),
    "verl-gspo.yaml": set(),
    "verl-ppo.sh": set(),
    "verl-reinforce-baseline.sh": set(),
    "verl-remax.sh": set(),
    "verl-reward-model.sh": set(),
    "verl-rloo.sh": set(),
    "verl-sft.sh": set(),
    "verl-sync-ref.sh": {
        f"actor_rollout_ref.ref.{key}"
        for key in ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
    },
}
"""The keys of each configuration that have no counterpart."""


def converted(name: str, **options: Any) -> Converted:
    return convert(str(CONFIGS / name), **options)


def values(name: str) -> dict[str, Any]:
    """The resolved recipe of a configuration, its keys with dots, without the stage's name."""
    recipe = load_recipe(converted(name).recipe).model_dump()
    found: dict[str, Any] = {}

    def walk(table: dict[str, Any], above: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{above}{key}.")
            else:
                found[f"{above}{key}"] = value

    (stage,) = recipe.pop("stages")
    walk(recipe, "")
    walk(stage, "")
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.iterdir()))
def test_each_key_is_mapped_unused_or_refused(name: str) -> None:
    found = converted(name)
    assert {entry.partition(" = ")[0] for entry in found.refused} == REFUSED[name]
    assert {"trl": "TRL", "verl": "verl", "openrlhf": "OpenRLHF"}[
        name.partition("-")[0]
    ] == found.program.framework
    said = {key for theirs, _ in found.mapped for key in theirs} | set(found.unused)
    assert not said & REFUSED[name]
    assert tomllib.loads(found.toml()) == found.recipe


EXACT: dict[str, dict[str, Any]] = {
    "verl-dapo.sh": {
        "rollout.prompts_per_step": 512,
        "rollout.group_size": 16,
        "rollout.max_tokens": 20480,
        "rollout.overlong_buffer": 4096,
        "rollout.dynamic_sampling": True,
        "minibatches": 16,
        "algorithm.surrogate.high": 0.28,
        "algorithm.surrogate.dual": 10.0,
        "algorithm.weights.kind": "token_mean",
        "algorithm.advantage.epsilon": 1e-6,
        "algorithm.divergence": None,
        "optimizer.warmup_steps": 10,
        "optimizer.weight_decay": 0.1,
        "num_train_epochs": 1.0,
    },
    "verl-ppo.sh": {  # most of these are verl's defaults
        "algorithm.advantage.lam": 1.0,
        "algorithm.value.coefficient": 1.0,
        "algorithm.value.clip": 0.5,
        "algorithm.surrogate.dual": 3.0,
        "algorithm.divergence": None,
        "value.optimizer.weight_decay": 0.01,
        "epochs": 1,
        "minibatches": 4,
    },
    "verl-gspo.yaml": {
        "algorithm.ratio": "sequence_token",
        "algorithm.surrogate.low": 0.0003,
        "algorithm.surrogate.dual": None,
        "algorithm.weights.kind": "sequence_mean",
        "optimizer.warmup_ratio": 0.05,
        "steps": 500,
        "evaluation.top_p": 0.7,
    },
    "verl-rloo.sh": {
        "algorithm.ratio": "token",
        "algorithm.surrogate.kind": "clip",
        "algorithm.divergence.where": "reward",
        "algorithm.divergence.estimator": "k1",
        "algorithm.divergence.beta": 0.001,
    },
    "trl-grpo.yaml": {
        "rollout.prompts_per_step": 4,
        "epochs": 2,
        "minibatches": 1,
        "checkpoints.every": 250,
        "optimizer.schedule": "cosine",
        "optimizer.min_lr_ratio": 0.0,
        "algorithm.divergence.unbiased": True,
        "algorithm.weights.kind": "token_mean",
        "seed": 42,
    },
    "trl-gspo.py": {
        "rollout.prompts_per_step": 4,
        "minibatches": 4,
        "algorithm.ratio": "sequence",
        "algorithm.surrogate.high": 4e-4,
        "algorithm.divergence": None,
    },
    "trl-lite-ppo.py": {"rollout.prompts_per_step": 16, "algorithm.advantage.scale": "batch"},
    "trl-rloo.yaml": {
        "algorithm.ratio": "sequence_product",
        "algorithm.weights.kind": "sequence_mean",
        "algorithm.divergence.beta": 0.05,
        "rollout.group_size": 4,
    },
    "trl-dpo-lora.sh": {
        "steps": 1000,
        "batch_size": 16,
        "evaluation.every": 50,
        "model.lora.rank": 32,
        "model.lora.alpha": 16.0,
        "model.lora.targets": ("q_proj", "v_proj"),
        "model.lora.dropout": 0.05,
    },
    "trl-sft.sh": {"packing": True, "max_tokens": 1024, "batch_size": 16},
    "openrlhf-ppo.sh": {
        "minibatches": 8,
        "optimizer.betas": (0.9, 0.95),
        "optimizer.schedule": "cosine",
        "optimizer.min_lr_ratio": 0.1,
        "optimizer.warmup_ratio": 0.03,
        "algorithm.advantage.lam": 1.0,
        "algorithm.divergence.where": "reward",
        "value.optimizer.learning_rate": 9e-6,
    },
    "openrlhf-group-norm.sh": {
        "minibatches": 8,
        "algorithm.surrogate.high": 0.27,
        "algorithm.divergence.where": "loss",
        "algorithm.weights.kind": "token_mean",
        "rollout.dynamic_sampling": True,
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_values_and_defaults_are_translated_exactly(name: str) -> None:
    found = values(name)
    assert {key: found[key] for key in EXACT[name]} == EXACT[name]


def test_defaults_of_keel_are_left_out() -> None:
    found = converted("verl-grpo.sh")
    assert found.defaults["algorithm.surrogate.dual"] == 3.0
    assert "epochs" not in found.recipe  # 1 in both
    assert "seed" not in found.recipe


def test_vllm_and_its_correction_are_kept_if_asked_for() -> None:
    plain, kept = (converted("openrlhf-group-norm.sh", vllm=vllm) for vllm in (False, True))
    assert "vllm_num_engines" in plain.unused
    assert "engine" not in plain.recipe["rollout"]
    assert kept.recipe["rollout"]["engine"] == "vllm"
    assert kept.recipe["rollout"]["vllm"]["gpu_memory_utilization"] == 0.6
    assert kept.recipe["algorithm"]["corrections"] == {"kind": "truncate"}  # the cap is 2 in both


def test_unknown_keys_and_changed_mathematics_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("num_generations: 8\nbetta: 0.1\nloss_type: ess\n")
    found = convert(str(path))
    assert set(found.refused) == {
        "betta = 0.1",
        "loss_type = 'ess'",
    }
    assert "beta?" in found.refused["betta = 0.1"]


@pytest.mark.parametrize("key", ["abcdef0123456789", "12345678901234567890", "0"])
def test_a_secret_is_never_repeated(
    key: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abc")
    path = tmp_path / "run.sh"
    path.write_text(
        "python -m openrlhf.cli.train_sft --pretrain m/x --dataset a/b --wandb_project p "
        f"--use_wandb {key} --api_key 98765 --unknown hf_0123456789abc\n"
    )
    found = convert(str(path))
    assert found.recipe["trackers"] == {"wandb": True, "project": "p"}
    assert main(["recipes", "convert", str(path), "--json"]) == 0
    said = "\n".join((*found.lines(), found.toml(), *capsys.readouterr()))
    for secret in (*([key] if len(key) > 1 else []), "98765", "hf_0123456789abc"):
        assert secret not in said


def converted_text(folder: Path, name: str, text: str) -> Converted:
    path = folder / name
    path.write_text(text)
    return convert(str(path))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", None),
        ("completion_only_loss: true\n", "assistant"),
        ("completion_only_loss: false\n", "all"),
        ("assistant_only_loss: true\n", "assistant"),
        ("assistant_only_loss: false\n", None),
    ],
)
def test_the_tokens_with_loss_are_to_fill_in_unless_set(
    options: str, expected: str | None, tmp_path: Path
) -> None:
    found = converted_text(tmp_path, "sft.yaml", f"packing: true\nmax_steps: 3\n{options}")
    assert ("loss_on" in found.missing) == (expected is None)
    out = load_recipe(found.recipe).stages[0].loss_on  # type: ignore[union-attr]
    assert out == (expected or "assistant")


def test_a_sum_of_losses_is_refused(tmp_path: Path) -> None:
    text = "from trl import DPOConfig\nc = DPOConfig(beta=0.1, loss_type=%s)\n"
    one = converted_text(tmp_path, "a.py", text % '["ipo"]')
    two = converted_text(tmp_path, "b.py", text % '["sigmoid", "ipo"]')
    assert (one.recipe["loss"], one.refused) == ("ipo", {})
    assert "loss" not in two.recipe
    assert list(two.refused) == ['loss_type = ["sigmoid", "ipo"]']


PREFERENCE = {
    "DPOConfig(loss_type=['hinge'], beta=0.2)": {"loss": "hinge", "beta": 0.2},
    "DPOConfig(loss_type=['robust'], label_smoothing=0.1)": {"loss": "robust", "smoothing": 0.1},
    "DPOConfig(loss_type=['sigmoid_norm'], beta=5.0)": {"loss": "sigmoid_norm", "beta": 5.0},
    # Keel's own default is 5.
    "DPOConfig(loss_type='sigmoid_norm')": {"loss": "sigmoid_norm", "beta": 0.1},
    "DPOConfig(loss_type=['sigmoid', 'sft'], loss_weights=[1.0, 0.5])": {"nll": 0.5},
    "DPOConfig(loss_type=['ipo', 'sft'])": {"loss": "ipo", "nll": 1.0},
    "CPOConfig(beta=0.3, label_smoothing=0.2)": {"loss": "cpo", "beta": 0.3, "smoothing": 0.2},
    "CPOConfig(loss_type='simpo', cpo_alpha=0.0, beta=2.0, simpo_gamma=1.4)": {
        "loss": "simpo", "nll": 0.0, "beta": 2.0, "margin": 1.4},
    "CPOConfig(loss_type='simpo')": {"loss": "simpo", "nll": 1.0, "beta": 0.1, "margin": 0.5},
    "ORPOConfig(beta=0.25)": {"loss": "orpo", "beta": 0.25},
    "KTOConfig(undesirable_weight=1.5)": {"loss": "kto", "undesirable_weight": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("call", PREFERENCE)
def test_losses_on_judged_answers_are_mapped(call: str, tmp_path: Path) -> None:
    name = call.partition("(")[0]
    found = converted_text(tmp_path, "a.py", f"from trl import {name}\nc = {call}\n")
    assert found.refused == {}
    names = ("loss", "beta", "smoothing", "nll", "margin", "desirable_weight", "undesirable_weight")
    assert {key: found.recipe[key] for key in names if key in found.recipe} == PREFERENCE[call]


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        ("DPOConfig(loss_type=['aot'])", "loss_type = aot"),
        ("DPOConfig(loss_type=['sft'])", 'loss_type = ["sft"]'),
        (
            "DPOConfig(loss_type=['ipo', 'sft'], loss_weights=[0.5, 1.0])",
            "loss_weights = [0.5, 1.0]",
        ),
        ("DPOConfig(loss_type=['ipo', 'sft'], loss_weights=[1.0])", "loss_weights = [1.0]"),
        ("DPOConfig(loss_weights=[0.5])", "loss_weights = [0.5]"),
        ("CPOConfig(loss_type='hinge')", "loss_type = hinge"),
        ("CPOConfig(loss_type='simpo', label_smoothing=0.1)", "label_smoothing = 0.1"),
        ("CPOConfig(alpha=0.5)", "alpha = 0.5"),
        ("KTOConfig(loss_type='apo_zero_unpaired')", "loss_type = apo_zero_unpaired"),
    ],
)
def test_other_losses_on_judged_answers_are_refused(
    call: str, refused: str, tmp_path: Path
) -> None:
    name = call.partition("(")[0]
    found = converted_text(tmp_path, "a.py", f"from trl import {name}\nc = {call}\n")
    assert [key.replace("'", "") for key in found.refused] == [refused]


def test_smoothing_that_trl_passes_over_has_no_effect(tmp_path: Path) -> None:
    text = "from trl import DPOConfig\nc = DPOConfig(beta=0.1, label_smoothing=0.1)\n"
    found = converted_text(tmp_path, "a.py", text)
    assert "smoothing" not in found.recipe
    assert "label_smoothing" in found.unused


def test_an_adapter_has_pefts_defaults_and_its_other_keys_are_refused(tmp_path: Path) -> None:
    text = "from trl import SFTConfig\nc = SFTConfig(max_steps=1)\nl = LoraConfig(%s)\n"
    plain = converted_text(tmp_path, "a.py", text % 'bias="none", task_type="CAUSAL_LM"')
    lora = load_recipe(plain.recipe).model_dump()["model"]["lora"]
    assert (lora["rank"], lora["alpha"], lora["dropout"]) == (8, 8.0, 0.0)
    assert plain.refused == {}
    others = 'bias="all", rank_pattern={"q": 4}, init_lora_weights="pissa", layers_to_transform=[0]'
    found = converted_text(tmp_path, "b.py", text % f"{others}, eva_config=1")
    assert {key.partition(" = ")[0] for key in found.refused} == {
        *("bias", "rank_pattern", "init_lora_weights", "layers_to_transform", "eva_config")
    }


def test_openrlhfs_critic_shares_the_actors_optimizer(tmp_path: Path) -> None:
    text = (
        "python -m openrlhf.cli.train_ppo_ray --adam_betas 0.8 0.9 --l2 0.01 --max_norm 0.5 "
        "--lr_scheduler constant_with_warmup --lr_warmup_ratio 0.05 --critic_learning_rate 8e-6\n"
    )
    found = converted_text(tmp_path, "a.sh", text)
    own, value = found.recipe["optimizer"], found.recipe["value"]["optimizer"]
    same = ("betas", "weight_decay", "max_grad_norm", "warmup_ratio")
    assert [value[key] for key in same] == [[0.8, 0.9], 0.01, 0.5, 0.05]
    assert [own[key] for key in same] == [value[key] for key in same]
    assert value["learning_rate"] == 8e-6
    assert value.get("schedule", "constant") == "constant"


def test_keys_of_several_losses_need_a_name_that_says_which(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nbeta: 0.1\nmax_length: 64\n"
    with pytest.raises(KeelError, match="those of several programs of TRL"):
        converted_text(tmp_path, "a.yaml", text)
    kto = converted_text(tmp_path, "kto.yaml", text + "train_sampling_strategy: sequential\n")
    assert kto.recipe["loss"] == "kto"
    assert "train_sampling_strategy" in kto.unused


def test_steps_of_a_warm_up_count_before_its_ratio(tmp_path: Path) -> None:
    found = converted_text(
        tmp_path, "dpo.yaml", "beta: 0.1\nlabel_smoothing: 0\nwarmup_steps: 10\nwarmup_ratio: 0.1\n"
    )
    assert found.recipe["optimizer"]["warmup_steps"] == 10
    assert "warmup_ratio" in found.unused


VERL = (
    "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {model: {path: m}, actor: {optim: %s}}\n"
)


@pytest.mark.parametrize(
    ("name", "text", "warmup"),
    [
        ("sft.yaml", "lr_scheduler_type: constant\nwarmup_ratio: 0.03\n", {}),
        ("sft.yaml", "lr_scheduler_type: constant_with_warmup\nwarmup_ratio: 0.03\n",
         {"warmup_ratio": 0.03}),
        ("openrlhf.sh", "openrlhf.cli.train_ppo --pretrain m --lr_scheduler constant\n", {}),
        ("verl.yaml", VERL % "{lr_warmup_steps: 10, lr_warmup_steps_ratio: 0.0}",
         {"warmup_steps": 10}),
        ("verl.yaml", VERL % "{lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.1}",
         {"warmup_ratio": 0.1}),
    ],
)  # fmt: skip
def test_a_warm_up_is_what_the_framework_does(
    name: str, text: str, warmup: dict[str, Any], tmp_path: Path
) -> None:
    more = "model_name_or_path: m\n" if name == "sft.yaml" else ""
    found = converted_text(tmp_path, name, more + text).recipe.get("optimizer", {})
    assert {key: value for key, value in found.items() if key.startswith("warmup")} == warmup


def test_what_verl_reads_as_one_set_is_to_check(tmp_path: Path) -> None:
    more = "data: {train_files: [a.parquet, b.parquet]}\ntrainer: {test_freq: 5}\n"
    found = converted_text(tmp_path, "verl.yaml", VERL % "{lr: 1e-6}" + more)
    assert {"tasks.weight", "evaluation.prompts"} <= found.missing.keys()


def test_keys_of_several_programs_need_a_name(tmp_path: Path) -> None:
    text = "model_name_or_path: m\ndataset_name: d\nmax_length: 9\nnum_train_epochs: 1\n"
    with pytest.raises(KeelError, match="one of the words dpo, sft, reward"):
        converted_text(tmp_path, "config.yaml", text)
    for name in ("my-sft.yaml", "sft_gemma.yaml", "config_sft.yaml"):
        assert converted_text(tmp_path, name, text).recipe["stage"] == "sft"


def test_verls_batches_of_a_step_count_the_first(tmp_path: Path) -> None:
    key = "algorithm.filter_groups"
    text = f"main_dapo {key}.enable=True {key}.max_num_gen_batches=%d\n"
    found = converted_text(tmp_path, "a.sh", text % 5)
    assert found.recipe["rollout"]["max_refills"] == 4
    assert f"{key}.max_num_gen_batches = 1" in converted_text(tmp_path, "a.sh", text % 1).refused


def test_weights_of_other_rewards_are_refused(tmp_path: Path) -> None:
    found = converted_text(
        tmp_path, "a.yaml", "num_generations: 8\nreward_funcs: [a.b]\nreward_weights: [0.5, 1]\n"
    )
    assert found.refused == {"reward_weights = [0.5, 1]": "2 weights of 1 rewards"}


def test_a_reward_over_http_is_named(tmp_path: Path) -> None:
    text = "python -m openrlhf.cli.train_ppo_ray --remote_rm_url http://h:1/r\n"
    (why,) = converted_text(tmp_path, "a.sh", text).refused.values()
    assert 'function = "http"' in why


def test_references_to_other_keys_are_resolved_or_refused(tmp_path: Path) -> None:
    found = converted_text(
        tmp_path,
        "a.yaml",
        "data: {train_files: 'x/${data.set}/t.parquet', set: gsm8k, train_batch_size: 1e3}\n"
        "actor_rollout_ref:\n"
        "  model: {path: '${oc.env:MODEL,a/b}'}\n"
        "  actor: {ppo_mini_batch_size: '${data.train_batch_size}', clip_ratio: '${x.y}'}\n"
        "  rollout: {n: '${actor_rollout_ref.rollout.n}'}\n",
    )
    assert found.recipe["rollout"]["prompts_per_step"] == 1000
    assert found.recipe.get("minibatches", 1) == 1
    assert found.recipe["tasks"][0]["path"] == "x/gsm8k/t.parquet"
    assert found.recipe["model"]["name"] == "MODEL"
    assert "${oc.env:MODEL,a/b}" in found.missing["model.name"]
    literal = {why for key, why in found.refused.items() if "${" in key}
    assert literal == {"its value is not a literal"}
    assert "actor_rollout_ref.actor.clip_ratio = '${x.y}'" in found.refused
    assert any(key.startswith("actor_rollout_ref.rollout.n = ") for key in found.refused)


def test_variables_of_a_script_are_resolved_or_listed(tmp_path: Path) -> None:
    found = converted_text(
        tmp_path,
        "a.sh",
        "export LR=1e-5 N=$((2 * 8))\nX=1 python -m openrlhf.cli.train_dpo --learning_rate $LR "
        "--train_batch_size $N --pretrain $UNSET --dataset a.jsonl,b.jsonl --dataset_probs 0.5,1 "
        "--beta 0.2 --max_len $1 --use_wandb None $EXTRA_ARGS\n",
    )
    assert found.recipe["trackers"] == {"wandb": False}
    assert found.recipe["optimizer"]["learning_rate"] == 1e-5
    assert (found.recipe["batch_size"], found.recipe["beta"]) == (16, 0.2)
    assert found.missing["model.name"].startswith("pretrain = '$UNSET': its value is not")
    assert found.recipe["data"]["path"] == "a.jsonl"
    assert {key.partition(" = ")[0] for key in found.refused} == {
        "dataset",
        "max_len",
        "$EXTRA_ARGS",
    }


def test_python_values_are_computed_or_refused(tmp_path: Path) -> None:
    found = converted_text(
        tmp_path,
        "a.py",
        "from trl import GRPOConfig, GRPOTrainer\nbatch = 2 * 8\nn = n + 1\n"
        "c = GRPOConfig(max_steps=100 * 4, per_device_train_batch_size=batch, beta=1 / 4,\n"
        "    learning_rate=args.lr, num_iterations=n, epsilon=1 / 0)\n"
        "GRPOTrainer(model=args.model, reward_funcs=[get()], args=c)\n",
    )
    assert (found.recipe["steps"], found.recipe["rollout"]["prompts_per_step"]) == (400, 2)
    assert found.recipe["algorithm"]["divergence"]["beta"] == 0.25
    why = "its value is not a literal"
    assert found.refused["learning_rate = 'args.lr'"] == why
    refused = {key.partition(" = ")[0] for key in found.refused}
    assert refused == {"learning_rate", "num_iterations", "epsilon", "reward_funcs"}
    assert why in found.missing["model.name"]


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("num_generations: 0\nbeta: 0.1\n", "num_generations = 0", "a whole number from 1"),
        ("num_generations: 8\nmax_steps: auto\n", "max_steps = 'auto'", "not a number"),
        (
            "num_generations: 8\neval_strategy: epoch\n",
            "eval_strategy = 'epoch'",
            "every few steps",
        ),
        ("num_generations: 8\ndataset_name: [a]\n", 'dataset_name = ["a"]', "not text"),
        ("num_generations: 8\nlr_scheduler_kwargs: 3\n", "lr_scheduler_kwargs = 3", "a table"),
        ("algorithm: {adv_estimator: 3}\n", "algorithm.adv_estimator = 3", "not text"),
        ("num_generations: 8\neval_steps: often\n", "eval_steps = 'often'", "not a number"),
        (
            "num_generations: 8\nper_device_train_batch_size: 1.5\n",
            "per_device_train_batch_size = 1.5",
            "a whole number from 1",
        ),
        (
            "data: {train_batch_size: 64}\nactor_rollout_ref: {actor: {ppo_mini_batch_size: 0}}\n",
            "actor_rollout_ref.actor.ppo_mini_batch_size = 0",
            "a whole number from 1",
        ),
    ],
)
def test_numbers_are_checked_before_they_are_used(
    text: str, key: str, why: str, tmp_path: Path
) -> None:
    assert why in converted_text(tmp_path, "a.yaml", text).refused[key]


def trained(folder: Path, config: str, more: str, name: str = "GRPO") -> Converted:
    """A script that trains by TRL."""
    text = f"from datasets import load_dataset\nfrom trl import {name}Config, {name}Trainer\n"
    return converted_text(folder, "t.py", f"{text}c = {name}Config({config})\n{more}\n")


@pytest.mark.parametrize(
    ("load", "source"),
    [
        ('"json", data_files="a.jsonl", split="train"', {"path": "a.jsonl"}),
        (
            '"json", data_files={"train": "a.jsonl", "test": "b.jsonl"}, split="train"',
            {"path": "a.jsonl", "validation_path": "b.jsonl"},
        ),
        (
            '"csv", data_files=["a.csv"]',
            {"name": "datasets", "path": "csv", "options": {"data_files": ["a.csv"]}},
        ),
        (
            'f"openai/{NAME}", "main", split="train[:90%]"',
            {
                "name": "datasets",
                "path": "openai/gsm8k",
                "options": {"name": "main", "split": "train[:90%]"},
                "validation_path": "test",
            },
        ),
    ],
)
def test_a_scripts_data_are_read(load: str, source: dict[str, Any], tmp_path: Path) -> None:
    calls = (
        f'NAME = "gsm8k"\nrows = load_dataset({load})\nrows = rows.shuffle().map(f)\n'
        'SFTTrainer("m/x", c, train_dataset=rows)'
    )
    found = trained(tmp_path, 'max_steps=1, eval_strategy="steps"', calls, "SFT")
    assert (found.recipe["data"], found.recipe["model"]["name"]) == (source, "m/x")
    assert found.recipe["evaluation"]["every"] == 10  # TRL's logging_steps
    assert found.missing["train_dataset"] == "the script changes its rows: map"


OWN = "def accuracy_reward(completions, answer, **_):\n    return [1.0] * len(completions)\n"
MADE = 'GRPOTrainer("m/x", accuracy_reward, c, load_dataset("a/b")).train()'
TRL_S = "from trl.rewards import accuracy_reward\n"


@pytest.mark.parametrize(
    ("text", "function", "answer", "remark"),
    [
        (TRL_S + MADE, "math", "solution", False),
        (OWN + MADE, "t.py:accuracy_reward", None, True),
        (f"{OWN}def main():\n    {MADE}\nmain()", "t.py:accuracy_reward", None, True),
        (
            f'{OWN}if __name__ == "__main__":\n    {MADE}',
            "t.py:accuracy_reward",
            None,
            False,
        ),
        (
            TRL_S + MADE.replace(', load_dataset("a/b")', ""),
            "math",
            "solution",
            False,
        ),
    ],
)
def test_a_scripts_own_reward_is_not_trls(
    text: str, function: str, answer: str | None, remark: bool, tmp_path: Path
) -> None:
    found = trained(tmp_path, "max_steps=1", text)
    (reward,) = found.recipe["rewards"]["functions"]
    assert reward["function"].removeprefix(f"{tmp_path}/") == function
    assert found.recipe["tasks"][0].get("answer") == answer
    assert ("a file of its own" in found.missing.get("reward_funcs", "")) is remark


def test_values_that_depend_on_branches_are_not_read(tmp_path: Path) -> None:
    text = "kw = dict(beta=0.1, **more)\nn = 8\nn *= 2\nlr = 1\nif x:\n    lr = 2\n"
    found = converted_text(
        tmp_path,
        "a.py",
        f"{text}c = GRPOConfig(learning_rate=lr, num_generations=n, max_steps=-(-7), **kw)\n"
        'm = AutoModel.from_pretrained("a/b", revision="r")\n'
        "GRPOTrainer(m, [f(x)], c, callbacks=[g], train_dataset=rows)\n",
    )
    assert found.recipe["steps"] == 7
    assert found.recipe["model"] == {
        "name": "a/b",
        "revision": "r",
        "activation_checkpointing": True,
    }
    refused = {key.partition(" = ")[0] for key in found.refused}
    assert refused == {
        *("learning_rate", "num_generations", "**more", "reward_funcs", "callbacks"),
        "train_dataset",
    }


def test_what_is_set_in_other_ways_is_read_or_listed(tmp_path: Path) -> None:
    text = (
        "a, b = 1e-5, 8\ntemperature = 0.5\n\ndef main(temperature, rows=load(1)):\n"
        "    c = GRPOConfig(learning_rate=a, temperature=temperature, max_steps=3)\n"
        "    c.beta = 0.25\n    c.epsilon = f(1)\n"
        '    GRPOTrainer("m/x", [g(x)], c, load_dataset("o/r"), **kw)\n'
    )
    found = converted_text(tmp_path, "a.py", text)
    assert found.recipe["algorithm"]["divergence"]["beta"] == 0.25
    assert (found.recipe["steps"], found.recipe["tasks"][0]["path"]) == (3, "o/r")
    refused = {key.partition(" = ")[0] for key in found.refused}
    assert refused == {"learning_rate", "temperature", "epsilon", "reward_funcs", "**kw"}


@pytest.mark.parametrize(
    ("held", "path", "refused"),
    [
        ('"json", data_files="b.jsonl"', "b.jsonl", set()),
        ('"csv", data_files="b.csv"', None, {"validation_file = 'b.csv'"}),
    ],
)
def test_a_scripts_own_evaluation_file_is_kept_or_listed(
    held: str, path: str | None, refused: set[str], tmp_path: Path
) -> None:
    calls = (
        f'held = load_dataset({held}, split="train")\n'
        'SFTTrainer("m/x", c, train_dataset=load_dataset("json", data_files="a.jsonl"), '
        "eval_dataset=held)"
    )
    found = trained(tmp_path, 'max_steps=1, eval_strategy="steps"', calls, "SFT")
    assert found.recipe["data"].get("validation_path") == path
    assert {*found.refused} == refused


def test_several_trainers_in_one_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="it trains by dpo and sft"):
        converted_text(tmp_path, "a.py", "SFTConfig(max_steps=1)\nDPOConfig(beta=1)\n")


def test_a_norm_by_micro_batches_is_said(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.loss_agg_mode"
    found = converted_text(tmp_path, "a.sh", f"main_ppo {key}=seq-mean-token-sum-norm\n")
    assert found.recipe["algorithm"]["weights"] == {"kind": "constant"}
    assert "b times Keel's" in found.missing["algorithm.weights.kind"]
    assert "b times Keel's" in found.toml().replace("\n# ", " ")


ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2.5, 10**400, float("nan"), "auto", "é", "no", "a/b", "f.py:g"),
    *([], ["a"], [0.1, 0.2], ["a", 3], [["a"]], {"a": {"b": 1}}, Unread("$X"), [Unread("f()")]),
)


@pytest.mark.parametrize("program", [p for name in FRAMEWORKS for p in programs(name)])
def test_odd_values_of_any_key_are_listed(program: Program) -> None:
    keys = [*program.keys, *program.refused]
    for at in range(0, len(ODD), 3):  # each key has another value each time
        given = {key: ODD[(at + n) % len(ODD)] for n, key in enumerate(keys) if (at + n) % 5 == 0}
        work = Conversion(program, given)
        work.run()
        found = work.finish("a.yaml")
        assert tomllib.loads(found.toml()) == found.recipe
        assert isinstance(load_recipe(found.recipe), Recipe)
        texts = [*found.refused, *found.missing.values()]
        said = {text.partition(" = ")[0] for text in texts} | set(found.unused)
        said |= {key for theirs, _ in found.mapped for key in theirs}
        assert set(given) - {"num_processes"} <= said


def test_a_penalty_after_the_group_is_compared_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m openrlhf.cli.train_ppo_ray --advantage_estimator rloo\n")
    found = convert(str(path))
    assert "init_kl_coef = 0.01 (default)" in found.refused
    assert found.recipe["algorithm"]["divergence"] == "none"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "- 1\n", "a.yaml: cannot be read as .yaml: it holds no table"),
        ("a.yaml", "a: &x [*x]\n", "recursion"),
        ("a.yaml", "colour: red\n", "--from trl, verl or openrlhf"),
        ("a.sh", "echo hello\n", "no setting found"),
        ("a.py", "def f(:\n", "cannot be read as .py"),
        ("b.json", None, "No such file"),
    ],
)
def test_what_is_no_configuration_is_one_line(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: Capture
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["recipes", "convert", str(tmp_path / name)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_command_writes_a_recipe_and_reports_each_key(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "recipe.toml"
    words = ["recipes", "convert", str(CONFIGS / "verl-sync-ref.sh"), "--out", str(out)]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "refused, since it changes the result (3)" in captured.err
    assert "# Refused, since it changes the result: actor_rollout_ref.ref.sync" in out.read_text()
    assert isinstance(load_recipe(out), Recipe)
    assert main(words) == 2  # it exists
    capsys.readouterr()
    assert main([*words[:3], "--json", "--from", "verl"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["framework"], len(found["refused"])) == ("verl", 3)
    with pytest.raises(KeelError):
        load_recipe(str(CONFIGS / "verl-sync-ref.sh"))


@pytest.mark.parametrize("name", ["verl", "openrlhf"])
def test_pages_name_the_keys_of_the_tables(name: str) -> None:
    page = (ROOT / "docs" / "howto" / f"from-{name}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", page, re.MULTILINE)
    known = {(key, entry.to) for one in programs(name) for key, entry in one.keys.items()}
    assert len(rows) > 15
    assert set(rows) - known == set()


# ---------------------------------------------------------------- keel check

PAIRS = [{"prompt": f"{n}>", "chosen": f"{n}", "rejected": "no"} for n in range(40)]
ROWS = [{**pair, "answer": pair["chosen"]} for pair in PAIRS]
TEXTS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]


def shrunk(recipe: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe on a tiny model and a local file, its sizes scaled down; all else as it is."""
    kept = {k: v for k, v in recipe["model"].items() if k not in ("name", "revision")}
    build = {"tokenizer": "bytes", "hidden_size": 32, "layers": 1, "heads": 2, "context": 64}
    stage = recipe.get("stage", "rl")
    path = folder / "rows.jsonl"
    rows = {"rl": ROWS, "sft": TEXTS}.get(stage, PAIRS)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = {k: v for k, v in recipe.items() if k not in ("trackers", "num_train_epochs")}
    out |= {"model": {**kept, "build": build, "device": "cpu"}, "steps": 2}
    out.pop("token_budget", None)
    optimizer = {k: v for k, v in recipe.get("optimizer", {}).items() if k != "offload"}
    if optimizer.get("warmup_steps"):
        optimizer["warmup_steps"] = 1
    out["optimizer"] = optimizer
    out["checkpoints"] = {"every": 2}
    if stage != "rl":
        return out | {"data": {"path": str(path)}, "batch_size": 4, "max_tokens": 48}
    out["evaluation"] = {"prompts": 4, "every": 0}
    out["tasks"] = [{"path": str(path), "answer": "answer"}]
    out["rewards"] = {"functions": [{"function": "exact_match"}]}
    out["prompts"] = {"max_tokens": 32}
    group = min(recipe["rollout"].get("group_size", 8), 4)
    rollout = {**recipe["rollout"], "prompts_per_step": 4, "group_size": group, "max_tokens": 8}
    if "overlong_buffer" in rollout:
        rollout["overlong_buffer"] = 4
    out["rollout"] = rollout
    out["minibatches"] = min(recipe.get("minibatches", 1), 4)
    if "value" in recipe:
        out["value"] = {k: v for k, v in recipe["value"].items() if k != "name"}
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_each_converted_recipe_passes_check(name: str, tmp_path: Path) -> None:
    report = check(shrunk(converted(name).recipe, tmp_path), runs=False).as_dict()
    errors = [one for one in report["findings"] if one["severity"] == "error"]
    assert errors == []


def test_factor_of_openrlhf_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    command = "python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --stop_properly_penalty_coef "
    for value in ("0.5", "-0.5", "0.5 --overlong_buffer_len 16"):
        path.write_text(command + value)
        found = convert(str(path))
        refused = f"stop_properly_penalty_coef = {float(value.split()[0])}"
        if value == "0.5":
            assert found.recipe["rollout"]["truncated_factor"] == 0.5
        else:
            assert refused in found.refused


def test_entropy_bonus_of_trl_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text("num_generations: 8\nuse_adaptive_entropy: true\nentropy_target: 0.6\n")
    entropy = convert(str(path)).recipe["algorithm"]["entropy"]
    assert entropy == {"target": 0.6, "delta": 0.005, "maximum": 1.0}
    path.write_text("num_generations: 8\nentropy_coef: 0.02\n")
    assert convert(str(path)).recipe["algorithm"]["entropy"] == 0.02
    path.write_text(
        "num_generations: 8\nuse_adaptive_entropy: true\nentropy_coef: 0.1\nentropy_coef_min: 0.1\n"
    )
    assert set(convert(str(path)).refused) == {"entropy_coef = 0.1", "entropy_coef_min = 0.1"}


def test_masks_of_trl_and_losses_of_verl_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "grpo.yaml"
    path.write_text(
        "num_generations: 8\ntop_entropy_quantile: 0.2\noff_policy_mask_threshold: 0.5\n"
        "importance_sampling_level: sequence\nbeta: 0.1\n"
    )
    found = convert(str(path)).recipe["algorithm"]
    assert found["masks"] == [
        {"kind": "top_entropy", "share": 0.2},
        {"kind": "off_policy_sequences", "bound": 0.5},
    ]
    assert found["divergence"]["unbiased"] == "ratio"
    path = tmp_path / "verl.sh"
    path.write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv "
        "actor_rollout_ref.actor.clip_ratio_low=0.1 actor_rollout_ref.actor.clip_ratio_c=20.0"
    )
    found = convert(str(path)).recipe["algorithm"]
    assert found["surrogate"] == {"kind": "cispo", "cap": 20.0}
    assert found["masks"]["kind"] == "total_variation"
    assert (found["masks"]["low"], found["masks"]["high"]) == (0.1, 0.2)
    path.write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov "
        "actor_rollout_ref.actor.policy_loss.kl_cov_ratio=0.01"
    )
    found = convert(str(path)).recipe["algorithm"]
    assert found["surrogate"] == {"kind": "kl_cov", "share": 0.01, "coefficient": 0.1}
    path.write_text(
        "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov "
        "actor_rollout_ref.actor.policy_loss.clip_cov_ub=4.0"
    )
    found = convert(str(path)).recipe["algorithm"]
    assert found["masks"]["kind"] == "clip_cov"
    assert found["masks"]["cap"] == 4.0
