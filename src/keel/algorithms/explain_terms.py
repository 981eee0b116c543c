"""What ρ_n, s, w_n, the value loss, the entropy bonus and the correction are in a row."""

from __future__ import annotations

from typing import assert_never

from keel.algorithms.explain_advantage import options_text
from keel.algorithms.spec import (
    GAE,
    Algorithm,
    Cispo,
    Clip,
    CustomSurrogate,
    Geometric,
    LogProb,
    Ratio,
    Sapo,
    Surrogate,
    Unclipped,
    ValueBaseline,
    ValueLoss,
)
from keel.algorithms.symbols import function, number, offset, quote
from keel.algorithms.terms import Equation, Setting, Term, equation

_LOG_RATIO = r"\ell_n - \ell_{\mathrm{old},n}"
_SUM = r"\sum_{t\in i} (\ell_t - \ell_{\mathrm{old},t})"
_STORED = (
    r"$\ell_\mathrm{old}$ is the log-probability under the policy that sampled: a stored number, "
    "no model."
)


def ratio(row: Algorithm, setting: Setting, source: str) -> Term:
    """The ratio's term."""
    equations, text = _ratio(row.ratio)
    if row.ratio != "none":
        if setting.one_update:
            text += (
                r" With one update per batch $\rho_n = 1$ in value, and only its gradient counts."
            )
        if setting.old_log_probs == "engine":
            text += (
                " The sampling engine's own log-probabilities stand for the old ones: equal to the "
                "trainer's to about 1e-6 in float32."
            )
    return Term(
        key="ratio", symbol=r"\rho_n", title="Ratio", kind=row.ratio, equations=equations,
        text=text, source=source,
    )  # fmt: skip


def _ratio(kind: Ratio) -> tuple[tuple[Equation, ...], str]:
    if kind == "none":
        return (), "No ratio: the surrogate reads the log-probability $\\ell_n$ itself."
    if kind == "token":
        return (equation(r"\rho_n", rf"\exp({_LOG_RATIO})"),), f"One for each token. {_STORED}"
    if kind == "sequence":
        return (
            (equation(r"\rho_n", rf"\exp(\frac{{1}}{{L_i}} \cdot {_SUM})"),),
            "One for each completion: the geometric mean of its token ratios, with a gradient "
            f"through every token. {_STORED}",
        )
    if kind == "sequence_token":
        return (
            (
                equation(
                    r"\rho_n", r"\mathrm{sg}[\rho_i] \cdot \exp(\ell_n - \mathrm{sg}[\ell_n])"
                ),
                equation(r"\rho_i", rf"\exp(\frac{{1}}{{L_i}} \cdot {_SUM})"),
            ),
            "The completion's ratio in value, with a gradient through the token alone "
            rf"($\mathrm{{sg}}$ stops it). {_STORED}",
        )
    if kind == "sequence_product":
        return (
            (equation(r"\rho_n", rf"\exp({_SUM})"),),
            f"The whole completion as one action: one ratio for all its tokens. {_STORED}",
        )
    assert_never(kind)


# ---------------------------------------------------------------- surrogate


def surrogate_formula(choice: Surrogate) -> tuple[str, str | None]:
    """s with the row's figures, as a formula and in Python (None for a user's function)."""
    match choice:
        case Unclipped():
            return r"\rho_n A_n", "rho*A"
        case Clip():
            low, high = offset(-choice.low, 1.0), offset(choice.high, 1.0)
            inner = rf"\min(\rho_n A_n, \, \mathrm{{clip}}(\rho_n, {low}, {high}) \, A_n)"
            python = f"min(rho*A, clip(rho, {1 - choice.low!r}, {1 + choice.high!r})*A)"
            if choice.dual is None:
                return inner, python
            dual = number(choice.dual)
            return (
                rf"\max({inner}, \, {dual} \min(A_n, 0))",
                f"max({python}, {choice.dual!r}*min(A, 0))",
            )
        case Cispo():
            floor, cap = number(choice.floor), number(choice.cap)
            return (
                rf"\mathrm{{sg}}[\mathrm{{clip}}(\rho_n, {floor}, {cap})] \, A_n \ell_n",
                f"clip(rho, {choice.floor!r}, {choice.cap!r})*A*log_prob",
            )
        case Sapo():
            positive, negative = choice.temperature_positive, choice.temperature_negative
            tau = f"where(A > 0, {positive!r}, {negative!r})"
            return (
                r"\frac{4}{\tau_n} \cdot \sigma(\tau_n (\rho_n - 1)) \, A_n",
                f"4/{tau}*sigmoid({tau}*(rho - 1))*A",
            )
        case Geometric():
            low, high = number(choice.low), number(choice.high)
            clipped = rf"g_i \, \mathrm{{clip}}(\log \rho_t, -{low}, {high})"
            mean = r"\frac{1}{L_i} \cdot \sum_{t\in i}"
            return (
                rf"A_n \exp({mean} g_i \min(g_i \log \rho_t, \, {clipped}))",
                "A*exp(mean(sign(A)*min(sign(A)*log(rho), "
                f"sign(A)*clip(log(rho), {-choice.low!r}, {choice.high!r}))))",
            )
        case LogProb():
            return r"A_n \ell_n", "A*log_prob"
        case CustomSurrogate():
            return rf"{function(choice.function)}(\log \rho, A, L)_n", None
        case _:
            assert_never(choice)


def surrogate_details(choice: Surrogate) -> tuple[Equation, ...]:
    """What stands beside s so that all its figures are there; lines of the objective."""
    if isinstance(choice, Sapo):
        positive = number(choice.temperature_positive)
        negative = number(choice.temperature_negative)
        right = rf"{positive} \text{{ if }} A_n > 0, \quad {negative} \text{{ otherwise}}"
        return (equation(r"\tau_n", right),)
    if isinstance(choice, Geometric):
        return (equation("g_i", r"\mathrm{sign}(A_n)"),)
    return ()


def surrogate(row: Algorithm, source: str) -> Term:
    """The surrogate's term."""
    formula, expression = surrogate_formula(row.surrogate)
    return Term(
        key="surrogate",
        symbol="s",
        title="Surrogate",
        kind=row.surrogate.kind,
        equations=(equation("s", formula), *surrogate_details(row.surrogate)),
        text=_surrogate_text(row.surrogate),
        source=source,
        expression=expression,
    )


def _surrogate_text(choice: Surrogate) -> str:
    match choice:
        case Unclipped():
            return "The importance-weighted advantage, unclipped: a divergence must hold it."
        case Clip():
            low, high = number(choice.low), number(choice.high)
            text = (
                rf"$\epsilon_\mathrm{{low}} = {low}$, $\epsilon_\mathrm{{high}} = {high}$. The "
                r"gradient stops where $\rho_n$ has passed the edge towards which $A_n$ pushes it; "
                "on the other side it stays."
            )
            if choice.dual is not None:
                text += (
                    rf" Where $A_n < 0$, $s$ is at least ${number(choice.dual)} A_n$ (dual clip)."
                )
            return text
        case Cispo():
            return (
                rf"The ratio only weighs the gradient of $\ell_n$, cut to "
                rf"[{number(choice.floor)}, {number(choice.cap)}] as an absolute ratio "
                r"($\mathrm{sg}$: no gradient through it). No token loses its gradient."
            )
        case Sapo():
            return (
                r"A soft gate in place of the clip ($\sigma$ the logistic function): slope 1 at "
                r"$\rho_n = 1$, fading on both sides, faster where $\tau_n$ is larger."
            )
        case Geometric():
            return (
                rf"The token log-ratios are clipped to [−{number(choice.low)}, "
                f"{number(choice.high)}] before the mean, only in the direction in which "
                "$A_n$ pushes; every token of the completion holds the same $s$."
            )
        case LogProb():
            return (
                r"REINFORCE: the gradient of $\ell_n$, times the advantage. Exact on policy only."
            )
        case CustomSurrogate():
            given = f" With {options_text(choice.options)}." if choice.options else ""
            return (
                f"Your own {quote(choice.function)}, of log-ratios, advantages and lengths, one "
                f"number a token.{given}"
            )
        case _:
            assert_never(choice)


# ---------------------------------------------------------------- weights


def weights(row: Algorithm, setting: Setting, source: str) -> Term:
    """The weights' term, with C's figure where it is known."""
    choice = row.weights
    text = {
        "sequence_mean": "A mean over completions of the mean over each one's tokens: a token of a "
        "long completion counts less. The weights sum to 1.",
        "token_mean": "A mean over all tokens of the optimizer batch: a long completion counts "
        "more. The weights sum to 1.",
        "constant": "A sum over a completion's tokens over a constant: no token's weight depends "
        "on the length of its completion.",
        "sequence_sum": "A mean over completions of the sum over each one's tokens: the exact "
        "gradient of the episode's log-probability.",
    }[choice.kind]
    size = choice.constant or setting.max_tokens
    budget = "C" if size is None else str(size)
    below = {
        "sequence_mean": r"S \cdot L_i",
        "token_mean": "N",
        "constant": rf"S \cdot {budget}",
        "sequence_sum": "S",
    }[choice.kind]
    if choice.kind == "constant":
        text += (
            " C (the completion budget) is the recipe's rollout.max_tokens."
            if size is None
            else f" C = {size}, {'set in the row' if choice.constant else 'the completion budget'}."
        )
    divisor = below.replace(r" \cdot ", "*").replace("L_i", "L")
    return Term(
        key="weights",
        symbol="w_n",
        title="Weights",
        kind=choice.kind,
        equations=(equation("w_n", rf"\frac{{1}}{{{below}}}"),),
        text=f"{text} Set once for the whole optimizer batch, before it is cut.",
        source=source,
        expression=f"1/({divisor})",
    )


# ---------------------------------------------------------------- beside the five choices


def value_equation(choice: ValueLoss) -> Equation:
    """The value loss with its coefficient and clip; a line of the objective."""
    error = r"(V_n - \hat{R}_n)^2"
    if choice.clip is not None:
        near = rf"V_n, V_{{\mathrm{{old}},n}} \pm {number(choice.clip)}"
        error = rf"\max({error}, \, (\mathrm{{clip}}({near}) - \hat{{R}}_n)^2)"
    return equation(
        r"L_V(\phi)",
        rf"{number(choice.coefficient)} \cdot \frac{{1}}{{N}} \cdot \sum_n \frac{{1}}{{2}} {error}",
    )


def value(row: Algorithm, setting: Setting, source: str) -> Term:
    """The value loss's term."""
    choice = row.value
    assert choice is not None
    text = r"The value model is regressed on $\hat{R}_n$, taken before any whitening"
    returns = equation(r"\hat{R}_n", r"A_n + V_{\mathrm{old},n}")
    advantage = row.advantage
    if isinstance(advantage, GAE):
        lam = _critic_lambda(advantage)
        if lam is None:
            text += rf", $\lambda = {number(advantage.lam)}$ as the actor's"
        else:
            text += rf", under the critic's own $\lambda = {number(lam)}$"
            decay = rf"({number(advantage.gamma)} \cdot {number(lam)})^k"
            traces = rf"\sum_{{k\geq0}} {decay} \, \delta_{{n+k}}"
            returns = equation(r"\hat{R}_n", rf"{traces} + V_{{\mathrm{{old}},n}}")
    if isinstance(advantage, ValueBaseline):
        text = (
            r"The value model is regressed on the return to go at every token of a completion; "
            r"$r_n$ is the completion's reward on its last token and 0 before, less the divergence "
            "on every token where that is part of the reward"
        )
        returns = equation(r"\hat{R}_n", r"\sum_{k\geq0} r_{n+k}")
    text += ". A token mean, whatever the weights of the surrogate."
    text += (
        " A head on the policy's backbone: both losses move the same weights."
        if setting.value == "head"
        else " A critic with weights of its own."
    )
    error = "(V - R)**2"
    if choice.clip is not None:
        c = repr(choice.clip)
        error = f"max((V - R)**2, (clip(V, V_old - {c}, V_old + {c}) - R)**2)"
    return Term(
        key="value",
        symbol="L_V",
        title="Value loss",
        kind="clipped" if choice.clip is not None else "squared error",
        equations=(value_equation(choice), returns),
        text=text,
        source=source,
        expression=f"{choice.coefficient!r}*0.5*{error}",
    )


def _critic_lambda(choice: GAE) -> float | None:
    """λ of the returns where it is not the actor's; 1 beside a length-adaptive actor (VAPO)."""
    if choice.critic_lam is None and choice.adaptive_alpha is not None:
        return 1.0
    return choice.critic_lam


def entropy(row: Algorithm, source: str) -> Term:
    """The entropy bonus's term."""
    return Term(
        key="entropy",
        symbol="H_n",
        title="Entropy bonus",
        kind="exact",
        equations=(equation("H_n", r"- \sum_v \pi(v) \log \pi(v)"),),
        text=f"Over the whole vocabulary, exact; coefficient {number(row.entropy)}, a token mean.",
        source=source,
    )


def correction(row: Algorithm, source: str) -> Term:
    """The off-policy correction's term."""
    choice = row.correction
    assert choice is not None
    difference = r"\ell_{\mathrm{old},n} - \ell_{\mathrm{engine},n}"
    if choice.level == "sequence":
        difference = r"\sum_{t\in i} (\ell_{\mathrm{old},t} - \ell_{\mathrm{engine},t})"
    cap, floor = number(choice.cap), number(choice.floor)
    omega = equation(r"\omega_n", rf"\exp({difference})")
    if choice.kind == "truncate":
        right = rf"\mathrm{{sg}}[\min(\omega_n, {cap})]"
        python = f"min(omega, {choice.cap!r})"
        text = "truncated importance sampling"
    else:
        right = rf"\mathrm{{sg}}[\omega_n \cdot [{floor} \leq \omega_n \leq {cap}]]"
        python = f"where((omega >= {choice.floor!r}) & (omega <= {choice.cap!r}), omega, 0)"
        text = "outside the band it is 0, and the token keeps its place in the weights"
    each = "token" if choice.level == "token" else "completion, an unnormalised product"
    return Term(
        key="correction",
        symbol="c_n",
        title="Off-policy correction",
        kind=f"{choice.kind}, per {choice.level}",
        equations=(equation("c_n", right), omega),
        text=f"One weight a {each}: {text}. It corrects for a sampling engine whose "
        "log-probabilities differ from the trainer's, and multiplies the surrogate alone.",
        source=source,
        expression=python,
    )
