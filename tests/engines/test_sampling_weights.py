"""The copy of a model's weights that the static decoder samples with."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from keel.engines import sampling_weights
from keel.engines.sampling_weights import JointLinear, SamplingWeights, _join
from keel.models.attention import Attending, PackedLayout, install
from keel.models.families import head_of
from keel.models.lora import reference_adapter
from tests.engines.tiny import FAMILIES, tiny
from tests.models.tiny import policy, stir

JOINT = {"gpt2": 0, "phi3": 0, "gpt_neox": 0, "opt": 1, "gpt_oss": 1, "qwen3_moe": 1}
"""Products of several layers in each layer of these families; 2 in the others'."""


@torch.no_grad()
def states(backbone: torch.nn.Module) -> Tensor:
    tokens = torch.arange(2, 9)
    out = backbone(
        input_ids=tokens[None],
        position_ids=torch.arange(7)[None],
        use_cache=False,
        layout=Attending(PackedLayout([7])),
    )
    found: Tensor = out.last_hidden_state
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_same_input_are_one_product(family: str) -> None:
    """After a refresh, too: nothing of the copy is left behind."""
    model = tiny(family, dtype=torch.float64)
    install(model)
    weights = SamplingWeights(model, torch.float32)
    joint = [m for m in weights.backbone.modules() if isinstance(m, JointLinear)]
    assert len(joint) == JOINT.get(family, 2) * model.config.num_hidden_layers
    for _ in range(2):
        stir(model)
        weights.refresh()
        wanted = states(copy.deepcopy(model).float().base_model)
        torch.testing.assert_close(states(weights.backbone), wanted, rtol=1e-4, atol=1e-4)
    assert all(m.out is None for m in joint)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_are_merged_into_joint_products(family: str) -> None:
    made = policy(family, rank=4)
    with torch.no_grad():
        for name, weight in made.trainable().items():
            weight.add_(0.3 if "lora_B" in name else 0.0)
    weights = SamplingWeights(made.model, torch.bfloat16)
    weights.refresh()
    assert any(isinstance(m, JointLinear) for m in weights.backbone.modules())
    with torch.no_grad():
        wanted = states(made.model.base_model)
    found = states(weights.backbone).float()
    # 8 bits, through two layers of enlarged weights.
    assert (found - wanted).abs().max() <= 0.1 * wanted.abs().max()
    with reference_adapter(made.model), torch.no_grad():
        far = (states(made.model.base_model) - wanted).abs().max()
    assert far > 0.3 * wanted.abs().max()


@pytest.mark.parametrize(
    ("kind", "dtype", "own"),
    [
        ("float32", torch.bfloat16, True),
        ("float32", torch.float64, False),
        ("auto", torch.bfloat16, False),
    ],
)
def test_the_head_follows_the_model(
    kind: str, dtype: torch.dtype, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bias too: the model's own weights if their products are in float32, else a copy."""
    model = tiny("llama", dtype=torch.float32)
    model.lm_head = nn.Linear(32, len(model.lm_head.weight))
    monkeypatch.setattr(sampling_weights, "head_of", lambda m: replace(head_of(m), dtype=kind))
    weights = SamplingWeights(model, dtype)
    stir(model)
    weights.refresh()
    for found, wanted in (
        (weights.head.weight, model.lm_head.weight),
        (weights.head.bias, model.lm_head.bias),
    ):
        assert found is not None
        assert (found.data_ptr() == wanted.data_ptr()) == own
        assert torch.equal(found, wanted.to(torch.float32 if own else dtype))


def test_adapters_are_merged_in_the_same_type() -> None:
    made = policy("llama", rank=4)
    weights = SamplingWeights(made.model, torch.float32)
    assert not any("lora" in name for name, _ in weights.backbone.named_parameters())


@pytest.mark.parametrize("changed", ["bias", "in_features"])
def test_layers_that_differ_stay_apart(changed: str) -> None:
    module = nn.Module()
    inputs = 5 if changed == "in_features" else 4
    module.gate_proj, module.up_proj = nn.Linear(4, 3, bias=changed != "bias"), nn.Linear(inputs, 3)
    sampling_weights._join(module, ("gate_proj", "up_proj"))
    assert type(module.gate_proj) is type(module.up_proj) is nn.Linear


def test_layers_of_other_code_stay_apart() -> None:
    """It may call them in another order, or with inputs that differ."""

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)

    module = Gated()
    _join(module, ("gate_proj", "up_proj"))
    assert type(module.gate_proj) is type(module.up_proj) is torch.nn.Linear
