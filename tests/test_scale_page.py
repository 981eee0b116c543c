"""The cost model of docs/scale.md: its tables on the page, and its equations by hand."""

from __future__ import annotations

import numpy as np
import pytest

from studies import scale
from studies.scale import MODELS
from tests.source_tree import ROOT

SEVEN = MODELS["Qwen2.5-7B"]


@pytest.mark.slow
def test_page_has_the_rows_that_the_study_prints() -> None:
    page = (ROOT / "docs/scale.md").read_text("utf-8").splitlines()
    for row in (*scale.published(), *scale.plans()):
        assert f"| {' | '.join(row)} |" in page


def test_weights_are_those_of_the_published_models() -> None:
    """The counts of the safetensors files on the hub."""
    assert SEVEN.weights == 7_615_616_512
    assert MODELS["Qwen2.5-1.5B"].weights == 1_543_714_304
    assert MODELS["Llama-3.1-70B"].weights == 70_553_706_496


def test_lengths_have_the_mean_of_simulated_ones() -> None:
    drawn = np.random.default_rng(0).geometric(scale.end_probability(50, 120), 100_000)
    # Standard error of the mean: 0.12.
    assert drawn.clip(max=120).mean() == pytest.approx(50, abs=0.5)
    assert scale.survival(50, 120).sum() == pytest.approx(50)
