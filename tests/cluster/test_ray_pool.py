"""Units of work in processes of a real Ray."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from keel.cluster.parts import StageFactory
from keel.cluster.placement import before_import
from keel.cluster.ranks import join, leave
from keel.config.sources import RewardSource
from keel.learn.ranks import Ranks
from keel.platform.calls import AsyncCall, LoopThread
from keel.types import KeelError

pytestmark = pytest.mark.slow
NOTES: list[str] = []
"""What the pools say of lost processes."""


@pytest.fixture(scope="module")
def ray() -> Iterator[ModuleType]:
    before_import("local")
    from keel.cluster import ray_workers

    with ray_workers.connected("local", 1):
        yield ray_workers


def pool_of(ray: ModuleType, role: str, build: Any, *arguments: Any) -> Any:
    start = partial(ray.started, resources=ray.Resources(0.1), threads=1)
    return ray.RayPool([f"{role} 0"], (build, arguments), start, 60.0, NOTES.append)


def rewards_only(sources: dict[int, RewardSource]) -> StageFactory:
    """A factory of rewards alone."""
    return StageFactory(list, list, list, 0, Path(), sources)  # type: ignore[arg-type]


def slept(*, completions: list[str], **_: Any) -> list[float]:
    seconds = float(completions[0])
    time.sleep(seconds)
    return [seconds]


def test_a_unit_that_cannot_be_sent_fails_alone(ray: ModuleType) -> None:
    pool = pool_of(ray, "rollout worker", list)
    lock = threading.Lock()
    with pytest.raises(KeelError, match=r"what rollout worker 0 .* cannot be sent to it"):
        pool.submit(len, lock).result(60)
    assert pool.submit(len).result(60) == 0
    pool.close()
    with pytest.raises(KeelError, match="have ended"):
        pool.submit(len).result(5)


def test_no_room_for_a_process_is_one_line(ray: ModuleType) -> None:
    resources = ray.Resources(cpus=1.0, gpus=1.0)
    trainer = ray.started("trainer 0", resources, threads=1)
    wanted = r"trainer 0 was not ready within 1 s: it needs 1 CPUs and 1 GPUs, .* or raise"
    with pytest.raises(KeelError, match=wanted) as caught:
        ray.RayGroup([trainer], 1.0).meet()
    assert "\n" not in str(caught.value)
    ray.ended([trainer])


def test_a_reward_has_its_time_from_when_its_worker_begins(ray: ModuleType) -> None:
    """One worker calls them in turn: all three take longer together than one may."""
    from keel.cluster.ray_stage import RemoteReward, _RewardWorker

    sources = dict(enumerate([RewardSource(function=f"{__name__}:slept")] * 3))
    factory = rewards_only(sources)
    pool = pool_of(ray, "reward worker", _RewardWorker, factory, sources, "cpu")
    rewards = [RemoteReward(pool, place) for place in sources]
    assert rewards[0].named().is_async
    loop = LoopThread()

    def outcomes(*seconds: float) -> list[tuple[Any, bool]]:
        running = [
            AsyncCall(partial(reward, completions=[str(length)]), 3.0, loop)
            for reward, length in zip(rewards, seconds, strict=True)
        ]
        found = [call.outcome() for call in running]
        return [(one.value, one.timed_out) for one in found]

    assert outcomes(1.5, 1.5, 1.5) == [([1.5], False)] * 3
    assert NOTES == []
    assert outcomes(0.1, 600, 0.1) == [([0.1], False), (None, True), ([0.1], False)]
    assert outcomes(0.1, 0.1, 0.1) == [([0.1], False)] * 3
    assert [note.partition(") ")[2] for note in NOTES] == ["was to stop what it did: replaced"]
    pool.close()
    loop.close()


def test_the_address_to_meet_at_is_listened_on_until_the_others_come(ray: ModuleType) -> None:
    host = object.__new__(ray.Host)
    node, _, port = host.address().rpartition(":")
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("", int(port)))
    join(Ranks(0, 1), f"tcp://{node}:{port}", "cpu", 60.0)
    leave()
