"""A token budget is found by a trial on a GPU; a lack of memory halves it for good."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.cli.main import main
from keel.learn.memory import CallMemory, TokenBudget, oom_context, out_of_memory
from keel.models.packed import PackedSizes
from keel.platform.signals import Interrupted
from keel.runs.layout import RunFolder
from keel.training.run import train
from keel.training.setup import RunContext, token_budget
from keel.training.state import Progress
from keel.types import KeelError
from tests.soak.killing import differences
from tests.training.judged import TASK, data, ones, recipe
from tests.training.small import Stop, notes, small


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


def run_on(device: str, *keys: str) -> RunContext:
    """As much of a run as its token budget is made from."""
    policy = SimpleNamespace(device=torch.device(device))
    writer = SimpleNamespace(note=lambda text: None)
    return RunContext(small(*keys), writer, policy, None)  # type: ignore[arg-type]


def budget_of(run: RunContext, found: int | None = None) -> TokenBudget:
    return token_budget(run, run.recipe.stages[0], Progress(0, token_budget=found))


@pytest.mark.parametrize(
    ("found", "asked", "used"), [(None, 64, 64), (32, 64, 32), (32, 16, 16), (16, 16, 16)]
)
def test_budget_found_before_counts_where_it_is_less(
    found: int | None, asked: int, used: int
) -> None:
    for device in ("cpu", "cuda"):
        budget = budget_of(run_on(device, f"token_budget={asked}"), found)
        assert budget.tokens == used
        assert budget.found == (used if used < asked else None)


# ---------------------------------------------------------------- found by a trial


GIB = 2**30


class Card:
    """A device with `free` bytes after a pass, of which each token of a micro-batch takes `each`;
    its gradients, `kept` bytes, are there from the second micro-batch on."""

    def __init__(self, lengths: Sequence[int], *, each: int, free: int, kept: int = 0) -> None:
        self.sizes, self.each, self.free, self.kept = PackedSizes(lengths), each, free, kept
        self.passes: list[int] = []
        self.measured = 0

    def measure(self, call: Callable[[], Any]) -> tuple[Any, CallMemory]:
        self.measured += 1
        result = call()
        first, *later = (self.sizes.entering(span) for span in self.sizes.spans(self.passes[-1]))
        peaks = [self.each * first, *(self.kept + self.each * tokens for tokens in later)]
        return result, CallMemory(max(peaks), self.kept, self.free)

    def attempt(self, tokens: int) -> int:
        self.passes.append(tokens)
        if max(map(self.sizes.entering, self.sizes.spans(tokens))) * self.each > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tokens

    def take(self, budget: TokenBudget, pending: int | None = 0) -> None:
        more = None if pending is None else lambda: pending
        assert budget.fitting(self.attempt, self.sizes, pending=more) == self.passes[-1]


@pytest.mark.parametrize(
    ("each", "free", "pending", "found"),
    [
        (10**6, 50 * 10**9, 0, 40_960),  # 42,500 fit into 85 % of it
        (10**6, 50 * 10**9, 12 * 10**9, 28_672),  # 32,300
        (10**6, 20 * 10**9, 0, 16_384),  # 17,000: what was asked for
        (10**6, 20 * 10**9, 15 * 10**9, 4_096),  # 4,250
        (10**6, 20 * 10**9, 40 * 10**9, 4_096),
        (10**5, 50 * 10**9, 0, 65_536),
    ],
)
def test_trial_sets_what_fits_the_free_memory(
    each: int, free: int, pending: int, found: int
) -> None:
    notes: list[str] = []
    card = Card([1000] * 10, each=each, free=free)
    budget = TokenBudget(16_384, notes.append, card.measure)
    assert budget.found is None
    for _ in range(2):
        card.take(budget, pending)
    assert card.passes == [16_384, found]
    assert budget.tokens == budget.found == found
    assert notes == [f"token_budget: {found:,} tokens, found by a trial"]
    assert card.measured == 1


def test_small_passes_are_no_trial() -> None:
    """Memory that does not grow with tokens would count as theirs."""
    card = Card([1000] * 8, each=10**6, free=50 * 10**9, kept=10**9)
    budget = TokenBudget(16_384, measure=card.measure)
    card.take(budget)
    assert budget.found is None
    card.sizes = PackedSizes([1000] * 9)
    card.take(budget)
    assert budget.found == 40_960
    assert card.measured == 2


def test_passes_without_gradient_are_no_trial() -> None:
    card = Card([9000], each=10**6, free=50 * 10**9)
    budget = TokenBudget(16_384, measure=card.measure)
    card.take(budget, pending=None)
    assert card.measured == 0
    assert budget.found is None
    card.take(budget)
    assert budget.found == 40_960


@pytest.mark.parametrize("lengths", [[16_000], [16_000] * 3, [16_000, 500], [500, 16_000, 900]])
def test_gradients_are_not_counted_as_tokens(lengths: list[int]) -> None:
    """Of one micro-batch and of several; 11 GB of gradients would leave room for 24,576 tokens."""
    card = Card(lengths, each=10**6, free=50 * 10**9, kept=11 * 10**9)
    budget = TokenBudget(16_384, measure=card.measure)
    card.take(budget)
    assert budget.found == 40_960


def test_trial_and_later_passes_are_halved() -> None:
    """After a lack of memory no more tokens are found than fitted, even below the least."""
    notes: list[str] = []
    card = Card([1000] * 16, each=10**6, free=9 * 10**9)
    budget = TokenBudget(16_384, notes.append, card.measure)
    card.take(budget)
    assert card.passes == [16_384, 8_000]
    assert budget.found == 4_096  # 7,650 fit into 85 % of it
    assert [text.split(":")[0] for text in notes] == [
        "out of memory with 16000 tokens at a time (token_budget 16384)",
        "token_budget",
    ]
    card.free = 3 * 10**9
    card.take(budget)
    assert budget.found == 2_000
    small = Card([1000] * 16, each=10**6, free=2 * 10**9)
    budget = TokenBudget(16_384, measure=small.measure)
    small.take(budget)
    assert budget.found == small.passes[-1] == 2_000


def test_budget_of_a_checkpoint_needs_no_trial() -> None:
    """Also what a trial found that is all that was asked for, or more."""
    for found in (2_000, 16_384, 40_960):
        card = Card([1000] * 60, each=10, free=GIB)
        budget = TokenBudget(16_384, measure=card.measure)
        budget.restore(found)
        card.take(budget)
        assert card.measured == 0
        assert card.passes == [found]
        assert budget.found == found


def test_budget_of_a_gpu_and_one_process_is_tried() -> None:
    """A CPU, several processes and a number keep what they have: more than that is not used."""
    tried = budget_of(run_on("cuda"), 40_960)
    assert (tried.tokens, tried.found) == (40_960, 40_960)
    assert budget_of(run_on("cuda"))._measure is not None
    for device, *keys in (
        ("cpu",), ("mps",), ("cuda", "cluster.ray=local"), ("cuda", "cluster.processes=2"),
        ("cuda", "token_budget=16384"),
        ("cuda", "rollout.async_level=1", "algorithm.corrections.kind=truncate"),
    ):  # fmt: skip
        run = run_on(device, *keys)
        assert budget_of(run)._measure is None
        assert budget_of(run, 40_960).tokens == budget_of(run).tokens == 16_384


def faked(monkeypatch: pytest.MonkeyPatch, results: list[Any]) -> None:
    """A CPU counts as a GPU with plenty of memory; `results` takes those of the trials."""

    def measure(call: Callable[[], Any]) -> tuple[Any, CallMemory]:
        results.append(call())
        return results[-1], CallMemory(GIB, 0, 10**6 * GIB)

    monkeypatch.setattr("keel.training.setup.measure_on", lambda device: measure)
    monkeypatch.setattr("keel.config.stage.AUTO_TOKENS", 40)  # less than two small passes


def found_in(folder: RunFolder, stage: int, step: int) -> int | None:
    state = json.loads((folder.checkpoint(stage, step) / "state.json").read_text())
    return state["token_budget"]  # type: ignore[no-any-return]


FOUND = "token_budget: 65,536 tokens, found by a trial"


def test_resume_uses_what_the_trial_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Any] = []
    faked(monkeypatch, trials)
    whole = train(small(), tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(small(), tmp_path / "run", callbacks=[Stop(2)])
    assert len(trials) == 2
    folder = train(None, tmp_path / "run", resume=True)
    assert len(trials) == 2
    assert notes(folder).count(FOUND) == 1
    assert found_in(folder, 0, 2) == found_in(folder, 0, 4) == 65_536
    assert differences(whole.path, folder.path) == []


def test_each_kind_of_stage_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[Any] = []
    faked(monkeypatch, trials)
    brief = {"steps": 2, "batch_size": 4}
    rows = {**brief, "data": data(tmp_path, ones(8, 1), ones(4, 2))}
    made = recipe(
        {**brief, "stage": "sft", "tasks": [TASK]},
        {**rows, "stage": "reward_model"},
        {**rows, "stage": "dpo"},
    )
    folder = train(made, tmp_path / "run")
    assert notes(folder).count(FOUND) == len(trials) == 3


def test_auto_is_16384_bit_for_bit_on_a_cpu(tmp_path: Path) -> None:
    """Metrics, rollouts and every file of the checkpoints but those with the recipe."""
    asked = train(small("token_budget=16384"), tmp_path / "asked")
    auto = train(small(), tmp_path / "auto")
    assert found_in(auto, 0, 4) is None
    changed = {Path(line.split()[-1]).name for line in differences(asked.path, auto.path)}
    assert changed == {"recipe.toml", "record.json", "manifest.json"}
