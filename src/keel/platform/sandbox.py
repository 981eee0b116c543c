"""A sandbox for untrusted code: bubblewrap's namespaces, and limits on everything.

No network, nothing of the host but the system's libraries and this interpreter, read-only; a small
private folder; an own process space that ends with its first process; none of the kernel's keyrings
and no namespaces of one's own. Linux 5.14 or later. The last two, and the bound on what all the
processes hold together, are the work of a filter of system calls, which there is for x86_64 and
aarch64; on other machines they do not hold.

The first process of the process space is ours (`inside.run_as_init`): it ends, and with it all
processes of the sandbox, when its lifeline closes, so also when this process is killed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import marshal
import math
import os
import secrets
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from keel.platform.process import Child, JsonChild, Lifeline, close_all, has_ended, output_of
from keel.platform.seccomp import computing_filter, seccomp_filter
from keel.types import KeelError

Status = Literal["ended", "timeout", "output", "died"]
"""How a run ended: by itself, out of its time, with too much to say, or by a signal."""

PASSED_ON = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DYNAMIC_UIDS = range(61184, 65520)
"""User ids that systemd keeps for temporary users: no one's files and no one's processes."""
MOST = 10**9
"""The largest limit."""
START_SECONDS = 120.0
"""A process that has not reported its start by then is given up; a busy machine takes a while."""
REPORT_BYTES = 1_000_000
RESIDENT_PROCESSES = 4
"""Itself, the first of the process space, and the process of one answer; one to spare."""
RESIDENT_DISK_MB = 16
"""Of its private folder, which libraries keep their caches in."""
LIBRARY = "/keel"
"""Where a resident process finds the modules that it is made of."""
HERE = Path(__file__).parent
COMMON = {
    # In place of the package's own, which is the front of what is not in the sandbox.
    "keel/__init__.py": HERE / "__init__.py",
    "keel/platform/__init__.py": HERE / "__init__.py",
    "keel/platform/confined.py": HERE / "confined.py",
    "keel/platform/inside.py": HERE / "inside.py",
}
"""Files of each resident process; it runs `keel.platform.confined.serve`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may take.

    `timeout` is in seconds of wall time, from the sandbox's start; processor time has the same
    limit, in each process. `memory_mb` is the address space of a process, so that all of them
    together can have `processes · memory_mb` (threads count as processes), `disk_mb` in each of the
    private folders, `/tmp` and `/dev/shm`, which lie in memory too, and at most about 15 MB a
    process in pipes and sockets. That nothing else holds memory is due to the filter of system
    calls; without one (see above), `memory_mb` bounds each process and not all together.
    The kernel's own 1 KB or so for each file is bounded by `timeout` alone.
    `output_kb` is what may be printed, `file_mb` the size of a file. Raises KeelError for what is
    no such limit.
    """

    timeout: float = 10.0
    memory_mb: int = 512
    processes: int = 8
    output_kb: int = 64
    file_mb: int = 16
    disk_mb: int = 64

    def __post_init__(self) -> None:
        least = {"timeout": 0.01, "memory_mb": 64, "processes": 1, "output_kb": 1}
        for name, floor in {**least, "file_mb": 1, "disk_mb": 1}.items():
            value = getattr(self, name)
            kind, what = (float, "a number") if name == "timeout" else (int, "a whole number")
            known = isinstance(value, int | kind) and not isinstance(value, bool)
            if not known or not floor <= value <= MOST:
                raise KeelError(f"{name} = {value!r}: give {what} from {floor:g} to {MOST:,}")

    def resources(self, processes: int | None) -> dict[str, int]:
        """The same as the kernel's limits of a process, by name."""
        limits = {
            "RLIMIT_CPU": math.ceil(self.timeout) + 1,
            "RLIMIT_AS": self.memory_mb * 2**20,
            "RLIMIT_FSIZE": self.file_mb * 2**20,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        if processes is not None:
            limits["RLIMIT_NPROC"] = processes
        return limits


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """A run: how it ended, its exit status, the end of what it printed, and what it reported.

    `reported` are the lines of the report that orders other than a command write.
    """

    status: Status
    exit_status: int
    printed: str
    reported: tuple[str, ...] = ()

    @property
    def cause(self) -> str:
        """How it ended, in a few words."""
        if self.status == "ended":
            return f"exit status {self.exit_status}"
        return {
            "timeout": "out of time",
            "output": "too much output",
            "died": f"killed by signal {abs(self.exit_status)}",
        }[self.status]


class Enclosure(contextlib.ExitStack):
    """What the start of a sandbox needs: bubblewrap's command, up to that of what runs inside.

    `uid` is the user that root's sandbox becomes, `ends` what the process is given. `files` are
    shown inside too, by their path there.
    """

    def __init__(self, program: str, disk_mb: int, files: Mapping[str, Path] | None = None) -> None:
        super().__init__()
        # The limit on processes does not bind root, nor a user namespace of root's. So root's
        # sandbox has no user namespace; its first process becomes a temporary user instead.
        self.uid = self.enter_context(_pick_uid()) if os.geteuid() == 0 else None
        self.ends: tuple[int, ...] = ()
        self.command = [program, *_isolation(self.uid, disk_mb, files or {})]
        calls = seccomp_filter()
        if calls is not None:
            reading, filling = os.pipe()
            os.write(filling, calls)  # far smaller than a pipe
            os.close(filling)
            self.ends = (reading,)
            self.command += ["--seccomp", str(reading)]
        self.command.append("--")


class Sandbox:
    """Runs commands, each in a sandbox of its own; from any thread, several at a time.

    With `trusted` there is no sandbox: a plain process group in a temporary folder, with the limits
    (but that on processes) and a time. Neither outlives this process. Raises KeelError if
    bubblewrap is missing or can make no sandbox here, and says how to fix that.
    """

    def __init__(self, limits: Limits | None = None, *, trusted: bool = False) -> None:
        self.limits = limits or Limits()
        self.trusted = trusted
        if trusted:
            return
        self._bubblewrap = bubblewrap()
        fork = "import os; os._exit(os.fork() and 0)" if self.limits.processes > 1 else ""
        trial = self.run([sys.executable, "-c", fork])
        if trial.exit_status != 0:
            message = trial.printed.strip().rpartition("\n")[2] or trial.cause
            raise KeelError(f"nothing runs in the sandbox under these limits: {message}")

    def run(self, argv: Sequence[str]) -> SandboxResult:
        """Run a command; its standard input is empty."""
        return self.carry_out({"argv": list(argv)})

    def carry_out(
        self,
        orders: Mapping[str, Any],
        *,
        ends: Sequence[int] = (),
        stop: threading.Event | None = None,
    ) -> SandboxResult:
        """Run what `keel.platform.inside` makes of the orders.

        They are its standard input, with four more: the file descriptors `report`, to which it
        reports, and `ends`; `started`, the first line of its report, which begins its time; and its
        limits. The `ends` are closed here. Once `stop` is set, the run is killed, and ends as if
        its time were up.
        """
        with contextlib.ExitStack() as held:
            started = secrets.token_hex(16)
            printed = held.enter_context(_memory_file())
            reading, report = os.pipe()
            held.callback(os.close, reading)
            own = {"report": report, "ends": tuple(ends), "started": started, "path": _path()}
            child = self._start(held, {**own, **orders}, printed, (report, *ends))
            return self._wait(child, reading, printed, f"{started}\n".encode(), stop)

    def _start(
        self,
        held: contextlib.ExitStack,
        orders: dict[str, Any],
        printed: IO[bytes],
        ends: tuple[int, ...],
    ) -> Child:
        """The process, with all that it needs in `held`."""
        command = [sys.executable, "-P", "-s", "-S", "-c", _inside()]
        lifeline, folder = Lifeline(), None
        held.callback(lifeline.cut)
        try:
            given = held.enter_context(_memory_file())
            if self.trusted:
                folder = held.enter_context(tempfile.TemporaryDirectory(prefix="keel-code-"))
                orders |= {"uid": None, "limits": self.limits.resources(None)}
            else:
                enclosure = held.enter_context(Enclosure(self._bubblewrap, self.limits.disk_mb))
                # In a user namespace the first process and its thread count too.
                processes = self.limits.processes + (2 if enclosure.uid is None else 0)
                orders |= {"uid": enclosure.uid, "limits": self.limits.resources(processes)}
                ends += enclosure.ends
                # Code without a user of its own (not root's) can hold the lifeline open.
                bwrap, *options = enclosure.command
                command = [bwrap, "--die-with-parent", *options, *command, "first"]
            given.write(marshal.dumps(orders))
            given.seek(0)
        except BaseException:
            close_all(ends)
            raise
        child = Child(
            [*command, str(lifeline.inner)],
            environment=environment(folder or "/tmp"),
            folder=folder,
            stdin=given,
            stdout=printed,
            stderr=printed,
            ends=ends,
            lifeline=lifeline,
            watching=not self.trusted,
        )
        held.callback(child.end)
        return child

    def _wait(
        self,
        child: Child,
        reading: int,
        printed: IO[bytes],
        started: bytes,
        stop: threading.Event | None,
    ) -> SandboxResult:
        """Wait for the end of a process, or kill all of it at a limit."""
        process, report, stands = child.process, b"", False
        status: Status = "ended"
        deadline = time.monotonic() + START_SECONDS
        os.set_blocking(reading, False)
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        while status == "ended":
            over = has_ended(process)
            more, closed = _drain(reading)
            report += more
            if not stands and report.startswith(started):
                stands, deadline = True, time.monotonic() + self.limits.timeout
            left = deadline - time.monotonic()
            stopped = stop is not None and stop.is_set()
            if os.fstat(printed.fileno()).st_size > self.limits.output_kb * 1024:
                status = "output"
            elif over:
                break
            elif left <= 0 or stopped or len(report) > REPORT_BYTES:
                status = "timeout"
            elif closed:
                time.sleep(min(left, 0.005))
            else:
                poll.poll(1000.0 * min(left, 0.1))
        child.end()
        code = process.returncode
        printed.seek(-min(printed.seek(0, os.SEEK_END), 8000), os.SEEK_END)
        words = printed.read().decode(errors="replace")[-2000:]
        if not stands and not (stop is not None and stop.is_set()):
            message = " ".join(words.split())[-200:] or f"exit status {code}"
            if self.trusted:
                raise KeelError(f"the code's process does not start: {message}")
            if status == "timeout":
                raise KeelError(f"no sandbox started within {START_SECONDS:.0f} s: {message}")
            raise no_sandbox(message, code)
        if status == "ended" and (code < 0 or code > 128):
            # What runs inside ends on 128 and the signal that ended the command.
            status, code = "died", code if code < 0 else 128 - code
            if code == -signal.SIGXCPU:
                status = "timeout"
        lines = report[len(started) :].decode(errors="replace").split("\n")[:-1]
        return SandboxResult(status, code, words, tuple(lines))


def _memory_file() -> IO[bytes]:
    """A file that no full disk limits, if the system has such."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("keel"), "w+b")
    return tempfile.TemporaryFile()


def _drain(pipe: int) -> tuple[bytes, bool]:
    """What is in a pipe now, up to a limit, and whether its other end is closed."""
    held = b""
    while len(held) <= REPORT_BYTES:
        try:
            some = os.read(pipe, 65536)
        except BlockingIOError:
            break
        if not some:
            return held, True
        held += some
    return held, False


class Resident(JsonChild):
    """`python -m module` in a sandbox, which answers JSON lines until it is ended.

    It has more than the code under test: memory, time, and a filter of system calls, with which it
    confines the processes that it forks for what a model wrote. `modules` are the files that it is
    made of, by name, `site` is a folder of packages that it may import. Raises KeelError if
    bubblewrap or a filter of system calls is missing.
    """

    def __init__(self, module: str, modules: Mapping[str, Path], site: Path) -> None:
        program, computing = bubblewrap(), computing_filter()
        if computing is None:
            raise KeelError(
                f"there is no filter of system calls for {os.uname().machine}, and what a model "
                "wrote is not evaluated without one: use an x86_64 or aarch64 machine"
            )
        files = {f"{LIBRARY}/{name}": path for name, path in {**COMMON, **modules}.items()}
        held = Enclosure(program, RESIDENT_DISK_MB, {**files, str(site): site})
        lifeline = Lifeline()
        super().__init__(
            [*held.command, sys.executable, "-P", "-s", "-m", module, str(lifeline.inner)],
            environment={**environment("/tmp"), "PYTHONPATH": f"{LIBRARY}:{site}"},
            ends=held.ends,
            held=held,
            lifeline=lifeline,
            watching=True,
        )
        settings = {"uid": held.uid, "processes": RESIDENT_PROCESSES, "filter": computing.hex()}
        self._send(settings)

    def _not_started(self, cause: str) -> KeelError:
        if cause.startswith("bwrap"):
            return no_sandbox(cause, self.process.returncode)
        return KeelError(f"a process in the sandbox does not start ({cause})")


def _isolation(uid: int | None, disk_mb: int, files: Mapping[str, Path]) -> list[str]:
    """bubblewrap's options."""
    # The process space's first process is ours: bubblewrap leaves its own to the host's init
    # to reap, and if that is not an init (in containers), they would pile up.
    options = ["--as-pid-1", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    options += ["--unshare-cgroup-try", "--hostname", "sandbox", "--new-session"]
    if uid is not None:
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    # These come first: an interpreter may lie in a folder under /tmp.
    options += ["--proc", "/proc", "--dev", "/dev"]
    size = str(disk_mb * 2**20)
    for folder in ("/tmp", "/dev/shm"):
        options += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    made = {Path("/tmp"), Path("/dev")}
    for path in _shown():
        for parent in reversed(path.parents):
            if parent not in made and parent != parent.parent:
                options += ["--perms", "0755", "--dir", str(parent)]
                made.add(parent)
        if path.is_symlink():
            options += ["--symlink", os.readlink(path), str(path)]
        else:
            options += ["--ro-bind", str(path), str(path)]
        made.add(path)
    for inside, path in files.items():
        options += ["--ro-bind", str(path), inside]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


def bubblewrap() -> str:
    """The path of bubblewrap. Raises KeelError if there is none."""
    if not sys.platform.startswith("linux"):
        raise KeelError("the sandbox needs Linux: use a Linux machine, or WSL2 on Windows")
    found = shutil.which("bwrap")
    if found is None:
        raise KeelError(
            "bubblewrap is not installed, and what a model wrote is run in its sandbox only: "
            "install the package bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
        )
    return found


def no_sandbox(message: str, exit_status: int) -> KeelError:
    """Why bubblewrap made no sandbox, from its message and exit status."""
    if _signal(exit_status):
        return KeelError(
            f"bubblewrap was killed by signal {_signal(exit_status)} before the sandbox started: "
            "see whether this machine is out of memory, and start again"
        )
    if "execvp" in message:
        shown = ", ".join(map(str, _shown()))
        return KeelError(
            f"the interpreter {sys.executable} cannot be started in the sandbox ({message}), "
            f"which shows {shown} and nothing else of this system: use a Python that needs "
            "no other folder"
        )
    return KeelError(
        f"bubblewrap cannot make a sandbox here ({message}): allow user namespaces (see the "
        "sysctls user.max_user_namespaces, kernel.unprivileged_userns_clone and "
        "kernel.apparmor_restrict_unprivileged_userns), or use a machine that allows them"
    )


def _signal(exit_status: int) -> int:
    """The signal that an exit status tells of, bubblewrap's word for one inside too; else 0."""
    return -exit_status if exit_status < 0 else max(exit_status - 128, 0)


def _shown() -> list[Path]:
    """What of the host is seen inside: folders and files, and the links that lead to them.

    The system's folders; this interpreter's, if those do not hold them (a venv's, and its
    base's); and each link on the way from the names by which Python knows them.
    """
    prefixes = (sys.base_prefix, sys.base_exec_prefix, sys.prefix, sys.exec_prefix)
    names = [Path(name).absolute() for name in (*prefixes, sys.executable)]
    shown = [path for path in map(Path, PASSED_ON) if path.exists() or path.is_symlink()]
    for path in (name.resolve() for name in names):
        if not any(path.is_relative_to(one) for one in shown):
            shown.append(path)
    for link in (link for name in names for link in _links(name)):
        # In a folder that is shown, the link is there already.
        if not any(link.is_relative_to(one) for one in shown):
            shown.append(link)
    return shown


def _links(path: Path) -> Iterator[Path]:
    """The symbolic links on the way to what a path names, each by a path without any."""
    at, left, followed = Path("/"), list(path.parts[1:]), 0
    while left:
        step = left.pop(0)
        at = at.parent if step == ".." else at / step
        if at.is_symlink() and followed < 40:  # as many as the kernel follows
            yield at
            followed += 1
            target = Path(os.readlink(at))
            at = Path("/") if target.is_absolute() else at.parent
            left = [*(part for part in target.parts if part != "/"), *left]


@contextlib.contextmanager
def _pick_uid() -> Iterator[int]:
    """A user id of no one's, for one run: processes of one user share the limit on their number.

    It is held by an address that only one process of the system can have, as long as it is open.
    """
    start, count = secrets.randbelow(len(DYNAMIC_UIDS)), len(DYNAMIC_UIDS)
    for step in range(count):
        uid = DYNAMIC_UIDS[(start + step) % count]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
            try:
                held.bind(f"\0keel-uid-{uid}")
            except OSError:
                continue
            yield uid
            return
    raise KeelError(f"{count} sandboxes run here at once, as many as there are users for them")


def environment(home: str) -> dict[str, str]:
    """Nothing of the environment of this process; hashes, and so sets, in the same order always."""
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    python = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    places = {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
    return {**places, **python, **one}


@cache
def _inside() -> str:
    """`inside.py` for `python -c`, with `boundary.py`, compiled once and not at each start."""
    paths = (HERE / "inside.py", HERE / "boundary.py")
    codes = [
        compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)
        for path in paths
    ]
    text = base64.b64encode(marshal.dumps(codes)).decode()
    load = f"inside, BOUNDARY = marshal.loads(binascii.a2b_base64({text!r}))"
    return f"import binascii, marshal\n{load}\nexec(inside)"


@cache
def _path() -> dict[str, Any]:
    """What the module `site` makes of `sys` here, so that no sandbox needs to work it out."""
    names = ("path", "prefix", "exec_prefix")
    ask = f"import json, sys; print(json.dumps({{n: getattr(sys, n) for n in {names}}}))"
    command = [sys.executable, "-P", "-s", "-c", ask]
    found: dict[str, Any] = json.loads(output_of(command, START_SECONDS, environment("/tmp")))
    return found
