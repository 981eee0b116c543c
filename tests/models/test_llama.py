"""The quick way through a Llama-like backbone against the backbone's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from keel.config.model import BuildModel, Lora, Model
from keel.engines.cpu.backbone import compiled
from keel.models import llama
from keel.models.backbone import hidden_states, states_at
from keel.models.lora import add_lora
from keel.models.packed import Packed
from keel.models.policy import load_policy
from tests.engines.test_compiled import model_of, rotary

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "yarn")


def packed(seed: int = 0) -> Packed:
    """A prompt of five tokens with two answers, and a sequence alone."""
    lengths, follows = (5, 3, 9, 7), (-1, 0, 0, -1)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 40, (sum(lengths),), generator=generator)
    return Packed(tokens, lengths, torch.arange(1, sum(lengths)), follows)


def states(model: PreTrainedModel) -> Tensor:
    given = packed()
    return states_at(model, given, torch.arange(len(given.tokens_T)))


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    model.zero_grad()
    seed = torch.randn(states(model).shape, generator=torch.Generator().manual_seed(2))
    states(model).backward(seed)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_states_and_gradients_are_those_of_the_modules(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Heads of 32: those that attention has compiled code for.
    wide = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = model_of(family, **(wide if family != "yarn" else {}))
    assert llama.applies(model.base_model)
    quick, slopes = states(model), gradients(model)
    monkeypatch.setattr(llama, "applies", lambda backbone: False)
    # float32 in another order, behind three layers with weights large enough to have opinions.
    torch.testing.assert_close(quick, states(model), rtol=1e-5, atol=2e-5)
    own = gradients(model)
    assert slopes.keys() == own.keys()
    for name, slope in own.items():
        atol = 2e-5 * float(slope.abs().max())
        torch.testing.assert_close(slopes[name], slope, rtol=1e-4, atol=atol)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_nothing_is_said_with_the_last_token_of_a_sequence(family: str) -> None:
    """States behind which a target is chosen, and their gradients, do without it."""
    model = model_of(family)
    whole = packed()
    whole = replace(whole, target_N=torch.tensor([1, 3, 5, 7, 8, 16, 18, 23]))
    entered: list[int] = []
    count = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: entered.append(given[0].numel())
    )
    found: list[tuple[Tensor, dict[str, Tensor]]] = []
    for how in (hidden_states, lambda *given: states_at(*given, whole.source_N)):
        model.zero_grad()
        states = how(model, whole)
        states.backward(torch.randn(states.shape, generator=torch.Generator().manual_seed(2)))
        slopes = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((states.detach(), slopes))
    count.remove()
    assert entered == [24 - 3, 24]
    (ours, slopes), (theirs, all_slopes) = found
    # float32; products of other sizes sum in another order.
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    assert slopes.keys() == all_slopes.keys()
    for name, slope in all_slopes.items():
        atol = 2e-5 * float(slope.abs().max())
        torch.testing.assert_close(slopes[name], slope, rtol=1e-4, atol=atol)


def test_an_adapter_is_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    plain = states(model)
    add_lora(model, Lora(rank=2), 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    assert llama.applies(model.base_model)
    quick, slopes = states(model), gradients(model)
    assert (quick - plain).abs().max() > 0.01
    monkeypatch.setattr(llama, "applies", lambda backbone: False)
    torch.testing.assert_close(quick, states(model), rtol=1e-5, atol=1e-4)
    for name, slope in gradients(model).items():
        atol = 1e-4 * float(slope.abs().max())
        torch.testing.assert_close(slopes[name], slope, rtol=1e-4, atol=atol)


def noted(notes: list[str]) -> Any:
    return lambda *_: notes.append("heard")


INSIDE = (
    *("", "norm", "layers.1", "layers.0.mlp", "layers.0.mlp.act_fn"),
    *("layers.2.input_layernorm", "layers.1.post_attention_layernorm"),
    *("layers.0.self_attn.q_norm", "layers.2.self_attn.k_norm"),
)


@pytest.mark.parametrize("inside", INSIDE)
def test_who_listens_to_a_module_hears_it(inside: str) -> None:
    model = model_of("qwen3")
    module = model.base_model.get_submodule(inside)
    registers = [module.register_forward_hook, module.register_forward_pre_hook]
    if inside:  # what the backbone itself says is no tensor
        registers.append(module.register_full_backward_hook)
        registers.append(module.register_full_backward_pre_hook)
    for register in registers:
        notes: list[str] = []
        handle = register(noted(notes))
        gradients(model)
        handle.remove()
        assert notes


def test_a_forward_put_over_a_module_is_called() -> None:
    model = model_of("llama")
    mlp = model.base_model.layers[0].mlp
    mlp.forward = lambda x: 0 * x
    assert not llama.applies(model.base_model)
    assert compiled(model, 64) is None


def test_projections_and_embeddings_are_called_as_modules() -> None:
    model = model_of("qwen3")
    shapes: list[tuple[int, ...]] = []
    inside = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.1.mlp.down_proj")
    for name in inside:
        model.base_model.get_submodule(name).register_forward_hook(
            lambda module, args, out: shapes.append(tuple(out.shape[:2]))
        )
    assert llama.applies(model.base_model)
    states(model)
    assert shapes == [(1, 24)] * len(inside)


def test_the_rest_goes_through_its_modules() -> None:
    moving = model_of("llama", **rotary("dynamic"))
    other = model_of("llama")
    other.config.hidden_act = "gelu"
    recomputing = load_policy(Model(build=BuildModel(), activation_checkpointing=True), 0).model
    recomputing.train()
    one = model_of("llama").train()
    one.base_model.layers[0].gradient_checkpointing = True
    half = model_of("llama")
    half.base_model.layers[1].to(torch.bfloat16)
    part = model_of("llama")  # of each head's numbers half are turned
    part.base_model.rotary_emb.inv_freq = part.base_model.rotary_emb.inv_freq[::2]
    others = (moving, other, recomputing, one, half, part)
    models = (model_of("llama").double(), model_of("gemma2"), *others)
    for model in models:
        assert not llama.applies(model.base_model)
    assert llama.applies(recomputing.eval().base_model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not llama.applies(recomputing.base_model)
