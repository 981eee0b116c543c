"""Weights to a vLLM server on a GPU: by CUDA IPC on the trainer's own, by NCCL to another.

Written against vLLM 0.32's interface, and never run: no machine of the tests has had a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from keel.config.sampling import VllmServer
from keel.engines.vllm.engine import VllmEngine
from keel.types import Sampling
from tests.engines.tiny import TOKENIZER, ragged_prompts, stock_log_probs, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif("KEEL_VLLM_PYTHON" not in os.environ, reason="KEEL_VLLM_PYTHON is not set"),
]
ROUNDING = 1e-2
"""Matrix products of a GPU may round their factors to TF32; wrong weights are off by more."""


@pytest.fixture(params=[("ipc", ()), ("nccl", (1,))], ids=["ipc", "nccl"])
def engine(request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    backend, gpus = request.param
    if max(gpus, default=0) >= torch.cuda.device_count():
        pytest.skip("needs a second GPU")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    model = tiny("llama", dtype=torch.float32, hidden_size=128, **heads).cuda()
    server = VllmServer(gpus=gpus, gpu_memory_utilization=0.2)
    engine = VllmEngine(model, TOKENIZER, server=server, max_num_seqs=16)
    yield engine
    assert engine._transfer.backend == backend
    engine.close()


def test_weights_on_a_gpu_reach_the_server(engine: VllmEngine) -> None:
    """By the log-probs, as on a CPU; the first are those of the start."""
    noise = torch.Generator("cuda").manual_seed(0)
    model, sampling = engine.model, Sampling(max_tokens=16)
    for number in range(4):
        for group in engine.sample(ragged_prompts(3), 1, sampling, number):
            c = group.completions[0]
            wanted = stock_log_probs(model.cpu(), group.prompt, c)
            model.cuda()
            np.testing.assert_allclose(c.log_probs, wanted, atol=ROUNDING)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.05 * torch.randn(weight.shape, generator=noise, device="cuda"))
        engine.sync(dict(model.named_parameters()))
