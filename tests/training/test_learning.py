"""A small thing must learn, and its wrong-sign twin must not: the quickstart, cut short.

Sorting three or four digits after a careless teacher. Over three seeds each objective rose by 49
points or more and the twin fell by 15 or more; 30 leave room for another processor's rounding.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from keel.config.load import load_recipe
from keel.runs.layout import RunFolder
from keel.training.export import export
from keel.training.run import train
from tests.training.small import info

pytestmark = pytest.mark.slow

SHORT = (
    "threads=1",
    "model.build.hidden_size=64",
    "model.build.layers=2",
    "sft.tasks=[{name='sort_digits', options={min_digits=3, max_digits=4}}]",
    "tasks=[{name='sort_digits', options={min_digits=3, max_digits=4}}]",
    "sft.steps=120",
    "sft.batch_size=64",
    "sft.optimizer.learning_rate=4e-3",
    "steps=25",
    "optimizer.learning_rate=1e-3",
    "rollout.max_tokens=6",
    "evaluation={every=0, prompts=200, samples=0}",
    "rollouts_every=0",
)
GROUPS = ("rollout.prompts_per_step=16", "rollout.group_size=8")
SINGLE = ("rollout.prompts_per_step=128", "rollout.group_size=1")
RISE = 0.3
TWIN = (
    "algorithm.advantage.kind=custom",
    "algorithm.advantage.function=studies.quickstart:turned",
)


def change(folder: Path, recipe: str, seed: int, *more: str) -> float:
    """Validation greedy accuracy after less before."""
    run = train(load_recipe(recipe, [*SHORT, f"seed={seed}", *more]), folder)
    evaluation = info(run)["evaluation"]["rl"]
    return float(evaluation["after"]["mean"] - evaluation["before"]["mean"])


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("quickstart", GROUPS),
        ("quickstart", (*GROUPS, "rollout.dtype=bfloat16", "algorithm.correction.kind=truncate")),
        ("quickstart", (*GROUPS, "optimizer.kind=adamw_8bit", "sft.optimizer.kind=adamw_8bit")),
        ("quickstart", (*GROUPS, "optimizer.kind=muon")),
        ("quickstart-gspo", GROUPS),
        ("quickstart-ppo", (*SINGLE, "steps=15", "value.optimizer.learning_rate=2e-3")),
    ],
)
def test_objective_learns(recipe: str, more: tuple[str, ...], tmp_path: Path) -> None:
    assert change(tmp_path / "run", recipe, 0, *more) >= RISE


def test_objective_with_the_wrong_sign_does_not_learn(tmp_path: Path) -> None:
    assert change(tmp_path / "run", "quickstart", 0, *GROUPS, *TWIN) <= 0


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The quickstart after its teacher: what the policy is before it learns from rewards."""
    folder = tmp_path_factory.mktemp("taught") / "run"
    keys = [*SHORT, *GROUPS, "seed=0", "steps=1", "optimizer.learning_rate=1e-9"]
    return train(load_recipe("quickstart", keys), folder)


def adapted(taught: RunFolder, folder: Path, *more: str) -> float:
    """`change` of an adapter on the taught model in 4 bits."""
    base = export(taught.path, folder / "base")
    recipe = tomllib.loads(taught.recipe.read_text("utf-8"))
    recipe["model"] = {"name": str(base), "lora": {"rank": 16}, "quantisation": "nf4"}
    recipe["stages"] = recipe["stages"][1:]
    keys = ["steps=25", "optimizer.learning_rate=5e-3", *more]
    evaluation = info(train(load_recipe(recipe, keys), folder / "run"))["evaluation"]["rl"]
    return float(evaluation["after"]["mean"] - evaluation["before"]["mean"])


@pytest.mark.parametrize(
    "more",
    [(), ("model.lora.dora=true", "model.lora.rslora=true", "model.lora.alpha=8.0")],
    ids=["plain", "dora"],
)
def test_adapter_on_four_bits_learns(
    more: tuple[str, ...], taught: RunFolder, tmp_path: Path
) -> None:
    assert adapted(taught, tmp_path, *more) >= RISE


def test_adapter_with_the_wrong_sign_does_not_learn(taught: RunFolder, tmp_path: Path) -> None:
    assert adapted(taught, tmp_path, *TWIN) <= 0
