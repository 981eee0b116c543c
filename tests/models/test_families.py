"""Every listed family: packed equals separate, head equals `.logits`; what is wrong is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from keel.config.model import Autocast
from keel.models import families
from keel.models.attention import PackedLayout
from keel.models.build import build_config, build_model
from keel.models.families import FAMILIES, check_family
from keel.models.head import Head
from keel.models.packed import Packed
from keel.types import KeelError
from tests.models.tiny import (
    batch,
    build,
    deep_model,
    policy,
    separate_log_probs,
    stir,
    stock,
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_log_probs_equal_separate_stock_ones(family: str) -> None:
    """float64: 1e-12, but where the stock model must use eager attention, whose softmax is
    float32 (soft caps, sinks), 1e-6."""
    theirs, ours = stock(family, dtype=torch.float64), policy(family, dtype="float64")
    tokens, packed = batch(len(ours.tokenizer))
    with torch.no_grad():
        expected = separate_log_probs(theirs, tokens, 0.7)
        scores = ours.scores(packed, 0.7)
    assert expected.std() > 0.1, "near-uniform probabilities would hide mistakes"
    exact = theirs.config._attn_implementation == "sdpa"
    atol = 1e-12 if exact else 1e-6
    torch.testing.assert_close(scores.log_prob_N, expected, rtol=0, atol=atol)


IN_FLOAT32 = ("gemma2", "gemma3_text", "gpt_oss")
"""Families whose norms or attention, eager in the stock model, work in float32."""


@pytest.mark.parametrize(
    "family", ["llama", "granite", "gpt2", "qwen3_moe", "opt", "mistral", *IN_FLOAT32]
)
def test_gradients_equal_the_stock_models(family: str) -> None:
    """float64, sums in another order: 1e-9 (1e-12 where the gradient is 0, as of key biases)."""
    theirs, ours = stock(family, dtype=torch.float64), policy(family, dtype="float64")
    tolerance = 1e-6 if family in IN_FLOAT32 else 1e-9
    tokens, packed = batch(len(ours.tokenizer))
    weight = torch.randn(len(packed.target_N), generator=torch.Generator().manual_seed(1))
    (separate_log_probs(theirs, tokens, 0.7) * weight).sum().backward()
    (ours.scores(packed, 0.7).log_prob_N * weight).sum().backward()
    for (name, a), (_, b) in zip(
        ours.model.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert a.grad is not None, name
        assert b.grad is not None, name
        assert (a.grad - b.grad).abs().max() <= tolerance * b.grad.abs().max() + 1e-12, name


# ---------------------------------------------------------------- refused


def bare_head(model: PreTrainedModel) -> Head:
    """A head without the scale of its logits."""
    return Head(model.get_output_embeddings().weight)


BROKEN: dict[str, tuple[str, families.Output, object, str, Callable[..., Any]]] = {
    "a leak between sequences": (
        *("llama", "logits", families, "PackedLayout"),
        lambda lengths, follows: PackedLayout([sum(lengths)]),
    ),
    "positions that do not restart": (
        *("gpt2", "hidden states", Packed, "positions"),
        lambda packed: torch.arange(len(packed.tokens_T)),
    ),
    "no scale of granite's": ("granite", "logits", families, "head_of", bare_head),
    "no scale of cohere's": ("cohere", "logits", families, "head_of", bare_head),
}


@pytest.mark.parametrize(("family", "what", "owner", "name", "broken"), BROKEN.values(), ids=BROKEN)
def test_the_probe_refuses_what_packing_breaks(
    family: str,
    what: families.Output,
    owner: object,
    name: str,
    broken: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, broken)
    model = stir(build_model(build(family), 0, torch.float32))
    says = rf"'{family}' fails the packing probe: the {what}.* by [0-9.]+ of"
    with pytest.raises(KeelError, match=says):
        families.prepare(model, False, what)


def test_the_probe_refuses_nan() -> None:
    model = build_model(build("llama"), 0, torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(KeelError, match="nan"):
        families.prepare(model, autocast=False)


IN_BFLOAT16 = [(torch.float32, "bfloat16"), (torch.bfloat16, False)]


@pytest.mark.parametrize(
    ("dtype", "autocast", "what"),
    [(*IN_BFLOAT16[0], "logits"), (*IN_BFLOAT16[1], "hidden states")],
)
def test_the_probe_does_not_measure_rounding(
    dtype: torch.dtype, autocast: Autocast, what: families.Output
) -> None:
    model = deep_model(dtype)
    before = copy.deepcopy(model.state_dict())
    families.prepare(model, autocast, what)
    for name, weight in model.state_dict().items():
        assert weight.dtype == dtype
        assert torch.equal(weight, before[name]), name


@pytest.mark.parametrize(("dtype", "autocast"), IN_BFLOAT16)
def test_the_probe_finds_a_small_leak_under_rounding(
    dtype: torch.dtype, autocast: Autocast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leak of a thousandth, which bfloat16 alone would hide."""
    real = families._packed

    def leaking(*args: Any) -> Tensor:
        found = real(*args)
        return found + 1e-3 * found.roll(7, 0)

    monkeypatch.setattr(families, "_packed", leaking)
    with pytest.raises(KeelError, match=r"separate ones by 0\.001 of the largest"):
        families.prepare(deep_model(dtype), autocast)


@pytest.mark.parametrize(("dtype", "autocast"), IN_BFLOAT16)
def test_the_probe_refuses_a_fault_of_bfloat16_alone(
    dtype: torch.dtype, autocast: Autocast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an attention kernel that is used in half precision only."""
    real = PackedLayout.attend

    def leaking(self: PackedLayout, layer: int, query: Tensor, *rest: Any) -> Tensor:
        rounds = query.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        layout = PackedLayout([self.tokens]) if rounds else self
        return real(layout, layer, query, *rest)

    monkeypatch.setattr(PackedLayout, "attend", leaking)
    model = build_model(build("llama"), 0, dtype)
    with pytest.raises(KeelError, match=r"'llama' fails the packing probe.* differ in bfloat16"):
        families.prepare(stir(model), autocast)


@pytest.mark.parametrize(
    ("share", "precision", "fits"),
    [(1e-3, "tf32", True), (3e-2, "tf32", False), (3e-5, "ieee", True), (3e-4, "ieee", False)],
)
def test_the_probe_allows_what_products_round_alone(
    share: float, precision: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, products = families._packed, torch.backends.cuda.matmul

    def moved(*args: Any) -> Tensor:
        found = real(*args)
        return found + share * found.abs().max()

    monkeypatch.setattr(families, "_packed", moved)
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        with nullcontext() if fits else pytest.raises(KeelError, match="fails the packing probe"):
            families.prepare(build_model(build("llama"), 0, torch.float32), False)
    finally:
        products.fp32_precision = before


def test_yarn_is_not_refused() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
    options = {"rope_parameters": rope | {"original_max_position_embeddings": 32}}
    config = build_config(build("llama", options=options))
    assert config.rope_parameters["rope_type"] == "yarn"


@pytest.mark.parametrize("family", ["bloom", "falcon", "mamba", "rwkv", "gemma3"])
def test_other_families_are_refused_by_name(family: str) -> None:
    config = CONFIG_MAPPING[family]()
    with pytest.raises(KeelError, match=rf"'{family}' is not supported: use one of .*llama"):
        check_family(config)


@pytest.mark.parametrize("family", ["bloom", "mamba"])
def test_a_trusted_family_still_has_to_pass_the_probe(family: str) -> None:
    config = CONFIG_MAPPING[family](
        vocab_size=32, hidden_size=16, num_hidden_layers=2, n_head=2, n_layer=2, state_size=4
    )
    check_family(config, trusted=True)
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(KeelError):
        families.prepare(model, autocast=False)
