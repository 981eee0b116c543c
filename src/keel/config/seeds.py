"""Seeds for every purpose from the recipe's one, so that no two draws share a stream."""

from __future__ import annotations

import hashlib


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that is a function of the recipe's seed and of what it is for."""
    text = "/".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
