"""The public names of `keel`, its version, and its use from the source tree."""

from __future__ import annotations

import pkgutil
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


def test_version_of_the_package_is_that_of_the_source() -> None:
    config = read_configuration(str(ROOT / "pyproject.toml"))
    assert config["project"]["version"] == keel.__version__
