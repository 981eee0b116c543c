"""Engines by the name in `rollout.engine`, and what a recipe asks that one cannot give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from keel.cluster.placement import placement_of
from keel.config.load import load_recipe
from keel.config.sources import Rollout
from keel.engines.native import NativeEngine
from keel.engines.registry import build_engine, capabilities_of, unmet_requests
from keel.preflight.check import check
from keel.runs.reader import load
from keel.training.run import train
from keel.types import Capabilities, KeelError
from tests.engines import tiny
from tests.engines.scripted import ScriptedEngine, replace_native

ALPHABET = "no function"


def answers_one(**parts: Any) -> ScriptedEngine:
    """An engine of a user's own."""
    return ScriptedEngine(lambda prompt, index: ("1", [-1.0, -1.0]), parts["tokenizer"])


def no_engine(**parts: Any) -> str:
    return "none"


def test_a_function_may_be_the_engine_of_a_run(tmp_path: Path) -> None:
    engine = f"{__file__}:answers_one"
    overrides = [f'rollout.engine="{engine}"', "steps=1", "evaluation.prompts=0"]
    run = train(load_recipe("tiny", [f"rl.{key}" for key in overrides]), tmp_path / "run")
    rows = load(run.path).rollouts(1)
    assert {row["completion"] for row in rows} == {"1"}


def wrong_arguments(model: Any) -> None:
    """Takes none of the other arguments."""


def test_rollouts_and_evaluation_get_the_weights_of_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ScriptedEngine] = []

    def scripted(model: Any, tokenizer: Any, **_: Any) -> ScriptedEngine:
        made.append(ScriptedEngine(lambda prompt, index: ("1", [-1.0, -1.0]), tokenizer))
        made[-1].capabilities = Capabilities(in_process=True)
        return made[-1]

    replace_native(monkeypatch, scripted)
    keys = ["rl.steps=2", "rl.evaluation.prompts=4", "rl.algorithm.corrections.kind=truncate"]
    for dtype, syncs in (("model", [2]), ("bfloat16", [2, 2])):
        made.clear()
        recipe = load_recipe("tiny", [*keys, f"rl.rollout.dtype={dtype}"])
        train(recipe, tmp_path / dtype)
        assert [engine.syncs for engine in made] == syncs


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (["engine=natve"], r"rollout\.engine: .*'natve'"),
        (["engine=vllm", 'vllm.python="/no/python"'], r"vllm\.python = '/no/python' is not a prog"),
        (["engine=vllm", 'vllm.url="localhost:8"'], r"vllm\.url = 'localhost:8' is not an address"),
    ],
)
def test_engine_of_a_later_stage_is_checked_first(
    keys: list[str], why: str, tmp_path: Path
) -> None:
    overrides = ["algorithm.corrections.kind=truncate", *(f"rollout.{key}" for key in keys)]
    recipe = load_recipe("quickstart", [f"rl.{key}" for key in overrides])
    assert [stage.name for stage in recipe.stages] == ["sft", "rl"]
    with pytest.raises(KeelError, match=f"stage 'rl': .*{why}"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_native_engine_is_built_by_its_name() -> None:
    model = tiny.tiny("llama")
    rollout = Rollout(max_num_seqs=4)
    engine = build_engine(rollout, model=model, tokenizer=tiny.TOKENIZER, dtype="bfloat16")
    assert isinstance(engine, NativeEngine)
    assert (engine.max_num_seqs, engine.dtype) == (4, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("natve", "rollout.engine: .*natve.*did you mean.*native"),
        (f"{__file__}:no_engine", "returned a str: return an object"),
        (f"{__file__}:wrong_arguments", "raised TypeError: .*unexpected keyword"),
        (f"{__file__}:ALPHABET", "is a str, not a function"),
    ],
)
def test_what_is_no_engine_is_refused(name: str, error: str) -> None:
    with pytest.raises(KeelError, match=error):
        build_engine(Rollout(engine=name), model=tiny.tiny("llama"), tokenizer=tiny.TOKENIZER)


# ---------------------------------------------------------------- what a recipe asks of its engine


CORRECTED = "algorithm.corrections.kind=truncate"
RAY = ("cluster.ray=local", CORRECTED)
SEVERAL = "cluster.processes=2"
CASES = [
    ((), ()),
    (("rollout.overlap_rewards=true",), ()),
    (("rollout.overlap_rewards=true", SEVERAL), ()),
    (("rollout.async_level=1", CORRECTED), ()),
    (("rollout.async_level=1", CORRECTED, SEVERAL), ("rollout.async_level",)),
    (("rollout.async_level=1", CORRECTED, SEVERAL, "rollout.engine=vllm"), ()),
    (("rollout.async_level=2", CORRECTED), ("rollout.async_level",)),
    (("rollout.async_level=2", CORRECTED, "rollout.engine=vllm"), ("rollout.async_level",)),
    (("rollout.async_level=2", *RAY), ()),
    (("rollout.engine=vllm",), ("rollout.engine",)),
    (("rollout.engine=vllm", CORRECTED), ()),
]


@pytest.mark.parametrize(("keys", "unmet"), CASES)
def test_requests_that_engine_and_processes_cannot_serve(
    keys: tuple[str, ...], unmet: tuple[str, ...]
) -> None:
    recipe = load_recipe("tiny", keys)
    sampling = recipe.stages[0].sampling
    assert sampling is not None
    offered = placement_of(recipe.cluster).offers(capabilities_of(sampling.rollout.engine))
    assert tuple(one.key for one in unmet_requests(sampling, offered)) == unmet


def test_unmet_request_is_a_finding_and_stops_the_run(tmp_path: Path) -> None:
    keys = ["rollout.async_level=2", CORRECTED]
    found = [one for one in check("tiny", keys, runs=False).findings if one.severity == "error"]
    assert [(one.kind, one.key) for one in found] == [("engine-cannot", "rollout.async_level")]
    with pytest.raises(KeelError, match=r"stage 'rl': rollout\.async_level = 2 needs an engine"):
        train(load_recipe("tiny", keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "keys",
    [
        ("algorithm.advantage={kind='custom', function='os:name'}",),
        ("rollout.program=os:name",),
    ],
)
def test_what_is_no_function_is_one_line(keys: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="'os:name' is a str, not a function"):
        train(load_recipe("tiny", [*keys]), tmp_path / "run")
