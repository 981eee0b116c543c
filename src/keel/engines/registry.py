"""Engines by name (`rollout.engine`), and what a recipe asks that its engine cannot give.

A new engine takes its module or folder, and an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from keel.config.entry import load_function
from keel.config.evaluation import SamplingSource
from keel.config.fields import unknown
from keel.config.model import Autocast
from keel.config.sources import Rollout
from keel.engines.native import CAPABILITIES as NATIVE
from keel.engines.native import build_native
from keel.engines.stored import CAPABILITIES as STORED
from keel.engines.stored import build_stored, check_stored
from keel.engines.vllm.engine import CAPABILITIES as VLLM
from keel.engines.vllm.engine import build_vllm
from keel.engines.vllm.server import check_server
from keel.types import Capabilities, Engine, KeelError, one_line


@dataclass(frozen=True, slots=True)
class EngineKind:
    """An engine of Keel's.

    `build` takes the model, the tokenizer and what `build_engine` gets, `check` raises KeelError if
    the settings cannot work, before anything starts.
    """

    build: Callable[..., Engine]
    capabilities: Capabilities
    check: Callable[[Rollout, bool, int], None] = lambda rollout, here, steps: None


ENGINES: dict[str, EngineKind] = {
    "native": EngineKind(build_native, NATIVE),
    "stored": EngineKind(build_stored, STORED, check_stored),
    "vllm": EngineKind(build_vllm, VLLM, lambda rollout, here, _: check_server(rollout.vllm, here)),
}


def build_engine(
    rollout: Rollout,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    autocast: Autocast = True,
    dtype: str = "model",
    log: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Engine:
    """An engine that samples with the weights of `model`, or with those of the last `sync`.

    `rollout.engine` is one of `ENGINES`, or `module:function` of a function that takes `model`,
    `tokenizer`, `max_num_seqs`, `autocast` and `dtype` as keywords and returns a
    `keel.types.Engine`. `dtype` is that of the weights, keys and values ("model": the model's own).
    A server that an engine starts writes to `log`, and `note` gets a line for each restart of it.
    Raises KeelError for a name that is neither, and if the function raises or returns something
    else.
    """
    name = rollout.engine
    if name in ENGINES:
        return ENGINES[name].build(
            model, tokenizer, rollout=rollout, autocast=autocast, dtype=dtype, log=log, note=note
        )
    function = _function(name)
    options = {"max_num_seqs": rollout.max_num_seqs, "autocast": autocast, "dtype": dtype}
    try:
        engine = function(model=model, tokenizer=tokenizer, **options)
    except KeelError:
        raise
    except Exception as error:
        message = one_line(error, named=True)
        raise KeelError(
            f"rollout.engine = {name!r} raised {message}", key="rollout.engine"
        ) from error
    if not isinstance(engine, Engine):
        raise KeelError(
            f"rollout.engine = {name!r} returned a {type(engine).__name__}: return an object of a "
            "subclass of keel.types.Engine"
        )
    return engine


def check_engine(rollout: Rollout, here: bool = True, steps: int = 0) -> None:
    """Raise KeelError if `rollout.engine` names no engine and no function, or its settings cannot
    work for this number of steps; `here`: it will run on this machine."""
    if rollout.engine in ENGINES:
        ENGINES[rollout.engine].check(rollout, here, steps)
    else:
        _function(rollout.engine)


def evaluating(rollout: Rollout) -> Rollout:
    """The settings of what samples with the policy's own weights, whatever returns rollouts."""
    replays = capabilities_of(rollout.engine).replays
    return rollout.model_copy(update={"engine": "native"}) if replays else rollout


def capabilities_of(name: str) -> Capabilities:
    """What an engine can do, before there is one; of a user's, what is assumed until then."""
    return ENGINES[name].capabilities if name in ENGINES else USER_ENGINE


USER_ENGINE = Capabilities(streams=True, pins=True)


def _function(name: str) -> Callable[..., Any]:
    if ":" not in name:
        raise KeelError(
            f"rollout.engine: {unknown('engine', name, ENGINES)}, or give module:function"
        )
    return load_function(name, "engine")


@dataclass(frozen=True, slots=True)
class UnmetRequest:
    """A key of the stage whose value the engine cannot serve, why, and what to do."""

    key: str
    value: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value} {self.why}: {self.fix}"


def unmet_requests(asked: SamplingSource, engine: Capabilities) -> Iterator[UnmetRequest]:
    """What a stage asks for and its engine cannot give.

    The one rule: `keel check` makes findings of it, and a stage refuses to start.
    """
    rollout, algorithm = asked.rollout, asked.algorithm
    one_turn = rollout.max_turns == 1 and rollout.program is None
    if rollout.overlap_rewards and one_turn and not engine.streams:
        yield UnmetRequest(
            "rollout.overlap_rewards",
            "true",
            "scores groups while others are sampled, and the engine gives them all at its end",
            "set it to false",
        )
    level = rollout.async_level
    if level and not engine.concurrent:
        yield UnmetRequest(
            "rollout.async_level",
            str(level),
            "does not go with cluster.processes, which sample and train in turn",
            'set it to 0, or cluster.ray = "local", which has processes that sample',
        )
    elif level > 1 and not engine.pins:
        yield UnmetRequest(
            "rollout.async_level",
            str(level),
            "needs an engine that keeps several versions of the weights",
            'set cluster.ray = "local", or rollout.async_level = 1',
        )
    if algorithm is not None and not algorithm.corrections and not engine.exact:
        both = "" if rollout.old_log_probs == "trainer" else ' and old_log_probs = "trainer"'
        yield UnmetRequest(
            "rollout.engine",
            f'"{rollout.engine}"',
            "samples with log-probs that are not quite the trainer's, and nothing corrects for it",
            f'set algorithm.corrections.kind = "truncate"{both}, or another engine',
        )


def check_requests(asked: SamplingSource, engine: Capabilities) -> None:
    """Raise KeelError for the first of `unmet_requests`."""
    for one in unmet_requests(asked, engine):
        raise KeelError(str(one))
