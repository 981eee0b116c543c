"""run.json: metadata and results of a run, validated when read. Torch-free."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from keel.runs.layout import RunFolder
from keel.types import KeelError

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
    try:
        _Shape.model_validate(whole)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise KeelError(f"cannot read {path}: {key}: {first['msg']}: {HINT}") from None
    return whole
