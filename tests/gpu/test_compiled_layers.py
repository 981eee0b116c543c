"""One GPU: layers that torch compiles against those that it does not."""

from __future__ import annotations

import pytest
import torch

from keel.engines.native import NativeEngine
from keel.engines.static import StaticDecoder
from keel.models import families
from keel.models.attention import compile_layers
from keel.models.policy import token_count
from keel.types import Sampling
from tests.engines.tiny import TOKENIZER, assert_same, ragged_prompts, tiny
from tests.gpu import needs_gpus
from tests.models.test_compiled_layers import values_and_gradients
from tests.models.tiny import policy

# torch hides this warning of its own, which pytest makes an error.
HIDDEN = pytest.mark.filterwarnings("ignore:The .grad attribute")
pytestmark = [*needs_gpus(1), HIDDEN]


@pytest.mark.parametrize(("family", "rank"), [("qwen2", 0), ("gemma2", 0), ("qwen2", 4)])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_updates_equal_eager_ones(family: str, rank: int, autocast: bool) -> None:
    made = policy(family, rank=rank)
    made.autocast = autocast
    made.model.to("cuda")
    wanted = [values_and_gradients(made, seed) for seed in range(2)]
    compile_layers(made.model.base_model)
    found = [values_and_gradients(made, seed) for seed in range(2)]
    bound = 5e-2 if autocast else 1e-4  # 8 bits, relative to a tensor's largest; float32 sums
    for ours, theirs in zip(found, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().max() <= bound * other.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_compiled_decoding_equals_eager_decoding(family: str) -> None:
    """Captured, with rows that end until one is left."""
    model = tiny(family, dtype=torch.float32).to("cuda")
    asked, sampling = ragged_prompts(9), Sampling(24)
    found = []
    for compiled in (False, True):
        if compiled:
            setattr(model, families.COMPILED, "all")
            compile_layers(model.base_model)
        decoder = StaticDecoder(model, tokens=token_count(TOKENIZER), autocast=False)
        engine = NativeEngine(model, TOKENIZER, autocast=False, decoder=decoder)
        found.append([engine.sample(asked, 3, sampling, seed) for seed in range(2)])
        assert None not in decoder._graphs.values()
    for one, other in zip(*found, strict=True):
        assert_same(one, other, atol=1e-4)
