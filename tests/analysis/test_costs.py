"""Counted memory and operations: cards, budgets of three known models, the tokens of a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keel.analysis.cards import CARDS, GIB, card, card_named
from keel.analysis.costs import (
    PAGE,
    Budget,
    MemoryPlan,
    Shape,
    attention_pairs,
    floor_ms,
    savings,
)
from keel.types import KeelError

# One layer of 2 heads to 1, by hand: 4·(8·8) linear weights of attention and 3·(8·24) of the MLP.
SMALL = Shape(
    layers=1, hidden=8, heads=2, query=8, keys=4, mlp=24, vocabulary=100,
    embedding=800, backbone=784, head=0, linear=768, norms=24, adapted=180,
)  # fmt: skip


def plan(**changes: object) -> MemoryPlan:
    return replace(MemoryPlan(shape=SMALL, tokens=100, longest=50, rows=4), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*CARDS, "H100", "24GB", "23.5 GiB", "80g"])
def test_cards_by_name_or_size(name: str) -> None:
    found = card(name)
    assert 20 * 10**9 < found.memory < 160 * 10**9
    assert (found.peak is None) == (name not in CARDS and name != "H100")


@pytest.mark.parametrize("name", ["h1000x", "0GB", "GB", ""])
def test_unknown_card_is_refused(name: str) -> None:
    with pytest.raises(KeelError, match="--device"):
        card(name)


@pytest.mark.parametrize(
    ("reported", "memory", "key"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA H100 PCIe", 79, "h100-pcie"),
        ("NVIDIA H200", 139, "h200"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100"),
        ("NVIDIA GeForce RTX 4090", 23, "4090"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA L40S", 44, "l40s"),
    ],
)
def test_reported_names_are_known(reported: str, memory: int, key: str) -> None:
    found = card_named(reported, memory * GIB)
    assert (found.peak, found.bandwidth) == (CARDS[key].peak, CARDS[key].bandwidth)
    assert found.memory == memory * GIB


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 NVL", "Arc"])
def test_other_cards_have_no_peak(name: str) -> None:
    assert card_named(name, GIB).peak is None


def test_bytes_of_a_full_model() -> None:
    """1,584 weights: float32, its gradient, two moments, a bfloat16 copy."""
    items = plan().items()
    assert items["weights"] == items["gradients"] == 4 * 1584
    assert items["optimizer"] == 8 * 1584
    assert items["sampling copy"] == 2 * 1584
    assert plan(offload=True).items()["optimizer"] == 0
    assert plan(optimizer="muon").items()["optimizer"] == 4 * 768 + 8 * (1584 - 768)
    assert plan(optimizer="adamw_8bit").items()["optimizer"] == pytest.approx(2.03 * 1584, rel=0.01)


def test_bytes_of_adapters_on_four_bits() -> None:
    """180 features at rank 2; the frozen linear weights in half a byte and their scales."""
    own = plan(rank=2, adapted=180, quantised=True, copied=False)
    assert own.items()["gradients"] == 4 * 360
    assert own.items()["optimizer"] == 8 * 360
    assert own.weights == pytest.approx(0.516 * 768 + 4 * (1584 - 768) + 4 * 360, rel=0.001)
    assert own.items()["sampling copy"] == 0


def test_checkpoints_keep_one_layer() -> None:
    deep = replace(SMALL, layers=10, linear=7680, backbone=7840, norms=240)
    whole, half, none = (plan(shape=deep, checkpointed=count).activations for count in (None, 5, 0))
    assert whole < half < none
    assert plan(shape=deep, checkpointed=10).activations == whole
    # Ten inputs and a layer against ten layers: the copies of weights aside.
    assert whole < 0.25 * none


def test_shared_tokens_attend_once() -> None:
    """Two answers of 2 and 3 tokens to a prompt of 4: 4 of the prompt, each pair once."""
    direct = sum(range(1, 5)) + (5 + 6) + (5 + 6 + 7)
    assert attention_pairs([6, 7], [0, 4]) == direct


def test_decoded_step_reads_weights_once() -> None:
    weights = 2 * (768 + 100 * 8)
    assert SMALL.decoded_bytes(3, 10) == weights + 3 * 10 * 2 * 4 * 2
    assert floor_ms(SMALL, 3, 10, 1000) == weights + 480
    sparse = replace(SMALL, experts=1000, share=0.25)
    assert sparse.decoded_bytes(1, 0) == weights + 2 * 250
    assert sparse.decoded_bytes(64, 0) == weights + 2 * 1000


def test_pages_are_what_is_left() -> None:
    budget = Budget(plan(), card("24GB"))
    page = PAGE * SMALL.cached_bytes()
    left = budget.card.memory - budget.total
    assert budget.pages == left // page
    assert (budget.rows, budget.over) == (4, 0)
    full = Budget(plan(extra=left - page + 1), card("24GB"))
    assert (full.pages, full.rows) == (0, 0)
    assert full.over == pytest.approx(1, abs=0.1)


def test_savings_add_up_and_leave_out_what_is_set() -> None:
    start = plan(shape=replace(SMALL, linear=76_800, backbone=78_400), tokens=1000)
    found = savings(start)
    assert [one.line.split(" = ")[0] for one in found][:2] == ["model.lora.rank", "optimizer.kind"]
    total = sum(start.items().values()) - sum(found[-1].plan.items().values())
    assert sum(one.saved for one in found) == pytest.approx(total)
    assert all(one.saved > 0 for one in found)
    # A smaller budget helps again; all else is set.
    assert [one.line.split(" = ")[0] for one in savings(found[-1].plan)] == ["token_budget"]
