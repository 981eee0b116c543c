"""The process that runs reasoning-gym: one JSON request a line on stdin, one JSON reply a line.

Started by `keel.tasks.gym` as a file of its own, without Keel on its path. Requests:

    {"op": "names"}                                                     -> {name: description}
    {"op": "item", "name", "options", "seed", "size", "index"}          -> {question, answer, …}
    {"op": "score", … as item, "text": the answer given}                -> number

A reply is {"ok": value} or {"error": one line, "known": names of options}. The process allows
itself so many seconds of computing for each request (a scorer gets `cpu`) and is ended by the
system past them.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import os
import random
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

MEMORY = 8 * 2**30
"""Address space, in bytes; an answer such as 9**9**9 asks for more."""
SETUP_SECONDS = 120.0
"""Of computing, to import, to make a data set or an item."""
DATASETS_KEPT = 8
ITEMS_KEPT = 4096

Request = Mapping[str, Any]


class Desk:
    """The data sets and items made so far; newest last, a few kept."""

    def __init__(self) -> None:
        self.datasets: OrderedDict[str, Any] = OrderedDict()
        self.items: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def answer(self, request: Request) -> Any:
        """The value of one request."""
        if request["op"] == "names":
            return names()
        if request["op"] == "item":
            return plain(self.item(request))
        # A scorer may write into the entry; the next completion gets it as it was.
        entry = copy.deepcopy(self.item(request))
        dataset = self.dataset(request)
        literal_only(sys.modules[type(dataset).__module__])
        allow(request["cpu"])
        try:
            with GUARD:
                return float(dataset.score_answer(request["text"], entry=entry))
        except (Exception, SystemExit):
            return 0.0  # an answer that the scorer cannot read is a wrong answer

    def dataset(self, request: Request) -> Any:
        """The data set of a request's name, options, seed and size."""
        key = json.dumps([request[k] for k in ("name", "options", "seed", "size")])
        if key not in self.datasets:
            self.datasets[key] = create(request)
            if len(self.datasets) > DATASETS_KEPT:
                self.datasets.popitem(last=False)
        self.datasets.move_to_end(key)
        return self.datasets[key]

    def item(self, request: Request) -> dict[str, Any]:
        """The item at a request's address: a function of the address alone."""
        key = json.dumps([request[k] for k in ("name", "options", "seed", "size", "index")])
        if key not in self.items:
            dataset = self.dataset(request)
            seed_everything(request["seed"])  # a few generators draw from the shared streams
            self.items[key] = dataset[request["index"]]
            if len(self.items) > ITEMS_KEPT:
                self.items.popitem(last=False)
        return self.items[key]


class Guard:
    """Refuses what an answer may not do, while it is scored.

    Some scorers run the answer: `eval`, and sympy's parser, which is `eval` too. Python tells an
    audit hook before a file is opened, a process started, a socket made; a hook cannot be taken
    away again. Reading the interpreter's own files stays allowed, for modules that load late.
    """

    REFUSED = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "_posixsubprocess.")
    ALLOWED = frozenset({"os.listdir", "os.scandir", "os.walk"})

    def __init__(self) -> None:
        self.closed = False
        self.own = tuple({os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)})
        self.hooked = False

    def __enter__(self) -> None:
        if not self.hooked:
            sys.addaudithook(self.hook)
            self.hooked = True
        self.closed = True

    def __exit__(self, *error: object) -> None:
        self.closed = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Raises PermissionError where an answer reaches out."""
        if not self.closed:
            return
        if event == "open" and not self.reads_own(*arguments):
            raise PermissionError("an answer opens a file")
        if event.startswith(self.REFUSED) and event not in self.ALLOWED:
            raise PermissionError(f"an answer asks for {event}")

    def reads_own(self, path: Any, mode: Any, flags: Any) -> bool:
        """Whether a file is the interpreter's, and only read."""
        writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        if not isinstance(path, str | bytes) or (isinstance(flags, int) and flags & writes):
            return False
        return os.path.realpath(os.fsdecode(path)).startswith(tuple(p + os.sep for p in self.own))


GUARD = Guard()


def literal_only(module: Any) -> None:
    """A scorer that evaluates the answer gets a literal of it, and runs nothing.

    Only where the module evaluates nothing else, such as the expressions that it makes itself.
    """
    if module.__name__.rpartition(".")[2] in EVALUATING:
        module.eval = ast.literal_eval


EVALUATING = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")


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
    """A value as JSON can hold it; what it cannot becomes text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value)


def allow(seconds: float) -> None:
    """Let the system end this process after so many further seconds of computing."""
    try:
        import resource
    except ImportError:  # no such limits on this system; the parent still keeps time
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    budget = int(used.ru_utime + used.ru_stime + seconds) + 1
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or budget < hard:
        resource.setrlimit(resource.RLIMIT_CPU, (budget, hard))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))


def main() -> None:
    """Answer requests until stdin ends."""
    # The data sets' code may print and read; the channel is kept out of its reach.
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    desk = Desk()
    for line in requests:
        request = json.loads(line)
        allow(SETUP_SECONDS)
        try:
            reply = {"ok": desk.answer(request)}
        except Exception as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            reply = {"error": message, "known": known_options(request)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
