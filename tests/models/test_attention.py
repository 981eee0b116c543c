"""Packed attention against one sequence at a time, written out."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from keel.models import attention
from keel.models.attention import Attending, PackedLayout, Rules, in_one_dtype, install
from keel.models.kernels import causal
from keel.models.packed import Segments
from keel.types import KeelError
from tests.engines.tiny import tiny

HEADS, KV_HEADS, WIDTH = 4, 2, 8
RULES = {
    "plain": {},
    "window": {"window": 3},
    "wide window": {"window": 50},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)},
    "all": {
        "window": 2,
        "softcap": 1.5,
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64),
    },
}
LAYOUTS: dict[str, tuple[list[int], list[int]]] = {
    "all different": ([3, 1, 6, 2], []),
    "equal in a row": ([4, 4, 4], []),
    "mixed": ([5, 2, 5, 1, 2, 5, 1, 7], []),
    "one": ([9], []),
    "a shared prompt": ([4, 3, 1, 6], [-1, 0, 0, 0]),
    "two, equal answers": ([4, 2, 2, 5, 2, 3, 3], [-1, 0, 0, -1, 3, 3, -1]),
    "as long as their prompt": ([3, 3, 3, 3], [-1, 0, 0, -1]),
    "not side by side": ([2, 3, 4, 3, 1, 5], [-1, -1, 0, 1, 0, 1]),
}


def by_hand(query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
    """One sequence, (H, L, D) and (Hkv, L, D) to (L, H, D), a loop over heads and tokens."""
    heads, length, _ = query.shape
    share = heads // key.shape[0]
    rows = []
    for t in range(length):
        first = 0 if rules.window is None else max(0, t + 1 - rules.window)
        row = []
        for h in range(heads):
            keys, values = key[h // share, first : t + 1], value[h // share, first : t + 1]
            scores = keys @ query[h, t] * rules.scaling
            if rules.softcap is not None:
                scores = rules.softcap * torch.tanh(scores / rules.softcap)
            weights = scores.exp()
            total = weights.sum()
            if rules.sinks is not None:
                total = total + rules.sinks[h].exp()
            row.append((weights / total) @ values)
        rows.append(torch.stack(row))
    return torch.stack(rows)


def inputs(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(
            1, heads, sum(lengths), WIDTH, dtype=torch.float64, generator=generator
        ).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    return query, key, value


def each_by_hand(
    lengths: list[int], follows: list[int], heads: tuple[Tensor, ...], rules: Rules
) -> Tensor:
    """Every piece after what it follows, one at a time."""
    spans = [list(range(b - a, b)) for a, b in zip(lengths, accumulate(lengths), strict=True)]
    parts = []
    for piece, span in enumerate(spans):
        before = spans[follows[piece]] if follows and follows[piece] >= 0 else []
        whole = by_hand(*(x[0, :, before + span] for x in heads), rules)
        parts.append(whole[len(before) :])
    return torch.cat(parts)


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)
def test_packed_forward_and_backward_equal_a_loop(
    made: tuple[list[int], list[int]], rules: dict
) -> None:
    lengths, follows = made
    rule = Rules(scaling=0.3, **rules)
    if rule.sinks is not None:
        rule = Rules(0.3, rule.window, rule.softcap, rule.sinks.clone().requires_grad_())
    leaves = [*inputs(lengths), *([] if rule.sinks is None else [rule.sinks])]
    packed = PackedLayout(lengths, follows).attend(0, *leaves[:3], rule)
    expected = each_by_hand(lengths, follows, tuple(leaves[:3]), rule).unsqueeze(0)
    # float64 sums in another order: 1e-12 leaves three digits to spare.
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-12)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    grads = torch.autograd.grad((packed * weight).sum(), leaves)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves)
    for grad, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("window", [None, 2, 3, 50])
@pytest.mark.parametrize(
    "made", [([3, 1, 6], [-1, -1, -1]), LAYOUTS["two, equal answers"]], ids=["apart", "shared"]
)
def test_flash_call_says_the_same_to_the_kernel(
    made: tuple[list[int], list[int]], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments of the CUDA kernel, read as torch documents them, give the same attention.

    No GPU is needed: a loop stands where the kernel would.
    """
    lengths, follows = made
    whole = [n + (lengths[f] if f >= 0 else 0) for n, f in zip(lengths, follows, strict=True)]

    def kernel(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, **keys):
        left, right, scale = (keys[k] for k in ("window_size_left", "window_size_right", "scale"))
        assert (dropout, causal, keys["return_debug_mask"]) == (0.0, window is None, False)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (max_q, max_k) == (max(lengths), max(whole))
        assert cu_q.tolist() == [0, *accumulate(lengths)]
        assert cu_k.tolist() == [0, *accumulate(whole)]
        assert right == 0
        rule = Rules(scale, None if left == -1 else left + 1)
        parts = []
        for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            # Causality is aligned to the last key: queries that are not asked for stand before.
            asks = torch.cat([torch.zeros_like(query[: d - c - (b - a)]), query[a:b]])
            heads = (x.transpose(0, 1) for x in (asks, key[c:d], value[c:d]))
            parts.append(by_hand(*heads, rule)[a - b :])
        return torch.cat(parts), None

    monkeypatch.setattr(attention, "_FLASH", kernel)
    query, key, value = inputs(lengths)
    rule = Rules(0.3, window)
    flat = (x[0].transpose(0, 1) for x in (query, key, value))
    flash = PackedLayout(lengths, follows)._flash(*flat, rule)
    plain = PackedLayout(lengths, follows).attend(0, query, key, value, rule)[0]
    torch.testing.assert_close(flash, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
def test_flash_arguments_fit_the_schema_of_torch(window: int | None) -> None:
    """On tensors without values, with a width that is no multiple of 8."""
    lengths, follows = LAYOUTS["two, equal answers"]
    keyword_only = attention._FLASH.default._schema.arguments[10:]
    wanted = ["scale", "window_size_left", "window_size_right"]
    assert [argument.name for argument in keyword_only[:3]] == wanted
    query, key, value = (
        torch.empty(sum(lengths), heads, 12, device="meta", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    out = PackedLayout(lengths, follows)._flash(query, key, value, Rules(0.3, window))
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)


def test_segments_of_equal_length_and_prefix_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attend = attention._attend

    def counted(query: Tensor, *others: object) -> Tensor:
        calls.append(len(query))
        return attend(query, *others)

    monkeypatch.setattr(attention, "_attend", counted)
    for lengths, follows, sizes in (
        ([4, 2, 4], [], [2, 1]),
        ([4, 2, 2, 4], [-1, 0, 0, -1], [2, 2]),
    ):
        calls.clear()
        PackedLayout(lengths, follows).attend(0, *inputs(lengths), Rules(0.3))
        assert calls == sizes


@pytest.mark.parametrize("follows", [(-1, 1), (-1, 0, 1), (0, -1), (-1, -2), (-1, 0)])
def test_a_segment_follows_only_an_earlier_one_without_a_prefix(follows: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="follow"):
        Segments((2, 3, 1), follows)


def test_autocast_brings_the_three_to_one_dtype() -> None:
    query, key, value = inputs([4, 2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = in_one_dtype(query.float(), key.float(), value.bfloat16())
    assert {x.dtype for x in found} == {torch.bfloat16}


@pytest.mark.skipif(causal.library() is None, reason="there is no C compiler")
def test_under_autocast_compiled_attention_stays_in_float32() -> None:
    query, key, value = (x.float() for x in inputs([4, 2]))
    layout, rules = PackedLayout([4, 2]), Rules(0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layout.attend(0, query, key, value.bfloat16(), rules)
    assert torch.equal(out, layout.attend(0, query, key, value.bfloat16().float(), rules))


def test_a_family_without_the_interface_is_refused() -> None:
    config = BloomConfig(vocab_size=20, hidden_size=8, n_layer=1, n_head=2)
    with pytest.raises(KeelError, match="BloomForCausalLM does not use"):
        install(BloomForCausalLM(config))


def test_an_installed_model_wants_a_layout_that_fits() -> None:
    model = tiny("llama")
    install(model)
    tokens = torch.arange(2, 8)[None]
    with pytest.raises(ValueError, match="needs layout="):
        model(input_ids=tokens, use_cache=False)
    with pytest.raises(ValueError, match="5 tokens"):
        model(input_ids=tokens, use_cache=False, layout=Attending(PackedLayout([2, 3])))
    with pytest.raises(ValueError, match="bidirectional"):
        model(
            input_ids=tokens, use_cache=False, layout=Attending(PackedLayout([6])), is_causal=False
        )
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout([3, 0])
