"""Compiles C for this processor, once, and keeps the libraries in the user's cache.

`paged` and `draw` are Triton kernels for GPUs, which Triton compiles itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from keel.platform.process import output_of

SOURCES = Path(__file__).parent
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-std=gnu11")
_THREADS = ("-fopenmp",)
_PATIENCE = 120.0
"""Time limit of the compiler in seconds; it takes one or two."""


@cache
def has_triton() -> bool:
    """Whether Triton is installed; torch's CUDA builds bring it on Linux."""
    return importlib.util.find_spec("triton") is not None


def load(name: str) -> ctypes.CDLL | None:
    """The library of `name`.c, or None where none compiles and loads.

    The compiler is `CC`, or `cc`. Libraries are stored in `$XDG_CACHE_HOME/keel`, by hashes of
    their sources and contents; if that is not writable, in a temporary folder of this process.
    Threads are those of torch's OpenMP, which must be loaded: a second pool would compete with it.
    Where that fails the library has one thread.
    """
    found = _loaded(name)
    return None if found is None else found[0]


def fingerprint(name: str) -> str:
    """Hash of a library's source, compiler and processor; "none" where there is no library.
    Machines with different hashes may differ in the last bits of a sum."""
    found = _loaded(name)
    return "none" if found is None else found[1][:12]


@cache
def _loaded(name: str) -> tuple[ctypes.CDLL, str] | None:
    try:
        compiler = compiler_command()
    except OSError:
        return None
    for flags in ((*_FLAGS, *_THREADS), _FLAGS) if compiler else ():
        try:
            key = _key(compiler, flags)
            return ctypes.CDLL(str(_made(name, key, compiler, flags))), key
        except OSError:
            continue
    return None


def compiler_command() -> tuple[str, ...]:
    """The command with the arguments in `CC`; () where there is none."""
    words = shlex.split(os.environ.get("CC") or "cc")
    found = shutil.which(words[0]) if words else None
    return () if found is None else (found, *words[1:])


def _key(compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    key = hashlib.sha256()
    for source in sorted((*SOURCES.glob("*.c"), *SOURCES.glob("*.h"))):
        key.update(source.name.encode() + source.read_bytes())
    key.update("\0".join((*compiler, *flags, processor())).encode())
    key.update(output_of([*compiler, "--version"], _PATIENCE))
    return key.hexdigest()


def _made(name: str, key: str, compiler: tuple[str, ...], flags: tuple[str, ...]) -> Path:
    """The library, compiled if missing or damaged: a truncated one would crash the process.

    What is damaged stays until it is replaced: another process may have done that by now.
    """
    folder = cache_folder()
    for path in folder.glob(f"{name}-{key[:24]}-*.so"):
        with suppress(OSError):
            if path.stem.endswith(_digest(path)):
                return path
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        unlinked, new = Path(inside, "made.o"), Path(inside, "made.so")
        source = str(SOURCES / f"{name}.c")
        output_of([*compiler, *flags, "-c", source, "-o", str(unlinked)], _PATIENCE)
        # OpenMP's symbols stay undefined: they resolve to the library that torch has loaded.
        output_of([*compiler, "-shared", str(unlinked), "-lm", "-o", str(new)], _PATIENCE)
        path = folder / f"{name}-{key[:24]}-{_digest(new)}.so"
        os.replace(new, path)
    return path


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def cache_folder() -> Path:
    """The folder of the libraries; only this user can write to it, since they are run."""
    try:
        # RuntimeError where the user has no home, as in some containers.
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


def processor() -> str:
    """What determines the compiler's "native"."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kinds = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))
