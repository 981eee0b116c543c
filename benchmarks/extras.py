"""What each extra weighs: the packages that it adds to those of Keel itself, in this environment.

python -m benchmarks.extras
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

TEXT = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(TEXT)["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def closure(wanted: Iterable[str]) -> dict[str, int]:
    """Bytes of each package that these requirements need; 0 for one that is not installed."""
    found: dict[str, int] = {}
    left = [(Requirement(text), "") for text in wanted]
    seen: set[tuple[str, str]] = set()
    while left:
        one, extra = left.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name == PROJECT["name"]:
            left += [(Requirement(text), "") for key in one.extras for text in EXTRAS[key]]
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            found[name] = 0
            continue
        if name not in found:
            found[name] = sum(entry.size or 0 for entry in package.files or ())
        for own in {"", *one.extras} - {key for at, key in seen if at == name}:
            seen.add((name, own))
            left += [(Requirement(text), own) for text in package.requires or ()]
    return found


def main() -> None:
    core = closure(PROJECT["dependencies"])
    torch, rest = core.pop("torch"), sum(core.values())
    print(f"core: torch {torch / 1e6:.0f} MB, {len(core)} other packages {rest / 1e6:.0f} MB")
    print("extra | packages | MB | the largest")
    for name in sorted(EXTRAS):
        added = {key: n for key, n in closure(EXTRAS[name]).items() if key not in {*core, "torch"}}
        missing = [key for key, size in added.items() if not size]
        largest = max(added, key=lambda key: added[key], default="")
        size = f"{sum(added.values()) / 1e6:.0f}" if not missing else f"without {missing}"
        print(f"{name} | {len(added)} | {size} | {largest}")


if __name__ == "__main__":
    main()
