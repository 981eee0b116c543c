"""The process that runs reasoning-gym: one JSON request a line on stdin, one JSON reply a line.

Started by `keel.data.gym` in the sandbox, without the rest of Keel. Requests:

    {"op": "names"}                                                     -> {name: description}
    {"op": "item", "name", "options", "seed", "size", "index"}          -> {question, answer, …}
    {"op": "score", … as item, "text", "cpu", "patience"}               -> number from 0 to 1

A reply is {"ok": value} or {"error": one line, "known": names of options}. An answer is scored in a
process that is forked for it alone (`keel.platform.confined`), unless its scorer is known
to do nothing but compare strings. In place of `eval` that process makes a syntax tree of the text,
and of the tree sympy's objects; only numbers, operators, names of symbols and a few functions are
read.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import dataclasses
import gc
import json
import math
import operator
import random
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from importlib.metadata import version
from typing import Any

import sympy

from keel.platform.confined import Confined, Request, serve

LONGEST = 10_000
"""Characters; an answer has a few dozen."""
MOST_BITS = 10_000.0
"""Of any number on the way, so that `9**9**9` is refused before it is computed."""
CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}
_CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
_KINDS = ("{}", "a{}", "{}h", "a{}h")
FUNCTIONS = {
    **{name: getattr(sympy, name) for kind in _KINDS for name in map(kind.format, _CIRCULAR)},
    **{name: getattr(sympy, name) for name in ("exp", "log", "ln", "sqrt", "cbrt", "Abs", "sign")},
    "abs": sympy.Abs,
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
# No comment, which a scorer would count the numbers of, and no other way to write one.
_ALLOWED = re.compile(r"[A-Za-z0-9_+\-*/%(),. ]*")
_NUMBER = re.compile(r"\d{1,100}(?:\.\d{0,100})?|\.\d{1,100}")


def arithmetic(text: str) -> Any:
    """The value of a text of numbers and operators. Raises ValueError for any other."""
    return _read(text, None, {})


def formula(text: str, local_dict: Mapping[str, Any] | None = None) -> Any:
    """The formula of a text; with functions if it has its own symbols (`local_dict`).

    Other names than those are symbols too, unless they are sympy's or Python's. Raises ValueError
    for any other text.
    """
    return _read(text, dict(local_dict or {}), FUNCTIONS if local_dict else {})


def _read(text: str, names: dict[str, Any] | None, functions: Mapping[str, Any]) -> Any:
    line = " ".join(text.split())
    if len(line) > LONGEST or not _ALLOWED.fullmatch(line):
        raise ValueError("not a formula")
    tree = ast.parse(line, mode="eval").body
    if _bits(tree) > MOST_BITS:
        raise ValueError("a formula of too large numbers")
    return _value(tree, line, names, functions)


def _value(node: ast.expr, text: str, names: dict[str, Any] | None, functions: Any) -> Any:
    if isinstance(node, ast.Constant):
        literal = text[node.col_offset : node.end_col_offset]
        if not _NUMBER.fullmatch(literal):
            raise ValueError("not a plain number")
        return sympy.Integer(literal) if literal.isdigit() else sympy.Float(literal)
    if isinstance(node, ast.Name):
        return _symbol(node.id, names)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, text, names, functions))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left = _value(node.left, text, names, functions)
        return _BINARY[type(node.op)](left, _value(node.right, text, names, functions))
    called = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
    if isinstance(node, ast.Call) and called in functions and not node.keywords:
        given = [_value(one, text, names, functions) for one in node.args[:3]]
        return functions[called](*given)
    raise ValueError("not a formula")


def _symbol(name: str, names: dict[str, Any] | None) -> Any:
    if names is None or name.startswith("_"):
        raise ValueError("a name in a formula that has none")
    if name in names:
        return names[name]
    if name in CONSTANTS:
        return CONSTANTS[name]
    if hasattr(sympy, name) or hasattr(builtins, name):
        raise ValueError(f"{name} is not a symbol")
    return sympy.Symbol(name)


def _bits(node: ast.expr) -> float:
    """How many binary digits a value may have, roughly; a symbol counts as 4."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = abs(node.value)
        return math.log2(value + 2) if value < math.inf else math.inf
    if isinstance(node, ast.UnaryOp):
        return _bits(node.operand)
    if isinstance(node, ast.Call):
        return 2.0 + sum(map(_bits, node.args))
    if isinstance(node, ast.BinOp):
        left, right = _bits(node.left), _bits(node.right)
        if isinstance(node.op, ast.Pow):
            return left * math.exp2(min(right, 64.0))
        return max(left, right) + 1 if isinstance(node.op, ast.Add | ast.Sub) else left + right
    return 2.0


def prepare() -> None:
    """Replace what scorers evaluate an answer with; for this process alone.

    Formulas are read, not evaluated; other scorers get a literal of Python, or nothing. NaN is
    refused where a comparison with it would pass for equality.
    """
    sympy.parse_expr = formula
    for path, name, replacement in (
        ("games.countdown", "parse_expr", arithmetic),
        ("games.puzzle24", "parse_expr", arithmetic),
        ("algorithmic.string_insertion", "eval", ast.literal_eval),
        ("algorithmic.spiral_matrix", "eval", ast.literal_eval),
        ("algorithmic.binary_matrix", "eval", ast.literal_eval),
        ("games.n_queens", "eval", ast.literal_eval),
        ("algorithmic.number_sorting", "float", _number(float)),
        ("algebra.complex_arithmetic", "float", _number(float)),
        ("algebra.complex_arithmetic", "complex", _number(complex)),
    ):
        setattr(sys.modules[f"reasoning_gym.{path}"], name, replacement)


def _number(kind: Callable[..., Any]) -> Callable[..., Any]:
    def number(*given: Any) -> Any:
        value = kind(*given)
        if value != value:
            raise ValueError("not a number")
        return value

    return number


DATASETS_KEPT = 8
ITEMS_KEPT = 4096
REVIEWED = "0.1.25"
"""The version of reasoning-gym whose scorers were read; with another, each answer has its fork."""
COMPARING = frozenset(
    {
        *("ab", "circuit_logic", "color_cube_rotation", "dice", "emoji_mystery", "figlet_font"),
        *("family_relationships", "futoshiki", "game_of_life_halting", "knights_knaves"),
        *("letter_jumble", "manipulate_matrix", "mini_sudoku", "needle_haystack"),
        *("palindrome_generation", "path_star", "self_reference", "sentence_reordering"),
        *("spell_backward", "sudoku", "word_ladder", "zebra_puzzles"),
    }
)
"""Data sets whose own scorer only splits, strips and compares strings, in time near the length.

So does the scorer of the base class, which most of the others have.
"""


def bounded(value: Any) -> float:
    """A verdict: from 0 to 1, and 0 for NaN."""
    number = float(value)
    return min(max(number, 0.0), 1.0) if number == number else 0.0


def answer(confined: Confined, request: Request) -> Any:
    """The value of one request."""
    if request["op"] == "names":
        return names()
    item = item_at(address_of(request, "index"))
    if request["op"] == "item":
        return plain(item)
    return score(confined, request, item)


def score(confined: Confined, request: Request, item: dict[str, Any]) -> float:
    """What the data set's scorer says of an answer; 0 if it fails."""
    dataset = dataset_at(address_of(request))

    def judge() -> float:
        # A scorer may write into the entry; the next completion gets it as it was.
        try:
            return bounded(dataset.score_answer(request["text"], entry=copy.deepcopy(item)))
        except (Exception, SystemExit):
            return 0.0  # an answer that the scorer cannot read is a wrong answer

    if compares(request["name"], dataset):
        return judge()

    def judge_alone() -> float:
        seed_everything(request["seed"])  # the fork's random streams have no seed of ours
        return judge()

    found = confined.value(judge_alone, request["cpu"], request["patience"])
    return 0.0 if isinstance(found, str) else bounded(found)


def address_of(request: Request, *more: str) -> str:
    """What a data set, or with its index an item, is made from, as JSON."""
    return json.dumps({name: request[name] for name in ("name", "options", "seed", "size", *more)})


@lru_cache(maxsize=DATASETS_KEPT)
def dataset_at(address: str) -> Any:
    """The data set at an address."""
    request = json.loads(address)
    dataset = create(request)
    if not compares(request["name"], dataset):
        warm(dataset, request["seed"])
    return dataset


@lru_cache(maxsize=ITEMS_KEPT)
def item_at(address: str) -> dict[str, Any]:
    """The item at an address: a function of the address alone."""
    request = json.loads(address)
    dataset = dataset_at(address_of(request))
    seed_everything(request["seed"])  # a few generators draw from the shared streams
    found: dict[str, Any] = dataset[request["index"]]
    return found


def compares(name: str, dataset: Any) -> bool:
    """Whether a scorer is known to evaluate, parse and match nothing."""
    from reasoning_gym.dataset import ProceduralDataset

    if not is_reviewed():
        return False
    if type(dataset).score_answer is ProceduralDataset.score_answer:
        return True
    return name in COMPARING


@cache
def is_reviewed() -> bool:
    """Whether the installed reasoning-gym is the one whose scorers were read."""
    return version("reasoning-gym") == REVIEWED


def equals(dataset: Any, answer: str | None, entry: Mapping[str, Any]) -> float:
    """1 for the item's own answer: in place of a scorer for which any text but none is True."""
    return float(answer is not None and answer.strip() == str(entry["answer"]))


def warm(dataset: Any, seed: int) -> None:
    """Score a data set's own answer, so that no fork has to import and to remember as much again.

    It is not a policy's text: the data set made it.
    """
    seed_everything(seed)
    with contextlib.suppress(Exception):
        entry = copy.deepcopy(dataset[0])
        dataset.score_answer(entry["answer"], entry=entry)
    gc.collect()
    gc.freeze()  # what is not traced is not copied into each fork


def create(request: Request) -> Any:
    """A data set by name."""
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    options = dict(request["options"])
    if request["name"] == "composite":
        specs = options.get("datasets") or []
        options["datasets"] = [
            DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in specs
        ]
    seed_everything(request["seed"])
    return reasoning_gym.create_dataset(
        request["name"], **{**options, "seed": request["seed"], "size": request["size"]}
    )


def names() -> dict[str, str]:
    """Every data set, with the first line of its description."""
    from reasoning_gym.factory import DATASETS

    return {name: describe(cls) for name, (cls, _) in sorted(DATASETS.items())}


def describe(cls: type) -> str:
    """The first line of a class's description, else of its module's, else its name."""
    for text in (cls.__doc__, sys.modules[cls.__module__].__doc__):
        if text and text.strip():
            return text.strip().splitlines()[0]
    return cls.__name__


def known_options(request: Request) -> list[str]:
    """The options of a data set; those that the address decides left out."""
    from reasoning_gym.factory import DATASETS

    if request.get("name") not in DATASETS:
        return []
    config = DATASETS[request["name"]][1]
    return [f.name for f in dataclasses.fields(config) if f.name not in ("seed", "size")]


def seed_everything(seed: int) -> None:
    """Seed this process's shared random streams."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)


def plain(value: Any) -> Any:
    """A value as JSON can hold it; anything else becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value)


def start(program: bytes) -> Callable[[Request], Any]:
    """What answers requests; `program` is the filter of system calls of each verdict."""
    # Imported here, so that what goes wrong is on the standard error.
    from reasoning_gym.algorithmic.game_of_life_halting import GameOfLifeHaltingDataset

    GameOfLifeHaltingDataset.score_answer = equals

    return partial(answer, Confined(program, prepare))


if __name__ == "__main__":
    serve(start, known_options)
