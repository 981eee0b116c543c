"""`keel report`"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from keel.view.report import write_report


def run(arguments: argparse.Namespace) -> None:
    """Write a run's report; print where it is."""
    out = None if arguments.out is None else Path(arguments.out)
    path = write_report(arguments.run, out, arguments.price)
    if arguments.json:
        print(json.dumps({"report": str(path)}))
    else:
        print(path)
