"""The keys of one configuration: their values, what became of them, and facts that follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.algorithms.presets import PRESETS
from keel.config.conversion.read import Unread
from keel.config.foreign import ForeignKey, Program, as_text, read_table
from keel.config.layers import DEFAULT_PRESET, merge, nest
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
    text = repr(value) if isinstance(value, str) else str(value).replace("'", '"')
    return text if len(text) <= 200 else f"{text[:200]}…"


def is_number(value: Any) -> bool:
    """Whether it is a finite number of at most 64 bits."""
    return type(value) in (int, float) and abs(value) < 2**63


_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number", is_number),
    "size": ("a whole number from 1", lambda x: is_number(x) and x >= 1 and x % 1 == 0),
    "switch": ("true or false", lambda x: isinstance(x, bool)),
    "text": ("text", lambda x: isinstance(x, str)),
    "texts": ("text or a list of it", lambda x: all(isinstance(one, str) for one in _list(x))),
    "numbers": ("a list of numbers", lambda x: all(map(is_number, _list(x)))),
    "pair": ("two numbers", lambda x: len(_list(x)) == 2 and all(map(is_number, x))),
    "table": ("a table", lambda x: isinstance(x, dict)),
}
"""Kinds of values: what a value is, and whether one is it."""
_OF_DEFAULT = {int: "number", float: "number", str: "text", bool: "switch"}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_unread(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, Unread) or any(map(_is_unread, inner))


def _wrong(entry: ForeignKey, value: Any) -> str | None:
    """Why a key's value cannot be used: it is not known, or not of the kind that the key wants."""
    if _is_unread(value):
        return "its value is not a literal"
    if as_text(value) in (entry.values or ()) or value is entry.default:
        return None
    if value is None:
        return "its value is none"
    kind = entry.kind or _OF_DEFAULT.get(type(entry.default))
    free = kind in ("text", "switch") and not (entry.by or entry.values)  # Keel checks it
    if kind is None or free or _KINDS[kind][1](value):
        return None
    return f"its value is not {_KINDS[kind][0]}"


def _typed(entry: ForeignKey | None, value: Any) -> Any:
    """The value, of the type that is meant: 1e3 as a whole number, YAML's `no`, none as the
    default that it is."""
    default = None if entry is None else entry.default
    if value is None and not default:
        return default
    if (
        value is False
        and isinstance(default, str)
        and entry
        and "False" not in (entry.values or ())
    ):
        return "no"
    counts = entry is not None and (entry.kind == "size" or type(default) is int)
    return int(value) if counts and isinstance(value, float) and value.is_integer() else value


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
        keys, given = self.program.keys, dict[str, Any]()
        for key, value in self.given.items():
            whole = next(
                (k for k in (*keys, *self.program.refused) if key.startswith(f"{k}.")), None
            )
            if whole is not None and self.program.why_unused(key) is None:  # a table, as one key
                rest = {} if value is None else nest(key.removeprefix(f"{whole}."), value)
                given[whole] = merge(given.get(whole, {}), rest)
            elif key != "num_processes" or key in keys:
                given[key] = _typed(keys.get(key), self._public(key, value))
        self.given = given = without_secrets(given)
        self.values = {**{k: entry.default for k, entry in keys.items()}, **given}
        entries = {k: entry for k, entry in keys.items() if k in given and entry.unused is None}
        for key, why in [(k, w) for k, entry in entries.items() if (w := _wrong(entry, given[k]))]:
            if entries[key].to == "model.name":
                self.missing("model.name", f"{key} = {shown(given[key])}: {why}")
            else:
                self.refuse(key, why)
            del given[key]
            self.values[key] = None if entries[key].to == "model.name" else entries[key].default

    def _public(self, key: str, value: Any) -> Any:
        """The value, without a secret that the key is for."""
        if isinstance(value, bool):
            return value
        if key in self.program.keys:
            return value is not None if self.program.keys[key].switch else value
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
        """A key of Keel, or what is given, is to be filled in or looked at."""
        self.lacking[own] = why
