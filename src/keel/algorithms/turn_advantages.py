"""The advantages A_n that compare the turns of a conversation, or the roles in a game."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from keel.algorithms.advantages import A, AdvantageTerm, less, over, return_symbol, rewards
from keel.algorithms.group_advantages import UNSCALED
from keel.algorithms.symbols import number
from keel.algorithms.terms import (
    Choices,
    Coefficient,
    Description,
    Lazy,
    Setting,
    Unit,
    UnusedIf,
    equation,
)

if TYPE_CHECKING:
    from torch import Tensor

    from keel.algorithms.signals import RewardSignals
    from keel.objective import baselines
else:
    baselines = Lazy("baselines")

_NO_TURNS = UnusedIf(lambda key: key.table.omega == 0, "omega = 0 leaves the turns out")


_TURNS = ("reward_N", "turn_N", "lengths_S")


def _relative(x: str, at: str, of: str, epsilon: float | None) -> str:
    """A number less the mean, over the standard deviation and ε (None: over nothing)."""
    centred = rf"{x}_{at} - \mathrm{{mean}}_{of}({x})"
    if epsilon is None:
        return f"({centred})"
    below = f" + {number(epsilon)}" if epsilon > 0 else ""
    return rf"\frac{{{centred}}}{{\mathrm{{std}}_{of}({x}){below}}}"


class GroupInGroup(AdvantageTerm):
    """GiGPO: a completion against its group, and each turn against those from the same state."""

    kind: Literal["group_in_group"] = "group_in_group"
    omega: Coefficient = 1.0
    gamma: Annotated[Unit, _NO_TURNS] = 0.95
    scale: Literal["std", "none"] = "std"
    epsilon: Annotated[Coefficient, UNSCALED] = 1e-4
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2505.10978 eq. 3, 6-8"
    reads_groups: ClassVar[bool] = True
    reads_turns: ClassVar[bool] = True
    places_steps: ClassVar[bool] = True
    module: ClassVar[str] = "turns"
    reads: ClassVar[tuple[str, ...]] = (*_TURNS, "anchor_N", "groups_S")

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        epsilon = self.epsilon if self.scale == "std" else None
        whole = _relative(return_symbol(algorithm), "i", "g", epsilon)
        turn = rf"+ {number(self.omega)} \cdot {_relative('G', 'u', 'a', epsilon)}"
        to_go = equation("G_u", rf"\sum_{{k\geq0}} {number(self.gamma)}^k \, r_{{u+k}}")
        text = (
            rf"$g$ are {over(setting)}; $a$ are their turns that begin at the same state as the "
            "token's turn $u$. A state is what the environment names, else the text that it "
            "replied; a first turn's is the prompt. $r_u$ are the rewards given in the turn"
            f"{less(algorithm)}. A turn alone gets 0 of the second part."
        )
        return Description((equation(A, whole, turn), to_go), text)


class TurnRelative(AdvantageTerm):
    """MT-GRPO: the reward of a turn against that turn of the group, and the outcome."""

    kind: Literal["turn_relative"] = "turn_relative"
    outcome_weight: Coefficient = 1.0
    epsilon: Coefficient = 1e-4
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2505.11821"
    reads_groups: ClassVar[bool] = True
    reads_turns: ClassVar[bool] = True
    places_steps: ClassVar[bool] = True
    module: ClassVar[str] = "turns"
    reads: ClassVar[tuple[str, ...]] = (*_TURNS, "groups_S")

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        turn = _relative("r_k", "{,i}", "g", self.epsilon).replace("r_k_{,i}", "r_{k,i}")
        weighed = rf"+ {number(self.outcome_weight)} \cdot \hat{{O}}_i"
        cases = rf"{turn} {weighed} \text{{ before the last turn}}, \quad \hat{{O}}_i"
        outcome = equation(r"\hat{O}_i", _relative("O", "i", "g", self.epsilon))
        text = (
            f"$r_{{k,i}}$ are the rewards given in turn $k$ of the token{less(algorithm)}; $O_i$ "
            f"are those of the last turn. Both are compared within {over(setting)}, a turn with "
            "the same turn of those that go on after it, and one alone gets 0."
        )
        return Description((equation(A, rf"{cases} \text{{ in it}}"), outcome), text)


class TurnGAE(AdvantageTerm):
    """Generalised advantage estimation over turns, then over the tokens of each."""

    kind: Literal["turn_gae"] = "turn_gae"
    gamma: Unit = 1.0
    lam: Unit = 0.95
    turn_gamma: Unit = 0.99
    turn_lam: Unit = 0.9
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2510.16907"
    reads_value: ClassVar[bool] = True
    reads_turns: ClassVar[bool] = True
    bootstraps: ClassVar[bool] = True
    places_steps: ClassVar[bool] = True
    module: ClassVar[str] = "turns"
    reads: ClassVar[tuple[str, ...]] = (*_TURNS, "value_N", "next_value_N")

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        def step(at: str, to: str, gamma: float, lam: float) -> tuple[str, str]:
            ahead = rf"+ {number(gamma)} \cdot {number(lam)} \cdot A_{{{to}+1}}"
            return rf"r_{at} + {number(gamma)} \cdot V_{{{to}+1}} - V_{at}", ahead

        text = (
            "The first line is within a turn, the second for its last token. $V_u$ is the value "
            "before the first token of turn $u$, 0 after the last turn; $r_u$ are the turn's "
            f"rewards. {rewards(algorithm)}. With one turn it is generalised advantage estimation."
        )
        equations = (
            equation(A, *step("n", "n", self.gamma, self.lam)),
            equation(A, *step("n", "u", self.turn_gamma, self.turn_lam)),
            equation("A_u", *step("u", "u", self.turn_gamma, self.turn_lam)),
        )
        return Description(equations, text)


class RoleRelative(AdvantageTerm):
    """RAE: the reward less the moving average of the rewards of the same role."""

    kind: Literal["role_relative"] = "role_relative"
    decay: Unit = 0.95
    """What a reward leaves of the average so far, for each completion."""
    role: str | None = Field(default=None, min_length=1)
    """The column of prompts that names the role; none: the task's name does."""
    whiten: bool = False
    source: ClassVar[str] = "arXiv:2506.24119"
    stateful: ClassVar[bool] = True

    def value(self, signals: RewardSignals) -> Tensor:
        return self._made(signals)[0]

    def next_state(self, signals: RewardSignals) -> Mapping[str, float]:
        return self._made(signals)[1]

    def _made(self, signals: RewardSignals) -> tuple[Tensor, Mapping[str, float]]:
        """A, and the averages after it."""
        if self.role is not None and not signals.roles:
            raise ValueError("the advantage needs roles, and the batch has none")
        roles, state = signals.roles or ("",) * len(signals.reward_S), signals.state
        names = sorted(set(roles))
        advantage_S, after_R = baselines.role_relative(
            signals.reward_S,
            signals.groups_S.new_tensor([names.index(role) for role in roles]),
            signals.reward_S.new_tensor([state.get(name, 0.0) for name in names]),
            decay=self.decay,
        )
        return advantage_S, {**state, **dict(zip(names, after_R.tolist(), strict=True))}

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward, decay = return_symbol(algorithm), f"{number(self.decay)}^m"
        role = "the prompt's task" if self.role is None else "a column of the prompt"
        text = (
            f"$b$ is the average of the role, which is {role}: 0 at first, and moved after each "
            "step, by the mean of the step's $m$ rewards of the role."
        )
        parts = rf"{decay} \cdot b", rf"+ (1 - {decay}) \, \mathrm{{mean}}({reward})"
        moved = equation("b", *parts, relation=r"\leftarrow")
        return Description((equation(A, f"{reward}_i - b"), moved), text)
