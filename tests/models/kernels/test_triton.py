"""Triton's kernels without a GPU: run in its interpreter, and compiled by its own ptxas."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.shared import ROOT

triton = pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from keel.models.kernels import draw, paged, readout  # noqa: E402

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory that one program may have, by compute capability (CUDA C++ programming guide)."""
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


def interpret(marks: str) -> None:
    words = ["-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", "-m", marks]
    done = subprocess.run(
        [sys.executable, *words, "tests/models/kernels/interpreted.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout


@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    interpret("not slow")


@pytest.mark.slow
def test_more_shapes_in_the_interpreter() -> None:
    interpret("slow")


def attention(
    width: int, group: int, dtype: str, splits: int, window: int, extras: bool
) -> tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]:
    """The attention kernel with its types, constants and options, as `attend_pages` launches it."""
    size = 4 if dtype == "fp32" else 2
    shape = paged.shape_of(width, group, size)
    options = {name: shape.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"GROUP": group, "WIDTH": width, "PAGE": 64, "SPLITS": splits, "WINDOW": window}
    types = dict.fromkeys(("query", "keys", "values", "sinks"), f"*{dtype}")
    types |= {"pages": "*i32", "lengths": "*i32", "norm": "*fp32"}
    types |= {"scaling": "fp32", "softcap": "fp32"}
    types["out"] = "*fp32" if splits > 1 else f"*{dtype}"
    unused = {} if extras else {"softcap": None, "sinks": None}
    unused |= {} if splits > 1 else {"norm": None}
    return paged.attend_kernel, types, {**constants, **shape, **unused}, options


LOGITS = {
    **{"uniform": "*fp64", "token": "*i64", "scale": "fp32"},
    **dict.fromkeys(("tops", "sums", "log_prob"), "*fp32"),
}
BLOCKS = {"BLOCKS": 38, "BLOCK": draw.BLOCK}
STORE = {
    **{"pages": "*i64", "places": "*i32"},
    **dict.fromkeys(("keys", "values", "key", "value"), "*bf16"),
}
READOUT = {
    **dict.fromkeys(("scale", "softcap", "temperature"), "fp32"),
    **dict.fromkeys(("products", "log_prob", "entropy", "normaliser", "out"), "*fp32"),
    **{"tokens": "*i64", "grad": "*fp32", "grad_entropy": "*fp32"},
}
READ = {"BLOCK": readout.BLOCK, "softcap": None, "entropy": None}
KERNELS: dict[str, Any] = {
    "plain": lambda: attention(64, 7, "bf16", 1, 0, False),
    "window": lambda: attention(80, 1, "fp16", 4, 100, False),
    "shared": lambda: attention(128, 32, "bf16", 8, 0, True),
    "float32": lambda: attention(96, 8, "fp32", 1, 0, False),
    "wide": lambda: attention(256, 16, "bf16", 1, 0, True),
    "wide-float32": lambda: attention(256, 2, "fp32", 4, 100, True),
    "combine": lambda: (
        paged.combine_kernel,
        {"parts": "*fp32", "norm": "*fp32", "out": "*bf16"},
        {"WIDTH": 256, "PADDED": 256, "SPLITS": 7, "SHARES": 8},
        {"num_warps": 1},
    ),
    "store": lambda: (
        paged.store_kernel,
        STORE,
        {"HEADS": 8, "WIDTH": 256, "BLOCK": 2048},
        {},
    ),
    "blocks": lambda: (draw.block_kernel, LOGITS | {"logits": "*bf16"}, BLOCKS, {"num_warps": 8}),
    **{
        name: lambda greedy=greedy: (
            draw.pick_kernel,
            LOGITS | {"logits": "*fp32"},
            BLOCKS | {"PADDED": 64, "GREEDY": greedy},
            {"num_warps": 8},
        )
        for name, greedy in (("greedy", True), ("sampled", False))
    },
    "statistics": lambda: (readout.statistics_kernel, READOUT, READ, {"num_warps": 8}),
    "statistics-capped": lambda: (
        readout.statistics_kernel,
        READOUT,
        {"BLOCK": readout.BLOCK},
        {"num_warps": 8},
    ),
    "gradient": lambda: (readout.gradient_kernel, READOUT, READ, {"num_warps": 8}),
    "gradient-rounded": lambda: (
        readout.gradient_kernel,
        READOUT | {"out": "*bf16"},
        {"BLOCK": readout.BLOCK},
        {"num_warps": 8},
    ),
}


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_within_the_chip(
    name: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers divisible by 16 and pointers aligned, as in a launch; no register is spilled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel, types, constants, options = KERNELS[name]()
    signature = {
        word: "constexpr" if word in constants else types.get(word, "i32")
        for word in kernel.arg_names
    }
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, kind in enumerate(signature.values())
        if kind == "i32" or kind.startswith("*")
    }
    made = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED[capability]
    if kernel is paged.attend_kernel:
        # Pages come by asynchronous copies, half precision goes through the matrix units.
        assert "cp.async" in made.asm["ptx"]
        assert ("mma" in made.asm["ptx"]) == (types["keys"] != "*fp32")
    (tmp_path / "kernel.ptx").write_text(made.asm["ptx"])
    target = f"sm_{capability}{'a' if capability == 90 else ''}"
    words = ["-v", f"--gpu-name={target}", "kernel.ptx", "-o", "kernel.o"]
    done = subprocess.run([PTXAS, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = done.stdout + done.stderr
    assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"], said
    assert int(re.findall(r"Used (\d+) registers", said)[0]) * 32 * made.metadata.num_warps <= 65536
