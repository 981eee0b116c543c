"""Fingerprints of the files that a recipe names: data, code, models. Torch-free.

A run is a function of its recipe and of these. A fingerprint is the SHA-256 of a file's content, or
of all files of a model's or data set's folder, or of the source of a function that was passed to
`keel.train`, by the recipe's key and value; what comes from a hub is named by the recipe's revision
and has none.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keel.config.entry import PYTHON, load_entry, source_of
from keel.config.load import in_run_folder
from keel.runs.files import sha256

_ENTRY = re.compile(r"(?P<place>[\w./~-]+):[A-Za-z_][\w.]*")
"""`module:function`, or `path/to/file.py:function`."""


def fingerprints(recipe: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """The fingerprint of each input that the recipe in a run folder names, by `KEY (VALUE)`."""
    found = {}
    for key, value in texts(recipe):
        try:
            digest = _fingerprint(key, in_run_folder(value, folder))
        except (Exception, SystemExit):  # of a user's package, which is imported here
            continue  # reading it reports what is wrong
        if digest is not None:
            found[f"{key} ({value})"] = digest
    return found


def texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The texts of a recipe, each with its key."""
    if isinstance(value, Mapping):
        for name, inside in value.items():
            yield from texts(inside, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for at, inside in enumerate(value):
            yield from texts(inside, f"{key}[{at}]")
    elif isinstance(value, str) and "\n" not in value:
        yield key, value


def _fingerprint(key: str, value: str) -> str | None:
    entry = _ENTRY.fullmatch(value)
    if entry is not None and entry["place"] == PYTHON:
        function = load_entry(value, key)
        source_text = inspect.getsource(getattr(function, "func", function))
        return hashlib.sha256(source_text.encode()).hexdigest()
    if entry is not None:
        source = source_of(entry["place"])
        return None if source is None else sha256(source)
    path = Path(value).expanduser()
    names = set(re.findall(r"\w+", key))
    if names & {"path", "validation_path", "data_files", "data_dir"}:
        if path.is_dir():
            return _of_files(path, path.rglob("*"))
        return sha256(path) if path.is_file() else None
    if key.rpartition(".")[2] in ("name", "model") and (path / "config.json").is_file():
        return _of_files(path, path.iterdir())
    return None


def _of_files(folder: Path, paths: Iterable[Path]) -> str:
    """The fingerprint of the names and contents of files of a folder."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)} {sha256(path)}\n".encode())
    return digest.hexdigest()
