"""What A_n is in a row: the equation with the row's figures, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from keel.algorithms.spec import (
    GAE,
    TD,
    Advantage,
    Algorithm,
    BatchNormalised,
    CustomAdvantage,
    GreedyBaseline,
    GroupRelative,
    LeaveOneOut,
    MonteCarlo,
    NStep,
    Optimal,
    ProcessGroupRelative,
    ValueBaseline,
)
from keel.algorithms.symbols import function, number, quote
from keel.algorithms.terms import Equation, Setting, Term, equation

A = "A_n"
WHITENING_EPSILON = 1e-8
"""Added to the variance under the root (`keel.objective.whitening`)."""


def advantage(row: Algorithm, setting: Setting, source: str) -> Term:
    """The advantage's term."""
    choice = row.advantage
    equations, text = _describe(row, choice, setting)
    whitened = isinstance(choice, BatchNormalised) or choice.whiten
    if whitened:
        equations = (*equations, _whitening())
        text += (
            " Whitened over all $N$ tokens of the optimizer batch, on all ranks, with the unbiased "
            "variance" + (", after the returns of the value model are taken." if row.value else ".")
        )
    return Term(
        key="advantage",
        symbol=A,
        title="Advantage",
        kind=choice.kind,
        equations=equations,
        text=text,
        source=source,
    )


def return_symbol(row: Algorithm) -> str:
    """The reward of a whole completion: with a tilde where the divergence was taken from it."""
    return r"\tilde{R}" if _divergence_in_reward(row) else "R"


def _divergence_in_reward(row: Algorithm) -> bool:
    d = row.reward_divergence
    return d is not None and (d.beta > 0 or d.adaptive is not None)


def options_text(options: Mapping[str, Any]) -> str:
    """A user's keyword arguments, as they stand in the row."""
    return quote(", ".join(f"{key} = {value!r}" for key, value in options.items()))


def _describe(
    row: Algorithm, choice: Advantage, setting: Setting
) -> tuple[tuple[Equation, ...], str]:
    match choice:
        case GAE():
            return _gae(row, choice)
        case MonteCarlo():
            return _monte_carlo(row, choice)
        case TD():
            text = f"The one-step temporal difference: least variance, most bias. {_state(row)}"
            return (_td(A, choice.gamma),), text
        case NStep():
            return _n_step(row, choice)
        case GroupRelative():
            return _group_relative(row, choice, setting)
        case LeaveOneOut():
            return _leave_one_out(row, setting)
        case Optimal():
            return _optimal(row, setting)
        case BatchNormalised():
            return _batch_normalised(row, choice)
        case GreedyBaseline():
            return _greedy(row)
        case ProcessGroupRelative():
            return _process(choice, setting)
        case ValueBaseline():
            return _value_baseline(row)
        case CustomAdvantage():
            return _custom(choice)
        case _:
            assert_never(choice)


_LAST = "$r_n$ is the completion's reward on its last token and 0 before"
_VALUES = (
    "$V_n$ is the value model's "
    "estimate before token $n$ is written, 0 after the last: a completion cut at the budget ends "
    "like any other. The recursion skips tool output, it does not decay through it."
)
_TIES = "A group whose rewards are all equal gives exactly 0."


def _rewards(row: Algorithm) -> str:
    return f"{_LAST}{_less(row)}"


def _less(row: Algorithm) -> str:
    return ", less the divergence on every token" if _divergence_in_reward(row) else ""


def _state(row: Algorithm) -> str:
    return f"{_rewards(row)}; {_VALUES}"


def _td(left: str, gamma: float) -> Equation:
    return equation(left, "r_n", rf"+ {number(gamma)} \cdot V_{{n+1}}", "- V_n")


def _whitening() -> Equation:
    return equation(
        A,
        rf"\frac{{A_n - \mathrm{{mean}}(A)}}"
        rf"{{\sqrt{{\mathrm{{var}}(A) + {number(WHITENING_EPSILON)}}}}}",
        relation=r"\leftarrow",
    )


def _over(setting: Setting) -> str:
    size = setting.group_size
    return (
        "the completions of one prompt" if size is None else f"the {size} completions of one prompt"
    )


def _gae(row: Algorithm, choice: GAE) -> tuple[tuple[Equation, ...], str]:
    gamma = number(choice.gamma)
    equations = [_td(r"\delta_n", choice.gamma)]
    if choice.adaptive_alpha is None:
        lam = number(choice.lam)
        figures = rf"$\gamma = {gamma}$, $\lambda = {lam}$."
    else:
        lam = r"\lambda_i"
        alpha = number(choice.adaptive_alpha)
        equations.append(equation(lam, rf"\max(0, 1 - \frac{{1}}{{{alpha} \cdot L_i}})"))
        figures = (
            rf"$\gamma = {gamma}$; $\lambda_i$ grows with the length $L_i$ of the completion "
            rf"(VAPO's rule, $\alpha = {alpha}$)."
        )
    total = equation(A, rf"\sum_{{k\geq0}} ({gamma} \cdot {lam})^k \, \delta_{{n+k}}")
    text = f"Generalised advantage estimation, {figures} {_state(row)}"
    return (total, *equations), text


def _monte_carlo(row: Algorithm, choice: MonteCarlo) -> tuple[tuple[Equation, ...], str]:
    baseline, words = {
        "value": ("- V_n", f"The return to go less the value model's estimate. {_state(row)}"),
        "batch_mean": (
            rf"- \mathrm{{mean}}_S({return_symbol(row)})",
            "The return to go less the mean reward of all completions of the step. "
            f"{_rewards(row)}.",
        ),
        "none": (
            "",
            f"The return to go, with no baseline. {_rewards(row)}.",
        ),
    }[choice.baseline]
    parts = (_to_go(choice.gamma), baseline) if baseline else (_to_go(choice.gamma),)
    return (equation(A, *parts),), f"{words} $\\gamma = {number(choice.gamma)}$."


def _to_go(gamma: float) -> str:
    return rf"\sum_{{k\geq0}} {number(gamma)}^k \, r_{{n+k}}"


def _n_step(row: Algorithm, choice: NStep) -> tuple[tuple[Equation, ...], str]:
    gamma, steps = number(choice.gamma), choice.steps
    total = equation(A, rf"\sum_{{0\leq k<{steps}}} {gamma}^k \, \delta_{{n+k}}")
    text = (
        f"The temporal differences of the next {steps} tokens: rewards so far, then the value "
        f"model's estimate. {_state(row)}"
    )
    return (total, _td(r"\delta_n", choice.gamma)), text


def _group_relative(
    row: Algorithm, choice: GroupRelative, setting: Setting
) -> tuple[tuple[Equation, ...], str]:
    reward = return_symbol(row)
    centred = rf"{reward}_i - \mathrm{{mean}}_g({reward})"
    mean = rf"$\mathrm{{mean}}_g$ is over {_over(setting)}"
    if choice.scale == "none":
        text = (
            f"{mean}; not divided by a standard deviation, so that a prompt nearly always solved "
            f"or nearly always failed is not weighed up. {_TIES}"
        )
        return (equation(A, centred),), text
    where = "g" if choice.scale == "std" else "S"
    over = rf"\mathrm{{std}}_{where}({reward})"
    if choice.epsilon > 0:
        over += f" + {number(choice.epsilon)}"
    spread = (
        r"so is $\mathrm{std}_g$" if choice.scale == "std" else r"$\mathrm{std}_S$ over the batch"
    )
    kind = "unbiased one" if choice.ddof else "population's, not the unbiased one"
    text = (
        f"{mean}, {spread}; the standard deviation is the {kind}. One number for all tokens "
        f"of a completion. {_TIES}"
    )
    total = equation(A, rf"\frac{{{centred}}}{{{over}}}")
    return (total, _deviation(reward, where, choice.ddof)), text


def _deviation(reward: str, where: str, ddof: int) -> Equation:
    count = "G" if where == "g" else "S"
    below = f"{count} - 1" if ddof else count
    return equation(
        rf"\mathrm{{std}}_{where}({reward})^2",
        rf"\frac{{1}}{{{below}}} \cdot \sum_{{j\in {where}}}",
        rf"({reward}_j - \mathrm{{mean}}_{where}({reward}))^2",
    )


def _leave_one_out(row: Algorithm, setting: Setting) -> tuple[tuple[Equation, ...], str]:
    reward, size = return_symbol(row), setting.group_size
    others = "G-1" if size is None else str(size - 1)
    count = "$G$" if size is None else str(size)
    text = (
        f"The reward less the mean reward of the other completions of the prompt, of {count} in "
        f"all: an unbiased baseline. {_TIES}"
    )
    total = equation(A, f"{reward}_i", rf"- \frac{{1}}{{{others}}} \sum_{{j\neq i}} {reward}_j")
    return (total,), text


def _optimal(row: Algorithm, setting: Setting) -> tuple[tuple[Equation, ...], str]:
    reward = return_symbol(row)
    total = equation(
        A, f"{reward}_i", rf"- \frac{{\sum_{{j\in g}} L_j {reward}_j}}{{\sum_{{j\in g}} L_j}}"
    )
    text = (
        f"The baseline weighs {_over(setting)} by their length $L_j$ in tokens: the one of least "
        f"variance where a gradient's size grows with the length. {_TIES}"
    )
    return (total,), text


def _batch_normalised(row: Algorithm, choice: BatchNormalised) -> tuple[tuple[Equation, ...], str]:
    equations: tuple[Equation, ...] = (equation(A, _to_go(choice.gamma)),)
    reward = (
        r"the completion's reward less the mean reward of its group, $R_i - \mathrm{mean}_g(R)$,"
        if choice.group_baseline
        else "the completion's reward $R_i$"
    )
    text = (
        rf"The return to go, $\gamma = {number(choice.gamma)}$; $r_n$ is {reward} on the last "
        f"token and 0 before{_less(row)}."
    )
    return equations, text


def _greedy(row: Algorithm) -> tuple[tuple[Equation, ...], str]:
    total = equation(A, f"{return_symbol(row)}_i", r"- R_\mathrm{greedy}")
    text = (
        r"$R_\mathrm{greedy}$ is the reward of the greedy completion of the same prompt, sampled "
        "and scored beside the others and never trained on. It needs no group."
    )
    return (total,), text


def _process(choice: ProcessGroupRelative, setting: Setting) -> tuple[tuple[Equation, ...], str]:
    below = r"\mathrm{std}_g(r)"
    if choice.epsilon > 0:
        below += f" + {number(choice.epsilon)}"
    steps = equation(r"\tilde{r}_k", rf"\frac{{r_k - \mathrm{{mean}}_g(r)}}{{{below}}}")
    total = equation(A, r"\sum_{k: \mathrm{end}(k) \geq n} \tilde{r}_k")
    text = (
        "$r_k$ is the reward of reasoning step $k$; mean and unbiased standard deviation are over "
        f"all steps of {_over(setting)}. A token gets the sum of the normalised rewards of its "
        "completion's steps that end at it or after it; tokens behind the last step get 0."
    )
    return (total, steps), text


def _value_baseline(row: Algorithm) -> tuple[tuple[Equation, ...], str]:
    text = (
        "The completion as one action: its reward less the value model's estimate $V_{q_i}$ for "
        "its prompt, read at the prompt's last token, before anything is written. One number for "
        "all tokens of a completion, so that one ratio for each completion goes with it."
    )
    return (equation(A, f"{return_symbol(row)}_i", "- V_{q_i}"),), text


def _custom(choice: CustomAdvantage) -> tuple[tuple[Equation, ...], str]:
    per = "token" if choice.per_token else "completion"
    given = f" With {options_text(choice.options)}." if choice.options else ""
    text = (
        f"Your own {quote(choice.function)}; it is handed those of the batch's rewards, lengths, "
        f"groups and values that it names, and gives one number a {per}.{given}"
    )
    return (equation(A, rf"{function(choice.function)}(\mathrm{{batch}})_n"),), text
