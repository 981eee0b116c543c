"""Adapters with DoRA, rsLoRA, dropout and whole modules: peft agrees, both ways, and merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from keel.config.model import Lora, Model
from keel.engines.native import NativeEngine
from keel.engines.sampling_weights import SamplingWeights
from keel.models import lora
from keel.models.adapter_files import read_adapter
from keel.models.packed import pack
from keel.models.policy import Policy, frozen_copy, load_policy
from keel.models.reference import reference_for
from keel.training.live import collect_inputs
from keel.types import KeelError, Prompt, Sampling
from tests.models.tiny import batch, build, learn, policy, separate_log_probs

SAME = 1e-5
"""W + BA in one matrix against W and BA apart, in float32."""
WHOLE = ("embed_tokens", "lm_head", "norm")
OPTIONS: dict[str, dict[str, Any]] = {
    "rslora": {"rslora": True},
    "dora": {"dora": True},
    "whole": {"modules_to_save": WHOLE},
    "all": {"rslora": True, "dora": True, "dropout": 0.3, "modules_to_save": WHOLE},
}
pytestmark = [  # peft's own
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose embeddings are tied (gpt2) or not."""
    folder = tmp_path_factory.mktemp("base") / str(request.param)
    policy(request.param).save(folder)
    return folder


def _spec(base: Path, **keys: Any) -> Model:
    if "gpt2" in base.name and "modules_to_save" in keys:
        keys["modules_to_save"] = ("wte", "ln_f")
    return Model(name=str(base), lora=Lora(rank=4, alpha=8.0, **keys), device="cpu")


def _learnt(base: Path, **keys: Any) -> Policy:
    ours = load_policy(_spec(base, **keys), 0)
    learn(ours, 1)
    return ours


def _stock(base: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(base)
    return model.eval()


def _stock_log_probs(model: Any, ours: Policy) -> torch.Tensor:
    with torch.no_grad():
        return separate_log_probs(model.eval(), batch(len(ours.tokenizer))[0], 1.0)


def _log_probs(ours: Policy) -> torch.Tensor:
    return ours.scores(batch(len(ours.tokenizer))[1]).log_prob_N.detach()


@pytest.mark.parametrize("option", OPTIONS)
def test_peft_and_the_merged_export_agree(option: str, base: Path, tmp_path: Path) -> None:
    ours = _learnt(base, **OPTIONS[option])
    now = _log_probs(ours)
    assert (now - _stock_log_probs(_stock(base), ours)).abs().max() > 1e-2
    ours.save(tmp_path / "merged")
    adapter = tmp_path / "merged" / "adapter"
    for model in (PeftModel.from_pretrained(_stock(base), adapter), _stock(tmp_path / "merged")):
        torch.testing.assert_close(_stock_log_probs(model, ours), now, rtol=0, atol=SAME)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_reference_stays_the_base_bit_for_bit(option: str, base: Path) -> None:
    ours = load_policy(_spec(base, **OPTIONS[option]), 0)
    packed, start = batch(len(ours.tokenizer))[1], _log_probs(load_policy(Model(name=str(base)), 0))
    assert torch.equal(_log_probs(ours), start), "a new adapter changes nothing"
    assert lora.is_untouched(ours.model)
    reference, digest = reference_for(ours), ours.base_fingerprint
    learn(ours, 1)
    assert not lora.is_untouched(ours.model)
    now = _log_probs(ours)
    assert torch.equal(reference.log_probs(packed), start)
    assert lora.base_fingerprint(ours.model) == digest
    full = ours.scores(packed, reference=reference).full_kl_N
    assert full is not None
    assert full.min() > -1e-6, "both heads are of their own policy"
    again = reference_for(ours)
    learn(ours, 2)
    assert torch.equal(again.log_probs(packed), now)
    assert not torch.equal(_log_probs(ours), now)
    restored = reference_for(load_policy(_spec(base, **OPTIONS[option]), 0), again.state())
    assert torch.equal(restored.log_probs(packed), now), "as a checkpoint holds it"


@pytest.mark.parametrize("option", ["rslora", "dora", "whole", "expression"])
def test_an_adapter_of_peft_goes_on_learning(option: str, base: Path, tmp_path: Path) -> None:
    keys = {"rslora": "use_rslora", "dora": "use_dora"}
    named: dict[str, Any] = {"modules_to_save": ["embed_tokens", "norm"]}
    if option != "whole":
        named = {keys[option]: True} if option in keys else {}
    gpt2 = "gpt2" in base.name
    if gpt2 and option == "whole":
        named = {"modules_to_save": ["wte", "lm_head"]}
    targets: Any = ["c_attn", "c_proj"] if gpt2 else ["q_proj", "down_proj"]
    targets = rf".*\.({'|'.join(targets)})" if option == "expression" else targets
    made = get_peft_model(_stock(base), LoraConfig(r=3, target_modules=targets, **named))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * 0.1
                tied = gpt2 and "modules_to_save" in name  # the same in both copies
                parameter.add_(noise * (0 if tied else 1))
    made.save_pretrained(tmp_path / "adapter")
    spec = Model(name=str(base), lora=Lora(adapter=str(tmp_path / "adapter")), device="cpu")
    ours = load_policy(spec, 0)
    assert (ours.rank, lora.is_untouched(ours.model)) == (3, False)
    torch.testing.assert_close(_stock_log_probs(made, ours), _log_probs(ours), rtol=0, atol=SAME)
    assert reference_for(ours).state() != {}, "its reference is the adapter as it was"
    learn(ours, 1)
    ours.save_adapter(tmp_path / "further")
    saved = json.loads((tmp_path / "further" / "adapter_config.json").read_text())
    assert saved["target_modules"] == sorted(n for n, _ in lora.lora_layers(ours.model))
    loaded = PeftModel.from_pretrained(_stock(base), tmp_path / "further")
    torch.testing.assert_close(_stock_log_probs(loaded, ours), _log_probs(ours), rtol=0, atol=SAME)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_sampler_has_the_trainers_log_probs(option: str, base: Path) -> None:
    ours = _learnt(base, **OPTIONS[option])
    engine = NativeEngine(frozen_copy(ours.model), ours.tokenizer)
    for turn in (1, 2):
        _check_sampler(ours, engine)
        learn(ours, turn)
        engine.sync({n: p for n, p in ours.model.named_parameters() if p.requires_grad})


def _check_sampler(ours: Policy, engine: NativeEngine) -> None:
    """Its log-probs are the trainer's, but for the order of float32 sums."""
    prompt = Prompt("p", "", tokens=(2, 5, 7))
    (group,) = engine.sample([prompt], 4, Sampling(max_tokens=12), 3)
    for one in group.completions:
        sequence = torch.tensor([*prompt.tokens, *one.tokens.tolist()])
        packed = pack([sequence], [torch.arange(3, len(sequence))])
        found = torch.from_numpy(one.log_probs.copy())
        expected = ours.scores(packed).log_prob_N.detach()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-5)


def test_dora_on_a_base_in_four_bits() -> None:
    keys: dict[str, Any] = {"build": build(hidden_size=64), "quantisation": "nf4", "device": "cpu"}
    bare = load_policy(Model(**keys, lora=Lora(rank=4)), 0)
    ours = load_policy(Model(**keys, lora=Lora(rank=4, dora=True)), 0)
    packed, start = batch(len(ours.tokenizer))[1], _log_probs(bare)
    assert torch.equal(_log_probs(ours), start)
    reference = reference_for(ours)
    learn(ours, 1)
    assert torch.equal(reference.log_probs(packed), start)
    merged = load_policy(Model(build=keys["build"], device="cpu"), 0)
    merged.model.load_state_dict(lora.plain_weights(ours.model))
    torch.testing.assert_close(_log_probs(merged), _log_probs(ours), rtol=0, atol=5e-5)
    _check_sampler(ours, NativeEngine(ours.model, ours.tokenizer))


def test_dropout_is_in_optimizer_steps_alone() -> None:
    ours = _stirred(dropout=0.5)
    exact = _log_probs(ours)
    with lora.dropout_on(3):
        first = _log_probs(ours)
        with torch.no_grad():
            assert torch.equal(_log_probs(ours), exact), "scores without gradients are exact"
    state = torch.get_rng_state()
    with lora.dropout_on(3):
        assert torch.equal(_log_probs(ours), first)
    with lora.dropout_on(4):
        assert not torch.equal(_log_probs(ours), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert (first - exact).abs().max() > 1e-3
    assert torch.equal(_log_probs(ours), exact)


@pytest.mark.parametrize("dora", [False, True])
def test_recomputed_activations_drop_the_same(dora: bool) -> None:
    gradients = []
    for again in (False, True):
        ours = _stirred(dropout=0.5, dora=dora, checkpointing=again)
        with lora.dropout_on(3):
            ours.scores(batch(len(ours.tokenizer))[1]).log_prob_N.sum().backward()
        gradients.append([p.grad for p in ours.trainable().values()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def _stirred(checkpointing: bool = False, **keys: Any) -> Policy:
    spec = Model(
        build=build(),
        lora=Lora(rank=4, **keys),
        device="cpu",
        activation_checkpointing=checkpointing,
    )
    ours = load_policy(spec, 0)
    learn(ours, 1)
    return ours


def test_dora_is_the_papers_equation() -> None:
    """W' = m ∘ (W + s·BA) / ‖W + s·BA‖ by row, in float64 (arXiv:2402.09353 eq. 5)."""
    ours = _stirred(dora=True, rslora=True)
    name, layer = lora.lora_layers(ours.model)[0]
    m, a, b, w = (
        t.detach().double()
        for t in (
            layer.lora_magnitude_vector[lora.POLICY].weight,
            layer.lora_A[lora.POLICY].weight,
            layer.lora_B[lora.POLICY].weight,
            layer.base_layer.weight,
        )
    )
    whole = w + 32 / 4**0.5 * b @ a  # α/√r
    expected = m[:, None] * whole / whole.square().sum(1, keepdim=True).sqrt()
    found = lora.plain_weights(ours.model)[f"{name}.weight"]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"modules_to_save": ("embed_token",)}, "did you mean 'embed_tokens'"),
        ({"modules_to_save": ("q_proj",), "targets": ("q_proj",)}, "unknown model.lora.targets"),
        ({"modules_to_save": ("act_fn",)}, "has no weights"),
    ],
)
def test_modules_that_cannot_learn_are_refused(keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(KeelError, match=reason):
        load_policy(Model(build=build(), lora=Lora(**keys)), 0)


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"model.lora.adapter = .* does not exist"):
        read_adapter(str(tmp_path / "none"))
    _stirred().save_adapter(tmp_path / "a")
    other = Model(build=build(hidden_size=64), lora=Lora(adapter=str(tmp_path / "a")))
    with pytest.raises(KeelError, match=r"is \[4, 88\] in it and \[4, 176\] in the model"):
        load_policy(other, 0)
    weights = tmp_path / "a" / "adapter_model.safetensors"
    save_file({**load_file(weights), "base_model.model.x.lora_E": torch.zeros(1)}, weights)
    same = Model(build=build(), lora=Lora(adapter=str(tmp_path / "a")))
    with pytest.raises(KeelError, match=r"x.lora_E is \[1\] in it and None in the model"):
        load_policy(same, 0)
    config = tmp_path / "a" / "adapter_config.json"
    for key, value, reason in (
        ("init_lora_weights", "pissa", "changes the base"),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern = .*does not support"),
        ("peft_type", "IA3", "of kind IA3"),
    ):
        content = json.loads(config.read_text())
        config.write_text(json.dumps({**content, key: value}))
        with pytest.raises(KeelError, match=reason):
            load_policy(same, 0)
        config.write_text(json.dumps(content))


def test_pefts_config_becomes_the_recipes_table() -> None:
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        use_rslora=True,
        target_modules=["v_proj", "q_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    found = collect_inputs("quickstart", lora=config).recipe["model"]["lora"]
    assert found == {
        "rank": 8,
        "alpha": 16.0,
        "dropout": 0.05,
        "rslora": True,
        "dora": False,
        "targets": ["q_proj", "v_proj"],
        "modules_to_save": ["lm_head"],
    }
    for wrong, reason in (
        (LoraConfig(target_modules="all-linear", bias="all"), "bias = 'all'"),
        (LoraConfig(), "target_modules = None"),
        (LoraConfig(target_modules=r".*q_proj"), "give a list of names"),
        (LoraConfig(target_modules="all-linear", init_lora_weights="pissa"), "init_lora_weights"),
        (3, "a int: pass peft's LoraConfig"),
    ):
        with pytest.raises(KeelError, match=reason):
            collect_inputs("quickstart", lora=wrong)


def test_the_static_decoders_copy_has_dora_merged() -> None:
    ours = _stirred(dora=True, modules_to_save=("lm_head", "norm"))
    copied = SamplingWeights(ours.model, torch.float64)
    learn(ours, 2)
    copied.refresh()
    merged = lora.plain_weights(ours.model)
    for name in ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj", "norm"):
        weight = copied.backbone.get_submodule(name).weight
        expected = merged[f"model.{name}.weight"].double()
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(copied.head.weight, merged["lm_head.weight"].double())
