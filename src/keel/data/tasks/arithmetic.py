"""Arithmetic: sums of two numbers."""

from __future__ import annotations

import numpy as np

from keel.data.tasks.base import Presentation
from keel.data.tasks.generated import Generated, check_range
from keel.types import KeelError

MAX_DIGITS = 18
"""What a 64-bit draw holds."""


class Addition(Generated):
    """Add two numbers of at most `digits` digits: `27+5=` asks for `32`."""

    def __init__(
        self,
        name: str = "addition",
        seed: int = 0,
        presentation: Presentation | None = None,
        *,
        digits: int = 2,
    ) -> None:
        super().__init__(name, seed, presentation)
        check_range(f"task {name!r}", digits=digits)
        if digits > MAX_DIGITS:
            raise KeelError(f"task {name!r}: digits = {digits}: give at most {MAX_DIGITS}")
        self.digits = digits

    def draw(self, rng: np.random.Generator) -> tuple[str, str]:
        """A length for each number, then the number, so that short ones are not rare."""
        lengths = [int(rng.integers(1, self.digits + 1)) for _ in range(2)]
        a, b = (int(rng.integers(0, 10**n)) for n in lengths)
        return f"{a}+{b}=", str(a + b)
