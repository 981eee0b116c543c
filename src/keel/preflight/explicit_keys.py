"""What the user set of a recipe: in the file itself and by overrides, not by a preset or `extends`.

A key that was set to its default is not counted: nobody can be misled by it, and the resolved
recipe of a run folder, which writes every default out, stays free of findings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from keel.algorithms.presets import PRESETS
from keel.config.address import SHARED
from keel.config.load import Source, parse_override, parse_toml, read_toml
from keel.config.schema import Recipe

Path_ = tuple[str | int, ...]
MISSING = object()


@dataclass(frozen=True, slots=True)
class ExplicitKey:
    """A key that the user set: the number of its stage (None: shared by all), its place, its value.

    `holder` is the table that it stands in, `beside` how many tables of a list stand there.
    """

    stage: int | None
    path: Path_
    value: Any
    holder: Any
    beside: int

    @property
    def pattern(self) -> str:
        """The key without numbers of list entries, and without an options table's own keys."""
        names = [part for part in self.path if isinstance(part, str)]
        for table in ("options", "columns", "chat_template"):
            if table in names:
                names = names[: names.index(table) + 1]
        return ".".join(names)

    @property
    def leaf(self) -> str:
        return str(self.path[-1])


def given(source: Source, overrides: Sequence[str], recipe: Recipe) -> list[ExplicitKey]:
    """The keys that the user set to something else than their default, and that still stand."""
    names = [stage.name for stage in recipe.stages]
    found: dict[tuple[int | None, Path_], Any] = {}
    for data in (own(source), *map(parse_override, overrides)):
        for stage, path, value in _placed(data, names):
            found[stage, path] = value
    out = []
    for (stage, path), value in found.items():
        root = recipe if stage is None else recipe.stages[stage]
        walked = _walk(root, path)
        if walked is None or not _same(value, walked.value) or _same(value, walked.default):
            continue
        out.append(ExplicitKey(stage, path, walked.value, walked.holder, walked.beside))
    return out


def own(source: Source) -> dict[str, Any]:
    """The data of the file (or mapping) itself, without what it extends."""
    if isinstance(source, Mapping):
        return dict(source)
    label = str(source)
    if Path(label).suffix == ".toml" or "/" in label:
        return read_toml(label)
    entry = resources.files("keel.config") / "recipes" / f"{label}.toml"
    return parse_toml(entry.read_text(encoding="utf-8"), label)


def shown(recipe: Recipe, stage: int | None, path: Sequence[str | int]) -> str:
    """The key as the user writes it: with its stage's name in front where there are several."""
    parts = [str(part) for part in path]
    if stage is not None and len(recipe.stages) > 1:
        parts.insert(0, recipe.stages[stage].name)
    return ".".join(parts)


def _placed(
    data: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[int | None, Path_, Any]]:
    """Every leaf with the stage that it goes to; as `config.address` lays keys."""
    last = len(names) - 1
    for key, value in data.items():
        if key == "extends":
            continue
        if key == "stages" and isinstance(value, list):
            for at, stage in enumerate(value):
                yield from ((at, path, leaf) for path, leaf in _leaves(stage))
        elif key in SHARED:
            yield from ((None, path, leaf) for path, leaf in _leaves({key: value}))
        elif key in names and isinstance(value, Mapping):
            yield from ((names.index(key), path, leaf) for path, leaf in _leaves(value))
        else:
            yield from ((last, path, leaf) for path, leaf in _leaves({key: value}))


def _leaves(value: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    if path == ("algorithm",) and isinstance(value, str):
        yield ("algorithm", "preset"), value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        for at, inner in enumerate(value):
            yield from _leaves(inner, (*path, at))
    else:
        yield path, value


@dataclass(frozen=True, slots=True)
class _Walked:
    value: Any
    default: Any
    holder: Any
    beside: int


def _walk(root: BaseModel, path: Path_) -> _Walked | None:
    """The value that stands at a place of the recipe, and its default; None where there is none."""
    value: Any = root
    default: Any = None
    holder: Any = root
    beside = 1
    for part in path:
        if isinstance(value, BaseModel):
            if not isinstance(part, str) or part not in type(value).model_fields:
                return None
            default = _default(value, default, part)
            holder, value = value, getattr(value, part)
        elif isinstance(value, Mapping) and part in value:
            default = default.get(part, MISSING) if isinstance(default, Mapping) else MISSING
            value = value[part]
        elif isinstance(value, tuple) and isinstance(part, int) and part < len(value):
            beside = len(value)
            default, value = None, value[part]
        else:
            return None
    return _Walked(value, default, holder, beside)


def _default(table: BaseModel, default: Any, part: str) -> Any:
    """The default of a table's field: its preset's row's, its holder's own, or its class's."""
    if part == "algorithm":
        return PRESETS[table.algorithm.preset].row  # type: ignore[attr-defined]
    if type(default) is type(table) or (
        isinstance(default, BaseModel) and isinstance(table, type(default))
    ):
        return getattr(default, part, MISSING)
    info = type(table).model_fields[part]
    if info.is_required():
        return MISSING
    return info.get_default(call_default_factory=True)


def _same(given: Any, value: Any) -> bool:
    """Whether what was written is what stands: TOML has lists for tuples, and no null."""
    if given == "none" and value is None:
        return True
    if isinstance(given, list) and isinstance(value, tuple):
        return tuple(given) == value
    if isinstance(given, bool) or isinstance(value, bool):
        return given is value
    numbers = isinstance(given, int | float) and isinstance(value, int | float)
    return (numbers or type(given) is type(value)) and bool(given == value)
