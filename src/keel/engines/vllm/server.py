"""A vLLM server as a child process: started, watched, and ended with this process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from keel.engines.vllm.client import VllmClient
from keel.runs.watchdog import heartbeat, raise_if_cancelled
from keel.sandbox.lifeline import Lifeline
from keel.types import KeelError

WORKER = "keel_vllm_worker"
"""Name of the copy of `worker.py` that the server imports."""
MODEL = "policy"
"""Name of the model on a server that Keel starts."""
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
    """One server on a free port of the loopback interface.

    `folder` holds the model and the copy of `worker.py`; the server's output is appended to `log`.
    `backend` is that of the weight transfer, `variables` are added to the server's environment.
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
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(folder / "model")]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--worker-extension-cls", f"{WORKER}.WorkerExtension"]
        command += ["--weight-transfer-config", json.dumps({"backend": backend})]
        command += ["--disable-uvicorn-access-log"]
        command += options
        around = DEFAULTS | passed(os.environ) | dict(variables or {})
        around |= {"PYTHONPATH": str(folder), "VLLM_SERVER_DEV_MODE": "1"}
        around |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        lifeline = Lifeline()
        try:
            with log.open("ab") as output:
                self.process = subprocess.Popen(
                    command,
                    env=around,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[lifeline.inner],
                )
        except OSError as error:
            lifeline.give()
            lifeline.cut()
            raise KeelError(
                f"rollout.vllm.python = {python!r} does not start ({error.strerror}): name the "
                "Python of an environment that has vLLM (docs/howto/vllm.md)"
            ) from None
        lifeline.tie(self.process.pid)
        lifeline.give()
        self._stop = weakref.finalize(self, _end, self.process, lifeline)

    def wait(self, client: VllmClient, seconds: float) -> None:
        """Wait until the server answers. Raises KeelError where it ends or takes longer."""
        end = time.monotonic() + seconds
        while not client.healthy():
            heartbeat()
            raise_if_cancelled()
            if not self.alive():
                raise KeelError(
                    f"the vLLM server ended with status {self.process.returncode} before it "
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
        return self.process.poll() is None

    def stop(self) -> None:
        """End the server with all its processes."""
        self._stop()


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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes], lifeline: Lifeline) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    lifeline.cut()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
