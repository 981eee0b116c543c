"""The keys and values in a YAML or JSON file, a command line, or a Python script.

A command line is a shell script's: continued lines, comments, assignments of variables,
`${X:-default}` and `$((arithmetic))` are read; nothing is run.
"""

from __future__ import annotations

import ast
import importlib
import json
import operator
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from keel.types import KeelError, one_line

_LAUNCH: Final = {"num_processes", "nproc_per_node", "nproc-per-node"}
"""Options of launchers that say how many processes a per-device size is for."""
_PROGRAM: Final = re.compile(r"^(verl|openrlhf|recipe)\.|^trl$|\.py$|^main_\w+$")
_LORA: Final = {
    name: f"lora_{name}" for name in ("r", "target_modules", "modules_to_save", "task_type")
}
_LORA_DEFAULTS: Final = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""peft's, which are not those of TRL's command line."""
_ARGUMENTS: Final = {
    "model": "model_name_or_path",
    "reward_funcs": "reward_funcs",
    "reward_weights": "reward_weights",
}
"""Arguments of a trainer that its command line has under these names."""


class Unread(str):
    """The text of a value that the file itself does not say."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a configuration sets: keys with dots, and the names of programs and classes in it."""

    values: Mapping[str, Any]
    names: frozenset[str] = frozenset()


def read_settings(path: str) -> Settings:
    """The settings of a file. Raises KeelError if it cannot be read or holds none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise KeelError(f"{path}: cannot be read: {one_line(error)}") from None
    suffix = Path(path).suffix
    try:
        if suffix == ".py":
            found = _python(ast.parse(text), path)
        elif suffix in (".yaml", ".yml", ".json"):
            found = Settings(dict(_flat(_load(text, suffix))))
        else:
            found = _command(text)
    except KeelError:
        raise
    except Exception as error:  # of each parser's own kind
        raise KeelError(
            f"{path}: cannot be read as {suffix or 'a script'}: {one_line(error)}"
        ) from None
    if suffix != ".py":
        plain = {key: _resolved(value, found.values) for key, value in found.values.items()}
        found = Settings(plain, found.names)
    if not found.values:
        raise KeelError(
            f"{path}: no setting found: give a YAML or JSON file, a shell script with the command "
            "line, or a Python file that makes a trainer's config"
        )
    return found


def _load(text: str, suffix: str) -> Mapping[str, Any]:
    if suffix == ".json":
        data = json.loads(text)
    else:
        data = importlib.import_module("yaml").safe_load(text)
    if not isinstance(data, Mapping):
        raise KeelError("it holds no table of keys")
    return data


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, _value(value) if isinstance(value, str) else value


def _value(text: str) -> Any:
    """A word as a value: a number, list, switch or nothing, else text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null", "~", ""):
        return None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        pass
    if text.startswith("[") and text.endswith("]"):
        return [_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    try:
        return float(text)
    except ValueError:
        return text


_REFERENCE: Final = re.compile(r"\$\{([\w.]+)\}")
_LEFT: Final = re.compile(r"\$[{(A-Za-z_]")


def _resolved(value: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """A value with those of other keys in place of `${a.b}`."""
    if isinstance(value, list):
        return [_resolved(one, values, depth) for one in value]
    if not isinstance(value, str) or not _LEFT.search(value):
        return value
    if depth > 8:  # a circle
        return Unread(value)
    whole = _REFERENCE.fullmatch(value)
    if whole and whole[1] in values:
        return _resolved(values[whole[1]], values, depth + 1)
    text = _REFERENCE.sub(
        lambda m: str(_resolved(values[m[1]], values, depth + 1)) if m[1] in values else m[0], value
    )
    return Unread(text) if _LEFT.search(text) else text


# ---------------------------------------------------------------- command lines


def _command(text: str) -> Settings:
    """The settings of the command line in a script: `--key value`, and hydra's `key=value`."""
    joined = re.sub(r"\\\n", " ", re.sub(r"\\[ \t]+\n", "\\\n", text))
    variables: dict[str, str] = {"HOME": os.environ.get("HOME", "~")}
    values: dict[str, Any] = {}
    names: set[str] = set()
    for line in joined.splitlines():
        words = _words(_expanded(line, variables))
        if len(words) == 1 and re.match(r"[A-Za-z_]\w*=", words[0]):
            name, _, value = words[0].partition("=")
            variables[name] = value
            continue
        at = next((at for at, word in enumerate(words) if _PROGRAM.search(word)), None)
        if at is not None:  # what stands before it is of a launcher
            launch, words = _options(words[:at]), words[at:]
            values |= {key: launch[key] for key in ("num_processes",) if key in launch}
            names.update(re.findall(r"\w+", " ".join(words[:2])))
        values |= _options(words)
    return Settings(values, frozenset(names))


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation over several lines, which no option is in
        return []
    return words[1:] if words[:1] in (["export"], ["local"]) else words


def _expanded(line: str, variables: Mapping[str, str]) -> str:
    """The line with what variables are worth. Names without a value stay as they are."""

    def value(match: re.Match[str]) -> str:
        name, default = match["name"] or match["bare"], match["default"]
        return variables.get(name, match[0] if default is None else default.strip("\"'"))

    for _ in range(4):  # a default may hold another variable
        line = re.sub(
            r"\$(?:\{(?P<name>\w+)(?::?-(?P<default>[^{}]*))?\}|(?P<bare>[A-Za-z_]\w*))",
            value,
            line,
        )
    return re.sub(r"\$\(\((.*?)\)\)(?!\))", lambda m: _arithmetic(m[1], variables), line)


_OPERATORS: Final[dict[type[ast.operator], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


_PYTHON_OPERATORS: Final = {
    **_OPERATORS,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def _arithmetic(text: str, variables: Mapping[str, str]) -> str:
    """Whole numbers, + − * / and brackets, as a shell computes them."""

    def count(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return int(_OPERATORS[type(node.op)](count(node.left), count(node.right)))
        if isinstance(node, ast.Name):
            return int(_arithmetic(variables[node.id], variables))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(text)

    try:
        return str(count(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return f"$(({text}))"


def _options(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            given = [text] if equals else []
            while not equals and at < len(words) and not _is_option(words[at]):
                given.append(words[at])
                at += 1
            if name in _LAUNCH:
                found["num_processes"] = _value(given[0]) if given else 1
                continue
            name = name.replace("-", "_")
            switch = not given
            if switch and name.startswith("no_") and name != "no_advantage_std_norm":
                found[name.removeprefix("no_")] = False
            else:
                many = [_value(one) for one in given]
                found[name] = True if switch else many[0] if len(many) == 1 else many
        elif re.match(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=", word):
            key, _, text = word.lstrip("+").partition("=")
            found[key] = _value(text)
    return found


def _is_option(word: str) -> bool:
    return word.startswith("--") or word in ("&", "|", "&&", ";", "2>&1") or word.startswith("$")


# ---------------------------------------------------------------- Python


def _python(tree: ast.Module, path: str) -> Settings:
    """The keywords of `GRPOConfig(…)` and the like, of the trainer, LoraConfig, load_dataset."""
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    homes = {n.name: f"{path}:{n.name}" for n in tree.body if isinstance(n, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {a.asname or a.name: f"{node.module}:{a.name}" for a in node.names}

    def read(node: ast.expr, depth: int = 0) -> Any:
        if depth > 20:  # a name that is made of itself
            return Unread(ast.unparse(node))
        if isinstance(node, ast.Name) and node.id in constants and node.id not in homes:
            return read(constants[node.id], depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            return [read(one, depth + 1) for one in node.elts]
        try:
            if isinstance(node, ast.BinOp):
                left, right = read(node.left, depth + 1), read(node.right, depth + 1)
                if {type(left), type(right)} <= {int, float}:
                    return _PYTHON_OPERATORS[type(node.op)](left, right)
            return ast.literal_eval(node)
        except (ValueError, TypeError, KeyError, ArithmeticError):
            text = ast.unparse(node)
            return homes.get(text, Unread(text))

    values: dict[str, Any] = {}
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        keywords = {k.arg: read(k.value) for k in node.keywords if k.arg is not None}
        if name == "LoraConfig":
            values |= _LORA_DEFAULTS
            values |= {_LORA.get(key, key): value for key, value in keywords.items()}
        elif name == "load_dataset":
            given = [read(one) for one in node.args]
            values |= dict(zip(("dataset_name", "dataset_config"), given, strict=False))
            if "split" in keywords:
                values["dataset_train_split"] = keywords["split"]
        elif name.endswith("Trainer"):
            names.add(name)
            values |= {_ARGUMENTS[k]: v for k, v in keywords.items() if k in _ARGUMENTS}
            if "reward_funcs" in keywords:  # each that is not understood is named later
                named = keywords["reward_funcs"]
                values["reward_funcs"] = [
                    str(one) for one in (named if isinstance(named, list) else [named])
                ]
        elif name.endswith("Config"):
            names.add(name)
            values |= {k: v for k, v in keywords.items() if k not in ("model_init_kwargs",)}
    return Settings(values, frozenset(names))
