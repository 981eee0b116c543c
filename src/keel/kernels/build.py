"""From C to a library that this processor runs: compiled once, kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-std=gnu11")
_THREADS = ("-fopenmp",)
_PATIENCE = 120.0
"""Seconds that a compiler may take; it takes one or two."""


@cache
def load(name: str) -> ctypes.CDLL | None:
    """The library of `name`.c, or None where no compiler makes one that loads.

    `CC` names the compiler, else it is `cc`. Libraries lie under `$XDG_CACHE_HOME/keel`, by a hash
    of source, compiler and processor; where nothing can be written there, in a folder of this
    process alone. Threads are those of torch's own OpenMP, which must be loaded: a second pool of
    them would compete with the first. Where that cannot be, the library has one thread.
    """
    compiler = _compiler()
    if compiler is None:
        return None
    for flags in ((*_FLAGS, *_THREADS), _FLAGS):
        # One that is there and does not load was damaged: it is made again.
        for anew in (False, True):
            try:
                return ctypes.CDLL(str(_made(name, compiler, flags, anew)))
            except (OSError, subprocess.SubprocessError):
                continue
    return None


def fingerprint(name: str) -> str:
    """Of what compiled code is made of, here: source, compiler, processor; "none" where there is
    none. Two machines that differ in it may differ in the last bits of a sum."""
    compiler = _compiler()
    if compiler is None or load(name) is None:
        return "none"
    return _key(compiler, _FLAGS)[:12]


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc")


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    key = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        key.update(source.name.encode() + source.read_bytes())
    key.update("\0".join((os.path.realpath(compiler), *flags, _processor())).encode())
    return key.hexdigest()


def _made(name: str, compiler: str, flags: tuple[str, ...], anew: bool) -> Path:
    folder = _folder()
    path = folder / f"{name}-{_key(compiler, flags)[:24]}.so"
    if path.exists() and not anew:
        return path
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        unlinked, new = Path(inside, "made.o"), Path(inside, "made.so")
        _call(compiler, *flags, "-c", str(SOURCES / f"{name}.c"), "-o", str(unlinked))
        # OpenMP's functions stay open: they are found in the library that torch has loaded.
        _call(compiler, "-shared", str(unlinked), "-lm", "-o", str(new))
        os.replace(new, path)
    return path


def _call(*command: str) -> None:
    subprocess.run(
        command, check=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL, capture_output=True
    )


def _folder() -> Path:
    """A folder of this user's, which no one else writes to: what lies there is run."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root, "keel", "kernels")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(_alone().name)


@cache
def _alone() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="keel-kernels-")


def _processor() -> str:
    """What the compiler means by "native"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))
