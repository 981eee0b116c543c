"""`[repeat]`: stages that a recipe runs several times, written out one by one. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Annotated, Any

from pydantic import Field, ValidationError

from keel.algorithms.terms import FrozenModel
from keel.config.address import stage_name
from keel.config.errors import explain_validation
from keel.config.fields import AsTuple, unknown
from keel.types import KeelError


class Repeat(FrozenModel):
    """Stages that follow each other, and how often they are run in turn."""

    stages: Annotated[tuple[str, ...], AsTuple, Field(min_length=1)]
    """Names of the stages, in their order."""
    times: Annotated[int, Field(ge=1, le=1000)]
    """How often they are run."""


def write_out(data: Mapping[str, Any]) -> dict[str, Any]:
    """A gathered recipe without `repeat`, its repeated stages written out as NAME-1, NAME-2, ….

    In them and after them the name of a reward model's stage, in `base.stage` and in rewards, means
    its newest version: the last stage before that has the name or trains its model further.
    `base.stage` and `base.replay` are left out if there is none before. Raises KeelError if
    the stages do not follow each other.
    """
    rest = {key: value for key, value in data.items() if key != "repeat"}
    if data.get("repeat", "none") in ("none", None):
        return rest
    try:
        repeat = Repeat.model_validate(data["repeat"])
    except ValidationError as error:
        raise KeelError(f"repeat.{explain_validation(error, {}, Repeat)}") from None
    stages = data.get("stages")
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        return rest
    start, end = _block(repeat, [stage_name(stage) for stage in stages])
    _one_chain(stages[start:end])
    block = [
        {**stage, "name": f"{stage_name(stage)}-{round}"}
        for round in range(1, repeat.times + 1)
        for stage in stages[start:end]
    ]
    origins = [stage_name(stage) for stage in stages[start:end]] * repeat.times
    names = [stage_name(stage) for stage in stages]
    written = [*stages[:start], *block, *stages[end:]]
    origins = [*names[:start], *origins, *names[end:]]
    return {**rest, "stages": _resolved(written, origins, start, start + len(block))}


def _block(repeat: Repeat, names: list[str]) -> tuple[int, int]:
    for name in repeat.stages:
        if name not in names:
            raise KeelError(f"repeat.stages: {unknown('stage', name, names)}")
    start = names.index(repeat.stages[0])
    end = start + len(repeat.stages)
    if tuple(names[start:end]) != repeat.stages:
        raise KeelError(
            f"repeat.stages = {list(repeat.stages)} do not follow each other in the recipe, whose "
            f"stages are {names}: name those from the first to the last in their order"
        )
    return start, end


def _one_chain(stages: Sequence[Mapping[str, Any]]) -> None:
    """Raises KeelError if two stages of a round train one model further."""
    bases = [stage["base"].get("stage") for stage in stages if isinstance(stage.get("base"), dict)]
    for base in bases:
        if base is not None and bases.count(base) > 1:
            raise KeelError(
                f"repeat.stages: two stages have base.stage = {base!r}, and one would go on from "
                "the other: give each a stage of its own that it starts from"
            )


def round_of(stage: str) -> int:
    """The round of a stage that was written out, by its name; 0 of any other."""
    name, _, number = stage.rpartition("-")
    return int(number) if name and number.isdecimal() else 0


def _resolved(
    stages: list[Mapping[str, Any]], origins: list[str], start: int, end: int
) -> list[Any]:
    """The stages with the newest versions of reward models in place of their names; those from
    `start` to `end` are repeated."""
    newest: dict[str, str] = {}
    models: dict[str, set[str]] = {}
    """Of a stage as the recipe names it, the names that mean a version of its model."""
    found = []
    for at, (stage, origin) in enumerate(zip(stages, origins, strict=True)):
        copy = deepcopy(dict(stage))
        base = copy.get("base")
        before = base.get("stage") if isinstance(base, dict) else None
        if at >= start:
            for table in _references(copy):
                table["stage"] = newest.get(table["stage"], table["stage"])
            if isinstance(base, dict) and before == origin and at < end:
                dropped = ("name",) if origin in newest else ("stage", "replay")
                copy["base"] = {k: v for k, v in base.items() if k not in dropped}
        versions = {origin}
        if isinstance(before, str):
            versions |= models.get(before, {before})
        for name in versions:
            newest[name] = stage_name(copy)
        models[origin] = versions
        found.append(copy)
    return found


def _references(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tables of a stage whose `stage` names another one."""
    tables = [stage.get("base")]
    for owner in (stage, stage.get("sampled")):
        rewards = owner.get("rewards") if isinstance(owner, dict) else None
        functions = rewards.get("functions") if isinstance(rewards, dict) else None
        for function in functions if isinstance(functions, list) else ():
            tables.append(function.get("options") if isinstance(function, dict) else None)
    for table in tables:
        if isinstance(table, dict) and isinstance(table.get("stage"), str):
            yield table
