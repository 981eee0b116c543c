"""Environments whose observations say where they come from, and plain loops over single ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.utils import seeding

from keel.control.environments import derive_episode

COUNTER, DRIFTER, SHIFTED = "Counter-v0", "Drifter-v0", "Shifted-v0"
REACH, PARTS, LEVERS, BANDIT = "Reach-v0", "Parts-v0", "Levers-v0", "Bandit-v0"
SEQUENCES, NUMBERED, STRANGE = "Sequences-v0", "Numbered-v0", "Strange-v0"
DRAWN = "Drawn-v0"
MARKS = 2**20
"""Marks of episodes are below this: float32 holds them exactly."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Result = tuple[Any, float, bool, bool, dict[str, Any]]


def box(low: float, high: float, *shape: int) -> gym.spaces.Box:
    return gym.spaces.Box(low, high, shape, np.float32)


def mark(seed: int) -> int:
    """What a Counter shows all through an episode of this seed."""
    return int(seeding.np_random(seed)[0].integers(MARKS))


def mark_of(seed: int, number: int, group: int = 1) -> int:
    """The mark of an episode by its number."""
    return mark(derive_episode(seed, number // group))


class Counter(gym.Env[Floats, int]):
    """Shows its episode's mark and its own step count; the mark decides length and kind of end.

    `ending` is terminated, truncated, both, or mixed (by the mark). Rewards show count and action.
    """

    observation_space = box(0, MARKS, 2)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, longest: int = 5, length: int | None = None, ending: str = "mixed") -> None:
        self.longest, self.fixed, self.ending = longest, length, ending
        self.over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        self.mark = int(self.np_random.integers(MARKS))
        self.length = self.fixed or 1 + self.mark % self.longest
        self.ends = self.ending
        if self.ending == "mixed":
            self.ends = "truncated" if self.mark // self.longest % 2 else "terminated"
        self.count, self.over = 0, False
        return self._look(), {}

    def step(self, action: int) -> Result:
        assert not self.over, "stepped past the end of an episode"
        self.count += 1
        self.over = self.count == self.length
        terminated = self.over and self.ends in ("terminated", "both")
        truncated = self.over and self.ends in ("truncated", "both")
        return self._look(), self.count + 0.125 * int(action), terminated, truncated, {}

    def _look(self) -> Floats:
        return np.array([self.mark, self.count], dtype=np.float32)


class Drawn(Counter):
    """Its picture is of one colour: its step count in red and green, its mark in blue."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 25}

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.render_mode = render_mode

    def render(self) -> Any:
        colour = [self.count // 16 * 4, self.count % 16 * 16, self.mark % 256]
        return np.full((8, 8, 3), colour, dtype=np.uint8)


class Drifter(Counter):
    """Its state depends on all that the process has done before: seed and actions do not lead
    there again."""

    drift = 0

    def step(self, action: int) -> Result:
        Drifter.drift += 1
        return super().step(action)

    def _look(self) -> Floats:
        return np.array([Drifter.drift % MARKS, self.count], dtype=np.float32)


class Raises(Counter):
    """Fails at its second step."""

    def step(self, action: int) -> Result:
        if self.count == 1:
            raise ValueError("broken")
        return super().step(action)


class NaN(Counter):
    """Pays a NaN."""

    def step(self, action: int) -> Result:
        observation, _, *ends = super().step(action)
        return observation, float("nan"), *ends


class _Still(gym.Env[Any, Any]):
    """Three steps of nothing; shows the last action as it arrived."""

    observation_space: Any = box(-10, 10, 1)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._look(0.0), {}

    def step(self, action: Any) -> Result:
        self.count += 1
        return self._look(action), 0.0, self.count == 3, False, {}

    def _look(self, action: Any) -> Any:
        shown = np.zeros(self.observation_space.shape, dtype=np.float32)
        shown[:] = np.reshape(action, -1)
        return shown


class Shifted(_Still):
    """Actions 5, 6 and 7."""

    action_space = gym.spaces.Discrete(3, start=5)

    def step(self, action: Any) -> Result:
        assert self.action_space.contains(action)
        return super().step(action)


class Reach(_Still):
    """Real numbers of shape (2, 1), bounds of their own for each."""

    low, high = np.array([[-0.5], [-2.0]]), np.array([[1.0], [0.25]])
    action_space = gym.spaces.Box(low.astype(np.float32), high.astype(np.float32))
    observation_space = box(-10, 10, 2)

    def step(self, action: Any) -> Result:
        assert self.action_space.contains(action)
        return super().step(action)


class Parts(_Still):
    """Shows a dictionary: where it is (one of four), and two numbers."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Dict(place=gym.spaces.Discrete(4), speed=box(-1, 1, 2))

    def _look(self, action: Any) -> Any:
        return {"place": self.count % 4, "speed": np.full(2, 0.25 * self.count, dtype=np.float32)}


class Numbered(_Still):
    """Shows one of four numbers."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Discrete(4)

    def _look(self, action: Any) -> Any:
        return self.count % 4


class Sequences(_Still):
    """Shows as many numbers as it likes."""

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(2))


class _Own(gym.Space[int]):
    """A kind of space that Gymnasium does not know."""

    def __repr__(self) -> str:
        return "Own()"


class Strange(_Still):
    """Shows what only its maker can read."""

    action_space = gym.spaces.Discrete(2)
    observation_space = _Own()


class Levers(_Still):
    """Two levers at once: no policy here draws that."""

    action_space = gym.spaces.MultiDiscrete([2, 3])


class Bandit(gym.Env[Floats, int]):
    """One step; the last arm pays `pay`, the others nothing."""

    observation_space = box(0, 1, 1)

    def __init__(self, arms: int = 2, pay: float = 1.0) -> None:
        self.action_space = gym.spaces.Discrete(arms)
        self.arms, self.pay = arms, pay

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Floats, dict[str, Any]]:
        super().reset(seed=seed)
        return np.ones(1, dtype=np.float32), {}

    def step(self, action: int) -> Result:
        paid = self.pay if action == self.arms - 1 else 0.0
        return np.ones(1, dtype=np.float32), paid, True, False, {}


for name, kind in (
    (COUNTER, Counter),
    (DRIFTER, Drifter),
    (DRAWN, Drawn),
    ("Raises-v0", Raises),
    ("NaN-v0", NaN),
    (SHIFTED, Shifted),
    (REACH, Reach),
    (PARTS, Parts),
    (NUMBERED, Numbered),
    (LEVERS, Levers),
    (BANDIT, Bandit),
):
    gym.register(name, kind)
# The checker warns of spaces whose bounds it cannot tell.
gym.register(SEQUENCES, Sequences, disable_env_checker=True)
gym.register(STRANGE, Strange, disable_env_checker=True)

# ---------------------------------------------------------------- plain loops

Act = Callable[[Floats], int]


def choose(observation: Floats) -> int:
    """An action that depends on all of the observation, of 2 actions or more."""
    return int(np.abs(observation.astype(np.float64)).sum() * 9.7) % 2


def choose_all(observation_EO: Floats) -> np.ndarray[Any, np.dtype[np.int64]]:
    """`choose` in every environment."""
    return np.array([choose(row) for row in observation_EO])


@dataclass(frozen=True)
class Step:
    """One step of one environment."""

    observation: Floats
    action: int
    reward: float
    after: Floats
    terminated: bool
    truncated: bool
    episode: int

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated


def _step(env: gym.Env[Any, Any], observation: Floats, action: int, episode: int) -> Step:
    after, reward, terminated, truncated, _ = env.step(action)
    after = np.array(after, dtype=np.float32)
    return Step(observation, action, float(reward), after, terminated, truncated, episode)


def _begin(env: gym.Env[Any, Any], seed: int, number: int, group: int) -> Floats:
    observation, _ = env.reset(seed=derive_episode(seed, number // group))
    return np.array(observation, dtype=np.float32)


def plain_steps(
    name: str, seed: int, count: int, times: int, act: Act = choose, **options: Any
) -> list[list[Step]]:
    """`times` steps of each of `count` environments, a row a time; episodes begin in the order in
    which environments come free."""
    envs = [gym.make(name, **options) for _ in range(count)]
    numbers = list(range(count))
    begun = count
    now = [_begin(env, seed, n, 1) for env, n in zip(envs, numbers, strict=True)]
    rows: list[list[Step]] = []
    for _ in range(times):
        row = [_step(envs[e], now[e], act(now[e]), numbers[e]) for e in range(count)]
        for e, step in enumerate(row):
            now[e] = step.after
            if step.ended:
                numbers[e], begun = begun, begun + 1
                now[e] = _begin(envs[e], seed, numbers[e], 1)
        rows.append(row)
    return rows


def plain_episodes(
    name: str, seed: int, first: int, count: int, act: Act = choose, group: int = 1, **options: Any
) -> list[list[Step]]:
    """So many whole episodes from the `first` on, one after another in one environment."""
    env = gym.make(name, **options)
    episodes = []
    for number in range(first, first + count):
        observation = _begin(env, seed, number, group)
        steps: list[Step] = []
        while not steps or not steps[-1].ended:
            steps.append(_step(env, observation, act(observation), number))
            observation = steps[-1].after
        episodes.append(steps)
    return episodes
