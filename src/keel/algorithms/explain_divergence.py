"""What β D is in a row: to which policy, where, by which estimator, and what that one is worth."""

from __future__ import annotations

from dataclasses import dataclass

from keel.algorithms.explain_advantage import return_symbol
from keel.algorithms.spec import Adaptive, Algorithm, Divergence
from keel.algorithms.symbols import number
from keel.algorithms.terms import Equation, Setting, Term, equation


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimator: its formula (of d, and of ρ), the same in Python, and what it estimates."""

    formula: str
    expression: str
    text: str


def divergence(row: Algorithm, setting: Setting, source: str) -> Term:
    """The divergence's term; without one it says so."""
    d = row.divergence
    if d is None or not active(d):
        text = "No divergence: nothing but the surrogate holds the policy."
        if d is not None:
            text = r"$\beta = 0$: the term is gone, and with it the reference policy."
        return Term(
            key="divergence", symbol="D_n", title="Divergence", kind="none", text=text,
            source=source,
        )  # fmt: skip
    found = estimate(d)
    other = "ref" if d.to == "reference" else "old"
    equations = [
        equation("D_n", found.formula),
        equation("d_n", r"\ell_n", rf"- \ell_{{\mathrm{{{other}}},n}}"),
    ]
    if d.estimator == "full":
        equations = equations[:1]
    return Term(
        key="divergence",
        symbol="D_n",
        title="Divergence",
        kind=f"{d.estimator} to the {d.to} policy, in the {d.where}",
        equations=(*equations, *_reward(row), *_rule(d, setting)),
        text=f"{_where(row, d)} {found.text}{_rule_text(d)}",
        source=source,
        expression=found.expression or None,
    )


def active(d: Divergence) -> bool:
    """Whether the divergence does anything."""
    return d.beta > 0 or d.adaptive is not None


def beta(d: Divergence) -> str:
    """β as it stands in a formula: its figure, or the symbol where a rule moves it."""
    return number(d.beta) if d.adaptive is None else r"\beta"


def reward_equation(row: Algorithm) -> tuple[Equation, ...]:
    """How the divergence enters the reward, if it does; a line of the objective."""
    return _reward(row)


def _reward(row: Algorithm) -> tuple[Equation, ...]:
    d = row.reward_divergence
    if d is None or not active(d):
        return ()
    if row.per_token_advantage:
        last = r"[n = \mathrm{last}_i] \, R_i"
        return (equation("r_n", last, rf"- {beta(d)} \, {summand(d)}"),)
    total = rf"- {beta(d)} \sum_{{n\in i}} {summand(d)}"
    return (equation(f"{return_symbol(row)}_i", "R_i", total),)


def summand(d: Divergence) -> str:
    """The estimator's formula, in brackets where a factor stands before it."""
    formula = estimate(d).formula
    return f"({formula})" if any(sign in formula[1:] for sign in ("+ ", "- ")) else formula


def _where(row: Algorithm, d: Divergence) -> str:
    first = "" if d.adaptive is None else "at first "
    figure = rf"$\beta = {number(d.beta)}$ {first}".rstrip()
    if d.where == "loss":
        return f"{figure}, a term of the loss with the surrogate's weights $w_n$."
    how = (
        "taken from the reward of every token"
        if row.per_token_advantage
        else "summed over the completion and taken from its reward"
    )
    return f"{figure}, {how}, without a gradient of its own."


_FIXED = (
    "Token by token this is about the KL of the next token, with the distribution of states held "
    "fixed, not about the KL of whole completions."
)
_PI_REF = r"\mathrm{KL}(\pi \Vert \pi_\mathrm{ref})"
_REF_PI = r"\mathrm{KL}(\pi_\mathrm{ref} \Vert \pi)"
_OLD_PI = r"\mathrm{KL}(\pi_\mathrm{old} \Vert \pi)"
_PI_OLD = r"\mathrm{KL}(\pi \Vert \pi_\mathrm{old})"


def estimate(d: Divergence) -> Estimate:
    """What the estimator is and what it estimates (the KL tables of `keel.objective`)."""
    if d.where == "reward":
        return _in_reward(d)
    if d.estimator == "full":
        return Estimate(
            r"\sum_v \pi(v) \log(\frac{\pi(v)}{\pi_\mathrm{ref}(v)})",
            "",
            f"The whole vocabulary, no estimate: value ${_PI_REF}$ and its gradient, exactly. "
            f"{_FIXED}",
        )
    if d.to == "old":
        return _to_old(d)
    return _weighted(d) if d.unbiased else _in_loss(d)


_PLAIN = {
    "k1": ("d_n", "d"),
    "k2": (r"\frac{1}{2} d_n^2", "0.5*d**2"),
    "k3": ("e^{-d_n} + d_n - 1", "exp(-d) + d - 1"),
    "abs": (r"\mathrm{abs}(d_n)", "abs(d)"),
}


def _in_loss(d: Divergence) -> Estimate:
    formula, expression = _PLAIN[d.estimator]
    facts = {
        "k1": f"k1: on policy, $E[\\mathrm{{value}}] = {_PI_REF}$, but "
        "$E[\\mathrm{gradient}] = 0$.",
        "k2": "k2: on policy, the value is biased (right to second order in $d_n$), and "
        f"$E[\\mathrm{{gradient}}] = \\nabla{_PI_REF}$.",
        "k3": f"k3: on policy, $E[\\mathrm{{value}}] = {_PI_REF}$, but the gradient is that of the "
        f"other side: $E[\\mathrm{{gradient}}] = \\nabla{_REF_PI}$.",
        "abs": "On policy, the value is at least the KL and no estimate of it, and the gradient is "
        "that of the distance $\\sum_v \\mathrm{abs}(\\pi(v) - \\pi_\\mathrm{ref}(v))$.",
    }
    return Estimate(formula, expression, f"{facts[d.estimator]} {_FIXED}")


def _weighted(d: Divergence) -> Estimate:
    formula, expression = _PLAIN[d.estimator]
    formula = f"({formula})" if d.estimator == "k3" else formula
    sampling = (
        r"Weighed by the token ratio to the sampling policy, $\rho_n = "
        r"\exp(\ell_n - \ell_{\mathrm{old},n})$: "
    )
    exact = f"$E[\\mathrm{{value}}] = {_PI_REF}$ and $E[\\mathrm{{gradient}}] = \\nabla{_PI_REF}$."
    own = "the gradient is that of the expected value, which is biased as a KL."
    text = exact if d.estimator in ("k1", "k3") else own
    return Estimate(rf"\rho_n \, {formula}", f"rho*({expression})", f"{sampling}{text} {_FIXED}")


def _to_old(d: Divergence) -> Estimate:
    if d.unbiased:
        formulas = {
            "k1": (r"\rho_n d_n", "rho*d"),
            "k2": (r"\rho_n \frac{1}{2} d_n^2", "rho*0.5*d**2"),
            "k3": (r"\rho_n d_n - (\rho_n - 1)", "rho*d - (rho - 1)"),
            "abs": (r"\rho_n \, \mathrm{abs}(d_n)", "rho*abs(d)"),
        }
        side, extra = _PI_OLD, r" $\rho_n = e^{d_n}$."
    else:
        formulas = {
            "k1": ("-d_n", "-d"),
            "k2": (r"\frac{1}{2} d_n^2", "0.5*d**2"),
            "k3": ("e^{d_n} - d_n - 1", "exp(d) - d - 1"),
            "abs": (r"\mathrm{abs}(d_n)", "abs(d)"),
        }
        side, extra = _OLD_PI, ""
    formula, expression = formulas[d.estimator]
    text = (
        "The samples are the old policy's, so "
        f"$E_\\mathrm{{old}}[\\mathrm{{value}}] = {side}$, and the gradient is that of this KL."
        if d.estimator in ("k1", "k3")
        else f"The samples are the old policy's; the value equals ${side}$ to second order at best."
        if d.estimator == "k2"
        else "The samples are the old policy's; the value is a distance of its own, not a KL."
    )
    return Estimate(formula, expression, f"{text}{extra} {_FIXED}")


def _in_reward(d: Divergence) -> Estimate:
    formula, expression = _PLAIN[d.estimator]
    facts = {
        "k1": "k1, summed from each token to the end of its completion: the policy gradient of it "
        f"is exactly that of the KL of whole completions, ${_PI_REF}$.",
        "k2": "k2: biased in value, and its policy gradient is that of no KL.",
        "k3": f"k3: $E[\\mathrm{{value}}] = {_PI_REF}$ of the next token, but in the reward its "
        f"policy gradient is $\\nabla{_PI_REF} - \\nabla{_REF_PI}$; k1 is the exact one there.",
        "abs": "The absolute log-ratio: its policy gradient is that of no KL.",
    }
    where = " $\\ell_n$ is that of the sampling policy here."
    return Estimate(formula, expression, facts[d.estimator] + where)


def _rule(d: Divergence, setting: Setting) -> tuple[Equation, ...]:
    rule = d.adaptive
    if rule is None:
        return ()
    return (rule_equation(rule, setting),)


def rule_equation(rule: Adaptive, setting: Setting) -> Equation:
    """How β moves; a line of the objective."""
    target = number(rule.target)
    if rule.rule == "ppo":
        return equation(
            r"\beta",
            rf"2 \beta \text{{ if }} \mathrm{{KL}} > 1.5 \cdot {target},",
            rf"\quad \beta / 2 \text{{ if }} \mathrm{{KL}} < {target} / 1.5",
            relation=r"\leftarrow",
        )
    sequences = setting.step_sequences
    count = "m" if sequences is None else str(sequences)
    error = rf"\mathrm{{clip}}(\mathrm{{KL}} / {target} - 1, -0.2, 0.2)"
    return equation(
        r"\beta",
        rf"\beta \cdot (1 + {error}",
        rf"\cdot \, {count} / {number(rule.horizon)})",
        relation=r"\leftarrow",
    )


def _rule_text(d: Divergence) -> str:
    rule = d.adaptive
    if rule is None:
        return ""
    if rule.rule == "ppo":
        return (
            r" After each step $\beta$ follows PPO's own rule, with KL the token mean of "
            rf"${_OLD_PI}$ once the step's updates are done, and target {number(rule.target)}: "
            "doubled, halved, or left."
        )
    return (
        r" After each step $\beta$ follows Ziegler's proportional rule, with KL the mean over "
        rf"completions of the summed k1, target {number(rule.target)}, and $m$ the completions of "
        "the step."
    )
