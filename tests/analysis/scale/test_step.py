"""Seconds of a step: by hand, against simulated lengths, and in which direction they move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keel.analysis.scale.catalogue import DEFAULT, HARDWARE, MODELS
from keel.analysis.scale.counts import cache_bytes, multiplied, parameters
from keel.analysis.scale.lengths import (
    end_probability,
    expected_maximum,
    mean_position,
    survival,
    tail_share,
)
from keel.analysis.scale.plan import best_plan, scaling_limit
from keel.analysis.scale.shapes import Efficiency, Parallelism, Workload
from keel.analysis.scale.step import (
    decode_seconds,
    generation_seconds,
    granularity,
    micro_batches,
    pass_seconds,
    staleness,
    step_cost,
    sync_seconds,
)

H100 = HARDWARE["H100"]
SEVEN = MODELS["Qwen2.5-7B"]
WORK = Workload(256, 8, 512, 1000, 4000)
EIGHT = Parallelism(8, 8, shards=8)


def test_lengths_have_the_mean_and_maximum_of_simulated_ones() -> None:
    p = end_probability(50, 120)
    drawn = np.random.default_rng(0).geometric(p, (20_000, 16)).clip(max=120)
    # Standard errors: 0.07 of the mean of 320,000 lengths, 0.1 of 20,000 maxima.
    assert drawn.mean() == pytest.approx(50, abs=0.4)
    assert drawn.max(1).mean() == pytest.approx(expected_maximum(50, 120, 16), abs=0.6)
    assert survival(50, 120).sum() == pytest.approx(50)
    places = np.concatenate([np.arange(n) for n in drawn[:2000].ravel()])
    assert places.mean() == pytest.approx(mean_position(50, 120), rel=0.02)


def test_equal_lengths_have_no_tail() -> None:
    assert expected_maximum(80, 80, 1000) == pytest.approx(80)
    assert tail_share(80, 80, 1000) == pytest.approx(0)
    assert mean_position(80, 80) == pytest.approx(39.5)
    with pytest.raises(ValueError, match="not between 1 and 80"):
        end_probability(81, 80)


def test_a_decode_step_by_hand() -> None:
    rate = Efficiency(bandwidth=1, step_overhead=0.01, layer_overhead=0.001, hop=0)
    read = 2 * multiplied(SEVEN) + 4 * 1000 * cache_bytes(SEVEN)
    expected = read / H100.bandwidth + 0.01 + 28 * 0.001
    assert decode_seconds(SEVEN, H100, rate, 1, 4, 1000) == pytest.approx(expected)
    # Many short rows are bound by operations.
    flops = 5000 * (2 * multiplied(SEVEN) + 4 * 28 * 3584 * 10)
    expected = flops / (H100.flops * 0.5) + 0.01 + 28 * 0.001
    assert decode_seconds(SEVEN, H100, rate, 1, 5000, 10) == pytest.approx(expected)
    one, two = (decode_seconds(SEVEN, H100, DEFAULT, n, 4, 1000) for n in (1, 2))
    hops = 28 * 2 * DEFAULT.hop
    assert two - DEFAULT.step_overhead - hops == pytest.approx((one - DEFAULT.step_overhead) / 2)


def test_generation_of_equal_lengths_is_the_sum_of_its_steps() -> None:
    work = Workload(32, 8, 0, 200, 200)
    whole, tail = generation_seconds(SEVEN, H100, DEFAULT, work, 1, 1, 1000)
    loop = sum(decode_seconds(SEVEN, H100, DEFAULT, 1, 32, t) for t in range(200))
    # Midpoints of 512 bins against whole tokens.
    assert whole == pytest.approx(loop, rel=2e-3)
    assert tail == pytest.approx(0, abs=1e-2 * whole)


def test_generation_agrees_with_a_simulated_scheduler() -> None:
    """64 sequences, 16 at once: rows leave as they end and others take their places."""
    work = Workload(64, 8, 0, 100, 400)
    simulated = []
    for seed in range(20):
        p = end_probability(100, 400)
        waiting = list(np.random.default_rng(seed).geometric(p, 64).clip(max=400))
        live: list[list[int]] = []
        seconds = 0.0
        while waiting or live:
            while waiting and len(live) < 16:
                live.append([waiting.pop(), 0])
            context = float(np.mean([row[1] for row in live]))
            seconds += decode_seconds(SEVEN, H100, DEFAULT, 1, len(live), context)
            live = [[n, t + 1] for n, t in live if t + 1 < n]
        simulated.append(seconds)
    found, _ = generation_seconds(SEVEN, H100, DEFAULT, work, 1, 1, 16)
    # The standard error of 20 simulations is 2 %; lengths cut at a limit are not quite memoryless.
    assert found == pytest.approx(np.mean(simulated), rel=0.08)


def test_an_update_by_hand() -> None:
    """Bound by operations inside a node; by the network where each micro-batch gathers all."""
    seconds = pass_seconds(SEVEN, H100, DEFAULT, EIGHT, WORK, learn=True)
    tokens = 256 * 1000 + 256 / 8 * 512
    context = 512 + mean_position(1000, 4000)
    flops = 8 * multiplied(SEVEN) + 16 * 28 * 3584 * context
    assert seconds == pytest.approx(tokens * flops / (8 * H100.flops * 0.4))
    many = replace(EIGHT, trainers=64, shards=64, micro_tokens=64)
    count = micro_batches(WORK, many)
    moved = (2 + 2 + 4) * parameters(SEVEN) * 63 / 64
    talking = moved * count / (H100.network * 0.7)
    assert pass_seconds(SEVEN, H100, DEFAULT, many, WORK, learn=True) == pytest.approx(talking)


def test_weights_move_over_the_slowest_link() -> None:
    size = 2 * parameters(SEVEN)
    assert sync_seconds(SEVEN, H100, DEFAULT, Parallelism(1, 1)) == 0
    inside = sync_seconds(SEVEN, H100, DEFAULT, EIGHT)
    assert inside == pytest.approx(size * 7 / 8 / (H100.link * 0.7))
    apart = Parallelism(8, 8, tensor=4, shards=8, separate=True)
    assert sync_seconds(SEVEN, H100, DEFAULT, apart) == pytest.approx(
        size / 4 / (H100.network * 0.7)
    )


def test_ranks_with_less_than_a_sequence_wait() -> None:
    assert granularity(WORK, Parallelism(256, 256)) == 1
    assert granularity(WORK, Parallelism(1024, 1024)) == 4
    assert granularity(WORK, Parallelism(1024, 1024, model=4)) == 1


def test_a_step_is_the_sum_of_its_parts_or_the_slower_side() -> None:
    work = replace(WORK, reward=7.0)
    one = step_cost(SEVEN, H100, DEFAULT, EIGHT, work)
    assert one.seconds == pytest.approx(one.generation + 7 + one.score + one.update + one.sync)
    assert one.price(2.0) == pytest.approx(8 * one.seconds * 1000 / 3600 * 2)
    assert one.tokens_per_device == pytest.approx(work.tokens / one.seconds / 8)
    apart = replace(EIGHT, separate=True)
    two = step_cost(SEVEN, H100, DEFAULT, apart, work)
    sides = max(two.generation + 7, two.score + two.update)
    assert two.seconds == pytest.approx(sides + two.sync)
    assert two.devices == 16
    carried = step_cost(SEVEN, H100, DEFAULT, apart, work, carried=True)
    assert carried.tail == 0
    assert two.generation - two.tail == pytest.approx(carried.generation, rel=0.02)
    assert staleness(400, 0.01, 5.0) == 1
    assert staleness(4000, 0.01, 5.0) == 9


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(MODELS)),
    rows=st.floats(1, 512),
    context=st.floats(1, 30_000),
    more=st.floats(1, 4),
)
def test_decoding_takes_longer_with_more_to_do(
    name: str, rows: float, context: float, more: float
) -> None:
    def seconds(rows: float, context: float, bandwidth: float = 1.0) -> float:
        machine = replace(H100, bandwidth=H100.bandwidth * bandwidth, flops=H100.flops * bandwidth)
        return decode_seconds(MODELS[name], machine, DEFAULT, 1, rows, context)

    # A relative rounding of float64 sums.
    assert seconds(rows * more, context) >= seconds(rows, context) * (1 - 1e-12)
    assert seconds(rows, context * more) >= seconds(rows, context) * (1 - 1e-12)
    assert seconds(rows, context, more) <= seconds(rows, context) * (1 + 1e-12)
    # A token never costs more in a larger batch.
    assert seconds(rows * more, context) / (rows * more) <= seconds(rows, context) / rows * (
        1 + 1e-12
    )


@settings(max_examples=25, deadline=None)
@given(
    mean=st.integers(10, 1000),
    spread=st.floats(1, 8),
    rows=st.integers(1, 256),
    more=st.integers(2, 8),
)
def test_the_tail_grows_with_rows_and_stays_below_the_limit(
    mean: int, spread: float, rows: int, more: int
) -> None:
    most = int(mean * spread)
    few, many = (expected_maximum(mean, most, n) for n in (rows, rows * more))
    assert mean - 1e-6 * mean <= few <= many + 1e-9 * many
    assert many <= most * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(shards=st.sampled_from([8, 16, 32, 64]), sequences=st.sampled_from([64, 256, 1024]))
def test_more_devices_never_make_a_pass_slower(shards: int, sequences: int) -> None:
    work = replace(WORK, sequences=sequences)
    few = Parallelism(64, 64, shards=shards)
    assert pass_seconds(
        SEVEN, H100, DEFAULT, replace(few, trainers=128), work, learn=False
    ) <= pass_seconds(SEVEN, H100, DEFAULT, few, work, learn=False) * (1 + 1e-12)


def test_the_plan_fits_and_no_other_layout_of_it_is_faster() -> None:
    plan = best_plan(SEVEN, H100, DEFAULT, 8, WORK, separate=False)
    assert plan.fits
    assert plan.memory.training <= plan.memory.limit
    for tensor in (1, 2, 4, 8):
        other = replace(plan.spread, tensor=tensor)
        assert step_cost(SEVEN, H100, DEFAULT, other, WORK).seconds >= plan.cost.seconds
    assert not best_plan(MODELS["DeepSeek-V3"], H100, DEFAULT, 8, WORK, separate=False).fits


def test_asynchronous_steps_scale_at_least_as_far() -> None:
    both = [
        scaling_limit(SEVEN, H100, DEFAULT, WORK, separate, most=512) for separate in (False, True)
    ]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].devices <= both[1].devices
    assert scaling_limit(MODELS["DeepSeek-V3"], H100, DEFAULT, WORK, False, most=8) is None
