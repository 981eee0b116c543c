"""Deep Q-learning: ε-greedy steps into a replay buffer, and updates towards a target network.

DQN, Mnih et al. 2015; double DQN, arXiv:1509.06461; n-step targets, arXiv:1710.02298.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.spaces import Discrete
from jaxtyping import Bool, Float, Int
from torch import Tensor

from keel.config.control import QLearningStage
from keel.config.fields import derive
from keel.control.environments import Episode
from keel.control.learner import ChooseActions, ControlLearner, episode_metrics, prefixed, within
from keel.control.networks import perceptron
from keel.learn.optimizer import stop_unless_finite
from keel.objective import background
from keel.types import KeelError

LOSSES = {"squared": background.squared_loss, "huber": background.huber}


class QLearning(ControlLearner[QLearningStage]):
    """An online network, its target network, and the replay buffer."""

    def __init__(self, stage: QLearningStage, seed: int) -> None:
        super().__init__(stage, seed)
        actions, size = self.environments.actions, self.environments.observation_size
        if not isinstance(actions, Discrete):
            self.environments.close()
            raise KeelError(
                f"environment.id = {stage.environment.id!r}: Q-learning needs discrete "
                "actions, and this environment has continuous ones: use ppo"
            )
        self.choices = int(actions.n)
        try:
            self.replay = Replay(stage.replay.capacity, stage.environment.count, size)
        except MemoryError:
            self.environments.close()
            raise KeelError(
                f"replay.capacity = {stage.replay.capacity} transitions of {2 * size + 3} numbers "
                "do not fit in memory: lower it"
            ) from None
        self.online = perceptron(size, self.choices, stage.network, None, derive(seed, "network"))
        self.target = deepcopy(self.online)
        self.train({"online": self.online})
        self.quick = self.online.quick()

    def iterate(self, number: int) -> dict[str, float]:
        """The environment steps of one iteration, and the updates between them."""
        stage, environments = self.stage, self.environments
        rng = np.random.default_rng(derive(self.seed, "row", number))
        if environments.begun == 0:
            environments.begin(range(environments.count))
        times = -(-min(stage.row_every, stage.steps - self.steps) // environments.count)
        uniform_TE = rng.random((times, environments.count))
        random_TE = rng.integers(0, self.choices, size=(times, environments.count))
        finished: list[Episode] = []
        sums = np.zeros(3)
        updates = 0
        for t in range(times):
            self._step(uniform_TE[t], random_TE[t], finished)
            for _ in range(self._updates_due()):
                sums += self._update(rng)
                updates += 1
            for _ in range(_crossed(self.steps, environments.count, stage.target.every)):
                self._move_target()
        return {**episode_metrics(finished), **self._of_updates(sums, updates)}

    def greedy(self) -> ChooseActions:
        return lambda observation_EO: self._best(observation_EO)

    # ---------------------------------------------------------------- acting

    def _step(
        self,
        uniform_E: npt.NDArray[np.float64],
        random_E: npt.NDArray[np.int64],
        finished: list[Episode],
    ) -> None:
        """Step every environment, store the transitions, and start the next episodes."""
        environments = self.environments
        explores_E = uniform_E < self._epsilon()
        # `background.epsilon_greedy` with two random numbers: a random action needs no network.
        action_E = random_E
        if not explores_E.all():
            best_E = self._best(environments.observation_EO)
            action_E = np.where(explores_E, random_E, best_E)
        before_EO = environments.observation_EO.copy()
        moves = environments.step(action_E)
        self.replay.add(
            before_EO,
            action_E,
            moves.reward_E,
            moves.terminated_E,
            moves.truncated_E,
            moves.observation_EO,
        )
        self.steps += environments.count
        slots = moves.ended_E.nonzero()[0]
        if len(slots):
            finished.extend(map(environments.episode, slots.tolist()))
            environments.begin(slots)

    def _epsilon(self) -> float:
        if self.steps < self.stage.replay.warmup:
            return 1.0
        return self.stage.exploration.epsilon(self.steps, self.stage.steps)

    def _best(self, observation_EO: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        best_E: npt.NDArray[np.int64] = self.quick(observation_EO).argmax(-1)
        return best_E

    # ---------------------------------------------------------------- learning

    def targets(self, drawn: Transitions) -> Tensor:
        """ŷ of each transition; no gradient."""
        stage = self.stage
        with torch.no_grad():
            next_q_BA = self.target(drawn.next_observation_BO)
            next_online_BA = self.online(drawn.next_observation_BO) if stage.double else next_q_BA
        if stage.n_step > 1:
            # The double target is the target network's value of the online network's choice.
            best_B1 = next_online_BA.argmax(-1, keepdim=True)
            return background.n_step_target(
                drawn.reward_BK,
                drawn.terminated_BK,
                next_q_BA.gather(-1, best_B1).squeeze(-1),
                gamma=stage.gamma,
                steps_B=drawn.steps_B,
            )
        reward_B, terminated_B = drawn.reward_BK[:, 0], drawn.terminated_BK[:, 0]
        if stage.double:
            return background.double_td_target(
                reward_B, next_online_BA, next_q_BA, terminated_B, gamma=stage.gamma
            )
        return background.td_target(reward_B, next_q_BA, terminated_B, gamma=stage.gamma)

    def _update(self, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """One optimizer step; its loss, mean Q of the actions taken, and gradient norm."""
        stage = self.stage
        drawn = self.replay.sample(stage.replay.batch_size, stage.n_step, rng)
        target_B = self.targets(drawn)
        error_B = background.q_error(self.online(drawn.observation_BO), drawn.action_B, target_B)
        loss = LOSSES[stage.loss](error_B).mean()
        self.trained.backward(loss)
        norm = self.optimizer.step(self.rate)
        with torch.no_grad():
            q = float((error_B + target_B).mean())
        stop_unless_finite({"loss": float(loss.detach()), "grad_norm": norm})
        return np.array([float(loss.detach()), q, norm])

    def _updates_due(self) -> int:
        stage, count = self.stage, self.environments.count
        if self.steps < stage.replay.warmup:
            return 0
        return stage.updates * _crossed(self.steps, count, stage.update_every)

    @torch.no_grad()
    def _move_target(self) -> None:
        rate = self.stage.target.rate
        pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
        for target, online in pairs:
            target.copy_(background.target_update(target, online, rate=rate))

    def _of_updates(self, sums: npt.NDArray[np.float64], updates: int) -> dict[str, float]:
        out = {
            "updates": float(updates),
            "epsilon": self._epsilon(),
            "learning_rate": self.rate,
        }
        if updates:
            loss, q, norm = (sums / updates).tolist()
            out |= {"loss": loss, "q/mean": q, "grad_norm": norm}
        return out

    # ---------------------------------------------------------------- state

    def tensors(self) -> dict[str, Tensor]:
        return (
            super().tensors()
            | prefixed("target", self.target.state_dict())
            | prefixed("replay", self.replay.tensors())
        )

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "written": self.replay.written}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().restore(tensors, facts)
        self.target.load_state_dict(within("target", tensors))
        self.replay.restore(within("replay", tensors), facts["written"])


def _crossed(steps: int, taken: int, every: int) -> int:
    """How many multiples of `every` the last `taken` steps reached."""
    return steps // every - (steps - taken) // every


@dataclass(frozen=True, eq=False)
class Transitions:
    """Sampled transitions (B): state, action, up to K rewards, and the state after the last one.

    `steps_B` is how many rewards count: less than K if an episode was cut off or the buffer
    ends. What comes after counts unless one of them terminated the episode.
    """

    observation_BO: Float[Tensor, "B O"]
    action_B: Int[Tensor, " B"]
    reward_BK: Float[Tensor, "B K"]
    terminated_BK: Bool[Tensor, "B K"]
    steps_B: Int[Tensor, " B"]
    next_observation_BO: Float[Tensor, "B O"]


class Replay:
    """Holds the newest `capacity` transitions of `count` environments that step together."""

    def __init__(self, capacity: int, count: int, size: int) -> None:
        rows = max(capacity // count, 1)
        self.observation_TEO = np.zeros((rows, count, size), dtype=np.float32)
        self.next_observation_TEO = np.zeros((rows, count, size), dtype=np.float32)
        self.action_TE = np.zeros((rows, count), dtype=np.int64)
        self.reward_TE = np.zeros((rows, count), dtype=np.float32)
        self.terminated_TE = np.zeros((rows, count), dtype=np.bool_)
        self.ended_TE = np.zeros((rows, count), dtype=np.bool_)
        self.written = 0

    def __len__(self) -> int:
        """The number of stored transitions."""
        return min(self.written, len(self.action_TE)) * self.action_TE.shape[1]

    def add(
        self,
        observation_EO: npt.NDArray[np.float32],
        action_E: npt.NDArray[np.int64],
        reward_E: npt.NDArray[Any],
        terminated_E: npt.NDArray[np.bool_],
        truncated_E: npt.NDArray[np.bool_],
        next_observation_EO: npt.NDArray[np.float32],
    ) -> None:
        """Store one step of every environment, in place of the oldest."""
        at = self.written % len(self.action_TE)
        self.observation_TEO[at] = observation_EO
        self.next_observation_TEO[at] = next_observation_EO
        self.action_TE[at] = action_E
        self.reward_TE[at] = reward_E
        self.terminated_TE[at] = terminated_E
        np.logical_or(terminated_E, truncated_E, out=self.ended_TE[at])
        self.written += 1

    def sample(self, batch: int, horizon: int, rng: np.random.Generator) -> Transitions:
        """`batch` transitions, uniformly and with replacement, with up to `horizon` rewards."""
        rows, count = self.action_TE.shape
        there = min(self.written, rows)
        flat = rng.integers(0, there * count, size=batch)
        age_B, env_B = np.divmod(flat, count)
        oldest = self.written - there
        at_B = (oldest + age_B) % rows
        if horizon == 1:
            last_B, steps_B = at_B, np.ones(batch, dtype=np.int64)
            window_BK = at_B[:, None]
        else:
            ahead_K = np.arange(horizon)
            window_BK = (oldest + age_B[:, None] + ahead_K) % rows
            ends_BK = self.ended_TE[window_BK, env_B[:, None]]
            ends_BK |= age_B[:, None] + ahead_K >= there - 1  # the newest step ends the buffer
            steps_B = ends_BK.argmax(1) + 1
            steps_B[~ends_BK.any(1)] = horizon
            last_B = window_BK[np.arange(batch), steps_B - 1]
        return Transitions(
            observation_BO=torch.from_numpy(self.observation_TEO[at_B, env_B]),
            action_B=torch.from_numpy(self.action_TE[at_B, env_B]),
            reward_BK=torch.from_numpy(self.reward_TE[window_BK, env_B[:, None]]),
            terminated_BK=torch.from_numpy(self.terminated_TE[window_BK, env_B[:, None]]),
            steps_B=torch.from_numpy(steps_B),
            next_observation_BO=torch.from_numpy(self.next_observation_TEO[last_B, env_B]),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The filled part of the arrays, by name."""
        there = min(self.written, len(self.action_TE))
        return {name: torch.from_numpy(array[:there]) for name, array in self._arrays().items()}

    def restore(self, tensors: dict[str, Tensor], written: int) -> None:
        """Load what `tensors` returned."""
        self.written = written
        for name, array in self._arrays().items():
            array[: len(tensors[name])] = tensors[name].numpy()

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: a for name, a in vars(self).items() if isinstance(a, np.ndarray)}
