"""The vLLM engine with a real server: sampling, log-probs, syncs, and a server that is killed.

One server serves all tests of the module.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from keel.config.model import Lora
from keel.config.sources import VllmServer
from keel.engines.native import NativeEngine
from keel.engines.vllm.engine import VllmEngine
from keel.models.lora import add_lora, plain_copy
from keel.platform.process import has_ended
from keel.platform.time_limit import time_limit
from keel.types import Completion, Group, Prompt, Sampling
from tests.engines.tiny import TOKENIZER, assert_same, ragged_prompts, stock_log_probs, tiny
from tests.platform.processes import eventually, gone, look

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif("KEEL_VLLM_PYTHON" not in os.environ, reason="KEEL_VLLM_PYTHON is not set"),
]
SAMPLING = Sampling(max_tokens=24)
GREEDY = replace(SAMPLING, temperature=0.0)
ROUNDING = 1e-4
"""float32 sums in another order; a wrong temperature or weight is off by more than 0.01."""


def _model() -> PreTrainedModel:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tied = {"tie_word_embeddings": True}  # a head without weights that are sent
    return tiny("llama", dtype=torch.float32, hidden_size=64, **heads, **tied)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return _model()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        model, TOKENIZER, server=VllmServer(start_timeout=3000.0), max_num_seqs=32, timeout=60.0
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def native(model: PreTrainedModel) -> NativeEngine:
    return NativeEngine(model, TOKENIZER)


def _all(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def _log_probs(model: PreTrainedModel, prompt: Prompt, c: Completion, t: float) -> np.ndarray:
    """Those of the model's weights for a completion at a temperature, by plain transformers."""
    stock = _model()
    stock.load_state_dict(model.state_dict())
    return stock_log_probs(stock, prompt, c, t)


def test_greedy_equals_the_native_engine(engine: VllmEngine, native: NativeEngine) -> None:
    asked = ragged_prompts(6)
    assert_same(engine.sample(asked, 1, GREEDY, 0), native.sample(asked, 1, GREEDY, 0), ROUNDING)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_log_probs_are_the_models_at_the_temperature(
    engine: VllmEngine, model: PreTrainedModel, temperature: float
) -> None:
    sampling = replace(SAMPLING, temperature=temperature)
    for group in engine.sample(ragged_prompts(4), 3, sampling, 1):
        for c in group.completions:
            wanted = _log_probs(model, group.prompt, c, temperature)
            np.testing.assert_allclose(c.log_probs, wanted, atol=ROUNDING)


def test_completion_depends_on_its_seed_alone(engine: VllmEngine) -> None:
    asked = ragged_prompts(5)
    whole = engine.sample(asked, 4, SAMPLING, 7)
    part = engine.sample(asked[3:], 4, SAMPLING, 7)
    assert_same(part, whole[3:], ROUNDING)
    other = engine.sample(asked[3:], 4, SAMPLING, 8)
    assert [c.tokens.tolist() for c in _all(other)] != [c.tokens.tolist() for c in _all(part)]
    assert len({tuple(c.tokens.tolist()) for c in whole[0].completions}) > 1


def test_stops_end_completions_as_natively(engine: VllmEngine, native: NativeEngine) -> None:
    asked = ragged_prompts(6)
    free = _all(native.sample(asked, 1, GREEDY, 0))
    longest = max(free, key=len)
    word = longest.text[4:6]
    token = int(longest.tokens[7])
    for sampling in (
        replace(GREEDY, stop=(word,)),
        replace(GREEDY, stop_ids=(token,)),
        replace(GREEDY, stop=("<eos>", word[0]), stop_ids=(token,)),
        replace(GREEDY, max_tokens=5, stop=(word,)),
        replace(GREEDY, max_tokens=1),
    ):
        theirs = native.sample(asked, 1, sampling, 0)
        assert [c.finish for c in _all(theirs)] != [c.finish for c in free] or (
            sampling.max_tokens < GREEDY.max_tokens
        )
        assert_same(engine.sample(asked, 1, sampling, 0), theirs, ROUNDING)


def test_the_context_limits_a_completion(engine: VllmEngine, native: NativeEngine) -> None:
    asked = [Prompt(id="long", content="", tokens=tuple(2 + i % 30 for i in range(90)))]
    sampling = replace(GREEDY, max_tokens=50)
    theirs = native.sample(asked, 1, sampling, 0)
    assert len(theirs[0].completions[0]) <= 6
    assert_same(engine.sample(asked, 1, sampling, 0), theirs, ROUNDING)


def test_truncation_keeps_to_the_likeliest_tokens(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    for sampling in (replace(SAMPLING, top_k=1), replace(SAMPLING, top_p=1e-4)):
        cut = engine.sample(ragged_prompts(3), 2, sampling, 5)
        for group in cut:
            for c in group.completions:
                np.testing.assert_allclose(c.log_probs, 0.0, atol=ROUNDING)


def test_each_of_twenty_syncs_reaches_the_server(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    """By the log-probs: those of the new weights, far from those of the weights before."""
    noise = torch.Generator().manual_seed(0)
    asked = ragged_prompts(2)
    for number in range(1, 21):
        before = engine.sample(asked, 1, SAMPLING, number)
        old = [_log_probs(model, g.prompt, g.completions[0], 1.0) for g in before]
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn(weight.shape, generator=noise))
        engine.sync(dict(model.named_parameters()))
        # The same prompts again, whose prefixes the server may have cached.
        for group in engine.sample(asked, 2, SAMPLING, number):
            for c in group.completions:
                wanted = _log_probs(model, group.prompt, c, 1.0)
                np.testing.assert_allclose(c.log_probs, wanted, atol=ROUNDING)
        new = [_log_probs(model, g.prompt, g.completions[0], 1.0) for g in before]
        assert max(float(np.abs(a - b).max()) for a, b in zip(old, new, strict=True)) > 0.01


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_slept_samples_with_new_weights(
    engine: VllmEngine, model: PreTrainedModel, level: int
) -> None:
    """vLLM's CPU build takes the requests and pauses, but frees nothing."""
    asked, noise = ragged_prompts(3), torch.Generator().manual_seed(level)

    def right() -> None:
        for group in engine.sample(asked, 1, SAMPLING, level):
            c = group.completions[0]
            wanted = _log_probs(model, group.prompt, c, 1.0)
            np.testing.assert_allclose(c.log_probs, wanted, atol=ROUNDING)

    right()
    engine.sleep_level, before = level, engine.restarts
    assert engine._client is not None
    for synced in (True, False):
        engine.sleep()
        assert engine._client.request("GET", "/is_sleeping") == {"is_sleeping": True}
        if synced:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.02 * torch.randn(weight.shape, generator=noise))
            engine.sync(dict(model.named_parameters()))
        right()
        assert engine._client.request("GET", "/is_sleeping") == {"is_sleeping": False}
    engine.sleep_level = 0
    assert engine.restarts == before


def test_a_server_by_address_gets_all_weights_first(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    """Of a model that the server does not have, adapters merged; then those of each sync."""
    engine.sample(ragged_prompts(1), 1, SAMPLING, 0)
    assert engine.process is not None
    assert engine.process.url.startswith("unix:")
    other = _model()
    # Of layers that vLLM fuses with others, some.
    add_lora(other, Lora(rank=2, targets=("q_proj", "v_proj", "up_proj")), 0)
    noise = torch.Generator().manual_seed(1)
    second = VllmEngine(other, TOKENIZER, server=VllmServer(url=engine.process.url), max_num_seqs=8)
    trained = {name: p for name, p in other.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    for number in range(3):
        with torch.no_grad():
            for weight in trained.values():
                weight.add_(0.1 * torch.randn(weight.shape, generator=noise))
        if number:
            second.sync(trained)
        for group in second.sample(ragged_prompts(3), 1, SAMPLING, number):
            c = group.completions[0]
            wanted = _log_probs(plain_copy(other), group.prompt, c, 1.0)
            np.testing.assert_allclose(c.log_probs, wanted, atol=ROUNDING)
    engine.sync(dict(model.named_parameters()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_server_that_fails_is_started_again(
    engine: VllmEngine, model: PreTrainedModel, how: signal.Signals
) -> None:
    """With the weights of the last sync; what was done is kept, the rest is redone, all once.

    A server that is stopped gives no answer, so that its requests exceed their time limit.
    """
    asked = ragged_prompts(6)
    engine.sample(asked, 1, SAMPLING, 0)
    wanted = engine.sample(asked, 8, SAMPLING, 11)
    before, seen, groups_of = engine.restarts, [], list[int]()

    def kill(place: int, group: Group) -> None:
        if not seen:
            assert engine.process is not None
            server = engine.process.process
            groups_of.append(server.pid)
            os.kill(server.pid, how)
            if how == signal.SIGKILL:
                assert eventually(lambda: has_ended(server))
        seen.append(place)

    assert engine._client is not None
    engine._client.timeout = 20.0
    engine.max_num_seqs, rows = 4, engine.max_num_seqs
    with time_limit("the engine", 20.0, "raise rollout.timeout"):
        groups = engine.sample(asked, 8, SAMPLING, 11, on_group=kill)
    engine.max_num_seqs = rows
    assert engine.restarts == before + 1
    assert sorted(seen) == list(range(6))
    assert_same(groups, wanted, ROUNDING)
    assert eventually(lambda: not _lives(groups_of[0]))  # its engine ended with it


def _lives(group: int) -> bool:
    with suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False


def test_the_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import sys, time
from pathlib import Path
from keel.engines.vllm.server import ServerProcess
folder = Path({str(tmp_path)!r})
server = ServerProcess({os.environ["KEEL_VLLM_PYTHON"]!r}, folder, folder / "log", [])
print(server.process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        server = int(parent.stdout.readline())
    found = look(server)
    assert found is not None
    parent.kill()
    parent.wait()
    assert gone({found[0]}) == set()
