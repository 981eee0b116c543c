"""A lack of memory halves the token budget for good; nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from keel.cli.main import main
from keel.learn.batch import TokenBudget, oom_context, out_of_memory
from keel.models.packed import PackedSizes
from keel.training.setup import token_budget
from keel.training.state import Progress
from keel.types import KeelError
from tests.training.small import small


def cpu_refusal() -> RuntimeError:
    """torch's error where a CPU has no memory: an exbibyte is more than any address space."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


class Limited:
    """Work for which a micro-batch of `room` tokens fits."""

    def __init__(self, room: int, lengths: Sequence[int], error: Exception) -> None:
        self.room, self.lengths, self.error = room, lengths, error
        self.asked: list[int] = []
        self.undone = 0

    def attempt(self, tokens: int) -> str:
        self.asked.append(tokens)
        # As Sizes cuts: in order, a longer sequence alone.
        used = largest = 0
        for length in self.lengths:
            used = used + length if used + length <= tokens else length
            largest = max(largest, used)
        if largest > self.room:
            raise self.error
        return "done"

    def undo(self) -> None:
        self.undone += 1


def test_out_of_memory_errors_of_torch_are_recognised() -> None:
    assert out_of_memory(cpu_refusal())
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert out_of_memory(MemoryError())
    for message in (
        "MPS backend out of memory (MPS allocated: 9.00 GB)",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA driver error: out of memory",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    ):
        assert out_of_memory(RuntimeError(message)), message
    assert not out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not out_of_memory(RuntimeError("shapes do not fit"))
    assert not out_of_memory(ValueError("DefaultCPUAllocator: can't allocate memory"))


def test_budget_is_halved_until_it_fits_and_kept() -> None:
    notes: list[str] = []
    budget = TokenBudget(1000, notes.append)
    work = Limited(12, [10, 10, 10, 10], cpu_refusal())
    assert budget.found is None
    assert budget.fitting(work.attempt, PackedSizes(work.lengths), work.undo) == "done"
    # 40 tokens are all there is, so that halving 1000 would ask for the same again.
    assert work.asked == [1000, 20, 10]
    assert work.undone == 2
    assert budget.tokens == budget.found == 10
    assert [text.split(":")[0] for text in notes] == [
        "out of memory with 40 tokens at a time (token_budget 1000)",
        "out of memory with 20 tokens at a time (token_budget 20)",
    ]
    assert "set token_budget = 10" in notes[1]
    again = Limited(12, [10, 10], cpu_refusal())
    budget.fitting(again.attempt, PackedSizes(again.lengths))
    assert again.asked == [10]


def test_single_sequence_that_does_not_fit_is_an_error() -> None:
    budget = TokenBudget(64)
    work = Limited(12, [10, 30, 10], cpu_refusal())
    with pytest.raises(KeelError, match="one sequence of 30 tokens alone"):
        budget.fitting(work.attempt, PackedSizes(work.lengths), work.undo)
    assert work.undone == len(work.asked)


def test_other_errors_pass_through() -> None:
    budget = TokenBudget(64)
    work = Limited(0, [10, 10], RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes"):
        budget.fitting(work.attempt, PackedSizes(work.lengths), work.undo)
    assert work.undone == 0
    assert budget.tokens == 64


def test_oom_context_names_action_and_hint() -> None:
    line = r"^out of memory while x was done: lower y$"
    with pytest.raises(KeelError, match=line), oom_context("x was done", "lower y"):
        torch.empty(1 << 60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shapes"), oom_context("x was done", "lower y"):
        raise RuntimeError("shapes do not fit")


def refuse(*_: object, **__: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("what", "action"),
    [
        ("keel.learn.optimizer.WeightOptimizer.apply", "while the optimizer stepped: "),
        ("keel.engines.native.NativeEngine.sync", "while the engine took the weights over: "),
        ("keel.models.policy.Policy.save", "after rl step 2 (no checkpoint yet): out of memory"),
        ("keel.training.run.load_policy", "while a model or batch was made ready: "),
        ("keel.training.rl.estimate", "while a model or batch was made ready: "),
    ],
)
def test_run_reports_in_one_line_where_it_ran_out(
    what: str,
    action: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(what, refuse)
    keys = ["threads=1", "evaluation.prompts=0", "rollout.prompts_per_step=2", "steps=2"]
    folder = tmp_path / "run"
    assert main(["train", "tiny", "--run", str(folder), *keys, "rollout.group_size=2"]) == 2
    line = capfd.readouterr().err.rstrip().rpartition("\n")[2]
    assert line.startswith("keel: error: ")
    assert action in line
    assert "smaller model" in line
    # A folder without a step is removed; of one with steps the line explains how to resume.
    assert folder.exists() == ("--resume" in line) == ("step 2" in line)


@pytest.mark.parametrize(
    ("found", "asked", "used"), [(None, 64, 64), (32, 64, 32), (32, 16, 16), (16, 16, 16)]
)
def test_budget_found_before_counts_where_it_is_less(
    found: int | None, asked: int, used: int, tmp_path: Path
) -> None:
    stage = small(f"token_budget={asked}").stages[0]
    writer = SimpleNamespace(note=lambda text: None)
    budget = token_budget(stage, Progress(0, token_budget=found), writer)  # type: ignore[arg-type]
    assert budget.tokens == used
    assert budget.found == (used if used < asked else None)
