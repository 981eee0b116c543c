"""A small thing must learn, and its wrong-sign twin must not: the quickstart, cut short.

Sorting three or four digits after a careless teacher. Over three seeds each objective rose by 49
points or more and the twin fell by 15 or more; 30 leave room for another processor's rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.config.load import load_recipe
from keel.config.model import Model
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


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after its teacher: what the policy is before it learns from rewards."""
    folder = tmp_path_factory.mktemp("taught")
    recipe = load_recipe("quickstart", SHORT)
    run = train(recipe.model_copy(update={"stages": recipe.stages[:1]}), folder / "run")
    return export(run.path, folder / "model")


def change(taught: Path, folder: Path, recipe: str, *more: str, **model: Any) -> float:
    """Validation greedy accuracy after learning from rewards less before."""
    loaded = load_recipe(recipe, [*SHORT, *more])
    stage = {"model": Model(name=str(taught), **model), "stages": loaded.stages[1:]}
    evaluation = info(train(loaded.model_copy(update=stage), folder / "run"))["evaluation"]["rl"]
    return float(evaluation["after"]["mean"] - evaluation["before"]["mean"])


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("quickstart", GROUPS),
        ("quickstart", (*GROUPS, "rollout.dtype=bfloat16", "algorithm.corrections.kind=truncate")),
        ("quickstart", (*GROUPS, "optimizer.kind=adamw_8bit")),
        ("quickstart", (*GROUPS, "optimizer.kind=muon")),
        ("quickstart-gspo", GROUPS),
        ("quickstart-ppo", (*SINGLE, "steps=15", "value.optimizer.learning_rate=2e-3")),
    ],
)
def test_objective_learns(recipe: str, more: tuple[str, ...], taught: Path, tmp_path: Path) -> None:
    assert change(taught, tmp_path, recipe, *more) >= RISE


def test_objective_with_the_wrong_sign_does_not_learn(taught: Path, tmp_path: Path) -> None:
    assert change(taught, tmp_path, "quickstart", *GROUPS, *TWIN) <= 0


ADAPTER = (*GROUPS, "optimizer.learning_rate=5e-3")
"""For an adapter on the taught model in 4 bits."""


@pytest.mark.parametrize(
    "more", [{}, {"dora": True, "rslora": True, "alpha": 8.0}], ids=["plain", "dora"]
)
def test_adapter_on_four_bits_learns(more: dict[str, Any], taught: Path, tmp_path: Path) -> None:
    lora = {"rank": 16, **more}
    rise = change(taught, tmp_path, "quickstart", *ADAPTER, lora=lora, quantisation="nf4")
    assert rise >= RISE


def test_adapter_with_the_wrong_sign_does_not_learn(taught: Path, tmp_path: Path) -> None:
    keys: Any = {"lora": {"rank": 16}, "quantisation": "nf4"}
    assert change(taught, tmp_path, "quickstart", *ADAPTER, *TWIN, **keys) <= 0
