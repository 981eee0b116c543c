"""Keel from a source tree, in an environment that has what it needs but not Keel itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import keel
from tests.environment import make_environment


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    interpreter = make_environment(folder)
    # Next to the package an editable installation leaves metadata.
    (folder / "source").mkdir()
    (folder / "source" / "keel").symlink_to(Path(keel.__file__).parent)
    return interpreter


def run(python: Path, *command: str, cwd: Path) -> str:
    around = {**os.environ, "PYTHONPATH": str(python.parents[1] / "source")}
    done = subprocess.run(
        [str(python), *command], cwd=cwd, env=around, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_help_and_version_need_no_installation(python: Path, tmp_path: Path) -> None:
    found = "from importlib.metadata import packages_distributions as p; print('keel' in p())"
    assert run(python, "-c", found, cwd=tmp_path).strip() == "False"
    assert "train" in run(python, "-m", "keel", "--help", cwd=tmp_path)
    assert run(python, "-m", "keel", "--version", cwd=tmp_path).split() == [
        "keel",
        keel.__version__,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["cluster.processes=2", "cluster.ray=local"])
def test_processes_of_a_run_need_no_installation(
    python: Path, tmp_path: Path, cluster: str
) -> None:
    if cluster == "cluster.ray=local":
        pytest.importorskip("ray")
    words = ["train", "tiny", "steps=1", "evaluation.prompts=2", cluster, "--run", "run"]
    run(python, "-m", "keel", *words, cwd=tmp_path)
    run(python, "-m", "keel", "report", "run", cwd=tmp_path)
    assert (tmp_path / "run/report.html").is_file()
    versions = json.loads((tmp_path / "run/run.json").read_text())["versions"]
    assert versions["keel-rl"] == keel.__version__


@pytest.mark.slow
def test_the_trial_of_a_check_needs_no_installation(python: Path, tmp_path: Path) -> None:
    assert "nothing found" in run(python, "-m", "keel", "check", "tiny", cwd=tmp_path)
