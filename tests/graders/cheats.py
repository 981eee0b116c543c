"""Ways to full marks without a solution (cheats.toml): not paid if the code has its own process."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("cheats.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Cheat:
    """Code that is wrong, and the kind of tests that it is to deceive."""

    name: str
    shape: str
    code: str


def filled(code: str) -> str:
    """Code with its fragments in place, and theirs in them."""

    def fragment(found: re.Match[str]) -> str:
        text = filled(TABLE["fragments"][found[1]])
        return text.replace("{base}", found[2]) if found[2] else text

    return re.sub(r"@([A-Z]+)(?: (\w+))?@", fragment, code)


SHAPES: dict[str, tuple[list[str], str | None, str]] = {
    name: (shape["tests"], shape.get("entry_point"), shape.get("prompt", ""))
    for name, shape in TABLE["shapes"].items()
}
"""Kinds of tests: the tests, the entry point and the prompt."""
CHEATS = [Cheat(one["name"], one["shape"], filled(one["code"])) for one in TABLE["cheats"]]
