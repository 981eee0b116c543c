from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import uuid

import pytest

from keel.verify.seccomp import ARCHITECTURES, CLONE, CLONE3, DENIED, X32, seccomp_filter
from tests.verify.processes import needs_bubblewrap
from tests.verify.test_sandbox import python

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
MACHINES = list(enumerate(ARCHITECTURES))
needs_filter = pytest.mark.skipif(
    os.uname().machine not in ARCHITECTURES, reason="there is no filter for this machine"
)


def verdict(program: bytes, number: int, architecture: int, argument: int = 0) -> int:
    """What a classic BPF machine makes of a call: linux/filter.h, written out for what is used."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
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
    expected = {**refused, CLONE3: UNKNOWN}
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
def test_no_keyring_is_in_reach() -> None:
    column = list(ARCHITECTURES).index(os.uname().machine)
    keyctl, add_key = (DENIED[name][column] for name in ("keyctl", "add_key"))
    mark = uuid.uuid4().hex
    code = f"{ASK}print(ask({keyctl}, 0, -3, 0), ask({add_key}, b'user', b'{mark}', b'x', 1, -3))"
    # A session of keys of its own: what the test leaves is gone with its process.
    outside = f"{ASK}ask({keyctl}, 1, None)\n{code.removeprefix(ASK)}"
    said = subprocess.run([sys.executable, "-c", outside], capture_output=True, text=True)
    if said.stdout != "granted granted\n":
        pytest.skip("this system has no keyrings")
    assert python(code).stdout == "Operation not permitted Operation not permitted\n"


@needs_bubblewrap
@needs_filter
def test_no_memory_outside_the_address_spaces() -> None:
    column = list(ARCHITECTURES).index(os.uname().machine)
    numbers = {name: each[column] for name, each in DENIED.items()}
    calls = {
        "shmget": "0, 2**20, 0o1600",
        "memfd_create": "b'x', 0",
        "unshare": f"{0x10000000 | 0x20000}",
        "mount": "b'x', b'/tmp', b'tmpfs', 0, None",
        "userfaultfd": "1",
        "io_uring_setup": "1, None",
    }
    for name, arguments in calls.items():
        ran = python(f"{ASK}print(ask({numbers[name]}, {arguments}))")
        assert ran.stdout == "Operation not permitted\n", name
    clone = f"{ASK}print(ask({CLONE[column]}, {0x10000000 | signal.SIGCHLD}, 0, 0, 0, 0))"
    assert python(clone).stdout == "Operation not permitted\n"
    assert python(f"{ASK}print(ask({CLONE3}, None, 0))").stdout == "Function not implemented\n"


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
        "import multiprocessing.shared_memory as s\n"
        "m = s.SharedMemory(create=True, size=8); m.close(); m.unlink(); print('shared')\n"
    )
    ran = python(code, memory_mb=2048, processes=16)
    assert ran.stdout == "10\n6\nx\n0\n5 1.0\nshared\n", ran
