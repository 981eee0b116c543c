"""`keel doctor`"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from keel.cli.main import print_result

if TYPE_CHECKING:
    from keel.preflight.doctor import MachinePart


def run(arguments: argparse.Namespace) -> None:
    """Print what this machine has."""
    from keel.preflight.doctor import examine

    parts = examine()
    print_result(arguments, [asdict(part) for part in parts], _lines(parts))


def _lines(parts: Sequence[MachinePart]) -> Iterator[str]:
    """What is there first, then what is not, with the command that adds it."""
    width = max(len(part.name) for part in parts)
    for there, title in ((True, "there"), (False, "not there")):
        yield title
        for part in parts:
            if part.there is there:
                add = f"  ->  {part.add}" if part.add else ""
                yield f"  {part.name:<{width}}  {part.found}: {part.effect}{add}"
