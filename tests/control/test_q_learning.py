"""Q-learning: how it explores, when it learns, what from, and towards what; also against SB3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import stable_baselines3.dqn.dqn as sb3_dqn
import torch
from stable_baselines3.common.logger import Logger
from torch import Tensor

from keel.config.control import Exploration
from keel.control.q_learning import LOSSES, QLearning, Replay, Transitions
from keel.objective import background
from tests.control import stages, worlds
from tests.control.test_environments import false_ones


@contextmanager
def learner(*overrides: str, name: str = "CartPole-v1", seed: int = 3) -> Iterator[QLearning]:
    q = QLearning(stages.q_learning(name, *overrides), seed)
    try:
        yield q
    finally:
        q.environments.close()


def weights(network: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in network.parameters()]).clone()


def shake(network: torch.nn.Module, seed: int, size: float = 0.5) -> None:
    """Weights far from where they were."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * size)


# ---------------------------------------------------------------- exploring


def test_epsilon_falls_in_a_line() -> None:
    choice = Exploration(initial=0.9, final=0.1, share=0.5)
    wanted = {0: 0.9, 25: 0.5, 50: 0.1, 51: 0.1, 100: 0.1}
    assert {s: choice.epsilon(s, 100) for s in wanted} == pytest.approx(wanted, abs=1e-12)
    at_once = Exploration(initial=0.9, final=0.1, share=0.0)
    assert [at_once.epsilon(s, 100) for s in (0, 1)] == pytest.approx([0.9, 0.1], abs=1e-12)


def test_epsilon_is_one_before_the_first_update() -> None:
    with learner("exploration.initial=0.5", "exploration.final=0.0", "steps=200") as q:
        calls: list[int] = []
        best = q._best

        def spy(observation_EO: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
            calls.append(q.steps)
            return best(observation_EO)

        q._best = spy  # type: ignore[method-assign]
        metrics = [q.iterate(number) for number in range(1, 6)]
    assert calls
    assert min(calls) >= 20  # steps taken before the action: none of the first 20 asks the network
    # After 40, 80, 120 … of 200 steps; it has fallen by half of them.
    wanted = [0.5 * 0.6, 0.5 * 0.2, 0, 0, 0]
    assert [m["epsilon"] for m in metrics] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_actions_have_the_frequencies_of_epsilon_greedy(epsilon: float) -> None:
    fixed = (f"exploration.initial={epsilon}", f"exploration.final={epsilon}")
    never = ("replay.warmup=0", "update_every=1_000_000", "replay.capacity=8000")
    options = ("environment.options.arms=4", "environment.count=16")
    steps = ("steps=8000", "row_every=8000")
    with learner(*fixed, *never, *options, *steps, name=worlds.BANDIT) as q:
        shake(q.online, 1)
        q.iterate(1)
        taken = q.replay.action_TE.reshape(-1)
        with torch.no_grad():
            probability = background.epsilon_greedy(q.online(torch.ones(1, 1)), epsilon=epsilon)
    counts = np.bincount(taken, minlength=4)
    wanted = probability[0].double().numpy() * 8000
    assert counts.sum() == 8000
    possible = wanted > 0
    assert not counts[~possible].any()
    chi_square = ((counts - wanted)[possible] ** 2 / wanted[possible]).sum()
    assert chi_square < 16.27  # the 0.999 quantile for 3 degrees of freedom


# ---------------------------------------------------------------- the memory


def test_every_stored_transition_is_of_an_environment() -> None:
    with learner(
        "replay.warmup=599", "replay.capacity=600", "environment.count=3", name=worlds.COUNTER
    ) as q:
        for number in range(1, 4):
            q.iterate(number)
        replay = q.replay
        t = replay.written
        assert t * 3 == q.steps == 126
        before, after = replay.observation_TEO[:t], replay.next_observation_TEO[:t]
        assert replay.ended_TE[:t].sum() > 20
        assert false_ones(before.reshape(-1, 2), after.reshape(-1, 2)) == 0
        # Rewards are those of their state and action.
        np.testing.assert_array_equal(
            replay.reward_TE[:t], after[..., 1] + 0.125 * replay.action_TE[:t]
        )
        # The mark says how an episode of it ends (see Counter).
        marks = after[..., 0].astype(np.int64)
        ends = after[..., 1] == 1 + marks % 5
        np.testing.assert_array_equal(replay.ended_TE[:t], ends)
        np.testing.assert_array_equal(replay.terminated_TE[:t], ends & (marks // 5 % 2 == 0))


# ---------------------------------------------------------------- when it learns


@pytest.mark.parametrize(
    ("count", "every", "updates", "warmup"),
    [(1, 4, 2, 22), (3, 4, 1, 20), (1, 1, 1, 0)],
)
def test_updates_come_when_they_are_due(count: int, every: int, updates: int, warmup: int) -> None:
    settings = (f"environment.count={count}", f"update_every={every}", f"updates={updates}")
    with learner(*settings, f"replay.warmup={warmup}", "steps=120") as q:
        at: list[int] = []
        update = q._update

        def spy(rng: np.random.Generator) -> npt.NDArray[np.float64]:
            at.append(q.steps)
            return update(rng)

        q._update = spy  # type: ignore[method-assign]
        metrics = [q.iterate(number) for number in range(1, 4)]
    wanted = []
    for steps in range(count, q.steps + 1, count):
        multiples = sum(s % every == 0 for s in range(steps - count + 1, steps + 1))
        if steps >= warmup:
            wanted += [steps] * updates * multiples
    assert at == wanted
    assert len(at) > 10
    assert sum(m["updates"] for m in metrics) == len(at)
    assert q.steps == 120


def test_the_last_row_takes_what_is_left() -> None:
    with learner("steps=100") as q:
        steps = []
        for number in (1, 2, 3):
            q.iterate(number)
            steps.append(q.steps)
    assert steps == [40, 80, 100]


@pytest.mark.parametrize(("count", "every"), [(1, 5), (3, 5), (1, 1)])
def test_hard_copy_is_bitwise_and_periodic(count: int, every: int) -> None:
    settings = (f"environment.count={count}", f"target.every={every}", "row_every=1")
    with learner(*settings, "replay.warmup=10", "update_every=1", "target.rate=1.0") as q:
        assert torch.equal(weights(q.target), weights(q.online))
        moved, held = 0, weights(q.target)
        for number in range(1, 40):
            q.iterate(number)
            assert q.steps == number * count
            if any(s % every == 0 for s in range(q.steps - count + 1, q.steps + 1)):
                assert torch.equal(weights(q.target), weights(q.online))
                moved += not torch.equal(weights(q.target), held)
                held = weights(q.target)
            else:
                assert torch.equal(weights(q.target), held)
                assert q.steps < 10 or not torch.equal(weights(q.online), held)
    assert moved > 4


def test_polyak_moves_by_its_rate() -> None:
    with learner("target.rate=0.25", "target.every=1", "row_every=1", "update_every=1") as q:
        shake(q.online, 1)
        for number in range(1, 25):
            held = weights(q.target)
            q.iterate(number)
            wanted = 0.75 * held.double() + 0.25 * weights(q.online).double()
            # One rounding of float32, of numbers up to 2.
            torch.testing.assert_close(weights(q.target).double(), wanted, rtol=0, atol=3e-7)
            assert not torch.equal(weights(q.target), held)


# ---------------------------------------------------------------- towards what


def played(q: QLearning, rows: int = 4) -> None:
    """Fill the memory, and take the two networks apart."""
    for number in range(1, rows + 1):
        q.iterate(number)
    shake(q.online, 1)
    shake(q.target, 2)


SHORT_EPISODES = ("environment.options.max_episode_steps=20", "replay.warmup=599")


@pytest.mark.parametrize(("double", "n_step"), [(True, 1), (False, 3), (True, 3)])
def test_targets_are_those_of_a_loop(double: bool, n_step: int) -> None:
    settings = (f"double={str(double).lower()}", f"n_step={n_step}", "gamma=0.9")
    with learner(*settings, *SHORT_EPISODES) as q:
        played(q)
        drawn = q.replay.sample(200, n_step, np.random.default_rng(0))
        ended, terminated = q.replay.ended_TE[:160], q.replay.terminated_TE[:160]
        assert terminated.sum() > 2
        assert (ended & ~terminated).sum() > 2
        found = q.targets(drawn)
        with torch.no_grad():
            online, target = (
                q.online(drawn.next_observation_BO),
                q.target(drawn.next_observation_BO),
            )
    assert not found.requires_grad
    chosen = online if double else target
    value = torch.stack([row[best] for row, best in zip(target, chosen.argmax(-1), strict=True)])
    assert (online.argmax(-1) != target.argmax(-1)).float().mean() > 0.05  # double differs
    assert set(drawn.steps_B.tolist()) == set(range(1, n_step + 1))
    for b in range(200):
        total, alive = 0.0, True
        for k in range(int(drawn.steps_B[b])):
            total += 0.9**k * float(drawn.reward_BK[b, k])
            alive = alive and not bool(drawn.terminated_BK[b, k])
        total += 0.9 ** int(drawn.steps_B[b]) * float(value[b]) * alive
        assert float(found[b]) == pytest.approx(total, abs=1e-5)  # float32 of numbers up to 10


# ---------------------------------------------------------------- against stable-baselines3


class InOrder:
    """Draws every transition once, in order."""

    def integers(self, low: int, high: int, size: int) -> npt.NDArray[np.int64]:
        assert (low, high) == (0, size)
        return np.arange(size)


def both_memories(q: QLearning, model: sb3_dqn.DQN, times: int) -> Transitions:
    """The same steps into either memory; ours, all of it in order."""
    rng = np.random.default_rng(2)
    rows = worlds.plain_steps(
        # Mostly to one side, so that some fall before they are cut off.
        "CartPole-v1",
        0,
        1,
        times,
        lambda _: int(rng.random() < 0.8),
        max_episode_steps=12,
    )
    assert model.replay_buffer is not None
    for t, (step,) in enumerate(rows):
        before, after = step.observation[None], step.after[None]
        action, reward = np.array([step.action]), np.array([float(t % 4)])
        ends = np.array([step.terminated]), np.array([step.truncated])
        q.replay.add(before, action, reward, *ends, after)
        info = {"TimeLimit.truncated": step.truncated and not step.terminated}
        done = np.array([step.ended])
        model.replay_buffer.add(before, after, action, reward, done, [info])
    assert sum(step.terminated for (step,) in rows) > 3
    assert sum(step.truncated and not step.terminated for (step,) in rows) > 3
    return q.replay.sample(times, 1, InOrder())  # type: ignore[arg-type]


def test_targets_loss_and_gradient_are_stable_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `train`, on its own buffer, with these weights; what it computes is caught there."""
    times = 200
    env = gym.make("CartPole-v1")
    model = sb3_dqn.DQN(
        "MlpPolicy",
        env,
        gamma=0.9,
        buffer_size=times,
        max_grad_norm=1e9,
        policy_kwargs={"net_arch": [8]},
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    caught: dict[str, Tensor] = {}

    def smooth_l1_loss(current: Tensor, target: Tensor) -> Tensor:
        caught.update(current=current.detach().squeeze(-1), target=target.squeeze(-1))
        caught["loss"] = torch.nn.functional.smooth_l1_loss(current, target)
        return caught["loss"]

    monkeypatch.setattr(sb3_dqn, "F", SimpleNamespace(smooth_l1_loss=smooth_l1_loss))
    plain = ("n_step=1", "double=false", "loss=huber", "gamma=0.9")
    with learner(*plain, f"replay.batch_size={times}") as q:
        shake(q.online, 1)
        shake(q.target, 2)
        model.q_net.q_net.load_state_dict(q.online.state_dict())
        model.q_net_target.q_net.load_state_dict(q.target.state_dict())
        drawn = both_memories(q, model, times)
        buffer: Any = model.replay_buffer
        sample = lambda size, env=None: buffer._get_samples(np.arange(size), env)  # noqa: E731
        monkeypatch.setattr(buffer, "sample", sample)
        model.train(gradient_steps=1, batch_size=times)
        target_B = q.targets(drawn)
        q_BA = q.online(drawn.observation_BO)
        error_B = background.q_error(q_BA, drawn.action_B, target_B)
        loss = LOSSES["huber"](error_B).mean()
        q.trained.backward(loss)
    env.close()
    # float32 on both sides, numbers up to 10.
    torch.testing.assert_close(target_B, caught["target"], rtol=0, atol=1e-5)
    torch.testing.assert_close(error_B + target_B, caught["current"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, caught["loss"], rtol=1e-6, atol=0)
    theirs = torch.cat([p.grad.reshape(-1) for p in model.q_net.parameters()])  # type: ignore[union-attr]
    assert q.trained.vector.grad is not None
    torch.testing.assert_close(q.trained.vector.grad, theirs, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- the memory, against a plain list


@dataclass(frozen=True)
class Stored:
    """One step of one environment; its number is its observation, and one more what comes after."""

    number: int
    action: int
    reward: float
    terminated: bool
    truncated: bool


def filled(
    times: int, count: int, capacity: int, *, end: float = 0.0, seed: int = 0
) -> tuple[Replay, list[list[Stored]]]:
    """A memory after so many times, and all that went in, a column an environment."""
    rng = np.random.default_rng(seed)
    replay = Replay(capacity, count, 1)
    columns: list[list[Stored]] = [[] for _ in range(count)]
    for t in range(times):
        rows = [
            Stored(
                number=1000 * e + 2 * t,
                action=int(rng.integers(4)),
                reward=float(rng.integers(1, 100)),
                terminated=bool(rng.random() < end / 2),
                truncated=bool(rng.random() < end / 2),
            )
            for e in range(count)
        ]
        for column, row in zip(columns, rows, strict=True):
            column.append(row)
        numbers = np.array([[row.number] for row in rows], dtype=np.float32)
        replay.add(
            numbers,
            np.array([row.action for row in rows]),
            np.array([row.reward for row in rows]),
            np.array([row.terminated for row in rows]),
            np.array([row.truncated for row in rows]),
            numbers + 1,
        )
    return replay, columns


def window(column: list[Stored], at: int, horizon: int) -> list[Stored]:
    """From a row on: up to `horizon` rows, no further than an end or the newest."""
    out: list[Stored] = []
    for row in column[at : at + horizon]:
        out.append(row)
        if row.terminated or row.truncated:
            break
    return out


# ---------------------------------------------------------------- what is there


def test_the_oldest_is_overwritten() -> None:
    replay, columns = filled(7, 2, 10)
    assert len(replay) == 10
    kept = sorted(row.number for column in columns for row in column[-5:])
    assert sorted(replay.observation_TEO.reshape(-1).tolist()) == kept
    assert len(filled(3, 2, 10)[0]) == 6
    # A capacity that is not a multiple of the environments is rounded down, never up.
    assert len(filled(9, 2, 11)[0]) == 10


@pytest.mark.parametrize(("times", "horizon"), [(3, 1), (13, 1), (13, 3)])
def test_draws_are_uniform_over_what_is_there(times: int, horizon: int) -> None:
    replay, columns = filled(times, 3, 15, end=0.3)
    there = sorted(row.number for column in columns for row in column[-5:])
    draws = 1000 * len(there)
    drawn = replay.sample(draws, horizon, np.random.default_rng(3))
    numbers, counts = np.unique(drawn.observation_BO[:, 0].numpy(), return_counts=True)
    assert numbers.tolist() == there
    chi_square = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    # The 0.999 quantiles for 8 and for 14 degrees of freedom.
    assert chi_square < {9: 26.12, 15: 36.12}[len(there)]


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("times", [1, 4, 6, 7, 9, 12, 26])  # not full, just full, wrapped
@pytest.mark.parametrize("horizon", [1, 2, 3, 6, 8])
def test_windows_are_those_of_a_plain_list(count: int, times: int, horizon: int) -> None:
    replay, columns = filled(times, count, 6 * count, end=0.25, seed=times)
    drawn = replay.sample(200, horizon, np.random.default_rng(times))
    seen: set[int] = set()
    for b in range(200):
        number = int(drawn.observation_BO[b, 0])
        seen.add(number)
        wanted = window(columns[number // 1000], number % 1000 // 2, horizon)
        steps = int(drawn.steps_B[b])
        assert steps == len(wanted)
        assert drawn.action_B[b] == wanted[0].action
        assert drawn.reward_BK[b, :steps].tolist() == [row.reward for row in wanted]
        terminated = [row.terminated for row in wanted]
        assert drawn.terminated_BK[b, :steps].tolist() == terminated
        assert drawn.next_observation_BO[b, 0] == wanted[-1].number + 1
    assert len(seen) == min(times, 6) * count  # every row was looked at
    assert drawn.reward_BK.shape == (200, horizon)


# ---------------------------------------------------------------- to the disk and back


def same(left: Transitions, right: Transitions) -> bool:
    pairs = ((getattr(left, f.name), getattr(right, f.name)) for f in fields(Transitions))
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("times", [3, 6, 17])
def test_what_is_restored_draws_the_same(times: int) -> None:
    replay, _ = filled(times, 2, 12, end=0.2)
    saved = {name: tensor.clone() for name, tensor in replay.tensors().items()}
    assert {len(tensor) for tensor in saved.values()} == {min(times, 6)}
    other = Replay(12, 2, 1)
    other.restore(saved, replay.written)
    assert len(other) == len(replay)
    for memory in (replay, other):  # and goes on alike
        more = np.array([[5000.0], [6000.0]], dtype=np.float32)
        no = np.array([False, False])
        memory.add(more, np.array([1, 2]), np.array([0.5, 0.25]), no, no, more + 1)
    for horizon in (1, 3):
        one, two = (m.sample(50, horizon, np.random.default_rng(9)) for m in (replay, other))
        assert same(one, two)
        assert not same(one, replay.sample(50, horizon, np.random.default_rng(10)))
