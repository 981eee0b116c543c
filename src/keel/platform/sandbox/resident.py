"""A process that lives in the sandbox and answers JSON lines, until it is ended.

Its limits are those of `bubblewrap`. It has more than the code under test: memory, time, and a
filter of system calls, with which it confines the processes that it forks for what a model wrote.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from keel.platform.process import JsonChild
from keel.platform.sandbox.bubblewrap import (
    bubblewrap,
    environment,
    isolation_arguments,
    no_sandbox,
    pick_uid,
)
from keel.platform.sandbox.seccomp import computing_filter, seccomp_filter
from keel.platform.sandbox.subprocesses import Enclosure
from keel.types import KeelError

PROCESSES = 4
"""Itself, the first of the process space, and the process of one answer; one to spare."""
DISK_MB = 16
"""Of its private folder, which libraries keep their caches in."""
LIBRARY = "/keel"
"""Where the process finds the modules that it is made of."""
HERE = Path(__file__).parent
COMMON = {
    # In place of the package's own, which is the front of what is not in the sandbox.
    "keel/__init__.py": HERE / "__init__.py",
    "keel/platform/__init__.py": HERE / "__init__.py",
    "keel/platform/sandbox/__init__.py": HERE / "__init__.py",
    "keel/platform/sandbox/confined.py": HERE / "confined.py",
    "keel/platform/sandbox/inside.py": HERE / "inside.py",
}
"""Files of each such process; it runs `keel.platform.sandbox.confined.serve`."""


class Resident(JsonChild):
    """`python -m module`, in a sandbox; `modules` are the files that it is made of, by name.

    `site` is a folder of packages that it may import. Raises KeelError if bubblewrap or a filter of
    system calls is missing.
    """

    def __init__(self, module: str, modules: Mapping[str, Path], site: Path) -> None:
        outer, inner = seccomp_filter(), computing_filter()
        command = bubblewrap()
        if inner is None:
            raise KeelError(
                f"there is no filter of system calls for {os.uname().machine}, and what a model "
                "wrote is not evaluated without one: use an x86_64 or aarch64 machine"
            )
        held = contextlib.ExitStack()
        uid = held.enter_context(pick_uid()) if os.geteuid() == 0 else None
        files = {f"{LIBRARY}/{name}": path for name, path in {**COMMON, **modules}.items()}
        enclosure = held.enter_context(contextlib.closing(Enclosure(outer)))
        options = isolation_arguments(uid, enclosure, DISK_MB, {**files, str(site): site})
        super().__init__(
            [command, *options, sys.executable, "-P", "-s", "-m", module],
            environment={**environment("/tmp"), "PYTHONPATH": f"{LIBRARY}:{site}"},
            ends=enclosure.ends,
            held=held,
            kill=enclosure.kill,
        )
        self._send({"uid": uid, "processes": PROCESSES, "filter": inner.hex()})

    def _not_started(self, cause: str) -> KeelError:
        if cause.startswith("bwrap"):
            return no_sandbox(cause, self.process.returncode)
        return KeelError(f"a process in the sandbox does not start ({cause})")
