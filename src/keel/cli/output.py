"""How a command prints its result."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from keel.runs.values import plain


def print_result(arguments: argparse.Namespace, result: Any, lines: Iterable[str]) -> None:
    """Print a result as JSON if that is asked for, else its lines.

    JSON is in ASCII: texts in it may come from a policy, or another's run folder.
    """
    print(json.dumps(plain(result)) if arguments.json else "\n".join(lines))


def columns(entries: Mapping[str, str]) -> Iterator[str]:
    """Names and descriptions in two columns."""
    width = max(map(len, entries))
    return (f"{name:<{width}}  {description}" for name, description in entries.items())
