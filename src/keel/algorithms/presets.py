"""The papers' algorithms. The only place that knows an algorithm by its name.

`sources` says, choice by choice, where a figure comes from; `CHOICE` marks what no paper fixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from keel.algorithms.advantages import GAE, MonteCarlo, ZeroAdvantage
from keel.algorithms.group_advantages import (
    BatchNormalised,
    GreedyBaseline,
    GroupRelative,
    LeaveOneOut,
    Optimal,
    ProcessGroupRelative,
)
from keel.algorithms.losses import Adaptive, AdvantageDistillation, Divergence, ValueLoss
from keel.algorithms.ratios import Ratio, Weights
from keel.algorithms.spec import Advantage, Algorithm, Preset, Surrogate
from keel.algorithms.surrogates import Clip, Geometric, Sapo, Unclipped
from keel.algorithms.terms import CHOICE
from keel.algorithms.variants import VARIANTS
from keel.algorithms.weighted import Cispo, LogProb

_PPO = "arXiv:1707.06347"
_GRPO = "arXiv:2402.03300"
_DAPO = "arXiv:2503.14476"
_RPP = "arXiv:2501.03262"
_N_IMPL = "arXiv:2403.17031"
_OPD = "Lu 2025, On-Policy Distillation"


def _of(
    advantage: Advantage,
    ratio: Ratio,
    surrogate: Surrogate,
    weights: Literal["sequence_mean", "token_mean", "constant", "sequence_sum"],
    divergence: Divergence | None = None,
    value: ValueLoss | None = None,
    distillation: AdvantageDistillation | None = None,
) -> Algorithm:
    return Algorithm(
        advantage=advantage,
        ratio=ratio,
        surrogate=surrogate,
        weights=Weights(kind=weights),
        divergence=divergence,
        value=value,
        distillation=distillation,
    )


def _k1_in_reward(beta: float) -> Divergence:
    return Divergence(to="reference", where="reward", estimator="k1", beta=beta)


_K3_IN_LOSS = Divergence(to="reference", where="loss", estimator="k3", beta=0.04)

_PRESETS: Final = (
    Preset(
        name="ppo",
        title="Proximal policy optimisation, clipped",
        paper=_PPO,
        algorithm=_of(
            GAE(gamma=1.0, lam=0.95, whiten=True), "token", Clip(), "token_mean",
            _k1_in_reward(0.05), ValueLoss(coefficient=0.1, clip=0.2),
        ),
        sources={
            "advantage": f"{_PPO} eq. 11-12; γ, λ and whitening {_N_IMPL}",
            "ratio": f"{_PPO} §3",
            "surrogate": f"{_PPO} eq. 7, ε = 0.2 §6.1",
            "weights": _N_IMPL,
            "divergence": f"{_N_IMPL}; β 0.05",
            "value": f"coefficient and clip: {CHOICE}, within {_N_IMPL}",
            "epochs": f"4: {CHOICE}, within {_N_IMPL}",
        },
        epochs=4,
    ),
    Preset(
        name="ppo_kl_penalty",
        title="Proximal policy optimisation, KL-penalised with adaptive β",
        paper=f"{_PPO} §4",
        algorithm=_of(
            GAE(gamma=1.0, lam=0.95, whiten=True), "token", Unclipped(), "token_mean",
            Divergence(
                to="old", where="loss", estimator="k3", beta=1.0,
                adaptive=Adaptive(rule="ppo", target=0.01),
            ),
            ValueLoss(coefficient=0.1, clip=0.2),
        ),
        sources={
            "advantage": f"{_PPO} eq. 11-12; γ, λ and whitening {_N_IMPL}",
            "ratio": f"{_PPO} §3",
            "surrogate": f"{_PPO} eq. 8",
            "weights": _N_IMPL,
            "divergence": f"{_PPO} §4, target 0.01 (§6.1 tries .003, .01, .03); first β 1: §6.1",
            "value": f"coefficient and clip: {CHOICE}, as ppo",
            "epochs": f"4: {CHOICE}, as ppo",
        },
        epochs=4,
    ),
    Preset(
        name="grpo",
        title="Group relative policy optimisation",
        paper=_GRPO,
        algorithm=_of(GroupRelative(), "token", Clip(), "sequence_mean", _K3_IN_LOSS),
        sources={
            "advantage": f"{_GRPO} §4.1.2",
            "ratio": f"{_GRPO} eq. 3",
            "surrogate": f"{_GRPO} eq. 3; ε 0.2: {CHOICE}, the paper gives none",
            "weights": f"{_GRPO} eq. 3",
            "divergence": f"{_GRPO} eq. 4, β 0.04 §4.2",
        },
    ),
    Preset(
        name="grpo_process",
        title="Group relative policy optimisation, process supervision",
        paper=f"{_GRPO} §4.1.3",
        algorithm=_of(ProcessGroupRelative(), "token", Clip(), "sequence_mean", _K3_IN_LOSS),
        sources={
            "advantage": f"{_GRPO} §4.1.3",
            "ratio": f"{_GRPO} eq. 3",
            "surrogate": f"{_GRPO} eq. 3; ε 0.2: {CHOICE}, the paper gives none",
            "weights": f"{_GRPO} eq. 3",
            "divergence": f"{_GRPO} eq. 4, β 0.04 §4.2",
        },
    ),
    Preset(
        name="dr_grpo",
        title="GRPO done right: no std, no length normalisation",
        paper="arXiv:2503.20783",
        algorithm=_of(GroupRelative(scale="none"), "token", Clip(), "constant"),
        sources={
            "advantage": "arXiv:2503.20783 §3.2",
            "ratio": f"{_GRPO} eq. 3",
            "surrogate": f"arXiv:2503.20783; ε 0.2: {CHOICE}",
            "weights": "arXiv:2503.20783 §3.2, C the completion budget",
            "divergence": "arXiv:2503.20783, none",
        },
    ),
    Preset(
        name="dapo",
        title="Decoupled clip and dynamic sampling",
        paper=_DAPO,
        algorithm=_of(GroupRelative(), "token", Clip(low=0.2, high=0.28), "token_mean"),
        sources={
            "advantage": f"{_DAPO} eq. 9",
            "ratio": f"{_DAPO} eq. 9",
            "surrogate": f"{_DAPO} §3.1, ε 0.2 and 0.28 §4.1",
            "weights": f"{_DAPO} §3.3",
            "divergence": f"{_DAPO} §2.3, none",
            "epochs": f"16 mini-batches: {_DAPO} §4.1",
        },
        minibatches=16,
        dynamic_sampling=True,
        overlong_share=0.2,
    ),
    Preset(
        name="gspo",
        title="Group sequence policy optimisation",
        paper="arXiv:2507.18071",
        algorithm=_of(GroupRelative(), "sequence", Clip(low=3e-4, high=4e-4), "sequence_mean"),
        sources={
            "advantage": "arXiv:2507.18071 eq. 6",
            "ratio": "arXiv:2507.18071 eq. 7",
            "surrogate": "arXiv:2507.18071 eq. 5, ranges §5.1",
            "weights": "arXiv:2507.18071 eq. 5",
            "divergence": "arXiv:2507.18071 has none",
            "epochs": "4 mini-batches: arXiv:2507.18071 §5.1",
        },
        minibatches=4,
    ),
    Preset(
        name="gspo_token",
        title="Group sequence policy optimisation, token-level variant",
        paper="arXiv:2507.18071 §4.3",
        algorithm=_of(
            GroupRelative(), "sequence_token", Clip(low=3e-4, high=4e-4), "sequence_mean"
        ),
        sources={
            "advantage": "arXiv:2507.18071 eq. 6",
            "ratio": "arXiv:2507.18071 eq. 14",
            "surrogate": "arXiv:2507.18071 eq. 13, ranges §5.1",
            "weights": "arXiv:2507.18071 eq. 13",
            "divergence": "arXiv:2507.18071 has none",
            "epochs": "4 mini-batches: arXiv:2507.18071 §5.1",
        },
        minibatches=4,
    ),
    Preset(
        name="rloo",
        title="REINFORCE leave-one-out",
        paper="arXiv:2402.14740",
        algorithm=_of(LeaveOneOut(), "none", LogProb(), "sequence_sum", _k1_in_reward(0.03)),
        sources={
            "advantage": "arXiv:2402.14740 §2.2",
            "ratio": "arXiv:2402.14740, none",
            "surrogate": "arXiv:2402.14740 §2.2",
            "weights": "arXiv:2402.14740, the completion is one action",
            "divergence": "arXiv:2402.14740 eq. 3, β 0.03",
        },
    ),
    Preset(
        name="reinforce",
        title="REINFORCE with the batch mean as baseline",
        paper="Williams 1992, Machine Learning 8",
        algorithm=_of(MonteCarlo(baseline="batch_mean"), "none", LogProb(), "sequence_sum"),
        sources={
            "advantage": f"Williams 1992; batch mean: {CHOICE}",
            "ratio": "Williams 1992, none",
            "surrogate": "Williams 1992 eq. 11",
            "weights": f"episodic sum: Williams 1992 §5; mean over S: {CHOICE}",
            "divergence": f"none: {CHOICE}",
        },
    ),
    Preset(
        name="reinforce_pp",
        title="REINFORCE++",
        paper=_RPP,
        algorithm=_of(BatchNormalised(), "token", Clip(), "token_mean", _k1_in_reward(0.001)),
        sources={
            "advantage": f"{_RPP}, global batch normalisation",
            "ratio": _RPP,
            "surrogate": f"{_RPP}; ε 0.2: {CHOICE}",
            "weights": _RPP,
            "divergence": f"{_RPP}, β 0.001",
        },
    ),
    Preset(
        name="reinforce_pp_baseline",
        title="REINFORCE++ with the group mean as baseline",
        paper=_RPP,
        algorithm=_of(
            BatchNormalised(group_baseline=True), "token", Clip(), "token_mean",
            Divergence(to="reference", where="loss", estimator="k2", beta=0.001),
        ),
        sources={
            "advantage": f"{_RPP}, group mean, then global batch normalisation",
            "ratio": _RPP,
            "surrogate": f"{_RPP}; ε 0.2: {CHOICE}",
            "weights": _RPP,
            "divergence": f"{_RPP}, β 0.001",
        },
    ),
    Preset(
        name="remax",
        title="ReMax: the greedy completion's reward as baseline",
        paper="arXiv:2310.10505",
        algorithm=_of(GreedyBaseline(), "none", LogProb(), "sequence_sum", _k1_in_reward(0.01)),
        sources={
            "advantage": "arXiv:2310.10505 §4",
            "ratio": "arXiv:2310.10505, none",
            "surrogate": "arXiv:2310.10505 §4",
            "weights": "arXiv:2310.10505 §4",
            "divergence": f"arXiv:2310.10505; β 0.01: {CHOICE}",
        },
    ),
    Preset(
        name="opo",
        title="On-policy optimisation with the length-weighted optimal baseline",
        paper="arXiv:2505.23585",
        algorithm=_of(Optimal(), "none", LogProb(), "token_mean"),
        sources={
            "advantage": "arXiv:2505.23585 §3",
            "ratio": "arXiv:2505.23585, none: exact on-policy",
            "surrogate": "arXiv:2505.23585 §3",
            "weights": f"token mean: {CHOICE}",
            "divergence": "arXiv:2505.23585, none",
        },
    ),
    Preset(
        name="cispo",
        title="Clipped importance-sampling weights (MiniMax-M1)",
        paper="arXiv:2506.13585",
        algorithm=_of(GroupRelative(), "token", Cispo(cap=5.0), "token_mean"),
        sources={
            "advantage": "arXiv:2506.13585 §3.1",
            "ratio": "arXiv:2506.13585 eq. 4",
            "surrogate": f"arXiv:2506.13585 eq. 4-5; cap 5, undisclosed there: {CHOICE}, ScaleRL's",
            "weights": "arXiv:2506.13585 eq. 4",
            "divergence": "arXiv:2506.13585 §3.1, none",
            "epochs": "16 mini-batches: arXiv:2506.13585, 16 rounds of off-policy updates",
        },
        minibatches=16,
    ),
    Preset(
        name="sapo",
        title="Soft adaptive policy optimisation",
        paper="arXiv:2511.20347",
        algorithm=_of(GroupRelative(), "token", Sapo(), "sequence_mean"),
        sources={
            "advantage": "arXiv:2511.20347",
            "ratio": "arXiv:2511.20347",
            "surrogate": "arXiv:2511.20347, τ 1.0 and 1.05",
            "weights": "arXiv:2511.20347",
            "divergence": "arXiv:2511.20347, none",
            "epochs": "4 mini-batches: arXiv:2511.20347, its experiments",
        },
        minibatches=4,
    ),
    Preset(
        name="gmpo",
        title="Geometric-mean policy optimisation",
        paper="arXiv:2507.20673",
        algorithm=_of(GroupRelative(), "token", Geometric(), "sequence_mean"),
        sources={
            "advantage": "arXiv:2507.20673",
            "ratio": "arXiv:2507.20673",
            "surrogate": "arXiv:2507.20673 eq. 4, log-space clip 0.4",
            "weights": "arXiv:2507.20673 eq. 4",
            "divergence": "arXiv:2507.20673, none",
            "epochs": "8 mini-batches, of 1,024 completions: arXiv:2507.20673, its experiments",
        },
        minibatches=8,
    ),
    Preset(
        name="opd",
        title="On-policy distillation: a teacher's log-probabilities as the advantage",
        paper=_OPD,
        algorithm=_of(
            ZeroAdvantage(), "token", Unclipped(), "constant", distillation=AdvantageDistillation()
        ),
        sources={
            "advantage": "none is read",
            "distillation": f"{_OPD}, discount 0; arXiv:2601.02780 eq. 8",
            "ratio": f"{_OPD}, importance sampling",
            "surrogate": f"{_OPD}, importance sampling, no clip",
            "weights": f"{_OPD}, a sum over tokens; over C: {CHOICE}",
            "divergence": f"{_OPD}, none: the teacher's term is one",
        },
    ),
)  # fmt: skip

PRESETS: Final[Mapping[str, Preset]] = MappingProxyType({p.name: p for p in (*_PRESETS, *VARIANTS)})
