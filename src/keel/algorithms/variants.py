"""Presets of 2025 and 2026 that differ from GRPO in one choice or two."""

from __future__ import annotations

from typing import Any, Final

from keel.algorithms.advantages import GAE, ZeroAdvantage
from keel.algorithms.auxiliary import DemonstrationNLL, PositiveNLL
from keel.algorithms.group_advantages import (
    BestOfGroup,
    GroupRelative,
    MeanRelative,
    OptimalToken,
    RescaledBaseline,
    SeparatelyNormalised,
)
from keel.algorithms.losses import (
    AdvantageDistillation,
    Divergence,
    LossDistillation,
    ValueLoss,
)
from keel.algorithms.masks import BinaryKL, ClipCov, SecondMoment, TotalVariation
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm, Preset
from keel.algorithms.surrogates import Clip, Fipo, KLCov, OnlineDPO, Real, Unclipped
from keel.algorithms.terms import CHOICE, Teacher
from keel.algorithms.turn_advantages import GroupInGroup, RoleRelative, TurnGAE, TurnRelative
from keel.algorithms.weighted import Cispo, LogProb, Topr, Vespo

_GRPO: Final = "arXiv:2402.03300"


def _variant(
    name: str,
    title: str,
    paper: str,
    *,
    sources: dict[str, str],
    weights: str = "token_mean",
    minibatches: int = 1,
    teacher: Teacher = "model",
    **choices: Any,
) -> Preset:
    """A preset whose choices are GRPO's without its divergence, but for these; so are `sources`."""
    known = {
        "advantage": f"{_GRPO} §4.1.2",
        "ratio": f"{_GRPO} eq. 3",
        "surrogate": f"{_GRPO} eq. 3; ε 0.2: {CHOICE}",
        "weights": paper,
        "divergence": f"none: {CHOICE}",
        **sources,
    }
    if minibatches > 1:
        known["epochs"] = f"{minibatches} mini-batches: {CHOICE}, so that the ratio moves"
    given = {"advantage": GroupRelative(), "ratio": "token", "surrogate": Clip(), **choices}
    return Preset(
        name=name,
        title=title,
        paper=paper,
        algorithm=Algorithm(**given, weights=Weights(kind=weights)),  # type: ignore[arg-type]
        sources=known,  # type: ignore[arg-type]
        minibatches=minibatches,
        teacher=teacher,
    )


def _dppo(name: str, what: str, mask: TotalVariation | BinaryKL) -> Preset:
    paper = "arXiv:2602.04879"
    return _variant(
        name,
        f"Divergence PPO: tokens bounded by {what}, not by their ratio",
        paper,
        surrogate=Cispo(cap=20.0),
        masks=(mask,),
        minibatches=4,
        sources={
            "surrogate": f"{paper}, C = 20",
            "masks": f"{paper}; bounds: {CHOICE}",
            "weights": f"token mean: {CHOICE}",
        },
    )


VARIANTS: Final = (
    _variant(
        "luspo", "Length-unbiased sequence policy optimisation", "arXiv:2602.05261",
        ratio="sequence", surrogate=Clip(low=3e-4, high=4e-4), weights="sequence_sum",
        minibatches=4,
        sources={
            "ratio": "arXiv:2507.18071 eq. 7",
            "surrogate": f"arXiv:2507.18071 eq. 5; ε: {CHOICE}, gspo's",
        },
    ),
    _dppo("dppo_tv", "how far their probability has moved", TotalVariation()),
    _dppo("dppo_kl", "a divergence of their probability", BinaryKL()),
    _variant(
        "vespo", "Variational sequence-level soft policy optimisation", "arXiv:2602.10693",
        surrogate=Vespo(), minibatches=4,
        sources={"surrogate": "arXiv:2602.10693", "weights": f"token mean: {CHOICE}, TRL's"},
    ),
    _variant(
        "fipo", "Future-KL influenced policy optimisation", "arXiv:2603.19835",
        surrogate=Fipo(), minibatches=16,
        sources={
            "surrogate": "arXiv:2603.19835; clip: arXiv:2503.14476 §3.1; without its dual clip and "
            f"its filter of high ratios: {CHOICE}",
        },
    ),
    _variant(
        "topr", "Tapered off-policy REINFORCE", "arXiv:2503.14286",
        advantage=GroupRelative(scale="none"), surrogate=Topr(), weights="sequence_sum",
        minibatches=4,
        sources={
            "advantage": f"arXiv:2503.14286; the group's mean as baseline: {CHOICE}",
            "surrogate": f"arXiv:2503.14286; right above 0: {CHOICE}",
        },
    ),
    _variant(
        "real", "Rewards as labels", "arXiv:2602.05630",
        advantage=GroupRelative(scale="none"), surrogate=Real(), weights="sequence_mean",
        minibatches=4,
        sources={
            "advantage": "none is read",
            "surrogate": f"arXiv:2602.05630, τ 0.5; right above 0: {CHOICE}",
        },
    ),
    _variant(
        "online_dpo", "Online DPO: the best of each group against the worst", "arXiv:2402.04792",
        advantage=GroupRelative(scale="none"), ratio="none", surrogate=OnlineDPO(),
        weights="sequence_mean",
        sources={
            "advantage": "none is read", "ratio": "none: the loss is of log-probabilities",
            "surrogate": f"arXiv:2402.04792; β 0.1, and which two of a larger group: {CHOICE}",
        },
    ),
    _variant(
        "gpg", "Group policy gradient", "arXiv:2504.02546",
        advantage=RescaledBaseline(), ratio="none", surrogate=LogProb(),
        sources={
            "advantage": "arXiv:2504.02546", "ratio": "arXiv:2504.02546, none",
            "surrogate": "arXiv:2504.02546",
        },
    ),
    _variant(
        "clip_cov", "Clip-Cov: a random few of the tokens that lower the entropy are left out",
        "arXiv:2505.22617",
        masks=(ClipCov(),), minibatches=4,
        sources={"masks": "arXiv:2505.22617", "weights": f"token mean: {CHOICE}"},
    ),
    _variant(
        "kl_cov", "KL-Cov: tokens that lower the entropy are held near the sampling policy",
        "arXiv:2505.22617",
        surrogate=KLCov(), minibatches=4,
        sources={"surrogate": "arXiv:2505.22617, k 2e-3, coefficient 1",
                 "weights": f"token mean: {CHOICE}"},
    ),
    _variant(
        "m2po", "Second-moment trust policy optimisation", "arXiv:2510.01161",
        surrogate=Unclipped(), masks=(SecondMoment(),), minibatches=4,
        sources={
            "surrogate": "arXiv:2510.01161: the mask stands for the clip",
            "masks": "arXiv:2510.01161, τ 0.04",
        },
    ),
    _variant(
        "gdpo", "GRPO of several rewards, each normalised for itself", "arXiv:2601.05242",
        advantage=SeparatelyNormalised(), weights="sequence_mean",
        sources={"advantage": "arXiv:2601.05242", "weights": f"{_GRPO} eq. 3"},
    ),
    _variant(
        "maxrl", "Maximum likelihood reinforcement learning", "arXiv:2602.02710",
        advantage=MeanRelative(), weights="sequence_mean",
        sources={"advantage": "arXiv:2602.02710", "weights": f"{_GRPO} eq. 3: {CHOICE}"},
    ),
    _variant(
        "pass_k", "The best of the group as the objective", "arXiv:2503.19595",
        advantage=BestOfGroup(), weights="sequence_mean",
        sources={"advantage": "arXiv:2503.19595", "weights": f"{_GRPO} eq. 3: {CHOICE}"},
    ),
    _variant(
        "lite_ppo", "Group mean, standard deviation of the batch", "arXiv:2508.08221",
        advantage=GroupRelative(scale="batch"),
        sources={"advantage": "arXiv:2508.08221"},
    ),
    _variant(
        "vapo", "Value-based augmented proximal policy optimisation", "arXiv:2504.05118",
        advantage=GAE(gamma=1.0, adaptive_alpha=0.05, critic_lam=1.0),
        surrogate=Clip(low=0.2, high=0.28), value=ValueLoss(coefficient=0.1, clip=0.2),
        auxiliary=(PositiveNLL(),), minibatches=16,
        sources={
            "advantage": "arXiv:2504.05118 §4.1-4.2, α 0.05",
            "surrogate": "arXiv:2504.05118 §4.3, ε 0.2 and 0.28",
            "value": f"coefficient and clip: {CHOICE}, as ppo",
            "auxiliary": f"arXiv:2504.05118 §4.3, μ 0.1; right above 0: {CHOICE}; for its value "
            "pretraining set value.warmup_steps = 50",
        },
    ),
    _variant(
        "chord", "GRPO and demonstrations in one step, by how unsure the policy is of their tokens",
        "arXiv:2508.11408",
        auxiliary=(DemonstrationNLL(),), weights="token_mean",
        sources={
            "weights": f"token mean: {CHOICE}",
            "auxiliary": f"arXiv:2508.11408, CHORD-φ; μ 0.1: {CHOICE}, its code's",
        },
    ),
    _variant(
        "otb", "Optimal token baseline", "Li et al. 2026, The Optimal Token Baseline",
        advantage=OptimalToken(), ratio="none", surrogate=LogProb(),
        sources={
            "advantage": "Li et al. 2026", "ratio": "none: the baseline is of REINFORCE",
            "surrogate": "Williams 1992", "weights": f"token mean: {CHOICE}",
        },
    ),
    _variant(
        "gigpo", "Group-in-group policy optimisation", "arXiv:2505.10978",
        advantage=GroupInGroup(),
        divergence=Divergence(to="reference", where="loss", estimator="k3", beta=0.01),
        sources={
            "advantage": f"arXiv:2505.10978 eq. 3, 6-8, ω 1, γ 0.95; with std: {CHOICE}",
            "weights": f"token mean: {CHOICE}", "divergence": "arXiv:2505.10978, β 0.01",
        },
    ),
    _variant(
        "mt_grpo", "GRPO with a reward for each turn", "arXiv:2505.11821",
        advantage=TurnRelative(),
        sources={
            "advantage": f"arXiv:2505.11821, λ 1; for more than two turns: {CHOICE}",
            "weights": "token mean: the authors' code", "divergence": "none: the authors' code",
        },
    ),
    _variant(
        "turn_ppo", "Proximal policy optimisation, advantages by turns", "arXiv:2510.16907",
        advantage=TurnGAE(whiten=True), value=ValueLoss(coefficient=0.1, clip=0.2),
        sources={
            "advantage": "arXiv:2510.16907, whitened; of turns γ 0.99, λ 0.9: arXiv:2512.17008; of "
            f"tokens γ 1, λ 0.95: {CHOICE}, as ppo",
            "ratio": "arXiv:1707.06347 §3", "surrogate": "arXiv:1707.06347 eq. 7, ε 0.2 §6.1",
            "weights": f"{CHOICE}, as ppo", "value": f"{CHOICE}, as ppo",
        },
    ),
    _variant(
        "rae", "Role-conditioned advantages for self-play", "arXiv:2506.24119",
        advantage=RoleRelative(), ratio="none", surrogate=LogProb(), weights="sequence_sum",
        sources={
            "advantage": f"arXiv:2506.24119, decay 0.95; moved once a step: {CHOICE}",
            "ratio": "arXiv:2506.24119, none", "surrogate": "arXiv:2506.24119",
            "weights": f"sum over the completion: {CHOICE}, as reinforce",
        },
    ),
    _variant(
        "gkd", "Generalised knowledge distillation, on the policy's own completions",
        "arXiv:2306.13649",
        advantage=ZeroAdvantage(), ratio="none", surrogate=LogProb(), weights="sequence_mean",
        distillation=LossDistillation(),
        sources={
            "advantage": "none is read", "ratio": "none is read", "surrogate": "0, as A is",
            "weights": "arXiv:2306.13649 eq. 2",
            "distillation": f"arXiv:2306.13649 eq. 1; β 0.5: {CHOICE}, TRL's",
        },
    ),
    _variant(
        "sdft", "Self-distillation: the policy, shown a demonstration, as its own teacher",
        "arXiv:2601.19897",
        advantage=ZeroAdvantage(), ratio="none", surrogate=LogProb(),
        distillation=LossDistillation(mix=1.0), teacher="base",
        sources={
            "advantage": "none is read", "ratio": "none is read", "surrogate": "0, as A is",
            "weights": f"token mean: {CHOICE}",
            "distillation": "arXiv:2601.19897, the reverse KL",
        },
    ),
    _variant(
        "iw_opd", "On-policy distillation whose early tokens count more", "arXiv:2606.22600",
        advantage=ZeroAdvantage(), surrogate=Unclipped(), weights="constant",
        distillation=AdvantageDistillation(prefix_gain=0.5),
        sources={
            "advantage": "none is read", "ratio": "importance sampling, as opd",
            "surrogate": "importance sampling, no clip, as opd",
            "weights": f"a sum over tokens; over C: {CHOICE}, as opd",
            "distillation": "arXiv:2606.22600, g 0.5",
        },
    ),
)  # fmt: skip
