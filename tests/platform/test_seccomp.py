from __future__ import annotations

import errno
import os
import signal
import struct

import pytest

from keel.platform.seccomp import (
    ARCHITECTURES,
    BUFFER_SIZES,
    CLONE,
    CLONE3,
    COMPUTING,
    DENIED,
    F_SETPIPE_SZ,
    FCNTL,
    OPEN,
    OPENAT,
    SETSOCKOPT,
    SOCKETS,
    X32,
    computing_filter,
    seccomp_filter,
)
from tests.platform.test_sandbox import python
from tests.shared import needs_bubblewrap

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = list(enumerate(ARCHITECTURES))
needs_filter = pytest.mark.skipif(
    os.uname().machine not in ARCHITECTURES, reason="there is no filter for this machine"
)


def verdict(program: bytes, number: int, architecture: int, *arguments: int) -> int:
    """What a classic BPF machine makes of a call: linux/filter.h, written out for what is used."""
    given = (*arguments, *(0,) * 6)[:6]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *given)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    held, at = 0, 0
    while True:
        what, then, otherwise, value = steps[at]
        at += 1
        if what == 0x06:
            return int(value)
        if what == 0x20:
            held = struct.unpack_from("<I", data, value)[0]
            continue
        holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[what]
        at += then if holds else otherwise


@pytest.mark.parametrize(("column", "machine"), MACHINES)
def test_what_is_refused_and_what_is_not(column: int, machine: str) -> None:
    program, own = seccomp_filter(machine), ARCHITECTURES[machine]
    assert program is not None
    refused = {numbers[column]: REFUSED for numbers in DENIED.values()}
    assert len(refused) == len(DENIED)
    sockets = {numbers[column]: REFUSED for numbers in SOCKETS.values()}  # of family 0
    expected = {**refused, **sockets, CLONE3: UNKNOWN}
    for number in range(600):
        assert verdict(program, number, own) == expected.get(number, ALLOWED), number
    for other in (*ARCHITECTURES.values(), 0x40000003, 0):
        if other != own:
            assert {verdict(program, number, other) for number in range(600)} == {KILLED}
    x32 = {verdict(program, X32 + number, own) for number in range(600)}
    assert x32 == ({REFUSED} if machine == "x86_64" else {ALLOWED})


@pytest.mark.parametrize(("column", "machine"), MACHINES)
def test_a_clone_that_makes_a_namespace(column: int, machine: str) -> None:
    program, own = seccomp_filter(machine), ARCHITECTURES[machine]
    assert program is not None
    # NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, of linux/sched.h.
    spaces = {0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000}
    for bit in range(32):
        expected = REFUSED if 1 << bit in spaces else ALLOWED
        assert verdict(program, CLONE[column], own, 1 << bit | 17) == expected, bit
    # What glibc's threads, forks and vforks ask for.
    for flags in (0x3D0F00, 0x1200011, 0x4111):
        assert verdict(program, CLONE[column], own, flags) == ALLOWED


@pytest.mark.parametrize(("column", "machine"), MACHINES)
def test_sockets_of_one_family_and_buffers_of_one_size(column: int, machine: str) -> None:
    program, own = seccomp_filter(machine), ARCHITECTURES[machine]
    assert program is not None
    for numbers in SOCKETS.values():
        for family in range(64):  # AF_VSOCK is 40, AF_ALG 38
            expected = ALLOWED if family == 1 else REFUSED
            assert verdict(program, numbers[column], own, family, 1) == expected, family
        assert verdict(program, numbers[column], own, 2**32 + 40, 1) == REFUSED
    for command in (1, 2, 3, 4, 1030, 1031, 1032):
        expected = REFUSED if command == F_SETPIPE_SZ else ALLOWED
        assert verdict(program, FCNTL[column], own, 3, command, 2**20) == expected
    for option in range(64):
        expected = REFUSED if option in BUFFER_SIZES else ALLOWED
        assert verdict(program, SETSOCKOPT[column], own, 3, 1, option) == expected


@pytest.mark.parametrize(("column", "machine"), MACHINES)
def test_what_only_computes_may_ask_for_little(column: int, machine: str) -> None:
    program, own = computing_filter(machine), ARCHITECTURES[machine]
    assert program is not None
    opening = {numbers[column]: at for numbers, at in ((OPENAT, 2), (OPEN, 1)) if numbers[column]}
    allowed = {n[column] for n in COMPUTING.values() if column == 0 or n[column]} | {*opening}
    for number in range(600):
        expected = ALLOWED if number in allowed else REFUSED
        assert verdict(program, number, own) == expected, number
    for number, at in opening.items():
        for bit in range(24):
            writes = 1 << bit in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_APPEND)
            flags = (*(0,) * at, 1 << bit)
            assert verdict(program, number, own, *flags) == (REFUSED if writes else ALLOWED), bit
    # Processes, threads, signals, sockets, other processes' memory.
    for name, each in {**DENIED, **SOCKETS, "clone": CLONE}.items():
        assert verdict(program, each[column], own, 1) == REFUSED, name
    assert verdict(program, 0, own ^ 1) == KILLED
    assert computing_filter("riscv64") is None


def test_machines_without_a_filter() -> None:
    assert seccomp_filter("riscv64") is None
    assert seccomp_filter("") is None
    assert seccomp_filter() == seccomp_filter(os.uname().machine)


ASK = """
import ctypes, errno, os, sys
def ask(*call):
    return os.strerror(ctypes.get_errno()) if C.syscall(*call) < 0 else "granted"
C = ctypes.CDLL(None, use_errno=True)
"""


@needs_bubblewrap
@needs_filter
def test_no_keyring_and_no_memory_outside_address_spaces() -> None:
    column = list(ARCHITECTURES).index(os.uname().machine)
    numbers = {name: each[column] for name, each in DENIED.items()}
    calls = {
        "shmget": "0, 2**20, 0o1600",
        "memfd_create": "b'x', 0",
        "unshare": f"{0x10000000 | 0x20000}",
        "mount": "b'x', b'/tmp', b'tmpfs', 0, None",
        "userfaultfd": "1",
        "setxattr": "b'/tmp', b'user.x', b'x' * 60000, 60000, 0",
        "lsetxattr": "b'/tmp', b'user.x', b'x', 1, 0",
        "fsetxattr": "0, b'user.x', b'x', 1, 0",
        "setxattrat": "-100, b'/tmp', 0, b'user.x', None, 0",
        "mq_open": "b'x', 0o102, 0o600, None",
        "vmsplice": "1, None, 0, 0",
        "inotify_init1": "0",
        "io_setup": "1, None",
        "io_uring_setup": "1, None",
        "keyctl": "0, -3, 0",
        "add_key": "b'user', b'x', b'x', 1, -3",
    }
    asked = "".join(f"print(ask({numbers[name]}, {given}))\n" for name, given in calls.items())
    asked += f"print(ask({CLONE[column]}, {0x10000000 | signal.SIGCHLD}, 0, 0, 0, 0))\n"
    *refused, unknown = python(f"{ASK}{asked}print(ask({CLONE3}, None, 0))").printed.splitlines()
    assert refused == ["Operation not permitted"] * (len(calls) + 1)
    assert unknown == "Function not implemented"


@needs_bubblewrap
def test_what_programs_do_all_day_still_works() -> None:
    code = (
        "import ctypes, multiprocessing, subprocess, sys, threading, numpy\n"
        "from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(2) as pool: print(sum(pool.map(abs, range(5))))\n"
        "fork = multiprocessing.get_context('fork')\n"
        "with ProcessPoolExecutor(1, fork) as pool: print(sum(pool.map(abs, range(4))))\n"
        "print(subprocess.run(['echo', 'x'], capture_output=True, text=True).stdout.strip())\n"
        "print(subprocess.run([sys.executable, '-c', '']).returncode)\n"
        "call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda n: n + 1)\n"
        "print(call(4), numpy.linalg.det(numpy.eye(3)))\n"
        "import asyncio\nasync def wait(): await asyncio.sleep(0); return 7\n"
        "print(asyncio.run(wait()))\n"
        "import multiprocessing.shared_memory as s\n"
        "m = s.SharedMemory(create=True, size=8); m.close(); m.unlink(); print('shared')\n"
    )
    ran = python(code, memory_mb=2048, processes=16)
    assert ran.printed == "10\n6\nx\n0\n5 1.0\n7\nshared\n", ran
