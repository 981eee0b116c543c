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
    remedies,
    savings,
)
from keel.types import KeelError

# One layer of 2 heads to 1, by hand: 4·(8·8) linear weights of attention and 3·(8·24) of the MLP.
SMALL = Shape(
    layers=1, hidden=8, heads=2, query=8, keys=4, mlp=24, vocabulary=100,
    embedding=800, backbone=784, head=0, linear=768, quantisable=768, norms=24, adapted=180,
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


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 NVL", "Arc"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 D"),
        "NVIDIA GeForce RTX 3090 Ti",
    ],
)
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


def test_critic_learns_whole_below_adapters() -> None:
    """Weights, gradients and moments of its own kind, without rank, 4 bits or output layer."""
    adapters = {"rank": 2, "adapted": 180, "quantised": True, "copied": False}
    value = replace(SMALL, head=800)
    own = plan(**adapters, critic=value)
    assert own.others == 16 * 1584
    # None of its own: the policy's optimizer.
    assert plan(**adapters, critic=value, optimizer="muon").others == (
        8 * 1584 + 4 * 768 + 8 * (1584 - 768)
    )
    muon = plan(critic=value, critic_optimizer="adamw", optimizer="muon", offload=True)
    assert muon.others == 8 * 1584
    assert plan(critic=value, critic_offload=False, offload=True).others == 16 * 1584
    found = savings(plan(critic=value, critic_optimizer="adamw", critic_offload=False))
    lines = {one.line: one.saved for one in found}
    assert lines['value.optimizer.offload = "cpu"'] == 8 * 1584


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
    # A stage that samples nothing.
    nothing = Budget(plan(longest=0, rows=0), card("24GB"))
    assert nothing.rows == nothing.as_dict()["rows"] == 0


WIDE = replace(SMALL, linear=76_800, quantisable=76_800, backbone=78_400)


def lines(plan: MemoryPlan, room: float) -> tuple[list[str], bool]:
    """The remedies on a card on which `room` bytes more than the cache's least are left."""
    budget = Budget(plan, card("24GB"))
    page = PAGE * plan.shape.cached_bytes()
    missing = budget.total + page + room - budget.card.memory
    chosen, fits = remedies(Budget(replace(plan, extra=plan.extra - missing), budget.card))
    return [one.line for one in chosen], fits


def test_savings_leave_out_what_is_set() -> None:
    start = plan(shape=WIDE, tokens=1000)
    before = sum(start.items().values())
    for one in savings(start):
        assert one.saved == before - sum(one.plan.items().values()) > 0
    keys = [one.line.split(" = ")[0] for one in savings(start)]
    assert keys.index("token_budget") < keys.index("optimizer.kind") < keys.index("model.lora.rank")
    assert "model.quantisation" not in keys
    adapters = plan(shape=WIDE, tokens=50, rank=2, adapted=180, checkpointed=None, offload=True)
    assert [one.line for one in savings(adapters)] == ['model.quantisation = "nf4"']
    # GPT-2's matrices are not quantised, and a reward model has no base in 4 bits.
    assert not savings(replace(adapters, shape=replace(WIDE, quantisable=0)))
    assert not savings(adapters, "base.lora.rank")


def test_one_change_that_fits_comes_first() -> None:
    """Though another saves more; if none is enough, the largest and what is then enough."""
    start = plan(shape=WIDE, tokens=1000)
    saved = {one.line: one.saved for one in savings(start)}
    rank, offload = saved["model.lora.rank = 16"], 'optimizer.offload = "cpu"'
    assert rank > saved[offload] > saved["token_budget = 50"]
    assert lines(start, 1 - saved[offload]) == ([offload], True)
    assert lines(start, 1 - rank) == (["model.lora.rank = 16"], True)
    both, fits = lines(start, -rank - 1)
    assert (both[0], len(both), fits) == ("model.lora.rank = 16", 2, True)
    many, fits = lines(start, -1e9)
    assert (many, fits) == ([], False)
