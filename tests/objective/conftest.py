"""Shapes and types of the maths are checked at every call while these tests run."""

from __future__ import annotations

import importlib
import sys

from hypothesis import settings
from jaxtyping import install_import_hook

# The same examples at every run: a failure that is seen once can be seen again.
settings.register_profile("keel", derandomize=True)
settings.load_profile("keel")

_PACKAGE = "keel.objective"

install_import_hook(_PACKAGE, "beartype.beartype")
# Modules that are already imported are reloaded in place; twice, so that names which one module
# imports from another are the checked ones too.
for _name in [name for name in sys.modules if name.startswith(_PACKAGE + ".")] * 2:
    importlib.reload(sys.modules[_name])
