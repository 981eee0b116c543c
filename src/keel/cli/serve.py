"""`keel serve`: a run's policy, or a model, behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import argparse
from functools import partial

from keel.config.load import read_overrides


def run(arguments: argparse.Namespace) -> None:
    """Serve until interrupted."""
    from keel.workflows.serving import serve

    serve(
        arguments.model,
        checkpoint=arguments.checkpoint,
        host=arguments.host,
        port=arguments.port,
        max_num_seqs=arguments.max_num_seqs,
        max_tokens=arguments.max_tokens,
        device=arguments.device,
        template=read_overrides(arguments.template),
        announce=partial(print, flush=True),
    )
