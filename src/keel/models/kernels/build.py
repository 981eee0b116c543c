"""From C to a library that this processor runs: compiled once, kept in the user's cache."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
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


def load(name: str) -> ctypes.CDLL | None:
    """The library of `name`.c, or None where no compiler makes one that loads.

    `CC` names the compiler, else it is `cc`. Libraries lie under `$XDG_CACHE_HOME/keel`, by hashes
    of what they are made of and of what they hold; where nothing can be written there, in a folder
    of this process alone. Threads are those of torch's own OpenMP, which must be loaded: a second
    pool of them would compete with the first. Where that cannot be, the library has one thread.
    """
    found = _loaded(name)
    return None if found is None else found[0]


def fingerprint(name: str) -> str:
    """Of what a library is made of, here: source, compiler, processor; "none" where there is none.
    Two machines that differ in it may differ in the last bits of a sum."""
    found = _loaded(name)
    return "none" if found is None else found[1][:12]


@cache
def _loaded(name: str) -> tuple[ctypes.CDLL, str] | None:
    try:
        compiler = _compiler()
    except (OSError, subprocess.SubprocessError):
        return None
    for flags in ((*_FLAGS, *_THREADS), _FLAGS) if compiler else ():
        try:
            key = _key(compiler, flags)
            return ctypes.CDLL(str(_made(name, key, compiler, flags))), key
        except (OSError, subprocess.SubprocessError):
            continue
    return None


def _compiler() -> tuple[str, ...]:
    """The command, with what `CC` passes to it; () where there is none."""
    words = shlex.split(os.environ.get("CC") or "cc")
    found = shutil.which(words[0]) if words else None
    return () if found is None else (found, *words[1:])


def _key(compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    key = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        key.update(source.name.encode() + source.read_bytes())
    key.update("\0".join((*compiler, *flags, _processor())).encode())
    key.update(_call(*compiler, "--version"))
    return key.hexdigest()


def _made(name: str, key: str, compiler: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """The library, made now if it is not there whole: what was cut short would end the process."""
    folder = _folder()
    for path in folder.glob(f"{name}-{key[:24]}-*.so"):
        if path.stem.endswith(_digest(path)):
            return path
        path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        unlinked, new = Path(inside, "made.o"), Path(inside, "made.so")
        _call(*compiler, *flags, "-c", str(SOURCES / f"{name}.c"), "-o", str(unlinked))
        # OpenMP's functions stay open: they are found in the library that torch has loaded.
        _call(*compiler, "-shared", str(unlinked), "-lm", "-o", str(new))
        path = folder / f"{name}-{key[:24]}-{_digest(new)}.so"
        os.replace(new, path)
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _call(*command: str) -> bytes:
    return subprocess.run(
        command, check=True, timeout=_PATIENCE, stdin=subprocess.DEVNULL, capture_output=True
    ).stdout


def _folder() -> Path:
    """A folder of this user's, which no one else writes to: what lies there is run."""
    try:
        # A user without an entry, as in a container, has no home: RuntimeError.
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root, "keel", "kernels")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
        if state.st_uid == os.getuid() and not state.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):
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
