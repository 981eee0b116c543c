"""run.json: what a run says of itself, read with the shape that its readers need. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from keel.runs.layout import RunFolder
from keel.types import KeelError

EARLIER = "earlier_evaluation"
"""Key of evaluations that an earlier version wrote and that no stage is known of."""
HINT = "fix it, or delete it: --resume writes a new one"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Result(_Strict):
    mean: float | None
    low: float | None
    high: float | None
    n: int


class _Turn(_Strict):
    content: str


class _Example(_Strict):
    prompt: str | list[_Turn]
    completion: str
    reward: float | None


class _Shape(_Strict):
    """The keys that Keel reads; others are left as they are."""

    evaluation: dict[str, dict[str, _Result]] = {}
    examples: dict[str, dict[str, list[_Example]]] = {}
    measured: dict[str, dict[str, dict[str, Any]]] = {}
    best: dict[str, int] = {}
    versions: dict[str, Any] = {}
    threads: int | None = None


def read_run_json(folder: RunFolder) -> dict[str, Any]:
    """The content of run.json; empty where it is not written yet.

    Evaluations that an earlier version wrote without their stage are put under it.

    Raises:
        KeelError: the file cannot be read, or has another shape than Keel writes.
    """
    path = folder.run_json
    try:
        whole = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise KeelError(f"cannot read {path}: {error}: {HINT}") from error
    if not isinstance(whole, dict):
        raise KeelError(f"cannot read {path}: it holds no JSON object: {HINT}")
    whole = _by_stage(folder, whole)
    try:
        _Shape.model_validate(whole)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise KeelError(f"cannot read {path}: {key}: {first['msg']}: {HINT}") from None
    return whole


def _by_stage(folder: RunFolder, whole: dict[str, Any]) -> dict[str, Any]:
    """Evaluations as earlier versions wrote them ({before, after}, with no stage) under stages.

    One that is there under its stage already, written since, stays.
    """
    evaluation = whole.get("evaluation")
    if not isinstance(evaluation, dict):
        return whole
    old = {k: v for k, v in evaluation.items() if isinstance(v, dict) and "mean" in v}
    if not old:
        return whole
    examples = whole.get("examples")
    examples = examples if isinstance(examples, dict) else {}
    found: dict[str, dict[str, Any]] = {
        "evaluation": {k: v for k, v in evaluation.items() if k not in old},
        "examples": {k: v for k, v in examples.items() if not isinstance(v, list)},
    }
    unknown = {}
    for when, result in old.items():
        stage = _stage_of(folder, when, result)
        if stage is None:
            unknown[when] = result
            continue
        for key, value in (("evaluation", result), ("examples", examples.get(when))):
            if value is not None:
                found[key][stage] = {when: value, **found[key].get(stage, {})}
    if unknown:
        found[EARLIER] = unknown
    return {**whole, **{key: value for key, value in found.items() if value or key in whole}}


def _stage_of(folder: RunFolder, when: str, result: Mapping[str, Any]) -> str | None:
    """The stage of an evaluation: the only one, or that of the first or last event with it."""
    if len(folder.stages) == 1:
        return folder.stages[0]
    try:
        lines = folder.events.read_bytes().splitlines()
        events = [json.loads(line) for line in lines if b'"evaluation"' in line]
        stages = [
            str(event["stage"])
            for event in events
            if event["event"] == "evaluation"
            and (event["mean"], event["n"]) == (result["mean"], result["n"])
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not stages:
        return None
    return stages[0] if when == "before" else stages[-1]
