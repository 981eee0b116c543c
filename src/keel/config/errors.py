"""A validation error as one line: the key, the value, and how to fix it.

A key of TRL, verl or OpenRLHF is answered with the name that Keel has for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from keel.config.fields import nearest
from keel.config.foreign import hints
from keel.config.layers import SHARED, stage_name
from keel.config.rl import RolloutStage
from keel.config.schema import Recipe

Location = tuple[int | str, ...]
SHOWN = 200
"""Characters of a wrong value that its error shows."""


def explain_validation(
    error: ValidationError, data: Mapping[str, Any], root: type[BaseModel] = Recipe
) -> str:
    """The first thing that is wrong with a `root`, as one line; unknown keys before all else."""
    details = error.errors(include_url=False)
    details.sort(key=lambda d: d["type"] != "extra_forbidden")
    first = details[0]
    where, model = _walk(first["loc"], data, root)
    if first["type"] == "extra_forbidden":
        kind = _kind_at(first["loc"], data)
        return _unknown_key(where, model, first["input"], data, kind)
    message = first["msg"].removeprefix("Value error, ")
    shown = f" = {_shown(first['input'])}" if isinstance(first["input"], str | int | float) else ""
    if first["type"] == "value_error" and where and message.startswith(f"{where}."):
        return message
    if first["type"] == "value_error":
        return f"{where}: {message}" if where else message
    if first["type"] == "union_tag_invalid":
        about = first["ctx"]
        key = ".".join(filter(None, [where, about["discriminator"].strip("'")]))
        return f"{key} = {about['tag']!r}: choose one of {about['expected_tags']}"
    if first["type"] in _TABLES and (how := _how_to_write(where, model)) is not None:
        return f"{where}{shown}: {how}"
    return f"{where}{shown}: {message[:1].lower()}{message[1:]}"


_TABLES = ("tuple_type", "model_type", "model_attributes_type", "dict_type")


def _how_to_write(where: str, model: type[BaseModel] | None) -> str | None:
    """How a key that holds a table, or a list of tables, is set; None for another key."""
    info = model.model_fields.get(where.rpartition(".")[2]) if model is not None else None
    inner = next(models_in(info), None) if info is not None else None
    if inner is None:
        return None
    key = f"{where}.{next(iter(inner.model_fields))}"
    return f"it holds keys of its own: set one of them, such as {key}"


def _shown(value: str | int | float) -> str:
    """A value as Python writes it, cut short."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _kind_at(loc: Location, data: Mapping[str, Any]) -> str:
    """The kind of the stage that a key is of; of one of the whole recipe, that of all stages."""
    stages = [stage for stage in data.get("stages", ()) if isinstance(stage, Mapping)]
    if len(loc) > 1 and loc[0] == "stages" and isinstance(loc[1], int):
        stages = [data["stages"][loc[1]]]
    kinds = {stage.get("stage", "rl") for stage in stages}
    return str(kinds.pop()) if len(kinds) == 1 else "rl"


def _unknown_key(
    where: str, model: type[BaseModel] | None, value: Any, data: Mapping[str, Any], kind: str
) -> str:
    parent, _, leaf = where.rpartition(".")
    known = list(model.model_fields) if model else []
    if leaf == where:
        known += sorted(SHARED)
    meant = None
    if isinstance(value, Mapping):
        meant = _mistyped_table(leaf, value, parent, model, data)
        # verl's long paths: the last part says what is meant
        while isinstance(value, Mapping) and value:
            part, value = next(iter(value.items()))
            where, leaf = f"{where}.{part}", str(part)
    foreign = _foreign(where.split("."), kind)
    if meant is not None and (foreign is None or foreign.startswith("in Keel it is '")):
        hint = f"did you mean {meant!r}?"
    elif foreign is not None:
        hint = foreign
    elif where.startswith("model.") and leaf in RolloutStage.model_fields:
        hint = f"{leaf!r} is a key of the stage: in TOML it stands above the first [table]"
    elif (guess := nearest(leaf, known)) is not None:
        hint = f"did you mean {guess!r}?"
    elif having := [name for name, keys in _tables(model).items() if leaf in keys]:
        keys = [".".join(filter(None, (parent, name, leaf))) for name in having]
        hint = f"did you mean {' or '.join(map(repr, keys))}?"
    else:
        hint = f"known here: {', '.join(known)}" if known else "it has no meaning here"
    return f"unknown key {where!r}: {hint}"


def _foreign(path: list[str], kind: str) -> str | None:
    """What to do instead of a foreign key, by the longest end of its path that is known."""
    known = hints(kind)
    ends = (".".join(path[start:]) for start in range(len(path)))
    hint = next((known[end] for end in ends if end in known), None)
    if hint is None:
        return None
    if "critic" in path:  # verl's has a model and an optimizer of its own
        if hint.startswith("'model."):
            return "the value model is set up in [value]"
        hint = re.sub(r"(?<=['\s])optimizer\.", "value.optimizer.", hint)
    return f"in Keel it is {hint}" if hint.startswith("'") else hint


def _mistyped_table(
    table: str,
    value: Mapping[str, Any],
    parent: str,
    model: type[BaseModel] | None,
    data: Mapping[str, Any],
) -> str | None:
    """The key that was meant by one in a table of a mistyped name; None if none is like it.

    The table is one of the model that holds it, one that the recipe's stages share, or a stage.
    """
    tables = {".".join(filter(None, (parent, name))): k for name, k in _tables(model).items()}
    stages = [stage for stage in data.get("stages", []) if isinstance(stage, Mapping)]
    if parent in ("", *map(stage_name, stages)):
        tables |= {name: k for name, k in _tables(Recipe).items() if name != "stages"}
    if model is not None and "stage" in model.model_fields and len(stages) > 1:
        tables |= {stage_name(stage): list(model.model_fields) for stage in stages}
    names = {path.rpartition(".")[2]: path for path in tables}
    longer = [name for name in names if name.startswith(table)]
    guess = longer[0] if len(longer) == 1 else nearest(table, names)
    key = next(iter(value), None)
    if guess is None or key is None:
        return None
    inner = nearest(str(key), tables[names[guess]])
    return None if inner is None else f"{names[guess]}.{inner}"


def _tables(model: type[BaseModel] | None) -> dict[str, list[str]]:
    """The keys of a model that hold tables, each with the keys of its tables."""
    if model is None:
        return {}
    found = {
        name: [key for inner in models_in(info) for key in inner.model_fields]
        for name, info in model.model_fields.items()
    }
    return {name: keys for name, keys in found.items() if keys}


def _walk(
    loc: Location, data: Mapping[str, Any], root: type[BaseModel]
) -> tuple[str, type[BaseModel] | None]:
    """The key as the user writes it, and the model that holds it.

    pydantic puts the tag of a discriminated union into the location; the user never wrote it.
    """
    shown: list[str] = []
    model: type[BaseModel] | None = root
    pending: list[type[BaseModel]] = []
    for at, part in enumerate(loc):
        if pending and isinstance(part, str) and _tagged(pending, part):
            model, pending = _tagged(pending, part), []
            continue
        if isinstance(part, str) and part.startswith("$"):  # a tag
            continue
        if isinstance(part, int):
            shown.append(str(part))
            continue
        shown.append(part)
        if at == len(loc) - 1:
            break
        info = model.model_fields.get(part) if model else None
        options = list(models_in(info)) if info else []
        model = options[0] if len(options) == 1 else None
        pending = options if len(options) > 1 else []
    return _shorten(shown, data), model


def models_in(info: FieldInfo | Any) -> Iterator[type[BaseModel]]:
    """The models in the annotation of a field."""
    annotation = info.annotation if isinstance(info, FieldInfo) else info
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def _tagged(options: list[type[BaseModel]], tag: str) -> type[BaseModel] | None:
    for option in options:
        for key in ("kind", "stage"):
            info = option.model_fields.get(key)
            if info is not None and info.default == tag:
                return option
    return None


def _shorten(parts: list[str], data: Mapping[str, Any]) -> str:
    """`stages.1.steps` as `rl.steps`, or `steps` if there is one stage."""
    if len(parts) > 1 and parts[0] == "stages" and parts[1].isdigit():
        stages = data.get("stages", [])
        at = int(parts[1])
        rest = parts[2:]
        if len(stages) > 1 and isinstance(stages[at], Mapping):
            rest = [stage_name(stages[at]), *rest]
        return ".".join(rest)
    return ".".join(parts)
