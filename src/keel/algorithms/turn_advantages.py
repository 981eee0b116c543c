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
    from keel.objective import baselines, turns
else:
    baselines, turns = Lazy("baselines"), Lazy("turns")

_NO_TURNS = UnusedIf(lambda key: key.table.omega == 0, "omega = 0 leaves the turns out")


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

    def varies(self, algorithm: Choices) -> bool:
        return self.omega > 0

    def value(self, signals: RewardSignals) -> Tensor:
        return turns.group_in_group(
            signals.reward_N,
            signals.need("turn_N"),
            signals.need("anchor_N"),
            signals.groups_S,
            signals.lengths_S,
            omega=self.omega,
            gamma=self.gamma,
            scale=self.scale,
            epsilon=self.epsilon,
        )

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        def relative(x: str, at: str, of: str) -> str:
            centred = rf"{x}_{at} - \mathrm{{mean}}_{of}({x})"
            if self.scale == "none":
                return f"({centred})"
            below = rf"\mathrm{{std}}_{of}({x})"
            below += f" + {number(self.epsilon)}" if self.epsilon > 0 else ""
            return rf"\frac{{{centred}}}{{{below}}}"

        turn = rf"+ {number(self.omega)} \cdot {relative('G', 'u', 'a')}"
        to_go = equation("G_u", rf"\sum_{{k\geq0}} {number(self.gamma)}^k \, r_{{u+k}}")
        text = (
            rf"$g$ are {over(setting)}; $a$ are their turns that begin at the same state as the "
            "token's turn $u$. A state is what the environment names, else the text that it "
            f"replied; a first turn's is the prompt. $r_u$ are the rewards given in the turn"
            f"{less(algorithm)}. A turn alone gets 0 of the second part."
        )
        total = equation(A, relative(return_symbol(algorithm), "i", "g"), turn)
        return Description((total, to_go), text)


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

    def varies(self, algorithm: Choices) -> bool:
        return True

    def value(self, signals: RewardSignals) -> Tensor:
        return turns.turn_relative(
            signals.reward_N,
            signals.need("turn_N"),
            signals.groups_S,
            signals.lengths_S,
            outcome_weight=self.outcome_weight,
            epsilon=self.epsilon,
        )

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        below = r"\mathrm{std}_g(%s)" + (f" + {number(self.epsilon)}" if self.epsilon > 0 else "")
        relative = rf"\frac{{%s - \mathrm{{mean}}_g(%s)}}{{{below}}}"
        turn = relative % ("r_{i,k}", "r_k", "r_k")
        outcome = relative % ("O_i", "O", "O")
        weighed = rf"+ {number(self.outcome_weight)} \cdot A_{{O,i}}"
        cases = rf"{turn} {weighed} \text{{ before the last turn}}, \quad A_{{O,i}}"
        text = (
            f"$r_{{i,k}}$ are the rewards given in turn $k$ of the token{less(algorithm)}; $O_i$ "
            f"are those of the last turn. Both are compared within {over(setting)}, a turn with "
            "the same turn of those that go on after it; with none of them it gets the outcome's "
            "part alone."
        )
        return Description(
            (equation(A, rf"{cases} \text{{ in it}}"), equation("A_{O,i}", outcome)), text
        )


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

    def value(self, signals: RewardSignals) -> Tensor:
        return turns.turn_gae(
            signals.reward_N,
            signals.need("value_N"),
            signals.need("next_value_N"),
            signals.need("turn_N"),
            signals.lengths_S,
            gamma=self.gamma,
            lam=self.lam,
            turn_gamma=self.turn_gamma,
            turn_lam=self.turn_lam,
        )

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        gamma, turn_gamma = number(self.gamma), number(self.turn_gamma)
        decay = rf"{gamma} \cdot {number(self.lam)}"
        turn_decay = rf"{turn_gamma} \cdot {number(self.turn_lam)}"
        inside = equation(A, rf"r_n + {gamma} \cdot V_{{n+1}} - V_n", rf"+ {decay} \cdot A_{{n+1}}")
        last = rf"r_n + {turn_gamma} \cdot V_{{u+1}} - V_n"
        turn = rf"r_u + {turn_gamma} \cdot V_{{u+1}} - V_u"
        text = (
            "The first line is within a turn, the second for its last token. $V_u$ is the value "
            "before the first token of turn $u$, 0 after the last turn; $r_u$ are the turn's "
            f"rewards. {rewards(algorithm)}. With one turn it is generalised advantage estimation."
        )
        equations = (
            inside,
            equation(A, last, rf"+ {turn_decay} \cdot A_{{u+1}}"),
            equation("A_u", turn, rf"+ {turn_decay} \cdot A_{{u+1}}"),
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

    @property
    def role_column(self) -> str | None:
        return self.role

    def value(self, signals: RewardSignals) -> Tensor:
        return self._made(signals)[0]

    def next_state(self, signals: RewardSignals) -> Mapping[str, float]:
        names, after_R = self._made(signals)[1:]
        return {**signals.state, **dict(zip(names, after_R.tolist(), strict=True))}

    def _made(self, signals: RewardSignals) -> tuple[Tensor, list[str], Tensor]:
        """A, the roles of the batch, and their averages after it."""
        roles = signals.roles
        if self.role is not None and not roles:
            raise ValueError("the advantage needs roles, and the batch has none")
        roles = roles or ("",) * len(signals.reward_S)
        names = sorted(set(roles))
        places = signals.groups_S.new_tensor([names.index(role) for role in roles])
        before = signals.reward_S.new_tensor([signals.state.get(name, 0.0) for name in names])
        advantage_S, after_R = baselines.role_relative(
            signals.reward_S, places, before, decay=self.decay
        )
        return advantage_S, names, after_R

    def describe(self, algorithm: Choices, setting: Setting) -> Description:
        reward, decay = return_symbol(algorithm), f"{number(self.decay)}^m"
        role = "the prompt's task" if self.role is None else "a column of the prompt"
        text = (
            f"$b$ is the average of the role, which is {role}: 0 at first, and moved after each "
            "step, by the mean of the step's $m$ rewards of the role. So no reward is in its own "
            "baseline, and the two sides of a game have one each."
        )
        moved = equation("b", rf"{decay} \cdot b", rf"+ (1 - {decay}) \, \mathrm{{mean}}({reward})",
                         relation=r"\leftarrow")  # fmt: skip
        return Description((equation(A, f"{reward}_i - b"), moved), text)
