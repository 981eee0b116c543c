"""What the sandbox's processes may not ask of the kernel, as a seccomp filter.

Namespaces hide the host's files, processes and network, but not the kernel's keyrings; and memory
of System V, of memfd, of extended attributes or in a mount of one's own counts as no process's
address space. So these calls fail with EPERM, as if the user were not allowed to. Sockets of other
families than AF_UNIX fail too: AF_VSOCK and AF_ALG belong to no network namespace, and TCP's
buffers hold megabytes each. `clone3` fails as unknown (ENOSYS): a filter cannot see the flags that
it is given in memory, and C libraries go back to `clone`.

`computing_filter` is far narrower: a list of the few calls that a process needs which computes,
reads files and writes one answer.
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
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # Kernel memory that no limit of a process or of a tmpfs's size counts.
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "vmsplice": (278, 75),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "landlock_create_ruleset": (444, 444),
    "io_setup": (206, 0),
    # Namespaces and mounts of one's own.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    # Other processes' memory and files, and the kernel's log; nothing that a test needs.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    "syslog": (103, 116),
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
SOCKETS = {"socket": (41, 198), "socketpair": (53, 199)}
"""Calls whose first argument is a family; only AF_UNIX is allowed, which asyncio needs."""
AF_UNIX = 1
FCNTL, SETSOCKOPT = (72, 25), (54, 208)
F_SETPIPE_SZ = 1031
BUFFER_SIZES = (7, 8, 32, 33)
"""SO_SNDBUF, SO_RCVBUF, SO_SNDBUFFORCE and SO_RCVBUFFORCE; pipes and sockets keep the default."""
X32 = 0x40000000
"""Where the calls of x86_64's second interface begin, which has numbers of its own."""
COMPUTING = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "lseek": (8, 62),
    "pread64": (17, 67),
    "readv": (19, 65),
    "fstat": (5, 80),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlinkat": (267, 78),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "futex": (202, 98),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "sysinfo": (99, 179),
    "uname": (63, 160),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "restart_syscall": (219, 128),
    # Older calls that aarch64 does not have.
    "stat": (4, 0),
    "lstat": (6, 0),
    "access": (21, 0),
    "readlink": (89, 0),
    "time": (201, 0),
}
"""What a process may ask that only computes; aarch64's 0 says that it has no such call."""
OPENAT = (257, 56)
OPEN = (2, 0)
WRITING = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000
"""O_WRONLY, O_RDWR, O_CREAT, O_TRUNC and O_APPEND."""

# Of linux/bpf_common.h and linux/seccomp.h.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_REFUSE = _ERROR | errno.EPERM
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # in struct seccomp_data
_Step = tuple[int, int, int, int]


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """The program for bubblewrap's `--seccomp`; None for a machine that there is none for.

    A process that calls by another architecture's numbers is killed (the program would mistake
    them), and x86_64's second interface is refused. `machine` is this one unless given.
    """
    machine = _this() if machine is None else machine
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    program = _beginning(machine)
    for numbers in DENIED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE)]
    program += [(_EQUAL, 0, 1, CLONE3), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    program += _refuse_if(CLONE[column], 0, _ANY_BIT, (CLONE_NEW,))
    for numbers in SOCKETS.values():
        program += _refuse_unless(numbers[column], 0, AF_UNIX)
    program += _refuse_if(FCNTL[column], 1, _EQUAL, (F_SETPIPE_SZ,))
    # The level is not looked at: what has these numbers elsewhere is for families refused above.
    program += _refuse_if(SETSOCKOPT[column], 2, _EQUAL, BUFFER_SIZES)
    return _assembled([*program, (_RETURN, 0, 0, _ALLOW)])


def computing_filter(machine: str | None = None) -> bytes | None:
    """The program for a process that only computes; None for a machine that there is none for.

    It may read what it can open, and write to what is open; it starts no thread and no process,
    sends no signal, waits for nothing but its own memory, and opens nothing to write.
    """
    machine = _this() if machine is None else machine
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    program = _beginning(machine)
    for numbers in COMPUTING.values():
        if column == 0 or numbers[column]:
            program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    for numbers, flags in ((OPENAT, 2), (OPEN, 1)):
        if numbers[column]:
            program += _refuse_if(numbers[column], flags, _ANY_BIT, (WRITING,))
            program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    return _assembled([*program, (_RETURN, 0, 0, _REFUSE)])


def _this() -> str:
    # A 32-bit Python on a 64-bit kernel calls by other numbers than the machine's name says.
    return os.uname().machine if sys.maxsize > 2**32 else ""


def _beginning(machine: str) -> list[_Step]:
    """Kill another architecture's calls; leave the call's number loaded."""
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, X32), (_RETURN, 0, 0, _REFUSE)]
    return steps


def _refuse_if(number: int, argument: int, test: int, values: tuple[int, ...]) -> list[_Step]:
    """Refuse a call if the low half of an argument passes a test with any of some values."""
    steps = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument)]
    for value in values:
        steps += [(test, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]
    steps.append((_LOAD, 0, 0, _NUMBER))
    return [(_EQUAL, 0, len(steps), number), *steps]


def _refuse_unless(number: int, argument: int, value: int) -> list[_Step]:
    """Refuse a call unless the low half of an argument has a value."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        (_EQUAL, 1, 0, value),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _assembled(program: list[_Step]) -> bytes:
    # struct sock_filter; both architectures have their low bytes first.
    return b"".join(struct.pack("<HBBI", *one) for one in program)
