"""Shapes counted from configs: against real modules, torch's counter and its saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from keel.analysis.costs import Shape
from keel.config.model import BuildModel, Lora, Model
from keel.models.build import build_config, build_model
from keel.models.families import hidden_states
from keel.models.lora import add_lora
from keel.models.packed import pack
from keel.models.policy import Policy, load_policy
from keel.models.shape import adapted, model_config, shape_of, without_weights

# Tied heads, grouped heads, experts with and without a shared one, biases, norms of heads, one key
# head, learned positions.
FAMILIES = (
    *("llama", "qwen2", "qwen3", "gemma2", "olmo2", "gpt2", "gpt_bigcode", "opt", "gpt_neox"),
    *("phi", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "starcoder2"),
)
NO_KEY_HEADS = ("gpt2", "gpt_bigcode", "opt", "gpt_neox")


def spec(family: str, **changes: Any) -> BuildModel:
    sizes: dict[str, Any] = {"hidden_size": 128, "layers": 2, "heads": 4, "intermediate_size": 352}
    if family not in NO_KEY_HEADS:
        sizes["kv_heads"] = 2
    return BuildModel(family=family, tokenizer="bytes", **{**sizes, **changes})


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_module(family: str) -> None:
    """All of them, the bytes of its stored tensors, and what a cache keeps."""
    model = build_model(spec(family), 0, torch.float32)
    shape = shape_of(model)
    assert shape == shape_of(without_weights(build_config(spec(family))))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    out = model(input_ids=torch.ones(1, 5, dtype=torch.long), use_cache=True)
    layers = out.past_key_values.layers
    stored = sum(t.numel() for layer in layers for t in (layer.keys, layer.values))
    assert shape.cached_bytes(1) * 5 == stored


@pytest.mark.parametrize("tied", [True, False])
def test_head_is_counted_unless_tied(tied: bool) -> None:
    shape = shape_of(
        without_weights(build_config(spec("llama", options={"tie_word_embeddings": tied})))
    )
    assert shape.embedding == 258 * 128
    assert shape.head == (0 if tied else 258 * 128)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_are_counted(family: str) -> None:
    model = build_model(spec(family), 0, torch.float32)
    for targets in ("all-linear", ("c_attn",) if family == "gpt2" else ("q_proj", "down_proj")):
        own = build_model(spec(family), 0, torch.float32)
        lora = Lora(rank=4, targets=targets)
        width = adapted(model, lora)
        add_lora(own, lora, 0)
        learned = sum(p.numel() for p in own.parameters() if p.requires_grad)
        assert 4 * width == learned
        # The same numbers with the adapters in place.
        assert shape_of(own) == shape_of(model)
    assert shape_of(model).adapted == adapted(model, Lora())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mixtral"])
def test_operations_are_those_that_torch_counts(family: str) -> None:
    """To 1 %: the counter takes attention as if it were not causal, all n² pairs."""
    model = build_model(spec(family, layers=3), 0, torch.float32)
    model.set_attn_implementation("eager")
    shape, length = shape_of(model), 24
    if shape.experts:  # which run one by one
        model.set_experts_implementation("eager")
    tokens = torch.randint(0, 258, (1, length))
    with FlopCounterMode(display=False) as forward:
        out = model(input_ids=tokens, use_cache=False).logits
    assert shape.forward(length, length**2, length) == pytest.approx(
        forward.get_total_flops(), rel=0.01
    )
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    both = forward.get_total_flops() + backward.get_total_flops()
    assert shape.update(length, length**2, length) == pytest.approx(both, rel=0.01)


def test_operations_of_adapters_are_fewer() -> None:
    model = build_model(spec("llama", layers=3), 0, torch.float32)
    shape = shape_of(model)
    model.set_attn_implementation("eager")
    add_lora(model, Lora(rank=4), 0)
    tokens = torch.randint(0, 258, (1, 24))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    # The first layer needs no gradient of its input, which a model of three layers sees.
    counted = counter.get_total_flops()
    assert 0.9 * shape.update(24, 24**2, 24, rank=4) < counted < shape.update(24, 24**2, 24)


def saved_bytes(policy: Policy, length: int) -> int:
    """Bytes that a forward pass of two sequences keeps for the backward pass, weights aside."""
    sequences = [torch.randint(0, 50, (length,)) for _ in range(2)]
    packed = pack(sequences, [torch.arange(1, length)] * 2)
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(policy.model, packed, policy.autocast)
    return sum(sizes.values())


@pytest.mark.parametrize("autocast", [False, "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2", "starcoder2", "olmo2"])
def test_activations_are_those_that_are_saved(family: str, autocast: Any) -> None:
    """Of a layer, to 25 %: GPT-2 has one copy of the input of its fused projections, counted as
    three; the others are within 10 %."""
    found, layers = [], (2, 4)
    for count in layers:
        model = Model(build=spec(family, layers=count), autocast=autocast, device="cpu")
        policy = load_policy(model, 0)
        found.append((saved_bytes(policy, 120) - saved_bytes(policy, 60)) / 120)
    shape = shape_of(policy.model)
    measured = (found[1] - found[0]) / 2
    if autocast:  # attention is in float32 on a CPU, and what enters the last product is cast
        measured -= 2 * 2 * (shape.query + shape.keys) + 2 * shape.query
    assert shape.recomputed_bytes(bool(autocast)) == pytest.approx(
        measured, rel=0.25 if family == "gpt2" else 0.1
    )


def qwen(hidden: int, layers: int, heads: int, keys: int, mlp: int, tied: bool) -> Shape:
    """A Qwen2.5 as `model.build` describes it."""
    options = {"vocab_size": 151_936 if tied else 152_064, "tie_word_embeddings": tied}
    build = BuildModel(
        family="qwen2", tokenizer="bytes", hidden_size=hidden, layers=layers, heads=heads,
        kv_heads=keys, intermediate_size=mlp, options=options,
    )  # fmt: skip
    return shape_of(without_weights(model_config(Model(build=build))))


def test_published_sizes() -> None:
    """The numbers of the model cards: 0.49, 1.54 and 7.61 billion; 0.36, 1.31, 6.53 without
    embeddings."""
    for sizes, total, rest in (
        ((896, 24, 14, 2, 4864, True), 0.494e9, 0.358e9),
        ((1536, 28, 12, 2, 8960, True), 1.544e9, 1.31e9),
        ((3584, 28, 28, 4, 18944, False), 7.616e9, 6.525e9),
    ):
        shape = qwen(*sizes)
        assert shape.parameters == pytest.approx(total, rel=0.002)
        assert shape.backbone == pytest.approx(rest, rel=0.003)
