"""From an algorithm and an environment, or a TOML file, to a validated `ControlRecipe`.

`recipes/control/ppo.toml` holds what PPO starts from anywhere, `ppo.CartPole-v1.toml` what is tuned
for that environment; what the user sets goes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.algorithms.presets import PRESETS, Preset
from keel.config.address import gather, layer, overlay
from keel.config.control import ControlRecipe
from keel.config.fields import unknown
from keel.config.kinds import DEFAULT_KIND, stage_kind
from keel.config.load import (
    SHIPPED,
    names_in,
    parse_toml,
    read_toml,
    split_override,
    validated,
)
from keel.config.presets import DEFAULT_PRESET, merge
from keel.types import KeelError

FOLDER = SHIPPED / "control"


def load_control(
    source: str | Path, environment: str | None = None, overrides: Sequence[str] = ()
) -> ControlRecipe:
    """The recipe of an algorithm on an environment, or of a TOML file, with overrides on top.

    Raises KeelError, in one line, on whatever is wrong with it.
    """
    data = overlay(_read(str(source), environment), map(split_override, overrides))
    if environment is not None:
        data = layer(data, {"environment": {"id": environment}})
    return validated(data, ControlRecipe)


def algorithms() -> list[str]:
    """What `keel control` knows by name."""
    own = {name for name in names_in(FOLDER) if "." not in name}
    rows = {
        name
        for name, p in PRESETS.items()
        if not (p.algorithm.needs_greedy or p.algorithm.needs_steps)
    }
    return sorted(own | rows)


def tuned() -> list[tuple[str, str]]:
    """The pairs of algorithm and environment whose settings are tuned."""
    parts = (name.partition(".") for name in names_in(FOLDER))
    return sorted((algorithm, environment) for algorithm, dot, environment in parts if dot)


def _read(source: str, environment: str | None) -> dict[str, Any]:
    if source.endswith(".toml") or "/" in source:
        return _read_file(source)
    if source not in PRESETS and source not in algorithms():
        raise KeelError(unknown("algorithm", source, algorithms()))
    if environment is None:
        raise KeelError(f"{source} on which environment? name one with --env, as in CartPole-v1")
    name = f"{source}-{environment.rpartition(':')[2]}".replace("/", "-")
    start = {} if source in names_in(FOLDER) else _of_preset(PRESETS[source])
    data = {"name": name, "stages": [start]}
    for name in (source, f"{source}.{environment}"):
        path = FOLDER / f"{name}.toml"
        if path.is_file():
            data = layer(data, parse_toml(path.read_text(encoding="utf-8"), name))
    return data


def _read_file(source: str) -> dict[str, Any]:
    """A recipe of one's own, over what it extends, or over what its algorithm starts from."""
    own = {"name": Path(source).stem, **read_toml(source)}
    base = own.pop("extends", None)
    if base is not None:
        algorithm, _, environment = str(base).partition(".")
        if algorithm not in algorithms():
            raise KeelError(unknown("algorithm to extend", algorithm, algorithms()))
        below = _read(algorithm, environment or "any")
        place = {"environment": {"id": environment}} if environment else {}
        return layer(layer(below, place), own)
    data = gather(own)
    stages = data["stages"]
    first = stages[0] if isinstance(stages, list) and stages else {}
    if not isinstance(first, dict):
        return data
    if stage_kind(first.get("stage", DEFAULT_KIND)) is not None:
        raise KeelError(f"{source} is a recipe of keel train, not of keel control")
    if first["stage"] != "policy_gradient":
        return data
    row = first.get("algorithm", DEFAULT_PRESET)
    preset = row.get("preset", DEFAULT_PRESET) if isinstance(row, dict) else row
    if preset not in PRESETS:
        return data
    return {**data, "stages": [merge(_of_preset(PRESETS[preset]), first)]}


def _of_preset(preset: Preset) -> dict[str, Any]:
    """A preset of language models as it goes on environments: γ < 1, and no reference policy."""
    row: dict[str, Any] = {"preset": preset.name}
    if "gamma" in type(preset.algorithm.advantage).model_fields:
        row["advantage"] = {"gamma": 0.99}
    if preset.algorithm.divergence is not None and preset.algorithm.divergence.to == "reference":
        row["divergence"] = "none"
    if preset.algorithm.value is not None:
        row["value"] = {"coefficient": 1.0, "clip": "none"}
    return {
        "stage": "policy_gradient",
        "algorithm": row,
        "environment": {"count": 8},
        "group_size": 8 if preset.algorithm.needs_groups else 1,
    }
