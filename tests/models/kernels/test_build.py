"""Compiling from nothing: real compilers, real folders, each in a process of its own."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from keel.models import kernels
from keel.models.kernels import SOURCES

PROGRAM = """
import ctypes, sys
from pathlib import Path
from keel.models import kernels
try:
    ctypes.CDLL("libgomp.so.1", ctypes.RTLD_GLOBAL)  # in place of torch's
except OSError:
    import torch
kernels.SOURCES = Path(sys.argv[1])
found = kernels.load("small")
print("none" if found is None else found._name, kernels.fingerprint("small"))
"""
CODE = """
#ifdef _OPENMP
#include <omp.h>
int threads(void) { return omp_get_max_threads(); }
#else
int threads(void) { return 1; }
#endif
"""


@pytest.fixture(autouse=True)
def sources(tmp_path: Path) -> None:
    """A library of one function in place of the package's, which take seconds to compile."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "small.c").write_text(CODE)


def loaded(folder: Path, cache: str = "cache", **environment: str) -> list[str]:
    """Where the library lies, and its fingerprint."""
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "sources")],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / cache), **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert not out.stderr
    return out.stdout.split()


def counting(folder: Path, then: str) -> Path:
    """A compiler that notes that it was called."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\necho called >> "{folder}/calls"\n{then}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_it_is_compiled_once_and_kept(tmp_path: Path) -> None:
    compiler = counting(tmp_path, 'exec cc "$@"')
    first = loaded(tmp_path, CC=str(compiler))
    calls = (tmp_path / "calls").read_text()
    assert calls.count("called") == 3  # to say its version, to compile, and to link
    assert Path(first[0]).parent == tmp_path / "cache" / "keel" / "kernels"
    assert Path(first[0]).parent.stat().st_mode & 0o077 == 0
    assert loaded(tmp_path, CC=str(compiler)) == first
    assert (tmp_path / "calls").read_text() == f"{calls}called\n"
    # Nothing is left next to it.
    assert len(list(Path(first[0]).parent.iterdir())) == 1


def test_what_is_damaged_is_made_again(tmp_path: Path) -> None:
    first = loaded(tmp_path)
    whole = Path(first[0]).read_bytes()
    # Cut after its headers it would load, and end the process at the first call.
    for content in (b"", whole[:64], whole[: len(whole) // 2], whole[:-1024]):
        Path(first[0]).write_bytes(content)
        again = loaded(tmp_path)
        assert again[1] == first[1]
        assert Path(again[0]).parent == Path(first[0]).parent
        assert len(Path(again[0]).read_bytes()) == len(whole)
        assert len(list(Path(again[0]).parent.iterdir())) == 1
        first = again
    # A link to nothing cannot be read.
    Path(first[0]).unlink()
    Path(first[0]).symlink_to(tmp_path / "nothing")
    assert loaded(tmp_path) == first  # not one of other flags, which has one thread
    assert not Path(first[0]).is_symlink()


@pytest.mark.parametrize("compiler", ["/nonexistent/cc", "/bin/false"])
def test_without_a_compiler_there_is_none(compiler: str, tmp_path: Path) -> None:
    assert loaded(tmp_path, CC=compiler) == ["none", "none"]


def test_a_compiler_without_threads_gives_one_thread(tmp_path: Path) -> None:
    refuses = 'case "$*" in *-fopenmp*) exit 1;; esac; exec cc "$@"'
    first = loaded(tmp_path, CC=str(counting(tmp_path, refuses)))
    assert first[0].endswith(".so")
    assert first[1] not in ("none", loaded(tmp_path)[1])


def test_a_library_that_does_not_load_is_made_once(tmp_path: Path) -> None:
    """As where another OpenMP than torch's would be needed: what takes its place has one thread."""
    (tmp_path / "more.h").write_text(
        "void no_such(void); __attribute__((constructor)) static void at_once(void) { no_such(); }"
    )
    more = f'set -- "$@" -include "{tmp_path}/more.h"'
    compiler = counting(tmp_path, f'case "$*" in *-fopenmp*) {more};; esac; exec cc "$@"')
    first = loaded(tmp_path, CC=str(compiler))
    assert first[1] != "none"
    calls = (tmp_path / "calls").read_text().count("called")
    assert loaded(tmp_path, CC=str(compiler)) == first
    # It is asked for its version, once for each set of flags.
    assert (tmp_path / "calls").read_text().count("called") == calls + 2


def test_a_folder_of_someone_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernels.cache_folder().is_relative_to(tmp_path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert not kernels.cache_folder().is_relative_to(tmp_path)


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(mode: int, tmp_path: Path) -> None:
    """What lies there is run."""
    folder = tmp_path / "cache" / "keel" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    found, _ = loaded(tmp_path)
    assert not Path(found).is_relative_to(tmp_path)
    assert not list(folder.iterdir())
    # That of the process goes with it.
    assert not Path(found).exists()


def test_a_folder_that_cannot_be_made_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found, print_ = loaded(tmp_path, "file")
    assert found.endswith(".so")
    assert print_ != "none"


def test_the_sources_are_part_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((SOURCES.parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["keel"]
    shipped = {path for p in patterns for path in SOURCES.parents[1].glob(p)}
    assert shipped.issuperset([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])


def test_the_compiler_may_be_given_arguments(tmp_path: Path) -> None:
    compiler = counting(tmp_path, 'test "$1" = -g0 || exit 1; exec cc "$@"')
    assert loaded(tmp_path, CC=f"'{compiler}' -g0")[1] != "none"
    assert loaded(tmp_path, CC=str(compiler)) == ["none", "none"]


def test_without_a_home_it_is_made_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose user has no entry."""

    def homeless(kind: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", classmethod(homeless))
    folder = kernels.cache_folder()
    assert folder.is_dir()
    assert folder.is_relative_to(tempfile.gettempdir())
