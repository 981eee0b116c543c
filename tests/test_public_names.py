"""The public names of `keel`: the same object at every use, whatever was used before it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import keel

# Each name is used first once, then every name twice, each time from a fresh import of the package.
ORDERS = """
import sys
names = [n for n in __import__("keel").__all__ if n != "__version__"]
for first in names:
    for module in [m for m in sys.modules if m == "keel" or m.startswith("keel.")]:
        del sys.modules[module]
    import keel
    once = {n: getattr(keel, n) for n in [first, *names]}
    again = {n: getattr(keel, n) for n in reversed(names)}
    for name in names:
        assert callable(again[name]), (first, name, again[name])
        assert once[name] is again[name], (first, name)
"""


def test_no_public_name_is_a_subpackages() -> None:
    """Importing `keel.x` binds the module over the attribute `x`: `keel.x(…)` would then fail."""
    modules = {module.name for module in pkgutil.iter_modules(keel.__path__)}
    assert modules & set(keel.__all__) == set()


@pytest.mark.slow
def test_public_names_are_callable_twice_in_every_order_of_first_use() -> None:
    done = subprocess.run([sys.executable, "-c", ORDERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
