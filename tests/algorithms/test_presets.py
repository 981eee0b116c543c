"""The presets: sources, epochs, closed and frozen models, and no import of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from keel.algorithms.presets import CHOICE, PRESETS
from keel.algorithms.spec import Algorithm

KEELS_CHOICE = {
    "ppo": {"value", "epochs"},
    "ppo_kl_penalty": {"value", "epochs"},
    "grpo": {"surrogate"},
    "remax": {"divergence"},
    "opo": {"weights"},
    "cispo": {"surrogate"},
}


# Optimizer steps per epoch, where the paper has more than one.
MINIBATCHES = {"dapo": 16, "gspo": 4, "gspo_token": 4, "cispo": 16, "sapo": 4, "gmpo": 8}


def test_epochs_and_minibatches_of_the_presets() -> None:
    """Their terms and figures are asserted by the formulas of their pages, see test_pages."""
    epochs = {name: preset.epochs for name, preset in PRESETS.items() if preset.epochs > 1}
    assert epochs == {"ppo": 4, "ppo_kl_penalty": 4}
    found = {name: preset.minibatches for name, preset in PRESETS.items()}
    assert {name: count for name, count in found.items() if count > 1} == MINIBATCHES


def test_only_dapo_has_dynamic_sampling() -> None:
    found = {n: (p.dynamic_sampling, p.overlong_share) for n, p in PRESETS.items()}
    assert found.pop("dapo") == (True, 0.2)
    assert set(found.values()) == {(False, 0.0)}


@pytest.mark.parametrize("name", PRESETS)
def test_every_term_in_use_has_a_source(name: str) -> None:
    preset = PRESETS[name]
    used = {"advantage", "ratio", "surrogate", "weights", "divergence"}
    used |= {"value"} if preset.algorithm.value is not None else set()
    used |= {"epochs"} if preset.epochs * preset.minibatches > 1 else set()
    assert set(preset.sources) == used
    assert all(
        "arXiv:" in text or "Williams 1992" in text or CHOICE in text
        for text in preset.sources.values()
    )


@pytest.mark.parametrize(("name", "choices"), KEELS_CHOICE.items())
def test_values_that_no_paper_gives_are_marked(name: str, choices: set[str]) -> None:
    marked = {choice for choice, text in PRESETS[name].sources.items() if CHOICE in text}
    assert marked == choices


@pytest.mark.parametrize("name", PRESETS)
def test_preset_round_trips_through_model_dump(name: str) -> None:
    algorithm = PRESETS[name].algorithm
    assert Algorithm.model_validate(algorithm.model_dump()) == algorithm


def test_presets_are_frozen() -> None:
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
def test_unknown_key_is_refused(path: tuple[str, ...], value: object) -> None:
    data = PRESETS["grpo"].algorithm.model_dump()
    table = data
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = value
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        Algorithm.model_validate(data)


@pytest.mark.parametrize("value", ["0.04", True, float("nan"), float("inf"), -0.1])
def test_beta_must_be_a_finite_number(value: object) -> None:
    data = PRESETS["grpo"].algorithm.model_dump()
    data["divergence"]["beta"] = value
    with pytest.raises(ValidationError, match=r"divergence\.beta"):
        Algorithm.model_validate(data)


def test_the_word_none_unsets_an_optional_value() -> None:
    data = PRESETS["ppo"].algorithm.model_dump()
    data["divergence"] = "none"
    assert Algorithm.model_validate(data).divergence is None
    data["value"]["clip"] = "none"
    value = Algorithm.model_validate(data).value
    assert value is not None
    assert value.clip is None
    with pytest.raises(ValidationError):
        Algorithm.model_validate({**data, "weights": "none"})


def test_algorithms_import_no_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, keel.algorithms as package\n"
        "[importlib.import_module(f'keel.algorithms.{m.name}')"
        " for m in pkgutil.iter_modules(package.__path__)]\n"
        "from keel.algorithms.explain import explain_preset\n"
        "explain_preset('ppo').unicode()\n"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")
