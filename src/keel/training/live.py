"""Live Python objects as parts of a recipe: a loaded model, data, functions, an algorithm.

A recipe is text, and so must be what a run keeps to be resumed, exported and compared. Models and
data are written once into the run folder (`$RUN/inputs/`); functions are named `python:NAME` and
must be passed again to resume.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keel.algorithms.presets import Preset
from keel.config.address import layer
from keel.config.entry import PYTHON
from keel.config.load import RUN_FOLDER, Source, nest, read_recipe
from keel.config.schema import Recipe, Stage
from keel.models.tokenizer_round_trip import quiet
from keel.runs import files
from keel.types import KeelError

INPUTS = f"{RUN_FOLDER}inputs/"
MODEL = "model"
FILES = (".jsonl", ".parquet")
_STAGES = {kind.model_fields["stage"].default: kind for kind in get_args(get_args(Stage)[0])}


@dataclass(frozen=True)
class Objects:
    """A recipe in which objects have become names, and the objects."""

    recipe: Mapping[str, Any]
    functions: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, bytes] = field(default_factory=dict)
    """Files of data, by name."""
    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    def write(self, folder: Path) -> None:
        """Write model and data into a new folder, `$RUN/inputs/` of the recipe."""
        folder.mkdir()
        for name, content in self.tables.items():
            files.write_bytes(folder / name, content)
        if self.model is not None and self.tokenizer is not None:
            try:
                with quiet():
                    self.model.save_pretrained(folder / MODEL)
                self.tokenizer.save_pretrained(folder / MODEL)
            except ValueError as error:
                raise KeelError(f"model: it cannot be saved: {_line(error)}") from error

    def check_data(self, folder: Path) -> None:
        """Raise KeelError where the data differ from those that a run began with."""
        for name, content in self.tables.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != content:
                raise KeelError(f"data: they differ from {path}, which the run began with")


def objects(
    recipe: Source | Recipe | None = None,
    *,
    model: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Any = None,
    eval_data: Any = None,
    rewards: Any = None,
    **keys: Any,
) -> Objects:
    """The recipe that the arguments of `keel.train` make.

    Raises:
        KeelError: an argument is of a type that cannot be used, or does not go with another.
    """
    base = recipe.model_dump() if isinstance(recipe, Recipe) else {} if recipe is None else recipe
    algorithm = keys.get("algorithm")
    if isinstance(algorithm, Preset):
        keys["algorithm"] = algorithm.name
    above = _nested(keys)
    if model is not None:
        above["model"] = _merged(_model(model, tokenizer), above.get("model", {}))
    elif tokenizer is not None:
        raise KeelError("tokenizer: it goes with a loaded model: pass model=, too")
    if rewards is not None:
        above["rewards"] = _merged(_rewards(rewards), above.get("rewards", {}))
    whole = read_recipe(base)
    whole.setdefault("name", algorithm if isinstance(algorithm, str) else "train")
    tables: dict[str, bytes] = {}
    if data is not None:
        kind = above.get("stage") or whole["stages"][-1].get("stage", "rl")
        above |= _data(data, eval_data, kind, rewards is None, tables)
    elif eval_data is not None:
        raise KeelError("eval_data: it goes with data: pass data=, too")
    functions: dict[str, Any] = {}
    made = _plain(layer(whole, above), functions)
    live = model if isinstance(model, PreTrainedModel) else None
    return Objects(made, functions, tables, live, tokenizer)


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as tables of a recipe: `{"model.lora.rank": 8}` is `model={"lora": {"rank": 8}}`."""
    out: dict[str, Any] = {}
    for key, value in keys.items():
        out = _merged(out, nest(key, value))
    return out


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(below)
    for key, value in above.items():
        old = out.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return out


def _model(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise KeelError("model: a loaded model needs its tokenizer: pass tokenizer=, too")
        return {"name": INPUTS + MODEL}
    if tokenizer is not None:
        raise KeelError("tokenizer: a model by name has its own: leave tokenizer out")
    if isinstance(model, Mapping):
        return dict(model)
    if isinstance(model, str | Path):
        return {"name": str(model)}
    hint = (
        "; of a peft model, pass the base and model.lora" if hasattr(model, "peft_config") else ""
    )
    raise KeelError(
        f"model: a {type(model).__name__} cannot be trained: pass a transformers PreTrainedModel, "
        f"a folder or hub name, or the recipe's table as a dict{hint}"
    )


def _rewards(rewards: Any) -> dict[str, Any]:
    """One reward or several (functions, names, tables), or the recipe's table itself."""
    if isinstance(rewards, Mapping) and "function" not in rewards:
        return dict(rewards)
    several = rewards if isinstance(rewards, list | tuple) else [rewards]
    return {"functions": [r if isinstance(r, Mapping) else {"function": r} for r in several]}


def _data(
    data: Any, eval_data: Any, kind: str, by_answer: bool, tables: dict[str, bytes]
) -> dict[str, Any]:
    """The keys of a stage that name its data; `tables` takes the files that hold it.

    Without a reward, a column `answer` is the gold answer.
    """
    source = dict(data) if isinstance(data, Mapping) else _source(data, "data", tables)
    if eval_data is not None:
        other = _source(eval_data, "eval_data", tables)
        if source.get("name") != other["name"] or "path" not in other:
            raise KeelError("eval_data: it must be of the same type as data, rows or a file")
        source["validation_path"] = other["path"]
    if kind in _STAGES and "data" in _STAGES[kind].model_fields:
        return {"data": source}
    columns = getattr(data, "column_names", None)
    if columns is None and isinstance(data, list | tuple) and data:
        columns = data[0]
    if by_answer and "answer" in (columns or ()):
        source["answer"] = "answer"
    return {"tasks": [source]}


def _source(data: Any, name: str, tables: dict[str, bytes]) -> dict[str, Any]:
    """Where data is read from; rows and tables become a file."""
    if isinstance(data, str | Path):
        suffix = Path(data).suffix
        return {"name": suffix[1:], "path": str(data)} if suffix in FILES else {"name": str(data)}
    if hasattr(data, "to_parquet"):  # datasets.Dataset, pandas.DataFrame
        buffer = BytesIO()
        data.to_parquet(buffer)
        kind, content = "parquet", buffer.getvalue()
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        kind, content = "jsonl", "".join(_lines(data, name)).encode()
    else:
        raise KeelError(
            f"{name}: a {type(data).__name__} is no data: pass a datasets.Dataset, a list of "
            "dicts, a file (.jsonl, .parquet) or the name of a task"
        )
    tables[f"{name}.{kind}"] = content
    return {"name": kind, "path": f"{INPUTS}{name}.{kind}"}


def _lines(rows: Iterable[Any], name: str) -> Iterable[str]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise KeelError(f"{name}[{number}]: a {type(row).__name__}: give a dict of columns")
        try:
            yield json.dumps(dict(row), ensure_ascii=False, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise KeelError(f"{name}[{number}]: {_line(error)}: use texts and numbers") from error


def _plain(value: Any, functions: dict[str, Any]) -> Any:
    """The value as a recipe has it; callables are named, and collected in `functions`."""
    if isinstance(value, BaseModel):
        return _plain(value.model_dump(), functions)
    if isinstance(value, Mapping):
        return {str(key): _plain(inside, functions) for key, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inside, functions) for inside in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, nn.Module):
        raise KeelError(
            f"a {type(value).__name__} is no function: save a reward model and name its folder "
            '({"function": "outcome", "options": {"model": FOLDER}})'
        )
    return _named(value, functions) if callable(value) else value


def _named(function: Callable[..., Any], functions: dict[str, Any]) -> str:
    """`python:NAME`, with a name that no other function has."""
    own = getattr(function, "__name__", type(function).__name__)
    stem = re.sub(r"\W+", "", own) or "function"
    name, number = stem, 1
    while functions.setdefault(name, function) is not function:
        number += 1
        name = f"{stem}_{number}"
    return f"{PYTHON}:{name}"


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
