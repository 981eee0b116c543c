"""`keel rewards`"""

from __future__ import annotations

import argparse

from keel.cli.output import columns, print_result
from keel.rewards.registry import catalogue


def run(arguments: argparse.Namespace) -> None:
    """The built-in rewards, a line each."""
    found = dict(catalogue())
    own = "\nfunctions of your own: module:function, or path/to/file.py:function"
    print_result(arguments, found, [*columns(found), own])
