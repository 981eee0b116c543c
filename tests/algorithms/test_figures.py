"""Every figure of an algorithm stands in the formula that is printed for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from pydantic import ValidationError

from keel.algorithms.advantages import GAE
from keel.algorithms.explain import explain_algorithm
from keel.algorithms.spec import Algorithm
from keel.algorithms.terms import Setting
from tests.algorithms import samples
from tests.algorithms.test_explain import formulas, objective


def leaves(data: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from leaves(value, (*path, key))
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield path, data


def changed(algorithm: Algorithm, path: tuple[str, ...]) -> tuple[Algorithm, float]:
    """The algorithm with another figure at the path: one that stands nowhere else."""
    for figure in (37, 3.3125, 0.3125):
        data = algorithm.model_dump()
        table = data
        for key in path[:-1]:
            table = table[key]
        if isinstance(table[path[-1]], int) != isinstance(figure, int):
            continue
        table[path[-1]] = figure
        try:
            return Algorithm.model_validate(data), figure
        except ValidationError:
            continue
    raise AssertionError(path)


def idle(algorithm: Algorithm, path: tuple[str, ...]) -> bool:
    """Figures that the algorithm's own kind does not read."""
    d, c, a = algorithm.divergence, algorithm.corrections, algorithm.advantage
    return (
        (path[-1] == "horizon" and d is not None and d.adaptive is not None
         and d.adaptive.rule == "ppo")
        or (path[-1] == "floor" and path[0] == "corrections"
            and getattr(c[int(path[1])], "statistic", "k1") != "k1")
        or (path[-1] == "lam" and isinstance(a, GAE) and a.adaptive_alpha is not None)
        or (path[-1] == "epsilon" and getattr(a, "scale", "std") == "none")
        or path[-1] == "ddof"  # 0 or 1 by name: see test_explain
        or "options" in path
    )  # fmt: skip


FIGURES = [
    (name, path)
    for name, algorithm in samples.ALL.items()
    for path, _ in leaves(algorithm.model_dump())
    if not idle(algorithm, path) and not (path == ("entropy",) and algorithm.entropy == 0)
]
IN_OBJECTIVE = {"surrogate", "value", "entropy"}


@pytest.mark.parametrize(("name", "path"), FIGURES, ids=[f"{n}: {'.'.join(p)}" for n, p in FIGURES])
def test_changed_figure_is_in_the_formula(name: str, path: tuple[str, ...]) -> None:
    algorithm, figure = changed(samples.ALL[name], path)
    before, after = (explain_algorithm(r, None, Setting()) for r in (samples.ALL[name], algorithm))
    where = objective if path[0] in IN_OBJECTIVE or path[-1] == "beta" else formulas
    one = Decimal(1)
    shown = {str(figure), str(one - Decimal(str(figure))), str(one + Decimal(str(figure)))}
    shown = {text.replace("-", "−") for text in shown}
    assert where(before) != where(after)
    assert any(re.search(rf"(?<![\d.]){re.escape(text)}(?![\d.])", where(after)) for text in shown)
    assert before.latex() != after.latex()
    assert before.json()["objective"] != after.json()["objective"] or where is not objective
