"""The GPU tests stay importable: they are collected, and skipped, where there is no GPU."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from tests.shared import ROOT


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_gpu_tests_are_collected_and_skipped_with_a_reason() -> None:
    words = ["-m", "pytest", "-n0", "-rs", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counts = re.findall(r"^SKIPPED \[(\d+)\]", done.stdout, re.MULTILINE)
    assert sum(map(int, counts)) >= 40, done.stdout
    assert "passed" not in done.stdout
    for reason in ("needs 1 CUDA GPU, torch sees 0", "needs 2 CUDA GPUs, torch sees 0"):
        assert reason in done.stdout


def test_every_test_that_needs_a_gpu_is_among_them() -> None:
    asked = re.compile(r"skipif\(\s*not torch\.cuda|mark\.gpu")
    elsewhere = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.parent.name != "gpu" and path.name != "test_gpu_tests.py"
        if asked.search(path.read_text("utf-8"))
    ]
    assert elsewhere == []
