"""How long a thread that waits for its sisters stays awake."""

from __future__ import annotations

import os

_TURNS = 20_000
"""Of GNU OpenMP's waiting loop: some 0.4 ms on a processor of 2023."""


def sleep_soon() -> None:
    """Let OpenMP's threads sleep after a short wait. Before torch is loaded, which reads it once.

    GNU OpenMP's own 300,000 turns are several milliseconds: where another program has one of the
    cores, a thread that waits burns its share of time while the one it waits for has none. What the
    user wishes (`GOMP_SPINCOUNT`, `OMP_WAIT_POLICY`) stands.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_TURNS))
