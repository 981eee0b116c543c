"""Environments in processes of their own: the same episodes, and nothing left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

gym = pytest.importorskip("gymnasium")

import numpy as np  # noqa: E402

from keel.config.control import Environment  # noqa: E402
from keel.control.environments import Environments  # noqa: E402
from keel.types import KeelError  # noqa: E402
from tests.platform.processes import descendants, gone  # noqa: E402


class Odd(gym.Env[Any, Any]):
    """Does in its first step what it was made to do."""

    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, doing: str = "") -> None:
        self.doing = doing
        if doing == "make" and os.getpid() != PARENT:
            raise RuntimeError("not\nhere")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        if self.doing == "reset":
            raise RuntimeError("never begins")
        return np.array([1.5, 0 if options is None else 1], np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        if self.doing == "raise":
            raise ValueError("a fault\nof two lines")
        if self.doing == "exit":
            os._exit(3)
        if self.doing == "leave":
            raise SystemExit
        shape = 3 if self.doing == "shape" else 2
        return np.full(shape, self.steps), np.float32(0.1), False, self.steps == 3, {"a": 1}


PARENT = os.getpid()
if "Odd-v0" not in gym.registry:
    gym.register("Odd-v0", Odd, disable_env_checker=True)


@contextmanager
def opened(name: str, count: int = 2, **options: Any) -> Iterator[Environments]:
    choice = Environment(id=name, count=count, options=options, vectorization="async")
    environments = Environments(choice, count, 5)
    try:
        yield environments
    finally:
        environments.close()


def test_processes_return_what_copies_here_return() -> None:
    one, two = (Environment(id="Odd-v0", count=3, vectorization=v) for v in ("sync", "async"))
    here, there = Environments(one, 3, 7), Environments(two, 3, 7)
    assert len({os.getpid(), *(one.pid for one in there.vector.processes)}) == 4
    rng = np.random.default_rng(0)
    for one in (here, there):
        one.begin([2, 0, 1])
    np.testing.assert_array_equal(here.observation_EO, there.observation_EO)
    for step in range(30):
        action = rng.integers(0, 2, 3)
        one, two = here.step(action), there.step(action)
        for field in ("observation_EO", "reward_E", "terminated_E", "truncated_E"):
            np.testing.assert_array_equal(getattr(one, field), getattr(two, field))
        ended = np.flatnonzero(one.terminated_E | one.truncated_E)
        if len(ended) or step == 9:
            slots = ended if len(ended) else np.array([1])
            for each in (here, there):
                each.begin(slots)
            np.testing.assert_array_equal(here.observation_EO, there.observation_EO)
    assert here.state() == there.state()
    here.close()
    there.close()


@pytest.mark.parametrize(
    ("doing", "says"),
    [
        ("raise", "fails in step: ValueError: a fault of two lines"),
        ("shape", r"fails in step: ValueError: .*shape \(3,\)"),
        ("exit", "fails in step: its process ended"),
        ("leave", "fails in step: its process ended"),
    ],
)
def test_errors_of_the_process_are_reported_here(doing: str, says: str) -> None:
    before = descendants(os.getpid())
    with opened("Odd-v0", doing=doing) as environments:
        environments.begin([0, 1])
        with pytest.raises(KeelError, match=says) as error:
            environments.step(np.zeros(2, dtype=np.int64))
        assert "\n" not in str(error.value)
    assert descendants(os.getpid()) <= before


@pytest.mark.parametrize(
    ("doing", "says"),
    [
        ("make", "its own process: its process ended"),
        ("reset", "reset: RuntimeError: never begins"),
    ],
)
def test_one_that_cannot_be_made_or_begun(doing: str, says: str) -> None:
    before = descendants(os.getpid())
    choice = Environment(id="Odd-v0", count=2, options={"doing": doing}, vectorization="async")
    with pytest.raises(KeelError, match=f"'Odd-v0' fails in {says}") as error:
        Environments(choice, 2, 5).begin([0, 1])
    assert "\n" not in str(error.value)
    del error
    assert gone(descendants(os.getpid()) - before) == set()


def test_what_is_let_go_of_leaves_nothing() -> None:
    before = descendants(os.getpid())
    environments = Environments(Environment(id="Odd-v0", count=2, vectorization="async"), 2, 0)
    assert len(descendants(os.getpid()) - before) == 2
    del environments
    assert descendants(os.getpid()) <= before
