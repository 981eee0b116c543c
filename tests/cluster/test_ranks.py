"""Updates that several processes share, with sharded models, against one process."""

from __future__ import annotations

import json
import multiprocessing
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from keel.learn.ranks import prompt_units, spans
from keel.types import Prompt
from tests.cluster.updates import EXACT, Device, main
from tests.soak.killing import server

TOLERANCE = 1e-5
"""float32 sums in another order, over ten updates at a rate of 1e-3."""


def updated(
    folder: Path, case: str, count: int, device: Device = "cpu"
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The metrics of ten steps on `count` ranks, and the weights after them.

    On a CPU the ranks are forked, and so have the same seed of string hashes; those of the runs in
    test_processes.py have their own.
    """
    out = folder / str(count)
    out.mkdir()
    words = (count, str(folder / f"rendezvous-{count}"), case, out, device)
    context = server() if device == "cpu" else multiprocessing.get_context("spawn")
    ranks = [context.Process(target=main, args=(n, *words), daemon=True) for n in range(count)]
    for rank in ranks:
        rank.start()
    until = time.monotonic() + 240
    for rank in ranks:
        rank.join(max(until - time.monotonic(), 0))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * count
    metrics = json.loads((out / "metrics.json").read_text())
    return [update for step in metrics for update in step], load_file(out / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["gspo", "ppo+lora", "kl_cov", "real", "online_dpo", "gkd", "opd", "gigpo", EXACT]
)
def test_ranks_equal_one_process(tmp_path: Path, case: str) -> None:
    """Losses, norms of gradients and weights after ten steps of two updates, on ragged batches."""
    tolerance = 1e-10 if case == EXACT else TOLERANCE
    alone, weights = updated(tmp_path, case, 1)
    assert len(alone) == 20
    assert max(update["grad_norm"] for update in alone) > 0.01
    for count in (2, 3) if case in ("gspo", EXACT) else (2,):
        shared, found = updated(tmp_path, case, count)
        if case == "gkd":  # in float64; later updates enlarge what rounding changed
            assert shared[0] == pytest.approx(alone[0], abs=1e-10)
        for one, other in zip(alone, shared, strict=True):
            assert other == pytest.approx(one, abs=tolerance)
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=tolerance, msg=name)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8))
def test_shares_are_neighbours_and_nearly_equal(costs: list[int], count: int) -> None:
    shares = spans(costs, count)
    assert len(shares) == count
    assert [place for share in shares for place in share] == [*range(len(costs))]
    assert all(a.stop == b.start for a, b in pairwise(shares))
    for share in shares:
        # Each end lies within half of the largest cost of its place.
        gap = abs(sum(costs[at] for at in share) - sum(costs) / count)
        assert gap <= max(costs, default=0)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 6))
def test_each_prompt_is_sampled_once_with_its_repetitions(ids: list[int], count: int) -> None:
    prompts = [Prompt(str(one), "", tokens=(0,) * one) for one in ids]
    units = prompt_units(prompts, 4, count)
    assert len(units) == count
    assert sorted(place for unit in units for place in unit) == [*range(len(ids))]
    for one in set(ids):
        assert sum(any(ids[at] == one for at in unit) for unit in units) == 1
