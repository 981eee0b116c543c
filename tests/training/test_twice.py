"""Two runs of one recipe and seed are byte-identical, whatever their processes are like."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keel.training.run import train
from tests.shared import ROOT
from tests.soak.cases import CASES
from tests.soak.killing import differences

pytestmark = pytest.mark.slow

NAMES = ("lora-reset", "three-stages")
SCRIPT = """
import random, sys
from pathlib import Path
import numpy, torch
from keel.training.run import train
from tests.soak.cases import CASES

data, out, seed, *names = sys.argv[1:]
torch.set_num_threads(1)
for name in names:
    random.seed(seed)
    numpy.random.seed(int(seed))
    torch.manual_seed(int(seed))
    train(CASES[name].make(Path(data)), Path(out.format(name)))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Each recipe's two runs: here after a run of another kind, in a folder given relative, and in
    a process of its own hash seed, working folder and global random states."""
    data, here, there = (tmp_path_factory.mktemp(name) for name in ("data", "here", "there"))
    (there / "a b").mkdir()
    with contextlib.chdir(here):
        train(CASES["dynamic"].make(data), Path("before"))
        for name in NAMES:
            train(CASES[name].make(data), Path(name))
    words = [
        sys.executable,
        "-c",
        SCRIPT,
        str(data),
        str(there / "a b" / "ünder {}.d"),
        "2",
        *NAMES,
    ]
    seed = "2" if os.environ.get("PYTHONHASHSEED") != "2" else "1"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    around = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=there, env=around, check=True, timeout=600)
    return {name: (here / name, there / "a b" / f"ünder {name}.d") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_two_processes_write_the_same_files(
    name: str, folders: dict[str, tuple[Path, Path]]
) -> None:
    """But for timings.jsonl, events.jsonl, trackers and the lock; an earlier run leaves nothing."""
    a, b = folders[name]
    assert (a / "metrics.jsonl").stat().st_size > 0
    assert differences(a, b) == []


def test_another_seed_writes_other_files(
    folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    name = "lora-reset"
    recipe = CASES[name].make(tmp_path)
    other = train(recipe.model_copy(update={"seed": 7}), tmp_path / "run")
    found = {line.rpartition(" ")[2] for line in differences(folders[name][0], other.path)}
    assert {"metrics.jsonl", "recipe.toml", "run.json"} < found
    rollouts = {name for name in found if name.startswith("rollouts/")}
    assert rollouts == {f"rollouts/{p.name}" for p in other.rollouts_folder.iterdir()}
    assert any(name.endswith("trainable.safetensors") for name in found)
