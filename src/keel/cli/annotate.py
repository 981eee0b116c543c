"""`keel prefs annotate`"""

from __future__ import annotations

import argparse
from pathlib import Path

from keel.preferences.annotation.gold import add_gold
from keel.preferences.annotation.session import AnnotationProject
from keel.preferences.annotation.settings import AnnotationSettings, read_rubric
from keel.preferences.pages.app import serve_annotation
from keel.preferences.store.store import PreferenceStore
from keel.types import KeelError


def run(arguments: argparse.Namespace) -> None:
    """Serve the pages on which people label pairs, until interrupted."""
    rubric = None if arguments.rubric is None else read_rubric(Path(arguments.rubric))
    settings = AnnotationSettings(
        overlap=arguments.overlap,
        round=arguments.round,
        seed=arguments.seed,
        gold_rate=arguments.gold_rate,
        wage=arguments.wage,
        rubric=rubric,
    )
    with PreferenceStore(Path(arguments.store)) as store:
        if arguments.gold is not None:
            add_gold(store, Path(arguments.gold), arguments.round or 0)
        if next(store.pairs(arguments.round), None) is None:
            where = "" if arguments.round is None else f" in round {arguments.round}"
            raise KeelError(
                f"preference store {arguments.store}: there is no pair{where}: import some "
                "(keel prefs import), or name another --round"
            )
        serve_annotation(
            AnnotationProject(store, settings),
            host=arguments.host,
            port=arguments.port,
            browser=not arguments.no_browser,
        )
