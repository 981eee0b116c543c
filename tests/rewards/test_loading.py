from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.config.sources import RewardSource
from keel.rewards import load_reward
from keel.rewards.registry import NamedReward
from keel.types import KeelError
from tests.rewards.made import named

HERE = "tests.rewards.functions"


def load(function: str, **keys: Any) -> NamedReward:
    return load_reward(RewardSource.model_validate({"function": function, **keys}))


def test_by_module_by_file_and_built_in(tmp_path: Path) -> None:
    by_module = load(f"{HERE}:by_length", weight=0.5)
    assert (by_module.name, by_module.source.weight, by_module.is_async) == (
        "by_length",
        0.5,
        False,
    )
    file = Path(__file__).with_name("functions.py")
    assert load(f"{file}:slow_async", name="slow").name == "slow"
    assert load(f"{file}:slow_async").is_async
    assert load("exact_match").required == ("completions", "answer")
    assert load("task").function is None


def test_two_files_of_one_name_do_not_meet(tmp_path: Path) -> None:
    for folder, value in (("a", 1.0), ("b", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def f(completions): return [{value}]\n")
    values = [load(f"{tmp_path}/{folder}/mine.py:f").function for folder in "ab"]
    assert [f(completions=[""]) for f in values if f] == [[1.0], [2.0]]


def test_a_file_imports_modules_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_rewards_helper.py").write_text("def half(n):\n    return n / 2\n")
    (tmp_path / "own_rewards.py").write_text(
        "from beside_rewards_helper import half\n"
        "def score(completions, **_):\n"
        "    import beside_rewards_helper as later\n"
        "    return [later.half(len(c)) for c in completions]\n"
    )
    found = load_reward(RewardSource(function=f"{tmp_path}/own_rewards.py:score"))
    assert found.function is not None
    assert found.function(completions=["abc"]) == [1.5]


def test_signature_decides_the_arguments() -> None:
    def plain(prompts: Any, answer: Any, level: Any = None) -> list[float]:
        return []

    reward = named(plain, options={"level": 3})
    assert reward.required == ("prompts", "answer")
    assert not reward.wants("level")
    assert not reward.wants("completions")
    assert load(f"{HERE}:by_length").wants("anything")

    class Judge:
        async def __call__(self, completions: Any) -> list[float]:
            return []

    judge = named(Judge())
    assert (judge.name, judge.is_async, judge.required) == ("Judge", True, ("completions",))


@pytest.mark.parametrize(
    ("function", "options", "says"),
    [
        ("exact_matches", {}, "did you mean 'exact_match'?"),
        (f"{HERE}:by_lenght", {}, "did you mean 'by_length'?"),
        (f"{HERE}:not_a_function", {}, "is a int, not a function"),
        (f"{HERE}:positional", {}, "remove the /"),
        (f"{HERE}:scaled", {"facto": 2}, "unknown option 'facto': did you mean 'factor'?"),
        (f"{HERE}:scaled", {"completions": 2}, "comes from the run"),
        ("tests.rewards.nowhere:f", {}, "there is no module 'tests.rewards.nowhere'"),
        ("nowhere.py:f", {}, "there is no file 'nowhere.py'"),
        ("length", {}, "the option 'target' is not set"),
        ("length", {"target": 0}, "target = 0"),
        ("repetition", {"n": 0}, "n = 0: give at least 1"),
        ("repetition", {"max_penalty": -1.0}, "max_penalty = -1: give at least 0"),
        ("length", {"target": "many"}, "reward 'length': "),
        ("format_match", {}, "exactly one of the options regex and tags"),
        ("format_match", {"regex": "a", "tags": ["a"]}, "exactly one of the options regex and"),
        ("format_match", {"regex": "("}, "is not a valid regular expression"),
        ("format_match", {"tags": []}, "tags = []: name at least one"),
        ("format_match", {"tags": "answer"}, 'tags = "answer": give a list, ["answer"]'),
        *(
            ("numeric_match", {"tolerance": wrong}, f"tolerance = {wrong:g}: give a number of at l")
            for wrong in (-0.5, float("inf"))
        ),
        ("exact_match", {"normalized": True}, "did you mean 'normalised'?"),
        ("task", {"x": 1}, "unknown option 'x'"),
        (":f", {}, "write module:function"),
    ],
)
def test_wrong_names_and_options(function: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(KeelError) as error:
        load(function, options=options)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def f(:", "SyntaxError"),
        ("raise RuntimeError('a\\nb')", "RuntimeError: a b"),
        ("import sys; sys.exit(2)", "SystemExit: 2"),
        ("import not_there_at_all", "No module named 'not_there_at_all'"),
    ],
)
def test_files_that_fail_as_they_load(code: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(KeelError) as error:
        load(f"{tmp_path}/mine.py:f")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
