"""Engines by name: the value of `rollout.engine` in a recipe."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from keel.config.entry import load_entry
from keel.config.suggest import unknown
from keel.engines.native import NativeEngine
from keel.models.loading import DTYPES
from keel.types import Engine, KeelError

ENGINES = {"native": NativeEngine}


def build_engine(
    name: str,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    max_rows: int = 256,
    autocast: bool = True,
    dtype: str = "model",
) -> Engine:
    """An engine that samples with the weights of `model`.

    `name` is one of `ENGINES`, or `module:function` of a function that takes the same keyword
    arguments and returns a `keel.types.Engine`. `max_rows` is how many sequences are decoded at
    once, `dtype` that of the weights, keys and values ("model": the model's own). Raises KeelError
    for a name that is neither.
    """
    if name in ENGINES:
        return ENGINES[name](
            model, tokenizer, max_rows=max_rows, autocast=autocast, dtype=DTYPES.get(dtype)
        )
    if ":" not in name:
        raise KeelError(f"rollout.engine: {unknown('engine', name, ENGINES)}")
    engine = load_entry(name, "engine")(
        model=model, tokenizer=tokenizer, max_rows=max_rows, autocast=autocast, dtype=dtype
    )
    if not isinstance(engine, Engine):
        raise KeelError(f"rollout.engine = {name!r} returned no engine: see keel.types.Engine")
    return engine
