"""A smoke run of each benchmark of speed and memory: it runs, agrees, and writes its figures.

What the figures are is not looked at, for a test depends on no clock. Of `loop` and `rollout`, of
which each side takes seconds to import, Keel's side runs alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    loop,
    loop_keel,
    memory,
    rollout,
    update,
)
from benchmarks.update import SMALL, Case

pytestmark = pytest.mark.slow

Printed = tuple[dict[str, Any], str]


@pytest.fixture
def smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Runs a benchmark's `main`: what it wrote, and what it printed."""

    def run(main: Callable[[list[str]], None], *words: str) -> Printed:
        file = tmp_path / "figures.json"
        main(["--smoke", "--threads", "1", "--json", str(file), *words])
        return json.loads(file.read_text("utf-8")), capsys.readouterr().out

    return run


def positive(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(v, float) and 0 < v < float("inf") for v in values)


# ---------------------------------------------------------------- update


def test_update_writes_its_ratios_and_a_row_for_each_case(smoke: Callable[..., Printed]) -> None:
    found, printed = smoke(update.main)
    names = ["ragged-20", "equal-20", "equal-2000"]
    assert [row["row"] for row in found["rows"]] == names
    ragged, equal, long = found["rows"]
    assert found["packed_ragged_ratio"] == ragged["packed_ratio"]
    assert found["packed_equal_ratio"] == equal["packed_ratio"]
    assert found["shared_ratio"] == long["shared_ratio"]
    for row in found["rows"]:
        seconds = row["seconds"]
        assert positive(list(seconds.values()))
        assert row["packed_ratio"] == seconds["padded"] / seconds["packed"]
        assert row["shared_ratio"] == seconds["packed"] / seconds["shared"]
        assert row["whole_ratio"] == seconds["padded"] / seconds["shared"]
        assert 0 < row["gradient_difference"] <= update.AGREEMENT
    assert equal["tokens"] == equal["padded_tokens"] == 8 * (20 + 6)
    assert equal["completion_tokens"] == 8 * 6
    assert ragged["padded_tokens"] > ragged["tokens"]
    assert printed.count("\n| ") == 1 + len(names)
    # A table has as many cells in each row.
    assert len({row.count("|") for row in printed.splitlines() if row.startswith("|")}) == 1


def test_update_detects_a_different_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = update.bench_of(SMALL, 10_000)
    case = Case("ragged", 5, 2, 6, 4, 9)
    assert update.agree(bench, case) <= update.AGREEMENT
    honest = update.prepared

    def skewed(row: Any, made: update.Rollouts, shared: bool) -> Any:
        advantage_S = made.advantage_S * (1.001 if shared else 1.0)
        return honest(row, update.Rollouts(made.groups, advantage_S), shared)

    monkeypatch.setattr(update, "prepared", skewed)
    with pytest.raises(AssertionError, match=r"shared: .* differs by 1\.0e-03"):
        update.agree(bench, case)


# ---------------------------------------------------------------- the others


def test_memory_writes_the_share(smoke: Callable[..., Printed]) -> None:
    found, _ = smoke(memory.main)
    (row,) = found["rows"]
    assert found["share"] == row["share"] == row["chunked_bytes"] / row["naive_bytes"]
    # 1,024 × 20,000 logits alone are 78 MiB, and the naive side has more than two of them.
    assert row["naive_bytes"] > 2 * 4 * 1024 * 20_000
    assert found["share"] < 1


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `loop` and `rollout` begin with, made without a process of its own."""
    folder = tmp_path_factory.mktemp("prepared")
    loop_keel.prepare(asdict(loop.SMOKE), folder)
    return folder


def test_loop_times_keel(prepared: Path) -> None:
    bench = loop.Bench(prepared, loop.SMOKE, 2, 1, trl_python=None, micro=16, continuous=False)
    row = loop.compare(bench, loop.case_of("ragged-8-short"), repeats=1)
    keel = row["keel"]
    assert keel["steps"] == 1
    assert positive([keel["tokens_per_second"], keel["seconds"], keel["phases"]["update"]])
    assert 0 < keel["mean_length"] <= loop.SMOKE.most
    assert keel["peak"] > 2**20
    assert "| ragged | 8 | short | Keel |" in loop.lines(row)
    assert loop.report(bench, [row])["ragged_ratio"] is None


def test_rollout_times_keel(prepared: Path) -> None:
    vllm = rollout.Threads("nobind", apart=False, count=1)
    bench = rollout.Bench(prepared, loop.SMOKE, 1, 0, vllm_python=None, vllm=vllm)
    with rollout.started(bench, "keel", "ragged") as side:
        passes = [side.once(number) for number in range(2)]
        assert side.process.stdout is not None
        side.process.stdout.close()
    row = rollout.summed("ragged", "keel", passes) | {"ratio": 1.0}
    assert positive([row["tokens_per_second"], row["seconds"]])
    assert 0 < row["mean_length"] <= loop.SMOKE.most
    assert all(len(one["lengths"]) == loop.SMOKE.completions for one in passes)
    assert "| ragged | keel |" in rollout.line(row)
