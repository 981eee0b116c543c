from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from keel.config.model import BuildModel
from keel.data.mixture import build_task, build_tasks
from keel.data.splits import split_of
from keel.data.tasks import Generated, careless, gold
from keel.types import KeelError, Prompt, Split
from tests.data.made import completion, source

NAMES = ["addition", "reverse", "sort_digits"]
SPLITS: tuple[Split, Split] = ("train", "validation")


@pytest.mark.parametrize("name", NAMES)
def test_splits_never_overlap(name: str) -> None:
    task = build_task(source(name), seed=3)
    train = {
        task.prompt("train", i).content for i in range(9_000 if name == "sort_digits" else 1_500)
    }
    validation = {
        task.prompt("validation", i).content for i in range(1_000 if name == "sort_digits" else 150)
    }
    assert not train & validation
    # And not only in these draws: the split is a property of the content.
    assert all(split_of(c) == "validation" for c in validation)
    assert {split_of(c) for c in train} == {"train"}


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_a_function_of_seed_split_and_index(name: str) -> None:
    forward = build_task(source(name), seed=3)
    backward = build_task(source(name), seed=3)
    a = [forward.prompt(split, i) for split in SPLITS for i in range(50)]
    b = [backward.prompt(split, i) for split in SPLITS[::-1] for i in range(49, -1, -1)][::-1]
    assert a == b
    assert a[17].id == f"{name}/train/17"
    other = build_task(source(name), seed=4)
    assert sum(other.prompt("train", i).content == a[i].content for i in range(50)) < 10
    assert len({p.content for p in a[:50]}) > 40
    assert forward.size("train") is None


@pytest.mark.parametrize("name", NAMES)
def test_gold_is_right_and_only_gold_scores(name: str) -> None:
    task = build_task(source(name), seed=0)
    for i in range(200):
        prompt = task.prompt("train", i)
        assert isinstance(prompt.content, str)
        gold = task.gold(prompt)
        assert gold == solve(name, prompt.content)
        assert task.score(prompt, completion(f" {gold}\n")) == 1.0
        assert task.score(prompt, completion(gold + "1")) == 0.0
        assert task.score(prompt, completion("")) == 0.0
    opened = replace(prompt, opening="<think>\n")
    assert task.score(opened, completion(f"1?</think>{gold}")) == 1.0
    assert task.score(opened, completion(gold)) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_the_default_alphabet_holds_the_prompts(name: str) -> None:
    task = build_task(source(name), seed=0)
    alphabet = set(BuildModel().alphabet)
    for i in range(200):
        prompt = task.prompt("train", i)
        assert set(str(prompt.content)) <= alphabet
        assert set(str(task.gold(prompt))) <= alphabet


def solve(name: str, question: str) -> str:
    if name == "addition":
        a, b = question.rstrip("=").split("+")
        return str(int(a) + int(b))
    body = question.rstrip(">")
    return "".join(sorted(body)) if name == "sort_digits" else body[::-1]


def test_lengths_are_those_asked_for() -> None:
    task = build_task(source("sort_digits", options={"min_digits": 5, "max_digits": 6}), seed=0)
    lengths = {len(str(task.prompt("train", i).content)) - 1 for i in range(100)}
    assert lengths == {5, 6}


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("sort_digits", {"max_digit": 5}, "did you mean 'max_digits'?"),
        ("sort_digits", {"min_digits": 9}, "max_digits = 8: give a whole number from 9"),
        ("sort_digits", {"min_digits": "4"}, "min_digits = '4'"),
        ("addition", {"digits": 0}, "digits = 0"),
        ("addition", {"digits": 40}, "at most 18"),
        ("sort_digit", {}, "did you mean 'sort_digits'?"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, object], says: str) -> None:
    with pytest.raises(KeelError) as error:
        build_task(source(name, options=options), seed=0)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_split_without_prompts_is_named() -> None:
    class Always(Generated):
        """One question only."""

        def draw(self, rng: np.random.Generator) -> tuple[str, str]:
            """Always the same."""
            return "1+1=", "2"

    task = Always("always", 0)
    assert task.prompt("train", 3).content == "1+1="
    with pytest.raises(
        KeelError, match="on the validation split, since there are too few different"
    ):
        task.prompt("validation", 0)


def test_files_mean_nothing_to_a_generator() -> None:
    for keys in ({"path": "x.jsonl"}, {"validation_path": "x.jsonl"}, {"answer": "gold"}):
        with pytest.raises(KeelError, match="drop task"):
            build_task(source("addition", **keys), seed=0)


def test_system_and_template_make_a_conversation() -> None:
    plain = build_task(source("addition"), seed=0).prompt("train", 5)
    task = build_task(source("addition", system="Be brief.", prompt="What is {prompt}"), seed=0)
    printed = task.prompt("train", 5)
    assert printed.content == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {plain.content}"},
    )
    assert task.gold(printed) == plain.columns["answer"]
    bare = build_task(source("addition", system=""), seed=0).prompt("train", 5)
    assert bare.content == ({"role": "user", "content": plain.content},)


def test_two_of_a_name_get_names_of_their_own() -> None:
    tasks = build_tasks([source("addition"), source("addition", options={"digits": 3})], seed=0)
    assert [t.name for t in tasks] == ["addition", "addition#2"]
    prompt = tasks[1].prompt("train", 4)
    assert (prompt.id, prompt.task) == ("addition#2/train/4", "addition#2")
    gold = tasks[1].gold(prompt)
    assert gold is not None
    assert tasks[1].score(prompt, completion(gold)) == 1.0
    assert tasks[1].reply(prompt, "x") is None


def test_demonstrations() -> None:
    rng = np.random.default_rng(0)
    prompt = Prompt("p", "x")
    assert gold(prompt, "0137", rng) == "0137"
    message = [careless(prompt, "0137", rng) for _ in range(2_000)]
    assert set(message) == {"0137", "7130"}
    # Binomial(2000, 0.6): standard deviation 0.011; five of them.
    assert abs(message.count("7130") / 2_000 - 0.6) < 0.055
    assert careless(prompt, "7", rng) == "7"
