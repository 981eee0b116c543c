"""Small stages that learn from preferences and labels, and rows with a rule to learn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.load import load_recipe
from keel.config.schema import Recipe

Rows = list[dict[str, Any]]

MODEL: dict[str, Any] = {
    "build": {
        "family": "llama",
        "alphabet": "0123456789> ",
        "hidden_size": 32,
        "layers": 2,
        "heads": 2,
        "context": 40,
    }
}


TASK: dict[str, Any] = {"name": "sort_digits", "options": {"min_digits": 3, "max_digits": 4}}


def recipe(*stages: Mapping[str, Any], seed: int = 0, **model: Any) -> Recipe:
    """A recipe of these stages on a model of two layers of width 32."""
    data = {
        "name": "judged",
        "seed": seed,
        "threads": 1,
        "model": {**MODEL, **model},
        "stages": [{"checkpoints": {"every": 1000}, **stage} for stage in stages],
    }
    return load_recipe(data)


def sampled(train: int, validation: int, **keys: Any) -> dict[str, Any]:
    """The `sampled` of a stage: answers to prompts of `TASK`, each judged by its digits."""
    return {
        "tasks": [TASK],
        "rewards": {"functions": [{"function": "place_match"}]},
        "train": train,
        "validation": validation,
        "max_tokens": 5,
        **keys,
    }


def write(path: Path, rows: Rows) -> str:
    """Rows as a file of lines; its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data(folder: Path, train: Rows, validation: Rows) -> dict[str, Any]:
    """The `data` of a stage: both splits as files."""
    return {
        "name": "jsonl",
        "path": write(folder / "train.jsonl", train),
        "validation_path": write(folder / "validation.jsonl", validation),
    }


def ones(n: int, seed: int) -> Rows:
    """Pairs of strings of zeros and ones, of which the one with more ones is chosen.

    The length says nothing: longer strings may hold fewer ones. Prompts of different seeds differ.
    """
    rng = np.random.default_rng(seed)
    rows: Rows = []
    while len(rows) < n:
        two = [_binary(rng) for _ in range(2)]
        low, high = sorted(two, key=lambda text: text.count("1"))
        if low.count("1") < high.count("1"):
            rows.append({"prompt": f"{seed}{len(rows):04d}>", "chosen": high, "rejected": low})
    return rows


def exchanged(rows: Rows) -> Rows:
    """The same pairs with the worse answer named the better."""
    return [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]


def labelled(n: int, seed: int) -> Rows:
    """Strings of zeros and ones: right where at least half are ones."""
    rng = np.random.default_rng(seed)
    texts = [_binary(rng) for _ in range(n)]
    return [
        {
            "prompt": f"{seed}{at:04d}>",
            "completion": text,
            "label": 2 * text.count("1") >= len(text),
        }
        for at, text in enumerate(texts)
    ]


def traces(n: int, seed: int) -> Rows:
    """Answers of three to five digits, each a step; the first of 7, 8 and 9 is the first error."""
    rng = np.random.default_rng(seed)
    rows: Rows = []
    for at in range(n):
        digits = rng.integers(0, 10, int(rng.integers(3, 6))).tolist()
        error = next((i for i, digit in enumerate(digits) if digit >= 7), None)
        steps = [str(digit) for digit in digits]
        rows.append({"prompt": f"{seed}{at:04d}>", "steps": steps, "first_error": error})
    return rows


def headline(measured: Mapping[str, Any], name: str) -> float:
    """A figure of a measurement in run.json; of an interval its mean."""
    value = measured[name]
    return float(value["mean"] if isinstance(value, Mapping) else value)


def texts(rows: Sequence[Mapping[str, Any]], column: str) -> list[str]:
    """One column."""
    return [str(row[column]) for row in rows]


def _binary(rng: np.random.Generator) -> str:
    return "".join(str(bit) for bit in rng.integers(0, 2, int(rng.integers(4, 8))).tolist())
