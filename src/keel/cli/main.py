"""Runs a command, prints its result, and turns an error into an exit code and one line."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keel.cli.parser import parse
from keel.platform.signals import sleep_soon

USAGE = 2
FAILURE = 1
UNWRITTEN = (errno.EPIPE, errno.EIO, errno.ENOSPC)
"""Errors of an output without a reader, a closed terminal and a full disk."""
LONGEST = 2_000
"""Characters of an error's line; a value of the user's in it may be a whole file."""


def main(argv: Sequence[str] | None = None) -> int:
    """0 on success, 2 on a usage or input error (one line on stderr), 128+n on signal n."""
    # No command may reach a hub unless a recipe names one; telemetry of libraries stays off.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sleep_soon()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = parse(argv)
    try:
        code = importlib.import_module(arguments.module).run(arguments)
        sys.stdout.flush()
        return int(code or 0)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """One line for a user's mistake; whatever else it is goes on as the bug that it is."""
    from keel.config.secrets import without_secrets
    from keel.types import KeelError

    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = KeelError(
            f"the path {str(error.filename)[:60]}… is too long for a path: shorten it"
        )
    if isinstance(error, OSError) and error.filename is None and error.errno in UNWRITTEN:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python reports it again as it ends
        if error.errno == errno.EPIPE:  # as in keel tasks | head
            return FAILURE
        error = KeelError(f"cannot write the output: {error.strerror}: write it elsewhere")
    if not isinstance(error, KeelError):
        raise error
    print(f"keel: error: {one_line(without_secrets(str(error)))}", file=sys.stderr)
    return USAGE


def one_line(text: str) -> str:
    """A text on one line, of bounded length, that no terminal takes for commands.

    Characters that do not print, halves of characters too, are shown by their number.
    """
    words = " ".join(text.split())
    if len(words) > LONGEST:
        words = f"{words[: LONGEST // 2]} … {words[-LONGEST // 2 :]}"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in words
    )


def print_result(arguments: argparse.Namespace, result: Any, lines: Iterable[str]) -> None:
    """Print a result as JSON if that is asked for, else its lines.

    JSON is in ASCII: texts in it may come from a policy, or another's run folder.
    """
    from keel.runs.values import plain

    print(json.dumps(plain(result)) if arguments.json else "\n".join(lines))


def columns(entries: Mapping[str, str]) -> Iterator[str]:
    """Names and descriptions in two columns."""
    width = max(map(len, entries))
    return (f"{name:<{width}}  {description}" for name, description in entries.items())
