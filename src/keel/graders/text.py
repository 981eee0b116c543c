"""Exact match of texts, as written or normalised."""

from __future__ import annotations

import unicodedata


def normalise(text: str) -> str:
    """Case folded, composed (NFKC), runs of blanks as one, without full stops at the end."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split()).rstrip(" .")


def same_text(a: str, b: str, *, normalised: bool = False) -> bool:
    """Whether two texts are equal: less the blanks around them, or `normalised`."""
    return normalise(a) == normalise(b) if normalised else a.strip() == b.strip()
