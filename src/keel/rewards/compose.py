"""From the outputs of a completion's reward functions to one reward: clip, normalise, weigh, gate.

R_i = gated_reward_g                            where a gate g is shut: x_g < gate_below_g
    = Σ_k weight_k · normalise(clip(x_k))_i     else, over the components with a value
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keel.rewards.registry import NamedReward
from keel.rewards.validation import RewardOutput
from keel.types import KeelError, Step

EPSILON = 1e-4
"""Added to the standard deviation, as in group-relative advantages."""


@dataclass(frozen=True, slots=True)
class Composed:
    """The reward of one completion; None where no component of any weight has a value.

    `outcome` is the part that is of the whole answer; None where rewards gave steps alone.
    """

    reward: float | None
    steps: tuple[Step, ...] = ()
    outcome: float | None = None


def shut(gate: NamedReward, output: RewardOutput) -> bool:
    """Whether a gate lets a completion no further; one that says nothing is open."""
    return (
        gate.gate_below is not None and output.value is not None and output.value < gate.gate_below
    )


def compose(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, Sequence[RewardOutput]],
    groups: Sequence[int],
) -> list[Composed]:
    """The rewards of a step's completions; `groups` says which prompt each answers."""
    values = {f.name: _values(f, outputs[f.name], groups) for f in functions}
    return [_one(functions, outputs, values, at) for at in range(len(groups))]


def _one(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, Sequence[RewardOutput]],
    values: Mapping[str, Sequence[float | None]],
    at: int,
) -> Composed:
    for function in functions:
        if shut(function, outputs[function.name][at]):
            return Composed(function.gated_reward, outcome=function.gated_reward)
    weighed: list[float] = []
    outcomes: list[float] = []
    steps: dict[int, float] = {}
    for function in functions:
        value = values[function.name][at]
        if not function.weight or value is None:
            continue
        weighed.append(function.weight * value)
        of_steps = outputs[function.name][at].steps
        if of_steps is None:
            outcomes.append(weighed[-1])
        for step in of_steps or ():
            share = function.weight * _clipped(function, step.reward)
            steps[step.end] = steps.get(step.end, 0.0) + share
    if not weighed:
        return Composed(None)
    return Composed(
        float(sum(weighed)),
        tuple(Step(end, steps[end]) for end in sorted(steps)),
        float(sum(outcomes)) if outcomes else None,
    )


def _values(
    function: NamedReward, outputs: Sequence[RewardOutput], groups: Sequence[int]
) -> list[float | None]:
    """What a component's values are when they are weighed."""
    if function.normalise == "none":
        return [_clipped_output(function, one) for one in outputs]
    if any(one.steps is not None for one in outputs):
        raise KeelError(
            f'reward {function.name!r} speaks of steps, and normalise = "{function.normalise}" '
            "is of whole answers: drop it (process_group_relative normalises steps itself)"
        )
    clipped = [_clipped_output(function, one) for one in outputs]
    keys = list(groups) if function.normalise == "group" else [0] * len(outputs)
    found: list[float | None] = [None] * len(outputs)
    for key in dict.fromkeys(keys):
        places = [i for i, k in enumerate(keys) if k == key and clipped[i] is not None]
        for place, value in zip(places, _standard([clipped[i] for i in places]), strict=True):
            found[place] = value
    return found


def _standard(values: Sequence[float | None]) -> list[float]:
    """Less the mean, over the unbiased standard deviation; 0 where all are equal."""
    x = np.array(values, dtype=np.float64)
    if len(x) < 2 or x.max() == x.min():
        return [0.0] * len(x)
    scaled: list[float] = ((x - x.mean()) / (x.std(ddof=1) + EPSILON)).tolist()
    return scaled


def _clipped_output(function: NamedReward, output: RewardOutput) -> float | None:
    """A clipped value; of steps, the sum of the clipped ones, so that they add up to it."""
    if output.steps is not None:
        return sum(_clipped(function, step.reward) for step in output.steps)
    return None if output.value is None else _clipped(function, output.value)


def _clipped(function: NamedReward, value: float) -> float:
    if function.clip is None:
        return value
    return min(max(value, function.clip[0]), function.clip[1])
