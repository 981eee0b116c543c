"""`keel doctor`: what this machine has, what that enables, and what adds the rest."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import webbrowser
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from keel.analysis.cards import GIB
from keel.models import kernels
from keel.platform.extras import EXTRAS, SOURCE, from_source, install_command, versions
from keel.platform.sandbox import Sandbox
from keel.platform.seccomp import computing_filter
from keel.platform.signals import free_memory, usable_cores
from keel.types import KeelError
from keel.version import VERSION

CPU_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""How /proc/cpuinfo names products in bfloat16, the fastest first: of x86_64 two, of ARM one."""
SCARCE = 2 * GIB
"""Bytes of memory or disk below which even a small run may fail."""


@dataclass(frozen=True, slots=True)
class MachinePart:
    """One line of the report: whether it is there, what was found, what that means, and the
    command that adds it (empty if none is needed, or none does)."""

    name: str
    there: bool
    found: str
    effect: str
    add: str = ""


def examine() -> list[MachinePart]:
    """All lines, in the order of the report. Nothing is trained or downloaded; the C kernels are
    compiled if they are not in the cache, which takes some seconds once."""
    return [
        _python(),
        _torch(),
        _cores(),
        _bfloat16(),
        _free("memory", free_memory()),
        _free("disk", shutil.disk_usage(Path.cwd()).free),
        *_gpus(),
        _compiled(),
        _triton(),
        _sandbox(),
        _browser(),
        *_extras(),
    ]


def _python() -> MachinePart:
    place = SOURCE if from_source() else kernels.SOURCES.parents[1]
    return MachinePart("Python", True, platform.python_version(), f"runs Keel {VERSION} in {place}")


def _torch() -> MachinePart:
    built = torch.version.cuda or torch.version.hip
    found = f"{torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    if built is None and shutil.which("nvidia-smi"):
        add = (
            "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        )
        effect = "a build for CPUs, with which the GPU here is not used"
        return MachinePart("torch", False, found, effect, add)
    effect = "a build for CPUs" if built is None else f"a build for GPUs (CUDA or ROCm {built})"
    return MachinePart("torch", True, found, effect)


def _cores() -> MachinePart:
    cores, threads = usable_cores(), torch.get_num_threads()
    effect = f"torch uses {threads} of them, but for a recipe with the key threads"
    add = "unset OMP_NUM_THREADS" if threads < cores and "OMP_NUM_THREADS" in os.environ else ""
    return MachinePart("cores", True, str(cores), effect, add)


def _bfloat16() -> MachinePart:
    flags = kernels.processor().split()
    found = [name for name in CPU_FLAGS if name in flags]
    if found:
        effect = 'model.autocast = "auto" times it on a CPU, and uses it if it is faster'
    else:
        effect = "on a CPU leave model.autocast as it is: float32"
    return MachinePart("bfloat16", bool(found), ", ".join(found) or "not in this CPU", effect)


def _free(what: str, free: int | None) -> MachinePart:
    if free is None:
        return MachinePart(what, True, "not known", "the system does not say")
    effect = "keel check RECIPE measures what a run needs"
    if what == "disk":
        effect = f"in {Path.cwd()}, for run folders and checkpoints"
    return MachinePart(what, free >= SCARCE, f"{free / GIB:.1f} GiB free", effect)


def _gpus() -> Iterator[MachinePart]:
    if not torch.cuda.is_available():
        mps = torch.backends.mps.is_available()
        found = "Apple's, by Metal" if mps else "none"
        effect = "float32 alone" if mps else "a run computes on the CPU"
        yield MachinePart("GPU", mps, found, effect)
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        newer = torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)
        effect = "bfloat16" if newer else "bfloat16 slowly: model.autocast = false may be faster"
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        name = torch.cuda.get_device_name(index)
        yield MachinePart(f"GPU {index}", True, f"{name}, {memory}", effect)


def _compiled() -> MachinePart:
    names = sorted(path.stem for path in kernels.SOURCES.glob("*.c"))
    compiler = kernels.compiler_command()
    made = [name for name in names if kernels.load(name) is not None]
    if len(made) == len(names):
        found = f"{compiler[0]} compiled {len(made)} kernels"
        return MachinePart("C compiler", True, found, f"cached in {kernels.cache_folder()}")
    effect = "small models run at about half the speed on a CPU"
    if not compiler:
        return MachinePart("C compiler", False, "none", effect, "apt install gcc libc6-dev")
    left = ", ".join(name for name in names if name not in made)
    return MachinePart("C compiler", False, f"{compiler[0]} does not compile {left}", effect)


def _triton() -> MachinePart:
    there, gpu = kernels.has_triton(), torch.cuda.is_available()
    found = importlib.metadata.version("triton") if there else "not installed"
    effect = "Keel's kernels for GPUs" + ("" if gpu else "; of no use without a GPU")
    return MachinePart("Triton", there, found, effect, "" if there else "pip install triton")


def _sandbox() -> MachinePart:
    what = "code and mathematics that a model wrote are graded in it"
    try:
        Sandbox()
    except KeelError as error:
        add = "" if shutil.which("bwrap") else "apt install bubblewrap"
        return MachinePart("sandbox", False, str(error), "the rewards code and math need one", add)
    if computing_filter() is None:
        what = f"the reward code runs in it, math needs x86_64 or aarch64, not {platform.machine()}"
    return MachinePart("sandbox", True, "bubblewrap works", what)


def _browser() -> MachinePart:
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        effect = "keel view prints its address (from afar: ssh -L 8765:127.0.0.1:8765 HOST)"
        return MachinePart("browser", False, "none that opens by itself", effect)
    return MachinePart("browser", True, getattr(browser, "name", ""), "keel view opens in it")


def _extras() -> Iterator[MachinePart]:
    for name, (_, effect) in EXTRAS.items():
        found = versions(name)
        there = all(found.values())
        words = [f"{package} {number or 'missing'}" for package, number in found.items()]
        add = "" if there else install_command(name)
        yield MachinePart(f"[{name}]", there, ", ".join(words), effect, add)
