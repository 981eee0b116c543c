"""reasoning-gym, in its own process: real data sets, real hangs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keel.data.gym import PREFIX, GymProcess, GymTask, gym_installed, gym_names
from keel.data.mixture import build_task, catalogue
from keel.data.splits import split_of
from keel.data.tasks import Presentation
from keel.types import KeelError, Split
from tests.data.made import completion, source
from tests.platform.processes import descendants, gone
from tests.shared import needs_bubblewrap

pytestmark = [
    needs_bubblewrap,
    pytest.mark.skipif(not gym_installed(), reason="reasoning-gym is not installed"),
]

NO_GOLD = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Data sets that know how to judge an answer but give none."""


@pytest.fixture(scope="module")
def process() -> GymProcess:
    return GymProcess()


def make(name: str, process: GymProcess, seed: int = 0, **options: object) -> GymTask:
    return GymTask(PREFIX + name, seed, Presentation(), options, process)


@pytest.mark.slow
def test_every_data_set_gives_prompts_and_knows_its_own_answers(process: GymProcess) -> None:
    names = [name for name in gym_names(process) if name != "composite"]
    assert len(names) > 90
    for name in names:
        task = make(name, process)
        prompt = task.prompt("train", 0)
        assert prompt.id == f"reasoning_gym:{name}/train/0"
        assert split_of(str(prompt.columns["question"])) == "train"
        gold = task.gold(prompt)
        assert (gold is None) == (name in NO_GOLD)
        if gold is not None:
            assert task.score(prompt, completion(gold)) == 1.0, name


@pytest.mark.parametrize("name", ["chain_sum", "letter_counting"])
def test_splits_and_seeds(name: str, process: GymProcess) -> None:
    task = make(name, process, seed=1)
    questions: dict[Split, list[str]] = {}
    for split in ("train", "validation"):
        questions[split] = [str(task.prompt(split, i).content) for i in range(30)]
        assert {split_of(q) for q in questions[split]} == {split}
        assert len(set(questions[split])) > 20
    again = make(name, process, seed=1)
    backward = [str(again.prompt("train", i).content) for i in range(29, -1, -1)]
    assert backward[::-1] == questions["train"]
    other = make(name, process, seed=2)
    assert [str(other.prompt("train", i).content) for i in range(30)] != questions["train"]


def test_prompts_far_on_come_from_other_blocks(process: GymProcess) -> None:
    task = make("chain_sum", process)
    assert task.prompt("train", 10**7).content != task.prompt("train", 10**7 + 2048).content
    assert task.prompt("train", 10**7) == make("chain_sum", process).prompt("train", 10**7)


def test_prompts_do_not_depend_on_the_hash_seed_or_shared_streams(process: GymProcess) -> None:
    name = "isomorphic_strings"  # draws from sets, whose order Python shuffles in each process
    code = (
        "from keel.data.mixture import build_task; from keel.config.sources import TaskSource;"
        f"t = build_task(TaskSource(name='reasoning_gym:{name}'), 0);"
        "print([t.prompt('train', i).content for i in range(3)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    random.seed(99)
    before = random.getstate()
    task = make(name, process)
    assert printed.stdout.strip() == str([task.prompt("train", i).content for i in range(3)])
    assert random.getstate() == before


def test_its_own_scorer_judges(process: GymProcess) -> None:
    task = make("countdown", process, seed=3)
    prompt = task.prompt("train", 17)
    gold = task.gold(prompt)
    assert gold is not None
    assert task.score(prompt, completion(f"  {gold}\n")) == 1.0
    assert task.score(prompt, completion(f"<think>1+1</think><answer>{gold}</answer>")) == 1.0
    opened = replace(prompt, opening="<think>\n")
    assert task.score(opened, completion(f"1+1</think>{gold}")) == 1.0
    assert task.score(opened, completion(f"<answer>{gold}</answer>")) < 1.0
    partial = task.score(prompt, completion("1 + 1"))
    assert 0.0 <= partial < 1.0
    # A task made again scores a prompt that it did not draw itself.
    assert make("countdown", process, seed=3).score(prompt, completion(gold)) == 1.0


@pytest.mark.parametrize("name", ["countdown", "chain_sum", "mini_sudoku", "simple_integration"])
def test_an_odd_answer_scores_nothing_much(name: str, process: GymProcess) -> None:
    task = make(name, process)
    prompt = task.prompt("train", 0)
    for answer in ("", "((((", "\x00", "1/0", "\ud800", "x" * 50_000, "None", "exit()"):
        assert 0.0 <= task.score(prompt, completion(answer)) < 0.5


def test_an_answer_to_halting_is_the_items_own(process: GymProcess) -> None:
    task = make("game_of_life_halting", process)
    found = set()
    for index in range(8):
        prompt = task.prompt("train", index)
        gold = str(task.gold(prompt))
        found.add(gold)
        for answer in ("True", "False", "garbage"):
            assert task.score(prompt, completion(answer)) == float(answer == gold)
    assert found == {"True", "False"}


def test_an_answer_that_hangs_its_scorer_is_wrong(
    process: GymProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.data.gym.SCORE_SECONDS", 1.0)
    task = make("rubiks_cube", process)
    prompt = task.prompt("train", 0)
    process.ask(60.0, op="names")
    before = process.process.child
    # Twenty million moves, which the scorer makes one by one.
    assert task.score(prompt, completion("F20000000")) == 0.0
    assert task.score(prompt, completion("F1")) > 0.0
    assert process.process.child is before  # only the fork that scored it was ended
    assert task.prompt("train", 0) == prompt


def test_the_process_sees_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    process = GymProcess()
    process.ask(60.0, op="names")
    assert process.process.child is not None
    pid = process.process.child.pid
    inside = descendants(pid)
    assert len(inside) == 2  # the first of the process space, and the worker
    for number in (pid, *(one.pid for one in inside)):
        environment = Path(f"/proc/{number}/environ").read_bytes()
        assert b"secret" not in environment
        assert b"PYTHONHASHSEED=0" in environment
    del process
    assert gone(inside) == set()


def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KeelError, match=r"in a sandbox only: .*apt install bubblewrap") as error:
        build_task(source("reasoning_gym:chain_sum"), seed=0)
    assert "\n" not in str(error.value)
    assert "trusted" not in str(error.value)
    # The list of tasks says so too, and names the others.
    rows = dict(catalogue())
    assert "sort_digits" in rows
    assert "apt install bubblewrap" in rows["reasoning_gym:NAME"]


@pytest.mark.parametrize("words", ["No permissions to create new namespace", ""])
def test_refuses_with_bubblewraps_message_if_it_fails(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "bwrap"
    stand_in.write_text(f"#!/bin/sh\n[ '{words}' ] && echo 'bwrap: {words}' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KeelError, match=f"in a sandbox only: .*{words or 'exit status 1'}"):
        build_task(source("reasoning_gym:chain_sum"), seed=0)


def test_without_a_filter_of_system_calls_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.platform.sandbox.computing_filter", lambda: None)
    with pytest.raises(KeelError, match="no filter of system calls"):
        GymProcess().ask(60.0, op="names")


def test_options_reach_the_data_set(process: GymProcess) -> None:
    task = make("chain_sum", process, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    for i in range(20):
        assert task.prompt("train", i).columns["metadata"]["num_terms"] == 2
    mixed = make(
        "composite",
        process,
        datasets=[{"name": "gcd", "weight": 1.0}, {"name": "lcm", "weight": 1.0}],
    )
    sources = {mixed.prompt("train", i).columns["metadata"]["source_dataset"] for i in range(20)}
    assert sources == {"gcd", "lcm"}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("chain_sums", {}, "unknown reasoning-gym data set 'chain_sums': did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "unknown option 'min_term': did you mean 'min_terms'?"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "reasoning-gym refuses it: "),
        ("chain_sum", {"seed": 2}, "seed is not an option"),
    ],
)
def test_wrong_names_and_options(
    name: str, options: dict[str, object], says: str, process: GymProcess
) -> None:
    with pytest.raises(KeelError) as error:
        GymTask(PREFIX + name, 0, Presentation(), options, process).prompt("train", 0)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_its_absence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KeelError, match=r"pip install -e .*\[tasks\]'"):
        build_task(source("reasoning_gym:chain_sum"), seed=0)
    names = [name for name, _ in catalogue()]
    assert "sort_digits" in names
    assert not any(name.startswith(PREFIX) for name in names)


def test_the_catalogue_has_a_line_for_each() -> None:
    rows = dict(catalogue())
    assert {"sort_digits", "jsonl", "reasoning_gym:chain_sum"} <= set(rows)
    assert all(line and "\n" not in line for line in rows.values())
