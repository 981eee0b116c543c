"""The pages on rewards: their recipes load, and the tables of options are those of the rewards."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.graders.unit_tests import Status
from keel.models.reward import reward_model_from
from keel.rewards.registry import (
    BUILT_IN,
    MADE,
    RESERVED,
    TASK,
    RewardContext,
    load_reward,
    options_of,
)
from keel.rewards.scorer import Scorer
from keel.training.stages.rl import RLStage
from keel.types import Prompt
from tests.rewards.learned import policy
from tests.shared import ROOT, needs_bubblewrap
from tests.test_docs import fences

GUIDE = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "reward-reference.md").read_text(encoding="utf-8")
BASE = "[model.build]\nhidden_size = 32\nlayers = 1\nheads = 2\n"
REST = '[[tasks]]\nname = "addition"\n'
MODELS = {"my-reward-model": "outcome", "my-process-model": "process"}
"""The model folders that the pages name."""
COLUMNS = (
    *("answer", "tests", "test", "test_list", "test_setup_code", "entry_point", "prompt"),
    *("instruction_id_list", "kwargs"),
)


def snippets() -> Iterator[Any]:
    """Every TOML of the pages; those that start a sandbox need bubblewrap."""
    for number, text in enumerate(fences(GUIDE + PAGE, "toml")):
        sandboxed = re.search('function = "(code|math)"', text) and "trusted = true" not in text
        marks = [needs_bubblewrap] if sandboxed else []
        yield pytest.param(text, marks=marks, id=f"{number}-{text.split()[0]}")


def section(name: str) -> str:
    """The section of a reward."""
    found = re.search(rf"^### `{name}`\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.M)
    assert found is not None, f"docs/reward-reference.md has no ### `{name}`"
    return found[1]


def listed_options(text: str) -> dict[str, Any]:
    """The options in a section's list, by name, with their defaults."""
    rows = re.findall(r"^- `(\w+)`(?: \((`.*?`|required)\))?: ", text, re.M)
    given = {"": None, "required": ...}
    return {
        name: given[default] if default in given else tomllib.loads(f"x = {default[1:-1]}")["x"]
        for name, default in rows
    }


def options(name: str) -> dict[str, Any]:
    """The options of a reward, by name, with their defaults."""
    if name in MADE:
        fields = options_of(name).model_fields.items()
        return {key: ... if field.is_required() else field.default for key, field in fields}
    # A rule's options are the parameters that the run does not pass.
    given = (*RESERVED, "answer")
    parameters = inspect.signature(BUILT_IN[name]).parameters.values()
    return {
        p.name: ... if p.default is p.empty else p.default
        for p in parameters
        if p.name not in given
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with the models and the function that the pages name."""
    folder = tmp_path_factory.mktemp("page")
    for name, kind in MODELS.items():
        reward_model_from(policy(), kind, 0).save(folder / name)  # type: ignore[arg-type]
    (folder / "my_rewards.py").write_text("".join(fences(GUIDE, "python")), encoding="utf-8")
    return folder


@pytest.mark.parametrize("snippet", snippets())
def test_recipe_and_its_rewards_load(
    snippet: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)  # of a recipe that is not a file, paths are relative to it
    whole = "[[stages]]" in snippet
    # Keys of the recipe stand before its tables; the snippets begin with a table each.
    recipe = load_recipe(tomllib.loads(BASE + ("" if whole else REST) + snippet))
    stage = recipe.stages[-1]
    assert isinstance(stage, RLStage)
    assert stage.rewards.functions
    around = RewardContext(tokenizer=policy().tokenizer, models={}, folder=tmp_path)
    # No GPU where the tests run: which device a model is on is no matter of its options.
    sources = [
        s.model_copy(update={"options": {**s.options, "device": "cpu"}})
        if "device" in s.options
        else s
        for s in stage.rewards.functions
    ]
    functions = [load_reward(source, around) for source in sources]
    scorer = Scorer(functions, timeout=stage.rewards.timeout, on_error=stage.rewards.on_error)
    try:
        scorer.check([Prompt("t/train/0", "?", dict.fromkeys(COLUMNS, ""), "t")])
    finally:
        scorer.close()


def test_reference_has_every_built_in() -> None:
    assert re.findall(r"^### `(\w+)`$", PAGE, re.M)[0] == TASK
    for name in (TASK, *BUILT_IN, *MADE):
        assert f'function = "{name}"' in section(name)
    assert {s["function"] for s in _functions()} == {TASK, *BUILT_IN, *MADE}


@pytest.mark.parametrize("name", [n for n in (*BUILT_IN, *MADE) if n not in ("judge", "process")])
def test_page_has_every_option_and_its_default(name: str) -> None:
    assert listed_options(section(name)) == options(name)


def test_process_has_its_own_options_and_those_of_outcome() -> None:
    own = listed_options(section("process"))
    assert set(own) == {"aggregate", "separator"}
    assert listed_options(section("outcome")) | own == options("process")


def test_statuses_of_code_are_listed() -> None:
    listed = re.findall(r"^\| `(\w+)` \| [^|`]*(?:`\w+`)?[^|`]* \|$", section("code"), re.M)
    assert tuple(listed) == Status.__args__  # type: ignore[attr-defined]


def _functions() -> list[dict[str, Any]]:
    """Every reward of every snippet."""
    found: list[dict[str, Any]] = []
    for text in fences(PAGE, "toml"):
        data = tomllib.loads(text)
        for place in (data, *data.get("stages", [])):
            found += place.get("rewards", {}).get("functions", [])
    return found
