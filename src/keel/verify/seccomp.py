"""What the sandbox's processes may not ask of the kernel, as a seccomp filter.

Namespaces hide the host's files, processes and network, but not the kernel's keyrings; and memory
of System V, of memfd or in a mount of one's own counts as no process's address space. So these
calls fail with EPERM, as if the user were not allowed to. `clone3` fails as unknown (ENOSYS): a
filter cannot see the flags that it is given in memory, and C libraries go back to `clone`.
"""

from __future__ import annotations

import errno
import os
import struct
import sys

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The kernel's numbers of the architectures that there is a filter for."""
DENIED = {
    # Keyrings, which belong to users and sessions, and to no namespace of the sandbox's.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Memory and messages that outlive the process that asked for them.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Namespaces and mounts of one's own.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Other processes' memory and files; nothing that a test needs.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    # Large parts of the kernel that no test needs, where faults are found again and again.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
"""Calls that fail with EPERM: their numbers on x86_64 and on aarch64."""
CLONE = (56, 220)
CLONE3 = 435
CLONE_NEW = 0x7E020000
"""The flags of clone that make a namespace: NEWNS, NEWCGROUP, UTS, IPC, USER, PID and NET."""
X32 = 0x40000000
"""Where the calls of x86_64's second interface begin, which has numbers of its own."""

# Of linux/bpf_common.h and linux/seccomp.h.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # in struct seccomp_data; the low half of args[0]


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The program for bubblewrap's `--seccomp`; None for a machine that there is none for.

    A process that calls by another architecture's numbers is killed (the program would mistake
    them), and x86_64's second interface is refused. `machine` is this one unless given.
    """
    # A 32-bit Python on a 64-bit kernel calls by other numbers than the machine's name says.
    if machine is None:
        machine = os.uname().machine if sys.maxsize > 2**32 else ""
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    tests = [(_AT_LEAST, X32, "deny")] if machine == "x86_64" else []
    tests += [(_EQUAL, numbers[column], "deny") for numbers in DENIED.values()]
    ends = {"allow": 3, "deny": 4, "unknown": 5}  # how far behind the tests each verdict stands
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    tests.append((_EQUAL, CLONE3, "unknown"))
    for at, (test, number, verdict) in enumerate(tests):
        program.append((test, len(tests) - at - 1 + ends[verdict], 0, number))
    program += [
        (_EQUAL, 0, 2, CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT),
        (_ANY_BIT, 1, 0, CLONE_NEW),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERROR | errno.EPERM),
        (_RETURN, 0, 0, _ERROR | errno.ENOSYS),
    ]
    # struct sock_filter; both architectures have their low bytes first.
    return b"".join(struct.pack("<HBBI", *one) for one in program)
