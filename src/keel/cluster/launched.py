"""Ranks that torchrun has started on this machine, each a process of the same `keel train`.

Rank 0 runs the command; the others do what it sends over the process group, to the end of the
command. Unlike the workers of `keel.cluster.group` they are not this process's to watch: torchrun
ends them all where one fails, and prints which.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from keel.cluster.group import BLOCKED, RankGroup
from keel.cluster.worker import LONGEST_WAIT, join, leave, lost_another
from keel.learn.finite import NotFinite
from keel.learn.ranks import Ranks
from keel.platform.signals import keep_freed
from keel.types import KeelError

M = TypeVar("M")


def ranks_of(environment: Mapping[str, str]) -> Ranks:
    """This process among those of torchrun; the only one without torchrun.

    Raises KeelError where torchrun has started some on other machines.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return Ranks(0, 1)
    count = int(environment["WORLD_SIZE"])
    if int(environment["LOCAL_WORLD_SIZE"]) != count:
        raise KeelError(
            f"torchrun started {count} processes on several machines, and ranks of Keel share one: "
            "use --nnodes 1"
        )
    return Ranks(int(environment["RANK"]), count)


def check(processes: int, ray: str | None, ranks: Ranks) -> None:
    """Raises KeelError where a recipe asks for other processes than there are."""
    if ray is not None:
        raise KeelError(
            f'cluster.ray = "{ray}" starts its own processes: run keel train without torchrun, or '
            "leave cluster.ray out"
        )
    if processes != ranks.count:
        raise KeelError(
            f"cluster.processes = {processes}, but torchrun started {ranks.count}: set it to "
            f"{ranks.count}, or --nproc-per-node to {processes}"
        )


def _join(ranks: Ranks) -> None:
    device = "cuda" if torch.cuda.device_count() >= ranks.count else "cpu"
    join(ranks, "env://", device, LONGEST_WAIT)  # rank 0 may be in a stage that it runs alone


def serve(ranks: Ranks) -> int:
    """Do what rank 0 sends until its command ends; the exit code."""
    keep_freed()
    member: Any = None
    try:
        _join(ranks)
        for signum in BLOCKED:  # rank 0 stops between steps, and needs this process until then
            signal.signal(signum, signal.SIG_IGN)
        while (order := _sent(None)) is not None:
            function, arguments = order
            if arguments is None:
                member = function(ranks)
            else:
                with suppress(NotFinite):  # rank 0 reports it
                    function(member, *arguments)
            dist.barrier()
    except Exception as error:
        if not lost_another(error):
            text = " ".join(str(error).split())
            print(f"keel: rank {ranks.number} stopped: {text}", file=sys.stderr)
        return 1
    leave()
    return 0


@contextmanager
def driving(ranks: Ranks) -> Iterator[None]:
    """Rank 0's command. An exception ends the others too, by torchrun."""
    _join(ranks)
    yield
    _sent((None,))
    leave()


class LaunchedGroup(RankGroup[M]):
    """The ranks of torchrun."""

    def call(self, function: Callable[..., Any], *arguments: Any, **here: Any) -> Any:
        own = partial(function, self.member, *arguments, **here)
        return self._ordered((function, arguments), own)

    def build(self, own: Callable[[Ranks], M], others: Callable[[Ranks], M]) -> None:
        """Make every rank's member."""
        self.member = self._ordered((others, None), partial(own, self.ranks))

    def _ordered(self, order: tuple[Any, Any], own: Callable[[], Any]) -> Any:
        try:
            _sent((order,))
            try:
                result = own()
            except NotFinite:
                dist.barrier()
                raise
            dist.barrier()
        except RuntimeError as error:
            if not lost_another(error):
                raise
            raise KeelError("another rank of torchrun has ended: see its error above") from error
        return result


@contextmanager
def start(
    count: int,
    build: Callable[[Ranks], M],
    others: Callable[[Ranks], M],
    threads: int,
    device: str = "cpu",
    deadline: float = LONGEST_WAIT,
) -> Iterator[RankGroup[M]]:
    """As `keel.cluster.group.start`, of torchrun's processes, which have no deadline."""
    ranks = ranks_of(os.environ)
    check(count, None, ranks)
    group: LaunchedGroup[Any] = LaunchedGroup(ranks, None, [], deadline)
    group.build(build, partial(_with_threads, threads, others))
    yield group


def _with_threads(threads: int, build: Callable[[Ranks], M], ranks: Ranks) -> M:
    torch.set_num_threads(threads)
    return build(ranks)


def _sent(message: Any) -> Any:
    """What rank 0 sends to all ranks, inside a tuple."""
    box = [message]
    dist.broadcast_object_list(box, src=0)
    (content,) = box[0]
    return content
