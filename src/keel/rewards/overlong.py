"""Soft punishment of overlong answers."""

from __future__ import annotations


def overlong_penalty(length: int, max_tokens: int, cache: int) -> float:
    """What an answer of `length` tokens gets for its length, in [−1, 0].

    0 up to `max_tokens − cache`; ((max_tokens − cache) − length) / cache over the last `cache`
    tokens of the budget; −1 beyond it. DAPO, arXiv 2503.14476, equation 13. `cache` 0 punishes
    only what is beyond the budget.
    """
    free = max_tokens - cache
    if length <= free:
        return 0.0
    if length <= max_tokens:
        return (free - length) / cache
    return -1.0
