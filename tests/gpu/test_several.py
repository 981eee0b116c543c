"""Two GPUs: updates of sharded models and whole runs by NCCL, against one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cluster.commands import finished, keel, metrics
from tests.cluster.test_ranks import updated
from tests.gpu import needs_gpus

pytestmark = needs_gpus(2)
TOLERANCE = 1e-3
"""float32 sums in another order over ten updates, in no fixed order on a GPU."""


def by_command(folder: Path, processes: int, *keys: str) -> Path:
    run = keel("train", "tiny", f"cluster.processes={processes}", *keys, "--run", folder, "--quiet")
    assert finished(run) == ""
    return folder


@pytest.mark.parametrize("case", ["ppo", "grpo", "gspo", "grpo+lora"])
def test_two_gpus_update_as_one(tmp_path: Path, case: str) -> None:
    alone, weights = updated(tmp_path, case, 1, "cuda")
    shared, found = updated(tmp_path, case, 2, "cuda")
    for one, other in zip(alone, shared, strict=True):
        assert other == pytest.approx(one, rel=TOLERANCE, abs=TOLERANCE)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("keys", [(), ("algorithm=ppo", "epochs=2"), ("model.lora.rank=4",)])
def test_a_run_on_two_gpus_is_that_of_one(keys: tuple[str, ...], tmp_path: Path) -> None:
    """`cluster.processes`: the first step is that of one process, and the rest learns on."""
    on_gpus = ('model.device="cuda"', "model.autocast=false", "steps=3", *keys)
    one = metrics(by_command(tmp_path / "one", 1, *on_gpus))
    two = metrics(by_command(tmp_path / "two", 2, *on_gpus))
    assert [row["step"] for row in two] == [row["step"] for row in one] == [1, 2, 3]
    assert two[0] == pytest.approx(one[0], abs=TOLERANCE, nan_ok=True)
