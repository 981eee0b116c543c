"""`keel view`"""

from __future__ import annotations

import argparse

from keel.view.app import serve


def run(arguments: argparse.Namespace) -> None:
    """Serve the pages of runs until interrupted."""
    serve(
        arguments.folders,
        host=arguments.host,
        port=arguments.port,
        price=arguments.price,
        browser=not arguments.no_browser,
    )
