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
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from keel.types import KeelError, one_line

_LAUNCH: Final = {"num_processes", "nproc_per_node", "nproc-per-node"}
"""Options of launchers that say how many processes a per-device size is for."""
_PROGRAM: Final = re.compile(r"^(verl|openrlhf|recipe)\.|^trl$|\.py$|^main_\w+$")
_SPREAD: Final = {"model_init_kwargs.revision": "model_revision"}
"""Keyword arguments of a model, which are keys of their own on a command line."""


class Unread(str):
    """The text of a value that the file itself does not say."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a configuration sets: keys with dots, and the names of programs and classes in it."""

    values: Mapping[str, Any]
    names: frozenset[str] = frozenset()
    remarks: Mapping[str, str] = field(default_factory=dict)
    """By key, what is to be looked at."""


def read_settings(path: str) -> Settings:
    """The settings of a file. Raises KeelError if it cannot be read or holds none."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise KeelError(f"{path}: cannot be read: {one_line(error)}") from None
    suffix = Path(path).suffix
    try:
        if suffix == ".py":
            found = _Script(ast.parse(text), path).settings()
        elif suffix in (".yaml", ".yml", ".json"):
            found = Settings(_load(text, suffix))
        else:
            found = _command(text)
        values = dict(_flat(found.values))
        if suffix != ".py":
            plain = {k: _value(v) if type(v) is str else v for k, v in values.items()}
            values = {key: _resolved(value, plain) for key, value in plain.items()}
    except Exception as error:  # of each parser's own kind
        raise KeelError(
            f"{path}: cannot be read as {suffix or 'a script'}: {one_line(error)}"
        ) from None
    values = {
        _SPREAD.get(key, key).removeprefix("model_init_kwargs."): value
        for key, value in values.items()
    }
    if not values:
        raise KeelError(
            f"{path}: no setting found: give a YAML or JSON file, a shell script with the command "
            "line, or a Python file that makes a trainer's config"
        )
    return replace(found, values=values)


def _load(text: str, suffix: str) -> Mapping[str, Any]:
    if suffix == ".json":
        data = json.loads(text)
    else:
        data = importlib.import_module("yaml").safe_load(text)
    if not isinstance(data, Mapping):
        raise ValueError("it holds no table of keys")
    return data


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


def _value(text: str) -> Any:
    """A word as a value: a number, list, switch or nothing, else text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    if lowered in ("none", "null", "~", ""):
        return None
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        value = ast.literal_eval(text.strip())
        return [*value] if isinstance(value, tuple | set) else value
    if text.startswith("[") and text.endswith("]"):
        return [_value(part.strip()) for part in text[1:-1].split(",") if part.strip()]
    try:
        return float(text)
    except ValueError:
        return text


_REFERENCE: Final = re.compile(r"\$\{([\w.]+)\}")
_LEFT: Final = re.compile(r"\$[{(\w@*#?]")


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
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        at = next((at for at, word in enumerate(words) if _PROGRAM.search(word)), None)
        if at is not None:  # what stands before it is of a launcher
            launch, words = _options(words[:at]), words[at:]
            values |= {key: launch[key] for key in ("num_processes",) if key in launch}
            names.update(
                re.findall(
                    r"\w+", " ".join(w.rpartition("/")[2] for w in words[:2] if "=" not in w)
                )
            )
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


_MORE: Final = re.compile(
    r"\$\{?([@*]|(\w*_)?(args?|opts?|options|flags|extra)(_\w*)?(\[[@*]\])?\}?$)", re.I
)
"""A variable that holds options, not a value."""
_OPERATORS: Final[dict[type[ast.operator], Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv},
}


def _arithmetic(text: str, variables: Mapping[str, str]) -> str:
    """Whole numbers, + − * / and brackets, as a shell computes them."""

    def count(node: ast.expr) -> int:
        match node:
            case ast.BinOp():
                return int(_OPERATORS[type(node.op)](count(node.left), count(node.right)))
            case ast.Name():
                return int(_arithmetic(variables[node.id], variables))
            case ast.Constant(value=int(number)):
                return number
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
        elif _MORE.match(word) and word not in ("$@", "$*"):
            found[word] = Unread(word)
        elif re.match(r"\+{0,2}[A-Za-z_]\w*(\.\w+)+=", word):
            key, _, text = word.lstrip("+").partition("=")
            found[key] = _value(text)
    return found


def _is_option(word: str) -> bool:
    return word.startswith("--") or word in ("&", "|", "&&", ";", "2>&1") or bool(_MORE.match(word))


# ---------------------------------------------------------------- Python

_LORA: Final = {
    name: f"lora_{name}" for name in ("r", "target_modules", "modules_to_save", "task_type")
}
_LORA_DEFAULTS: Final = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""peft's, which are not those of TRL's command line."""
_READ_ELSEWHERE: Final = {"args", "peft_config", "processing_class", "tokenizer"}
"""Arguments of a trainer whose values are calls of their own, or the model's."""
_LOAD: Final = ("path", "name", "data_dir", "data_files", "split")
_LOADED: Final = {
    **{"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"},
    **{"streaming": "dataset_streaming"},
}
"""Arguments of `load_dataset` that are keys of TRL's command line."""
_FETCH: Final = {"token", "use_auth_token", "num_proc", "cache_dir", "trust_remote_code"}
_PLAIN: Final = (str, int, float)


class _Script:
    """What a script that makes a trainer says; nothing of it is run."""

    def __init__(self, tree: ast.Module, path: str) -> None:
        self._tree, self._path = tree, path
        self._values: dict[str, Any] = {}
        self._remarks: dict[str, str] = {}
        self._attributes: list[tuple[ast.Attribute, ast.expr | None]] = []
        """Those that are set, and to what; None: it depends on something."""
        self._assigned: dict[str, list[ast.expr | None]] = {}
        """By name what it is set to, in order; None: it depends on something."""
        functions = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        self._homes = {n.name: f"{path}:{n.name}" for n in functions}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self._homes |= {a.asname or a.name: f"{node.module}:{a.name}" for a in node.names}
        self._assign(tree, False)

    def _assign(self, node: ast.AST, depends: bool) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign) and one.value:
                plain = not depends and not isinstance(one, ast.AugAssign)
                targets = one.targets if isinstance(one, ast.Assign) else [one.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self._set(target.id, one.value if plain else None)
                    elif isinstance(target, ast.Attribute):
                        self._attributes.append((target, one.value if plain else None))
                    else:  # of several at once
                        self._depend(target)
            elif isinstance(one, ast.For | ast.AsyncFor):
                self._depend(one.target)
            elif isinstance(one, ast.arg):
                self._set(one.arg, None)
            branches = isinstance(one, _BRANCHES) and not _is_main(one)
            self._assign(one, depends or branches)

    def _set(self, name: str, value: ast.expr | None) -> None:
        self._assigned.setdefault(name, []).append(value)

    def _depend(self, target: ast.expr) -> None:
        """The names of a target are set to what is not read."""
        for one in ast.walk(target):
            if isinstance(one, ast.Name):
                self._set(one.id, None)

    def settings(self) -> Settings:
        """The keywords of `GRPOConfig(…)` and the like, the trainer, LoraConfig, load_dataset."""
        calls = [node for node in ast.walk(self._tree) if isinstance(node, ast.Call)]
        names: set[str] = set()
        for node in calls:
            name = _called(node)
            if name == "LoraConfig":
                self._values |= _LORA_DEFAULTS
                self._values |= {_LORA.get(k, k): v for k, v in self._keywords(node).items()}
            elif name.endswith("Trainer"):
                names.add(name)
                self._trainer(name, node)
            elif _is_config(name):
                names.add(name)
                self._values |= self._keywords(node)
        for target, given in self._attributes:
            made = self._made(target.value)
            if isinstance(made, ast.Call) and _is_config(_called(made)):
                text = Unread(ast.unparse(target))
                self._values[target.attr] = text if given is None else self.read(given)
        loads = [node for node in calls if _called(node) == "load_dataset"]
        if loads and "train_dataset" not in self._values and "dataset_name" not in self._values:
            self._dataset("train_dataset", loads[0])
        return Settings(self._values, frozenset(names), self._remarks)

    def _keywords(self, call: ast.Call) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for keyword in call.keywords:
            value = self.read(keyword.value)
            if keyword.arg is not None:
                found[keyword.arg] = value
            elif isinstance(value, dict):
                found |= value
            else:
                found[f"**{ast.unparse(keyword.value)}"] = Unread(value)
        return found

    def _trainer(self, name: str, call: ast.Call) -> None:
        rl = name.startswith(("GRPO", "RLOO"))
        order = ("model", "reward_funcs", "args") if rl else ("model", "args", "data_collator")
        sets = ("train_dataset", "eval_dataset")
        given = dict(zip((*order, *sets), call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        for keyword in call.keywords:
            if keyword.arg is None:
                text = ast.unparse(keyword.value)
                self._values[f"**{text}"] = Unread(text)
        for key in sets:
            if key in given:
                self._dataset(key, given.pop(key))
        for key, node in given.items():
            value = self.read(node)
            if key == "model":
                self._values["model_name_or_path"] = value
                made = self._made(node)
                if isinstance(made, ast.Call) and _called(made) == "from_pretrained":
                    self._values["model_init_kwargs"] = self._keywords(made)
            elif key == "reward_funcs":  # each that is not understood is named later
                named = [str(one) for one in (value if isinstance(value, list) else [value])]
                self._values[key] = named
                runs = [one for one in named if one.startswith(f"{self._path}:")]
                if runs and self._runs():
                    self._remarks[key] = (
                        f"importing {self._path} for {', '.join(runs)} runs the script, which "
                        "trains: move the function to a file of its own and name that"
                    )
            elif key not in _READ_ELSEWHERE:
                self._values[key] = value

    def _runs(self) -> bool:
        """Whether the script trains as it is imported."""
        kept = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        top = [one for one in self._tree.body if not isinstance(one, kept) and not _is_main(one)]
        calls = {_called(n) for one in top for n in ast.walk(one) if isinstance(n, ast.Call)}
        own = {name for name, home in self._homes.items() if home.startswith(f"{self._path}:")}
        return bool(calls & ({"train"} | own)) or any(one.endswith("Trainer") for one in calls)

    def _dataset(self, key: str, node: ast.expr) -> None:
        """The `load_dataset` that an expression begins with; what changes its rows is a remark."""
        text, methods, split = ast.unparse(node), list[str](), None
        found: ast.expr | None = node
        while not isinstance(found, ast.Call) or _called(found) != "load_dataset":
            if isinstance(found, ast.Subscript):
                split, found = self.read(found.slice), self._made(found.value)
            elif isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute):
                methods.append(found.func.attr)
                split = None if methods[-1] == "train_test_split" else split
                found = self._made(found.func.value)
            elif isinstance(found, ast.Name) and found is not (made := self._made(found)):
                found = made
            else:
                self._values[key] = None if text == "None" else Unread(text)
                return
        given = dict(zip(_LOAD, map(self.read, found.args), strict=False)) | self._keywords(found)
        split = given.pop("split", None) or split
        if key == "train_dataset":
            if changed := [one for one in methods if one not in ("train_test_split", "shuffle")]:
                self._remarks[key] = f"the script changes its rows: {', '.join(reversed(changed))}"
            given |= {} if split is None else {"split": split}
            fetch = {f"load_dataset.{k}": given.pop(k) for k in _FETCH & set(given)}
            self._values |= {own: given.pop(k) for k, own in _LOADED.items() if k in given}
            self._values |= {**fetch, **({"load_options": given} if given else {})}
        elif isinstance(files := given.get("data_files"), str):
            self._values["validation_file"] = files
        elif given.get("path") != self._values.get("dataset_name"):
            self._values[key] = Unread(text)
        else:  # a part that the script splits off is a share of the rows
            self._values["dataset_test_split"] = "no" if "train_test_split" in methods else split

    def _made(self, node: ast.expr) -> ast.expr:
        """What a name was set to before it is used here, or the node itself."""
        while isinstance(node, ast.Name):
            here = (node.lineno, node.col_offset)
            before = [
                one
                for one in self._assigned.get(node.id, ())
                if one is None or (one.end_lineno, one.end_col_offset) < here
            ]
            if not before or before[-1] is None or None in before:
                break
            node = before[-1]
        return node

    def read(self, node: ast.expr) -> Any:
        """The value of an expression of literals and names of them, else its text."""
        made = self._made(node)
        match made:
            case ast.List() | ast.Tuple():
                return [self.read(one) for one in made.elts]
            case ast.Dict() if None not in made.keys:
                names = [str(self.read(key)) for key in made.keys if key is not None]
                return dict(zip(names, map(self.read, made.values), strict=True))
            case ast.Call() if _called(made) == "dict" and not made.args:
                return self._keywords(made)
            case ast.Call() if _called(made) == "from_pretrained" and made.args:
                return self.read(made.args[0])
            case ast.Attribute(value=ast.Name(id="torch")):
                return made.attr
            case ast.UnaryOp(op=ast.USub()) if type(value := self.read(made.operand)) in _PLAIN[1:]:
                return -value
        try:
            if isinstance(made, ast.JoinedStr):
                return "".join(str(self._part(one)) for one in made.values)
            if isinstance(made, ast.BinOp):
                left, right = self.read(made.left), self.read(made.right)
                if {type(left), type(right)} <= {int, float} or (
                    type(left) is type(right) is str and isinstance(made.op, ast.Add)
                ):
                    return _OPERATORS[type(made.op)](left, right)
            return ast.literal_eval(made)
        except (ValueError, TypeError, KeyError, ArithmeticError):
            text = ast.unparse(made)
            return self._homes.get(text, Unread(text))

    def _part(self, node: ast.expr) -> Any:
        """A part of an f-string. Raises ValueError if it is not known."""
        plain = isinstance(node, ast.FormattedValue) and node.format_spec is None
        value = self.read(node.value if plain else node)  # type: ignore[attr-defined]
        if type(value) not in _PLAIN:
            raise ValueError
        return value


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


_BRANCHES: Final = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.ExceptHandler)
"""What is set within them depends on how the script runs."""


def _is_config(name: str) -> bool:
    """Whether a class has the arguments of a trainer."""
    return name.endswith("Config") or name == "TrainingArguments"


def _is_main(node: ast.AST) -> bool:
    """Whether it is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
