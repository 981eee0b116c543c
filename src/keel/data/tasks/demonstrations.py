"""What supervised fine-tuning imitates: functions of (prompt, gold answer, random generator)."""

from __future__ import annotations

import numpy as np

from keel.types import Prompt

MISTAKE_SHARE = 0.6
"""How often the careless teacher makes its mistake."""


def gold(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer itself."""
    return gold


def careless(prompt: Prompt, gold: str, rng: np.random.Generator) -> str:
    """The gold answer with, in six of ten, one and the same mistake: first and last exchanged.

    Imitation takes the mistake over as well; a verifier does not.
    """
    if rng.random() < MISTAKE_SHARE and len(gold) > 1:
        return gold[-1] + gold[1:-1] + gold[0]
    return gold
