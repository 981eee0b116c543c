"""Benchmarks by name: their data on the hub, prompts, graders and published protocols. Torch-free.

They are tables of `benchmarks.toml`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True, slots=True)
class Shots:
    """Worked examples before the question: how many, of which split, and what follows the question
    in them; `by` is a column whose value they share with the row."""

    split: str
    count: int
    text: str
    by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What `benchmarks.toml` says of one."""

    name: str
    title: str
    path: str
    test: str
    prompt: str
    completion: str
    rewards: Sequence[Mapping[str, Any]]
    max_tokens: int
    as_published: str
    sampling: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `datasets.load_dataset`."""
    train: str | None = None
    answer: str | None = None
    letters: str | None = None
    shots: Shots | None = None
    stop: Sequence[str] = ()


@cache
def benchmarks() -> dict[str, Benchmark]:
    """All of them, by name."""
    text = (resources.files("keel.config") / "benchmarks.toml").read_text("utf-8")
    return {name: _read(name, table) for name, table in tomllib.loads(text).items()}


def _read(name: str, table: dict[str, Any]) -> Benchmark:
    shots = table.pop("shots", None)
    return Benchmark(name=name, shots=None if shots is None else Shots(**shots), **table)


def with_graders(data: Any) -> Any:
    """The data of a table with `tasks` and `rewards`: without functions, those that grade its
    tasks, if all are benchmarks. Raises ValueError for benchmarks that are graded differently."""
    tasks = data.get("tasks") if isinstance(data, Mapping) else None
    rewards = data.get("rewards") or {} if isinstance(data, Mapping) else {}
    tasks = [tasks] if isinstance(tasks, Mapping) else tasks
    if not isinstance(tasks, list | tuple) or not isinstance(rewards, Mapping):
        return data
    names = [one.get("name") if isinstance(one, Mapping) else one.name for one in tasks]
    known = [benchmarks().get(str(name)) for name in names]
    if rewards.get("functions") or not any(known):
        return data
    graders = [None if one is None else list(one.rewards) for one in known]
    if any(one != graders[0] for one in graders):
        raise ValueError(
            f"the tasks {', '.join(map(str, names))} are not graded by one reward: name "
            "rewards.functions"
        )
    return {**data, "rewards": {**rewards, "functions": graders[0]}}
