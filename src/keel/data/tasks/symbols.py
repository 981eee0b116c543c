"""Tasks on strings of symbols: sorting digits, reversing letters."""

from __future__ import annotations

import string

import numpy as np

from keel.data.tasks.base import Presentation
from keel.data.tasks.generated import Generated, check_range


class SortDigits(Generated):
    """Sort the digits: `7301>` asks for `0137`, with `separator` between them if one is set."""

    def __init__(
        self,
        name: str = "sort_digits",
        seed: int = 0,
        presentation: Presentation | None = None,
        *,
        min_digits: int = 4,
        max_digits: int = 8,
        separator: str = "",
    ) -> None:
        super().__init__(name, seed, presentation)
        self.separator = separator
        check_range(f"task {name!r}", min_digits=min_digits, max_digits=max_digits)
        self.min_digits = min_digits
        self.max_digits = max_digits

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length, then each digit, all equally likely."""
        length = int(rng.integers(self.min_digits, self.max_digits, endpoint=True))
        # Floats in one call: an order of magnitude cheaper here than `integers` of a size.
        digits = "".join(str(int(10 * u)) for u in rng.random(length).tolist())
        return f"{digits}>", self.separator.join(sorted(digits))


class Reverse(Generated):
    """Reverse the letters: `keel>` asks for `leek`."""

    def __init__(
        self,
        name: str = "reverse",
        seed: int = 0,
        presentation: Presentation | None = None,
        *,
        min_letters: int = 3,
        max_letters: int = 8,
    ) -> None:
        super().__init__(name, seed, presentation)
        check_range(f"task {name!r}", min_letters=min_letters, max_letters=max_letters)
        self.min_letters = min_letters
        self.max_letters = max_letters

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length, then each letter, all equally likely."""
        length = int(rng.integers(self.min_letters, self.max_letters, endpoint=True))
        letters = "".join(string.ascii_lowercase[int(26 * u)] for u in rng.random(length).tolist())
        return f"{letters}>", letters[::-1]
