"""What of the vLLM engine needs no vLLM: its HTTP client, its process, its settings."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.config.model import Lora
from keel.config.sources import Rollout, VllmServer
from keel.engines.registry import check_engine
from keel.engines.vllm.engine import VllmEngine
from keel.engines.vllm.server import (
    Sampled,
    ServerFailure,
    ServerProcess,
    VllmClient,
    check_server,
    last_error,
    passed,
)
from keel.engines.vllm.transfer import (
    adapter_factors,
    adapters_base,
    checkpoint_weights,
    choose_transfer,
    described,
    nccl_group,
    new_folder,
    server_variables,
)
from keel.models.lora import add_lora, plain_weights
from keel.models.policy import token_count
from keel.models.tokenizer_round_trip import quiet
from keel.types import Group, KeelError, Sampling
from tests.engines.fake_vllm import USUAL, Replies, serving
from tests.engines.tiny import TOKENIZER, ragged_prompts, tiny

REPLIES: Replies = {
    "/refuses": (400, {"error": {"message": "no such\nmodel"}}, 0.0),
    "/fails": (500, {"error": "engine dead"}, 0.0),
    "/hangs": (200, None, 2.0),
}


@pytest.fixture(params=["tcp", "unix"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    path = os.path.relpath(tmp_path / "socket")  # a socket's path must not be long
    with serving(REPLIES, path if request.param == "unix" else None) as address:
        yield address


def test_refusal_is_the_users_and_failure_the_servers(url: str) -> None:
    client = VllmClient(url, 10.0)
    assert client.healthy()
    assert client.model() == "policy"
    assert client.complete("policy", [3], {"seed": 1}).result() == Sampled([5, 1], [-1, -1], "stop")
    with pytest.raises(KeelError, match=r"refuses /refuses \(HTTP 400: .*no such.*model"):
        client.request("GET", "/refuses")
    with pytest.raises(ServerFailure, match=r"HTTP 500: .*engine dead"):
        client.request("GET", "/fails")
    with pytest.raises(ServerFailure, match=r"/hangs of .* no answer within 0.1 s"):
        client.request("GET", "/hangs", timeout=0.1)


@pytest.mark.parametrize("nowhere", ["http://127.0.0.1:9", "unix:/no/socket"])
def test_no_server_is_not_healthy(nowhere: str) -> None:
    assert not VllmClient(nowhere, 1.0).healthy()


def test_a_server_that_is_not_vllm_is_refused() -> None:
    replies: Replies = {
        "/v1/completions": (200, {"choices": [{"text": "no ids"}]}, 0.0),
        "/v1/models": (200, {"data": []}, 0.0),
    }
    with serving(replies) as url:
        client = VllmClient(url, 10.0)
        with pytest.raises(KeelError, match="returns no token ids"):
            client.complete("policy", [3], {}).result()
        with pytest.raises(KeelError, match=r"url = .*give the address of a vLLM server"):
            client.model()


BAD = ["127.0.0.1:8000", "https://host", "http://host/v1", "", "unix:", "http://127.0.0.1:99999"]


@pytest.mark.parametrize("bad", [*BAD, "http://[::1", "http://127.0.0.1:a", "http://a b"])
def test_a_wrong_address_is_refused(bad: str) -> None:
    with pytest.raises(KeelError, match=r"rollout\.vllm\.url = .* is not an address: write http"):
        _engine(url=bad)


def test_a_python_that_does_not_start_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"rollout\.vllm\.python = '/no/python' does not start"):
        ServerProcess("/no/python", tmp_path, tmp_path / "log", [])


def test_only_this_user_reaches_a_server(tmp_path: Path) -> None:
    """It listens in a folder that others do not enter; a path that is too long is refused."""
    assert _engine(python=sys.executable)._folder.stat().st_mode & 0o777 == 0o700
    server = ServerProcess(sys.executable, tmp_path, tmp_path / "log", [])
    server.stop()
    assert server.url == f"unix:{tmp_path}/server.sock"
    command = server.process.args
    assert isinstance(command, list)
    assert not {"--host", "--port"} & set(command)
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    with pytest.raises(KeelError, match=r"too long for the path of a socket.*set .* TMPDIR"):
        ServerProcess(sys.executable, folder, tmp_path / "log", [])


def test_a_server_gets_no_secrets() -> None:
    given = {
        "PATH": "/bin",
        "CUDA_HOME": "/cuda",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_API_KEY": "a",
        "HF_TOKEN": "b",
        "WANDB_API_KEY": "c",
        "AWS_SECRET_ACCESS_KEY": "d",
        "PYTHONPATH": "/src",
    }
    assert set(passed(given)) == {"PATH", "CUDA_HOME", "VLLM_LOGGING_LEVEL"}


def test_the_way_of_weights_follows_the_devices() -> None:
    gpu, base = torch.device("cuda:1"), {"w": torch.ones(1)}
    assert choose_transfer(torch.device("cpu"), (), {}, True).backend == "keel_file"
    assert choose_transfer(gpu, (), {}, True).backend == "ipc"
    assert choose_transfer(gpu, (1,), {}, True).backend == "ipc"
    assert choose_transfer(gpu, (0, 2), {}, True).backend == "nccl"
    assert choose_transfer(gpu, (0, 1), {}, True).backend == "keel_file"
    assert choose_transfer(gpu, (), base, True).backend == "keel_file"
    assert choose_transfer(gpu, (0,), {}, False).backend == "keel_file"


def test_the_gpus_of_a_server_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:1")
    assert server_variables(torch.device("cpu"), (5,)) == {}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,GPU-7")
    assert server_variables(gpu, ())["CUDA_VISIBLE_DEVICES"] == "6"
    assert server_variables(gpu, (2, 0))["CUDA_VISIBLE_DEVICES"] == "GPU-7,4"
    with pytest.raises(KeelError, match=r"rollout\.vllm\.gpus = \[3\], but there are 3 GPUs"):
        server_variables(gpu, (3,))


def test_layers_fused_with_adapted_ones_are_sent() -> None:
    """All of its block, and nothing of another; without adapters nothing."""
    model = tiny("qwen2", dtype=torch.float32)
    assert adapters_base(model) == {}
    names = {name for name in model.state_dict() if name.startswith("model.layers.1.")}
    add_lora(model, Lora(rank=2, targets=("layers.1.self_attn.q_proj",)), 0)
    base = adapters_base(model)
    assert set(base) == names
    assert {"model.layers.1.self_attn.k_proj.bias", "model.layers.1.mlp.up_proj.weight"} < names
    assert set(adapter_factors(model)) == {
        f"model.layers.1.self_attn.q_proj.{side}" for side in ("left", "right")
    }


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "qwen3_moe"])
def test_weights_are_sent_as_a_checkpoint_has_them(family: str, tmp_path: Path) -> None:
    """Of experts one by one, and tied weights once."""
    model = tiny(family, dtype=torch.float32)
    sent = checkpoint_weights(model, dict(model.named_parameters()))
    with quiet():
        model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert {n for n, p in sent.items() if p.shape != saved[n].shape} == set()
    assert all(torch.equal(weight, saved[name]) for name, weight in sent.items())
    assert set(saved) == set(sent) | {n for n, _ in model.named_buffers() if n in saved}
    whole = checkpoint_weights(model, plain_weights(model))
    assert set(whole) == set(saved)


def test_weights_go_where_there_is_space(tmp_path: Path) -> None:
    space = shutil.disk_usage(tmp_path).free
    for size, inside in ((0, True), (space // 3, True), (space, False)):
        folder = new_folder(size, tmp_path)
        folder.rmdir()
        assert (folder.parent == tmp_path) == inside
    assert new_folder(0, tmp_path / "none").parent == Path(tempfile.gettempdir())


@pytest.mark.slow
def test_unwritable_weights_are_a_one_line_error() -> None:
    """By a limit of the size of files, in a process of its own."""
    code = """
import resource, torch
from keel.engines.vllm.transfer import FileTransfer
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
FileTransfer({"weight": torch.zeros(1 << 20)}).prepare(None)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert "KeelError: the weights for the vLLM server cannot be written to /" in last
    assert "free some space there" in last


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif("KEEL_VLLM_PYTHON" not in os.environ, reason="KEEL_VLLM_PYTHON is not set")
def test_vllm_reads_the_messages_of_both_gpu_backends() -> None:
    """By vLLM's own classes; the handles and the unique id are made up."""
    update = described({"a.weight": torch.ones(2, 3, dtype=torch.bfloat16)})
    code = f"""
from vllm.distributed.weight_transfer.ipc_engine import *
from vllm.distributed.weight_transfer.nccl_engine import *
from base64 import b64encode
import pickle
update = {update!r}
handles = b64encode(pickle.dumps([dict(gpu=(1, 2))])).decode()
read = IPCWeightTransferUpdateInfo(**update, ipc_handles_pickled=handles)
assert read.ipc_handles == [dict(gpu=(1, 2))]
IPCWeightTransferInitInfo(packed=False)
assert NCCLWeightTransferUpdateInfo(**update).dtype_names == ["bfloat16"]
group = {nccl_group(3, bytes(128))!r}
assert NCCLWeightTransferInitInfo(**group).nccl_unique_id_bytes == bytes(128)
"""
    around = {**passed(os.environ), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    command = [os.environ["KEEL_VLLM_PYTHON"], "-c", code]
    done = subprocess.run(command, env=around, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def _engine(log: Path | None = None, **server: object) -> VllmEngine:
    model = tiny("llama", dtype=torch.float32)
    checked = VllmServer.model_validate(server)
    return VllmEngine(model, TOKENIZER, server=checked, timeout=1.0, log=log)


@pytest.mark.parametrize(
    ("name", "by"), [("venv/bin/python", "key"), ("~/venv/bin/python", "variable")]
)
def test_python_is_found_from_this_folder_and_home(
    name: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server starts in another folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    if by == "variable":
        monkeypatch.setenv("KEEL_VLLM_PYTHON", name)
    engine = _engine(log=tmp_path / "log", **{"python": name} if by == "key" else {})
    with pytest.raises(KeelError, match=r"ended with status 1 .*No module named 'vllm'"):
        engine.sample(ragged_prompts(1), 1, Sampling(max_tokens=2), 0)
    assert engine.server.interpreter == str(tmp_path / "venv/bin/python")
    assert "No module named 'vllm'" in last_error(tmp_path / "log")


def test_missing_python_is_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KEEL_VLLM_PYTHON", raising=False)
    with pytest.raises(KeelError, match=r"set rollout\.vllm\.python or KEEL_VLLM_PYTHON"):
        check_engine(Rollout(engine="vllm"))
    with pytest.raises(KeelError, match=r"vllm\.python = '.*/venv/python' is not a program"):
        _engine(python="venv/python")
    monkeypatch.setenv("KEEL_VLLM_PYTHON", "no-such-python")
    with pytest.raises(KeelError, match=r"KEEL_VLLM_PYTHON = 'no-such-python' is not a program"):
        _engine()
    check_server(VllmServer(), here=False)  # where it will run there may be one


def test_a_server_by_address_is_not_restarted() -> None:
    engine = _engine(url="http://127.0.0.1:9")
    with pytest.raises(KeelError, match=r"vLLM server failed: the connection to http://127.0.0.1"):
        engine.sample(ragged_prompts(1), 1, Sampling(max_tokens=2), 0)
    assert engine.restarts == 0


@pytest.mark.parametrize("padding", [0, 3])
def test_ids_without_a_token_are_not_sampled(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM samples any row of the head, and reports log-probs after the bias."""
    model = tiny("llama", dtype=torch.float32)
    tokens = token_count(TOKENIZER)
    model.config.vocab_size = tokens + padding
    asked: list[Any] = []
    complete = VllmClient.complete

    def spy(client: VllmClient, name: str, prompt: list[int], settings: Any) -> Any:
        asked.append(settings)
        return complete(client, name, prompt, settings)

    monkeypatch.setattr(VllmClient, "complete", spy)
    with serving({}) as url:
        engine = VllmEngine(model, TOKENIZER, server=VllmServer(url=url))
        engine.sample(ragged_prompts(2), 2, Sampling(max_tokens=2), 0)
    wanted = {str(tokens + at): -100.0 for at in range(padding)}
    assert [settings.get("logit_bias", {}) for settings in asked] == [wanted] * 4


def test_a_call_that_fails_cancels_its_requests() -> None:
    """At most `max_num_seqs` are under way; none is left, so that vLLM does not go on with them."""
    model = tiny("llama", dtype=torch.float32)
    with serving({"/v1/completions": (*USUAL["/v1/completions"][:2], 0.5)}) as url:
        engine = VllmEngine(model, TOKENIZER, server=VllmServer(url=url), max_num_seqs=2)

        def fail(place: int, group: Group) -> None:
            assert engine._client is not None
            under_way = asyncio.all_tasks(engine._client._http._loop._started()[0])
            assert len(under_way) < 2
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            engine.sample(ragged_prompts(6), 1, Sampling(max_tokens=2), 0, on_group=fail)
        assert engine._client is not None
        loop = engine._client._http._loop._started()[0]
        end = time.monotonic() + 0.4
        while asyncio.all_tasks(loop) and time.monotonic() < end:
            time.sleep(0.01)
        assert not asyncio.all_tasks(loop)


def test_a_temperature_that_vllm_changes_is_refused() -> None:
    sampling = Sampling(max_tokens=2, temperature=0.005)
    with pytest.raises(KeelError, match=r"raised to 0\.01"):
        _engine(python=sys.executable).sample(ragged_prompts(1), 1, sampling, 0)
