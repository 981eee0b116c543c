"""The process that runs reasoning-gym: one JSON request a line on stdin, one JSON reply a line.

Started by `keel.data.tasks.gym` in the sandbox, without the rest of Keel. Requests:

    {"op": "names"}                                                     -> {name: description}
    {"op": "item", "name", "options", "seed", "size", "index"}          -> {question, answer, …}
    {"op": "score", … as item, "text", "cpu", "patience"}               -> number from 0 to 1

A reply is {"ok": value} or {"error": one line, "known": names of options}. An answer is scored in a
process that is forked for it alone (`keel.platform.sandbox.confined`), unless its scorer is known
to do nothing but compare strings.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import random
import sys
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from importlib.metadata import version
from typing import Any

from keel.platform.sandbox.confined import Confined, Request, serve

from .gym_expression import prepare

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
