"""Algorithms for every kind of every choice."""

from __future__ import annotations

from typing import Annotated, Any, get_args, get_origin

from keel.algorithms import spec
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import CustomSurrogate, SurrogateTerm

BASE: dict[str, Any] = {
    "advantage": {"kind": "group_relative"},
    "ratio": "token",
    "surrogate": {"kind": "clip"},
    "weights": {"kind": "sequence_mean"},
}
VALUE = {"coefficient": 0.1, "clip": 0.2}


def algorithm(**changes: Any) -> Algorithm:
    """The base algorithm with these choices in place of its own."""
    return Algorithm.model_validate({**BASE, **changes})


def kinds(union: Any) -> set[str]:
    """The kinds of a discriminated union of terms, or the values of a Literal."""
    if get_origin(union) is not Annotated:
        return set(get_args(union))
    arms = get_args(get_args(union)[0])
    return {arm.model_fields["kind"].default for arm in arms}


def literals(model: type[spec.FrozenModel], field: str) -> set[str]:
    """The values that a Literal field of an algorithm may have."""
    return set(get_args(model.model_fields[field].annotation))


CUSTOM = {"kind": "custom", "function": "my_lab.ideas:half_ok", "options": {"power": 2}}
ADVANTAGES: dict[str, Algorithm] = {
    "gae": algorithm(advantage={"kind": "gae"}, value=VALUE),
    "monte_carlo": algorithm(advantage={"kind": "monte_carlo"}, value=VALUE),
    "td": algorithm(advantage={"kind": "td", "gamma": 0.9}, value=VALUE),
    "n_step": algorithm(advantage={"kind": "n_step"}, value=VALUE),
    "group_relative": algorithm(),
    "leave_one_out": algorithm(advantage={"kind": "leave_one_out"}),
    "optimal": algorithm(advantage={"kind": "optimal"}),
    "batch_normalised": algorithm(advantage={"kind": "batch_normalised"}),
    "greedy_baseline": algorithm(advantage={"kind": "greedy_baseline"}),
    "process_group_relative": algorithm(advantage={"kind": "process_group_relative"}),
    "value_baseline": algorithm(
        advantage={"kind": "value_baseline"}, ratio="sequence", value=VALUE
    ),
    **{
        kind: algorithm(advantage={"kind": kind})
        for kind in (
            "mean_relative",
            "best_of_group",
            "rescaled_baseline",
            "separately_normalised",
            "optimal_token",
        )
    },
    **{
        kind: algorithm(advantage={"kind": kind})
        for kind in ("group_in_group", "turn_relative", "role_relative")
    },
    "turn_gae": algorithm(advantage={"kind": "turn_gae"}, value=VALUE),
    "zero": algorithm(advantage={"kind": "zero"}, distillation={"gamma": 0.5}),
    "custom": algorithm(advantage=CUSTOM),
}
RATIOS: dict[str, Algorithm] = {
    "none": algorithm(ratio="none", surrogate={"kind": "log_prob"}),
    **{kind: algorithm(ratio=kind) for kind in ("token", "sequence", "sequence_token")},
    "sequence_product": algorithm(ratio="sequence_product", surrogate={"kind": "unclipped"}),
}
SURROGATES: dict[str, Algorithm] = {
    **{
        (kind := term.model_fields["kind"].default): algorithm(
            surrogate={"kind": kind}, ratio="token" if term.needs_ratio else "none"
        )
        for term in SurrogateTerm.__subclasses__()
        if term is not CustomSurrogate
    },
    "clip": algorithm(surrogate={"kind": "clip", "dual": 3.0}),
    "custom": algorithm(surrogate={**CUSTOM, "function": "my_lab/new {$5_%}.py:half_ok"}),
}
WEIGHTS: dict[str, Algorithm] = {
    "sequence_mean": algorithm(),
    "token_mean": algorithm(weights={"kind": "token_mean"}),
    "constant": algorithm(weights={"kind": "constant", "constant": 512}),
    "sequence_sum": algorithm(weights={"kind": "sequence_sum"}),
}
IN_LOSS = ("k2", "k3", "abs", "full")
WITH_RATIO = ("k1", "k2", "k3", "abs")
DIVERGENCES: dict[str, Algorithm] = {
    **{f"loss {e}": algorithm(divergence={"estimator": e}) for e in IN_LOSS},
    **{f"loss ρ {e}": algorithm(divergence={"estimator": e, "unbiased": True}) for e in WITH_RATIO},
    **{f"old {e}": algorithm(divergence={"to": "old", "estimator": e}) for e in WITH_RATIO},
    **{
        f"old ρ {e}": algorithm(divergence={"to": "old", "estimator": e, "unbiased": True})
        for e in WITH_RATIO
    },
    **{
        f"reward {e}": algorithm(divergence={"where": "reward", "estimator": e, "beta": 0.3})
        for e in WITH_RATIO
    },
    "reward, per token": algorithm(
        advantage={"kind": "gae", "gamma": 0.9, "whiten": True},
        value=VALUE,
        divergence={"where": "reward", "estimator": "k1", "beta": 0.3},
    ),
    "ppo's rule": algorithm(divergence={"to": "old", "adaptive": {"rule": "ppo", "target": 0.03}}),
    "ziegler's rule": algorithm(divergence={"adaptive": {"rule": "ziegler", "target": 6.0}}),
}
OTHERS: dict[str, Algorithm] = {
    "critic's λ": algorithm(advantage={"kind": "gae", "critic_lam": 0.75}, value={"clip": None}),
    "adaptive λ": algorithm(advantage={"kind": "gae", "adaptive_alpha": 0.05}, value=VALUE),
    "batch mean": algorithm(advantage={"kind": "monte_carlo", "baseline": "batch_mean"}),
    "no baseline": algorithm(advantage={"kind": "monte_carlo", "baseline": "none", "gamma": 0.5}),
    "batch std": algorithm(advantage={"kind": "group_relative", "scale": "batch", "whiten": True}),
    "no std": algorithm(advantage={"kind": "group_relative", "scale": "none", "epsilon": 0.0}),
    "entropy": algorithm(entropy=0.01),
    "turns, no std": algorithm(advantage={"kind": "group_in_group", "scale": "none"}),
    "roles of a column": algorithm(advantage={"kind": "role_relative", "role": "player"}),
    "adaptive entropy": algorithm(
        entropy={"coefficient": 0.02, "target": 0.7, "delta": 0.003, "maximum": 0.6}
    ),
    "best of group, no std": algorithm(advantage={"kind": "best_of_group", "scale": "none"}),
    "OPD and a reward": algorithm(distillation={"coefficient": 0.5, "prefix_gain": 0.5}),
    **{
        f"GKD, mix {mix}": algorithm(distillation={"place": "loss", "mix": mix, "top_k": k})
        for mix, k in ((0.0, None), (0.25, 8), (1.0, None))
    },
    "two masks": algorithm(masks=[{"kind": "top_entropy"}, {"kind": "off_policy_sequences"}]),
    "two corrections": algorithm(
        corrections=[{"kind": "truncate", "cap": 3.0}, {"kind": "normalise", "level": "sequence"}]
    ),
    **{
        f"{kind} of the sequence": algorithm(corrections={"kind": kind, "level": "sequence"})
        for kind in ("truncate", "mask")
    },
    **{
        f"reject {statistic} {over}": algorithm(
            corrections={"kind": "reject", "statistic": statistic, "over": over, "cap": 1.5}
        )
        for statistic, over in (("k1", "token"), ("k1", "sum"), ("k2", "mean"), ("k3", "max"))
    },
}
MASKS: dict[str, Algorithm] = {
    **{kind: algorithm(masks={"kind": kind}) for kind in sorted(kinds(spec.Mask) - {"custom"})},
    "custom": algorithm(masks=CUSTOM),
}
CORRECTIONS: dict[str, Algorithm] = {
    **{
        kind: algorithm(corrections={"kind": kind})
        for kind in sorted(kinds(spec.Correction) - {"custom", "normalise"})
    },
    "normalise": algorithm(corrections=[{"kind": "truncate"}, {"kind": "normalise"}]),
    "custom": algorithm(corrections=CUSTOM),
}
AUXILIARY: dict[str, Algorithm] = {
    **{kind: algorithm(auxiliary={"kind": kind}) for kind in sorted(kinds(spec.Auxiliary))},
    "decaying": algorithm(
        entropy=0.01,
        auxiliary=[
            {"kind": "positive_nll"},
            {"kind": "replies"},
            {"kind": "demonstrations", "coefficient": 0.9, "final": 0.05, "warmup_steps": 3,
             "weighting": "none"},
        ],
    ),
    "taught": algorithm(
        distillation={"place": "loss"},
        auxiliary={"kind": "demonstrations", "weighting": "teacher", "coefficient": 0.3},
    ),
}  # fmt: skip
FROM_PRESETS = {f"preset {name}": preset.algorithm for name, preset in PRESETS.items()}
ALL: dict[str, Algorithm] = {
    **{f"{where} {kind}": found for where, table in (
        ("advantage", ADVANTAGES), ("ratio", RATIOS), ("surrogate", SURROGATES),
        ("weights", WEIGHTS), ("divergence", DIVERGENCES), ("other", OTHERS),
        ("mask", MASKS), ("correction", CORRECTIONS),
        ("auxiliary", AUXILIARY),
    ) for kind, found in table.items()},
    **FROM_PRESETS,
}  # fmt: skip
