"""The cost model of docs/scale.md: its tables on the page, and its equations by hand."""

from __future__ import annotations

import numpy as np
import pytest

from studies import scale
from studies.scale import MODELS, WORK, Layout
from tests.source_tree import ROOT

SEVEN = MODELS["Qwen2.5-7B"]


def test_page_has_the_rows_that_the_study_prints() -> None:
    page = (ROOT / "docs/scale.md").read_text("utf-8").splitlines()
    for row in (*scale.published(), *scale.plans()):
        assert f"| {' | '.join(row)} |" in page


def test_weights_are_those_of_the_published_models() -> None:
    """The counts of the safetensors files on the hub."""
    assert SEVEN.weights == 7_615_616_512
    assert MODELS["Qwen2.5-1.5B"].weights == 1_543_714_304
    assert MODELS["Llama-3.1-70B"].weights == 70_553_706_496


def test_decode_step_reads_weights_and_cache() -> None:
    read = 2 * SEVEN.multiplied + 4 * 1000 * SEVEN.cache
    expected = read / (scale.BANDWIDTH * scale.READ) + scale.STEP
    assert scale.decode_seconds(SEVEN, 1, 4, 1000) == pytest.approx(expected)


def test_lengths_have_the_mean_of_simulated_ones() -> None:
    drawn = np.random.default_rng(0).geometric(scale.end_probability(50, 120), 100_000)
    # Standard error of the mean: 0.12.
    assert drawn.clip(max=120).mean() == pytest.approx(50, abs=0.5)
    assert scale.survival(50, 120).sum() == pytest.approx(50)


def test_generation_of_equal_lengths_has_no_tail() -> None:
    work = scale.Work(32, 8, 0, 200, 200)
    whole, tail = scale.generation_seconds(SEVEN, Layout(1, 1, separate=True), work, False)
    steps = sum(scale.decode_seconds(SEVEN, 1, 32, t) for t in range(200))
    # Midpoints of 512 bins against whole tokens.
    assert whole == pytest.approx(steps, rel=2e-3)
    assert tail == pytest.approx(0, abs=1e-2 * whole)


def test_sharded_states_take_less_memory_and_more_traffic() -> None:
    alone, sharded = Layout(8, 8), Layout(8, 8, shards=8)
    assert scale.memory(SEVEN, sharded)[0] < scale.memory(SEVEN, alone)[0]
    work = scale.Work(8, 8, 64, 64, 64)  # too few tokens to hide the all-gathers
    across = Layout(16, 16, shards=16)
    near = scale.pass_seconds(SEVEN, sharded, work, learn=True)
    assert scale.pass_seconds(SEVEN, across, work, learn=True) > near
    assert WORK.tokens == 2048 * 4096 + 128 * 512
