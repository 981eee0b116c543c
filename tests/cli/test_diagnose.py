"""`keel diagnose`: text, JSON, errors; what others wrote reaches the terminal as escapes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from keel.cli.main import main
from tests.analysis.written_runs import completion, written_run

HOSTILE = "\x1b[2J\x9b31m\u202e[bold]\r\nerror: fake\x07"


def repeating(folder: Path, text: str = "1 1 1", name: str = "proxy") -> Path:
    """A run whose completions repeat themselves, and whose reward is constant."""
    rollouts = {
        step: [
            completion(
                g, float(i % 2), (7,) * min(24, step) + tuple(range(50, 50 + max(0, 24 - step))),
                completion=text, prompt=text,
            )
            for g in range(4) for i in range(4)
        ]
        for step in range(1, 31, 3)
    }  # fmt: skip
    columns = {
        "reward": np.full(30, 0.5),
        "frac_reward_zero_std": 0.1,
        f"rewards/{name}/mean": np.linspace(0.9, 0.1, 30),
    }
    return written_run(folder, columns, rollouts).folder.path


def test_text_has_a_block_for_each_diagnosis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", str(repeating(tmp_path / "run"))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("warning: Completions repeat themselves more and more (repetition; rl, ")
    assert '  sample  step 28, completion 0, reward 0: "1 1 1"' in out
    assert "  change  rl.optimizer.learning_rate = 3e-07 (now 1e-06): smaller updates" in out


def test_json_holds_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(repeating(tmp_path / "run")), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["condition"] == "repetition"
    assert found["samples"][0] == {"step": 28, "row": 0}
    assert found["figures"]["repetition_last"] > 0.3
    keys = "condition title stage first_step last_step severity evidence figures samples causes"
    assert set(found) == {*keys.split(), "changes"}


def test_a_run_without_problems_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = written_run(tmp_path / "run", {"reward": np.linspace(0, 1, 5)}).folder.path
    assert main(["diagnose", str(run)]) == 0
    assert capsys.readouterr().out == "no problems found\n"
    assert main(["diagnose", str(run), "--json"]) == 0
    assert capsys.readouterr().out == "[]\n"


def test_hostile_text_is_inert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = repeating(tmp_path / "run", text=HOSTILE)
    assert main(["diagnose", str(run)]) == 0
    text = capsys.readouterr().out
    assert "31m" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    assert not any(line.startswith("error: fake") for line in text.splitlines())
    assert main(["diagnose", str(run), "--json"]) == 0
    assert capsys.readouterr().out.isascii()


def test_a_damaged_rollouts_file_is_an_error_of_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = repeating(tmp_path / "run")
    path = next((run / "rollouts").iterdir())
    path.write_bytes(path.read_bytes()[:100])
    assert main(["diagnose", str(run)]) == 2
    assert path.name in capsys.readouterr().err
