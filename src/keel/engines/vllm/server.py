"""A vLLM server: its HTTP API, and its process.

Completions are token ids. A server that Keel starts ends with this process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from keel.config.sources import VllmServer
from keel.platform.http import HttpClient, transport_to
from keel.platform.process import Child, exit_status, has_ended, kill_group
from keel.platform.time_limit import heartbeat, raise_if_cancelled
from keel.types import KeelError

SHOWN = 300
"""Characters of a server's message that an error repeats."""
WORKER = "keel_vllm_worker"
"""Name of the copy of `worker.py` that the server imports."""
MODEL = "policy"
"""Name of the model on a server that Keel starts."""
SOCKET = "server.sock"
LONGEST_ADDRESS = 103
"""Bytes of a socket's path that every system allows."""
DEFAULTS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Variables of vLLM's CPU build; those of the user's environment have precedence."""
PASSED = re.compile(
    "(PATH|HOME|USER|LOGNAME|SHELL|LANG|TMPDIR|TZ|XDG_CACHE_HOME|CC|CXX|LD_LIBRARY_PATH|LD_PRELOAD)"
    "|(LC|CUDA|NVIDIA|NCCL|VLLM|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|OMP|KMP|MKL|GLOO)_.*"
)
"""Variables of the user's environment that a server gets, unless one may hold a secret."""
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
GRACE = 10.0
"""Seconds in which a server ends after SIGTERM."""


class ServerFailure(Exception):
    """The server gave no usable reply; another server may."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the server sampled for one request, and vLLM's reason for its end."""

    tokens: list[int]
    log_probs: list[float]
    finish: str


def check_address(url: str) -> None:
    """Raise KeelError unless `url` is http://HOST:PORT or unix:PATH."""
    try:
        transport_to(url)
    except ValueError:
        raise KeelError(
            f"rollout.vllm.url = {url!r} is not an address: write http://HOST:PORT or unix:PATH"
        ) from None


class VllmClient:
    """Sends requests; `timeout` seconds limit each. vLLM aborts one that is cancelled."""

    def __init__(self, url: str, timeout: float) -> None:
        self._http = HttpClient(url)
        self.url = url.rstrip("/")
        self.timeout = timeout

    def complete(
        self, model: str, prompt: list[int], settings: Mapping[str, Any]
    ) -> Future[Sampled]:
        """Begin to sample one completion of a prompt in token ids."""
        return self._http.start(self._complete(model, prompt, settings))

    async def _complete(
        self, model: str, prompt: list[int], settings: Mapping[str, Any]
    ) -> Sampled:
        body = {
            "model": model,
            "prompt": prompt,
            "n": 1,
            "logprobs": 0,
            "return_token_ids": True,
            "add_special_tokens": False,
            "skip_special_tokens": False,  # they are text, as in the native engine
            **settings,
        }
        found = await self._request("POST", "/v1/completions", body, self.timeout)
        try:
            choice = found["choices"][0]
            tokens = [int(number) for number in choice["token_ids"]]
            scores = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            finish = str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise KeelError(
                f"the server at {self.url} returns no token ids with log-probs "
                f"({type(error).__name__}: {error}): it needs vLLM 0.32"
            ) from None
        if finish not in ("stop", "length") or len(tokens) != len(scores) or not tokens:
            raise ServerFailure(f"a completion ended with finish reason {finish!r}")
        return Sampled(tokens, scores, finish)

    def healthy(self) -> bool:
        """Whether the server answers and its engine runs."""
        try:
            self.request("GET", "/health", timeout=5.0)
        except (ServerFailure, KeelError):
            return False
        return True

    def model(self) -> str:
        """The name of the model that the server has. Raises KeelError if it lists none."""
        found = self.request("GET", "/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise KeelError(
                f"rollout.vllm.url = {self.url!r}: the server there lists no model in /v1/models; "
                "give the address of a vLLM server"
            ) from None

    def prepare_updates(self, info: Mapping[str, Any]) -> None:
        """Set the weight transfer up. Raises KeelError if the server was started without it."""
        self.request("POST", "/init_weight_transfer_engine", {"init_info": info})

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """One update of the weights, within the block; generation is paused, then without cache."""
        self.request("POST", "/pause?mode=wait")
        try:
            self.request("POST", "/start_weight_update")
            yield
            self.request("POST", "/finish_weight_update", {"weight_version": str(version)})
            self.request("POST", "/reset_prefix_cache")
        finally:
            self.request("POST", "/resume")

    def sleep(self, level: int) -> None:
        """Free the GPU: of the cache and, moved to the host (1) or dropped (2), of the weights."""
        self.request("POST", f"/sleep?level={level}")

    def wake_up(self, tag: Literal["weights", "kv_cache"]) -> None:
        """Take back memory that `sleep` freed; of dropped weights without their values."""
        self.request("POST", f"/wake_up?tags={tag}")

    def update_weights(self, info: Mapping[str, Any]) -> None:
        """Let the server take weights in, as its backend reads `info`; only within `updating`."""
        self.request("POST", "/update_weights", {"update_info": info})

    def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 0.0
    ) -> Any:
        """The JSON of a reply, None if it has no content; waits for it.

        Raises ServerFailure if the connection fails, the deadline passes or the server reports
        an error of its own, KeelError if it refuses the request.
        """
        return self._http.start(self._request(method, path, body, timeout or self.timeout)).result()

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit: float
    ) -> Any:
        try:
            status, content = await self._http.request(method, path, body, limit)
        except TimeoutError:
            raise ServerFailure(
                f"{path} of {self.url} gives no answer within {limit:g} s (rollout.timeout)"
            ) from None
        except OSError as error:
            raise ServerFailure(
                f"the connection to {self.url} failed in {path} ({error})"
            ) from None
        if status >= 500:
            raise ServerFailure(f"{path} of {self.url}: HTTP {status}: {_shown(content)}")
        if status >= 300:
            raise KeelError(
                f"the server at {self.url} refuses {path} (HTTP {status}: "
                f"{_shown(content)}): see docs/howto/vllm.md for how it has to be started"
            )
        try:
            return json.loads(content) if content.strip() else None
        except ValueError:
            raise ServerFailure(f"{path} of {self.url}: a reply that is not JSON") from None


def _shown(content: bytes) -> str:
    return " ".join(content.decode("utf-8", "replace").split())[:SHOWN]


class ServerProcess:
    """One server, on a Unix socket in `folder`.

    The folder is this user's alone: who reaches the server may change its weights and, if it
    takes pickled handles, run code in it. The folder also holds the model and the copy of
    `worker.py`; the server's output is appended to `log`. `backend` is that of the weight transfer,
    `variables` are added to the server's environment.
    """

    def __init__(
        self,
        python: str,
        folder: Path,
        log: Path,
        options: Sequence[str],
        *,
        backend: str = "keel_file",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        shutil.copyfile(Path(__file__).with_name("worker.py"), folder / f"{WORKER}.py")
        address = folder.absolute() / SOCKET
        if len(os.fsencode(address)) > LONGEST_ADDRESS:
            raise KeelError(
                f"{address} is too long for the path of a socket ({LONGEST_ADDRESS} bytes): set "
                "the environment variable TMPDIR to a folder with a shorter path"
            )
        address.unlink(missing_ok=True)  # of a server that was killed
        self.url = f"unix:{address}"
        self.log = log
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(folder / "model")]
        command += ["--uds", str(address), "--served-model-name", MODEL]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--worker-extension-cls", f"{WORKER}.WorkerExtension"]
        command += ["--weight-transfer-config", json.dumps({"backend": backend})]
        command += ["--disable-uvicorn-access-log"]
        command += options
        around = DEFAULTS | passed(os.environ) | dict(variables or {})
        around |= {"PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1"}
        around |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            with log.open("ab") as output:
                self._child = Child(
                    command,
                    environment=around,
                    folder=folder,
                    stdout=output,
                    stderr=output,
                    kill=_terminate,
                )
        except OSError as error:
            raise KeelError(
                f"rollout.vllm.python = {python!r} does not start ({error.strerror}): name the "
                "Python of an environment that has vLLM (docs/howto/vllm.md)"
            ) from None
        self.process = self._child.process

    def wait(self, client: VllmClient, seconds: float) -> None:
        """Wait until the server answers. Raises KeelError if it ends or takes longer."""
        end = time.monotonic() + seconds
        while not client.healthy():
            heartbeat()
            raise_if_cancelled()
            if self._child.ended():
                raise KeelError(
                    f"the vLLM server ended with status {exit_status(self.process)} before it "
                    f"answered ({last_error(self.log)}): see {self.log}"
                )
            if time.monotonic() > end:
                raise KeelError(
                    f"the vLLM server does not answer within {seconds:g} s: see {self.log}, or "
                    "raise rollout.vllm.start_timeout"
                )
            time.sleep(0.2)

    def stop(self) -> None:
        """End the server with all its processes."""
        self._child.end()


def check_server(server: VllmServer, here: bool = True) -> None:
    """Raise KeelError if no server is named, or not in a way that can work.

    `here`: it will run on this machine, so that its Python has to exist.
    """
    if server.url is not None:
        check_address(server.url)
        return
    python = server.interpreter
    if python is None:
        raise KeelError(
            'rollout.engine = "vllm" needs a Python that has vLLM: set rollout.vllm.python or '
            "KEEL_VLLM_PYTHON, or give the address of a server in rollout.vllm.url"
        )
    if here and shutil.which(python) is None:
        key = "rollout.vllm.python" if server.python else "KEEL_VLLM_PYTHON"
        raise KeelError(
            f"{key} = {python!r} is not a program: name the Python of an environment that has vLLM "
            "(docs/howto/vllm.md)"
        )


def passed(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a server gets: what programs and GPUs need, and no secrets."""
    return {
        name: value
        for name, value in environment.items()
        if PASSED.fullmatch(name) and not SECRET.search(name)
    }


def last_error(log: Path) -> str:
    """The last line of a log that names an error."""
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    found = [line for line in lines if "Error" in line] or lines or ["no output"]
    return " ".join(found[-1].split())[-200:]


def _terminate(process: subprocess.Popen[bytes]) -> None:
    """Let the server end its own processes, and kill what is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    end = time.monotonic() + GRACE
    while not has_ended(process) and time.monotonic() < end:
        heartbeat()
        time.sleep(0.05)
    kill_group(process)
