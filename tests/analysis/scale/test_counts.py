"""Counts of weights, operations and bytes: against models that are built and against hand sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.analysis.scale.catalogue import HARDWARE, MODELS
from keel.analysis.scale.counts import (
    activation_bytes,
    cache_bytes,
    experts_read,
    forward_flops,
    multiplied,
    parameters,
    pipeline_bubble,
    ring_bytes,
    training_flops,
    weight_bytes_read,
)
from keel.analysis.scale.memory import fits, rank_memory, rows_that_fit
from keel.analysis.scale.shapes import ModelShape, Parallelism
from keel.config.load import load_recipe
from keel.config.model import BuildModel
from keel.models.build import build_config, build_model
from keel.preflight.device_estimate import estimate, sizes_of

SMALL = ModelShape("small", 2, 32, 32, 16, 88, 100, vectors=64)


def shape_of(spec: BuildModel) -> ModelShape:
    """The shape of a dense model without norms of queries and keys."""
    config = build_config(spec)
    head = config.hidden_size // config.num_attention_heads
    query, kept = config.hidden_size, config.num_key_value_heads * head
    biases = query + 2 * kept if config.model_type == "qwen2" else 0
    return ModelShape(
        "built",
        config.num_hidden_layers,
        config.hidden_size,
        query,
        kept,
        config.intermediate_size,
        config.vocab_size,
        config.tie_word_embeddings,
        2 * config.hidden_size + biases,
    )


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_parameters_are_those_of_a_built_model(family: str, kv_heads: int | None) -> None:
    spec = BuildModel(
        family=family, tokenizer="bytes", hidden_size=32, layers=3, heads=4, kv_heads=kv_heads
    )
    model = build_model(spec, 0, torch.float32)
    assert parameters(shape_of(spec)) == sum(p.numel() for p in model.parameters())


def test_parameters_of_a_sparse_model_are_those_of_a_built_one() -> None:
    config = build_config(BuildModel(family="qwen3_moe", hidden_size=32, layers=2, heads=4))
    head = getattr(config, "head_dim", None) or 32 // 4
    shape = ModelShape(
        "built",
        *(2, 32, 4 * head, config.num_key_value_heads * head),
        *(config.intermediate_size, config.vocab_size, config.tie_word_embeddings),
        vectors=2 * 32 + 2 * head,
        experts=config.num_experts,
        active=config.num_experts_per_tok,
        expert_mlp=config.moe_intermediate_size,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert parameters(shape) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2.5-7B", 7_615_616_512),
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.1-70B", 70_553_706_496),
        ("Llama-3.1-405B", 405_853_388_800),
    ],
)
def test_parameters_are_the_published_counts(name: str, count: int) -> None:
    """The counts of the checkpoints' safetensors indices."""
    assert parameters(MODELS[name]) == count


def test_sparse_models_have_their_published_sizes() -> None:
    for name, total, active in (
        ("DeepSeek-V3", 671e9, 37e9),
        ("Qwen3-235B-A22B", 235e9, 22e9),
        ("Qwen3-30B-A3B", 30.5e9, 3.3e9),
    ):
        assert parameters(MODELS[name]) == pytest.approx(total, rel=2e-3)
        # Reports count the input embedding among the active weights, where we do not.
        assert multiplied(MODELS[name]) == pytest.approx(active, rel=0.1)


def test_operations_by_hand() -> None:
    attention = 32 * (32 + 32) + 32 * 32  # H·(q + 2·kv) + q·H
    assert SMALL.attention_weights == attention
    own = 100 * 32 + 2 * (attention + 3 * 32 * 88)
    assert multiplied(SMALL) == own
    assert forward_flops(SMALL, 10) == 2 * own + 4 * 2 * 32 * 10
    assert training_flops(SMALL, 10, checkpointing=False) == 3 * forward_flops(SMALL, 10)
    assert training_flops(SMALL, 10, checkpointing=True) == 4 * forward_flops(SMALL, 10)
    assert cache_bytes(SMALL) == 2 * 2 * 16 * 2
    assert cache_bytes(MODELS["DeepSeek-V3"]) == 61 * 576 * 2
    assert cache_bytes(MODELS["Llama-3.1-70B"]) == 327_680


def test_forward_flops_are_those_that_torch_counts() -> None:
    """Torch counts an attention's matmuls in full, so the context is the whole sequence."""
    from torch.utils.flop_counter import FlopCounterMode

    spec = BuildModel(hidden_size=32, layers=2, heads=4)
    model, tokens = build_model(spec, 0, torch.float32), 12
    model.set_attn_implementation("eager")
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(input_ids=torch.arange(tokens)[None] + 2)
    counted = counter.get_total_flops() / tokens
    # Rotary embeddings outer-multiply positions and frequencies: under 1 % here.
    assert forward_flops(shape_of(spec), tokens) == pytest.approx(counted, rel=0.01)


def test_experts_read_are_the_expectation_of_random_choices() -> None:
    shape = ModelShape("", 1, 8, 8, 8, 8, 8, experts=16, active=2, expert_mlp=4)
    rng = np.random.default_rng(0)
    used = [
        len({e for _ in range(5) for e in rng.choice(16, 2, replace=False)}) for _ in range(4000)
    ]
    # The standard error of the mean is about 0.02.
    assert experts_read(shape, 5) == pytest.approx(np.mean(used), abs=0.08)
    assert experts_read(shape, 1) == pytest.approx(2)
    assert weight_bytes_read(shape, 1) == pytest.approx(2 * multiplied(shape))
    everything = 2 * (multiplied(shape) + (16 - 2) * 3 * 8 * 4)
    assert weight_bytes_read(shape, 1e6) == pytest.approx(everything)


def test_communication_and_bubble_by_hand() -> None:
    assert ring_bytes(800, 8) == 700
    assert ring_bytes(800, 1) == 0
    assert pipeline_bubble(4, 8) == 3 / 11
    assert pipeline_bubble(1, 8) == 0


def test_activations_by_hand() -> None:
    inside = 2 * 32 + 2 * 32 + 2 * 16 + 3 * 88
    layer = 8 * 32 + 2 * inside
    assert activation_bytes(2, 32, 32, 16, 88, working=2, saved=True) == 2 * layer
    assert activation_bytes(2, 32, 32, 16, 88, working=2, saved=False) == 2 * 128 + layer


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_that_of_keel_check(checkpointing: bool) -> None:
    """One device that shards nothing: weights, gradients, moments, a bfloat16 copy, activations."""
    model = {
        "build": {"hidden_size": 64, "layers": 3, "heads": 4},
        "activation_checkpointing": checkpointing,
    }
    recipe = load_recipe("tiny", [])
    recipe = recipe.model_copy(update={"model": recipe.model.model_validate(model)})
    parts = {one.name: one.bytes for one in estimate(recipe, "h100-80gb").stages[0].parts}
    build = recipe.model.build
    assert build is not None
    shape = shape_of(build)
    assert sizes_of(build_config(build)).parameters == parameters(shape)
    spread = Parallelism(
        1, 1, checkpointing=checkpointing, micro_tokens=recipe.stages[0].token_budget
    )
    memory = rank_memory(shape, HARDWARE["H100"], spread)
    names = ("policy weights", "policy gradients", "policy optimizer moments")
    assert memory.states == sum(parts[name] for name in names)
    assert memory.gathered == parts["bfloat16 copy of the weights (autocast)"]
    assert memory.activations == parts["activations of a micro-batch"]


def test_sharding_divides_states_and_rows_follow_the_cache() -> None:
    shape, machine = MODELS["Qwen2.5-7B"], HARDWARE["H100"]
    one = rank_memory(shape, machine, Parallelism(8, 8, shards=1))
    eight = rank_memory(shape, machine, Parallelism(8, 8, shards=8))
    assert eight.states == one.states / 8
    assert one.states == 16 * parameters(shape)
    spread = Parallelism(8, 8, shards=8)
    rows = rows_that_fit(shape, spread, eight, 5000)
    assert rows == math.floor(eight.cache / (5000 * cache_bytes(shape)))
    assert fits(shape, spread, eight, 5000)
    assert not fits(shape, Parallelism(8, 8), one, 5000)
