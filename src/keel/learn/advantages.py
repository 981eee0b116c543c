"""From rewards to advantages and returns, and the user's own advantages and surrogates."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from keel.algorithms.advantages import CustomAdvantage
from keel.algorithms.corrections import CustomCorrection
from keel.algorithms.masks import CustomMask
from keel.algorithms.signals import RewardSignals
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import CustomSurrogate
from keel.config.entry import load_function
from keel.learn.batch import Actions, Estimates, out_of_memory, to_device
from keel.models.head import place_of_float64, widest
from keel.objective import segments
from keel.types import Group, KeelError, RewardResult, one_line

ADVANTAGE, SURROGATE = "algorithm.advantage", "algorithm.surrogate"
MASK, CORRECTION = "algorithm.masks", "algorithm.corrections"
SCORED = (
    *("engine_log_prob_N", "old_log_prob_N", "reference_log_prob_N", "teacher_log_prob_N"),
    *("old_entropy_N", "old_squares_N"),
)
CustomTerm = CustomAdvantage | CustomSurrogate | CustomMask | CustomCorrection


@dataclass(frozen=True, eq=False)
class RolloutRewards:
    """Rewards as tensors, in the order of the batch's sequences; NaN for a sequence without one.

    `baseline_S` is the reward of the greedy completion of each sequence's prompt; `components` are
    the single rewards by name, and `component_weights` what they are weighed with. Steps (K) are
    those of process rewards, with the outcomes as steps that end with the completion; they add up
    to `reward_S`. `step_end_K` counts from the start of the step's own sequence. `roles` are the
    names of the sequences' roles.
    """

    reward_S: Float[Tensor, " S"]
    baseline_S: Float[Tensor, " S"] | None = None
    components: Mapping[str, Float[Tensor, " S"]] = field(default_factory=dict)
    component_weights: Mapping[str, float] = field(default_factory=dict)
    step_reward_K: Float[Tensor, " K"] | None = None
    step_end_K: Int[Tensor, " K"] | None = None
    step_sequence_K: Int[Tensor, " K"] | None = None
    roles: Sequence[str] = ()


def outcome(
    groups: Sequence[Group],
    results: Sequence[Sequence[RewardResult]],
    greedy: Sequence[float] | None,
    weights: Mapping[str, float] | None = None,
    roles: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float64,
) -> RolloutRewards:
    """The groups' rewards, flat; their roles are the tasks unless they are given.

    The ends of steps count written tokens only; a completion without any has no steps. Where there
    are steps, the rest of the reward (an outcome, a length penalty) is a step that ends with the
    completion: for every completion of a group, 0 included, as soon as one of them has it.
    """
    rewards: list[float] = []
    steps: list[tuple[float, int, int]] = []
    outcomes: list[tuple[float, int, int]] = []
    for group, judged in zip(groups, results, strict=True):
        ends: list[tuple[float, int, int]] = []
        given = False
        for completion, result in zip(group.completions, judged, strict=True):
            written = completion.written.cumsum()
            place = len(rewards)
            rewards.append(_number(result.reward))
            if result.reward is None or not completion.written.any():
                continue
            steps += [(s.reward, max(int(written[s.end]) - 1, 0), place) for s in result.steps]
            given |= result.outcome is not None
            ends.append((result.outcome or 0.0, int(written[-1]) - 1, place))
        outcomes += ends if given else []
    baseline = None
    if greedy is not None:
        sizes = torch.tensor([len(group.completions) for group in groups])
        baseline = torch.tensor(list(greedy), dtype=dtype).repeat_interleave(sizes)
    found = RolloutRewards(
        torch.tensor(rewards, dtype=dtype),
        baseline,
        components={
            name: torch.tensor(
                [_number(one.components.get(name)) for judged in results for one in judged],
                dtype=dtype,
            )
            for name in weights or ()
        },
        component_weights=weights or {},
        roles=tuple(
            role
            for group, role in zip(groups, roles or [g.prompt.task for g in groups], strict=True)
            for _ in group.completions
        ),
    )
    if not steps:
        return found
    values, places, sequences = zip(*steps, *outcomes, strict=True)
    return replace(
        found,
        step_reward_K=torch.tensor(values, dtype=dtype),
        step_end_K=torch.tensor(places),
        step_sequence_K=torch.tensor(sequences),
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def check_steps(algorithm: Algorithm, there: bool) -> None:
    """Raise KeelError for rewards of steps that the algorithm cannot use, or needs and lacks."""
    kind = algorithm.advantage.kind
    if there and algorithm.needs_reward and not reads_steps(algorithm):
        raise KeelError(
            "rewards.functions gives rewards of steps, whose places would be lost, since "
            f'algorithm.advantage "{kind}" is of whole answers: set algorithm = '
            '"grpo_process" or "ppo", or give one number for each answer (of the reward "process" '
            'with the option aggregate = "min")'
        )
    if algorithm.needs_steps and not there:
        raise KeelError(
            "rewards.functions gives no rewards of steps, and "
            f'algorithm.advantage "{kind}" needs rewards of steps: name a process reward there '
            "(for each completion a list of (index of the step's last token, reward))"
        )


def estimate(
    algorithm: Algorithm,
    actions: Actions,
    judged: RolloutRewards | Sequence[float],
    beta: float = 0.0,
    state: Mapping[str, float] | None = None,
) -> Estimates:
    """Advantages and returns of actions that the models have scored; `beta` weighs a KL reward.

    `judged` are the rewards of the sequences, in order; NaN for one without. `state` is the
    advantage's.

    Raises KeelError if there are rewards of steps that the advantage cannot use.
    """
    own, device = actions.device, place_of_float64(actions.device)
    actions = actions if device == own else to_device(actions, device)
    lengths_S = actions.lengths_S
    if not isinstance(judged, RolloutRewards):
        judged = RolloutRewards(torch.tensor(list(judged), dtype=torch.float64))
    judged = _on(judged, device)
    if algorithm.needs_steps and judged.step_reward_K is None:
        judged = _as_steps(judged, lengths_S)
    check_steps(algorithm, judged.step_reward_K is not None)
    outcome_S = judged.reward_S
    unrewarded_S = outcome_S.isnan()
    penalty_N = penalties(algorithm, actions, beta).to(outcome_S)
    value_N, step_end_K = actions.value_N, judged.step_end_K
    if judged.step_reward_K is None or judged.step_sequence_K is None or step_end_K is None:
        placed_N = segments.on_last(outcome_S, lengths_S)
    else:
        step_end_K = step_end_K + (lengths_S.cumsum(0) - lengths_S)[judged.step_sequence_K]
        zero_S = torch.where(unrewarded_S, outcome_S, torch.zeros_like(outcome_S))
        placed_N = segments.on_last(zero_S, lengths_S)
        placed_N = placed_N.index_add(0, step_end_K, judged.step_reward_K)
    reward_N = penalty_N + placed_N
    scored = {
        name: None if value is None else value.to(outcome_S)
        for name in SCORED
        for value in (getattr(actions, name),)
    }
    signals = RewardSignals(
        outcome_S=outcome_S,
        penalty_N=penalty_N,
        reward_S=segments.segment_sum(reward_N, lengths_S),
        reward_N=reward_N,
        lengths_S=lengths_S,
        groups_S=actions.groups_S,
        value_N=value_N,
        next_value_N=None if value_N is None else segments.shift(value_N, lengths_S),
        turn_N=actions.turn_N,
        version_S=actions.version_S,
        baseline_S=judged.baseline_S,
        components=judged.components,
        component_weights=judged.component_weights,
        step_reward_K=judged.step_reward_K,
        step_sequence_K=judged.step_sequence_K,
        step_end_K=step_end_K,
        anchor_N=actions.anchor_N,
        roles=judged.roles,
        state=state or {},
        **scored,
    )
    advantage_N, after = advantages(algorithm, signals)
    rewarded_N = None
    if algorithm.needs_reward and bool(unrewarded_S.any()):
        rewarded_N = segments.spread((~unrewarded_S).to(advantage_N), lengths_S) > 0
    return_N = returns(algorithm, signals, advantage_N)
    return Estimates(
        widest(advantage_N, own),
        None if return_N is None else widest(return_N, own),
        None if rewarded_N is None else rewarded_N.to(own),
        widest(segments.spread(outcome_S, lengths_S), own),
        after,
    )


def advantages(
    algorithm: Algorithm, signals: RewardSignals
) -> tuple[Float[Tensor, " N"], Mapping[str, float]]:
    """A_n of every completion token, before whitening, and the advantage's state after the step."""
    choice = algorithm.advantage
    if isinstance(choice, CustomAdvantage):
        advantage, after = call_custom(ADVANTAGE, choice, signals.named()), signals.state
        if asks_for(algorithm, "state"):
            advantage, after = _with_state(choice, advantage)
    else:
        advantage, after = choice.value(signals), choice.next_state(signals)
    if advantage.shape == signals.reward_N.shape:
        return advantage, after
    if advantage.shape != signals.reward_S.shape:
        raise KeelError(
            f"algorithm.advantage: returned shape {tuple(advantage.shape)}, wanted one number a "
            f"sequence {tuple(signals.reward_S.shape)} or a token {tuple(signals.reward_N.shape)}"
        )
    return segments.spread(advantage, signals.lengths_S), after


def _with_state(choice: CustomAdvantage, given: Any) -> tuple[Tensor, Mapping[str, float]]:
    try:
        advantage, state = given
        return advantage, {str(name): float(value) for name, value in state.items()}
    except (AttributeError, TypeError, ValueError):
        raise KeelError(
            f"{ADVANTAGE}: {choice.function} names state: return (advantage, state after the step),"
            " the state a mapping of names to numbers"
        ) from None


def returns(
    algorithm: Algorithm, signals: RewardSignals, advantage_N: Tensor
) -> Float[Tensor, " N"] | None:
    """The value model's target, from advantages before whitening; None without a value model.

    A + V, with the critic's own λ where it has one; the return to go where the advantage is one
    number a sequence.
    """
    return None if signals.value_N is None else algorithm.advantage.returns(signals, advantage_N)


def penalties(algorithm: Algorithm, actions: Actions, beta: float) -> Float[Tensor, " N"]:
    """−β D on every token where the divergence is in the reward, else 0."""
    if algorithm.reward_divergence is None or actions.reference_log_prob_N is None:
        return torch.zeros_like(actions.engine_log_prob_N)
    assert actions.old_log_prob_N is not None
    estimate = algorithm.reward_divergence.estimate
    return -beta * estimate(actions.old_log_prob_N, actions.reference_log_prob_N)


def _as_steps(judged: RolloutRewards, lengths_S: Tensor) -> RolloutRewards:
    """Each reward as the one step of its completion, where no reward gave steps (a gate may have
    refused all completions)."""
    at = (~judged.reward_S.isnan() & (lengths_S > 0)).nonzero().flatten()
    return replace(
        judged,
        step_reward_K=judged.reward_S[at],
        step_end_K=lengths_S[at] - 1,
        step_sequence_K=at,
    )


def _on(judged: RolloutRewards, device: torch.device) -> RolloutRewards:
    every = {f.name: getattr(judged, f.name) for f in fields(judged)}
    tensors: dict[str, Any] = {n: x.to(device) for n, x in every.items() if isinstance(x, Tensor)}
    components = {name: one.to(device) for name, one in judged.components.items()}
    return replace(judged, components=components, **tensors)


# ---------------------------------------------------------------- the user's functions


def reads_steps(algorithm: Algorithm) -> bool:
    """Whether an algorithm's advantage uses where rewards of steps are given.

    A function of the user's does where it names `reward_N` or the steps.
    """
    if not isinstance(algorithm.advantage, CustomAdvantage):
        return algorithm.reads_steps
    return asks_for(algorithm, "reward_N") or asks_for(algorithm, "step_reward_K")


def asks_for(algorithm: Algorithm, name: str) -> bool:
    """Whether a user's own advantage names a signal."""
    if not isinstance(algorithm.advantage, CustomAdvantage):
        return False
    return (
        name in inspect.signature(load_function(algorithm.advantage.function, ADVANTAGE)).parameters
    )


def check_entries(algorithm: Algorithm) -> None:
    """Load the user's own functions. Raises KeelError for one that cannot be loaded."""
    for what, choices in (
        (ADVANTAGE, (algorithm.advantage,)),
        (SURROGATE, (algorithm.surrogate,)),
        (MASK, algorithm.masks),
        (CORRECTION, algorithm.corrections),
    ):
        for choice in choices:
            if isinstance(choice, CustomTerm):
                load_function(choice.function, what)


def call_custom(what: str, choice: CustomTerm, signals: Mapping[str, Any]) -> Tensor:
    """Call a user's function with its options and the signals that its parameters name.

    Raises KeelError for a parameter that is neither, and for whatever the function raises but a
    lack of memory, for which a smaller micro-batch may help.
    """
    function: Callable[..., Tensor] = load_function(choice.function, what)
    available = {**choice.options, **signals}
    try:
        parameters = inspect.signature(function).parameters
        missing = [n for n, p in parameters.items() if p.default is p.empty and n not in available]
        if missing:
            raise KeelError(
                f"{function.__module__}:{function.__name__} asks for {', '.join(missing)}: "
                f"there are {', '.join(sorted(available))}"
            )
        return function(**{name: available[name] for name in parameters if name in available})
    except KeelError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        message = one_line(error, named=True)
        raise KeelError(f"{what}: {choice.function} raised {message}") from error
