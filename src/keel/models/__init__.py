"""Policies, value models and references: Hugging Face models over packed sequences."""

import sys

from keel.types import KeelError

if sys.flags.optimize > 1:
    raise KeelError(
        "python -OO and PYTHONOPTIMIZE=2 drop the docstrings that transformers reads when its "
        "models are imported: run without them (-O works)"
    )
