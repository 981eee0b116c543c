"""Chat templates that show the date: a run keeps that of its first start."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from keel.cluster import ray_stage
from keel.cluster.parts import StageFactory
from keel.config.model import BuildModel
from keel.config.schema import Recipe
from keel.config.sources import RewardSource
from keel.models.build import build_tokenizer
from keel.platform.signals import Interrupted
from keel.training.evaluation import evaluate, evaluate_reward_model
from keel.training.run import train
from keel.training.setup import templates_at, time_read_by
from tests.soak.cases import IMITATE, REINFORCE, SAMPLED
from tests.soak.killing import differences
from tests.training.judged import MODEL, data, ones, recipe
from tests.training.small import Stop

FIRST, LATER = "2026-11-25T23:59:58", "2027-02-03T04:05:06"
TURNS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% else %} {% endif %}"
)
TEMPLATES = {
    "iso": "{{ strftime_now('%Y-%m-%d').replace('-', ' ') }}" + TURNS,
    # A format that is not written in the call, and one of Llama 3.2's kind.
    "variable": "{% set f = '%d' ~ ' %m' %}{% if strftime_now is defined %}"
    "{%- set date = strftime_now(f) %}{% endif %}{{ date }}" + TURNS,
    "seconds": "{{ strftime_now('%H%M%S') }}" + TURNS,
}
QUICK = {"checkpoints": {"every": 1, "keep": 9}}
JUDGED = {"sampled": SAMPLED, "steps": 2, "batch_size": 8, **QUICK}


@pytest.fixture(autouse=True)
def _clock_of_transformers() -> Any:
    """Whatever a test does, the clock of templates is the same after it."""
    before = chat_template_utils.datetime
    yield
    assert chat_template_utils.datetime is before


def at(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Fake the time that transformers gives to chat templates."""
    fake = SimpleNamespace(now=lambda: datetime.fromisoformat(when))
    monkeypatch.setattr(chat_template_utils, "datetime", fake)


def stages(*names: str, template: str) -> Recipe:
    known = {
        "sft": {**IMITATE, **QUICK},
        "reward_model": {"stage": "reward_model", **JUDGED},
        "dpo": {"stage": "dpo", **JUDGED},
        "rl": {**REINFORCE, **QUICK},
    }
    return recipe(*(known[name] for name in names), chat_template=template)


@pytest.mark.quick("('dpo',)-seconds")
@pytest.mark.parametrize(
    ("names", "template"),
    [
        (("reward_model", "rl"), "iso"),
        (("sft",), "variable"),
        (("dpo",), "seconds"),
    ],
    ids=str,
)
def test_resume_on_another_day_ends_the_same(
    names: tuple[str, ...], template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = stages(*names, template=TEMPLATES[template])
    at(monkeypatch, FIRST)
    whole = train(made, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(made, tmp_path / "again", callbacks=[Stop(1, stage=names[-1])])
    at(monkeypatch, LATER)
    again = train(None, tmp_path / "again", resume=True)
    assert differences(whole.path, again.path) == []
    assert json.loads(again.run_json.read_text())["template_time"] == FIRST
    other = train(made, tmp_path / "other")
    assert json.loads(other.run_json.read_text())["template_time"] == LATER
    assert other.metrics.read_bytes() != whole.metrics.read_bytes()


def test_evaluation_of_a_run_has_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, FIRST)
    folder = train(stages("reward_model", "rl", template=TEMPLATES["seconds"]), tmp_path / "run")
    rows = data(tmp_path, ones(8, 1), ones(4, 2))["path"]
    found = []
    for when in (FIRST, LATER):
        at(monkeypatch, when)
        judged = evaluate_reward_model(folder.path, "pairs", rows, stage="reward_model")
        found.append((evaluate(folder.path), judged.report))
    assert found[0] == found[1]


def rendered(*, completions: list[str]) -> list[float]:
    """A reward that reads its texts with a dated template, as a learned one may."""
    text = build_tokenizer(BuildModel(**MODEL["build"])).apply_chat_template(
        [{"role": "user", "content": ""}], tokenize=False, chat_template="{{ strftime_now('%Y') }}"
    )
    return [float(text)] * len(completions)


def test_reward_in_another_process_renders_with_the_runs_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at(monkeypatch, FIRST)
    times = [time_read_by(TEMPLATES["iso"]), time_read_by(TURNS)]
    at(monkeypatch, LATER)
    source = RewardSource(function=f"{rendered.__module__}:{rendered.__name__}")
    found = []
    for time in times:
        factory = StageFactory(
            list,
            list,
            list,
            0,
            Path(),
            reward_time=partial(templates_at, time),  # type: ignore
        )
        worker = ray_stage._RewardWorker(factory, {0: source}, "cpu")
        with closing(worker._loop):
            found.append(worker.call(0, {"completions": ["a"]}, [])[0])
    assert found == [[2026.0], [2027.0]]


def test_time_is_recorded_only_if_a_template_shows_it(tmp_path: Path) -> None:
    folder = train(stages("sft", template=TURNS), tmp_path / "run")
    assert "template_time" not in json.loads(folder.run_json.read_text())
