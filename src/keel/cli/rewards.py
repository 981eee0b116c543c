"""`keel rewards`"""

from __future__ import annotations

import argparse
import json

from keel.cli.tasks import print_table
from keel.rewards.registry import catalogue


def run(arguments: argparse.Namespace) -> None:
    """The built-in rewards, a line each."""
    entries = catalogue()
    if arguments.json:
        print(json.dumps(dict(entries), ensure_ascii=False))
        return
    print_table(entries)
    print("\nfunctions of your own: module:function, or path/to/file.py:function")
