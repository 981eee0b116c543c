"""Ranks of which one hangs; a module that processes import quickly, since they have a deadline."""

from __future__ import annotations

import os
import signal

from keel.learn.ranks import Ranks


def itself(ranks: Ranks) -> Ranks:
    return ranks


def stopped(ranks: Ranks, wait: bool) -> None:
    """Rank 1 hangs; with `wait` the others compute with it."""
    if ranks.number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if wait:
        ranks.gather(ranks.number)
