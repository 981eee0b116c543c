"""The formulas themselves: LaTeX that typesets, Unicode read off it, and the maths they state."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from matplotlib.mathtext import MathTextParser
from torch import Tensor

from keel.algorithms import symbols
from keel.algorithms.explain import explain_algorithm, explain_preset
from keel.algorithms.presets import PRESETS
from keel.algorithms.render import Explanation
from keel.algorithms.terms import Setting
from tests.algorithms import samples
from tests.algorithms.test_explain import FULL

# ---------------------------------------------------------------- from LaTeX to Unicode


@pytest.mark.parametrize(
    ("formula", "text"),
    [
        (r"\rho_n A_n", "ρ_n A_n"),
        (r"e^{-d_n} + d_n - 1", "e^{−d_n} + d_n − 1"),
        (r"10^{-8} + d_n^2", "10⁻⁸ + d_n²"),
        (r"\frac{1}{2} x, \frac{1}{N}", "½ x, 1/N"),
        (r"\frac{1}{S \cdot L_i}", "1 / (S · L_i)"),
        (r"\frac{1}{G-1} \sum_{j\neq i} R_j", "1/(G−1) Σ_{j≠i} R_j"),
        (r"\frac{a - b}{\sqrt{v + 1}}", "(a − b) / √(v + 1)"),
        (r"\mathrm{sg}[\tilde{R}_i] \, x", "sg[R̃_i] x"),
        (r"\mathrm{KL}(\pi \Vert \pi_\mathrm{ref})", "KL(π‖π_ref)"),
        (r"\ell_{\mathrm{old},n}", "ℓ_{old,n}"),
        (r"a \quad b", "a   b"),
        (symbols.function("my_lab.ideas:half_ok"), "half_ok"),
    ],
)
def test_unicode_is_read_off_the_latex(formula: str, text: str) -> None:
    assert symbols.to_unicode(formula) == text


@pytest.mark.parametrize("formula", [r"\frac{a}{b", r"a}", r"\foo x", r"\frac{a}", r"x_"])
def test_invalid_formula_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match=r"unbalanced|outside the subset|missing"):
        symbols.to_unicode(formula)


@pytest.mark.parametrize(
    ("figure", "text"),
    [(0.2, "0.2"), (1.0, "1"), (256.0, "256"), (10_000.0, "10000"), (0.0001, "0.0001"),
     (0.0, "0"), (1e-8, "10⁻⁸"), (3e-5, "3 · 10⁻⁵"), (0.1 + 0.2, "0.30000000000000004")],
)  # fmt: skip
def test_number_is_written_in_plain_notation(figure: float, text: str) -> None:
    assert symbols.to_unicode(symbols.number(figure)) == text


def test_offset_has_no_binary_rounding_noise() -> None:
    assert symbols.offset(-0.0003, 1.0) == "0.9997"
    assert symbols.offset(0.28, 1.0) == "1.28"


@pytest.mark.parametrize(
    ("formula", "text"),
    [("a b", "a b"), ("a - b", "(a - b)"), ("f(a - b)", "f(a - b)"), ("-a", "-a"),
     (r"\frac{a + b}{c} + [d]", r"(\frac{a + b}{c} + [d])")],
)  # fmt: skip
def test_sum_as_a_factor_is_in_brackets(formula: str, text: str) -> None:
    assert symbols.factor(formula) == text


def test_user_text_is_escaped() -> None:
    text = "with $x_1$ and " + symbols.quote("'50% of $5_000 & #1 {~^\\\\}'")
    assert symbols.prose_to_unicode(text) == "with x_1 and '50% of $5_000 & #1 {~^\\\\}'"
    latex = symbols.prose_to_latex(text)
    assert r"50\% of \$5\_000 \& \#1 \{\textasciitilde{}\textasciicircum{}" in latex


# ---------------------------------------------------------------- LaTeX


def latex_formulas(found: Explanation) -> Iterator[str]:
    yield from (line.latex for line in found.objective)
    for term in found.terms:
        yield term.symbol
        yield from (line.latex for line in term.equations)
    prose = [found.reading, *found.notes, *(t.text for t in found.terms)]
    for text in prose:
        yield from re.findall(r"(?<!\\)\$(.+?)(?<!\\)\$", text)


@pytest.mark.slow
def test_every_formula_typesets() -> None:
    parser = MathTextParser("path")
    found = {
        formula
        for algorithm in samples.ALL.values()
        for context in (Setting(), FULL)
        for formula in latex_formulas(explain_algorithm(algorithm, "grpo", context))
    }
    assert len(found) > 150
    for formula in sorted(found):
        parser.parse(f"${formula}$")


@pytest.mark.parametrize("name", samples.ALL)
def test_the_latex_is_balanced(name: str) -> None:
    text = explain_algorithm(samples.ALL[name], "grpo", FULL).latex()
    bare = re.sub(r"\\[{}$%&#_]", "", text)
    assert bare.count("$") % 2 == 0
    assert bare.count("{") == bare.count("}")
    assert text.count(r"\[") == text.count(r"\]") > 0
    outside = re.sub(r"\$[^$]*\$|\\\[.*?\\\]|\\begin\{align\*\}.*?\\end\{align\*\}", "", bare,
                     flags=re.DOTALL)  # fmt: skip
    assert not re.search(r"[_^%#&]|[α-ωΑ-Ω]", outside)


def test_formulas_of_presets_fit_a_latex_page() -> None:
    for name in PRESETS:
        body = explain_preset(name).latex().split(r"\end{align*}")[0]
        assert all(len(symbols.to_unicode(line)) <= 100 for line in re.findall(r"&.*", body)
                   for line in [line.replace("&", "").replace("\\\\", "")])  # fmt: skip


# ---------------------------------------------------------------- what the estimators do


def enumerated(name: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """E[value], E[gradient] of an estimator over one state of five actions, by enumeration.

    Off policy where the estimator is weighed by the ratio or is to the old policy. Last come the
    KLs by the sides they are written with, for which gradients are taken by the caller.
    """
    torch.manual_seed(4)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    old, ref = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    new = logits.log_softmax(-1)
    d = samples.DIVERGENCES[name].divergence
    assert d is not None
    sampled_by_old = d.unbiased or d.to == "old"
    sampler = (old if sampled_by_old else new.detach()).exp()
    other = old if d.to == "old" else ref
    difference = new - other
    if d.where == "reward":
        # A reward is a number; the policy gradient of a penalty is E[D ∇ℓ].
        estimate = d.estimate(new, other).detach() * new
    else:
        estimate = d.value(new, old, ref, None, new - old)
    expected = (sampler * estimate).sum()
    kls = {
        "π‖ref": (new.exp() * (new - ref)).sum(),
        "ref‖π": (ref.exp() * (ref - new)).sum(),
        "π‖old": (new.exp() * (new - old)).sum(),
        "old‖π": (old.exp() * (old - new)).sum(),
        "|π − ref|": (new.exp() - ref.exp()).abs().sum(),
        "E ½d²": (new.exp() * 0.5 * difference**2).sum(),
        "E |d|": (new.exp() * difference.abs()).sum(),
    }
    return logits, expected, kls


# estimator: what its value is (None: documented as biased), what its gradient is (with signs).
CLAIMS: dict[str, tuple[str | None, tuple[tuple[float, str], ...]]] = {
    "loss k2": (None, ((1, "π‖ref"),)),
    "loss k3": ("π‖ref", ((1, "ref‖π"),)),
    "loss abs": (None, ((1, "|π − ref|"),)),
    "loss ρ k1": ("π‖ref", ((1, "π‖ref"),)),
    "loss ρ k2": (None, ((1, "E ½d²"),)),
    "loss ρ k3": ("π‖ref", ((1, "π‖ref"),)),
    "loss ρ abs": (None, ((1, "E |d|"),)),
    "old k1": ("old‖π", ((1, "old‖π"),)),
    "old k3": ("old‖π", ((1, "old‖π"),)),
    "old ρ k1": ("π‖old", ((1, "π‖old"),)),
    "old ρ k3": ("π‖old", ((1, "π‖old"),)),
    "reward k1": (None, ((1, "π‖ref"),)),
    "reward k3": (None, ((1, "π‖ref"), (-1, "ref‖π"))),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_estimator_has_the_value_and_gradient_of_its_text(name: str) -> None:
    said_value, said_gradient = CLAIMS[name]
    logits, expected, kls = enumerated(name)
    gradient = torch.autograd.grad(expected, logits, retain_graph=True)[0]
    wanted = sum(
        sign * torch.autograd.grad(kls[side], logits, retain_graph=True)[0]
        for sign, side in said_gradient
    )
    # Sums of five terms in float64.
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)
    terms = explain_algorithm(samples.DIVERGENCES[name]).json()["terms"]
    text = next(t["text"] for t in terms if t["term"] == "divergence")
    if said_value is not None:
        torch.testing.assert_close(expected, kls[said_value], rtol=1e-10, atol=1e-12)
        side = said_value.replace("ref", "π_ref").replace("old", "π_old")
        assert f"[value] = KL({side})" in text
    for _, side in said_gradient:
        named = side.replace("ref", "π_ref").replace("old", "π_old")
        if "‖" in side and "reward k1" not in name and "old" not in name:
            assert f"∇KL({named})" in text


def test_per_token_divergences_state_that_states_are_fixed() -> None:
    for name, algorithm in samples.DIVERGENCES.items():
        text = " ".join(explain_algorithm(algorithm).unicode().split())
        fixed = "with the distribution of states held fixed" in text
        assert fixed == ("reward" not in name), name
    exact = " ".join(explain_preset("rloo").unicode().split())
    assert "exactly that of the KL of whole completions, KL(π‖π_ref)" in exact
