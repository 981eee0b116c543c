"""The presets: sourced, closed and frozen. Their figures stand on the pages of test_pages."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from keel.algorithms.presets import CHOICE, PRESETS
from keel.algorithms.spec import Algorithm
from tests.algorithms import samples


def test_only_dapo_brings_sampling_of_its_own() -> None:
    found = {n: (p.dynamic_sampling, p.overlong_share) for n, p in PRESETS.items()}
    assert found.pop("dapo") == (True, 0.2)
    assert set(found.values()) == {(False, 0.0)}


@pytest.mark.parametrize("name", PRESETS)
def test_every_choice_in_use_has_a_source(name: str) -> None:
    preset = PRESETS[name]
    used = {"advantage", "ratio", "surrogate", "weights", "divergence"}
    used |= {"value"} if preset.algorithm.value is not None else set()
    used |= {"epochs"} if preset.epochs * preset.minibatches > 1 else set()
    assert set(preset.sources) == used
    assert all(
        any(known in text for known in ("arXiv:", "Williams 1992", "Lu 2025", CHOICE))
        for text in preset.sources.values()
    )


@pytest.mark.parametrize("name", PRESETS)
def test_a_row_survives_being_written_out(name: str) -> None:
    algorithm = PRESETS[name].algorithm
    assert Algorithm.model_validate(algorithm.model_dump()) == algorithm


def test_rows_are_frozen_and_presets_too() -> None:
    algorithm = PRESETS["grpo"].algorithm
    with pytest.raises(ValidationError, match="frozen"):
        algorithm.ratio = "sequence"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        algorithm.advantage.epsilon = 0.0  # type: ignore[union-attr, misc]
    with pytest.raises(TypeError):
        PRESETS["mine"] = PRESETS["grpo"]  # type: ignore[index]


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": 1},
        {"surrogate": {"kind": "clip", "epsilon": 0.2}},
        {"divergence": {"coefficient": 0.1}},
        {"advantage": {"kind": "group_relative", "lam": 0.95}},
    ],
)
def test_an_unknown_key_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        samples.algorithm(**changes)


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
