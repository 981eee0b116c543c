"""Policy gradients on environments, with the advantages and the loss of language models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from keel.algorithms.signals import RewardSignals
from keel.config.control import PolicyGradientStage
from keel.config.fields import derive
from keel.control.learner import (
    ChooseActions,
    Collected,
    ControlLearner,
    Experience,
    collect_episodes,
    collect_steps,
    episode_metrics,
    greedy,
    prefixed,
    sampling,
    tensor,
    within,
)
from keel.control.networks import Actor, Moments, build_actor, perceptron
from keel.learn.advantages import advantages, penalties, returns
from keel.learn.batch import Estimates, TrainBatch
from keel.learn.loss import (
    adapted_beta,
    adapted_bonus,
    loss,
    prepare,
    value_metrics,
    whole_batch,
    with_bonus,
)
from keel.learn.optimizer import stop_unless_finite
from keel.models.head import Scores
from keel.objective import divergences, gae, segments
from keel.types import KeelError

FALLBACK_BUDGET = 1_000
"""C of `constant` weights, if neither the algorithm nor the environment gives a length."""


class PolicyGradient(ControlLearner[PolicyGradientStage]):
    """A policy and, if the algorithm needs them, a value network and a frozen reference."""

    def __init__(self, stage: PolicyGradientStage, seed: int) -> None:
        super().__init__(stage, seed, stage.group_size)
        algorithm = stage.algorithm
        size, network = self.environments.observation_size, stage.network
        self.actor = build_actor(
            size, self.environments.actions, network, stage.log_std, derive(seed, "actor")
        )
        self.critic: nn.Module | None = None
        if algorithm.value is not None:
            self.critic = perceptron(size, 1, network, 1.0, derive(seed, "critic"))
        self.reference: Actor | None = deepcopy(self.actor) if algorithm.needs_reference else None
        self.train(
            {"actor": self.actor, **({} if self.critic is None else {"critic": self.critic})}
        )
        self.observation_moments, self.return_moments = Moments(size), Moments(1)
        self.open_returns: dict[int, float] = {}
        """The discounted return so far of each episode that continues in the next iteration."""
        self.beta = 0.0 if algorithm.divergence is None else algorithm.divergence.beta
        self.bonus: Sequence[float] = ()

    def iterate(self, number: int) -> dict[str, float]:
        rng = np.random.default_rng(derive(self.seed, "actions", number))
        collected = self._collect(sampling(self.actor, self._normal, rng, self.environments.count))
        experience, estimates = self.estimate(collected)
        rate = self.rate
        metrics = self.update(experience, estimates, rate, number)
        self.steps += len(collected.reward_N)
        self._update_moments(collected)
        every = self.stage.reference.reset_every
        if self.reference is not None and every is not None and number % every == 0:
            self.reference = deepcopy(self.actor)
        return {
            **episode_metrics(collected.finished),
            **metrics,
            "learning_rate": rate,
            "beta": self.beta,
        }

    def greedy(self) -> ChooseActions:
        return greedy(self.actor, self._normal)

    # ---------------------------------------------------------------- estimates

    @torch.no_grad()
    def estimate(self, collected: Collected) -> tuple[Experience, Estimates]:
        """The experience, scored as the algorithm needs it, and the advantages of its actions."""
        algorithm, stage = self.stage.algorithm, self.stage
        observation_NO = tensor(self._normal(collected.observation_NO))
        action_N = tensor(collected.action_N)
        read = algorithm.divergence is not None or algorithm.corrections or algorithm.whole_batch
        many = stage.epochs * stage.minibatches > 1
        log_prob_N = (
            self.actor.evaluate_actions(observation_NO, action_N)[0] if many or read else None
        )
        experience = Experience(
            observation_NO=observation_NO,
            action_N=action_N,
            lengths=collected.lengths,
            groups=tuple((collected.episode_S // stage.group_size).tolist()),
            engine_log_prob_N=torch.zeros(len(action_N)) if log_prob_N is None else log_prob_N,
            old_log_prob_N=log_prob_N,
        )
        if self.reference is not None:
            reference_N = self.reference.evaluate_actions(observation_NO, action_N)[0]
            experience = replace(experience, reference_log_prob_N=reference_N)
        signals = self.signals(experience, collected)
        advantage_N, state = advantages(algorithm, signals)
        if state:
            raise KeelError("algorithm.advantage: on environments an advantage has no state")
        outcome_N = segments.spread(signals.outcome_S, signals.lengths_S)
        estimates = Estimates(
            advantage_N, returns(algorithm, signals, advantage_N), outcome_N=outcome_N
        )
        return replace(experience, value_N=signals.value_N), estimates

    def signals(self, experience: Experience, collected: Collected) -> RewardSignals:
        """The inputs of advantages. A truncated or interrupted episode bootstraps from V."""
        lengths_S = experience.lengths_S
        scaled_reward_N = tensor(self._scaled(collected.reward_N))
        penalty_N = penalties(self.stage.algorithm, experience, self.beta)
        reward_N = penalty_N + scaled_reward_N
        value_N = next_value_N = None
        if self.critic is not None:
            value_N = self.critic(experience.observation_NO).squeeze(-1)
            last_state_S = self.critic(tensor(self._normal(collected.last_state_SO))).squeeze(-1)
            last_state_S = last_state_S.masked_fill(torch.from_numpy(collected.terminated_S), 0.0)
            next_value_N = segments.shift(value_N, lengths_S)
            next_value_N[lengths_S.cumsum(0) - 1] = last_state_S
        return RewardSignals(
            outcome_S=segments.segment_sum(scaled_reward_N, lengths_S),
            penalty_N=penalty_N,
            reward_S=segments.segment_sum(reward_N, lengths_S),
            reward_N=reward_N,
            lengths_S=lengths_S,
            groups_S=experience.groups_S,
            value_N=value_N,
            next_value_N=next_value_N,
        )

    # ---------------------------------------------------------------- updates

    def update(
        self, experience: Experience, estimates: Estimates, rate: float, number: int
    ) -> dict[str, float]:
        """The iteration's optimizer steps, and the mean of their metrics."""
        stage, algorithm = self.stage, self.stage.algorithm
        rng = np.random.default_rng(derive(self.seed, "minibatches", number))
        budget = self.environments.max_episode_steps or FALLBACK_BUDGET
        taken: list[dict[str, float]] = []
        count, steps, stopped = stage.minibatches, algorithm.per_action, False
        for _ in range(stage.epochs):
            for part, estimated in experience.split(estimates, count, rng, steps=steps):
                drawn = derive(self.seed, "masks", number, len(taken))
                batch = prepare(algorithm, part, estimated, budget, seed=drawn)
                metrics = self._update(batch, rate)
                taken.append(metrics)
                stopped = "grad_norm" not in metrics
                if stopped:
                    break
            if stopped:
                break
        names = taken[0]
        mean = {n: float(np.mean([m[n] for m in taken if n in m])) for n in names}
        mean["updates"] = float(len(taken) - stopped)
        self._adapt(experience, mean)
        return {**mean, **value_metrics(experience, estimates)}

    def scores(self, part: Experience) -> Scores:
        """What the loss reads of the current networks, with gradients."""
        log_prob_N, entropy_N = self.actor.evaluate_actions(part.observation_NO, part.action_N)
        value_N = None if self.critic is None else self.critic(part.observation_NO).squeeze(-1)
        divergence = self.stage.algorithm.loss_divergence
        full_kl_N = None
        if divergence is not None and divergence.estimator == "full" and self.reference is not None:
            full_kl_N = self.actor.divergence(self.reference, part.observation_NO)
        return Scores(log_prob_N, entropy_N, value_N, full_kl_N)

    def _update(self, part: TrainBatch[Experience], rate: float) -> dict[str, float]:
        """One optimizer step; none (and no `grad_norm`) if the policy has moved too far."""
        algorithm, scores = self.stage.algorithm, self.scores(part.actions)
        if algorithm.whole_batch:
            part = whole_batch(algorithm, part, scores.log_prob_N.detach(), scores.entropy_N)
        made = loss(with_bonus(algorithm, self.bonus), part, scores, self.beta)
        metrics = dict(
            zip(made.metrics, torch.stack(list(made.metrics.values())).tolist(), strict=True)
        )
        stop_unless_finite(metrics)
        limit = self.stage.target_kl
        if limit is not None and metrics.get("kl/old", 0.0) > limit:
            return metrics
        self.trained.backward(made.total)
        metrics["grad_norm"] = self.optimizer.step(rate)
        stop_unless_finite(metrics)
        self.bonus = adapted_bonus(algorithm, self.bonus, metrics["entropy"])
        return metrics

    @torch.no_grad()
    def _adapt(self, experience: Experience, metrics: dict[str, float]) -> None:
        """β for the next iteration, if it is adaptive."""
        divergence = self.stage.algorithm.divergence
        if divergence is None or divergence.adaptive is None:
            return
        rule, old_N = divergence.adaptive, experience.old_log_prob_N
        assert old_N is not None
        if rule.rule == "ziegler":
            assert experience.reference_log_prob_N is not None
            k1_N = divergences.k1(old_N, experience.reference_log_prob_N)
            kl = metrics["kl/sequence"] = float(k1_N.sum()) / experience.sequences
        else:
            now_N = self.actor.evaluate_actions(experience.observation_NO, experience.action_N)[0]
            kl = metrics["kl/after"] = float(divergences.k3(old_N, now_N).mean())
        self.beta = adapted_beta(rule, self.beta, kl, experience.sequences)

    # ---------------------------------------------------------------- state

    def tensors(self) -> dict[str, Tensor]:
        out = super().tensors()
        if self.reference is not None:
            out |= prefixed("reference", self.reference.state_dict())
        for name, moments in self._moments().items():
            out[f"{name}/mean"] = torch.from_numpy(moments.running.mean)
            out[f"{name}/variance"] = torch.from_numpy(moments.running.var)
        return out

    def facts(self) -> dict[str, Any]:
        return {
            **super().facts(),
            "beta": self.beta,
            "bonus": list(self.bonus),
            **{name: moments.running.count for name, moments in self._moments().items()},
            "open_returns": [[n, value] for n, value in self.open_returns.items()],
        }

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().restore(tensors, facts)
        if self.reference is not None:
            self.reference.load_state_dict(within("reference", tensors))
        for name, moments in self._moments().items():
            moments.running.mean = tensors[f"{name}/mean"].numpy()
            moments.running.var = tensors[f"{name}/variance"].numpy()
            moments.running.count = facts[name]
        self.beta, self.bonus = facts["beta"], tuple(facts["bonus"])
        self.open_returns = {int(n): float(value) for n, value in facts["open_returns"]}

    def _moments(self) -> dict[str, Moments]:
        return {"seen": self.observation_moments, "earned": self.return_moments}

    # ---------------------------------------------------------------- details

    def _collect(self, choose: ChooseActions) -> Collected:
        if self.stage.algorithm.bootstraps:
            return collect_steps(self.environments, choose, self.stage.rollout_steps)
        return collect_episodes(self.environments, choose, self.stage.episodes)

    def _normal(self, observation: Any) -> Any:
        choice = self.stage.normalisation
        return self.observation_moments.normal(observation) if choice.observations else observation

    def _scaled(self, reward_N: Any) -> Any:
        return (
            self.return_moments.scaled(reward_N) if self.stage.normalisation.rewards else reward_N
        )

    def _update_moments(self, collected: Collected) -> None:
        """Bring the running statistics up to date with an iteration."""
        choice = self.stage.normalisation
        if choice.observations:
            self.observation_moments.add(collected.observation_NO)
        if choice.rewards:
            gamma = getattr(self.stage.algorithm.advantage, "gamma", 1.0)
            so_far_N = _discounted(collected, gamma, self.open_returns)
            self.return_moments.add(so_far_N[:, None])
            last_S = np.cumsum(collected.lengths) - 1
            ended = [episode.number for episode in collected.finished]
            on = ~np.isin(collected.episode_S, ended)
            pairs = zip(collected.episode_S[on], so_far_N[last_S[on]], strict=True)
            self.open_returns = {int(n): float(value) for n, value in pairs}


def _discounted(
    collected: Collected, gamma: float, carried: Mapping[int, float]
) -> npt.NDArray[np.float64]:
    """Σ_k γ^k r_{t−k} over each episode so far; `carried` from earlier iterations."""
    reward_N = collected.reward_N.copy()
    first_S = np.cumsum(collected.lengths) - np.array(collected.lengths)
    for at, number in zip(first_S, collected.episode_S, strict=True):
        reward_N[at] += gamma * carried.get(int(number), 0.0)
    backward_N = torch.from_numpy(reward_N[::-1].copy())
    lengths_S = torch.tensor(collected.lengths).flip(0)
    return gae.returns_to_go(backward_N, lengths_S, gamma=gamma).flip(0).numpy()
