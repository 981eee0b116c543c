"""`keel check` as a process: its codes, its text, its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.cli.check import lines
from keel.cli.main import main
from keel.preflight.check import Report, check

TINY = ("tiny", "evaluation.prompts=4", "rollout.prompts_per_step=4", "threads=1")


def test_as_a_process(tmp_path: Path) -> None:
    """A wrong name is reported without waiting for torch."""
    code = "import sys; from keel.cli.main import main; code = main(['check', 'tinny']); "
    code += "print('torch' in sys.modules); sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "did you mean 'tiny'?" in done.stderr


def test_a_finding_is_three_lines() -> None:
    report = check(TINY[0], [*TINY[1:], "optimizer.warmup_steps=99"], runs=False)
    printed = list(lines(report))
    at = printed.index("1. warning: the warm-up takes the whole stage [warm-up-never-ends]")
    what = printed[at : at + 3]
    assert what[1].startswith("   warm-up of 99 steps in a stage of 12")
    assert what[2].startswith("   optimizer.warmup_steps: set it under 12")


@pytest.mark.slow
def test_report_is_printed_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As JSON with a finding, and as text without one."""
    monkeypatch.chdir(tmp_path)
    reports: list[Report] = []

    def kept(*arguments: Any, **names: Any) -> Report:
        reports.append(check(*arguments, **names))
        return reports[0]

    monkeypatch.setattr("keel.preflight.check.check", kept)
    assert main(["check", *TINY, "rollout.max_refills=3", "--json", "--price", "2"]) == 1
    out = capsys.readouterr()
    assert out.err == ""
    report = json.loads(out.out)
    assert set(report) == {"recipe", "stages", "findings", "total", "seconds"}
    (found,) = report["findings"]
    assert set(found) == {"kind", "severity", "what", "evidence", "key", "fix"}
    assert found["key"] == "rollout.max_refills"
    (stage,) = report["stages"]
    assert stage["figures"]["sampled completions"] == 16
    assert set(stage["measured"]) == {"memory", "step", "seconds", "cost"}
    assert set(report["total"]) == {"seconds", "cost"}
    assert list(tmp_path.iterdir()) == []

    sound = replace(reports[0], findings=())
    monkeypatch.setattr("keel.preflight.check.check", lambda *_, **__: sound)
    monkeypatch.setattr("keel.preflight.trial.TrialProcess", nullcontext)
    assert main(["check", *TINY, "--price", "2"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("tiny: checked in ")
    assert printed[-1] == "nothing found"
    assert any(line.startswith("  peak memory on cpu: ") for line in printed)
    steps = [line for line in printed if line.startswith("  all steps: at most about ")]
    assert all(", cost 0.0" in line for line in steps)
    assert steps
