"""Tests that start vLLM servers of their own: whole runs, and models of other families."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from keel.config.model import Lora
from keel.config.sources import VllmServer
from keel.engines.vllm.engine import VllmEngine
from keel.models.lora import add_lora, plain_copy
from keel.runs.rows import read_table
from keel.types import KeelError, Sampling
from tests.engines.killing import DONE, KILL_AT
from tests.engines.tiny import TOKENIZER, ragged_prompts, stock_log_probs, tiny

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif("KEEL_VLLM_PYTHON" not in os.environ, reason="KEEL_VLLM_PYTHON is not set"),
]
STEPS = 16
KILLED = 5
ROOT = Path(__file__).resolve().parents[2]


def _train(run: Path, *more: str, **variables: str) -> Path:
    """The quickstart, shortened; rewards are called while the last groups are still sampled."""
    keys = ["sft.steps=120", f"rl.steps={STEPS}", "rl.evaluation.prompts=0", "rl.rollouts_every=1"]
    keys += ['rl.rollout.engine="vllm"', 'rl.algorithm.corrections.kind="truncate"']
    keys += ["rl.rollout.vllm.start_timeout=3000"]
    keys += ["rl.rollout.overlap_rewards=true", "rl.rollout.max_num_seqs=16"]
    keys += ['rl.rewards.functions=[{function="tests.engines.killing:right"}]']
    command = [sys.executable, "-m", "keel", "train", "quickstart", *keys, *more, "--run", str(run)]
    around = {**os.environ, **variables, "HF_TOKEN": "hf_not_for_the_server"}
    done = subprocess.run(
        command, cwd=ROOT, env=around, capture_output=True, text=True, timeout=6000
    )
    assert done.returncode == 0, done.stderr
    return run


def _steps(run: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["stage"] == "rl"]


def _rollouts(run: Path, step: int) -> Any:
    return read_table(run / "rollouts" / f"rl-step-{step:06d}.parquet")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _train(tmp_path_factory.mktemp("undisturbed") / "run")


def test_a_grpo_run_learns_to_sort_digits(undisturbed: Path) -> None:
    """After a short supervised stage; the figure is the mean reward of the steps."""
    steps = _steps(undisturbed)
    rewards = [step["reward"] for step in steps]
    assert len(rewards) == STEPS
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.1
    assert max(step["sampling/sampling_logp_difference/max"] for step in steps) < 1e-3
    for step in (1, STEPS):
        assert set(_rollouts(undisturbed, step)["weight_version"].to_pylist()) == {step - 1}


def test_server_log_is_in_the_run_folder(undisturbed: Path) -> None:
    log = (undisturbed / "logs" / "rl-vllm.log").read_text()
    assert "Application startup complete" in log
    assert "POST /v1/completions" not in log
    assert "hf_not_for_the_server" not in log


@pytest.mark.vllm_long
def test_step_of_a_killed_server_counts_once(undisturbed: Path, tmp_path: Path) -> None:
    """The run has the records and prompts of one that was not disturbed, and but for near-ties,
    which fall either way in vLLM, its completions. A step counted twice adds 6 % of the tokens."""
    done = tmp_path / "killed"
    run = _train(tmp_path / "run", **{KILL_AT: str(KILLED), DONE: str(done)})
    assert done.read_text().isdigit()
    log = (run / "logs" / "rl-vllm.log").read_text()
    assert log.count("Application startup complete") == 2
    ours, theirs = _steps(run), _steps(undisturbed)
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    for name in ("num_tokens", "rollout/tokens", "reward"):
        figures = [[record[name] for record in steps] for steps in (ours, theirs)]
        np.testing.assert_allclose(*figures, rtol=0.01, err_msg=name)
    for step in range(1, STEPS + 1):
        mine, other = _rollouts(run, step), _rollouts(undisturbed, step)
        for column in ("prompt_id", "weight_version"):
            assert mine[column].to_pylist() == other[column].to_pylist(), (step, column)
    mine, other = (_rollouts(one, KILLED)["completion"].to_pylist() for one in (run, undisturbed))
    assert np.mean([a == b for a, b in zip(mine, other, strict=True)]) > 0.99


@pytest.mark.vllm_long
@pytest.mark.parametrize("cluster", [(), ("cluster.ray=local",)], ids=["ranks", "ray"])
def test_two_trainers_with_a_server_train_as_one(
    cluster: tuple[str, ...], undisturbed: Path, tmp_path: Path
) -> None:
    run = _train(tmp_path / "run", "cluster.processes=2", *cluster)
    for name in ("num_tokens", "reward"):
        figures = [[record[name] for record in _steps(one)] for one in (run, undisturbed)]
        np.testing.assert_allclose(*figures, rtol=0.01, err_msg=name)
    assert len(list((run / "logs").iterdir())) == 1


@pytest.mark.vllm_long
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_of_adapters_only_factors_are_sent(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a server of their own: layers with biases, fused with others, and transposed ones."""
    targets = {"qwen2": ("k_proj", "up_proj"), "gpt2": ("c_attn", "c_proj")}[family]
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = tiny(family, dtype=torch.float32, hidden_size=64, **heads)
    add_lora(model, Lora(rank=2, alpha=3.0, targets=targets), 0)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    noise, sent = torch.Generator().manual_seed(1), []
    engine = VllmEngine(model, TOKENIZER, server=VllmServer(start_timeout=3000.0), max_num_seqs=8)
    try:
        for number in range(4):
            for group in engine.sample(ragged_prompts(3), 1, Sampling(max_tokens=24), number):
                c = group.completions[0]
                wanted = stock_log_probs(plain_copy(model), group.prompt, c)
                np.testing.assert_allclose(c.log_probs, wanted, atol=1e-4)
            before = stock_log_probs(plain_copy(model), group.prompt, c)
            assert engine._client is not None
            given = engine._client.update_weights

            def watched(info: Mapping[str, Any], given: Any = given) -> None:
                sent.append(sum(w.numel() for w in load_file(info["path"]).values()))
                given(info)

            monkeypatch.setattr(engine._client, "update_weights", watched)
            with torch.no_grad():
                for weight in trained.values():
                    weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
            engine.sync(trained)
            monkeypatch.undo()
            after = stock_log_probs(plain_copy(model), group.prompt, c)
            assert np.abs(after - before).max() > 0.01
    finally:
        engine.close()
    assert sent == [sum(weight.numel() for weight in trained.values())] * 4


@pytest.mark.vllm_long
def test_experts_that_cannot_be_loaded_again_are_an_error() -> None:
    """vLLM 0.32's CPU build changes their layout, and its reload cannot restore it."""
    model = tiny("qwen3_moe", dtype=torch.float32, hidden_size=64, head_dim=32)
    engine = VllmEngine(model, TOKENIZER, server=VllmServer(start_timeout=3000.0), max_num_seqs=8)
    try:
        engine.sample(ragged_prompts(1), 1, Sampling(max_tokens=2), 0)
        with pytest.raises(KeelError, match=r"the vLLM server failed \(restarted once\)"):
            engine.sync(dict(model.named_parameters()))
    finally:
        engine.close()
