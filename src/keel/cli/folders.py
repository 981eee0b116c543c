"""`keel runs list`, `tag`, `untag` and `delete`: run folders, and the disk that they take."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from keel.analysis.text import visible
from keel.cli.main import print_result
from keel.platform import files
from keel.runs import checkpoint
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.types import KeelError
from keel.view.library import Library, duration

TAG = re.compile(r"[\w.:+-]{1,40}")
COLUMNS = ("run", "recipe", "state", "steps", "newest", "accuracy", "time", "disk", "tags")


def run_runs_list(arguments: argparse.Namespace) -> None:
    """Print the runs of a folder."""
    library = Library([arguments.folder])
    found = [_facts(library, name) for name in library.names()]
    print_result(arguments, found, _table(found))


def _facts(library: Library, name: str) -> dict[str, Any]:
    """What a run is and takes; of one that cannot be read why."""
    try:
        opened = library.get(name)
        run = opened.run
        about = {"recipe": run.info().get("name"), **opened.facts(), "tags": run.tags()}
        size = {"seconds": round(run.seconds(), 3), "bytes": run.disk_use()}
        return {**about, **size, "folder": str(run.folder.path)}
    except KeelError as error:
        return {"run": visible(name, 80), "state": "damaged", "error": str(error)}


def _table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    lines = [COLUMNS, *map(_cells, found)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    for line in lines:
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)
        ).rstrip()
    total = sum(one.get("bytes", 0) for one in found)
    yield f"\n{_count(len(found), 'run')}, {decimal(total)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    """A run as a line of the table."""
    if "error" in one:
        return (one["run"], "", one["state"], *[""] * 5, visible(one["error"], 200))
    newest = "" if one["newest"] is None else f"{one['measure']} {one['newest']:.3g}"
    accuracy = "" if one["accuracy"] is None else f"{one['accuracy']:.1%}"
    return (
        *(one["run"], visible(one["recipe"] or "", 40), one["state"]),
        *(f"{one['step']:,}/{one['steps']:,}", newest, accuracy),
        *(duration(one["seconds"]), decimal(one["bytes"]), visible(" ".join(one["tags"]), 80)),
    )


def run_runs_tag(arguments: argparse.Namespace) -> None:
    """Add tags to a run, or take them away; print what it has then."""
    run, given = load(arguments.run), list(dict.fromkeys(arguments.tags))
    for tag in given:
        if not TAG.fullmatch(tag):
            raise KeelError(
                f"{tag!r} is not a valid tag: use up to 40 letters, digits and . _ : + -"
            )
    tags = run.tags()
    if arguments.command == "runs untag":
        if missing := [tag for tag in given if tag not in tags]:
            has = ", ".join(tags) or "none"
            raise KeelError(f"{arguments.run} has no tag {', '.join(missing)}: it has {has}")
        tags = [tag for tag in tags if tag not in given]
    else:
        tags = list(dict.fromkeys([*tags, *given]))
    if tags:
        files.write_text(run.folder.tags, json.dumps(tags) + "\n")
    else:
        files.remove(run.folder.tags)
    print_result(arguments, tags, [f"{arguments.run}: {' '.join(tags) or 'no tags'}"])


run_runs_untag = run_runs_tag


def run_runs_delete(arguments: argparse.Namespace) -> None:
    """Delete runs or checkpoints, after asking; print how much is free again."""
    for one in arguments.runs:
        if Path(one).is_symlink():
            raise KeelError(f"{one} is a link to {Path(one).resolve()}: name that folder itself")
    paths = dict.fromkeys(Path(one).resolve() for one in arguments.runs)
    with ExitStack() as stack:
        doomed: list[Path] = []
        for path in paths:
            folder = RunFolder.open(path)
            if files.is_taken(path):
                raise KeelError(f"{path} is running: stop it first; nothing was deleted")
            stack.enter_context(files.locked(path))
            doomed += _doomed(folder, arguments)
        size = sum(files.size_of(one) for one in doomed)
        if doomed and not arguments.yes and not _agreed(arguments, doomed, size):
            return
        for one in doomed:
            files.remove(one)
    result = {"deleted": [str(one) for one in doomed], "bytes": size}
    print_result(arguments, result, [f"deleted {_count(len(doomed), 'folder')}, {decimal(size)}"])


def _doomed(folder: RunFolder, arguments: argparse.Namespace) -> list[Path]:
    """The folders of a run that go."""
    if not (arguments.checkpoints_only or arguments.keep_last_checkpoint):
        return [folder.path]
    found = [entry.path for entry in folder.list_checkpoints()]
    if arguments.keep_last_checkpoint and found:
        newest = checkpoint.newest_whole(folder)
        found.remove(found[-1] if newest is None else newest.path)
    return found


def _agreed(arguments: argparse.Namespace, doomed: Sequence[Path], size: int) -> bool:
    """Whether a person says yes."""
    if not sys.stdin.isatty():
        raise KeelError("keel runs delete asks on a terminal: add --yes to delete without asking")
    for path in doomed:
        print(visible(str(path)))
    if arguments.checkpoints_only:
        print("without checkpoints --resume begins again at the first step")
    answer = input(f"delete {_count(len(doomed), 'folder')}, {decimal(size)}? [y/N] ")
    return answer.strip().lower() in ("y", "yes")
