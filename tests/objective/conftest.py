"""Shapes and types of the maths are checked at every call while these tests run."""

from __future__ import annotations

import importlib
import sys

import torch
from hypothesis import settings
from jaxtyping import install_import_hook

torch.set_num_threads(1)
# The same examples at every run: a failure that is seen once can be seen again.
settings.register_profile("keel", derandomize=True)
settings.load_profile("keel")

_HOUSE = "keel.objective"

install_import_hook(_HOUSE, "beartype.beartype")
# What another test imported before is loaded again, in place; twice, so that every name that one
# module has taken from another is the checked one too.
for _name in [name for name in sys.modules if name.startswith(_HOUSE + ".")] * 2:
    importlib.reload(sys.modules[_name])
