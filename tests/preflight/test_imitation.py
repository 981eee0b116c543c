"""`keel check` of examples to imitate: columns, steps, and what is too long."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.platform.files import write_jsonl
from keel.preflight.check import check
from tests.soak.cases import TURNS, imitated
from tests.training import judged


@pytest.mark.slow
def test_check_reads_the_sets_and_runs_their_longest(tmp_path: Path) -> None:
    stage = imitated(tmp_path, num_train_epochs=2, max_tokens=9)
    report = check(judged.recipe(stage, chat_template=TURNS).model_dump(exclude_none=True))
    (found,) = report.stages
    assert found.figures["columns of jsonl:train"] == "messages"
    assert found.figures["columns of jsonl:texts#2"] == "text"
    assert found.figures["long examples of jsonl:train"].startswith("25 examples cut to 9")
    blocks = found.figures["train blocks"]
    assert isinstance(blocks, int)
    assert (found.figures["steps"], found.figures["epochs"]) == (-(-2 * blocks // 3), 2.0)
    assert found.measured["seconds"] >= 0
    assert report.findings == ()


def test_check_names_the_columns_that_were_meant(tmp_path: Path) -> None:
    rows = [{"question": f"{at}", "answer": f"{at}", "id": at} for at in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"path": str(tmp_path / "rows.jsonl")}
    stage = {"stage": "sft", "steps": 2, "batch_size": 4, "data": [source]}
    (finding,) = check({"model": judged.MODEL, "stages": [stage]}, runs=False).findings
    assert 'columns = {prompt = "question", completion = "answer"}' in finding.evidence
    named = {**source, "columns": {"prompt": "question", "completion": "answer"}}
    (found,) = check(
        {"model": judged.MODEL, "stages": [{**stage, "data": [named]}]}, runs=False
    ).stages
    assert found.figures["columns of jsonl:rows"] == (
        "question (prompt), answer (completion); not read: id"
    )


def test_stop_rule_of_no_figure_of_an_sft_stage(tmp_path: Path) -> None:
    rows = [{"prompt": f"{at}", "completion": f"{at}"} for at in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rules = [{"metric": f"eval/{name}"} for name in ("loss", "los", "accuracy")]
    stage = {"stage": "sft", "steps": 2, "batch_size": 4, "stop_when": rules}
    stage |= {"data": [{"path": str(tmp_path / "rows.jsonl")}]}
    findings = check({"model": judged.MODEL, "stages": [stage]}, runs=False).findings
    assert [(one.kind, one.key[-8:]) for one in findings] == [
        ("never-stops", "1.metric"), ("never-stops", "2.metric"),
    ]  # fmt: skip
    assert "did you mean 'eval/loss'?" in findings[0].evidence


@pytest.mark.parametrize(
    ("rows", "keys", "evidence"),
    [
        ([{"text": ""}] * 9, {}, "no row of 9 can be read"),
        ([{"text": "0" * 30}] * 9, {}, "none of the 9 first examples fits 8 tokens"),
        ([{"text": "0"}] * 9, {"split": "train[9:]"}, "no rows: the data set is empty"),
        ([{"text": "0"}] * 6 + [{"text": ""}] * 3, {}, "3 of 9"),
    ],
)
def test_a_stream_that_cannot_be_used_is_found(
    rows: list[dict[str, str]], keys: dict[str, str], evidence: str, tmp_path: Path
) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", rows)
    source: dict[str, Any] = {"name": "datasets", "path": str(tmp_path / "set")}
    source |= {"bad_rows": "quarantine", "options": {"streaming": True, **keys}}
    stage: dict[str, Any] = {
        "stage": "sft",
        "steps": 2,
        "batch_size": 4,
        "max_tokens": 8,
        "overlong": "drop",
    }
    stage |= {"data": [source], "evaluation": {"rows": 0}}
    (finding,) = check({"model": judged.MODEL, "stages": [stage]}, runs=False).findings
    assert evidence in finding.evidence


def sets(folder: Path, *many: list[dict[str, str]], **keys: Any) -> dict[str, Any]:
    """A stage on some sets, each a file; the first alone has a validation split by its rows."""
    data = [
        {"path": judged.write(folder / f"{at}.jsonl", rows), **({} if at else keys)}
        for at, rows in enumerate(many)
    ]
    return {"stage": "sft", "num_train_epochs": 2, "batch_size": 8, "data": data}


def numbers(*span: int) -> list[dict[str, str]]:
    return [{"prompt": f"{at}", "completion": "1"} for at in range(*span)]


def test_findings_of_the_sets_of_a_stage(tmp_path: Path) -> None:
    """Leaks between its sets, no validation examples, too few rows, and a warm-up of all steps."""
    held = judged.write(tmp_path / "held.jsonl", numbers(95, 105))

    def kinds(*many: list[dict[str, str]], **keys: Any) -> list[tuple[str, str]]:
        rates = keys.pop("optimizer", {})
        stage = {**sets(tmp_path, *many, **keys), "optimizer": rates}
        report = check({"model": judged.MODEL, "stages": [stage]}, runs=False)
        return [(one.kind, one.key) for one in report.findings]

    assert kinds(numbers(60), numbers(100, 160)) == []
    leak = ("trained-on-validation", "data.1.validation_fraction")
    assert kinds(numbers(60), numbers(100, 160), validation_path=held) == [leak]
    assert kinds(numbers(60), numbers(100, 104)) == []
    assert kinds(numbers(4), numbers(100, 104)) == [("few-rows", "data.0.path")]
    one_prompt = [{"prompt": "7", "completion": f"{at}"} for at in range(20)]
    assert kinds(numbers(60), one_prompt) == [("no-validation", "data.1.validation_path")]
    warmup = {"warmup_ratio": 1.0}
    never = [("warm-up-never-ends", "optimizer.warmup_ratio")]
    assert kinds(numbers(60), optimizer=warmup) == never
    never = [("warm-up-never-ends", "optimizer.warmup_steps")]
    assert kinds(numbers(60), optimizer={"warmup_steps": 99}) == never


@pytest.mark.parametrize("keeps", [True, False])
def test_thoughts_that_a_template_drops_are_found(keeps: bool, tmp_path: Path) -> None:
    """As DeepSeek-R1's does, of the last answer too."""
    shown = "m.content" if keeps else "m.content.split('</think>')[-1]"
    template = TURNS.replace("{{ m.content }}", "{{ " + shown + " }}")
    model = {"build": {**judged.MODEL["build"], "alphabet": "0123456789> <think/"}}
    rows = [
        {"messages": [{"role": "user", "content": f"{at}"},
                      {"role": "assistant", "content": "<think>12 3</think>4"}]}
        for at in range(20)
    ]  # fmt: skip
    source = {"path": judged.write(tmp_path / "rows.jsonl", rows)}
    stage = {"stage": "sft", "steps": 2, "batch_size": 4, "data": [source]}
    recipe = {"model": {**model, "chat_template": template}, "stages": [stage]}
    kinds = [one.kind for one in check(recipe, runs=False).findings]
    assert kinds == ([] if keeps else ["thoughts-dropped"])
