"""The terms of the objective besides the surrogate: divergence, distillation, value loss, entropy.

The divergence β D_n says to which policy, where, by which estimator, and what that one is worth.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import BaseModel, Discriminator, Field, Tag

from keel.algorithms.advantages import AdvantageTerm, return_symbol
from keel.algorithms.symbols import number
from keel.algorithms.terms import (
    SINGLE_UPDATE,
    Choices,
    Coefficient,
    Description,
    Equation,
    FrozenModel,
    Lazy,
    Positive,
    Setting,
    Unit,
    UnusedIf,
    equation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.algorithms.signals import RewardSignals
    from keel.objective import distillation, divergences, gae
else:
    distillation, divergences, gae = Lazy("distillation"), Lazy("divergences"), Lazy("gae")


_PI_REF = r"\mathrm{KL}(\pi \Vert \pi_\mathrm{ref})"
_REF_PI = r"\mathrm{KL}(\pi_\mathrm{ref} \Vert \pi)"
_OLD_PI = r"\mathrm{KL}(\pi_\mathrm{old} \Vert \pi)"
_PI_OLD = r"\mathrm{KL}(\pi \Vert \pi_\mathrm{old})"
_VALUE, _GRADIENT = r"E[\mathrm{value}]", r"E[\mathrm{gradient}]"
_FIXED = (
    "Token by token this is about the KL of the next token, with the distribution of states held "
    "fixed, not about the KL of whole completions."
)
_PLAIN: Final = {
    "k1": "d_n",
    "k2": r"\frac{1}{2} d_n^2",
    "k3": "e^{-d_n} + d_n - 1",
    "abs": r"\mathrm{abs}(d_n)",
}
"""Each estimator of KL(π‖other) from samples of π."""
_FROM_OLD: Final = _PLAIN | {"k1": "-d_n", "k3": "e^{d_n} - d_n - 1"}
"""Each estimator of KL(old‖π) from samples of the old policy."""
_IN_LOSS: Final = {
    "k1": f"k1: on policy, ${_VALUE} = {_PI_REF}$, but ${_GRADIENT} = 0$.",
    "k2": "k2: on policy, the value is biased (right to second order in $d_n$), and "
    f"${_GRADIENT} = \\nabla{_PI_REF}$.",
    "k3": f"k3: on policy, ${_VALUE} = {_PI_REF}$, but the gradient is that of the other side: "
    f"${_GRADIENT} = \\nabla{_REF_PI}$.",
    "abs": "On policy, the value is at least the KL and no estimate of it, and the gradient is "
    "that of the distance $\\sum_v \\mathrm{abs}(\\pi(v) - \\pi_\\mathrm{ref}(v))$.",
}
_IN_REWARD: Final = {
    "k1": "k1, summed from each token to the end of its completion: the policy gradient of it is "
    f"exactly that of the KL of whole completions, ${_PI_REF}$.",
    "k2": "k2: biased in value, and its policy gradient is that of no KL.",
    "k3": f"k3: ${_VALUE} = {_PI_REF}$ of the next token, but in the reward its policy gradient is "
    f"$\\nabla{_PI_REF} - \\nabla{_REF_PI}$; k1 is the exact one there.",
    "abs": "The absolute log-ratio: its policy gradient is that of no KL.",
}

_NO_HORIZON = UnusedIf(lambda key: key.table.rule == "ppo", 'rule = "ppo" has no horizon')


class Adaptive(FrozenModel):
    """A β that follows a target KL; `rule` is PPO's doubling or Ziegler's proportional one."""

    rule: Literal["ppo", "ziegler"] = "ppo"
    target: Positive = 0.01
    horizon: Annotated[Positive, _NO_HORIZON] = 10_000.0

    def describe(self, setting: Setting) -> Description:
        """How β moves, and by which KL."""
        target = number(self.target)
        if self.rule == "ppo":
            parts = (
                rf"2 \beta \text{{ if }} \mathrm{{KL}} > 1.5 \cdot {target},",
                rf"\quad \beta / 2 \text{{ if }} \mathrm{{KL}} < {target} / 1.5",
            )
            text = (
                r" After each step $\beta$ follows PPO's own rule, with KL the token mean of "
                rf"${_OLD_PI}$ once the step's updates are done, and target {target}: doubled, "
                "halved, or left."
            )
        else:
            sequences = setting.step_sequences
            count = "m" if sequences is None else str(sequences)
            error = rf"\mathrm{{clip}}(\mathrm{{KL}} / {target} - 1, -0.2, 0.2)"
            parts = (rf"\beta \cdot (1 + {error}", rf"\cdot \, {count} / {number(self.horizon)})")
            text = (
                r" After each step $\beta$ follows Ziegler's proportional rule, with KL the mean "
                rf"over completions of the summed k1, target {target}, and $m$ the completions of "
                "the step."
            )
        return Description((equation(r"\beta", *parts, relation=r"\leftarrow"),), text)


class Divergence(FrozenModel):
    """β D. To the old policy, `unbiased = false` is KL(old‖π) and `true` is KL(π‖old)."""

    to: Literal["reference", "old"] = "reference"
    where: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = "k3"
    beta: Coefficient = 0.04
    unbiased: bool | Literal["ratio"] = False
    """Multiply by the token ratio to the sampling policy (in the loss), or with "ratio" by that of
    the surrogate, as TRL does."""
    adaptive: Adaptive | None = None
    source: ClassVar[str] = "Schulman 2020; arXiv:2402.03300 eq. 4"

    @property
    def active(self) -> bool:
        """Whether β is, or may become, other than 0."""
        return self.beta > 0 or self.adaptive is not None

    def estimate(self, log_prob_N: Tensor, other_log_prob_N: Tensor) -> Tensor:
        """The estimator of KL(π‖other), from samples of π; not of `full`."""
        name = "absolute" if self.estimator == "abs" else self.estimator
        found: Tensor = getattr(divergences, name)(log_prob_N, other_log_prob_N)
        return found

    def value(
        self,
        log_prob_N: Tensor,
        old_N: Tensor,
        reference_N: Tensor | None,
        full_N: Tensor | None,
        log_ratio_N: Tensor,
    ) -> Tensor:
        """D_n in the loss; `full_N` is the exact divergence over the vocabulary, `log_ratio_N`
        that of the surrogate's ratio."""
        other_N = full_N if self.estimator == "full" else old_N if self.to == "old" else reference_N
        assert other_N is not None
        if self.estimator == "full":
            return other_N
        if self.to == "old" and not self.unbiased:
            # The samples come from the other side of this divergence: KL(old‖π).
            return self.estimate(other_N, log_prob_N)
        estimate_N = self.estimate(log_prob_N, other_N)
        if self.unbiased == "ratio":
            return divergences.weighted(estimate_N, log_ratio_N, log_ratio_N.detach() * 0)
        if self.unbiased:
            return divergences.weighted(estimate_N, log_prob_N, old_N)
        return estimate_N

    # ------------------------------------------------------------ explained

    @property
    def symbol(self) -> str:
        """β as it stands in a formula: its figure, or the symbol where a rule moves it."""
        return number(self.beta) if self.adaptive is None else r"\beta"

    @property
    def summand(self) -> str:
        """The estimator's formula, in brackets where a factor stands before it."""
        formula = self._estimator()[0]
        return f"({formula})" if any(sign in formula[1:] for sign in ("+ ", "- ")) else formula

    def in_reward(self, algorithm: Choices) -> tuple[Equation, ...]:
        """How the divergence enters the reward, if it does."""
        if self.where == "loss" or not self.active:
            return ()
        if algorithm.per_token_advantage:
            last = r"[n = \mathrm{last}_i] \, R_i"
            return (equation("r_n", last, rf"- {self.symbol} \, {self.summand}"),)
        total = rf"- {self.symbol} \sum_{{n\in i}} {self.summand}"
        return (equation(f"{return_symbol(algorithm)}_i", "R_i", total),)

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        """The equations of D, of d, of the reward and of β's rule, where there are such."""
        if not self.active:
            text = r"$\beta = 0$: the term is gone, and with it the reference policy."
            return Description((), text)
        formula, text = self._estimator()
        equations = [equation("D_n", formula)]
        if self.estimator != "full":
            other = "ref" if self.to == "reference" else "old"
            equations.append(equation("d_n", r"\ell_n", rf"- \ell_{{\mathrm{{{other}}},n}}"))
        equations += self.in_reward(algorithm)
        figure = rf"$\beta = {number(self.beta)}$"
        if self.adaptive is not None:
            rule = self.adaptive.describe(setting)
            equations += rule.equations
            figure, text = f"{figure} at first", text + rule.text
        where = "a term of the loss with the surrogate's weights $w_n$."
        if self.where == "reward":
            how = (
                "taken from the reward of every token"
                if algorithm.per_token_advantage
                else "summed over the completion and taken from its reward"
            )
            where = f"{how}, without a gradient of its own."
        return Description(tuple(equations), f"{figure}, {where} {text}")

    def _estimator(self) -> tuple[str, str]:
        """The estimator in LaTeX, and what it estimates."""
        if self.estimator == "full":
            return (
                r"\sum_v \pi(v) \log(\frac{\pi(v)}{\pi_\mathrm{ref}(v)})",
                "The whole vocabulary, no estimate: value "
                f"${_PI_REF}$ and its gradient, exactly. {_FIXED}",
            )
        formula = _PLAIN[self.estimator]
        if self.where == "reward":
            text = f"{_IN_REWARD[self.estimator]} $\\ell_n$ is that of the sampling policy here."
            return formula, text
        if self.to == "old":
            return self._to_old()
        if not self.unbiased:
            return formula, f"{_IN_LOSS[self.estimator]} {_FIXED}"
        formula = f"({formula})" if self.estimator == "k3" else formula
        text = (
            f"${_VALUE} = {_PI_REF}$ and ${_GRADIENT} = \\nabla{_PI_REF}$."
            if self.estimator in ("k1", "k3")
            else "the gradient is that of the expected value, which is biased as a KL."
        )
        if self.unbiased == "ratio":
            text = (
                r"Weighed by the surrogate's ratio $\rho_n$: of tokens, "
                rf"${_VALUE} = {_PI_REF}$ and ${_GRADIENT} = \nabla{_PI_REF}$; of completions both "
                "are biased."
            )
            return rf"\rho_n \, {formula}", f"{text} {_FIXED}"
        sampling = (
            r"Weighed by the token ratio to the sampling policy, $\rho_n = "
            r"\exp(\ell_n - \ell_{\mathrm{old},n})$: "
        )
        return rf"\rho_n \, {formula}", f"{sampling}{text} {_FIXED}"

    def _to_old(self) -> tuple[str, str]:
        formula = _FROM_OLD[self.estimator]
        side, extra = _OLD_PI, ""
        if self.unbiased:
            formula = {
                "k1": r"\rho_n d_n",
                "k2": r"\rho_n \frac{1}{2} d_n^2",
                "k3": r"\rho_n d_n - (\rho_n - 1)",
                "abs": r"\rho_n \, \mathrm{abs}(d_n)",
            }[self.estimator]
            side, extra = _PI_OLD, r" $\rho_n = e^{d_n}$."
        exact = (
            "The samples are the old policy's, so "
            f"$E_\\mathrm{{old}}[\\mathrm{{value}}] = {side}$, and the gradient is that of this KL."
        )
        text = {
            "k2": "The samples are the old policy's; the value equals "
            f"${side}$ to second order at best.",
            "abs": "The samples are the old policy's; the value is a distance of its own, not a "
            "KL.",
        }.get(self.estimator, exact)
        return formula, f"{text}{extra} {_FIXED}"

    def refusals(self, algorithm: Choices) -> Iterator[str]:
        """Why its parameters do not go together, or not with the advantage."""
        plain = self.where == "loss" and self.to == "reference" and not self.unbiased
        if plain and self.estimator == "k1":
            yield (
                "the gradient of k1 in the loss is zero in expectation: use k2 or k3, "
                'unbiased = true, or where = "reward"'
            )
        if self.where == "reward" and algorithm.advantage.kind == "process_group_relative":
            yield (
                'advantage "process_group_relative" reads the rewards of steps, not of tokens: '
                'a divergence in the reward would be lost, set where = "loss"'
            )
        if self.where == "reward" and algorithm.reads_components:
            yield (
                f'advantage "{algorithm.advantage.kind}" reads each reward for itself: a '
                'divergence in the reward would be lost, set where = "loss"'
            )
        if self.where == "reward" and algorithm.needs_positive:
            yield (
                f'advantage "{algorithm.advantage.kind}" divides by the mean reward: a divergence '
                'in the reward makes it negative, set where = "loss"'
            )
        if self.where == "reward" and not algorithm.needs_reward:
            yield (
                f'advantage "{algorithm.advantage.kind}" reads no reward: a divergence in it would '
                'be lost, set where = "loss"'
            )
        if self.to == "old" and self.adaptive is not None and self.adaptive.rule == "ziegler":
            yield (
                "Ziegler's rule follows the divergence to the reference: to the old policy set "
                'adaptive.rule = "ppo"'
            )
        if self.to == "reference" and self.adaptive is not None and self.adaptive.rule == "ppo":
            yield (
                "PPO's rule follows the divergence to the old policy: to the reference set "
                'adaptive.rule = "ziegler"'
            )
        if self.where == "reward" and self.to == "old":
            yield (
                "in the reward, the divergence to the old policy is that of the sampling policy to "
                'itself, zero: set to = "reference" or where = "loss"'
            )
        if self.where == "reward" and self.unbiased:
            yield (
                "unbiased weighs a divergence in the loss by the token ratio; in the reward there "
                "is no ratio: set unbiased = false"
            )
        if self.where == "reward" and self.estimator == "full":
            yield (
                'estimator "full" is a gradient through the whole vocabulary, which a reward does '
                'not pass on: set estimator = "k1"'
            )
        if self.to == "old" and self.estimator == "full":
            yield (
                "the full divergence to the old policy would keep its logits for every token: "
                'use estimator = "k3"'
            )
        if self.unbiased and self.estimator == "full":
            yield (
                "the full divergence is exact over the vocabulary: there is no sample to weigh, "
                "set unbiased = false"
            )
        if self.unbiased == "ratio" and (self.to == "old" or algorithm.ratio == "none"):
            yield (
                'unbiased = "ratio" weighs the divergence to the reference by the ratio of the '
                "surrogate: set unbiased = true, which is by the ratio of tokens"
            )
        if self.beta == 0 and self.adaptive is not None:
            yield "an adaptive beta is multiplied, and 0 stays 0: start from beta > 0"


class Distillation(FrozenModel):
    """A teacher's term T_n; each subclass is one place."""

    place: str
    coefficient: Positive = 1.0

    @property
    def symbol(self) -> str:
        """The coefficient before a sum or a term; nothing for 1."""
        return "" if self.coefficient == 1 else rf"{number(self.coefficient)} \, "


class AdvantageDistillation(Distillation):
    """The teacher's log-ratio at the sampled tokens, added to the advantage after whitening."""

    place: Literal["advantage"] = "advantage"
    gamma: Unit = 0.0
    """Discounts the log-ratios of the tokens that follow; 0 leaves them out."""
    prefix_gain: Coefficient = 0.0
    """g of IW-OPD: by how much more the first token counts than the last."""

    @property
    def source(self) -> str:
        """The papers."""
        return "Lu 2025, On-Policy Distillation" + (
            "; arXiv:2606.22600" if self.prefix_gain else ""
        )

    def value(self, signals: RewardSignals) -> Tensor:
        """What is added to A_n."""
        old_N, teacher_N = signals.need("old_log_prob_N"), signals.need("teacher_log_prob_N")
        lengths_S = signals.lengths_S
        term_N = distillation.teacher_log_ratio(old_N, teacher_N, lengths_S, gamma=self.gamma)
        term_N = distillation.prefix_weighted(term_N, lengths_S, gain=self.prefix_gain)
        found: Tensor = self.coefficient * term_N
        return found

    def describe(self) -> Description:
        """The equations of T, and of A with it."""
        term = r"\ell_{\mathrm{teacher},n} - \ell_{\mathrm{old},n}"
        of = "the next token, with the distribution of states held fixed"
        if self.gamma > 0:
            of = "whole completions" + ("" if self.gamma == 1 else ", biased by the discount")
            term = rf"\sum_{{k\geq0}} {number(self.gamma)}^k ({term.replace('n}', 'n+k}')})"
        text = (
            r"Minus k1 of the policy to a teacher $\pi_\mathrm{teacher}$, at the sampled tokens, "
            "added to the advantage after any normalisation. On policy, its expected gradient is "
            rf"minus $\nabla\mathrm{{KL}}(\pi \Vert \pi_\mathrm{{teacher}})$ of {of}."
        )
        added = equation("A_n", "A_n", f"+ {self.symbol}T_n", relation=_TO)
        equations = [added, equation("T_n", term)]
        if self.prefix_gain:
            early = r"\frac{\sum_{j<n} \mathrm{abs}(T_j)}{\sum_j \mathrm{abs}(T_j)}"
            factor = rf"(1 + {number(self.prefix_gain)} \cdot (1 - {early}))"
            equations.append(equation("T_n", rf"T_n {factor}", relation=_TO))
            text += " So without the last line, whose sums are over the completion of $n$."
        return Description(tuple(equations), text)


class LossDistillation(Distillation):
    """The divergence to the teacher over the vocabulary, with the surrogate's weights."""

    place: Literal["loss"] = "loss"
    mix: Unit = 0.5
    """β of the divergence of Jensen and Shannon: 0 is KL(teacher‖π), 1 is KL(π‖teacher)."""
    top_k: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    """Over the teacher's k likeliest tokens, and one that has the rest; None: the vocabulary."""
    source: ClassVar[str] = "arXiv:2306.13649 eq. 1"

    def value(self, log_prob_NV: Tensor, teacher_NV: Tensor) -> Tensor:
        """T_n from log-probabilities of the vocabulary."""
        found: Tensor = distillation.jensen_shannon(
            log_prob_NV, teacher_NV, mix=self.mix, top_k=self.top_k
        )
        return found

    def describe(self) -> Description:
        """The equations of T."""
        teacher, mixed = r"\pi_\mathrm{teacher}", r"\pi_\mathrm{mix}"
        beta, rest = number(self.mix), number(round(1 - self.mix, 12))
        equations = [
            equation(
                "T_n",
                rf"{beta} \, \mathrm{{KL}}({teacher} \Vert {mixed})",
                rf"+ {rest} \, \mathrm{{KL}}(\pi \Vert {mixed})",
            ),
            equation(mixed, rf"{beta} \, {teacher}", rf"+ {rest} \, \pi"),
        ]
        if self.mix in (0, 1):
            pair = (r"\pi", teacher) if self.mix else (teacher, r"\pi")
            equations = [equation("T_n", rf"\mathrm{{KL}}({pair[0]} \Vert {pair[1]})")]
        where = "the whole vocabulary, no estimate"
        if self.top_k is not None:
            where = f"the teacher's {self.top_k} likeliest tokens and one that has the rest"
            best = rf"\mathrm{{top}}_{{{self.top_k}}}({teacher})"
            equations.append(equation("v", rf"{best}, \mathrm{{rest}}", relation=r"\in"))
        text = f"A term of the loss with the surrogate's weights $w_n$, over {where}. {_FIXED}"
        return Description(tuple(equations), text)


_TO: Final = r"\leftarrow"


class ValueLoss(FrozenModel):
    """coefficient · ½ max((V−R)², (clip(V, V_old ± clip) − R)²), a token mean."""

    coefficient: Coefficient = 0.1
    clip: Annotated[Positive | None, SINGLE_UPDATE] = 0.2
    source: ClassVar[str] = "arXiv:2403.17031"

    def value(self, value_N: Tensor, old_N: Tensor, return_N: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each token without the coefficient, and where the clip acted."""
        return gae.value_loss(value_N, old_N, return_N, clip=self.clip)

    def describe(self, advantage: AdvantageTerm, setting: Setting) -> Description:
        """First the equation of the loss, then that of the returns R̂."""
        returns, text = advantage.describe_returns()
        text += ". A token mean, whatever the weights of the surrogate." + (
            " A head on the policy's backbone: both losses move the same weights."
            if setting.value == "head"
            else " A critic with weights of its own."
        )
        formula = r"(V_n - \hat{R}_n)^2"
        if self.clip is not None:
            near = rf"V_n, V_{{\mathrm{{old}},n}} \pm {number(self.clip)}"
            formula = rf"\max({formula}, \, (\mathrm{{clip}}({near}) - \hat{{R}}_n)^2)"
        mean = r"\cdot \frac{1}{N} \cdot \sum_n \frac{1}{2}"
        loss = equation(r"L_V(\phi)", f"{number(self.coefficient)} {mean} {formula}")
        return Description((loss, returns), text)


class AdaptiveEntropy(FrozenModel):
    """A coefficient of the entropy bonus that follows a target entropy, in nats per token."""

    coefficient: Coefficient = 0.0
    """At first."""
    target: Positive = 0.2
    delta: Coefficient = 0.005
    maximum: Coefficient = 1.0


if TYPE_CHECKING:
    Bonus = float | AdaptiveEntropy
else:  # the tags are in no message
    Bonus = Annotated[
        Annotated[Coefficient, Tag("$number")] | Annotated[AdaptiveEntropy, Tag("$table")],
        Discriminator(lambda x: "$table" if isinstance(x, dict | BaseModel) else "$number"),
    ]


def describe_entropy(bonus: Bonus) -> Description:
    """The entropy bonus: a coefficient, or the rule that moves it."""
    entropy = equation("H_n", r"- \sum_v \pi(v) \log \pi(v)")
    text = "Over the whole vocabulary, exact; coefficient"
    if not isinstance(bonus, AdaptiveEntropy):
        return Description((entropy,), f"{text} {number(bonus)}, a token mean.")
    target, delta, most = (number(x) for x in (bonus.target, bonus.delta, bonus.maximum))
    low = rf"\mathrm{{mean}}(H) \leq {target}"
    up = rf"\min(c + {delta}, {most}) \text{{ if }} {low},"
    down = rf"\quad \max(c - {delta}, 0) \text{{ otherwise}}"
    start = equation("c", number(bonus.coefficient), r"\text{ at first}")
    rule = equation("c", up, down, relation=r"\leftarrow")
    return Description(
        (entropy, equation(r"\eta", f"c [{low}]"), start, rule),
        rf"{text} $\eta$, a token mean. The mean is over the tokens of the optimizer step before; "
        "the first one has the bonus.",
    )
