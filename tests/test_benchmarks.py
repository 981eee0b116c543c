"""A smoke run of each benchmark of speed and memory: it runs, agrees, and writes its figures.

What the figures are is not looked at, for a test depends on no clock. TRL's and vLLM's sides need
environments of their own, and do not run here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, loop, memory, rollout, update
from benchmarks.sides import SMOKE
from tests.shared import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def smoke(tmp_path: Path) -> Callable[..., Any]:
    """Runs a benchmark's `main`; the rows that it wrote."""

    def run(main: Callable[[list[str]], None], *words: str) -> Any:
        file = tmp_path / "figures.json"
        main(["--smoke", "--threads", "1", "--json", str(file), *words])
        return json.loads(file.read_text("utf-8"))["rows"]

    return run


def test_update_times_both_sides(smoke: Callable[..., Any]) -> None:
    rows = smoke(update.main)
    assert [row["prompt"] for row in rows] == [20, 500, 2000]
    assert all(row["once"] > 0 and row["repeated"] > 0 for row in rows)
    assert all(0 < row["difference"] <= update.AGREEMENT for row in rows)


def test_update_detects_a_different_gradient() -> None:
    learner = update.learner(SMOKE)
    sides = update.batches(50, SMOKE, 20)
    once = sides["once"]
    sides["once"] = replace(once, advantage_N=once.advantage_N * 1.001)
    with pytest.raises(AssertionError, match=r" differs by 1\.0e-03"):
        update.difference(learner, sides)


def test_memory_compares_naive_with_chunked(smoke: Callable[..., Any]) -> None:
    (row,) = smoke(memory.main)
    # 1,024 × 20,000 logits alone are 78 MiB, and the naive side has more than two of them.
    assert row["naive"]["bytes"] > 2 * 4 * 1024 * 20_000
    assert row["ratio"] == row["naive"]["bytes"] / row["chunked"]["bytes"] > 1


def test_loop_times_keel(smoke: Callable[..., Any]) -> None:
    (row,) = smoke(loop.main, "--keel-only")
    keel = row["keel"]
    assert keel["steps"] == 1
    assert keel["tokens_per_second"] > 0
    assert keel["phases"]["update"] > 0
    assert 0 < keel["mean_length"] <= SMOKE.most
    assert keel["peak"] > 2**20


def test_rollout_times_keel_and_generate(smoke: Callable[..., Any]) -> None:
    rows = smoke(rollout.main, "--sides", "generate")
    assert [row["side"] for row in rows] == ["keel", "generate"]
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(0 < row["mean_length"] <= SMOKE.most for row in rows)


def test_expected_figures_of_the_page_are_those_counted() -> None:
    """Each row has what was measured, or says that it is not; no figure is left over."""
    from benchmarks.expected import MEASURED, TRL, loop_tokens, qwen, table
    from keel.analysis.cards import CARDS

    lines = list(table())
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page
    found = json.loads(MEASURED.read_text("utf-8"))["rows"]
    blank = sum("not measured" in line for line in lines)
    assert blank + len(found) == len(lines) - 2
    # What is asked of the loop is within what bytes and operations allow.
    assert loop_tokens(qwen("0.5B"), CARDS["h200"], 0.35) > 10 * TRL


ALIKE: Any = ({"size": "1.5B"}, {"size": "0.5B", "compiled": True})
"""Parts that a dry run does as it does another: sizes are toys, and no CPU compiles."""


def test_gpu_runs_every_part_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(part for part in gpu.PARTS if part.given not in ALIKE)
    assert len(parts) == len(gpu.PARTS) - 2
    monkeypatch.setattr(gpu, "PARTS", parts)
    file = tmp_path / "gpu.json"
    assert gpu.main(["--dry-run", "--json", str(file)]) == 0
    rows = json.loads(file.read_text("utf-8"))["rows"]
    assert not [row for row in rows if row.get("failed") or row.get("met") is False]
    measured = {row["part"] for row in rows if row["measured"] is not None}
    assert measured == set("abcdfgh")
    whats = " ".join(row["what"] for row in rows)
    for name in ("attend_pages", "draw_tokens", "2 rows of 70", "micro-batch", "1.5B, 4,096", "7B"):
        assert name in whats
    assert "skipped" in next(row["note"] for row in rows if row["part"] == "e")


def test_gpu_part_that_hangs_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM is ignored, so SIGKILL has to follow; the next part still runs."""
    hangs = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        'open(sys.argv[1], \'w\').write(\'{"what": "first", "measured": 1}\\n{"what": "cut\');'
        "time.sleep(600)"
    )
    ends = "import sys; sys.exit('CUDA error: an illegal memory access')"

    def command(part: gpu.Part, job: Path, rows: Path) -> list[str]:
        return [sys.executable, "-c", hangs if part.letter == "b" else ends, str(rows)]

    monkeypatch.setattr(gpu, "PARTS", (gpu.Part("b", "kernels", 2.0), gpu.Part("h", "other", 9.0)))
    monkeypatch.setattr(gpu, "KILL_AFTER", 1.0)
    monkeypatch.setattr(gpu, "command", command)
    file = tmp_path / "gpu.json"
    assert gpu.main(["--dry-run", "--parts", "b", "h", "--json", str(file)]) == 1
    first, cut, failed = json.loads(file.read_text("utf-8"))["rows"]
    assert first == {"part": "b", "what": "first", "measured": 1}
    assert cut["note"] == "cut after 2 s"
    assert "illegal memory access" in failed["note"]
