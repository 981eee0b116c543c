"""A lack of memory halves the token budget for good; nothing else does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from keel.cli.main import main
from keel.learn.token_budget import TokenBudget, oom_context, out_of_memory
from keel.models.packed import PackedSizes
from keel.runs.reader import load
from keel.training.run import train
from keel.training.setup import token_budget
from keel.training.state import Progress
from keel.types import KeelError
from tests.shared import ROOT
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


def hungry(log_ratio_N: torch.Tensor, advantage_N: torch.Tensor) -> torch.Tensor:
    """A surrogate for which 60 tokens fit."""
    if len(log_ratio_N) > 60:
        torch.empty(1 << 60, dtype=torch.uint8)
    return log_ratio_N.exp() * advantage_N


def test_users_surrogate_without_memory_gets_smaller_batches(tmp_path: Path) -> None:
    entry = "{kind='custom', function='tests.learn.test_budget:hungry'}"
    folder = train(small(f"algorithm.surrogate={entry}", "evaluation.prompts=0"), tmp_path / "run")
    texts = [event.get("text", "") for event in load(folder.path).events()]
    assert any("out of memory with" in text and "going on with" in text for text in texts)
    assert len(load(folder.path).metrics()) == 4


def refuse(*_: object, **__: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("what", "action"),
    [
        ("keel.learn.optimizer.AdamW.apply", "while the optimizer stepped: "),
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


SCRIPT = """
import resource, sys
import torch
torch.set_num_threads(1)
from keel.models import packed
from keel.training import rl
from keel.training.run import train
from tests.training.small import small

room, tokens, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
recipe = small(
    "rewards.functions=[{function='place_match'}]", "steps=2", "rollout.prompts_per_step=256",
    "rollout.group_size=8", "evaluation.prompts=0", "optimizer.learning_rate=1e-3",
    "rollouts_every=1", f"token_budget={tokens}",
    # Scores from before memory runs out are of larger passes, which round otherwise.
    "algorithm=dr_grpo", "algorithm.divergence.beta=0",
)
packed.ENOUGH_ON_CPU = 10**9  # passes of the processor's own choice would fit
update_models = rl.update_models

def limited(*given):
    # Only while it learns: what sampling needs is not what this is about.
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    if room:
        resource.setrlimit(resource.RLIMIT_AS, (used + room, free[1]))
    try:
        return update_models(*given)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, free)

rl.update_models = limited
train(recipe, folder)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_run_with_a_halved_budget_equals_one_with_that_budget(tmp_path: Path) -> None:
    """A real limit of the address space, during the optimizer steps of a real run."""

    def run(name: str, room: int, tokens: int) -> Path:
        folder = tmp_path / name
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(room), str(tokens), str(folder)],
            cwd=ROOT,
            check=True,
            timeout=300,
        )
        return folder

    met = run("met", 30 << 20, 100_000)
    state = json.loads((met / "checkpoints" / "step-000002" / "state.json").read_text())
    found = state["token_budget"]
    events = [json.loads(line) for line in (met / "events.jsonl").read_text().splitlines()]
    assert any(f"going on with {found}" in event.get("text", "") for event in events)
    asked = run("asked", 0, found)
    assert (met / "metrics.jsonl").read_bytes() == (asked / "metrics.jsonl").read_bytes()
    name = "checkpoints/step-000002/trainable.safetensors"
    assert (met / name).read_bytes() == (asked / name).read_bytes()
