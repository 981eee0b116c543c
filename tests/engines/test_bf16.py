"""Sampling on a bfloat16 copy of a float32 model, compiled and through the modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.config.model import Lora
from keel.engines import compiled, native
from keel.engines.compiled import angles, rules_of
from keel.engines.model_runner import ModuleRunner, cast_copy
from keel.engines.native import NativeEngine
from keel.models.attention import install
from keel.models.families import head_of, states_at
from keel.models.head import logits
from keel.models.lora import add_lora, affine, lora_layers
from keel.models.packed import Packed
from keel.types import Completion, Prompt, Sampling
from tests.engines.test_compiled import LIKE, model_of, prompts, rotary, states_of
from tests.engines.test_decoding import poison
from tests.engines.tiny import TOKENIZER, tiny

BF16 = torch.bfloat16
ONE = {"num_hidden_layers": 1}
"""Where there are so many numbers that in each model of two some lie next to a border."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "queries and keys with norms": ("qwen3", {}),
    "biases of queries and keys": ("qwen2", {}),
    "a window of few places": ("mistral", {}),
    "scaled rotations": ("llama", rotary("yarn")),
    "heads of 64": ("llama", {**ONE, "hidden_size": 128, "num_attention_heads": 2}),
    "heads of 96": ("qwen3", {**ONE, "head_dim": 96, "num_key_value_heads": 1}),
    "heads of 128 and a window": ("mistral", {**ONE, "head_dim": 128, "sliding_window": 7}),
    "heads of 256": ("qwen3", {**ONE, "head_dim": 256}),
    "heads of an odd half": ("llama", {"hidden_size": 24, "head_dim": 6}),
    "biases everywhere": LIKE["biases everywhere"],
    "a window over pages": LIKE["a window over pages"],
    "a large epsilon of heads": LIKE["a large epsilon of heads"],
}


def near(x: Tensor) -> Tensor:
    """The nearest bfloat16."""
    return x.to(BF16).double()


def projected(linear: Any, x: Tensor, norm: Any = None) -> Tensor:
    """Rounded inputs and weights, a norm's folded into them; the norm's scale after the sum."""
    weight, bias = affine(linear)
    weight = weight if norm is None else weight * norm.weight
    out = near(x) @ near(weight).T
    if norm is not None:
        out = out / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    return out if bias is None else out + bias.double()


def normed(norm: Any, x: Tensor) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return x * scale * norm.weight.double()


def attended(q: Tensor, k: Tensor, v: Tensor, prompt: int, rules: Any) -> Tensor:
    """The prompt's tokens among themselves, unrounded; the others with all rounded. (T, H, D)"""
    each = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(each, 1) for x in (k, v))
    place = torch.arange(len(q))
    past = place[:, None] - place
    hidden = (past < 0) | (past >= (rules.window or len(q)))
    out = []
    for rows, rounds in ((slice(0, prompt), nn.Identity()), (slice(prompt, None), near)):
        scores = torch.einsum("thd,shd->hts", rounds(q[rows] * rules.scaling), rounds(k))
        scores = scores.masked_fill(hidden[rows], -torch.inf)
        weights = rounds((scores - scores.amax(-1, keepdim=True)).exp())
        weights = weights / weights.sum(-1, keepdim=True)
        out.append(torch.einsum("hts,shd->thd", weights, rounds(v)))
    return torch.cat(out)


@torch.no_grad()
def written_out(model: PreTrainedModel, tokens: Tensor, prompt: int) -> Tensor:
    """The states after a prompt's last token and each one after, in float64."""
    backbone: Any = model.base_model
    x = backbone.embed_tokens.weight[tokens].double()
    cos, sin = (t.double()[:, None] for t in angles(backbone, torch.arange(len(tokens))))
    for layer in backbone.layers:
        own, mlp = layer.self_attn, layer.mlp
        before, following = layer.input_layernorm, layer.post_attention_layernorm
        q, k, v = (
            projected(part, x, before).view(len(x), -1, own.head_dim)
            for part in (own.q_proj, own.k_proj, own.v_proj)
        )
        if hasattr(own, "q_norm"):
            q, k = normed(own.q_norm, q), normed(own.k_norm, k)
        turned = []
        for half in (y.chunk(2, -1) for y in (q, k)):
            turned.append(
                torch.cat([half[0] * cos - half[1] * sin, half[1] * cos + half[0] * sin], -1)
            )
        seen = attended(*turned, v, prompt, rules_of(layer))
        x = x + projected(own.o_proj, seen.flatten(1))
        gate, up = projected(mlp.gate_proj, x, following), projected(mlp.up_proj, x, following)
        x = x + projected(mlp.down_proj, nn.functional.silu(gate) * up)
    return normed(backbone.norm, x)[prompt - 1 :]


@torch.no_grad()
def apart(x: Tensor, y: Tensor) -> float:
    """The difference relative to y, by norms."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def exact(model: PreTrainedModel, tokens: Tensor, prompt: int) -> Tensor:
    """The states of the model's own modules."""
    given = Packed(tokens, (len(tokens),), torch.arange(1, len(tokens)), ())
    with torch.no_grad():
        return states_at(model, given, torch.arange(len(tokens)))[prompt - 1 :]


@pytest.mark.parametrize(("family", "size"), SHAPES.values(), ids=SHAPES)
def test_compiled_states_are_those_of_the_rounding_written_out(
    family: str, size: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that held NaN before.

    A number next to a border may fall on its other side, for sums are in float32, and all that
    follows from it differs by 1e-3 or less: hence a median of rows, and the best of three models.
    Where nothing falls so the rest is float32's 1e-7; one rounding left out, or of another kind,
    is some 1e-4 of every row.
    """
    poison(monkeypatch)
    tokens = torch.tensor(prompts(60)[0].tokens)
    medians = []
    for seed in range(3):
        model = model_of(family, seed=seed, **{"num_hidden_layers": 2, **size})
        found = compiled.compiled(model, 100, BF16)
        assert found is not None
        stepped = states_of(found, tokens, 17).detach()
        expected = written_out(model, tokens, 17)
        rows = (stepped - expected).norm(dim=1) / expected.norm(dim=1)
        medians.append(float(rows.median()))
        # Unit roundoff is 2^-9, 1e-3 as a root mean square; two layers have some 14 roundings in a
        # row, each of two factors: √28 · 1e-3 = 6e-3.
        assert 3e-4 < apart(stepped, exact(model, tokens, 17)) < 3e-2
    assert min(medians) < 2e-6


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_modules_on_a_copy_are_near_the_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All activations are rounded there, some 30 times a layer: 1e-3 · √(2 · 60) = 1e-2."""
    monkeypatch.setattr(compiled, "library", lambda dtype: None)
    model = tiny(family, num_hidden_layers=2).float()
    install(model)
    tokens = torch.tensor(prompts(60)[0].tokens)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = native.make_runner(model, 17, 43, BF16)
    assert isinstance(found, ModuleRunner)
    with torch.no_grad():
        stepped = states_of(found, tokens, 17)  # type: ignore[arg-type]
    assert stepped.dtype == BF16
    # A router between two experts that are nearly alike may choose the other one.
    assert 1e-3 < apart(stepped, exact(model, tokens, 17)) < (0.2 if "moe" in family else 5e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_copy_keeps_ties_and_buffers() -> None:
    model = model_of("llama", tie_word_embeddings=True)
    add_lora(model, Lora(rank=2, targets=("q_proj",)), 0)
    backbone: Any = model.base_model
    backbone.layers[1].mlp = backbone.layers[0].mlp
    twin: Any = cast_copy(backbone, BF16)
    assert {p.dtype for p in twin.parameters()} == {BF16}
    assert not any(p.requires_grad for p in twin.parameters())
    assert twin.layers[1].mlp is twin.layers[0].mlp
    assert twin.rotary_emb.inv_freq.dtype == torch.float32
    assert len(list(twin.parameters())) == len(list(backbone.parameters()))
    for (name, p), q in zip(backbone.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.to(BF16), q), name
    assert model.lm_head.weight is backbone.embed_tokens.weight
    assert cast_copy(twin, BF16) is twin
    # Adapters of a bfloat16 model are float32: they alone are copied.
    for _, layer in lora_layers(twin):
        layer.lora_A.float()
    mixed: Any = cast_copy(twin, BF16)
    assert mixed is not twin
    assert {p.dtype for p in mixed.parameters()} == {BF16}
    assert mixed.norm.weight.data_ptr() == twin.norm.weight.data_ptr()


@pytest.mark.parametrize(("family", "library"), [("llama", "compiled"), ("qwen2", "modules")])
def test_log_probs_are_near_the_trainers(
    family: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an adapter, as a stage samples: states that are off by 1e-2 of their norm move logits of
    about 1 by as much. Those of float32 agree within 2e-5."""
    if library == "modules":
        monkeypatch.setattr(compiled, "library", lambda dtype: None)
    model = model_of(family)
    add_lora(model, Lora(rank=2, targets=("q_proj", "down_proj")), 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
        for _, layer in lora_layers(model):
            layer.lora_B["policy"].weight.normal_(std=0.1, generator=generator)
    engine = NativeEngine(model, TOKENIZER, max_num_seqs=6, dtype=BF16)
    gaps = []
    for group in engine.sample(prompts(3, 9, 5), 4, Sampling(max_tokens=24), 0):
        for one in group.completions:
            gaps.append(np.abs(one.log_probs - scored(model, group.prompt, one)))
    gap = np.concatenate(gaps)
    assert len(gap) > 100
    assert 1e-3 < gap.mean() < 3e-2
    assert gap.max() < 0.3


@torch.no_grad()
def scored(model: PreTrainedModel, prompt: Prompt, one: Completion) -> np.ndarray:
    """The trainer's log-probabilities of a completion."""
    tokens = torch.tensor([*prompt.tokens, *one.tokens.tolist()])
    given = Packed(tokens, (len(tokens),), torch.arange(1, len(tokens)), ())
    first = len(prompt.tokens) - 1
    states = states_at(model, given, torch.arange(first, len(tokens) - 1))
    log_probs = logits(states, head_of(model)).log_softmax(-1)
    chosen: np.ndarray = log_probs.gather(1, tokens[first + 1 :, None])[:, 0].numpy()
    return chosen
