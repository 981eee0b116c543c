"""Every number of a recipe has bounds."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from keel.config.control import ControlRecipe
from keel.config.schema import Recipe


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
