"""LoRA: the base bit for bit with the adapter off, a second adapter, and merged copies aside."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model

from keel.config.model import Lora
from keel.models import lora
from keel.models.adapter_files import save_adapter
from keel.models.packed import Packed
from keel.models.policy import Policy, load_policy
from keel.models.reference import AdapterOff, reference_for
from keel.models.reward import LABELS, STOCK, Answered, Kind, reward_model_from
from keel.types import KeelError
from tests.models.tiny import batch, learn, policy, separate_log_probs, sequences, spec, stock


@pytest.fixture
def learnt() -> Policy:
    ours = policy("llama", rank=4)
    learn(ours, 1)
    return ours


def _batch(ours: Policy) -> Packed:
    return batch(len(ours.tokenizer))[1]


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3", "gemma2", "olmo", "starcoder2", "mixtral", "gpt2", "phi3", "gpt_oss"],
)
def test_the_reference_is_the_base_bit_for_bit(family: str) -> None:
    bare, ours = policy(family), policy(family, rank=4)
    packed = _batch(ours)
    base = bare.scores(packed, 0.7).log_prob_N.detach()
    assert torch.equal(ours.scores(packed, 0.7).log_prob_N, base), "B starts at 0"
    reference = reference_for(ours)
    assert isinstance(reference, AdapterOff)
    assert reference.state() == {}
    learn(ours, 1)
    moved = ours.scores(packed, 0.7).log_prob_N.detach()
    assert (moved - base).abs().max() > 1e-2
    assert torch.equal(reference.log_probs(packed, 0.7), base)
    assert torch.equal(ours.scores(packed, 0.7).log_prob_N, moved), "the adapter is on again"


def test_only_the_adapter_learns_after_the_reference_too(learnt: Policy) -> None:
    packed, reference = _batch(learnt), reference_for(learnt)
    names = set(learnt.trainable())
    assert names
    assert all(".lora_" in name and ".policy." in name for name in names)
    out = learnt.scores(packed, reference=reference)
    reference.log_probs(packed)
    assert out.full_kl_N is not None
    (out.log_prob_N + out.full_kl_N).sum().backward()
    assert set(learnt.trainable()) == names
    for name, parameter in learnt.named_parameters():
        assert (parameter.grad is not None) == (name in names), name


def test_a_policy_that_began_with_an_adapter_gets_a_second_one(learnt: Policy) -> None:
    packed = _batch(learnt)
    start = learnt.scores(packed).log_prob_N.detach()
    reference = reference_for(learnt)
    learn(learnt, 2)
    assert torch.equal(reference.log_probs(packed), start)
    now = learnt.scores(packed).log_prob_N.detach()
    assert not torch.equal(now, start)
    saved = {name: tensor.clone() for name, tensor in reference.state().items()}
    reference.refresh(learnt)
    assert torch.equal(reference.log_probs(packed), now)
    reference.restore(saved)
    assert torch.equal(reference.log_probs(packed), start)
    again = reference_for(policy("llama", rank=4))  # of a fresh policy
    for state in (reference.state(), {}):
        again.restore(state)
        assert torch.equal(again.log_probs(packed), start)
    assert not [name for name in learnt.state_dict() if ".reference." in name]
    with pytest.raises(ValueError, match="another one was saved"):
        reference.restore({"x": torch.zeros(1)})


def test_merging_happens_aside(learnt: Policy) -> None:
    packed = _batch(learnt)
    before = {name: tensor.clone() for name, tensor in learnt.state_dict().items()}
    merged = lora.plain_weights(learnt.model)
    twin = lora.plain_copy(learnt.model)
    for name, tensor in learnt.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    plain = stock("llama")
    plain.load_state_dict(merged)
    tokens, _ = batch(len(learnt.tokenizer))
    expected = separate_log_probs(plain, tokens, 1.0)
    found = learnt.scores(packed).log_prob_N
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # W + BA rounds once more
    assert twin.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(t, merged[name]) for name, t in twin.state_dict().items())
    key = "model.layers.0.self_attn.q_proj"
    a, b = (before[f"model.{key}.lora_{x}.policy.weight"] for x in "AB")
    base = before[f"model.{key}.base_layer.weight"]
    # α/r = 2
    torch.testing.assert_close(merged[f"{key}.weight"], base + 2.0 * b @ a, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's own
def test_the_saved_adapter_goes_onto_the_base_with_peft(learnt: Policy, tmp_path: Path) -> None:
    learnt.save(tmp_path)
    loaded = PeftModel.from_pretrained(stock("llama"), str(tmp_path / "adapter")).eval()
    tokens, packed = batch(len(learnt.tokenizer))
    with torch.no_grad():
        expected = separate_log_probs(loaded, tokens, 1.0)
    found = learnt.scores(packed).log_prob_N
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's own
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["outcome", "process"])
def test_a_reward_models_adapter_brings_its_head(family: str, kind: Kind, tmp_path: Path) -> None:
    """The saved language model as a classifier (its head drawn again) and the adapter on it."""
    base = policy(family)
    base.save(tmp_path / "base")
    made = reward_model_from(base, kind, 0, Lora(rank=4, alpha=8.0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    made.save(tmp_path / "made")
    assert (made.head.bias is not None) == (kind == "process")  # it must go along

    auto, labels = STOCK[kind], LABELS[kind]
    fresh = auto.from_pretrained(tmp_path / "base", num_labels=labels)
    loaded = PeftModel.from_pretrained(fresh, str(tmp_path / "made" / "adapter")).eval()
    task = {"outcome": "SEQ_CLS", "process": "TOKEN_CLS"}[kind]
    assert loaded.peft_config["default"].task_type == task
    merged = auto.from_pretrained(tmp_path / "made").eval()
    answers = [Answered(tuple(t.tolist()), 2, (len(t) - 1,)) for t in sequences(15)]
    for answer, message in zip(answers, made.judge(answers, 1000), strict=True):
        ids = torch.tensor([answer.tokens])
        with torch.no_grad():
            found, stock_says = (m(input_ids=ids).logits.flatten(0, -2) for m in (loaded, merged))
        # W + BA against W and BA on their own, in float32.
        torch.testing.assert_close(found, stock_says, rtol=0, atol=1e-5)
        last = found[-1]
        score = last[0] if kind == "outcome" else last[1] - last[0]
        assert float(score) == pytest.approx(message[0], abs=1e-5)
        assert abs(float(score)) > 1e-3


def test_saving_an_adapter_leaves_the_model_and_is_the_same_bytes(
    learnt: Policy, tmp_path: Path
) -> None:
    before = copy.deepcopy(learnt.model.peft_config[lora.POLICY].to_dict())
    save_adapter(learnt.model, tmp_path)
    assert learnt.model.peft_config[lora.POLICY].to_dict() == before
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["task_type"] == "CAUSAL_LM"
    assert config["modules_to_save"] is None
    # In a set's order, which changes with the process, two runs would differ.
    assert config["target_modules"] == sorted(config["target_modules"])
    assert len(config["target_modules"]) == 14


def test_the_adapter_is_a_function_of_the_seed_and_leaves_the_random_state() -> None:
    def start(seed: int) -> dict[str, torch.Tensor]:
        state = torch.get_rng_state()
        weights = lora.adapter_weights(load_policy(spec(rank=4), seed).model, lora.POLICY)
        assert torch.equal(torch.get_rng_state(), state)
        return weights

    first, again, other = start(0), start(0), start(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    a = first["model.layers.0.mlp.up_proj.lora_A.policy.weight"]
    assert 0.8 / 32**0.5 < a.abs().max() <= 1 / 32**0.5


def test_a_bfloat16_base_carries_a_float32_adapter() -> None:
    ours = load_policy(spec(rank=4, dtype="bfloat16"), 0)
    kinds = {name: p.dtype for name, p in ours.named_parameters()}
    assert {kinds[name] for name in ours.trainable()} == {torch.float32}
    assert torch.bfloat16 in kinds.values()
    assert ours.scores(_batch(ours)).log_prob_N.dtype == torch.float32
    ours.scores(_batch(ours)).log_prob_N.sum().backward()


def test_targets_by_name() -> None:
    ours = load_policy(
        spec().model_copy(update={"lora": Lora(rank=2, targets=("q_proj", "v_proj"))}), 0
    )
    assert {name.rsplit(".", 1)[-1] for name, _ in lora.lora_layers(ours.model)} == {
        "q_proj",
        "v_proj",
    }


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("lm_head", "names the output layer 'lm_head'"),
        ("q_prj", "did you mean 'q_proj'"),
        ("embed_tokens", "unknown model.lora.targets entry"),
    ],
)
def test_wrong_targets_are_refused(target: str, reason: str) -> None:
    with pytest.raises(KeelError, match=reason):
        load_policy(spec().model_copy(update={"lora": Lora(targets=(target,))}), 0)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(KeelError, match=r"pip install -e .*\[lora\]'"):
        load_policy(spec(rank=4), 0)


def test_what_an_adapter_adds_is_merged_aside_where_it_is_plain(learnt: Policy) -> None:
    _, layer = lora.lora_layers(learnt.model)[0]
    x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    weight, bias = lora.affine(layer)
    torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), layer(x))
    assert lora.is_affine(layer)
    layer.merge()
    assert not lora.is_affine(layer)


@pytest.mark.parametrize("options", [{"lora_bias": True}, {"use_dora": True}])
def test_other_adapters_are_not_taken_for_plain_ones(options: dict[str, bool]) -> None:
    model = stock("qwen2")  # whose q_proj has a bias
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], **options), model)
    _, layer = lora.lora_layers(model)[0]
    assert not lora.is_affine(layer)
