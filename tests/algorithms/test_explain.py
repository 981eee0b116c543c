"""What `keel explain` prints: every figure in its formula, every kind, every source."""

from __future__ import annotations

from typing import Any

import pytest

from keel.algorithms import spec
from keel.algorithms.explain import explain_algorithm, explain_preset, models
from keel.algorithms.losses import Adaptive
from keel.algorithms.presets import CHOICE, PRESETS
from keel.algorithms.render import Explanation
from keel.algorithms.spec import Algorithm
from keel.algorithms.symbols import width
from keel.algorithms.terms import Setting
from keel.algorithms.weighted import Dro
from keel.types import KeelError
from tests.algorithms import samples

FULL = Setting(
    group_size=8, prompts_per_step=32, max_tokens=640, epochs=3, minibatches=5, reward="rule",
    value="head", lora=True, temperature=0.7, dynamic_sampling=True, overlong_buffer=128,
    length_penalty=0.3, truncated_factor=0.5, mask_truncated=True,
    old_log_probs="engine", reference_reset_every=50,
)  # fmt: skip


def formulas(explanation: Explanation) -> str:
    lines = [e.unicode for term in explanation.terms for e in term.equations]
    return "\n".join([*(e.unicode for e in explanation.objective), *lines])


def objective(explanation: Explanation) -> str:
    return "\n".join(e.unicode for e in explanation.objective)


# ---------------------------------------------------------------- kinds


def test_there_is_a_sample_of_every_kind() -> None:
    assert {*samples.ADVANTAGES} == samples.kinds(spec.Advantage)
    assert {*samples.SURROGATES} == samples.kinds(spec.Surrogate)
    assert {*samples.RATIOS} == samples.kinds(spec.Ratio)
    assert {*samples.WEIGHTS} == samples.literals(spec.Weights, "kind")
    found = [r.divergence for r in samples.ALL.values() if r.divergence is not None]
    assert {*samples.MASKS} == samples.kinds(spec.Mask)
    assert {*samples.CORRECTIONS} == samples.kinds(spec.Correction)
    rules = [d.adaptive for d in found if d.adaptive is not None]
    for terms, model, field in (
        *((found, spec.Divergence, name) for name in ("estimator", "where", "to")),
        (rules, Adaptive, "rule"),
    ):
        assert {getattr(term, field) for term in terms} == samples.literals(model, field)


@pytest.mark.parametrize("context", [Setting(), FULL], ids=["bare", "recipe"])
@pytest.mark.parametrize("name", samples.ALL)
def test_every_row_is_explained(name: str, context: Setting) -> None:
    algorithm = samples.ALL[name]
    found = explain_algorithm(algorithm, None, context)
    keys = [term.key for term in found.terms]
    always = [
        key for key in keys if key in ("advantage", "ratio", "surrogate", "weights", "divergence")
    ]
    assert always == ["advantage", "ratio", "surrogate", "weights", "divergence"]
    assert ("value" in keys) == (algorithm.value is not None)
    assert ("entropy" in keys) == (algorithm.entropy != 0)
    assert keys.count("masks") == len(algorithm.masks)
    assert keys.count("corrections") == len(algorithm.corrections)
    kinds = {term.key: term.kind for term in found.terms}
    assert kinds["advantage"] == algorithm.advantage.kind
    assert kinds["surrogate"] == algorithm.surrogate.kind
    assert kinds["ratio"] == algorithm.ratio
    assert kinds["weights"] == algorithm.weights.kind
    assert all(term.text and term.source for term in found.terms)
    assert all(term.equations for term in found.terms if term.kind != "none")


@pytest.mark.parametrize("name", samples.ALL)
def test_brackets_of_equations_are_closed(name: str) -> None:
    found = explain_algorithm(samples.ALL[name], None, FULL)
    for one in (*found.objective, *(e for term in found.terms for e in term.equations)):
        for left, right in ("()", "{}"):
            assert one.latex.count(left) == one.latex.count(right), one.latex


# ---------------------------------------------------------------- models


def test_who_is_in_memory() -> None:
    assert explain_preset("ppo").loaded == ("policy", "reference", "reward", "value")
    assert explain_preset("grpo").loaded == ("policy", "reference", "reward")
    small = explain_preset("ppo", Setting(reward="rule", lora=True, value="head"))
    assert small.loaded == ("policy",)
    assert [use.role for use in small.models] == ["policy", "reference", "reward", "value"]


def test_a_preset_without_reward_holds_a_teacher_and_no_reward_model() -> None:
    found = explain_preset("opd")
    assert [use.role for use in found.models] == ["policy", "teacher"]
    assert found.loaded == ("policy", "teacher")
    assert "R_i" not in found.unicode()
    logged = explain_preset("opd", Setting(reward="model"))
    assert logged.loaded == ("policy", "teacher", "reward")


def test_a_policy_that_teaches_itself_is_no_other_model() -> None:
    uses = {use.role: use for use in explain_preset("sdft").models}
    assert uses["teacher"].what == "the policy before the stage, with more in its prompt"
    assert uses["teacher"].loaded
    both = PRESETS["sdft"].algorithm.model_copy(
        update={"divergence": PRESETS["grpo"].algorithm.divergence}
    )
    uses = {use.role: use for use in models(both, Setting(teacher="base"))}
    assert uses["reference"].loaded
    assert not uses["teacher"].loaded  # it is the reference's copy


def test_a_surrogate_that_acts_without_advantage_stays_in_the_formula() -> None:
    silent = PRESETS["gkd"].algorithm
    (first, *_) = explain_algorithm(silent, None, Setting()).objective
    assert "A_n" not in first.latex
    dro = silent.model_copy(update={"surrogate": Dro(), "ratio": "token"})
    (first, *_) = explain_algorithm(dro, None, Setting()).objective
    assert "A_n" in first.latex


@pytest.mark.parametrize(
    ("gamma", "formula", "words"),
    [
        (0.0, "T_n = ℓ_{teacher,n} − ℓ_{old,n}", "the next token, with the distribution of states"),
        (0.5, "T_n = Σ_{k≥0} 0.5^k (ℓ_{teacher,n+k} − ℓ_{old,n+k})", "biased by the discount"),
        (1.0, "T_n = Σ_{k≥0} 1^k (ℓ_{teacher,n+k} − ℓ_{old,n+k})", "of whole completions."),
    ],
)
def test_the_discount_of_a_teacher_says_which_divergence(
    gamma: float, formula: str, words: str
) -> None:
    algorithm = samples.algorithm(distillation={"gamma": gamma})
    [term] = [
        t for t in explain_algorithm(algorithm).json()["terms"] if t["term"] == "distillation"
    ]
    assert term["equations"][1]["unicode"] == formula
    assert words in term["text"]


def test_a_beta_of_zero_frees_the_reference() -> None:
    algorithm = samples.algorithm(divergence={"beta": 0.0})
    found = explain_algorithm(algorithm)
    assert found.loaded == ("policy", "reward")
    assert objective(found) == "J(θ) = Σ_n w_n · min(ρ_n A_n, clip(ρ_n, 0.8, 1.2) A_n)"


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_states_its_sources(name: str) -> None:
    found = explain_preset(name)
    stated = {term.key: term.source for term in found.terms}
    assert stated == dict(PRESETS[name].sources)
    unchanged = explain_algorithm(
        PRESETS[name].algorithm, name, Setting(epochs=PRESETS[name].epochs)
    )
    assert {term.key: term.source for term in unchanged.terms} == stated
    marked = {term.key for term in found.terms if term.keels_choice}
    assert marked == {key for key, text in stated.items() if CHOICE in text}
    assert (f"† {CHOICE}" in found.unicode()) == bool(marked)
    assert found.unicode().count("Source †") == len(marked)
    assert {term["term"] for term in found.json()["terms"]} == {*stated}


def test_what_the_recipe_sets_is_said_choice_by_choice() -> None:
    data = PRESETS["grpo"].algorithm.model_dump()
    data["divergence"]["beta"] = 0.5
    data["surrogate"] = {"kind": "sapo"}
    data["entropy"] = 0.01
    data["corrections"] = {"kind": "truncate"}
    found = explain_algorithm(Algorithm.model_validate(data), "grpo", Setting(epochs=2))
    stated = {term.key: term.source for term in found.terms}
    sources = PRESETS["grpo"].sources
    assert stated == {
        "advantage": sources["advantage"],
        "ratio": sources["ratio"],
        "surrogate": "set in the recipe; the equation: arXiv:2511.20347",
        "weights": sources["weights"],
        "divergence": "set in the recipe (beta = 0.5, not 0.04); the rest: "
        + sources["divergence"],
        "entropy": "set in the recipe",
        "corrections": "set in the recipe; the equation: Ionides 2008",
        "epochs": "set in the recipe (μ = 2, not 1)",
    }
    custom = explain_algorithm(samples.SURROGATES["custom"])
    assert custom.terms[2].source == "set in the recipe"


def test_an_unknown_preset_is_named_with_the_nearest() -> None:
    with pytest.raises(KeelError, match="unknown algorithm 'gmppo': did you mean 'gmpo'"):
        explain_preset("gmppo")
    with pytest.raises(KeelError, match="known: chord, cispo, clip_cov"):
        explain_algorithm(samples.algorithm(), "zzz")


# ---------------------------------------------------------------- the setting


def test_what_the_setting_adds_is_said() -> None:
    algorithm = samples.algorithm(advantage={"kind": "leave_one_out"}, weights={"kind": "constant"})
    text = " ".join(explain_algorithm(algorithm, "grpo", FULL).unicode().split())
    assert "A_n = R_i − 1/7 Σ_{j≠i} R_j" in text
    assert "w_n = 1 / (S · 640)" in text
    assert "32 prompts of 8 completions, in 5 mini-batches: S ≤ 52" in text
    assert "temperature 0.7" in text
    assert "μ = 3" in text
    assert "min(0, (512 − L_i) / 128)" in text
    assert "Dynamic sampling" in text
    assert "left out of the loss" in text
    assert "The sampling engine's own log-probabilities" in text
    bare = " ".join(explain_algorithm(algorithm, "grpo").unicode().split())
    assert "w_n = 1 / (S · C)" in bare
    assert "C (the completion budget)" in bare
    assert "1/(G−1)" in bare
    assert "Dynamic sampling" not in bare
    assert "overlong" not in bare


def test_dapo_brings_its_sampling_without_a_recipe() -> None:
    notes = " ".join(explain_preset("dapo").json()["notes"])
    assert "Dynamic sampling" in notes
    assert "the last 0.2 C tokens" in notes
    assert "min(0, (0.8 C − L_i) / (0.2 C))" in notes
    known = explain_preset("dapo", Setting(max_tokens=1000, overlong_share=0.2)).json()["notes"]
    assert any("min(0, (800 − L_i) / 200)" in note for note in known)


def test_one_update_a_batch_is_said_to_leave_the_ratio_at_one() -> None:
    message = "ρ_n = 1 in value"
    assert message in explain_preset("grpo").unicode()
    assert message not in explain_preset("ppo").unicode()
    assert message not in explain_preset("grpo", Setting(minibatches=2)).unicode()
    off = " ".join(explain_preset("rloo", Setting(epochs=2)).json()["notes"])
    assert "no ratio corrects" in off


def test_whose_lambda_the_critic_has() -> None:
    def words(**gae: object) -> str:
        algorithm = samples.algorithm(advantage={"kind": "gae", **gae}, value=samples.VALUE)
        [term] = [t for t in explain_algorithm(algorithm).json()["terms"] if t["term"] == "value"]
        return str(term["text"])

    assert "λ = 0.95 as the actor's" in words()
    assert "the critic's own λ = 0.5" in words(critic_lam=0.5)
    assert "the critic's own λ = 1" in words(adaptive_alpha=0.05)


# ---------------------------------------------------------------- on a terminal


@pytest.mark.parametrize("name", samples.ALL)
def test_text_keeps_to_the_terminal(name: str) -> None:
    for context in (Setting(), FULL):
        found = explain_algorithm(samples.ALL[name], "grpo", context)
        for columns in (60, 80, 100, 120):
            text = found.unicode(columns)
            assert all(width(line) <= columns for line in text.split("\n"))
            assert all(line == line.rstrip() for line in text.split("\n"))
            assert not set(text.replace("{$5_%}", "")) & {"\x1b", "$", "\\", "\u00a0", "\0", "\t"}
            assert "\n\n\n" not in text


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"advantage": {"kind": "group_relative", "ddof": 1}}, ["std_g(R)² = 1 / (G − 1) · Σ_"]),
        ({"advantage": {"kind": "group_relative", "ddof": 0}}, ["std_g(R)² = 1/G · Σ_"]),
        ({"entropy": 0.25}, ["+ 0.25 · 1/N · Σ_n H_n\n"]),
        (
            {"corrections": {"kind": "truncate"}, "divergence": {}},
            ["J(θ) = Σ_n w_n c_n · min(", "− 0.04 Σ_n w_n · (e^"],
        ),
        (
            {"advantage": {"kind": "value_baseline"}, "value": samples.VALUE},
            ["A_n = R_i − V_{q_i}", "R̂_n = Σ_{k≥0} r_{n+k}"],
        ),
    ],
)
def test_formulas_state_what_is_chosen(changes: dict[str, Any], parts: list[str]) -> None:
    found = formulas(explain_algorithm(samples.algorithm(**changes)))
    assert all(part in found for part in parts)
    assert ("H_n" in explain_algorithm(samples.algorithm(**changes)).unicode()) == (
        "entropy" in changes
    )
