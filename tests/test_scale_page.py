"""The tables of docs/scale.md are those of the code and of the measured file."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import scale, scale_pages
from benchmarks.scale_published import published
from keel.analysis.scale.catalogue import DEFAULT, HARDWARE, MODELS
from keel.analysis.scale.counts import parameters
from keel.analysis.scale.shapes import Efficiency, Hardware


def test_the_page_has_the_tables_that_the_code_gives() -> None:
    page = scale_pages.PAGE.read_text("utf-8")
    found = json.loads(scale.RESULT.read_text("utf-8"))
    assert {match[1] for match in scale_pages.TABLE.finditer(page)} == set(
        scale_pages.tables(found)
    )
    assert scale_pages.filled(page, found) == page


def test_figures_of_the_text_are_those_of_the_model() -> None:
    page = scale_pages.PAGE.read_text("utf-8")
    states = 16 * parameters(MODELS["Llama-3.1-70B"])
    assert f"16 · 70.6 = {states / 1e9:,.0f} GB" in page
    sparse = parameters(MODELS["DeepSeek-V3"])
    assert f"{16 * sparse / 1e12:.1f} TB: {16 * sparse / 80e9:.0f} H100" in page
    link = HARDWARE["H100"].network * DEFAULT.network
    assert f"2·N / {link / 1e9:.0f} GB/s, {2 * sparse / link:.0f} s" in page


def test_errors_of_published_steps_are_those_of_the_text() -> None:
    steps = [one for one in published() if one.cost is not None]
    dense = [one for one in steps if not MODELS[one.name].experts]
    assert max(abs(one.error) for one in dense) < 0.155
    ratios = [one.measured / one.predicted for one in steps if MODELS[one.name].experts]
    assert (round(min(ratios), 2), round(max(ratios), 1)) == (0.95, 2.3)


def test_the_fit_finds_the_constants_that_made_its_parts() -> None:
    """Decode steps that the equation gives are fitted to within the grid's last spacing."""
    device = Hardware("", 5e10, 1e10, 1e15, 1e10, 1e10)
    made = Efficiency(decode=0.3, bandwidth=1.0, step_overhead=2e-3, layer_overhead=3e-4)
    parts = [
        {"hidden": hidden, "layers": layers, "rows": rows, "seconds": 0.0}
        for hidden, layers in ((64, 2), (128, 4), (256, 6))
        for rows in (8, 32, 64)
    ]
    for one in parts:
        shape = scale.shape_in(one)
        one["seconds"] = scale.decode_seconds(
            shape, device, made, 1, one["rows"], scale.PROMPT + 20, scale.FLOAT
        )
    fitted = scale.fit_decode(device, parts, 40)
    for name in ("decode", "step_overhead", "layer_overhead"):
        assert getattr(fitted, name) == pytest.approx(getattr(made, name), rel=0.2)


@pytest.mark.slow
def test_a_smoke_run_measures_all_parts_and_predicts_a_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    threads = torch.get_num_threads()
    try:
        scale.main(["--smoke"])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert "| 48 × 2 | 8 | 8 |" in printed
    worst = float(printed.rpartition("median, ")[2].partition(" %")[0])
    assert math.isfinite(worst)


def test_a_smoke_run_does_not_overwrite_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scale.main(["--smoke", "--write"])
    assert ended.value.code == 2
    assert "--smoke" in capsys.readouterr().err
