"""Python objects by name: `module:function`, or `path/to/file.py:function`.

An object that was passed to `keel.train` has no module of its own: its name is `python:NAME`, and
it is found only while `passed` lasts.

The kinds of stages are found too: the `STAGE` of each module in `keel.training.stages`. Nothing
lists them: a new kind is one new file, which imports torch only in the methods that train.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from keel.config.fields import nearest
from keel.types import KeelError, one_line

PYTHON = "python"
PASSED = re.compile(rf"{PYTHON}:\w+")
"""The name of an object that was passed."""
_passed: dict[str, Any] = {}
KINDS = "keel.training.stages"
DEFAULT_KIND = "rl"
"""The kind of a stage that does not set `stage`."""


@contextmanager
def passed(objects: Mapping[str, Any]) -> Iterator[None]:
    """Within the block, `python:NAME` is the object of that name. Not for concurrent runs."""
    before = dict(_passed)
    _passed.update(objects)
    try:
        yield
    finally:
        _passed.clear()
        _passed.update(before)


def is_missing(entry: str) -> bool:
    """Whether an entry names an object that would have to be passed again."""
    return PASSED.fullmatch(entry) is not None and entry.partition(":")[2] not in _passed


def load_entry(entry: str, what: str) -> Any:
    """The object that `entry` names; `what` says what it is for ("reward", "task").

    A module is looked for on the path and in the working folder. Raises KeelError, on one line,
    for a missing file, module or attribute, and for a module that fails as it is imported.
    """
    place, _, name = entry.rpartition(":")
    if not place or not name:
        raise KeelError(f"{what} {entry!r}: write module:function or path/to/file.py:function")
    if place == PYTHON:
        if name not in _passed:
            raise KeelError(
                f"{what} {entry!r} was passed to keel.train as an object: pass it again (with "
                "resume=True, to continue a run), or name it as module:function"
            )
        return _passed[name]
    module = load_module(place, entry, what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            guess = nearest(part, [n for n in vars(found) if not n.startswith("_")])
            fix = f"did you mean {guess!r}?" if guess else "define it there"
            raise KeelError(f"{what} {entry!r}: {place} has no {part!r}: {fix}")
        found = getattr(found, part)
    return found


def load_function(entry: str, what: str) -> Callable[..., Any]:
    """The function that `entry` names, as `load_entry`. Raises KeelError, also if it is none."""
    found = load_entry(entry, what)
    if not callable(found):
        raise KeelError(f"{what} {entry!r} is a {type(found).__name__}, not a function")
    return cast("Callable[..., Any]", found)


def load_module(place: str, entry: str, what: str) -> ModuleType:
    """The module or file `place`, which `entry` names for `what`. Raises KeelError as above."""
    try:
        return _file(place, entry, what) if place.endswith(".py") else _module(place, entry, what)
    except KeelError:
        raise
    except (Exception, SystemExit) as error:
        message = one_line(error, named=True)
        raise KeelError(f"{what} {entry!r} fails as it is imported: {message}") from error


def source_of(place: str) -> Path | None:
    """The file that a module, or the file itself, is read from; None if it has none.

    Imports the packages that the module is in, which may raise whatever they do.
    """
    if place.endswith(".py"):
        path = Path(place).expanduser()
        return path if path.is_file() else None
    _search_here()
    spec = importlib.util.find_spec(place)
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    return Path(spec.origin)


def _search_here() -> None:
    """Let modules be found in the working folder, where a console script does not look."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


def _file(place: str, entry: str, what: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise KeelError(f"{what} {entry!r}: there is no file {place!r} in {Path.cwd()}")
    # A name of its own for each path, so that two files named rewards.py do not meet.
    name = f"keel_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up while they load
    if str(path.parent) not in sys.path:  # as for a script: it may import files of its folder
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _module(place: str, entry: str, what: str) -> ModuleType:
    try:
        _search_here()
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
            raise KeelError(
                f"{what} {entry!r}: there is no module {error.name!r} on the Python path or in "
                f"{Path.cwd()}: give the file as path/to/file.py:function"
            ) from None
        raise


@cache
def stage_kinds() -> tuple[type[Any], ...]:
    """Every kind of stage (a subclass of `keel.config.stage.StageConfig`), by its module's name."""
    folder = importlib.import_module(KINDS).__path__
    names = sorted(module.name for module in pkgutil.iter_modules(folder))
    return tuple(importlib.import_module(f"{KINDS}.{name}").STAGE for name in names)


def stage_kind(name: str) -> type[Any] | None:
    """The kind that a recipe calls `stage = name`; None if there is none."""
    kinds = (kind for kind in stage_kinds() if kind.model_fields["stage"].default == name)
    return next(kinds, None)
