"""A vLLM server that sleeps while the trainer works: the order of requests, and its failures.

The server is a program with vLLM's routes (`fake_vllm`) that has no GPU to free. `test_vllm.py`
sends the same requests to vLLM's CPU build, `tests/gpu` to one with a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from keel.config.load import load_recipe
from keel.config.model import Lora
from keel.config.sources import Rollout, VllmServer
from keel.engines.vllm.engine import VllmEngine, build_vllm
from keel.engines.vllm.transfer import checkpoint_weights, shares_gpu
from keel.models.lora import add_lora, plain_weights
from keel.training.run import train
from keel.types import KeelError, Sampling
from tests.engines import fake_vllm
from tests.engines.fake_vllm import Replies
from tests.engines.tiny import TOKENIZER, ragged_prompts, tiny
from tests.platform.processes import eventually, gone, look

UPDATE = ["/pause?mode=wait", "/start_weight_update", "/update_weights {}"]
UPDATE += ["/finish_weight_update", "/reset_prefix_cache", "/resume"]
WEIGHTS, CACHE = "/wake_up?tags=weights", "/wake_up?tags=kv_cache"
SAMPLE = "/v1/completions"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", "/tmp")  # of the socket, whose path must not be long
    monkeypatch.setenv("VLLM_FAKE", "[{}]")
    return fake_vllm.write(tmp_path)


def engine_of(
    program: Path, level: int | None, lora: bool = False, **options: object
) -> VllmEngine:
    model = tiny("llama", dtype=torch.float32)
    if lora:
        add_lora(model, Lora(rank=2), 0)
    server = VllmServer(python=str(program), start_timeout=60.0, sleep_level=level)
    return VllmEngine(model, TOKENIZER, server=server, log=program.with_name("log"), **options)  # type: ignore[arg-type]


def sample(engine: VllmEngine) -> None:
    engine.sample(ragged_prompts(1), 1, Sampling(max_tokens=4), 0)


def trained(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def update(tensors: int) -> list[str]:
    return [line.format(tensors) for line in UPDATE]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_sync_wakes_weights_before_the_cache(program: Path, level: int, lora: bool) -> None:
    """Of LoRA the factors are sent, but all weights to a server that has dropped them."""
    engine = engine_of(program, level, lora)
    model = engine.model
    whole = len(checkpoint_weights(model, plain_weights(model)))
    learned = len(trained(model)) if lora else whole
    sample(engine)
    engine.sleep()
    engine.sleep()  # sleeps already
    engine.sync(trained(model))
    sample(engine)
    engine.sync(trained(model))  # awake: nothing is dropped
    engine.close()
    asleep = [f"/sleep?level={level}", WEIGHTS] if level else []
    assert fake_vllm.requests(program) == [
        "/init_weight_transfer_engine",
        SAMPLE,
        *asleep,
        *update(whole if level == 2 else learned),
        *([CACHE] if level else []),
        SAMPLE,
        *update(learned),
    ]
    assert whole > 5
    assert not lora or learned != whole


def test_sampling_wakes_a_server_without_a_sync(program: Path) -> None:
    engine = engine_of(program, 2)
    sample(engine)
    engine.sleep()
    sample(engine)
    engine.close()
    whole = len(checkpoint_weights(engine.model, plain_weights(engine.model)))
    wake = [WEIGHTS, *update(whole), CACHE]
    assert fake_vllm.requests(program)[2:] == ["/sleep?level=2", *wake, SAMPLE]


@pytest.mark.parametrize("then", ["sync", "sample"])
def test_a_server_that_dies_asleep_is_replaced(program: Path, then: str) -> None:
    """By one that is awake, and has the weights."""
    notes = list[str]()
    engine = engine_of(program, 1, note=notes.append)
    sample(engine)
    engine.sleep()
    assert engine.process is not None
    engine.process.process.kill()
    engine.process.process.wait()
    before = len(fake_vllm.requests(program))
    if then == "sync":
        engine.sync(trained(engine.model))
    sample(engine)
    engine.close()
    assert fake_vllm.starts(program) == 2
    assert len(notes) == 1
    assert not {WEIGHTS, CACHE} & set(fake_vllm.requests(program)[before:])


@pytest.mark.parametrize("path", ["/sleep?level=1", WEIGHTS, CACHE])
def test_a_server_that_cannot_sleep_ends_the_call(
    program: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    broken: Replies = {path: (500, "cannot", 0.0)}
    monkeypatch.setenv("VLLM_FAKE", json.dumps([broken]))
    notes = list[str]()
    engine = engine_of(program, 1, note=notes.append)
    sample(engine)
    if path.startswith("/sleep"):
        with pytest.raises(KeelError, match=r"restarted once\): /sleep.*500.*: see .*log"):
            engine.sleep()
    else:
        engine.sleep()
        engine.sync(trained(engine.model))  # to a server that is started for it
        sample(engine)
        engine.close()
    assert fake_vllm.starts(program) == 2
    assert len(notes) == 1


@pytest.mark.slow
def test_the_server_ends_with_a_trainer_killed_meanwhile(program: Path) -> None:
    code = f"""
import time
from pathlib import Path
from tests.engines.test_vllm_sleep import engine_of, sample
engine = engine_of(Path({str(program)!r}), 2)
sample(engine)
engine.sleep()
print(engine.process.process.pid, flush=True)
time.sleep(600)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    parent = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        server = look(int(parent.stdout.readline()))
    assert server is not None
    assert fake_vllm.requests(program)[-1] == "/sleep?level=2"
    parent.kill()
    parent.wait()
    assert eventually(lambda: gone({server[0]}) == set())


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_sleeps_while_it_trains(program: Path, tmp_path: Path, ahead: int) -> None:
    """Each step, after its completions; never where it samples ahead."""
    keys = ["steps=2", "evaluation.prompts=0", "algorithm.corrections.kind=truncate"]
    keys += ["rollout.engine=vllm", f"rollout.vllm.python={program}"]
    keys += ["rollout.vllm.start_timeout=60.0", "rollout.vllm.sleep_level=1"]
    train(load_recipe("tiny", [*keys, f"rollout.async_level={ahead}"]), tmp_path / "run")
    found = [line for line in fake_vllm.requests(program) if line not in update(0)]
    kinds = [line.split()[0] for line in found[1:]]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    step = [SAMPLE, "/sleep?level=1", WEIGHTS, "/update_weights", CACHE]
    if ahead:
        assert set(kinds) == {SAMPLE, "/update_weights"}
    else:
        assert order == step * 2


def test_it_sleeps_by_default_on_a_shared_gpu(program: Path) -> None:
    device = torch.device("cuda", 1)
    assert shares_gpu(device, ())
    assert shares_gpu(device, (0, 1))
    assert not shares_gpu(device, (0, 2))
    assert shares_gpu(torch.device("cuda"), (0,))
    assert not shares_gpu(torch.device("cpu"), ())
    assert engine_of(program, None).sleep_level == 0
    rollout = Rollout(vllm=VllmServer(python=str(program), sleep_level=2), async_level=1)
    model = tiny("llama", dtype=torch.float32)
    ahead = build_vllm(model, TOKENIZER, rollout=rollout, dtype="model", log=None, note=None)
    assert ahead.sleep_level == 0
