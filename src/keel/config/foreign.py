"""The keys of TRL, verl and OpenRLHF in Keel: the tables of `conversion/*.toml`. Torch-free.

A program (`trl grpo`, verl's `main_ppo`) has the keys of its groups. A key is a string, Keel's key
of the same meaning, or a table:

    to = "KEY"       Keel's key; in a hint, and where the value goes if nothing else says so
    default = VALUE  what the program takes if the key is not set
    when = "KEY"     it has an effect only if this key of the program, or fact of `rules`, is on
    by = "RULE"      a function of `keel.config.conversion.rules` reads it, with others
    hint = "TEXT"    what to do instead, for who writes the key in a recipe
    unused = "TEXT"  why it has no effect
    kind = "KIND"    what its value is (see `values.py`), if the default does not say it
    switch = true    any text switches it on; it may be a secret, and is not repeated

`[values.KEY]` (of one program: `[values.PROGRAM_KEY]`) has Keel's keys for each value of a key, or
why it is refused (with `check`: what is to be looked at); a number that is not there goes to
`to`. `[unused.GROUP]` has reasons with the
keys (patterns) that have no effect here, `[refused.GROUP]` reasons with the keys that would change
the result, and their values that change nothing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any, Final

FRAMEWORKS: Final = ("trl", "verl", "openrlhf")
VAGUE = frozenset({"path", "name", "enable", "type", "mode", "len"})
"""Last parts of keys that say nothing alone."""


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of another framework, as its table says."""

    to: str | None = None
    default: Any = None
    when: str | None = None
    by: str | None = None
    hint: str | None = None
    unused: str | None = None
    switch: bool = False
    kind: str | None = None
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """A program of another framework, its keys in order."""

    framework: str
    version: str
    name: str
    stage: str
    names: tuple[str, ...]
    keys: Mapping[str, ForeignKey]
    unused: Mapping[str, str]
    """Patterns, and why they have no effect."""
    refused: Mapping[str, tuple[str, list[str]]]
    """Keys: why they are refused, and the values, as text, that change nothing."""
    always: Mapping[str, Any] = field(default_factory=dict)
    surrogate: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By kind of surrogate, the expression of each of its parameters."""

    def why_unused(self, key: str) -> str | None:
        """Why a key that the table does not map has no effect; None if it has one."""
        return next((why for one, why in self.unused.items() if fnmatchcase(key, one)), None)


def read_table(framework: str) -> dict[str, Any]:
    """One framework's table."""
    file = resources.files("keel.config") / "conversion" / f"{framework}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


@cache
def programs(framework: str) -> tuple[Program, ...]:
    """The programs of a framework."""
    table = read_table(framework)
    return tuple(_program(table, name) for name in table["program"])


def _program(table: Mapping[str, Any], name: str) -> Program:
    about = table["program"][name]
    groups = about["groups"]
    keys: dict[str, ForeignKey] = {}
    for group in groups:
        for key, entry in table["keys"].get(group, {}).items():
            given = {"to": entry} if isinstance(entry, str) else entry
            by_value = table["values"].get(f"{name}_{key}", table["values"].get(key))
            keys[key] = ForeignKey(**given, values=by_value)
    unused = {
        pattern: why
        for group in groups
        for why, patterns in table.get("unused", {}).get(group, {}).items()
        for pattern in patterns.split()
    }
    refused = {
        key: (why, [as_text(one) for one in (off if isinstance(off, list) else [off])])
        for group in groups
        for why, off_values in table.get("refused", {}).get(group, {}).items()
        for key, off in off_values.items()
    }
    return Program(
        framework=table["framework"],
        version=table["version"],
        name=name,
        stage=about["stage"],
        names=tuple(about["names"]),
        keys=keys,
        unused=unused,
        refused=refused,
        always=table.get("always", {}).get(name, {}),
        surrogate=table.get("surrogate", {}).get(name, {}),
    )


def as_text(value: Any) -> str:
    """A value as the tables have it: None is `none`."""
    return "none" if value is None else str(value)


# ---------------------------------------------------------------- hints


@cache
def hints(kind: str = "rl") -> Mapping[str, str]:
    """By a foreign key, or an end of it, what it is in Keel: a sentence, or Keel's key in quotes.

    Where ends of keys are the same, those of programs for a `kind` of stage come first, then the
    order of the tables counts.
    """
    found = {name: repr(own) for own, names in _RENAMED.items() for name in names.split()}
    for key, hint in _all_hints(kind):
        parts = key.split(".")
        for start in range(len(parts)):
            end = ".".join(parts[start:])
            if end not in VAGUE or len(parts) == 1:
                found.setdefault(end, hint)
    return found


def _all_hints(kind: str) -> Iterator[tuple[str, str]]:
    every = [program for framework in FRAMEWORKS for program in programs(framework)]
    for program in sorted(every, key=lambda one: one.stage != kind):
        for key, entry in program.keys.items():
            if (hint := entry.hint or (entry.unused if entry.to is None else None)) is not None:
                yield key, hint
            elif entry.to is not None:
                yield key, repr(entry.to)
        for key, (why, _) in program.refused.items():
            yield key, why
        for pattern, why in program.unused.items():
            if "*" not in (plain := pattern.removeprefix("*.")):
                yield plain, why
    for framework in FRAMEWORKS:
        for hint, names in read_table(framework).get("hints", {}).items():
            yield from ((name, hint) for name in names.split())


_RENAMED: Final[dict[str, str]] = {
    "rollout.async_level": "ahead",
    "rollout.max_num_seqs": "max_rows",
    "optimizer.min_lr_ratio": "final_share",
    "tasks.validation_fraction": "heldout_share",
    "sampled.validation": "heldout",
    "tasks.validation_path": "heldout_path",
    "rewards.functions.gate_below": "gate",
    "rewards.functions.gated_reward": "closed",
    "rollout.overlong_buffer": "soft_overlong",
    "rollout.stop_ids": "stop_token_ids",
    "objective": "learns",
    "model.lora.rank": "r",
    "rollout.group_size": "group_size",
    "rollout.prompts_per_step": "prompts_per_step gen_batch_size",
    "rollout.max_tokens": "max_new_tokens max_tokens response_length",
    "rollout.dynamic_sampling": "filter_groups",
    "rollout.vllm.sleep_level": "enable_sleep_mode",
    "minibatches": "num_mini_batches",
    "epochs": "num_ppo_epochs",
    "num_train_epochs": "num_epochs epochs",
    "loss_on": "train_on_inputs train_on_prompt",
    "algorithm.surrogate.low": "cliprange",
    "algorithm.value.coefficient": "vf_coef",
    "algorithm.advantage.whiten": "whiten_rewards",
    "evaluation.samples": "num_samples evaluation.n",
    "teacher.name": "teacher_model_name_or_path",
    "rewards.functions": "custom_reward_function",
    "name": "run_name",
}
"""Keel's keys, and what they were called here or are called elsewhere."""
