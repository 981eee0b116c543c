"""The public names of `keel`, its version, and its use from the source tree."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools.config.pyprojecttoml import read_configuration

import keel

ROOT = Path(__file__).parents[1]


def test_no_public_name_is_a_subpackages() -> None:
    """Importing `keel.x` binds the module over the attribute `x`: `keel.x(…)` would then fail."""
    modules = {module.name for module in pkgutil.iter_modules(keel.__path__)}
    assert modules & set(keel.__all__) == set()


@pytest.mark.parametrize("name", [name for name in keel.__all__ if name != "__version__"])
def test_public_name_is_an_object_of_the_package(name: str) -> None:
    found = getattr(keel, name)
    assert callable(found)
    assert found.__module__.startswith("keel.")
    assert found.__name__ == name


BARE = """
import importlib.metadata as metadata
import sys
found = metadata.version

def version(name):
    if name == "keel-rl":
        raise metadata.PackageNotFoundError(name)
    return found(name)

metadata.version = version
from keel.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_source_tree_without_metadata_trains(tmp_path: Path) -> None:
    words = ["train", "tiny", "steps=1", "evaluation.prompts=2", "--run", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", BARE, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    versions = json.loads((tmp_path / "run/run.json").read_text())["versions"]
    assert versions["keel-rl"] == keel.__version__


def test_version_of_the_package_is_that_of_the_source() -> None:
    config = read_configuration(str(ROOT / "pyproject.toml"))
    assert config["project"]["version"] == keel.__version__
