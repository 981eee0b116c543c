"""One GPU and vLLM: log-probabilities and syncs of a real server, against the trainer's model."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from keel.config.sources import VllmServer
from keel.engines.vllm.engine import VllmEngine
from keel.learn.batch import from_groups
from keel.models.attention import install
from keel.models.families import head_of, hidden_states
from keel.models.head import log_probs
from keel.types import Group, Sampling
from tests.engines.tiny import TOKENIZER, ragged_prompts, tiny
from tests.gpu import needs_gpus

pytestmark = [
    *needs_gpus(1),
    pytest.mark.vllm,
    pytest.mark.skipif("KEEL_VLLM_PYTHON" not in os.environ, reason="KEEL_VLLM_PYTHON is not set"),
]
ROUNDING = 2e-3
"""float32 by other kernels; a wrong temperature or an old weight is off by more than 0.01."""
SAMPLING = Sampling(max_tokens=24)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    # The kernels of vLLM's attention on a GPU take heads of 64 features and more.
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    made = tiny("llama", dtype=torch.float32, hidden_size=128, **heads).to(torch.device("cuda"))
    install(made)
    return made


@pytest.fixture(
    scope="module",
    params=[("ipc", ()), pytest.param(("nccl", (1,)), marks=pytest.mark.slow)],
    ids=["ipc", "nccl"],
)
def engine(request: pytest.FixtureRequest, model: PreTrainedModel) -> Iterator[VllmEngine]:
    """A server on the trainer's GPU, and one on another, which no machine of the tests had yet."""
    backend, gpus = request.param
    if max(gpus, default=0) >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    server = VllmServer(gpus=gpus, gpu_memory_utilization=0.2)
    engine = VllmEngine(model, TOKENIZER, server=server, max_num_seqs=32, timeout=120.0)
    yield engine
    assert engine._transfer.backend == backend
    engine.close()


def largest_difference(model: PreTrainedModel, groups: list[Group]) -> float:
    """Between the server's log-probabilities and those of the trainer's model, in nats."""
    packed = from_groups(groups, model.device).packed
    with torch.no_grad():
        hidden = hidden_states(model, packed, False)
        ours = log_probs(hidden, head_of(model), packed.scored(), 1.0)
    theirs = np.concatenate([c.log_probs for group in groups for c in group.completions])
    return float(np.abs(ours.cpu().numpy() - theirs).max())


def test_the_server_computes_the_models_log_probs(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    groups = engine.sample(ragged_prompts(6), 4, SAMPLING, 0)
    assert all(len(c) for group in groups for c in group.completions)
    assert largest_difference(model, groups) < ROUNDING


def test_the_server_samples_with_synced_weights(engine: VllmEngine, model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_((0.05 * noise).to(weight.device))
    before = engine.sample(ragged_prompts(6), 4, SAMPLING, 1)
    assert largest_difference(model, before) > 10 * ROUNDING
    engine.sync(dict(model.named_parameters()))
    after = engine.sample(ragged_prompts(6), 4, SAMPLING, 1)
    assert largest_difference(model, after) < ROUNDING


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_server_frees_the_gpu(
    engine: VllmEngine, model: PreTrainedModel, level: int
) -> None:
    """Its share of the card, and samples with the trainer's weights when it is awake again."""
    engine.sample(ragged_prompts(1), 1, SAMPLING, 0)
    if engine._transfer.backend == "ipc":
        assert engine.sleep_level == 1  # the default on a shared GPU
    else:
        pytest.skip("the server has a GPU to itself, and was not started to sleep")
    engine.sleep_level = level
    for synced in (True, False):
        torch.cuda.empty_cache()
        before, total = torch.cuda.mem_get_info()
        engine.sleep()
        # Of the fifth of the card that the server has, most is its cache.
        assert torch.cuda.mem_get_info()[0] - before > 0.1 * total
        if synced:
            generator = torch.Generator().manual_seed(level)
            with torch.no_grad():
                for weight in model.parameters():
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.add_((0.05 * noise).to(weight.device))
            engine.sync(dict(model.named_parameters()))
        groups = engine.sample(ragged_prompts(6), 4, SAMPLING, 2)
        assert largest_difference(model, groups) < ROUNDING
    assert engine.restarts == 0
