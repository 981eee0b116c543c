"""The keys of one configuration: their values, what became of them, and facts that follow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.algorithms.presets import PRESETS
from keel.config.conversion.read import Unread
from keel.config.foreign import ForeignKey, Program, as_text, read_table
from keel.config.layers import DEFAULT_PRESET
from keel.config.secrets import KEYS, without_secrets

OWN_ENGINE = 'Keel samples with an engine of its own; --vllm keeps vLLM (rollout.engine = "vllm")'
OFF = {
    "critic": "the advantage reads no value model",
    "groups": "the advantage has no such scale",
    "discounts": "the advantage discounts nothing",
    "server": OWN_ENGINE,
    "decays": "the schedule is constant",
    "value decays": "the schedule is constant, or there is no value model",
}
"""Facts that a key's `when` may name, and why the key has no effect without them."""


def shown(value: Any) -> str:
    """A value in a report."""
    return repr(value) if isinstance(value, str) else str(value).replace("'", '"')


def _wrong(entry: ForeignKey, value: Any) -> str | None:
    """Why a key's value cannot be used: it is not known, or not the number that the key wants."""
    if any(isinstance(one, Unread) for one in (value if isinstance(value, list) else [value])):
        return "its value is not a literal"
    if as_text(value) in (entry.values or ()):
        return None
    if entry.kind is None and type(entry.default) not in (int, float):
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        return "its value is not a number"
    if entry.kind == "size" and (value < 1 or value % 1):
        return "its value is not a whole number from 1"
    return None


def _whole(entry: ForeignKey | None, value: Any) -> bool:
    """Whether a whole number is written as another, such as 1e3."""
    counts = entry is not None and (entry.kind == "size" or type(entry.default) is int)
    return counts and isinstance(value, float) and value.is_integer()


@dataclass
class Foreign:
    """The keys of one configuration; `out` is what they are in Keel, as far as they are read."""

    program: Program
    given: Mapping[str, Any]
    out: dict[str, Any] = field(default_factory=dict)
    origin: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Of each key of `out`, the keys given that it came from; none: a default."""
    unused: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    lacking: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        launched = {"num_processes"} - set(self.program.keys)
        given = {k: v for k, v in self.given.items() if v is not None and k not in launched}
        given = {key: self._public(key, v) for key, v in given.items()}
        self.given = without_secrets(given)
        entries = {k: entry for k, entry in self.program.keys.items() if entry.unused is None}
        defaults: dict[str, Any] = {k: entry.default for k, entry in self.program.keys.items()}
        self.values = {**defaults, **self.given}
        wrong = {k: why for k in given if k in entries and (why := _wrong(entries[k], given[k]))}
        for key, why in wrong.items():
            if entries[key].to == "model.name":
                self.missing("model.name", f"{key} = {shown(self.given[key])}: {why}")
                defaults[key] = None
            else:
                self.refuse(key, why)
        self.given = {
            key: int(value) if _whole(self.program.keys.get(key), value) else value
            for key, value in self.given.items()
            if key not in wrong
        }
        self.values = {**defaults, **self.given}

    def _public(self, key: str, value: Any) -> Any:
        """The value, without a secret that the key is for."""
        if isinstance(value, bool):
            return value
        if key in self.program.keys:
            return True if self.program.keys[key].switch else value
        return "(a secret)" if KEYS.fullmatch(key.rpartition(".")[2]) else value

    def __getitem__(self, end: str) -> Any:
        """The value of a key, or of the one that ends so; None if it is not set or not known."""
        if end[-2:-1] == "." and end[-1].isdigit():
            found = self[end[:-2]]
            return None if found is None else found[int(end[-1])]
        return self.values.get(self.full(end))

    def full(self, end: str) -> str:
        """The key that ends so."""
        ends = (key for key in self.values if key == end or key.endswith(f".{end}"))
        return next(ends, end)

    def below(self, key: str) -> list[tuple[str, Any]]:
        """The keys of a table that is given."""
        return [(k, v) for k, v in self.given.items() if k.startswith(f"{key}.")]

    def on(self, fact: str) -> bool:
        """Whether a key is set to anything but nothing, or a fact of `OFF` is so."""
        if fact not in OFF:
            return not self[fact.removeprefix("not ")] if fact[:4] == "not " else bool(self[fact])
        if fact == "server":
            return "rollout.engine" in self.out
        if fact.endswith("decays"):
            key = "value.optimizer.schedule" if fact != "decays" else "optimizer.schedule"
            return bool(self.out.get(key, "constant") != "constant")
        preset = PRESETS[self.out.get("algorithm.preset", DEFAULT_PRESET)]
        advantage = preset.algorithm.advantage
        if fact == "critic":
            return bool(preset.algorithm.needs_value)
        name = {"groups": "scale", "discounts": "gamma"}[fact]
        return bool(name in type(advantage).model_fields)

    @property
    def rewards(self) -> Mapping[str, Any]:
        """Rewards of the framework by name, as tables of `rewards.functions`."""
        found: Mapping[str, Any] = read_table(self.program.framework.lower()).get("rewards", {})
        return found

    def refuse(self, end: str, why: str, value: Any = None) -> None:
        """A key of the configuration, or its default, changes the result and has no counterpart."""
        key = self.full(end)
        text = shown(self[end] if value is None else value)
        self.refused[f"{key} = {text}" + ("" if key in self.given else " (default)")] = why

    def ignore(self, end: str, why: str) -> None:
        """A key of the configuration has no effect here."""
        if (key := self.full(end)) in self.given:
            self.ignore_key(key, why)

    def ignore_key(self, key: str, why: str) -> None:
        self.unused[key] = why

    def missing(self, own: str, why: str) -> None:
        """A key of Keel is to be filled in."""
        self.lacking[own] = why
