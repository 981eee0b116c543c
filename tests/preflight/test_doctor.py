"""`keel doctor`: on this machine as it is, and on machines that lack things."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import resource
import shutil
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from keel.cli.main import main
from keel.models import kernels
from keel.platform.extras import EXTRAS, install_command
from keel.preflight.doctor import MachinePart, examine

SECONDS = 3.0
"""Of processor time, with the kernels in the cache; most of it is the import of torch."""


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    kernels._loaded.cache_clear()
    yield
    kernels._loaded.cache_clear()


def parts() -> dict[str, MachinePart]:
    return {part.name: part for part in examine()}


def test_command_reports_this_machine_in_seconds(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "keel", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = {part["name"]: part for part in json.loads(done.stdout)}
    assert found["Python"]["found"] == platform.python_version()
    assert torch.__version__ in found["torch"]["found"]
    assert str(tmp_path) in found["disk"]["effect"]
    assert found["C compiler"]["there"] is (shutil.which("cc") is not None)
    assert {f"[{name}]" for name in EXTRAS} <= found.keys()
    assert found["[lora]"]["there"] is (importlib.util.find_spec("peft") is not None)
    assert any(name.startswith("GPU") for name in found)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < SECONDS


@pytest.mark.usefixtures("nothing_loaded")
def test_what_a_machine_lacks_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(EXTRAS, "lora", (("numpy", "no-such-package"), ""))
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    monkeypatch.setattr(webbrowser, "get", no_browser)
    found = parts()
    assert not any(found[n].there for n in ("C compiler", "sandbox", "[lora]", "Triton", "browser"))
    assert found["C compiler"].add == "apt install gcc libc6-dev"
    assert found["sandbox"].add == "apt install bubblewrap"
    assert found["[lora]"].add == install_command("lora")
    assert re.fullmatch(r"numpy [\d.]+, no-such-package missing", found["[lora]"].found)
    assert found["Triton"].add == "pip install triton"
    assert "ssh -L" in found["browser"].effect


def no_browser() -> None:
    raise webbrowser.Error


@pytest.mark.usefixtures("nothing_loaded")
def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    part = parts()["C compiler"]
    assert not part.there
    assert "does not compile causal, decode, decode_bf16, head, sample, steps" in part.found


def test_each_gpu_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (2**30, (index + 1) * 2**34))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"card {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7 + index, 5))
    found = parts()
    assert found["GPU 0"].found == "card 0, 1.0 of 16.0 GiB free"
    assert "slowly" in found["GPU 0"].effect
    assert found["GPU 1"].found == "card 1, 1.0 of 32.0 GiB free"
    assert found["GPU 1"].effect == "bfloat16"
    assert "without a GPU" not in found["Triton"].effect


def test_a_cpu_build_with_a_driver_is_a_lack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    part = parts()["torch"]
    assert not part.there
    assert part.add.startswith("pip install --force-reinstall torch")


def test_text_has_one_line_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == ["there", "not there"]
    assert len(lines) == 2 + len(examine())
