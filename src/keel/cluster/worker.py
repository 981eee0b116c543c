"""A worker's process: `python -m keel.cluster.worker FD`, started by `keel.cluster.group`."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from keel.learn.finite import NotFinite
from keel.learn.ranks import Ranks
from keel.platform.signals import keep_freed
from keel.types import KeelError

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The network interface that each listens on; else it is that of the machine's own name."""
LONGEST_WAIT = 20 * 86_400.0
"""Seconds; in milliseconds it still is a 32-bit number."""


def join(ranks: Ranks, meeting: str, device: str, seconds: float, loopback: bool = True) -> None:
    """Meet the other ranks; when it returns, all have, and no one needs `meeting` any more.

    On CUDA each has the GPU of its number, or the only one that it sees, and NCCL. A rank waits
    for others `seconds` long. Without `loopback` they may be on several machines.
    """
    if device == "cuda":
        torch.cuda.set_device(ranks.number % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with _on_loopback() if loopback else nullcontext():
        dist.init_process_group(
            backend,
            init_method=meeting,
            rank=ranks.number,
            world_size=ranks.count,
            timeout=timedelta(seconds=min(seconds, LONGEST_WAIT)),
        )
        met = torch.ones((), device=device)
        dist.all_reduce(met)
        assert float(met) == ranks.count


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let the backends listen on the loopback interface, unless the user has named another."""
    # lo on Linux, lo0 on macOS
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    own = [name for name in INTERFACES if name not in os.environ]
    os.environ.update(dict.fromkeys(own, loopback))
    try:
        yield
    finally:
        for name in own:
            del os.environ[name]


def lost_another(error: BaseException) -> bool:
    """Whether an error says that the connection to another rank has ended, or that one is late."""
    return isinstance(error, dist.DistBackendError) or "gloo" in str(error)


def leave() -> None:
    """Close the connections, of which some may lead to ranks that are gone."""
    with suppress(Exception):
        dist.destroy_process_group()


def work(pipe: Connection) -> None:
    """Make a member, then call what the driver calls, until the pipe closes.

    Each is answered by an empty text. An error ends the worker, with its text as the answer; one
    that is raised on all ranks is the driver's to report.
    """
    ranks, threads, device, deadline, build = pickle.loads(pipe.recv_bytes())
    torch.set_num_threads(threads)
    keep_freed()
    pipe.send_bytes(b"")
    join(ranks, pickle.loads(pipe.recv_bytes()), device, deadline)
    member = build(ranks)
    pipe.send_bytes(b"")
    while True:
        function, arguments = pickle.loads(pipe.recv_bytes())
        with suppress(NotFinite):
            function(member, *arguments)
        pipe.send_bytes(b"")


def main(descriptor: int) -> None:
    pipe = Connection(descriptor)
    try:
        work(pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # of gloo too, where another rank is gone
        kind = "" if isinstance(error, KeelError) else f"{type(error).__name__}: "
        with suppress(OSError):
            pipe.send_bytes((kind + " ".join(str(error).split())).encode())
    finally:
        leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))
