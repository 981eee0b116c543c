"""Policy gradients: estimates against SB3 and loops, the clip table, the updates, learning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from torch import Tensor

from keel.algorithms.presets import PRESETS
from keel.config.control import load_control
from keel.control.learner import Collected, Experience, collect_episodes, collect_steps
from keel.control.networks import Moments
from keel.control.policy_gradient import FALLBACK_BUDGET, PolicyGradient
from keel.learn.batch import Estimates, TrainBatch
from keel.types import KeelError
from tests.control import stages, worlds
from tests.control.worlds import Floats, Step

REFUSED = {"remax", "grpo_process", "opd", "gdpo", "otb", "real", "chord", "online_dpo"}
REFUSED |= {"gigpo", "mt_grpo", "turn_ppo", "rae", "gkd", "iw_opd", "sdft"}


@contextmanager
def learner(
    algorithm: str = "ppo", *overrides: str, name: str = "CartPole-v1", seed: int = 3
) -> Iterator[PolicyGradient]:
    pg = PolicyGradient(stages.policy_gradient(algorithm, name, *overrides), seed)
    try:
        yield pg
    finally:
        pg.environments.close()


def shake(pg: PolicyGradient, seed: int = 1, size: float = 0.5) -> None:
    """Weights far from where they were, so that no two actions or states are alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        pg.trained.vector.add_(torch.randn(pg.trained.vector.shape, generator=generator) * size)


def mostly_right(observation: Floats) -> int:
    """On CartPole: some episodes fall within 10 steps, others are cut off there, some are both."""
    return int(int(abs(float(observation[2])) * 1e4) % 4 != 0)


def all_mostly_right(observation_EO: Floats) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array([mostly_right(row) for row in observation_EO])


def iteration(
    pg: PolicyGradient, number: int = 1
) -> tuple[Experience, Estimates, dict[str, float]]:
    """`iterate`, with the experience and the estimates that it trained on."""
    caught: list[tuple[Experience, Estimates]] = []
    estimate = pg.estimate

    def spy(collected: Collected) -> tuple[Experience, Estimates]:
        caught.append(estimate(collected))
        return caught[-1]

    pg.estimate = spy  # type: ignore[method-assign]
    metrics = pg.iterate(number)
    pg.estimate = estimate  # type: ignore[method-assign]
    return *caught[0], metrics


def recorded_updates(pg: PolicyGradient) -> list[TrainBatch[Experience]]:
    """The parts that the learner will update on, as it does."""
    parts: list[TrainBatch[Experience]] = []
    update = pg._update

    def spy(part: TrainBatch[Experience], rate: float) -> dict[str, float]:
        parts.append(part)
        return update(part, rate)

    pg._update = spy  # type: ignore[method-assign]
    return parts


# ---------------------------------------------------------------- estimates


def of_sb3(
    pg: PolicyGradient, rows: list[list[Step]], before: list[Step] | None
) -> dict[tuple[int, int], tuple[float, float]]:
    """SB3's advantage and return of each (episode, time) of an iteration's rows."""
    choice: Any = pg.stage.algorithm.advantage
    count = len(rows[0])
    env = gym.make("CartPole-v1")
    buffer = RolloutBuffer(
        len(rows), env.observation_space, env.action_space, "cpu", choice.lam, choice.gamma, count
    )
    env.close()
    assert pg.critic is not None

    def values(observations: list[Floats]) -> Tensor:
        assert pg.critic is not None
        with torch.no_grad():
            out: Tensor = pg.critic(torch.from_numpy(np.array(observations))).squeeze(-1)
        return out

    starts = np.array([before is None or before[e].ended for e in range(count)])
    for row in rows:
        after = values([s.after for s in row]).numpy()
        # Its convention: what lies after a time limit is part of the reward.
        cut = np.array([s.truncated and not s.terminated for s in row])
        reward = np.array([s.reward for s in row]) + choice.gamma * after * cut
        buffer.add(
            np.array([s.observation for s in row]),
            np.array([s.action for s in row]),
            reward,
            starts,
            values([s.observation for s in row]),
            torch.zeros(count),
        )
        starts = np.array([s.ended for s in row])
    buffer.compute_returns_and_advantage(values([s.after for s in rows[-1]]), starts)
    return {
        (step.episode, t): (float(buffer.advantages[t, e]), float(buffer.returns[t, e]))
        for t, row in enumerate(rows)
        for e, step in enumerate(row)
    }


@pytest.mark.parametrize("lam", [0.0, 0.8, 1.0])
def test_advantages_and_returns_are_stable_baselines(lam: float) -> None:
    settings = (f"algorithm.advantage.lam={lam}", "environment.count=3")
    iterations, limit = (7, 1, 40), 10
    rows = worlds.plain_steps(
        "CartPole-v1", 5, 3, sum(iterations), mostly_right, max_episode_steps=limit
    )
    flat = list(chain.from_iterable(rows))
    assert sum(s.terminated and not s.truncated for s in flat) > 0
    assert sum(s.truncated and not s.terminated for s in flat) > 3
    assert sum(s.truncated and s.terminated for s in flat) > 3
    with learner("ppo", *settings, f"environment.options.max_episode_steps={limit}") as pg:
        shake(pg)
        pg.environments.seed = 5
        done = 0
        for times in iterations:
            collected = collect_steps(pg.environments, all_mostly_right, times)
            _, estimates = pg.estimate(collected)
            wanted = of_sb3(pg, rows[done : done + times], rows[done - 1] if done else None)
            advantage, returned = zip(*(wanted[key] for key in sorted(wanted)), strict=True)
            assert np.std(advantage) > 0.1
            # float32 on both sides, sums of up to 10 numbers up to 10.
            np.testing.assert_allclose(estimates.advantage_N, advantage, rtol=0, atol=2e-5)
            np.testing.assert_allclose(estimates.return_N, returned, rtol=0, atol=2e-5)
            done += times


def test_group_advantages_compare_episodes_of_one_start() -> None:
    with learner("grpo", "environment.count=4", "group_size=4", "rollout_episodes=8") as pg:
        collected = collect_episodes(pg.environments, worlds.choose_all, 8)
        experience, estimates = pg.estimate(collected)
        # Actions follow from the observation alone, so that a group's episodes are one and the
        # same: there is nothing to compare.
        assert not estimates.advantage_N.any()
        experience, estimates, _ = iteration(pg, 2)
    assert experience.groups_S.tolist() == [2] * 4 + [3] * 4
    first_S = np.cumsum(experience.lengths) - np.array(experience.lengths)
    starts = experience.observation_NO[first_S]
    assert torch.equal(starts[:4], starts[:1].expand(4, -1))
    assert not torch.equal(starts[0], starts[4])
    advantage_S = estimates.advantage_N[first_S].double().numpy()
    for group in (slice(0, 4), slice(4, 8)):
        returns = np.array(experience.lengths[group], dtype=float)  # CartPole pays 1 a step
        wanted = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(advantage_S[group], wanted, rtol=1e-5)


# ---------------------------------------------------------------- updates


@pytest.mark.parametrize("minibatches", [1, 3])
def test_no_step_is_taken_past_the_target_kl(minibatches: int) -> None:
    settings = (
        *("epochs=6", f"minibatches={minibatches}"),
        *("optimizer.learning_rate=0.01", "optimizer.max_grad_norm=none"),
    )

    def run(*more: str) -> tuple[list[tuple[float, bool]], dict[str, float]]:
        """Each update's KL before it, and whether it moved the weights; the metrics."""
        with learner("ppo", *settings, *more) as pg:
            seen: list[tuple[float, bool]] = []
            update = pg._update

            def spy(part: TrainBatch[Experience], rate: float) -> dict[str, float]:
                before = pg.trained.vector.detach().clone()
                metrics = update(part, rate)
                moved = not torch.equal(before, pg.trained.vector)
                seen.append((metrics["kl/old"], moved))
                return metrics

            pg._update = spy  # type: ignore[method-assign]
            return seen, pg.iterate(1)

    free, metrics = run()
    assert len(free) == metrics["updates"] == 6 * minibatches
    assert all(moved for _, moved in free)
    limit = 0.003
    stopped, metrics = run(f"target_kl={limit}")
    taken = len(stopped) - 1
    assert 1 <= taken < len(free) - 1
    assert metrics["updates"] == taken
    assert all(kl <= limit and moved for kl, moved in stopped[:-1])
    last, moved = stopped[-1]
    assert last > limit
    assert not moved
    assert stopped[:-1] == free[:taken]  # until then nothing differs
    assert last == free[taken][0]


@pytest.mark.parametrize(("algorithm", "minibatches"), [("ppo", 4), ("reinforce_pp", 1)])
def test_whitening_is_over_each_minibatch(algorithm: str, minibatches: int) -> None:
    with learner(algorithm, f"minibatches={minibatches}", "epochs=2") as pg:
        parts = recorded_updates(pg)
        experience, estimates, _ = iteration(pg)
    assert len(parts) == 2 * minibatches
    places = {row.numpy().tobytes(): n for n, row in enumerate(experience.observation_NO)}
    assert len(places) == len(experience.action_N)
    for part in parts:
        at = [places[row.numpy().tobytes()] for row in part.actions.observation_NO]
        raw = estimates.advantage_N[at].double()
        assert abs(float(raw.mean())) + abs(float(raw.std()) - 1) > 1e-2  # not white before
        wanted = (raw - raw.mean()) / raw.std()
        # float32, numbers up to 4.
        torch.testing.assert_close(part.advantage_N.double(), wanted, rtol=0, atol=1e-5)
        assert float(part.weight_N.sum()) == pytest.approx(1.0, abs=1e-5)
    for epoch in (parts[:minibatches], parts[minibatches:]):
        assert sum(len(part.actions.action_N) for part in epoch) == len(experience.action_N)


def test_constant_weights_have_the_longest_episode_for_budget() -> None:
    for name, budget in (("CartPole-v1", 500), (worlds.BANDIT, FALLBACK_BUDGET)):
        with learner("dr_grpo", name=name) as pg:
            parts = recorded_updates(pg)
            pg.iterate(1)
        (part,) = parts
        np.testing.assert_allclose(part.weight_N, 1 / (8 * budget), rtol=1e-6)


# ---------------------------------------------------------------- β that moves


def log_probs(actor: Any, experience: Experience) -> Tensor:
    with torch.no_grad():
        logits = actor(experience.observation_NO)
    out: Tensor = torch.distributions.Categorical(logits=logits).log_prob(experience.action_N)
    return out.double()


def test_beta_follows_ppos_rule_by_the_kl_after_updates() -> None:
    adaptive = "algorithm.divergence.adaptive.target=1e-4"
    with learner("ppo_kl_penalty", "optimizer.learning_rate=0.01", "minibatches=2", adaptive) as pg:
        experience, _, metrics = iteration(pg)
        assert experience.old_log_prob_N is not None
        d = log_probs(pg.actor, experience) - experience.old_log_prob_N
        kl = float((d.exp() - 1 - d).mean())  # KL(old‖π), from the old policy's actions
        assert kl > 2e-4
        # float32 log-probabilities, rounded to 1e-7, of a KL of 1e-3.
        assert metrics["kl/after"] == pytest.approx(kl, rel=1e-2)
        assert metrics["beta"] == pg.beta == pg.facts()["beta"] == 2.0


def test_beta_follows_zieglers_rule_by_the_policy_that_acted() -> None:
    adaptive = "adaptive={rule='ziegler',target=0.01,horizon=50.0}"
    divergence = f"{{to='reference',where='loss',estimator='k3',beta=0.1,{adaptive}}}"
    with learner("grpo", f"algorithm.divergence={divergence}") as pg:
        shake(pg, seed=2)  # away from the reference
        assert pg.reference is not None
        acted = deepcopy(pg.actor)
        experience, _, metrics = iteration(pg)
        d = log_probs(acted, experience) - log_probs(pg.reference, experience)
        kl = float(d.sum()) / 8
        assert metrics["kl/sequence"] == pytest.approx(kl, rel=1e-4)  # float32, sums of 200
        assert kl > 0.012
        assert pg.beta == pytest.approx(0.1 * (1 + 0.2 * 8 / 50), rel=1e-5)


def test_the_reference_stands_still_until_it_is_reset() -> None:
    divergence = "algorithm.divergence={to='reference',where='loss',estimator='full',beta=0.1}"
    with learner("ppo", divergence, "reference.reset_every=3", "epochs=1") as pg:
        assert pg.reference is not None
        first = pg.actor.state_dict()["network.0.weight"].clone()
        for number in (1, 2, 3, 4):
            metrics = pg.iterate(number)
            assert (metrics["kl"] > 1e-9) == (number in (2, 3))  # at 1 and 4 they are the same
            now = pg.reference.state_dict()["network.0.weight"]
            assert torch.equal(now, first) == (number < 3)


# ---------------------------------------------------------------- statistics


def test_statistics_are_of_all_iterations_and_normalise_the_next() -> None:
    on = ("normalisation.observations=true", "normalisation.rewards=true")
    with learner("ppo", *on, "environment.count=3", name=worlds.COUNTER) as pg:
        wanted, totals = Moments(2), {}
        collect, seen = pg._collect, list[Collected]()
        pg._collect = lambda choose: seen.append(collect(choose)) or seen[-1]  # type: ignore
        returns: list[float] = []
        gamma = pg.stage.algorithm.advantage.gamma  # type: ignore[union-attr]
        for number in (1, 2, 3):
            before = deepcopy(pg.observation_moments)
            experience, _, _ = iteration(pg, number)
            collected = seen[-1]
            normal = before.normal(collected.observation_NO)
            np.testing.assert_array_equal(experience.observation_NO, normal)
            signals = pg.signals(experience, collected)  # with the statistics brought up to date
            reward = pg.return_moments.scaled(collected.reward_N)
            np.testing.assert_array_equal(signals.reward_N, reward)
            # What lies after is seen in the same way.
            last_S = np.cumsum(collected.lengths) - 1
            assert pg.critic is not None
            assert signals.next_value_N is not None
            after = torch.from_numpy(pg.observation_moments.normal(collected.last_state_SO))
            with torch.no_grad():
                last_state_S = pg.critic(after)
            last_state_S[torch.from_numpy(collected.terminated_S)] = 0
            assert torch.equal(signals.next_value_N[last_S], last_state_S.squeeze(-1))
            wanted.add(collected.observation_NO)
            parts = np.split(collected.reward_N, last_S[:-1] + 1)
            for episode, part in zip(collected.episode_S.tolist(), parts, strict=True):
                for reward_now in part:
                    totals[episode] = reward_now + gamma * totals.get(episode, 0.0)
                    returns.append(totals[episode])
    np.testing.assert_array_equal(pg.observation_moments.running.mean, wanted.running.mean)
    # float64, hundreds of numbers up to 20.
    running = pg.return_moments.running
    np.testing.assert_allclose(running.mean, [np.mean(returns)], rtol=1e-12)
    np.testing.assert_allclose(running.var, [np.var(returns)], rtol=1e-12)


def with_state(reward_S: Tensor, state: dict[str, float]) -> tuple[Tensor, dict[str, float]]:
    return reward_S, {"mean": float(reward_S.mean())}


def test_state_of_an_advantage_is_refused() -> None:
    own = f"algorithm.advantage={{kind='custom', function='{__name__}:with_state'}}"
    with learner("reinforce", own) as pg, pytest.raises(KeelError, match="has no state"):
        pg.iterate(1)


# ---------------------------------------------------------------- every preset


@pytest.mark.parametrize("name", sorted(set(PRESETS) - REFUSED))
def test_presets_run_on_cartpole(name: str) -> None:
    small = ("steps=4000", "rollout_steps=24", "network.hidden=[8]", "minibatches=2")
    recipe = load_control(name, "CartPole-v1", [*small, "environment.count=8"])
    pg = PolicyGradient(recipe.stage, 3)  # type: ignore[arg-type]
    with closing(pg.environments):
        before = pg.trained.vector.detach().clone()
        for number in (1, 2):
            taken = pg.steps
            metrics = pg.iterate(number)
            assert pg.steps > taken
            assert all(np.isfinite(value) for value in metrics.values())
            assert metrics["updates"] == 2 * pg.stage.epochs
            assert not torch.equal(pg.trained.vector, before)
            before = pg.trained.vector.detach().clone()


# ---------------------------------------------------------------- it learns

VALUE_BASELINE = ("algorithm.advantage.baseline=value", "algorithm.value.coefficient=1.0")
GAE_OF_PPO = ("epochs=2", "minibatches=2", "rollout_steps=4")


@pytest.mark.quick(
    "reinforce-settings4--1.0",
    "reinforce-settings5-1.0",
    "reinforce-settings5--1.0",
    "reinforce-settings4-1.0",
)
@pytest.mark.parametrize("pay", [1.0, -1.0])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("grpo", ()),
        ("dr_grpo", ()),
        ("rloo", ()),
        ("cispo", ()),
        ("reinforce", ()),
        ("reinforce", VALUE_BASELINE),
        ("ppo", GAE_OF_PPO),
    ],
)
def test_it_learns_which_arm_pays(algorithm: str, settings: tuple[str, ...], pay: float) -> None:
    """From near one half; `constant` weights divide by the budget, which Adam does not mind."""
    more = ("environment.count=8", "optimizer.learning_rate=0.03", "optimizer.max_grad_norm=none")
    with learner(
        algorithm, *settings, *more, f"environment.options.pay={pay}", name=worlds.BANDIT
    ) as pg:

        def probability() -> float:
            with torch.no_grad():
                return float(torch.softmax(pg.actor(torch.ones(1, 1)), -1)[0, -1])

        assert 0.4 < probability() < 0.6
        for number in range(1, 21):
            pg.iterate(number)
        if pay > 0:
            assert probability() > 0.9
        else:
            assert probability() < 0.1


def test_greedy_action_is_the_likeliest_of_normalised_observations() -> None:
    with learner("ppo", "normalisation.observations=true") as pg:
        shake(pg)
        pg.iterate(1)
        x = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
        with torch.no_grad():
            seen, raw = (
                pg.actor(torch.from_numpy(array)).argmax(-1).tolist()
                for array in (pg.observation_moments.normal(x), x)
            )
        assert pg.greedy()(x).tolist() == seen != raw
