from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from keel.platform.sandbox import DYNAMIC_UIDS, Limits, Sandbox, SandboxResult, _pick_uid
from keel.types import KeelError
from tests.platform.processes import children, eventually, processes_with, resident_mb, run_python
from tests.shared import needs_bubblewrap
from tests.source_tree import ROOT

LONG = 300.0
"""Seconds that no test waits for."""


def python(code: str, sandbox: Sandbox | None = None, **limits: float) -> SandboxResult:
    """What Python makes of code inside."""
    sandbox = sandbox or Sandbox(Limits(**{"timeout": LONG, **limits}))  # type: ignore[arg-type]
    return sandbox.run([sys.executable, "-c", code])


def last(ran: SandboxResult) -> str:
    return ran.printed.strip().rpartition("\n")[2]


@needs_bubblewrap
def test_a_command_runs_and_its_word_is_kept() -> None:
    ran = python("import sys, numpy; print(1 + 1, flush=True); sys.stderr.write('e'); sys.exit(3)")
    assert ran == SandboxResult("ended", 3, "2\ne")
    assert ran.cause == "exit status 3"
    assert python("import sys; print(repr(sys.stdin.read()))").printed == "''\n"


@needs_bubblewrap
def test_what_is_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "sesame")
    code = (
        "import os; print(os.getcwd(), os.listdir('.'), os.path.exists('/etc/passwd'))\n"
        "print(os.environ.get('SECRET_TOKEN'), os.getuid() not in (0, %d))\n"
        "print(len([p for p in os.listdir('/proc') if p.isdigit()]), sorted(os.listdir('/')))\n"
        "print(hash('a'))"
    )
    lines = python(code % os.getuid()).printed.splitlines()
    # The folders on the way to this interpreter are there, wherever that lies.
    way = [Path(prefix).resolve().parts[1:3] for prefix in (sys.prefix, sys.base_prefix)]
    assert lines[:2] == [f"/tmp {[p[1] for p in way if p[0] == 'tmp'][:1]} False", "None True"]
    count, _, root = lines[2].partition(" ")
    assert count == "2"  # the process space's first, and the command
    hidden = {"home", "var", "sys", "run"} - {p[0] for p in way}
    assert not hidden & {name.strip("'") for name in root.strip("[]").split(", ")}
    assert python("print(hash('a'))").printed.strip() == lines[3]


@needs_bubblewrap
def test_nothing_of_the_host_can_be_written() -> None:
    name = f"keel-was-here-{uuid.uuid4().hex}"
    folders = (Path.home(), Path.cwd(), Path(sys.prefix), Path("/usr"), Path("/dev"), Path("/"))
    for folder in folders:
        ran = python(f"open({str(folder / name)!r}, 'w')")
        assert ran.exit_status == 1
        assert "OSError" in last(ran) or "NotFoundError" in last(ran) or "Permission" in last(ran)
        assert not (folder / name).exists()
    # Root's sandbox could not write there anyway, being another user; anyone else's could.
    mounts = [
        line.split() for line in python("print(open('/proc/mounts').read())").printed.split("\n")
    ]
    options = {mount[1]: mount[3].split(",")[0] for mount in mounts if mount}
    assert [options.pop(path) for path in ("/tmp", "/dev/shm", "/proc")] == ["rw"] * 3
    own = {path: how for path, how in options.items() if not path.startswith("/dev/")}
    assert {"/", "/dev", "/usr"} <= own.keys()
    assert set(own.values()) == {"ro"}
    ran = python(f"open('/tmp/{name}', 'w').write('x'); print(open('/tmp/{name}').read())")
    assert ran.printed == "x\n"
    assert not Path("/tmp", name).exists()


@needs_bubblewrap
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        run_python(code)
        assert last(python(code)).startswith("PermissionError")
    # Nor is there one after the filter of system calls, if there is a filter.
    code = "print(open('/proc/net/dev').read().count(':'))"
    assert python(code).printed == "1\n"  # the sandbox's own loopback


@needs_bubblewrap
def test_processor_time_is_limited_too() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU))"
    assert python(code, timeout=7.5).printed == "(9, 9)\n"


@needs_bubblewrap
def test_a_large_allocation() -> None:
    before = resident_mb()
    assert last(python("bytearray(10**10)")) == "MemoryError"
    assert last(python("bytearray(200 * 10**6)", memory_mb=128)) == "MemoryError"
    assert python("bytearray(200 * 10**6)", memory_mb=512).exit_status == 0
    assert resident_mb() - before < 50


@needs_bubblewrap
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_large_print_is_cut_off(stream: str) -> None:
    before = resident_mb()
    code = f"import sys\nfor _ in range(10**6): sys.{stream}.write('x' * 1000)"
    ran = python(code, output_kb=16)
    assert (ran.status, ran.cause) == ("output", "too much output")
    assert len(ran.printed) == 2000
    assert resident_mb() - before < 50
    exactly = f"sys.{stream}.write('x' * 16 * 1024"
    assert python(f"import sys; {exactly})", output_kb=16).status == "ended"
    assert python(f"import sys; {exactly} + 'y')", output_kb=16).status == "output"


@needs_bubblewrap
def test_files_are_small_and_few() -> None:
    assert "File too large" in last(python("open('x', 'wb').write(bytes(17 * 2**20))"))
    fill = "for n in range(40): open(f'{}{n}', 'wb').write(bytes(4 * 2**20))"
    for folder in ("/tmp/", "/dev/shm/"):
        assert "No space left" in last(python(fill.replace("{}", folder, 1)))


@needs_bubblewrap
def test_processes_are_few_and_end_with_the_first() -> None:
    mark = uuid.uuid4().hex
    count = (
        f"import os, time  # {mark}\n"
        "made = 0\n"
        "try:\n"
        "    while made < 100:\n"
        "        if os.fork() == 0: time.sleep(600)\n"
        "        made += 1\n"
        "except BlockingIOError: print(made)"
    )
    # The command itself is one of those that may be.
    assert python(count, processes=5).printed == "4\n"
    assert python(count, processes=1).printed == "0\n"
    assert eventually(lambda: not processes_with(mark))


@needs_bubblewrap
def test_a_fork_bomb() -> None:
    bomb = "import os\nwhile True:\n  try: os.fork() or os.setsid()\n  except OSError: pass"
    mark = uuid.uuid4().hex
    # Another test's thread may end meanwhile, so only new ones count.
    processes, threads = children(), set(threading.enumerate())
    ran = python(f"{bomb}  # {mark}", timeout=1.0)
    assert ran.status == "timeout" or "BlockingIOError" in ran.printed
    assert children() <= processes
    assert set(threading.enumerate()) <= threads
    assert eventually(lambda: not processes_with(mark))


@needs_bubblewrap
def test_an_interpreter_behind_links(tmp_path: Path) -> None:
    """Links to a virtual environment, and to what is in its way, relative ones too."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "venv").symlink_to(sys.prefix)
    (tmp_path / "a" / "b" / "once").symlink_to("../venv")
    (tmp_path / "twice").symlink_to("a/b")
    code = (
        "import sys\n"
        "from keel.platform.sandbox import Sandbox\n"
        "print(Sandbox().run([sys.executable, '-c', 'import sys, numpy; print(sys.executable)']))"
    )
    for name in ("a/venv", "a/b/once", "twice/once"):
        interpreter = f"{tmp_path}/{name}/bin/{Path(sys.executable).name}"
        done = subprocess.run(
            [interpreter, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert f"'{interpreter}\\n'" in done.stdout


@needs_bubblewrap
def test_a_run_can_be_stopped() -> None:
    mark, stop = uuid.uuid4().hex, threading.Event()
    sandbox = Sandbox(Limits(timeout=LONG))
    ran: list[SandboxResult] = []
    orders = {"argv": [sys.executable, "-c", f"while True: pass  # {mark}"]}
    run = threading.Thread(target=lambda: ran.append(sandbox.carry_out(orders, stop=stop)))
    run.start()
    assert eventually(lambda: len(processes_with(mark)) == 1)
    stop.set()
    run.join(60.0)
    assert [one.status for one in ran] == ["timeout"]
    assert eventually(lambda: not processes_with(mark))


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandbox has a passing user")
def test_no_two_runs_share_a_user() -> None:
    code = "import os, time; print(os.getuid(), flush=True); time.sleep(0.5)"
    parent = (
        "import os, sys, threading\n"
        "from keel.platform.sandbox import Sandbox\n"
        "sandbox, seen = Sandbox(), []\n"
        "child = os.fork()\n"
        f"run = lambda: seen.append(sandbox.run([sys.executable, '-c', {code!r}]).printed)\n"
        "threads = [threading.Thread(target=run) for _ in range(3)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(''.join(seen), end='', flush=True)\n"
        "if child: os.wait()\n"
    )
    seen = run_python(parent).stdout.split()
    assert len(set(seen)) == len(seen) == 6
    with contextlib.ExitStack() as held:
        uids = [held.enter_context(_pick_uid()) for _ in range(200)]
    assert len(set(uids)) == 200
    assert set(uids) <= set(DYNAMIC_UIDS)


@needs_bubblewrap
def test_it_dies_by_signals_and_cannot_end_the_first() -> None:
    ran = python("import ctypes; ctypes.string_at(0)")
    assert (ran.status, ran.exit_status, ran.cause) == ("died", -11, "killed by signal 11")
    ran = python("import os; os.kill(os.getpid(), 9)")
    assert (ran.status, ran.cause) == ("died", "killed by signal 9")
    ran = python("import os\ntry: os.kill(1, 9)\nexcept OSError: pass\nprint('on')")
    assert ran.printed == "on\n"


@needs_bubblewrap
def test_no_zombie_is_left_for_init() -> None:
    """No process is left for the host's init, which in a container may reap none."""
    code = (
        "import ctypes, sys\n"
        "from keel.platform.sandbox import Limits, Sandbox\n"
        "from tests.platform.processes import children\n"
        "ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # orphans come to this process\n"
        "for limits, inside in ((Limits(), ''), (Limits(timeout=0.5), 'while True: pass')):\n"
        "    Sandbox(limits).run([sys.executable, '-c', inside])\n"
        "    print(children())\n"
    )
    assert run_python(code).stdout == "set()\n" * 2


def test_without_bubblewrap_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KeelError, match=r"apt install bubblewrap") as raised:
        Sandbox()
    assert "\n" not in str(raised.value)
    assert "trusted" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        # In a container that forbids namespaces.
        ("bwrap: No permissions to create a new namespace", r"cannot make a sandbox here \({}\)"),
        # If an interpreter needs what is not shown; user namespaces would not help.
        ("bwrap: execvp /x: No such file", r"the interpreter .* cannot be started .*/usr"),
    ],
)
def test_refuses_with_bubblewraps_message_if_it_fails(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "bwrap"
    stand_in.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KeelError, match=says.format(words)) as raised:
        Sandbox()
    assert "trusted" not in str(raised.value)
    assert "--privileged" not in str(raised.value)
    assert "execvp" not in words or "namespaces" not in str(raised.value)


@needs_bubblewrap
def test_limits_under_which_nothing_runs_are_refused() -> None:
    for limits in (
        {"memory_mb": 1},
        {"timeout": 0},
        {"timeout": math.inf},
        {"timeout": math.nan},
        {"timeout": "5"},
        {"timeout": True},
        {"memory_mb": 512.5},
        {"memory_mb": 10**18},
    ):
        ((name, value),) = limits.items()
        kind = "a number from 0.01" if name == "timeout" else "a whole number from 64"
        with pytest.raises(KeelError, match=f"^{name} = {value!r}: give {kind} to 1,000,000,000$"):
            Limits(**limits)  # type: ignore[arg-type]
    assert Limits(timeout=5).resources(3)["RLIMIT_CPU"] == 6


def test_trusted_code_runs_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("SECRET_TOKEN", "sesame")
    mark = uuid.uuid4().hex
    sandbox = Sandbox(Limits(timeout=LONG), trusted=True)
    code = "import os; print(os.environ.get('SECRET_TOKEN'), os.listdir('.')); print(os.getcwd())"
    words, folder = python(code, sandbox).printed.splitlines()
    assert words == "None []"
    assert not Path(folder).exists()
    assert last(python("bytearray(10**10)", sandbox)) == "MemoryError"
    quick = Sandbox(Limits(timeout=0.5), trusted=True)
    loop = f"import os\nos.fork()\nwhile True: pass  # {mark}"
    assert python(loop, quick).status == "timeout"
    assert eventually(lambda: not processes_with(mark))
    leave = f"import os, time\nif os.fork() == 0: time.sleep(600)  # {mark}\nprint('end')"
    assert python(leave, sandbox).printed.startswith("end")
    assert eventually(lambda: not processes_with(mark))
    # One that does not hold the lifeline is ended with the group.
    sleep = [sys.executable, "-c", f"import time; time.sleep(600)  # {mark}"]
    assert python(f"import subprocess; subprocess.Popen({sleep})", sandbox).status == "ended"
    assert eventually(lambda: not processes_with(mark))
    ran = python("import os; os.kill(os.getpid(), 9)", sandbox)
    assert (ran.status, ran.exit_status) == ("died", -9)


@needs_bubblewrap
def test_code_that_holds_the_lifeline_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless Keel runs as root, the code has the user of the sandbox's first process."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    mark = uuid.uuid4().hex
    hold = (
        "import contextlib, os, time\nheld = []\nfor name in os.listdir('/proc/1/fd'):\n"
        "    with contextlib.suppress(OSError):\n"
        f"        held.append(os.open('/proc/1/fd/' + name, os.O_WRONLY))  # {mark}\n"
        "print(len(held), flush=True)\ntime.sleep(600)"
    )
    ran = python(hold, Sandbox(Limits(timeout=1.0)))
    assert ran.status == "timeout"
    assert int(ran.printed.split()[0]) > 0
    assert eventually(lambda: not processes_with(mark), 20.0)
