"""Stored rollouts scored again: the same reward agrees, another differs, with its columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.cli.main import main
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.rescoring import rescore
from keel.training.run import train
from keel.types import KeelError
from tests.training.small import small

FUNCTIONS = """
def halved(completions, answer, prompts):
    assert all(prompts)
    return [0.0 if c == a else len(c) / 2 for c, a in zip(completions, answer)]

def digits(completions, level):
    return [float(one) for one in level]

def broken(completions):
    raise ValueError("no such thing")
"""

THINKING = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Rows with a column that only their file has."""
    folder = tmp_path_factory.mktemp("rescoring")
    rows = [{"q": f"{n}>", "answer": str(n), "level": n % 3} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "f.py").write_text(FUNCTIONS)
    task = f"tasks=[{{path='{folder}/rows.jsonl', prompt='{{q}}'}}]"
    return train(small("rollouts_every=1", task), folder / "run")


def test_the_same_reward_gives_what_is_stored(run: RunFolder) -> None:
    (found,), notes = rescore(run.path, ["place_match"])
    summary = found.summary()
    assert notes == []
    assert (summary["against"], summary["completions"]) == ("reward/place_match", 64)
    assert summary["mean"] == summary["stored_mean"]
    assert summary["became_right"] == summary["became_wrong"] == 0
    assert found.most_different(5) == []


def test_prompts_and_thoughts_of_a_chat_template(tmp_path: Path) -> None:
    """Whose generation prompt begins a thought, so that what is not closed is no answer."""
    rows = [{"q": f"{n} + 1?", "answer": str(n % 10), "level": n % 3} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "f.py").write_text(FUNCTIONS)
    recipe = small(
        "rollouts_every=1", f"tasks=[{{path='{tmp_path}/rows.jsonl', prompt='{{q}}'}}]",
        "model.build.alphabet=none", "model.build.tokenizer=bytes", "rollout.max_tokens=30",
        f"model.chat_template={THINKING}", "rewards.functions=[{function='numeric_match'}]",
    )  # fmt: skip
    run = train(recipe, tmp_path / "run")
    assert load(run.path).rollouts(1)[0]["prompt"][0]["role"] == "user"
    (found, levels), notes = rescore(run.path, ["numeric_match", f"{tmp_path}/f.py:digits"])
    assert notes == []
    assert [row.new for row in found.rows] == [row.stored for row in found.rows]
    assert {row.new for row in levels.rows} == {0.0, 1.0, 2.0}


def test_options_of_a_reward(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    score = ["rollouts", "score", str(run.path), "--reward", "length", "--step", "1"]
    assert main([*score, "--set", "target=2", "--set", "width=100", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["rewards"]
    lengths = [len(one["tokens"]) for one in load(run.path).rollouts(1)]
    assert result["mean"] == pytest.approx(sum(min(0, 2 - n) for n in lengths) / 1600)
    with pytest.raises(KeelError, match="targett"):
        rescore(run.path, ["length"], options=["targett=2"])


def test_another_reward_with_columns_of_the_data(run: RunFolder) -> None:
    names = [f"{run.path.parent}/f.py:{name}" for name in ("halved", "digits")]
    (found, columns), _ = rescore(run.path, names, step=2)
    records = load(run.path).rollouts(2)
    assert [row.stored for row in found.rows] == [one["reward"] for one in records]
    expected = [
        0.0 if one["completion"] == one["expected"] else len(one["completion"]) / 2
        for one in records
    ]
    assert [row.new for row in found.rows] == expected
    assert [row.new for row in columns.rows] == [int(r["prompt"][:-1]) % 3 for r in records]
    changed = [
        (stored >= 1, new >= 1)
        for stored, new in zip([r["reward"] for r in records], expected, strict=True)
    ]
    summary = found.summary()
    assert summary["became_right"] == changed.count((False, True)) > 0
    worst = found.most_different(3)
    assert worst[0].difference == max(row.difference for row in found.rows)


def test_without_the_data_the_answer_is_left(run: RunFolder, tmp_path: Path) -> None:
    rows, name = run.path.parent / "rows.jsonl", f"{run.path.parent}/f.py:halved"
    (before,), _ = rescore(run.path, [name], step=1)
    content = rows.read_text()
    rows.write_text(content.replace(">", ">>"))
    try:
        (after,), (note,) = rescore(run.path, [name], step=1)
    finally:
        rows.write_text(content)
    assert "columns are the stored answer alone" in note
    assert [row.new for row in after.rows] == [row.new for row in before.rows]


@pytest.mark.parametrize(
    ("reward", "step", "reason"),
    [
        ("broken", 1, r"reward 'broken' at step 1.* raised ValueError"),
        ("broken", 9, "no rollouts of step 9"),
        ("none", 1, "none"),
    ],
)
def test_what_cannot_be_scored(reward: str, step: int, reason: str, run: RunFolder) -> None:
    with pytest.raises(KeelError, match=reason):
        rescore(run.path, [f"{run.path.parent}/f.py:{reward}"], step=step)


def test_the_commands(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["show", str(run.path)], [str(run.path)]):
        assert main(["rollouts", *words, "--step", "2", "-n", "1"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert "16 completions of 4 prompts" in shown[0]
    score = ["rollouts", "score", str(run.path), "--reward", f"{run.path.parent}/f.py:halved"]
    assert main([*score, "-n", "2"]) == 0
    printed = capsys.readouterr().out
    assert "halved against the stored reward: 64 completions" in printed
    assert "became right" in printed
    assert len([line for line in printed.splitlines() if line.startswith("  step ")]) == 2
    assert main([*score, "--step", "1", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["rewards"]
    assert (result["reward"], result["completions"], len(result["rows"])) == ("halved", 16, 5)
