"""A base in 4 bits under an adapter: what it computes, keeps, copies and saves."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import AutoModelForCausalLM

from keel.config.model import Lora, Model
from keel.engines.model_runner import cast_copy
from keel.models import lora
from keel.models.policy import Policy, frozen_copy, load_policy
from keel.models.quantised import QuantisedLinear, weight_count
from keel.models.reference import AdapterOff, critic_from_policy, reference_for
from keel.types import KeelError
from tests.models.tiny import batch, build


def spec(family: str = "llama", **changes: Any) -> Model:
    keys = {"lora": Lora(rank=4), "quantisation": "nf4", "device": "cpu"}
    return Model(build=build(family, hidden_size=64), **keys | changes)


def learned(policy: Policy) -> Policy:
    """Its adapter, as if it had learned."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def log_probs(policy: Policy) -> Tensor:
    return policy.scores(batch(policy.tokens)[1]).log_prob_N.detach()


def test_linear_layers_of_the_backbone_are_in_four_bits() -> None:
    policy = load_policy(spec(), 0)
    kinds = {
        n.rsplit(".", 2)[-2]: type(m)
        for n, m in policy.model.named_modules()
        if n.endswith("base_layer")
    }
    assert set(kinds) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert set(kinds.values()) == {QuantisedLinear}
    assert type(policy.model.get_output_embeddings()) is torch.nn.Linear
    plain = load_policy(spec(quantisation=None), 0)
    assert weight_count(policy.model) == weight_count(plain.model)
    assert policy.base_fingerprint == plain.base_fingerprint


def test_effect_is_that_of_the_dequantised_weights() -> None:
    policy = load_policy(spec(), 0)
    effect = policy.quantisation
    assert effect is not None
    assert 0.001 < effect.mean < effect.largest < 1
    assert "log-probabilities differ from the original weights' by" in str(effect)
    plain = load_policy(spec(quantisation=None), 0)
    assert 1e-4 < float((log_probs(policy) - log_probs(plain)).abs().mean()) < 0.5
    weights = lora.base_weights(policy.model)
    with torch.no_grad():
        for name, tensor in plain.model.state_dict().items():
            if ".lora_" not in name:
                tensor.copy_(weights[name.replace(".base_layer.", ".")])
    # The same products, of the same numbers.
    assert torch.equal(log_probs(policy), log_probs(plain))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_copies_and_modes_compute_the_same(family: str) -> None:
    policy = learned(load_policy(spec(family), 0))
    wanted = log_probs(policy)
    for model in (copy.deepcopy(policy.model), frozen_copy(policy.model)):
        twin = copy.copy(policy)
        twin.__dict__ = dict(policy.__dict__)
        twin._modules = {"model": model}
        assert torch.equal(log_probs(twin), wanted)
    policy.model.eval()  # in which bitsandbytes' own layer rounds to bfloat16 on some CPUs
    with torch.no_grad():
        assert torch.equal(log_probs(policy), wanted)


def test_layer_follows_autocast_as_linear_does() -> None:
    layer = QuantisedLinear(torch.nn.Linear(64, 32), torch.device("cpu"))
    x = torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert layer(x).dtype == torch.float32
    layer(x).sum().backward()
    assert torch.allclose(x.grad, layer.dequantised().sum(0).expand(3, -1), atol=1e-5)  # type: ignore[arg-type]


def test_rounded_copy_for_sampling_keeps_the_scales() -> None:
    layer = QuantisedLinear(torch.nn.Linear(64, 32), torch.device("cpu"))
    copied = cast_copy(layer, torch.bfloat16)
    x = torch.randn(3, 64)
    assert torch.allclose(copied(x.bfloat16()).float(), layer(x), atol=0.05, rtol=0.05)


def test_reference_is_the_base_with_the_adapter_off() -> None:
    policy = load_policy(spec(), 0)
    reference, before = reference_for(policy), log_probs(policy)
    learned(policy)
    assert isinstance(reference, AdapterOff)
    assert torch.equal(reference.log_probs(batch(policy.tokens)[1]), before)
    assert not torch.equal(log_probs(policy), before)


def test_critic_starts_from_dequantised_weights_and_learns_all() -> None:
    policy = learned(load_policy(spec(), 0))
    critic = critic_from_policy(policy)
    assert not any(isinstance(m, QuantisedLinear) for m in critic.modules())
    assert all(p.requires_grad and p.is_floating_point() for p in critic.parameters())


def test_merged_weights_are_those_it_computes_with(tmp_path: Path) -> None:
    policy = learned(load_policy(spec(), 0))
    policy.save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    merged = lora.plain_weights(policy.model)
    assert all(torch.equal(merged[name], tensor) for name, tensor in plain.state_dict().items())


def test_key_needs_an_adapter() -> None:
    with pytest.raises(ValidationError, match=r"cannot take a step: set model\.lora"):
        spec(lora=None)


def test_transposed_layers_are_refused() -> None:
    with pytest.raises(KeelError, match="'gpt2' has no linear layers"):
        load_policy(spec("gpt2"), 0)


@pytest.mark.slow
def test_import_prints_nothing_and_asks_no_hub(tmp_path: Path) -> None:
    """A package `kernels` that is installed would download from the hub."""
    (tmp_path / "kernels.py").write_text(
        "__version__ = '0.1'\ndef get_kernel(*_, **__):\n    raise SystemExit('asked the hub')\n"
        "def __getattr__(name):\n    return type(name, (), {'__init__': lambda *_, **__: None})\n"
    )
    code = (
        "import sys\nfrom keel.models.lora import import_peft\n"
        "sys.path.insert(0, sys.argv[1])\nimport_peft()\n"
        "assert 'bitsandbytes' in sys.modules and sys.modules.get('kernels', sys) is not None"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
