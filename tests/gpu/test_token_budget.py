"""One GPU: the token budget that a trial finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from keel.learn.memory import LEAST_FOUND, MOST_FOUND, measure_on
from keel.platform.signals import Interrupted
from keel.runs.layout import RunFolder
from keel.training.run import train
from tests.gpu import needs_gpus
from tests.training.small import Stop, notes, small

pytestmark = needs_gpus(1)
MIB = 2**20


def test_memory_of_a_call_is_measured() -> None:
    device = torch.device("cuda")
    kept = torch.zeros(MIB, dtype=torch.uint8, device=device)  # there before, so it does not count
    measure = measure_on(device)
    assert measure is not None

    def call() -> torch.Tensor:
        torch.zeros(64 * MIB, dtype=torch.uint8, device=device)
        return torch.zeros(8 * MIB, dtype=torch.uint8, device=device)

    result, memory = measure(call)
    assert memory.kept == result.nbytes == 8 * MIB
    assert memory.peak == 64 * MIB
    _, total = torch.cuda.mem_get_info(device)
    assert 0 < memory.free < total - memory.kept - kept.nbytes


def test_found_budget_is_kept_by_a_resumed_run(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(small(), tmp_path / "run", callbacks=[Stop(2)])
    folder = train(None, tmp_path / "run", resume=True)
    before, after = budget_in(folder, 2), budget_in(folder, 4)
    assert before == after
    assert before % LEAST_FOUND == 0
    assert LEAST_FOUND <= before <= MOST_FOUND
    assert sum("found by a trial" in text for text in notes(folder)) == 1


def budget_in(folder: RunFolder, step: int) -> int:
    state = json.loads((folder.checkpoint(0, step) / "state.json").read_text())
    return int(state["token_budget"])
