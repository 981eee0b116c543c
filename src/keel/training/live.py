"""Live Python objects as parts of a recipe: a loaded model, data, functions, an algorithm.

A recipe is text, and so must be what a run keeps to be resumed, exported and compared. Models (of
another run too) and data are written once into the run folder (`$RUN/inputs/`); functions are named
`python:NAME` and must be passed again to resume.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keel.algorithms.spec import Preset
from keel.config.entry import DEFAULT_KIND, PYTHON, stage_kind
from keel.config.layers import layer, overlay
from keel.config.load import RUN_FOLDER, Source, read_recipe
from keel.config.schema import Recipe
from keel.config.sources import ENDINGS
from keel.data.tables import read_file
from keel.models.adapter_files import keys_of_peft
from keel.models.tokenizer_round_trip import quiet
from keel.platform import files
from keel.runs.layout import RECIPE
from keel.training.export import export
from keel.types import KeelError, one_line

INPUTS = f"{RUN_FOLDER}inputs/"
MODEL = "model"
OTHER_FILES = (".csv", ".tsv", ".json", ".txt", ".arrow", ".xlsx", ".gz", ".zip")
PLACE = ("name", "path", "validation_path", "options")
"""Keys of a table of data that say where it is; the others, how it is read, stay for other data."""


@dataclass(frozen=True)
class LiveInputs:
    """A recipe in which objects have become names, and the objects."""

    recipe: Mapping[str, Any]
    functions: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, bytes] = field(default_factory=dict)
    """Files of data, by name."""
    model: PreTrainedModel | Path | None = None
    """A loaded model, or the folder of a run that trained it."""
    tokenizer: PreTrainedTokenizerBase | None = None

    def write(self, folder: Path) -> None:
        """Write model and data into a new folder, `$RUN/inputs/` of the recipe."""
        folder.mkdir()
        for name, content in self.tables.items():
            files.write_bytes(folder / name, content)
        if isinstance(self.model, Path):
            export(self.model, folder / MODEL)
        elif self.model is not None and self.tokenizer is not None:
            try:
                with quiet():
                    self.model.save_pretrained(folder / MODEL)
                self.tokenizer.save_pretrained(folder / MODEL)
            except ValueError as error:
                raise KeelError(f"model: it cannot be saved: {one_line(error)}") from error

    def check_data(self, folder: Path) -> None:
        """Raise KeelError if the data differ from those that a run began with."""
        for name, content in self.tables.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != content:
                raise KeelError(f"data: they differ from {path}, which the run began with")


def collect_inputs(
    recipe: Source | Recipe | None = None,
    *,
    model: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    data: Any = None,
    eval_data: Any = None,
    rewards: Any = None,
    lora: Any = None,
    **keys: Any,
) -> LiveInputs:
    """The recipe that the arguments of `keel.train` make.

    Raises:
        KeelError: an argument is of a type that cannot be used, or does not go with another.
    """
    functions: dict[str, Any] = {}
    tables: dict[str, bytes] = {}
    base: Source = {} if recipe is None else _plain(recipe, functions)
    algorithm = keys.get("algorithm")
    if isinstance(algorithm, Preset):
        keys["algorithm"] = algorithm.name
    whole = read_recipe(base)
    if "stages" in keys:
        whole = layer(whole, {"stages": _plain(keys.pop("stages"), functions)})
    whole.setdefault("name", algorithm if isinstance(algorithm, str) else "train")
    if model is not None:
        whole = layer(whole, {"model": _model(model, tokenizer)})
    elif tokenizer is not None:
        raise KeelError("tokenizer: it goes with a loaded model: pass model=, too")
    if lora is not None:
        whole = layer(whole, {"model": {"lora": _lora(lora)}})
    if rewards is not None:
        whole = layer(whole, {"rewards": _rewards(rewards)})
    source: dict[str, Any] = {}
    if data is not None:
        stage = whole["stages"][-1]
        kind = stage_kind(keys.get("stage") or stage.get("stage", DEFAULT_KIND))
        fields = set() if kind is None else {"data", "tasks"} & set(kind.model_fields)
        table = "data" if "data" in fields else "tasks"
        if len(fields) == 2:  # examples, or prompts whose answers are demonstrations
            table = "tasks" if _of_task(data) else "data"
            stage = {k: v for k, v in stage.items() if k not in fields or k == table}
            whole = {**whole, "stages": [*whole["stages"][:-1], stage]}
        reading = {k: v for k, v in _only(stage.get(table)).items() if k not in PLACE and v}
        source = {**reading, **_data(data, eval_data, tables)}
        if rewards is None and table == "tasks" and "answer" in _columns(data):
            source.setdefault("answer", "answer")
        whole = layer(whole, {table: [source] if table == "tasks" else source})
    elif eval_data is not None:
        raise KeelError("eval_data: it goes with data: pass data=, too")
    made = _plain(overlay(whole, keys.items()), functions)
    if source:
        found = _only(made["stages"][-1].get(table))
        if any(found.get(key) != source.get(key) for key in PLACE[:3]):
            raise KeelError(f"data: another keyword sets {table}, too: drop one of them")
    live = model if isinstance(model, PreTrainedModel) else _run_folder(model)
    return LiveInputs(made, functions, tables, live, tokenizer)


def _only(table: Any) -> Mapping[str, Any]:
    """A table of data, or that of the only task; empty if there are several."""
    if isinstance(table, list) and len(table) == 1:
        table = table[0]
    return table if isinstance(table, Mapping) else {}


def _model(model: Any, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    parts = model.modules() if isinstance(model, nn.Module) else ()
    if hasattr(model, "peft_config") or any(hasattr(part, "base_layer") for part in parts):
        raise KeelError(
            f"model: this {type(model).__name__} has adapters of peft: pass what its "
            "merge_and_unload() returns, and lora=LoraConfig(…) for a new one; or the base, and "
            "lora=FOLDER of the adapter as its save_pretrained wrote it"
        )
    if isinstance(model, PreTrainedModel):
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise KeelError(
                "model: a loaded model needs its loaded tokenizer: pass "
                "tokenizer=AutoTokenizer.from_pretrained(…), too"
            )
        return {"name": INPUTS + MODEL}
    tensors = isinstance(model, Mapping) and any(hasattr(one, "data_ptr") for one in model.values())
    if tensors or not isinstance(model, Mapping | str | os.PathLike):
        raise KeelError(
            f"model: a {type(model).__name__} cannot be trained: pass a transformers "
            "PreTrainedModel, a run, a folder or hub name, or the recipe's table as a dict"
        )
    if tokenizer is not None:
        raise KeelError("tokenizer: a model by name has its own: leave tokenizer out")
    if isinstance(model, Mapping):
        return dict(model)
    return {"name": INPUTS + MODEL if _run_folder(model) else os.fspath(model)}


def _run_folder(model: Any) -> Path | None:
    """The folder of a run, absolute; None if it is something else."""
    if not isinstance(model, str | os.PathLike) or not (Path(model) / RECIPE).is_file():
        return None
    return Path(model).absolute()


def _lora(lora: Any) -> dict[str, Any]:
    """The table of the adapter: itself, of a `LoraConfig`, or of a folder to go on from."""
    if hasattr(lora, "peft_type"):
        return {k: v for k, v in keys_of_peft(lora, "lora: the config").items() if v != ()}
    if isinstance(lora, str | Path):
        return {"adapter": str(lora)}
    if not isinstance(lora, Mapping):
        raise KeelError(
            f"lora: a {type(lora).__name__}: pass peft's LoraConfig, a dict of the keys of "
            "model.lora, or the folder of an adapter"
        )
    return dict(lora)


def _rewards(rewards: Any) -> dict[str, Any]:
    """One reward or several (functions, names, tables), or the recipe's table itself."""
    if isinstance(rewards, Mapping) and "function" not in rewards:
        return dict(rewards)
    several = rewards if isinstance(rewards, list | tuple) else [rewards]
    return {"functions": [r if isinstance(r, Mapping) else {"function": r} for r in several]}


def _data(data: Any, eval_data: Any, tables: dict[str, bytes]) -> dict[str, Any]:
    """The keys that name a stage's data; `tables` takes the files that hold it."""
    _refuse_splits(data, "data")
    if isinstance(data, Mapping) and any(isinstance(one, list) for one in data.values()):
        raise KeelError("data: a table of columns: pass rows, a list of dicts")
    source = dict(data) if isinstance(data, Mapping) else _source(data, "data", tables)
    if eval_data is not None:
        other = _source(eval_data, "eval_data", tables)
        if source.get("name") != other["name"] or "path" not in other:
            raise KeelError("eval_data: it must be of the same type as data, rows or a file")
        source["validation_path"] = other["path"]
    return source


def written_rows(data: Any, folder: Path, answers: bool) -> dict[str, Any]:
    """The keys of a task that reads rows or a file; rows are written into a folder. With `answers`
    a column `answer` has the gold answers. Raises KeelError if data are neither."""
    tables: dict[str, bytes] = {}
    source = _source(data, "data", tables)
    if "path" not in source:
        raise KeelError(f"data: {data!r} is not a file: pass rows or a file, or a name as task")
    for name, content in tables.items():
        files.write_bytes(folder / name, content)
        source["path"] = str(folder / name)
    return {**source, "answer": "answer"} if answers and "answer" in _columns(data) else source


def _columns(data: Any) -> Iterable[str]:
    columns = getattr(data, "column_names", None)
    if columns is None and isinstance(data, list | tuple) and data:
        columns = data[0]
    return columns or ()


def _of_task(data: Any) -> bool:
    """Whether data are a task, or prompts with gold answers, and not examples to imitate."""
    if isinstance(data, Mapping):  # a recipe's table
        return "path" not in data or not {"prompt", "answer"}.isdisjoint(data)
    columns = _columns(data)
    if isinstance(data, str | Path):
        if not str(data).endswith(tuple(ENDINGS)):
            return True
        columns = read_file(data).rows[0].values
    return {"prompt", "answer"} <= set(columns)


def _refuse_splits(data: Any, name: str) -> None:
    """Raise KeelError for a `datasets.DatasetDict`, of which one split is meant."""
    if isinstance(data, Mapping) and any(hasattr(one, "column_names") for one in data.values()):
        raise KeelError(
            f"{name}: a {type(data).__name__} has the splits {', '.join(map(str, data))}: pass "
            f'one, for example data=splits["{next(iter(data))}"]; eval_data takes another'
        )


def _source(data: Any, name: str, tables: dict[str, bytes]) -> dict[str, Any]:
    """The place that data is read from; rows and tables become a file."""
    _refuse_splits(data, name)
    if isinstance(data, str | Path):
        path = str(data)
        kinds = [kind for ending, kind in ENDINGS.items() if path.endswith(ending)]
        if not kinds and ":" not in path and (Path(path).suffix in OTHER_FILES or "/" in path):
            raise KeelError(f"{name}: {path!r} is not a {' or '.join(ENDINGS)} file: convert it")
        return {"name": kinds[0], "path": path} if kinds else {"name": path}
    if hasattr(data, "to_parquet"):  # datasets.Dataset, pandas.DataFrame
        buffer = BytesIO()
        data.to_parquet(buffer)
        kind, content = "parquet", buffer.getvalue()
    elif isinstance(data, Iterable) and not isinstance(data, Mapping):
        kind, content = "jsonl", "".join(_lines(data, name)).encode()
    else:
        raise KeelError(
            f"{name}: a {type(data).__name__} cannot be data: pass a datasets.Dataset, a list of "
            "dicts, a file (.jsonl, .parquet) or the name of a task"
        )
    tables[f"{name}.{kind}"] = content
    return {"name": kind, "path": f"{INPUTS}{name}.{kind}"}


def _lines(rows: Iterable[Any], name: str) -> Iterable[str]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise KeelError(f"{name}[{number}]: a {type(row).__name__}: give a dict of columns")
        try:
            text = json.dumps(dict(row), ensure_ascii=False, default=_number)  # NaN is empty
            text.encode()  # a lone surrogate cannot be
            yield text + "\n"
        except (TypeError, ValueError) as error:
            raise KeelError(
                f"{name}[{number}]: {one_line(error)}: use texts and numbers"
            ) from error


def _number(value: Any) -> Any:
    """A scalar or an array of numpy or torch as plain values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


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
            f"a {type(value).__name__} is not a function: save a reward model and name its folder "
            '({"function": "outcome", "options": {"model": FOLDER}})'
        )
    if hasattr(value, "tolist"):
        return _number(value)
    return _named(value, functions) if callable(value) else value


def named(functions: Any) -> tuple[Any, dict[str, Any]]:
    """The names of functions in a recipe, and the functions by name."""
    found: dict[str, Any] = {}
    return _plain(functions, found), found


def _named(function: Callable[..., Any], functions: dict[str, Any]) -> str:
    """`python:NAME`, with a name that no other function has."""
    own = getattr(function, "__name__", type(function).__name__)
    stem = re.sub(r"\W+", "", own) or "function"
    name, number = stem, 1
    while functions.setdefault(name, function) is not function:
        number += 1
        name = f"{stem}_{number}"
    return f"{PYTHON}:{name}"
