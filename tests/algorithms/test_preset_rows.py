"""The presets: the figures of the table, written out again here; closed, frozen, torch-free."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from keel.algorithms.presets import CHOICE, PRESETS
from keel.algorithms.spec import Algorithm

PPO_VALUE = {"coefficient": 0.1, "clip": 0.2}
GAE = {"kind": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True}
GROUP = {"kind": "group_relative", "scale": "std", "epsilon": 1e-4, "whiten": False}
CLIP = {"kind": "clip", "low": 0.2, "high": 0.2, "dual": None}
GSPO_CLIP = {"kind": "clip", "low": 3e-4, "high": 4e-4, "dual": None}
LOG_PROB = {"kind": "log_prob"}
K3 = {"to": "reference", "where": "loss", "estimator": "k3", "beta": 0.04, "unbiased": False}


def k1(beta: float) -> dict[str, Any]:
    return {"to": "reference", "where": "reward", "estimator": "k1", "beta": beta}


# name: advantage, ratio, surrogate, weights, divergence, value, epochs
TABLE: dict[str, tuple[Any, ...]] = {
    "ppo": (GAE, "token", CLIP, "token_mean", k1(0.05), PPO_VALUE, 4),
    "ppo_kl_penalty": (
        GAE,
        "token",
        {"kind": "unclipped"},
        "token_mean",
        {"to": "old", "where": "loss", "adaptive": {"rule": "ppo", "target": 0.01}},
        PPO_VALUE,
        4,
    ),
    "grpo": (GROUP, "token", CLIP, "sequence_mean", K3, None, 1),
    "grpo_process": (
        {"kind": "process_group_relative", "epsilon": 1e-4},
        "token",
        CLIP,
        "sequence_mean",
        K3,
        None,
        1,
    ),
    "dr_grpo": ({**GROUP, "scale": "none"}, "token", CLIP, "constant", None, None, 1),
    "dapo": (GROUP, "token", {**CLIP, "high": 0.28}, "token_mean", None, None, 1),
    "gspo": (GROUP, "sequence", GSPO_CLIP, "sequence_mean", None, None, 1),
    "gspo_token": (GROUP, "sequence_token", GSPO_CLIP, "sequence_mean", None, None, 1),
    "rloo": ({"kind": "leave_one_out"}, "none", LOG_PROB, "sequence_sum", k1(0.03), None, 1),
    "reinforce": (
        {"kind": "monte_carlo", "baseline": "batch_mean", "gamma": 1.0},
        "none",
        LOG_PROB,
        "sequence_sum",
        None,
        None,
        1,
    ),
    "reinforce_pp": (
        {"kind": "batch_normalised", "group_baseline": False},
        "token",
        CLIP,
        "token_mean",
        k1(0.001),
        None,
        1,
    ),
    "reinforce_pp_baseline": (
        {"kind": "batch_normalised", "group_baseline": True},
        "token",
        CLIP,
        "token_mean",
        {"to": "reference", "where": "loss", "estimator": "k2", "beta": 0.001},
        None,
        1,
    ),
    "remax": ({"kind": "greedy_baseline"}, "none", LOG_PROB, "sequence_sum", k1(0.01), None, 1),
    "opo": ({"kind": "optimal"}, "none", LOG_PROB, "token_mean", None, None, 1),
    "cispo": (GROUP, "token", {"kind": "cispo", "cap": 5.0}, "token_mean", None, None, 1),
    "sapo": (
        GROUP,
        "token",
        {"kind": "sapo", "temperature_positive": 1.0, "temperature_negative": 1.05},
        "sequence_mean",
        None,
        None,
        1,
    ),
    "gmpo": (
        GROUP,
        "token",
        {"kind": "geometric", "low": 0.4, "high": 0.4},
        "sequence_mean",
        None,
        None,
        1,
    ),
    "opd": (
        {"kind": "teacher_log_ratio", "gamma": 0.0, "whiten": False},
        "token",
        {"kind": "unclipped"},
        "constant",
        None,
        None,
        1,
    ),
}

KEELS_CHOICE = {
    "ppo": {"value", "epochs"},
    "ppo_kl_penalty": {"value", "epochs"},
    "grpo": {"surrogate"},
    "remax": {"divergence"},
    "opo": {"weights"},
    "cispo": {"surrogate"},
    "opd": {"weights"},
}


def contains(found: Any, wanted: Any) -> bool:
    """Whether every figure that the table gives stands in the algorithm."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            key in found and contains(found[key], value) for key, value in wanted.items()
        )
    return bool(found == wanted)


# Optimizer steps per epoch, where the paper has more than one.
MINIBATCHES = {"dapo": 16, "gspo": 4, "gspo_token": 4, "cispo": 16, "sapo": 4, "gmpo": 8}


def test_the_table_names_the_presets_in_order() -> None:
    assert list(PRESETS) == list(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_has_the_figures_of_the_table(name: str) -> None:
    algorithm = PRESETS[name].algorithm.model_dump()
    advantage, ratio, surrogate, weights, divergence, value, epochs = TABLE[name]
    wanted = {
        "advantage": advantage,
        "ratio": ratio,
        "surrogate": surrogate,
        "weights": {"kind": weights, "constant": None},
        "divergence": divergence,
        "value": value,
        "entropy": 0.0,
        "correction": None,
    }
    wrong = {
        key: algorithm[key]
        for key, figure in wanted.items()
        if not contains(algorithm[key], figure)
    }
    assert wrong == {}
    assert PRESETS[name].epochs == epochs
    assert PRESETS[name].minibatches == MINIBATCHES.get(name, 1)


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


@pytest.mark.parametrize(("name", "choices"), KEELS_CHOICE.items())
def test_what_no_paper_fixes_is_marked(name: str, choices: set[str]) -> None:
    marked = {choice for choice, text in PRESETS[name].sources.items() if CHOICE in text}
    assert marked == choices


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
    ("path", "value"),
    [
        (("algorithm",), 1),
        (("surrogate", "epsilon"), 0.2),
        (("divergence", "coefficient"), 0.1),
        (("advantage", "lam"), 0.95),
    ],
)
def test_an_unknown_key_is_refused(path: tuple[str, ...], value: object) -> None:
    data = PRESETS["grpo"].algorithm.model_dump()
    table = data
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Algorithm.model_validate(data)


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


def test_the_room_is_torch_free() -> None:
    code = (
        "import sys, pkgutil, importlib, keel.algorithms as room\n"
        "[importlib.import_module(f'keel.algorithms.{m.name}')"
        " for m in pkgutil.iter_modules(room.__path__)]\n"
        "from keel.algorithms.explain import explain_preset\n"
        "explain_preset('ppo').unicode()\n"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
