"""A configuration of another framework as a recipe, and what of it has no counterpart.

The keys of the program's table are read in their order, with its defaults. What Keel refuses of the
recipe that results is taken out of it again and listed as refused. Defaults that are Keel's too are
left out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from keel.config.conversion import rules
from keel.config.conversion.read import Settings, Unread, read_settings
from keel.config.conversion.values import OFF, OWN_ENGINE, Foreign, shown
from keel.config.fields import nearest
from keel.config.foreign import FRAMEWORKS, ForeignKey, Program, as_text, programs
from keel.config.layers import gather, merge, nest
from keel.config.load import validated, write_out
from keel.config.schema import Recipe
from keel.types import KeelError

VLLM = ("rollout.engine", "rollout.vllm.", "algorithm.corrections")
_PLACEHOLDERS = {
    "tasks": [{"path": "train.jsonl"}],
    "data": {"path": "train.jsonl"},
    "model.name": "MODEL",
}


@dataclass(frozen=True, slots=True)
class Converted:
    """A recipe, and what became of each key; keys are with their values, as text."""

    source: str
    program: Program
    recipe: dict[str, Any]
    mapped: list[tuple[dict[str, Any], dict[str, Any]]]
    """Keys there, and Keel's that say the same."""
    defaults: dict[str, Any]
    """Keel's keys that hold a default of the program, which differs from Keel's."""
    unused: dict[str, str]
    """Keys without effect here, and why."""
    refused: dict[str, str]
    """Keys that would change the result and have no counterpart, and why."""
    missing: dict[str, str]
    """What is to be filled in or looked at, and why."""

    @property
    def title(self) -> str:
        """The framework, its version and program."""
        about = self.program
        return f"{about.framework} {about.version}, {about.names[0]}"

    def toml(self) -> str:
        """The recipe as TOML, with what was refused as comments."""
        notes = [f"From {self.source} ({self.title}) by keel recipes convert."]
        notes += [
            f"Refused, since it changes the result: {k}: {why}" for k, why in self.refused.items()
        ]
        notes += [f"To check: {key}: {why}" for key, why in self.missing.items()]
        lines = [line for note in notes for line in textwrap.wrap(note, 96)]
        return "".join(f"# {line}\n" for line in lines) + "\n" + tomli_w.dumps(self.recipe)

    def lines(self) -> Iterator[str]:
        """What became of each key, in four groups."""
        yield f"{self.source}: {self.title}"
        yield f"mapped ({sum(len(theirs) for theirs, _ in self.mapped)})"
        for theirs, own in self.mapped:
            yield f"  {_pairs(theirs)}  ->  {_pairs(own) if own else 'as in Keel'}"
        yield f"defaults of {self.program.framework} that differ from Keel's ({len(self.defaults)})"
        yield from (f"  {key} = {shown(value)}" for key, value in self.defaults.items())
        yield f"without effect here ({len(self.unused)})"
        for why in dict.fromkeys(self.unused.values()):
            yield f"  {', '.join(k for k, reason in self.unused.items() if reason == why)}: {why}"
        yield f"refused, since it changes the result ({len(self.refused)})"
        yield from (f"  {key}: {why}" for key, why in self.refused.items())
        yield from (f"to check: {key}: {why}" for key, why in self.missing.items())

    def as_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        about = {"framework": self.program.framework, "version": self.program.version}
        mapped = [{"from": theirs, "to": own} for theirs, own in self.mapped]
        rest = {"defaults": self.defaults, "unused": self.unused, "refused": self.refused}
        made = {"missing": self.missing, "recipe": self.recipe, "toml": self.toml()}
        return {**about, "program": self.program.name, "mapped": mapped, **rest, **made}


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {shown(value)}" for key, value in values.items())


def convert(path: str, framework: str | None = None, *, vllm: bool = False) -> Converted:
    """Convert a file (see `read_settings`); the framework is guessed from its keys unless given.

    Raises KeelError if the file holds no configuration of one.
    """
    settings = read_settings(path)
    program = find_program(settings, framework, path)
    work = Conversion(program, settings.values)
    for key, why in settings.remarks.items():
        work.missing(key, why)
    work.run()
    if not vllm:
        work.drop(lambda own: own.startswith(VLLM), work.ignore_key, OWN_ENGINE)
    return work.finish(path)


def find_program(settings: Settings, framework: str | None, path: str) -> Program:
    """The program that the settings are of: the one that is named, else that knows most keys."""
    names = [framework] if framework else FRAMEWORKS
    known = [program for name in names for program in programs(name)]
    called = [one for one in known if settings.names & set(one.names)]
    if len(called) == 1:
        return called[0]
    if len(called) > 1:
        both = " and ".join(one.name for one in called)
        raise KeelError(f"{path}: it trains by {both}: convert a file with one of them")

    def score(one: Program) -> tuple[int, bool]:
        known = {*one.keys, *one.refused, *one.unused}
        stem = Path(path).stem.lower()
        called = any(re.search(rf"(?<![a-z]){re.escape(n)}(?![a-z])", stem) for n in one.names)
        return sum(key in known for key in settings.values), called

    best = max(known, key=score)
    alike = [one for one in known if score(one) == score(best) and one.framework == best.framework]
    if score(best)[0] > 0 and len({(one.stage, one.always.get("loss")) for one in alike}) > 1:
        words = ", ".join(one.names[0] for one in alike)
        raise KeelError(
            f"{path}: its keys are those of several programs of {best.framework}: give the file a "
            f"name that says which, with one of the words {words} in it"
        )
    if score(best)[0] == 0:
        raise KeelError(
            f"{path}: no key of {', '.join(sorted({p.framework for p in known}))} found: name the "
            "framework with --from trl, verl or openrlhf"
        )
    return best


class Conversion(Foreign):
    """The keys of one configuration on their way to a recipe."""

    def run(self) -> None:
        """Read every key, in the order of the table, then those that it does not hold."""
        self._set(self.program.always.items(), ())
        called: set[str] = set()
        for key, entry in self.program.keys.items():
            mine = (key,) if key in self.given else ()
            if entry.when is not None and not self.on(entry.when):
                if mine and key != entry.when:
                    self.ignore_key(key, OFF.get(entry.when, f"{entry.when} is off"))
            elif entry.unused is not None:
                self.ignore(key, entry.unused)
            elif entry.values is not None:
                self._set(self._looked_up(key, entry), mine)
            elif entry.by is not None:
                if entry.by not in called:
                    called.add(entry.by)
                    for own, found in getattr(rules, entry.by)(self):
                        self._set([(own, found)], self._sources(entry.by, own))
            elif entry.to is not None and self.values[key] is not None:
                self._set([(entry.to, self.values[key])], mine)
        for key in self.given:
            if key not in self.program.keys:
                self._unknown(key)

    def _set(self, pairs: Iterable[tuple[str, Any]], keys: tuple[str, ...]) -> None:
        for own, value in pairs:
            self.out[own] = value
            self.origin[own] = keys

    def _sources(self, rule: str, own: str) -> tuple[str, ...]:
        """The keys given that a rule has made `own` of: those of it, and those of no one key."""
        keys = {key: one for key, one in self.program.keys.items() if one.by == rule}
        given = {key: one for key, one in keys.items() if self.given.get(key) is not None}
        exact = tuple(key for key, entry in given.items() if entry.to == own)
        loose = tuple(key for key, entry in given.items() if entry.to is None)
        return exact or loose or (() if own in {one.to for one in keys.values()} else tuple(given))

    def _looked_up(self, key: str, entry: ForeignKey) -> Iterator[tuple[str, Any]]:
        value = self.values[key]
        if entry.to == "loss" and isinstance(value, list) and value[1:] not in ([], ["sft"]):
            self.refuse(key, "a sum of losses: Keel has each by itself")
            return
        for one in value if isinstance(value, list) else [value]:
            found = (entry.values or {}).get(as_text(one))
            if isinstance(found, Mapping):
                yield from ((own, to) for own, to in found.items() if own != "check")
                if "check" in found:
                    self.missing(str(entry.to), found["check"])
            elif entry.to is not None and type(one) in (int, float):
                yield entry.to, one
            elif one is not None:
                self.refuse(key, found or f"known: {', '.join(entry.values or ())}", one)

    def _unknown(self, key: str) -> None:
        why, off = self.program.refused.get(key, ("", []))
        if off and as_text(self.given[key]) in off:
            self.ignore_key(key, "it is so in Keel")
        elif why:
            self.refuse(key, why)
        elif unused := self.program.why_unused(key):
            self.ignore_key(key, unused)
        elif isinstance(self.given[key], Unread):
            self.refuse(key, "its value is not a literal")
        elif self.given[key] is None:
            self.ignore_key(key, "it is not set")
        else:
            guess = nearest(key, self.program.keys)
            about = f"{self.program.framework} {self.program.version}"
            self.refuse(key, f"not a known key of {about}" + (f": {guess}?" if guess else ""))

    # ------------------------------------------------------------ the recipe

    def drop(self, taken: Any, say: Any, why: str) -> None:
        """Take keys out of the recipe, and say of those that they came from why."""
        for own in [own for own in self.out if taken(own)]:
            keys = self.origin[own]
            named = [key for key in keys if self.program.keys[key].to == own] or keys
            for key in named:
                say(key, why)
            del self.out[own]

    def finish(self, path: str) -> Converted:
        """The recipe, without what Keel refuses and without defaults that are its own."""
        data = "data" if self.program.stage != "rl" else "tasks"
        whole = self._accepted(path, (data, "model.name"))
        for own in [own for own, keys in self.origin.items() if own in self.out and not keys]:
            without = {key: value for key, value in self.out.items() if key != own}
            try:
                if own not in self.lacking and _recipe(self.program, without)[1] == whole:
                    self.out = without
            except KeelError:
                pass  # it is needed
        found: dict[tuple[str, ...], dict[str, Any]] = {}
        for own, value in self.out.items():
            found.setdefault(self.origin[own], {})[own] = value
        defaults = found.pop((), {})
        silent = set(self.unused) | {entry.partition(" = ")[0] for entry in self.refused}
        mapped = [
            ({k: self.given[k] for k in keys if k not in silent}, own)
            for keys, own in found.items()
        ]
        said = {key for theirs, _ in mapped for key in theirs} | silent
        rest = {k: v for k, v in self.given.items() if k not in said and k in self.program.keys}
        return Converted(
            source=path,
            program=self.program,
            recipe=_recipe(self.program, self.out)[0],
            mapped=[pair for pair in mapped if pair[0]] + [({k: v}, {}) for k, v in rest.items()],
            defaults={k: v for k, v in defaults.items() if k not in self.lacking},
            unused=self.unused,
            refused=self.refused,
            missing=self.lacking,
        )

    def _accepted(self, path: str, needed: tuple[str, ...]) -> Recipe:
        """The recipe that Keel accepts, after the keys that it names as wrong are taken out; what
        it needs and has not got is to be filled in."""
        while True:
            for own in (one for one in needed if one not in self.out):
                self.out[own], self.origin[own] = _PLACEHOLDERS[own], ()
                why = self.lacking.get(own, f"{path} names none")
                self.missing(own, f"{why}; {shown(_PLACEHOLDERS[own])} stands for it")
            try:
                return _recipe(self.program, self.out)[1]
            except KeelError as error:
                text = str(error)
            plain = text.replace(".0.", ".")  # the only entry of a list
            named = [o for o in self.out if o in plain and self.out[o] != _PLACEHOLDERS.get(o)]
            if not named:
                raise KeelError(f"{path}: the recipe is refused: {text}")
            worst = max(named, key=len)
            self.drop(lambda own, worst=worst: own == worst, self.refuse, text)


def _recipe(program: Program, out: Mapping[str, Any]) -> tuple[dict[str, Any], Recipe]:
    """Dotted keys as a flat recipe, and validated."""
    made: dict[str, Any] = {} if program.stage == "rl" else {"stage": program.stage}
    for key, value in out.items():
        made = merge(made, nest(key, value))
    return made, validated(write_out(gather(made)), Recipe)
