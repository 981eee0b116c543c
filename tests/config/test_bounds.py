"""Every number of a recipe has bounds, and what lies outside is refused by its key."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from keel.config.control import ControlRecipe
from keel.config.load import load_recipe
from keel.config.schema import Recipe
from keel.types import KeelError


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
def test_every_number_of_a_recipe_has_a_lower_and_an_upper_bound(recipe: type[BaseModel]) -> None:
    assert sorted(unbounded(recipe, set())) == []


def test_the_walk_finds_a_number_without_bounds() -> None:
    class Inner(BaseModel):
        free: typing.Optional[float] = None  # noqa: UP045 - both spellings of a union
        tight: Annotated[int, FieldInfo(annotation=int, default=0)] = 0

    class Outer(BaseModel):
        inner: tuple[Inner, ...] = ()

    assert len([w for w in unbounded(Outer, set()) if "free" in w]) == 2


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("optimizer.betas=[0.9,1.5]", "optimizer.betas"),
        ("optimizer.betas=[1.0,0.9]", "optimizer.betas"),
        ("optimizer.betas=[-0.1,0.9]", "optimizer.betas"),
        ("optimizer.learning_rate=2.0", "optimizer.learning_rate"),
        ("threads=100000", "threads"),
        ("rollout.group_size=5000000000", "rollout.group_size"),
        ("rollout.prompts_per_step=5000000000", "rollout.prompts_per_step"),
        ("evaluation.samples=5000000000", "evaluation.samples"),
        ("model.build.hidden_size=5000000000", "model.build.hidden_size"),
        ("model.build.layers=0", "model.build.layers"),
        ("model.build.context=-3", "model.build.context"),
        ("rollout.temperature=1e-9", "rollout.temperature"),
        ("rollout.stop_ids=[-1]", "rollout.stop_ids"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_key(override: str, key: str) -> None:
    with pytest.raises(KeelError, match=f"^{key}"):
        load_recipe("tiny", [override])


def test_completions_of_a_step_are_bounded_together() -> None:
    with pytest.raises(KeelError, match=r"rollout\.prompts_per_step = 100000 times"):
        load_recipe("tiny", ["rollout.prompts_per_step=100000", "rollout.group_size=1000"])
