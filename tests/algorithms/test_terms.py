"""What holds of term classes: parameters and edges arrive; figures are read strictly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from keel.algorithms.presets import PRESETS
from keel.algorithms.signals import LossSignals
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import (
    Clip,
    CustomSurrogate,
    Fipo,
    Geometric,
    SurrogateTerm,
    Unclipped,
)
from keel.algorithms.weighted import Cispo

OTHER = {"low": 0.1, "high": 0.3, "dual": 1.5, "cap": 1.15, "floor": 0.9, "share": 0.5}
OTHER |= {"power_positive": 1.5, "rate_negative": 1.5}
"""Values other than the defaults; 2.0 for any other parameter."""
PARAMETERS = [
    (term, name)
    for term in SurrogateTerm.__subclasses__()
    if term is not CustomSurrogate
    for name in term.model_fields
    if name != "kind"
]


def values(term: SurrogateTerm) -> torch.Tensor:
    """s for log-ratios on both sides of every edge, under advantages of either sign."""
    log_ratio_N = torch.linspace(-2, 2, 41, dtype=torch.float64).repeat(2)
    advantage_N = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat_interleave(41)
    signals = LossSignals(
        lengths_S=torch.full((41,), 2),
        groups_S=torch.arange(41) // 7,
        outcome_S=torch.linspace(0.0, 3.0, 41, dtype=torch.float64),
        log_prob_N=log_ratio_N - 1,
        old_log_prob_N=torch.full_like(log_ratio_N, -1.0),
        reference_log_prob_N=torch.linspace(-1, 0, 82, dtype=torch.float64),
        log_ratio_N=log_ratio_N,
        advantage_N=advantage_N,
    )
    if term.whole_batch:
        signals = replace(signals, prepared_N=term.prepare(signals))
    return term.value(signals)


@pytest.mark.parametrize(("term", "name"), PARAMETERS, ids=lambda x: getattr(x, "__name__", x))
def test_surrogate_parameter_reaches_its_function(term: type[SurrogateTerm], name: str) -> None:
    changed: dict[str, Any] = {name: OTHER.get(name, 2.0)}
    assert not torch.equal(values(term(**changed)), values(term()))


@pytest.mark.parametrize(
    ("term", "edges"),
    [
        (Clip(low=0.1, high=0.3), (0.9, 1.3)),
        (Cispo(cap=3.0, floor=0.5), (0.5, 3.0)),
        (Geometric(low=0.2, high=0.5), (math.exp(-0.2), math.exp(0.5))),
        (Fipo(low=0.1, high=0.3), (0.9, 1.3)),
        (Unclipped(), (0.0, math.inf)),
    ],
    ids=lambda x: getattr(x, "kind", None),
)
def test_surrogate_edges(term: SurrogateTerm, edges: tuple[float, float]) -> None:
    assert term.edges == edges


@pytest.mark.parametrize("value", ["0.04", True, float("nan"), float("inf"), -0.1])
def test_a_figure_must_be_a_finite_number(value: object) -> None:
    data = PRESETS["grpo"].algorithm.model_dump()
    data["divergence"]["beta"] = value
    with pytest.raises(ValidationError, match=r"divergence\.beta"):
        Algorithm.model_validate(data)


def test_none_in_words_unsets_what_may_be_absent() -> None:
    data = PRESETS["ppo"].algorithm.model_dump()
    data["divergence"] = "none"
    assert Algorithm.model_validate(data).divergence is None
    data["value"]["clip"] = "none"
    value = Algorithm.model_validate(data).value
    assert value is not None
    assert value.clip is None
    with pytest.raises(ValidationError):
        Algorithm.model_validate({**data, "weights": "none"})
