"""The estimate of a recipe with several ranks: memory of each, seconds of a step, price."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from keel.analysis.scale.catalogue import DEFAULT, HARDWARE
from keel.analysis.scale.shapes import Parallelism, Workload
from keel.analysis.scale.step import step_cost
from keel.cli.main import main
from keel.config.load import load_recipe
from keel.models.build import build_config
from keel.preflight.check import check
from keel.preflight.device_estimate import estimate
from keel.preflight.device_time import shape_of
from tests.training.small import FAST

Capture = pytest.CaptureFixture[str]

GATED = ("model.build.hidden_size=512", "model.build.layers=8", "rollout.max_tokens=100")


def test_ranks_share_what_learns_and_hold_the_policy_to_sample() -> None:
    """Two ranks: half of the weights, gradients, moments and reference, and the policy whole."""
    one, two = (
        {part.name: part.bytes for part in stage.parts}
        for stage in (
            estimate(load_recipe("tiny", [*GATED, f"cluster.processes={n}"]), "h100-80gb").stages[0]
            for n in (1, 2)
        )
    )
    halved = ("policy weights", "policy gradients", "policy optimizer moments", "reference weights")
    for name in halved:
        assert two[name] == pytest.approx(one[name] / 2, abs=16)
    assert two["policy weights, whole (sampling)"] == one["policy weights"]
    assert two["key-value cache"] == one["key-value cache"] / 2
    layer = one["policy weights"] / 8
    assert 0.9 * layer < two["two gathered layers and a gradient"] / 3 < layer
    assert two["bfloat16 copy of the weights (autocast)"] < one["policy weights"] / 4
    same = ("activations of a micro-batch", "chunks of logits", "CUDA context and workspaces")
    assert all(two[name] == one[name] for name in same)


def test_only_stages_of_kind_rl_are_shared() -> None:
    recipe = load_recipe("quickstart", ["cluster.processes=4"])
    found = estimate(recipe, "h100-80gb").stages
    assert [(stage.name, stage.ranks) for stage in found] == [("sft", 1), ("rl", 4)]
    assert found[0].untimed == "only stages of kind rl are in the cost model"


def test_time_and_price_are_those_of_the_cost_model() -> None:
    recipe = load_recipe("tiny", [*GATED, "cluster.processes=4", "epochs=2"])
    (stage,) = recipe.stages
    time = estimate(recipe, "h100-80gb", price=3.0).stages[0].time
    assert time is not None
    assert recipe.model.build is not None
    shape = shape_of(build_config(recipe.model.build))
    assert shape is not None
    rollout = stage.rollout  # type: ignore[union-attr]
    work = Workload(
        rollout.prompts_per_step * rollout.group_size, rollout.group_size, 512, 50.0, 100,
        scored=2, epochs=2,
    )  # fmt: skip
    spread = Parallelism(4, 4, shards=4, checkpointing=False, micro_tokens=stage.token_budget)
    cost = step_cost(shape, HARDWARE["H100"], DEFAULT, spread, work)
    assert time.step == pytest.approx(cost.seconds)
    assert sum(time.parts.values()) == pytest.approx(cost.seconds)
    assert time.total == pytest.approx(stage.steps * cost.seconds)
    assert time.cost == pytest.approx(time.total / 3600 * 4 * 3.0, abs=1e-4)
    assert estimate(recipe, "h100-80gb").stages[0].time != time  # no price, no cost


@pytest.mark.parametrize(
    ("keys", "device", "why"),
    [
        (("model.lora.rank=2",), "h100-80gb", "adapters"),
        (("model.build.family=gpt2",), "h100-80gb", "gated"),
        ((), "l4-24gb", "no data sheet"),
        (("model.build.hidden_size=16384", "model.build.layers=64"), "h100-80gb", "not fit"),
        (("algorithm=ppo", "value.name=critic"), "h100-80gb", "critic with a model of its own"),
    ],
    ids=["lora", "gpt2", "l4", "large", "critic"],
)
def test_what_has_no_time_says_why(keys: tuple[str, ...], device: str, why: str) -> None:
    (stage,) = estimate(load_recipe("tiny", keys), device).stages
    assert stage.time is None
    assert why in stage.untimed


def test_the_time_of_a_critic_is_that_of_a_second_policy() -> None:
    """One more pass that scores, and twice the update."""

    def parts(*keys: str) -> Mapping[str, float]:
        time = estimate(load_recipe("tiny", [*GATED, "algorithm=ppo", *keys]), "h100-80gb")
        found = time.stages[0].time
        assert found is not None
        assert found.step == pytest.approx(sum(found.parts.values()))
        return found.parts

    head, critic = parts("value.kind=head"), parts("value.kind=critic")
    assert critic["update"] == pytest.approx(2 * head["update"])
    assert critic["generation"] == head["generation"]
    one_pass = critic["score"] - head["score"]
    assert one_pass * 3 == pytest.approx(critic["score"])  # old policy, reference, values


def test_a_teacher_is_timed_by_its_own_shape(tmp_path: Path) -> None:
    build = load_recipe("tiny", GATED).model.build
    assert build is not None
    (tmp_path / "model.safetensors").touch()
    scores = []
    for layers in (8, 80):
        build_config(build.model_copy(update={"layers": layers})).save_pretrained(tmp_path)
        keys = [*GATED, "algorithm=opd", f"teacher.name={tmp_path}"]
        (stage,) = estimate(load_recipe("tiny", keys), "h100-80gb").stages
        assert stage.time is not None, stage.untimed
        scores.append(stage.time.parts["score"])
    assert 5 < scores[1] / scores[0] < 10


@pytest.mark.parametrize(
    ("keys", "share"),
    [
        ((), 0.4),
        (("rollout.vllm.gpu_memory_utilization=0.9",), 0.9),
        (("rollout.vllm.gpus=[1]",), None),
        (("rollout.vllm.url=http://127.0.0.1:8000",), None),
    ],
)
def test_a_vllm_server_takes_its_share_of_the_gpu(
    keys: tuple[str, ...], share: float | None
) -> None:
    """And the trainer's process has no cache of keys and values."""
    vllm = ("rollout.engine=vllm", "algorithm.correction.kind=truncate", "rollout.dtype=bfloat16")
    found = estimate(load_recipe("tiny", [*vllm, *keys]), "h100-80gb")
    parts = {part.name: part for part in found.stages[0].parts}
    assert "key-value cache" not in parts
    assert "bfloat16 copy of the weights (sampling)" not in parts
    if share is None:
        assert "vLLM server" not in parts
    else:
        assert parts["vLLM server"].bytes == int(share * found.memory)
        assert parts["vLLM server"].when == "always"
    full = load_recipe("tiny", [*vllm, "rollout.vllm.gpu_memory_utilization=1.0"])
    assert not estimate(full, "h100-80gb").fits


def test_the_report_of_a_device_has_ranks_time_and_cost(capsys: Capture) -> None:
    words = ["check", "tiny", *GATED, "steps=1000", "cluster.processes=4", "--device", "h100-80gb"]
    assert main([*words, "--price", "1000"]) == 0
    text = capsys.readouterr().out
    assert "on each of 4 ranks: fits" in text
    assert re.search(r"predicted step: [\d.]+ s \(generation", text)
    assert re.search(r"predicted time on 4 GPUs: about \d+ .*, cost [\d.]*[1-9]", text)


def test_a_check_of_several_processes_estimates_each_rank() -> None:
    (stage,) = check("tiny", [*FAST, "cluster.processes=2"], predicts=False).stages
    ranks = stage.predicted["ranks"]
    parts = ranks["parts"]
    assert ranks["processes"] == 2
    assert ranks["peak"] < sum(parts.values())
    assert parts["policy weights"] == pytest.approx(
        parts["policy weights, whole (sampling)"] / 2, abs=16
    )
    assert "CUDA context and workspaces" not in parts
    assert any("time of 2 processes" in line for line in stage.unseen)
    (alone,) = check("tiny", FAST, predicts=False).stages
    assert "ranks" not in alone.predicted


@pytest.mark.slow
def test_ranks_that_do_not_fit_together_are_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """1 GiB holds the trial's process and not four ranks of 500 MiB."""
    monkeypatch.setattr("keel.preflight.prediction.available_memory", lambda device: 2**30)
    assert main(["check", "tiny", *FAST, "cluster.processes=4"]) == 1
    text = capsys.readouterr().out
    assert "estimated memory of each of 4 ranks: " in text
    assert "estimated: 4 ranks of 0.49 GiB" in text
    assert "cluster.processes: lower token_budget" in text
