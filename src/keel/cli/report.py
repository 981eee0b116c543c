"""`keel report`"""

from __future__ import annotations

import argparse
from pathlib import Path

from keel.cli.output import print_result
from keel.view.report import write_report


def run(arguments: argparse.Namespace) -> None:
    """Write a run's report; print where it is."""
    out = None if arguments.out is None else Path(arguments.out)
    path = write_report(arguments.run, out, arguments.price)
    print_result(arguments, {"report": str(path)}, [str(path)])
