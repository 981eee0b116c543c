"""What `keel explain` prints: every figure in its formula, every kind, every source."""

from __future__ import annotations

import json

import pytest

from keel.algorithms import spec
from keel.algorithms.explain import Explanation, explain, explain_algorithm, explain_preset
from keel.algorithms.presets import CHOICE, PRESETS
from keel.algorithms.spec import Algorithm
from keel.algorithms.symbols import width
from keel.algorithms.terms import Setting
from keel.types import KeelError
from tests.algorithms import samples

FULL = Setting(
    group_size=8, prompts_per_step=32, max_tokens=640, epochs=3, minibatches=5, reward="rule",
    value="head", lora=True, temperature=0.7, dynamic_sampling=True, overlong_buffer=128,
    mask_truncated=True, old_log_probs="engine", reference_reset_every=50,
)  # fmt: skip


def formulas(explanation: Explanation) -> str:
    lines = [e.unicode for term in explanation.terms for e in term.equations]
    return "\n".join([*(e.unicode for e in explanation.objective), *lines])


def objective(explanation: Explanation) -> str:
    return "\n".join(e.unicode for e in explanation.objective)


# ---------------------------------------------------------------- kinds


def test_samples_have_every_kind_of_every_term() -> None:
    for table, union in (
        (samples.ADVANTAGES, samples.kinds(spec.Advantage)),
        (samples.SURROGATES, samples.kinds(spec.Surrogate)),
        (samples.RATIOS, samples.kinds(spec.Ratio)),
        (samples.WEIGHTS, samples.literals(spec.Weights, "kind")),
    ):
        assert set(table) == union
    found = [a.divergence for a in samples.ALL.values() if a.divergence is not None]
    rules = [d.adaptive for d in found if d.adaptive is not None]
    fixes = [a.correction for a in samples.ALL.values() if a.correction is not None]
    for used, model, fields in (
        (found, spec.Divergence, ("estimator", "where", "to")),
        (rules, spec.Adaptive, ("rule",)),
        (fixes, spec.Correction, ("kind", "level")),
    ):
        for field in fields:
            assert {getattr(one, field) for one in used} == samples.literals(model, field)


@pytest.mark.parametrize("context", [Setting(), FULL], ids=["bare", "recipe"])
@pytest.mark.parametrize("name", samples.ALL)
def test_every_kind_of_term_is_explained(name: str, context: Setting) -> None:
    algorithm = samples.ALL[name]
    found = explain_algorithm(algorithm, None, context)
    keys = [term.key for term in found.terms]
    assert keys[:5] == ["advantage", "ratio", "surrogate", "weights", "divergence"]
    assert ("value" in keys) == (algorithm.value is not None)
    assert ("entropy" in keys) == (algorithm.entropy > 0)
    assert ("correction" in keys) == (algorithm.correction is not None)
    kinds = {term.key: term.kind for term in found.terms}
    assert kinds["advantage"] == algorithm.advantage.kind
    assert kinds["surrogate"] == algorithm.surrogate.kind
    assert kinds["ratio"] == algorithm.ratio
    assert kinds["weights"] == algorithm.weights.kind
    assert all(term.text and term.source for term in found.terms)
    assert all(term.equations for term in found.terms if term.kind != "none")


def test_kinds_of_one_term_have_different_texts() -> None:
    for table in (
        samples.ADVANTAGES,
        samples.RATIOS,
        samples.SURROGATES,
        samples.WEIGHTS,
        samples.DIVERGENCES,
    ):
        texts = {explain_algorithm(algorithm).unicode() for algorithm in table.values()}
        assert len(texts) == len(table)


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("name", PRESETS)
def test_models_in_memory_follow_reward_and_lora(name: str) -> None:
    """Counts without a recipe are on each preset's page."""
    loaded = explain_preset(name).loaded
    assert f"Models in memory: {len(loaded)} (" in explain_preset(name).unicode()
    with_rule = explain_preset(name, Setting(reward="rule")).loaded
    assert set(with_rule) == set(loaded) - {"reward"}
    with_lora = explain_preset(name, Setting(lora=True)).loaded
    assert set(with_lora) == set(loaded) - {"reference"}
    small = explain_preset("ppo", Setting(reward="rule", lora=True, value="head"))
    assert small.loaded == ("policy",)
    assert [use.role for use in small.models] == ["policy", "reference", "reward", "value"]


def test_beta_zero_needs_no_reference() -> None:
    algorithm = samples.algorithm(divergence={"beta": 0.0})
    found = explain_algorithm(algorithm)
    assert found.loaded == ("policy", "reward")
    assert objective(found) == "J(θ) = Σ_n w_n · min(ρ_n A_n, clip(ρ_n, 0.8, 1.2) A_n)"


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("name", PRESETS)
def test_unchanged_preset_states_its_sources(name: str) -> None:
    preset = PRESETS[name]
    found = explain_algorithm(preset.algorithm, name, Setting(epochs=preset.epochs))
    assert {t.key: t.source for t in found.terms} == dict(preset.sources)
    text = explain_preset(name).unicode()
    marked = {key for key, source in preset.sources.items() if CHOICE in source}
    assert {t.key for t in found.terms if t.keels_choice} == marked
    assert (f"† {CHOICE}" in text) == bool(marked)
    assert text.count("Source †") == len(marked)


def test_source_names_each_choice_that_the_recipe_sets() -> None:
    data = PRESETS["grpo"].algorithm.model_dump()
    data["divergence"]["beta"] = 0.5
    data["surrogate"] = {"kind": "sapo"}
    data["entropy"] = 0.01
    data["correction"] = {}
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
        "correction": "set in the recipe; the equation: Ionides 2008; masked: arXiv:2510.18855",
        "epochs": "set in the recipe (μ = 2, not 1)",
    }


def test_sources_without_a_preset_are_those_of_the_equations() -> None:
    found = explain(samples.algorithm(), name="mine", title="a trial", sources={})
    assert {term.key: term.source for term in found.terms} == {
        "advantage": "set in the recipe; the equation: arXiv:2402.03300 §4.1.2",
        "ratio": "set in the recipe; the equation: arXiv:1707.06347 §3",
        "surrogate": "set in the recipe; the equation: arXiv:1707.06347 eq. 7",
        "weights": "set in the recipe; the equation: arXiv:2402.03300 eq. 3",
        "divergence": "set in the recipe",
    }
    custom = explain(samples.SURROGATES["custom"], name="mine", title="a trial", sources={})
    assert custom.terms[2].source == "set in the recipe"


def test_unknown_preset_error_suggests_the_nearest() -> None:
    with pytest.raises(KeelError, match="unknown algorithm 'gmppo': did you mean 'gmpo'"):
        explain_preset("gmppo")
    with pytest.raises(KeelError, match="known: cispo, dapo"):
        explain_algorithm(samples.algorithm(), "zzz")


# ---------------------------------------------------------------- the setting


def test_explanation_contains_the_figures_of_the_setting() -> None:
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


def test_dapo_explains_its_sampling_without_a_recipe() -> None:
    notes = " ".join(explain_preset("dapo").json()["notes"])
    assert "Dynamic sampling" in notes
    assert "the last 0.2 C tokens" in notes
    assert "min(0, (0.8 C − L_i) / (0.2 C))" in notes
    known = explain_preset("dapo", Setting(max_tokens=1000, overlong_share=0.2)).json()["notes"]
    assert any("min(0, (800 − L_i) / 200)" in note for note in known)


def test_note_that_one_update_per_batch_keeps_the_ratio_at_one() -> None:
    message = "ρ_n = 1 in value"
    assert message in explain_preset("grpo").unicode()
    assert message not in explain_preset("ppo").unicode()
    assert message not in explain_preset("grpo", Setting(minibatches=2)).unicode()
    off = " ".join(explain_preset("rloo", Setting(epochs=2)).json()["notes"])
    assert "no ratio corrects" in off


@pytest.mark.parametrize(
    ("choice", "lines"),
    [
        ({"kind": "group_relative"}, ["std_g(R)² = 1 / (G − 1) · Σ_"]),
        ({"kind": "group_relative", "ddof": 0}, ["std_g(R)² = 1/G · Σ_"]),
        ({"kind": "value_baseline"}, ["A_n = R_i − V_{q_i}", "R̂_n = Σ_{k≥0} r_{n+k}"]),
    ],
)
def test_advantage_formulas(choice: dict[str, object], lines: list[str]) -> None:
    value = samples.VALUE if choice["kind"] == "value_baseline" else None
    ratio = "token" if value is None else "sequence"
    text = explain_algorithm(samples.algorithm(advantage=choice, ratio=ratio, value=value))
    assert all(line in text.unicode() for line in lines)


def test_critic_lambda_is_explained() -> None:
    def words(**gae: object) -> str:
        algorithm = samples.algorithm(advantage={"kind": "gae", **gae}, value=samples.VALUE)
        [term] = [t for t in explain_algorithm(algorithm).json()["terms"] if t["term"] == "value"]
        return str(term["text"])

    assert "λ = 0.95 as the actor's" in words()
    assert "the critic's own λ = 0.5" in words(critic_lam=0.5)
    assert "the critic's own λ = 1" in words(adaptive_alpha=0.05)


# ---------------------------------------------------------------- on a terminal


@pytest.mark.parametrize("name", samples.ALL)
def test_text_fits_the_terminal_width(name: str) -> None:
    for context in (Setting(), FULL):
        found = explain_algorithm(samples.ALL[name], "grpo", context)
        for columns in (60, 80, 100, 120):
            text = found.unicode(columns)
            assert all(width(line) <= columns for line in text.split("\n"))
            assert all(line == line.rstrip() for line in text.split("\n"))
            assert not set(text.replace("{$5_%}", "")) & {"\x1b", "$", "\\", "\u00a0", "\0", "\t"}
            assert "\n\n\n" not in text


@pytest.mark.parametrize("name", PRESETS)
def test_terms_are_aligned(name: str) -> None:
    found = explain_preset(name)
    lines = found.unicode(100).split("\n")
    for term in found.terms:
        [line] = [x for x in lines if x[5:].startswith(term.title) and x.endswith(term.kind)]
        assert width(line) == 100
        assert line.index(term.title) == 5


def test_json_of_a_preset_is_complete() -> None:
    for name, preset in PRESETS.items():
        found = explain_preset(name).json()
        assert json.loads(json.dumps(found)) == found
        assert found["name"] == name
        assert {t["term"] for t in found["terms"]} == set(preset.sources)
        assert found["models_in_memory"] == list(explain_preset(name).loaded)
