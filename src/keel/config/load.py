"""From a TOML file, a shipped recipe's name or a mapping to a validated `Recipe`, and back.

`[repeat]` names stages that a recipe runs several times; they are written out one by one.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli_w
from pydantic import Field, ValidationError

from keel.algorithms.presets import PRESETS
from keel.algorithms.terms import AsTuple, FrozenModel
from keel.config.errors import explain_validation
from keel.config.fields import nearest, unknown
from keel.config.layers import gather, layer, merge, nest, overlay, stage_name
from keel.config.schema import Expected, Recipe
from keel.config.secrets import wrong_secret
from keel.types import KeelError

Source = str | Path | Mapping[str, Any]
R = TypeVar("R", bound=FrozenModel)
SHIPPED: Any = resources.files("keel.config") / "recipes"
FOREIGN_FORMATS = (".yaml", ".yml", ".json", ".py")
RUN_FOLDER = "$RUN/"
"""How a recipe names a file of its own run folder, as of a model that was passed to keel.train."""
DATA_KEYS = ("path", "validation_path", "data_files", "data_dir")
RUN_KEYS = ("stored",)
DATA_FILES = (".jsonl", ".json", ".parquet", ".csv", ".gz")
MODEL_KEYS = ("name", "model", "adapter")
MODEL_FILES = ("config.json", "adapter_config.json")
_FILE_ENTRY = re.compile(r"[^:\s]+\.py:[\w.]+")
"""`path/to/file.py:function`"""


def load_recipe(source: Source, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a TOML file, a shipped name or a mapping, with `key=value` overrides on top.

    Paths in a file are relative to its folder, others to the working folder; the recipe has them
    absolute. Raises KeelError, in one line, on whatever is wrong with it.
    """
    data = overlay(read_recipe(source), map(split_override, overrides))
    data = located(data, Path.cwd())
    stages = data.get("stages")
    if isinstance(stages, list) and any(_of_control(stage) for stage in stages):
        raise KeelError(
            "this is a recipe of keel control: keel control RECIPE runs it, and keel control "
            "--resume --run DIR goes on with its run"
        )
    return validated(write_out(data), Recipe)


def validated(data: Mapping[str, Any], root: type[R]) -> R:
    """A recipe's data as a frozen `root`. Raises KeelError, also if it holds a secret, before it is
    written anywhere."""
    wrong = wrong_secret(data)
    if wrong is not None:
        raise KeelError(wrong)
    try:
        return root.model_validate(data)
    except ValidationError as error:
        raise KeelError(explain_validation(error, data, root)) from None


def in_run_folder(value: Any, folder: Path) -> Any:
    """A recipe's data with `$RUN/` replaced by the run folder."""
    if isinstance(value, dict):
        return {key: in_run_folder(inside, folder) for key, inside in value.items()}
    if isinstance(value, list):
        return [in_run_folder(inside, folder) for inside in value]
    if isinstance(value, str) and value.startswith(RUN_FOLDER):
        return str(folder / value.removeprefix(RUN_FOLDER))
    return value


def located(value: Any, folder: Path, key: str = "", judge: bool = False) -> Any:
    """A recipe's data in which the files and folders that it reads have absolute paths.

    A name that can be one of a hub is a path if there is such a folder. `judge`: it is of the
    table of a judge, whose `cache` may not exist yet.
    """
    if isinstance(value, Mapping):
        judge |= value.get("function") == "judge"
        return {name: located(inside, folder, name, judge) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [located(inside, folder, key, judge) for inside in value]
    if not isinstance(value, str) or value.startswith(("~", "/", RUN_FOLDER)) or "\0" in value:
        return value
    path = os.path.normpath(folder / value)
    is_path = _FILE_ENTRY.fullmatch(value) is not None
    if key in DATA_KEYS and "://" not in value:
        is_path = value.endswith(DATA_FILES) or os.path.isfile(path)
        is_path |= key != "validation_path" and os.path.isdir(path)
    elif key == "python":
        is_path = "/" in value  # else a program in PATH
    elif key in RUN_KEYS:
        is_path = os.path.isdir(path)
    elif key in MODEL_KEYS:
        is_path |= any(os.path.isfile(f"{path}/{file}") for file in MODEL_FILES)
    is_path |= judge and key == "cache"
    return path if is_path else value


def _of_control(stage: Any) -> bool:
    kinds = ("policy_gradient", "q_learning")
    return isinstance(stage, Mapping) and stage.get("stage") in kinds


def shipped() -> dict[str, str]:
    """Name and description of every recipe that comes with Keel."""
    return {name: str(read_recipe(name).get("description", "")) for name in names_in(SHIPPED)}


def expectations() -> dict[str, Expected]:
    """What each recipe that comes with Keel says to expect, if it says so."""
    found = {name: read_recipe(name).get("expected") for name in names_in(SHIPPED)}
    return {name: Expected.model_validate(one) for name, one in found.items() if one is not None}


RUN_TIME = frozenset(
    {"description", "seed", "threads", "expected", "checkpoints", "trackers", "device"}
) | {"rollouts_every"}
"""Keys that a recipe may have otherwise and still be expected to come to the same."""


def expected_of(recipe: Recipe) -> Expected | None:
    """What the shipped recipe of this name says to expect, if this is that one but for keys of
    `RUN_TIME` and the folder or owner of its model; None for any other."""
    if recipe.name not in names_in(SHIPPED):
        return None
    own = load_recipe(recipe.name)
    return own.expected if _essence(own) == _essence(recipe) else None


def _essence(recipe: Recipe) -> Any:
    """The keys that decide the outcome; of a model's name its last part."""
    model = recipe.model
    if model.name is not None:
        model = model.model_copy(update={"name": Path(model.name).name.lower()})

    def without(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: without(v) for k, v in value.items() if k not in RUN_TIME}
        return [without(one) for one in value] if isinstance(value, list | tuple) else value

    return without(recipe.model_copy(update={"model": model}).model_dump())


def names_in(folder: Any) -> list[str]:
    """The names of the recipes in a folder."""
    found = (entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return sorted(name.removesuffix(".toml") for name in found)


def to_toml(recipe: FrozenModel) -> str:
    """The recipe with every default written out; it loads back to an equal recipe."""
    return tomli_w.dumps(_writable(recipe.model_dump()))


def read_own(source: Source) -> tuple[dict[str, Any], str]:
    """The keys of a recipe itself, without those of the recipe that it extends; and its name in
    errors."""
    if isinstance(source, Mapping):
        return dict(source), "recipe"
    label = str(source)
    data = parse_toml(_text(label), label)
    if _is_file(label):
        folder = Path(label).absolute().parent
        data = in_run_folder(located(data, folder), folder)
    return data, label


def read_recipe(source: Source, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe with `stages`, not validated; what it extends is in it."""
    data, label = read_own(source)
    if not isinstance(source, Mapping):
        data.setdefault("name", Path(label).name.removesuffix(".toml"))
    base = data.pop("extends", None)
    if base is None:
        return gather(data)
    if not isinstance(base, str) or base in seen:
        raise KeelError(f"{label}: extends = {base!r} is not another recipe's name or file")
    sibling = Path(label).parent / base
    below = read_recipe(str(sibling) if sibling.is_file() else base, (*seen, base))
    below.pop("expected", None)  # that is another recipe's figure
    return layer(below, data)


def _is_file(label: str) -> bool:
    """Whether this is the path of a recipe, not the name of a shipped one."""
    suffix = Path(label).suffix
    return suffix == ".toml" or ("/" in label and suffix not in FOREIGN_FORMATS)


def _text(label: str) -> str:
    if _is_file(label):
        return _file_text(label)
    entry = SHIPPED / f"{label}.toml"
    if not entry.is_file():
        raise KeelError(_no_recipe(label))
    return str(entry.read_text(encoding="utf-8"))


def _no_recipe(label: str) -> str:
    """Why a name is not that of a shipped recipe, and what was probably meant."""
    if Path(label).suffix in FOREIGN_FORMATS:
        return f"recipe {label!r}: recipes are TOML files: write it as one, with the suffix .toml"
    if label == "control":
        return "unknown recipe 'control': the command is keel control ALGORITHM --env ID"
    if (file := _near_file(label)) is not None:
        return f"recipe {label!r}: no such file: did you mean {file!r}?"
    guess = nearest(label, PRESETS)
    if guess is not None and nearest(label, shipped()) is None:
        return (
            f"unknown recipe {label!r}: {guess!r} is an algorithm: name a recipe and set "
            f"algorithm={guess}"
        )
    return unknown("recipe", label, shipped())


def _near_file(label: str) -> str | None:
    """The recipe file next to this one that was probably meant; of a name without a suffix, the
    file of that name."""
    path = Path(label)
    try:
        files = sorted(one.name for one in path.parent.iterdir() if one.suffix == ".toml")
    except OSError:
        return None
    guess = f"{path.name}.toml"
    found = nearest(path.name, files) if path.suffix else guess if guess in files else None
    return None if found is None else str(path.with_name(found))


def read_toml(path: str) -> dict[str, Any]:
    """Parse a TOML file. Raises KeelError if it is missing or not TOML."""
    return parse_toml(_file_text(path), path)


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        near = _near_file(path)
        hint = "keel recipes lists what is shipped" if near is None else f"did you mean {near!r}?"
        raise KeelError(f"recipe {path!r}: no such file: {hint}") from None
    except (OSError, ValueError) as error:  # not allowed, no UTF-8, a zero byte in the name
        raise KeelError(f"recipe {path!r}: cannot be read ({error})") from None


def parse_toml(text: str, label: str) -> dict[str, Any]:
    """TOML text as data; `label` names it in an error."""
    try:
        data = tomllib.loads(text)
    except ValueError as error:
        raise KeelError(f"recipe {label!r}: not valid TOML: {error}") from None
    return data


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=1` as {"a": {"b": 1}}. Raises KeelError if there is no key or no `=`."""
    return nest(*split_override(text))


def read_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """Several of them in one; later ones win."""
    return reduce(merge, map(parse_override, texts), dict[str, Any]())


def split_override(text: str) -> tuple[str, Any]:
    """The key and the value of `a.b=1`. Raises KeelError if there is no `=`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise KeelError(f"override {text!r}: write it as key=value, for example steps=50")
    return key.strip(), _parse_value(value.strip())


def _parse_value(text: str) -> Any:
    """A TOML value; what is none is a string, so that shells need no second pair of quotes."""
    try:
        found = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    # More lines than one may hold more keys than the value.
    return found["value"] if len(found) == 1 else text


def _writable(value: Any) -> Any:
    """TOML has no null: what is absent is written `"none"`, which loads back as absent."""
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return {k: _writable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(v) for v in value]
    return value


# ---------------------------------------------------------------- repeated stages


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
