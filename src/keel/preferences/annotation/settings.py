"""How pairs are given to people, and the rubric they go by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from keel.types import KeelError

LONGEST_NAME = 60
"""Characters of an annotator's name."""
LONGEST_RUBRIC = 100_000
"""Bytes of a rubric."""


@dataclass(frozen=True, slots=True)
class Rubric:
    """The instructions of the annotators; `id` is stored with each label."""

    text: str
    id: str


@dataclass(frozen=True, slots=True)
class AnnotationSettings:
    """How pairs are given to people.

    Each pair goes to `overlap` people, those of one `round` only unless it is None. `seed` decides
    which answer is shown first, and when a pair with a known label comes, at the share `gold_rate`.
    `wage` is in dollars an hour.
    """

    overlap: int = 1
    round: int | None = None
    seed: int = 0
    gold_rate: float = 0.1
    wage: float | None = None
    rubric: Rubric | None = None


def read_rubric(path: Path) -> Rubric:
    """A rubric of Markdown or text; its id is its name and the first of its SHA-256.

    Raises KeelError if it cannot be read, is empty, or is not text.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig").strip()
    except OSError as error:
        raise KeelError(f"--rubric {path}: {error.strerror}: name a text file") from error
    except UnicodeDecodeError:
        raise KeelError(f"--rubric {path}: it is not UTF-8 text: name a text file") from None
    if not text:
        raise KeelError(f"--rubric {path}: it is empty: write what makes an answer better")
    if len(data) > LONGEST_RUBRIC:
        raise KeelError(
            f"--rubric {path}: {len(data):,} bytes: shorten it to {LONGEST_RUBRIC:,} at most"
        )
    name = path.name.encode("utf-8", "replace").decode()
    return Rubric(text, f"{name} sha256:{hashlib.sha256(data).hexdigest()[:12]}")


def annotator_name(text: str) -> str:
    """A name that a person gave, blanks taken together. Raises KeelError if it is not valid."""
    name = " ".join(text.split())
    if not name:
        raise KeelError("the name is empty: enter yours")
    if not name.isprintable():
        raise KeelError("the name has characters that do not print: use letters and digits")
    if len(name) > LONGEST_NAME:
        raise KeelError(f"the name has {len(name)} characters: use {LONGEST_NAME} at most")
    return name


def choose(share: float, *parts: object) -> bool:
    """True for a `share` of all values of the parts, and always the same for the same values.

    h / 2⁶⁴ < share,   h = the first 8 bytes of BLAKE2b of the parts
    """
    return int.from_bytes(digest(*parts)[:8], "big") < share * 2**64


def digest(*parts: object) -> bytes:
    """16 bytes that depend on each part alone."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).digest()
