"""One reward from the values of several functions.

R_i = gated_reward_g                            if a gate g rejects: x_g < gate_below_g
    = Σ_k weight_k · normalise(clip(x_k))_i     else, over the components with a value

and after it the length penalty of DAPO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from keel.rewards.registry import NamedReward
from keel.rewards.rules import overlong_penalty
from keel.rewards.validation import RewardOutput
from keel.types import Completion, KeelError, RewardResult, Step

EPSILON = 1e-4
"""Added to the standard deviation, as in group-relative advantages."""
OVERLONG = "overlong"
"""The component of the soft length penalty (DAPO)."""


def compose(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, Sequence[RewardOutput]],
    groups: Sequence[int],
) -> list[RewardResult]:
    """The results of a step's completions; `groups` is the number of each one's prompt."""
    values = {f.name: _values(f, outputs[f.name], groups) for f in functions}
    return [
        _result(
            functions,
            {f.name: outputs[f.name][at] for f in functions},
            {f.name: values[f.name][at] for f in functions},
        )
        for at in range(len(groups))
    ]


def with_length_penalty(
    result: RewardResult, completion: Completion, max_tokens: int, buffer: int
) -> RewardResult:
    """A result with the length penalty, unless it has no reward otherwise."""
    if result.reward is None:
        return replace(result, components={**result.components, OVERLONG: None})
    penalty = overlong_penalty(int(completion.written.sum()), max_tokens, buffer)
    return replace(
        result,
        reward=result.reward + penalty,
        components={**result.components, OVERLONG: penalty},
        outcome=(result.outcome or 0.0) + penalty if penalty else result.outcome,
    )


def _result(
    functions: Sequence[NamedReward],
    outputs: Mapping[str, RewardOutput],
    values: Mapping[str, float | None],
) -> RewardResult:
    """The result of one completion; `values` are clipped and normalised."""
    components = {name: output.value for name, output in outputs.items()}
    for function in functions:
        if function.gates(components[function.name]):
            gated = function.source.gated_reward
            return RewardResult(gated, components, outcome=gated, unshaped=gated)
    weighted: list[float] = []
    outcomes: list[float] = []
    steps: dict[int, float] = {}
    for function in functions:
        value, of_steps = values[function.name], outputs[function.name].steps
        weight = function.source.weight
        if not weight or value is None:
            continue
        weighted.append(weight * value)
        if of_steps is None:
            outcomes.append(weighted[-1])
        for step in of_steps or ():
            share = weight * function.clipped(step.reward)
            steps[step.end] = steps.get(step.end, 0.0) + share
    reward = float(sum(weighted)) if weighted else None
    return RewardResult(
        reward,
        components,
        tuple(Step(end, steps[end]) for end in sorted(steps)),
        float(sum(outcomes)) if outcomes else None,
        unshaped=reward,
    )


def _values(
    function: NamedReward, outputs: Sequence[RewardOutput], groups: Sequence[int]
) -> list[float | None]:
    """A component's values, clipped and normalised; of steps, the sum of the clipped ones."""
    normalise = function.source.normalise
    if normalise != "none" and any(one.steps is not None for one in outputs):
        raise KeelError(
            f'reward {function.name!r} rewards steps, and normalise = "{normalise}" '
            "is of whole answers: drop it (process_group_relative normalises steps itself)"
        )
    found: list[float | None] = []
    for one in outputs:
        if one.steps is not None:
            found.append(sum(function.clipped(step.reward) for step in one.steps))
        else:
            found.append(None if one.value is None else function.clipped(one.value))
    if normalise == "none":
        return found
    keys = groups if normalise == "group" else [0] * len(found)
    for key in set(keys):
        places = [at for at, k in enumerate(keys) if k == key and found[at] is not None]
        normal = _standardised(np.array([found[at] for at in places], dtype=np.float64))
        for at, value in zip(places, normal, strict=True):
            found[at] = value
    return found


def _standardised(x: npt.NDArray[np.float64]) -> list[float]:
    """Less the mean, over the unbiased standard deviation; 0 if all are equal."""
    if len(x) < 2 or x.max() == x.min():
        return [0.0] * len(x)
    scaled: list[float] = ((x - x.mean()) / (x.std(ddof=1) + EPSILON)).tolist()
    return scaled
