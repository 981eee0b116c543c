"""The wheel and the source distribution: what they hold, and Keel as installed from the wheel.

The wheel goes into an environment that has all packages of this one but Keel; there is no network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keel.version import VERSION
from tests.environment import make_environment
from tests.shared import ROOT

BUILD = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
SHORT = ("sft.steps=2", "rl.steps=2", "rl.evaluation.prompts=8", "threads=1")
QUICK = "rl.rollout.prompts_per_step=4"
START = 60.0
"""Seconds in which the pages must answer."""


def run(*command: str | Path, cwd: Path) -> str:
    around = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=around, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def tracked() -> list[str]:
    """The files of the repository; those that are new and not ignored count."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    words = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    names = run(*words, cwd=ROOT).splitlines()
    return [name for name in names if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(*BUILD, folder, source, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment in which the wheel is installed."""
    python = make_environment(tmp_path_factory.mktemp("environment"))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-index")
    run(*pip, wheel, cwd=wheel.parent)
    return python.parent


def test_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    wanted = {name.removeprefix("src/") for name in tracked() if name.startswith("src/keel/")}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("keel/")}
    assert held == wanted
    licences = {
        Path(name).name for name in zipfile.ZipFile(wheel).namelist() if "/licenses/" in name
    }
    assert licences == {"LICENSE", "LICENSE-math-font"}


def test_source_and_its_distribution_make_one_wheel(built: Path, wheel: Path) -> None:
    direct = built / "direct"
    run(*BUILD, direct, "--wheel", built / "source", cwd=built)
    assert contents(next(direct.glob("*.whl"))) == contents(wheel)
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        assert f"keel_rl-{VERSION}/pyproject.toml" in archive.getnames()


def contents(wheel: Path) -> dict[str, int]:
    return {info.filename: info.CRC for info in zipfile.ZipFile(wheel).infolist()}


@pytest.mark.slow
def test_commands_run_from_the_wheel(programs: Path, tmp_path: Path) -> None:
    keel = programs / "keel"
    assert run(keel, "--version", cwd=tmp_path).split() == ["keel", VERSION]
    shipped = {path.stem for path in (ROOT / "src/keel/config/recipes").glob("*.toml")}
    assert json.loads(run(keel, "recipes", "--json", cwd=tmp_path)).keys() == shipped
    parts = {part["name"]: part for part in json.loads(run(keel, "doctor", "--json", cwd=tmp_path))}
    assert str(programs.parent) in parts["Python"]["effect"]
    assert parts["C compiler"]["there"] is (shutil.which("cc") is not None)


@pytest.mark.slow
def test_an_extra_is_added_to_the_wheel(programs: Path, tmp_path: Path) -> None:
    """By its command: pip takes the installed Keel, which no index has, and adds the packages."""
    ask = "from keel.platform.extras import install_command as c; print(c('lora'))"
    command = run(programs / "python", "-c", ask, cwd=tmp_path).strip()
    assert command == "pip install 'keel-rl[lora]'"
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-index")
    report = run(*pip, "keel-rl[lora]", cwd=tmp_path)
    assert "Requirement already satisfied: keel-rl[lora]" in report
    assert "Requirement already satisfied: peft" in report


@pytest.mark.slow
def test_quickstart_and_pages_run_from_the_wheel(programs: Path, tmp_path: Path) -> None:
    keel, folder = programs / "keel", "runs/quickstart-1"
    run(keel, "train", "quickstart", *SHORT, QUICK, cwd=tmp_path)
    assert json.loads((tmp_path / folder / "run.json").read_text())["finished"] is True
    run(keel, "report", folder, cwd=tmp_path)
    assert "quickstart" in (tmp_path / folder / "report.html").read_text(encoding="utf-8")
    with served(keel, tmp_path) as url, urllib.request.urlopen(url, timeout=START) as page:
        assert "quickstart-1" in page.read().decode()


@contextmanager
def served(keel: Path, folder: Path) -> Iterator[str]:
    """The address of `keel view runs` in a folder."""
    # NiceGUI serves its own tests differently.
    around = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "PYTEST" not in k}
    words = [keel, "view", "runs", "--no-browser"]
    with subprocess.Popen(
        words, cwd=folder, env=around, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            yield line[line.index("http://") :].split()[0]
        finally:
            server.terminate()
