"""A sandbox for untrusted code: bubblewrap's namespaces, and limits on everything.

No network, nothing of the host but the system's libraries and this interpreter, read-only; a small
private folder; an own process space that ends with its first process; none of the kernel's keyrings
and no namespaces of one's own. Linux 5.14 or later. The last two, and the bound on what all the
processes hold together, are the work of a filter of system calls, which there is for x86_64 and
aarch64; on other machines they do not hold.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from keel.platform.process import close_all
from keel.platform.sandbox.seccomp import seccomp_filter
from keel.platform.sandbox.subprocesses import START_SECONDS, Enclosure, Watched, watch
from keel.types import KeelError

Status = Literal["ended", "timeout", "output", "died"]
"""How a run ended: by itself, out of its time, with too much to say, or by a signal."""

PASSED_ON = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
ATTEMPTS = 3
"""How often a sandbox is started that something outside kills before it stands."""
DYNAMIC_UIDS = range(61184, 65520)
"""User ids that systemd keeps for passing users: no one's files and no one's processes."""
MOST = 10**9
"""No limit may be larger: not what a machine has, but what the kernel's own numbers hold."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may take.

    `timeout` is in seconds of wall time, from when the sandbox stands; processor time has the same
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
            if not isinstance(value, int | kind) or isinstance(value, bool):
                raise KeelError(f"{name} = {value!r} is not {what}: give at least {floor:g}")
            if not value >= floor:
                raise KeelError(f"{name} = {value:g}: give at least {floor:g}")
            if value > MOST:
                raise KeelError(f"{name} = {value:g}: give at most {MOST:,}")

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
    stdout: str
    stderr: str
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


class Sandbox:
    """Runs commands, each in a sandbox of its own; from any thread, several at a time.

    With `trusted` there is no sandbox: a plain process group in a passing folder, with the limits
    (but that on processes) and a time. Neither outlives this process. Raises KeelError if
    bubblewrap is missing or can make no sandbox here, and says how to fix that.
    """

    def __init__(self, limits: Limits | None = None, *, trusted: bool = False) -> None:
        self.limits = limits or Limits()
        self.trusted = trusted
        self._filter = None if trusted else seccomp_filter()
        if trusted:
            return
        self._bubblewrap = bubblewrap()
        fork = "import os; os._exit(os.fork() and 0)" if self.limits.processes > 1 else ""
        trial = self.run([sys.executable, "-c", fork])
        if trial.exit_status != 0:
            message = trial.stderr.strip().rpartition("\n")[2] or trial.cause
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
        """Run what `keel.platform.sandbox.inside` makes of the orders.

        `ends` are file descriptors that what runs is given, and that are closed here. Once `stop`
        is set, the run is killed, and ends as if its time were up. A bubblewrap that something
        outside kills before the sandbox stands is tried again, unless it took `ends` with it.
        """
        for _ in range(1 if ends else ATTEMPTS):
            watched = self._watched(orders, ends, stop)
            if stop is not None and stop.is_set() and not watched.started:
                return SandboxResult("timeout", watched.exit_status, "", "")
            killed = watched.ended == "ended" and _signal(watched.exit_status)
            if watched.started or self.trusted or not killed:
                break
        return self._read(watched)

    def _watched(
        self, orders: Mapping[str, Any], ends: Sequence[int], stop: threading.Event | None
    ) -> Watched:
        command = [sys.executable, "-P", "-s", "-S", "-c", _inside()]
        given = {**orders, "ends": tuple(ends), "path": _path(), "uid": None}
        folder, kill = None, None
        with contextlib.ExitStack() as held:
            try:
                if self.trusted:
                    folder = held.enter_context(tempfile.TemporaryDirectory(prefix="keel-code-"))
                    given["limits"] = self.limits.resources(None)
                else:
                    if os.geteuid() == 0:
                        given["uid"] = held.enter_context(pick_uid())
                    # In a user namespace the first process counts too.
                    processes = self.limits.processes + (given["uid"] is None)
                    given |= {"limits": self.limits.resources(processes), "lifeline": -1}
                    enclosure = held.enter_context(contextlib.closing(Enclosure(self._filter)))
                    kill, own = enclosure.kill, ["--die-with-parent", "--new-session"]
                    own += isolation_arguments(given["uid"], enclosure, self.limits.disk_mb)
                    command = [self._bubblewrap, *own, *command, "first"]
                    ends = (*ends, *enclosure.ends)
            except BaseException:
                close_all(ends)
                raise
            return watch(
                command,
                given,
                timeout=self.limits.timeout,
                output=self.limits.output_kb * 1024,
                environment=environment(folder or "/tmp"),
                folder=folder,
                ends=ends,
                stop=stop,
                kill=kill,
            )

    def _read(self, watched: Watched) -> SandboxResult:
        words = watched.stderr.decode(errors="replace")
        if not watched.started:
            message = " ".join(words.split())[-200:] or f"exit status {watched.exit_status}"
            if self.trusted:
                raise KeelError(f"the code's process does not start: {message}")
            if watched.ended == "timeout":
                raise KeelError(f"no sandbox stood within {START_SECONDS:.0f} s: {message}")
            raise no_sandbox(message, watched.exit_status)
        status: Status = watched.ended
        code = watched.exit_status
        if status == "ended" and (code < 0 or code > 128):
            # What runs inside ends on 128 and the signal that ended the command.
            status, code = "died", code if code < 0 else 128 - code
            if code == -signal.SIGXCPU:
                status = "timeout"
        return SandboxResult(
            status,
            code,
            watched.stdout.decode(errors="replace")[-2000:],
            words[-2000:],
            tuple(watched.report.decode(errors="replace").split("\n")[:-1]),
        )


def isolation_arguments(
    uid: int | None, enclosure: Enclosure, disk_mb: int, files: Mapping[str, Path] | None = None
) -> list[str]:
    """bubblewrap's options, up to the command; `files` are shown too, by their path inside.

    `uid` is the user that root's sandbox becomes.
    """
    # The process space's first process is ours: bubblewrap leaves its own to the host's init
    # to reap, and if that is not an init (in containers), they would pile up.
    options = ["--as-pid-1", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    options += ["--unshare-cgroup-try", "--hostname", "sandbox", "--info-fd", str(enclosure.info)]
    if enclosure.filter >= 0:
        options += ["--seccomp", str(enclosure.filter)]
    if uid is not None:
        # The limit on processes does not bind root, nor a user namespace of root's. So root's
        # sandbox has no user namespace; its first process becomes a passing user instead.
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
    for inside, path in (files or {}).items():
        options += ["--ro-bind", str(path), inside]
    return [*options, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


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
            f"bubblewrap was killed by signal {_signal(exit_status)} before the sandbox stood, "
            f"{ATTEMPTS} times: see whether this machine is out of memory, and start again"
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

    The system's folders; this interpreter's, where those do not hold them (a venv's, and its
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
def pick_uid() -> Iterator[int]:
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
    """`inside.py` for `python -c`, compiled: each sandbox would compile it at its start."""
    path = Path(__file__).with_name("inside.py")
    code = compile(path.read_text(encoding="utf-8"), path.name, "exec", dont_inherit=True)
    return f"import marshal;exec(marshal.loads(bytes.fromhex({marshal.dumps(code).hex()!r})))"


@cache
def _path() -> dict[str, Any]:
    """What the module `site` makes of `sys` here, so that no sandbox needs to work it out."""
    names = ("path", "prefix", "exec_prefix")
    ask = f"import marshal, sys; print(marshal.dumps([getattr(sys, n) for n in {names}]).hex())"
    printed = subprocess.run(
        [sys.executable, "-P", "-s", "-c", ask],
        env=environment("/tmp"),
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return dict(zip(names, marshal.loads(bytes.fromhex(printed)), strict=True))
