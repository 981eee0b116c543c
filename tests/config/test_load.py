"""Recipes: reading, overriding, writing out, and messages about mistakes."""

from __future__ import annotations

import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from keel.config.control import ControlRecipe
from keel.config.load import load_recipe, shipped, to_toml
from keel.config.reference import markdown
from keel.config.schema import Recipe
from keel.config.stage import Optimizer
from keel.training.stages.rl import RLStage
from keel.training.stages.sft import SFTStage
from keel.types import KeelError
from tests.shared import ROOT

TINY = "tiny"
ONE_TASK = {"model": {"name": "m"}, "tasks": [{"name": "jsonl", "path": "a.jsonl"}]}


def rl(*overrides: str, recipe: str = TINY) -> RLStage:
    stage = load_recipe(recipe, overrides).stages[-1]
    assert isinstance(stage, RLStage)
    return stage


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_recipe_survives_being_written_out(name: str) -> None:
    recipe = load_recipe(name)
    assert load_recipe(tomllib.loads(to_toml(recipe))) == recipe
    assert recipe.description


def test_every_default_is_written_out() -> None:
    written = tomllib.loads(to_toml(load_recipe(TINY)))
    stage = written["stages"][0]
    assert stage["optimizer"]["betas"] == [0.9, 0.999]
    assert stage["algorithm"]["surrogate"] == {
        "kind": "clip", "low": 0.2, "high": 0.2, "dual": "none",
    }  # fmt: skip
    assert set(stage) == set(RLStage.model_fields)


def test_preset_is_below_the_recipe_with_its_loop_settings() -> None:
    stage = rl("algorithm=ppo")
    assert stage.algorithm.advantage.kind == "gae"
    assert stage.epochs == 4
    stage = rl("algorithm=dapo")
    assert stage.rollout.dynamic_sampling
    assert stage.rollout.overlong_buffer == 2  # a fifth of the budget of 10
    assert stage.algorithm.surrogate.high == 0.28  # type: ignore[union-attr]
    stage = rl("algorithm=ppo", "epochs=2", "algorithm.surrogate.high=0.3")
    assert stage.epochs == 2
    assert stage.algorithm.advantage.kind == "gae"
    assert stage.algorithm.surrogate.high == 0.3  # type: ignore[union-attr]
    assert stage.algorithm.surrogate.low == 0.2  # type: ignore[union-attr]


def test_other_preset_replaces_loop_settings_of_a_resolved_recipe() -> None:
    resolved = tomllib.loads(to_toml(load_recipe(TINY)))
    stage = load_recipe(resolved, ["algorithm=dapo"]).stages[0]
    assert isinstance(stage, RLStage)
    assert stage.rollout.dynamic_sampling
    assert stage.rollout.overlong_buffer == 2
    back = load_recipe(
        tomllib.loads(to_toml(load_recipe(TINY, ["algorithm=ppo"]))), ["algorithm=grpo"]
    )
    assert back.stages[0].epochs == 1  # type: ignore[union-attr]


def test_another_kind_replaces_the_whole_choice() -> None:
    stage = rl("algorithm.surrogate.low=0.1", "algorithm.surrogate.kind=sapo")
    assert stage.algorithm.surrogate.model_dump() == {
        "kind": "sapo", "temperature_positive": 1.0, "temperature_negative": 1.05,
    }  # fmt: skip


def test_keys_find_their_stage() -> None:
    recipe = load_recipe("quickstart", ["sft.steps=3", "steps=4", "rl.rollout.group_size=2"])
    assert [stage.steps for stage in recipe.stages] == [3, 4]
    assert recipe.stages[-1].rollout.group_size == 2  # type: ignore[union-attr]


def test_overrides_reach_the_entries_of_lists() -> None:
    data = {**ONE_TASK, "rewards": {"functions": [{"function": "length"}]}}
    stage = load_recipe(data, ["tasks.path=b.jsonl", "rewards.functions.0.weight=2"]).stages[0]
    assert isinstance(stage, RLStage)
    assert (stage.tasks[0].name, stage.tasks[0].path) == ("jsonl", f"{Path.cwd()}/b.jsonl")
    assert (stage.rewards.functions[0].function, stage.rewards.functions[0].weight) == ("length", 2)
    more = ["tasks.1.name=addition", "tasks.1.weight=3", "tasks.0.system=Add."]
    stage = load_recipe(data, more).stages[0]
    assert isinstance(stage, RLStage)
    assert [(one.name, one.weight, one.system) for one in stage.tasks] == [
        ("jsonl", 1.0, "Add."),
        ("addition", 3.0, None),
    ]
    betas = load_recipe(data, ["optimizer.betas=[0.5, 0.6]", "optimizer.betas.1=0.7"])
    assert betas.stages[0].optimizer.betas == (0.5, 0.7)
    both = load_recipe("quickstart", ["stages.0.steps=3", "sft.tasks.0.validation_fraction=0.3"])
    assert both.stages[0].steps == 3
    assert both.stages[0].trained_tasks[0].validation_fraction == 0.3


def test_overrides_begin_a_list_that_is_not_set() -> None:
    bare = {"model": {"name": "m"}}
    for keys in (["tasks.name=addition"], ["tasks.0.name=addition"]):
        made = [*keys, "rewards.functions.function=length", "rewards.functions.weight=2"]
        stage = load_recipe(bare, made).stages[0]
        assert isinstance(stage, RLStage)
        assert [one.name for one in stage.tasks] == ["addition"]
        assert [(one.function, one.weight) for one in stage.rewards.functions] == [("length", 2)]


def test_entry_that_a_list_lacks_is_refused() -> None:
    two = [*ONE_TASK["tasks"], {"name": "addition"}]
    with pytest.raises(KeelError, match=r"tasks\.path: tasks has 2 entries: write tasks\.0\.path"):
        load_recipe({**ONE_TASK, "tasks": two}, ["tasks.path=x"])
    with pytest.raises(KeelError, match=r"tasks\.2: tasks has 1 entries, from tasks\.0"):
        load_recipe(ONE_TASK, ["tasks.2.path=x"])


def test_table_does_not_replace_its_own_keys() -> None:
    for keys in (
        ["algorithm.entropy=0.1", "algorithm=ppo"],
        ["rl.algorithm.entropy=0.1", "rl.algorithm=ppo"],
    ):
        assert rl(*keys).algorithm.entropy == 0.1
        assert rl(*keys).algorithm.preset == "ppo"


def test_overrides_change_a_recipe_that_was_read() -> None:
    known = load_recipe("quickstart").model_dump()
    assert [stage.steps for stage in load_recipe(known, ["steps=3", "sft.steps=2"]).stages] == [
        2,
        3,
    ]


def test_model_by_name_replaces_a_built_one() -> None:
    recipe = load_recipe(TINY, ["model.name=some/folder"])
    assert recipe.model.build is None
    assert recipe.model.name == "some/folder"


MISTAKES = {
    "steps=1e-6": ["steps", "1e-06", "integer"],
    "optimizer.learning_rate='1e-6'": ["optimizer.learning_rate", "'1e-6'", "number"],
    "rollout.top_p=0.9": ["rollout.top_p", "off policy"],
    "rollout.group_size=1": ["group_size = 1", "nothing to compare"],
    "algorithm.divergence.estimator=k1": ["k1", "zero in expectation"],
    "algorithm.ratio=sequence_products": ["algorithm.ratio", "sequence_product"],
    "steps": ["key=value"],
    "tasks=[]": ["tasks", "at least 1"],
    "minibatches=99": ["minibatches = 99", "32 completions"],
    "rollout.prompts_per_step=5000000": ["rollout.prompts_per_step = 5000000 times"],
    "optimizer.betas=[1.0,0.9]": ["optimizer.betas.0 = 1"],
    "optimizer.betas=[0.9,1.5]": ["optimizer.betas.1 = 1.5"],
    "rollout.stop_ids=[-1]": ["rollout.stop_ids.0 = -1"],
    "model.build.layers=0": ["model.build.layers = 0"],
}


@pytest.mark.parametrize("layers", ["0", "-1", '"all"'])
def test_checkpointed_layers_have_one_message(layers: str) -> None:
    with pytest.raises(KeelError) as caught:
        load_recipe("tiny", [f"model.activation_checkpointing={layers}"])
    assert str(caught.value).endswith(
        "model.activation_checkpointing: true, false, or a number of layers from 1"
    )
    for text, value in (("true", True), ("3", 3)):
        read = load_recipe("tiny", [f"model.activation_checkpointing={text}"])
        assert read.model.activation_checkpointing is value


@pytest.mark.parametrize("override", MISTAKES)
def test_mistake_is_one_line_that_names_it(override: str) -> None:
    with pytest.raises(KeelError) as caught:
        load_recipe(TINY, [override])
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in MISTAKES[override])


def test_unset_term_stays_unset_when_written_out() -> None:
    recipe = load_recipe("quickstart-ppo", ["algorithm.divergence=none"])
    again = load_recipe(tomllib.loads(to_toml(recipe)))
    assert again.stages == recipe.stages
    assert again.model_dump()["stages"][-1]["algorithm"]["divergence"] is None


def test_paths_in_a_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    for name in ("base", "exp/policy", "exp/rows"):
        (project / name).mkdir(parents=True)
    other.mkdir()
    for name in ("base", "exp/policy"):
        (project / name / "config.json").write_text("{}")
    (project / "base" / "below.toml").write_text(
        'model = {name = "../exp/policy"}\ntasks = [{name = "jsonl", path = "train.jsonl"}]\n'
    )
    recipe = project / "exp" / "recipe.toml"
    recipe.write_text(
        'extends = "../base/below.toml"\n'
        'tasks = [{name = "jsonl", path = "a.jsonl", validation_path = "../b.jsonl"}, '
        '{name = "parquet", path = "/abs.parquet"}, {name = "datasets", path = "openai/gsm8k", '
        'validation_path = "test"}, {name = "datasets", path = "rows", '
        'options = {data_files = ["c.json", "hf://d.json"]}}, {name = "my.module:Task"}]\n'
        '[rewards]\nfunctions = [{function = "../r.py:f"}, {function = "outcome", '
        'options = {model = "policy"}}, {function = "outcome", options = {model = "org/model"}}]\n'
        '[rollout.vllm]\npython = "../venv/bin/python"\n'
    )
    monkeypatch.chdir(other)
    for place in (recipe, Path("../project/exp/recipe.toml")):
        stage = load_recipe(place).stages[-1]
        assert isinstance(stage, RLStage)
        exp = f"{project}/exp"
        assert load_recipe(place).model.name == f"{exp}/policy"
        assert [(one.path, one.validation_path) for one in stage.tasks[:3]] == [
            (f"{exp}/a.jsonl", f"{project}/b.jsonl"),
            ("/abs.parquet", None),
            ("openai/gsm8k", "test"),
        ]
        assert stage.tasks[3].path == f"{exp}/rows"
        assert stage.tasks[3].options == {"data_files": [f"{exp}/c.json", "hf://d.json"]}
        assert stage.tasks[4].name == "my.module:Task"
        assert [one.function for one in stage.rewards.functions[:2]] == [
            f"{project}/r.py:f",
            "outcome",
        ]
        models = [one.options.get("model") for one in stage.rewards.functions[1:]]
        assert models == [f"{exp}/policy", "org/model"]
        assert stage.rollout.vllm.python == f"{project}/venv/bin/python"
    written = project / "runs" / "recipe.toml"
    written.parent.mkdir()
    written.write_text(to_toml(load_recipe(recipe)))
    assert load_recipe(written) == load_recipe(recipe)


def test_other_paths_are_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "exp" / "recipe.toml"
    recipe.parent.mkdir()
    recipe.write_text('model = {name = "m"}\ntasks = [{name = "jsonl", path = "a.jsonl"}]\n')
    monkeypatch.chdir(tmp_path)
    of_keys = load_recipe(recipe, ["tasks.path=b.jsonl", "rewards.functions.function=r.py:f"])
    stage = of_keys.stages[0]
    assert isinstance(stage, RLStage)
    assert stage.tasks[0].path == f"{tmp_path}/b.jsonl"
    assert stage.rewards.functions[0].function == f"{tmp_path}/r.py:f"
    mapping = load_recipe(ONE_TASK).stages[0]
    assert mapping.trained_tasks[0].path == f"{tmp_path}/a.jsonl"


def test_missing_file_and_file_that_is_not_toml(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="no such file"):
        load_recipe(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("steps = = 3")
    with pytest.raises(KeelError, match="not valid TOML"):
        load_recipe(bad)
    with pytest.raises(KeelError, match="did you mean 'quickstart'"):
        load_recipe("quikstart")


def test_byte_order_mark_is_not_part_of_a_recipe(tmp_path: Path) -> None:
    text = to_toml(load_recipe(TINY))
    (tmp_path / "own.toml").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (tmp_path / "over.toml").write_bytes(b"\xef\xbb\xbfextends = 'own.toml'\nseed = 5\n")
    assert load_recipe(tmp_path / "own.toml") == load_recipe(TINY)
    assert load_recipe(tmp_path / "over.toml").seed == 5


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/rows.jsonl", "jsonl"), ("rows.jsonl.gz", "jsonl"), ("rows.v2.parquet", "parquet")],
)
def test_ending_of_a_path_names_the_kind(path: str, name: str) -> None:
    stages = [
        {"stage": "rl", "tasks": [{"path": path, "prompt": "q"}]},
        {"stage": "dpo", "data": {"path": path}},
    ]
    recipe = load_recipe({"name": "r", "model": {"name": "m"}, "stages": stages})
    assert recipe.stages[0].tasks[0].name == name  # type: ignore[union-attr]
    assert recipe.stages[1].data.name == name  # type: ignore[union-attr]
    assert load_recipe(tomllib.loads(to_toml(recipe))) == recipe
    with pytest.raises(KeelError, match=r"data: path = '.*x' is not a .jsonl.*: convert it"):
        load_recipe({"model": {"name": "m"}, "stages": [{"stage": "dpo", "data": {"path": "x"}}]})


def test_extends_finds_a_sibling_and_refuses_itself(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "tiny"\nsteps = 7\n')
    child = tmp_path / "child.toml"
    child.write_text('extends = "base.toml"\nseed = 3\n')
    recipe = load_recipe(child)
    assert (recipe.seed, recipe.stages[0].steps, recipe.name) == (3, 7, "child")
    loop = tmp_path / "loop.toml"
    loop.write_text('extends = "loop.toml"\n')
    with pytest.raises(KeelError, match="extends"):
        load_recipe(loop)


def test_page_of_keys_is_current() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m keel.config.reference > docs/recipe.md"
    assert "\n- `rollout.group_size` (`8`): " in page


def test_table_in_part_keeps_its_other_defaults() -> None:
    """An SFT stage learns at 1e-5, an optimizer by itself at 1e-6."""
    recipe = load_recipe("quickstart", ["sft.optimizer={warmup_steps=3}"])
    sft = SFTStage.model_validate({"tasks": [{"name": "addition"}], "optimizer": {"betas": [0, 0]}})
    assert recipe.stages[0].optimizer.warmup_steps == 3
    assert sft.optimizer.learning_rate == SFTStage.model_fields["optimizer"].default.learning_rate
    assert sft.optimizer.learning_rate != Optimizer().learning_rate


# ---------------------------------------------------------------- bounds


def unbounded(model: type[BaseModel], seen: set[type]) -> Iterator[str]:
    """Numeric fields of `model` and of the models in it that lack a lower or an upper bound."""
    if model in seen:
        return
    seen.add(model)
    for name, info in model.model_fields.items():
        yield from _open(info.annotation, info.metadata, f"{model.__name__}.{name}", seen)


def _open(annotation: Any, metadata: list[Any], where: str, seen: set[type]) -> Iterator[str]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        yield from _open(inner, [*metadata, *more], where, seen)
    elif annotation in (int, float):
        limits = [m for x in metadata for m in (x.metadata if isinstance(x, FieldInfo) else [x])]
        for bounds in (("ge", "gt"), ("le", "lt")):
            if not any(hasattr(limit, bound) for limit in limits for bound in bounds):
                yield f"{where} has no {bounds}"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from unbounded(annotation, seen)
    elif origin is not Literal:
        shared = metadata if origin in (Union, UnionType) else []
        for inner in get_args(annotation):
            yield from _open(inner, shared, where, seen)


@pytest.mark.parametrize("recipe", [Recipe, ControlRecipe])
def test_every_number_of_a_recipe_has_two_bounds(recipe: type[BaseModel]) -> None:
    assert sorted(unbounded(recipe, set())) == []


def test_number_without_bounds_is_found() -> None:
    class Inner(BaseModel):
        free: typing.Optional[float] = None  # noqa: UP045 - both spellings of a union
        tight: Annotated[int, FieldInfo(annotation=int, default=0)] = 0

    class Outer(BaseModel):
        inner: tuple[Inner, ...] = ()

    assert len([w for w in unbounded(Outer, set()) if "free" in w]) == 2
