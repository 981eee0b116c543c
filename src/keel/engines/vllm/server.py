"""A vLLM server as a child process: started, watched, and ended with this process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from keel.config.sampling import VllmServer
from keel.engines.vllm.client import VllmClient, check_address
from keel.platform.process import Child, exit_status, has_ended, kill_group
from keel.platform.time_limit import heartbeat, raise_if_cancelled
from keel.types import KeelError

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
            if not self.alive():
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

    def alive(self) -> bool:
        """Whether the process runs."""
        return not self._child.ended()

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
