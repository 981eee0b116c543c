"""The counted memory of a card: three sizes of Qwen2.5, what does not fit, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from keel.analysis.cards import GIB, card
from keel.analysis.costs import Budget, MemoryPlan
from keel.cli.main import main
from keel.config.load import load_recipe, shipped
from keel.models.policy import load_policy
from keel.models.shape import model_config, without_weights
from keel.preflight import check
from keel.preflight.budget import of_budget, plan_of
from keel.preflight.check import check_card
from keel.preflight.context import StageContext

HALF = {"hidden_size": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate_size": 4864}
ONE = {"hidden_size": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate_size": 8960}
SEVEN = {"hidden_size": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate_size": 18944}
LOOP = {"prompts_per_step": 32, "group_size": 8, "max_tokens": 512}

BUILT = [name for name in shipped() if load_recipe(name).model.build is not None]


def recipe(sizes: dict[str, Any], model: dict[str, Any], **stage: Any) -> dict[str, Any]:
    tied = sizes is not SEVEN
    options = {"vocab_size": 151_936 if tied else 152_064, "tie_word_embeddings": tied}
    build = {"family": "qwen2", "tokenizer": "bytes", "context": 32_768, "options": options}
    return {
        "model": {"build": {**build, **sizes}, **model},
        "tasks": [{"name": "addition"}],
        "rollout": LOOP,
        "prompts": {"max_tokens": 512},
        **stage,
    }


def budget(source: dict[str, Any], device: str) -> Budget:
    made = load_recipe(source)
    model = without_weights(model_config(made.model))
    return Budget(plan_of(made, made.stages[0], model, card(device).memory), card(device))


def test_a_longer_demonstration_is_counted() -> None:
    """It is computed alone, next to what is sampled, and takes no room of the sampler's."""
    made = load_recipe(recipe(HALF, {}, token_budget=1024))
    model = without_weights(model_config(made.model))
    plain, longer = (
        plan_of(made, made.stages[0], model, card("h100").memory, 20, shown)
        for shown in (0, 20_000)
    )
    assert plain.tokens < longer.tokens == 20_000
    assert longer.longest == plain.longest


def test_half_a_billion_fits_an_h100() -> None:
    """Fully trained, at the default token budget, with room for all 256 sequences."""
    found = budget(recipe(HALF, {}), "h100")
    assert found.over == 0
    assert found.rows == 256
    assert found.plan.items()["optimizer"] == 8 * 494_032_768


def test_one_and_a_half_billion_fit_40_gib() -> None:
    """Fully trained, with checkpoints: 16 bytes a weight for itself, gradient and moments."""
    found = budget(recipe(ONE, {"activation_checkpointing": True}, token_budget=4096), "40GiB")
    items = found.plan.items()
    held = items["weights"] + items["gradients"] + items["optimizer"]
    assert held == 16 * 1_543_714_304
    assert found.total < 40 * GIB
    assert found.over == 0
    # With the float32 reference of the default divergence.
    assert found.plan.reference == 1
    assert found.rows >= 100
    # Not with all activations of the default budget.
    assert budget(recipe(ONE, {}), "40GiB").over > 20 * GIB


def test_seven_billion_with_adapters_fit_24_gb() -> None:
    model = {"lora": {"rank": 16}, "activation_checkpointing": True}
    plain = budget(recipe(SEVEN, model, token_budget=4096), "24GB")
    quantised = {**model, "quantisation": "nf4"}
    found = budget(recipe(SEVEN, quantised, token_budget=4096), "24GB")
    assert 7 * GIB < found.plan.weights < 8 * GIB  # embedding and head in float32
    assert found.over == 0
    assert found.rows >= 64
    # Not in float32 with the same adapters.
    assert plain.over > 10 * GIB


def test_over_budget_names_what_is_enough() -> None:
    source = recipe(ONE, {})
    made = load_recipe(source)
    (one,) = of_budget(budget(source, "l4"), made, made.stages[0])
    assert (one.kind, one.severity) == ("over-card", "error")
    assert one.key == "model.activation_checkpointing"
    order = ("activation_checkpointing = true (", "model.lora.rank = 16 (")
    places = [one.fix.find(words) for words in order]
    assert -1 not in places
    assert places == sorted(places)
    assert "not enough" not in one.fix
    (one,) = of_budget(budget(source, "h100"), made, made.stages[0])
    assert one.fix == "set model.activation_checkpointing = true (48.87 GiB)"
    # What the recipe has by then is not named again.
    source = recipe(ONE, {"lora": {"rank": 16}, "activation_checkpointing": True})
    made = load_recipe(source)
    (one,) = of_budget(budget(source, "6GB"), made, made.stages[0])
    assert "lora.rank" not in one.fix
    assert "checkpointing" not in one.fix


def test_stages_without_rollouts_have_no_copy() -> None:
    """Of an imitation neither; a divergence adds a frozen copy, adapters take it away."""
    sft = {"stages": [{"stage": "sft", "tasks": [{"name": "addition"}], "token_budget": 2048}]}
    source = recipe(HALF, {})
    imitation = budget({"model": source["model"], **sft}, "h100").plan.items()
    assert imitation["sampling copy"] == imitation["reference, teacher, critic"] == 0
    kept = {"algorithm": {"preset": "grpo", "divergence": {"beta": 0.1}}}
    with_reference = budget({**source, **kept}, "h100").plan
    assert with_reference.others == 4 * 494_032_768
    adapters = recipe(HALF, {"lora": {"rank": 8}}, **kept)
    assert budget(adapters, "h100").plan.others == 0


@pytest.mark.parametrize("quantised", [False, True])
def test_critic_is_whole_below_adapters(quantised: bool) -> None:
    """A plain copy of the policy that learns whole: 16 bytes a weight, or with 8-bit moments."""
    model = {"lora": {"rank": 8}, **({"quantisation": "nf4"} if quantised else {})}
    ppo = {"algorithm": {"preset": "ppo", "divergence": "none"}}
    assert budget(recipe(HALF, model, **ppo), "h100").plan.others == 16 * 494_032_768
    small = {**ppo, "value": {"optimizer": {"kind": "adamw_8bit"}}}
    found = budget(recipe(HALF, model, **small), "h100").plan.others
    assert found == pytest.approx((8 + 2.03) * 494_032_768, rel=0.001)
    offload = {**ppo, "value": {"optimizer": {"offload": "cpu"}}}
    assert budget(recipe(HALF, model, **offload), "h100").plan.others == 8 * 494_032_768


def test_reward_model_has_its_own_adapters() -> None:
    """Those of `base`, in the policy's dtype; the policy next to it is as the model says."""
    four = {"lora": {"rank": 8}, "quantisation": "nf4"}
    stage = {"stage": "reward_model", "data": {"name": "digit-pairs"}}
    source = {"model": recipe(HALF, four)["model"], "stages": [stage]}
    whole = budget(source, "h100").plan
    assert whole.rank is None
    assert whole.weights == whole.gradients == 4 * 494_032_768
    policy = budget(recipe(HALF, four), "h100").plan
    assert whole.others == policy.weights < 1.2 * GIB
    adapters = {**source, "stages": [{**stage, "base": {"lora": {"rank": 4}}}]}
    assert budget(adapters, "h100").plan.trained == 4 * policy.adapted
    made = load_recipe(source)
    (one,) = of_budget(budget(source, "4GB"), made, made.stages[0])
    assert "token_budget = 1024 (" in one.fix
    assert "base.lora.rank = 16" in one.fix
    assert "model.lora" not in one.fix
    assert "quantisation" not in one.fix


def test_vllm_has_its_own_memory() -> None:
    """No copy and no pages; its share of the card if it stays awake on the trainer's GPU."""
    server = {"gpu_memory_utilization": 0.25}

    def plan(vllm: dict[str, Any], **rollout: Any) -> MemoryPlan:
        loop = {**LOOP, "engine": "vllm", "vllm": vllm, **rollout}
        source = {**recipe(HALF, {}), "rollout": loop}
        source["algorithm"] = {"preset": "grpo", "corrections": {"kind": "truncate"}}
        return budget(source, "h100").plan

    asleep = plan(server)
    assert (asleep.copied, asleep.rows, asleep.server) == (False, 0, 0)
    quarter = 0.25 * card("h100").memory
    assert plan({**server, "sleep_level": 0}).items()["sampling server"] == quarter
    assert plan(server, async_level=1).server == quarter
    assert plan({**server, "sleep_level": 0, "gpus": [1]}).server == 0
    assert plan({"url": "http://localhost:1", "sleep_level": 0}).server == 0


def test_transposed_matrices_get_no_four_bits() -> None:
    """GPT-2's, which `quantise` refuses; of other families they are offered on adapters."""
    for family, offered in (("gpt2", False), ("llama", True)):
        build = {"family": family, "hidden_size": 1024, "layers": 24, "heads": 16}
        model = {"build": build, "lora": {"rank": 8}, "activation_checkpointing": True}
        source = {**recipe(HALF, {}), "model": model, "token_budget": 1024}
        made = load_recipe(source)
        (one,) = of_budget(budget(source, "2.8GB"), made, made.stages[0])
        assert ('model.quantisation = "nf4" (' in one.fix) is offered


def test_policy_with_adapters_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: as its recipe says, not by the layers that the adapters have made."""
    source = {**recipe(HALF, {}), "model": {"build": {"family": "llama"}, "device": "cpu"}}
    source["model"]["lora"] = {"rank": 8, "targets": ["q_proj", "down_proj"]}
    made = load_recipe(source)
    policy = load_policy(made.model, 0)
    seen = SimpleNamespace(name="NVIDIA L4", total_memory=card("l4").memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)
    on_gpu: Any = SimpleNamespace(model=policy.model, device=torch.device("cuda"))
    context = StageContext(made, made.stages[0], policy, figures={})
    (found,) = check._budgets(made, on_gpu, [context])
    counted = budget(source, "l4").as_dict()
    assert found == {**counted, "card": "NVIDIA L4"}
    # A critic that does not load is another check's finding.
    lost = {"algorithm": "ppo", "value": {"name": "/not/there"}}
    made = load_recipe({**source, **lost})
    assert check._budgets(made, on_gpu, [replace(context, recipe=made, stage=made.stages[0])]) == [
        {}
    ]


def test_folder_with_only_a_config_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text and as JSON; a card without room ends 1, an unknown one 2."""
    Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    ).save_pretrained(tmp_path / "half")  # fmt: skip
    (tmp_path / "r.toml").write_text(
        f'model.name = "{tmp_path / "half"}"\nprompts.max_tokens = 512\n'
        'token_budget = 8192\n[[tasks]]\nname = "addition"\n'
    )
    command = ["check", str(tmp_path / "r.toml"), "--device"]
    assert main([*command, "h100"]) == 0
    printed = capsys.readouterr().out
    assert "memory on H100, counted: " in printed
    lines = {line.split()[0]: line for line in printed.splitlines() if line.startswith("    ")}
    assert "1.84 GiB" in lines["weights"]
    assert "sequences of 768" in lines["cache"]
    assert main([*command, "4GB", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (stage,) = report["stages"]
    assert sum(stage["budget"]["items"].values()) == pytest.approx(stage["budget"]["total"], abs=9)
    assert report["findings"][0]["kind"] == "over-card"
    assert main([*command, "h1000"]) == 2
    assert "did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("name", BUILT)
def test_shipped_recipe_is_counted_without_weights(name: str) -> None:
    """Stages that sample nothing too, which have no rows."""
    report = check_card(name, (), "4090")
    assert report.findings == ()
    for stage, found in zip(load_recipe(name).stages, report.stages, strict=True):
        assert found.budget["over"] == 0
        assert (found.budget["rows"] > 0) == (stage.sampling is not None)
