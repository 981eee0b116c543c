"""Engines by name: the value of `rollout.engine` in a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedModel

from keel.config.entry import load_entry
from keel.config.fields import unknown
from keel.config.model import Autocast
from keel.config.sampling import VllmServer
from keel.engines.native import NativeEngine
from keel.engines.vllm.engine import VllmEngine
from keel.engines.vllm.server import check_server
from keel.models.loading import DTYPES
from keel.types import Engine, KeelError, one_line

ENGINES: dict[str, Callable[..., Engine]] = {"native": NativeEngine, "vllm": VllmEngine}


def build_engine(
    name: str,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    max_rows: int = 256,
    autocast: Autocast = True,
    dtype: str = "model",
    server: VllmServer | None = None,
    timeout: float = 1800.0,
    log: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Engine:
    """An engine that samples with the weights of `model`, or with those of the last `sync`.

    `name` is one of `ENGINES`, or `module:function` of a function that takes the same keyword
    arguments and returns a `keel.types.Engine`. `max_rows` is how many sequences are decoded at
    once, `dtype` that of the weights, keys and values ("model": the model's own). `server`,
    `timeout` (seconds of a request), `log` (of the server) and `note`, which gets a line for each
    restart of the server, are of the vLLM engine. Raises KeelError for a name that is neither, and
    where the function raises or returns something else.
    """
    if name in ENGINES:
        rest: dict[str, Any] = {"autocast": autocast, "dtype": DTYPES.get(dtype)}
        if name == "vllm":
            rest = {"server": server, "dtype": dtype, "timeout": timeout, "log": log, "note": note}
        return ENGINES[name](model, tokenizer, max_rows=max_rows, **rest)
    function = _function(name)
    try:
        engine = function(
            model=model, tokenizer=tokenizer, max_rows=max_rows, autocast=autocast, dtype=dtype
        )
    except KeelError:
        raise
    except Exception as error:
        message = one_line(error, named=True)
        raise KeelError(f"rollout.engine = {name!r} raised {message}") from error
    if not isinstance(engine, Engine):
        raise KeelError(
            f"rollout.engine = {name!r} returned a {type(engine).__name__}: return an object with "
            "the methods of keel.types.Engine"
        )
    return engine


def check_engine(name: str, server: VllmServer, here: bool = True) -> None:
    """Raise KeelError where `rollout.engine` names no engine and no function, or is vLLM and
    `server` names none; `here`: it will run on this machine."""
    if name == "vllm":
        check_server(server, here)
    if name not in ENGINES:
        _function(name)


def _function(name: str) -> Callable[..., Any]:
    if ":" not in name:
        raise KeelError(
            f"rollout.engine: {unknown('engine', name, ENGINES)}, or give module:function"
        )
    function = load_entry(name, "engine")
    if not callable(function):
        raise KeelError(
            f"rollout.engine = {name!r} is a {type(function).__name__}: name a function"
        )
    return cast("Callable[..., Any]", function)
