"""What TRL's losses read, of rollouts and of judged answers: rules, as those of `rules`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from keel.algorithms.preferences import PREFERENCE_LOSSES
from keel.config.conversion.values import Foreign


def trl_preference(c: Foreign) -> Iterator[tuple[str, Any]]:
    """The keys of the loss; `sft` next to another loss is the NLL of the chosen answer."""
    name, dpo = c.out.get("loss", "sigmoid"), c.program.name == "dpo"
    types, weights = c["loss_type"], c["loss_weights"]
    if isinstance(types, list) and types[1:] == ["sft"]:
        if weights is None or (isinstance(weights, list) and len(weights) == 2 and weights[0] == 1):
            yield "nll", float((weights or [1.0, 1.0])[1])
        else:
            c.refuse("loss_weights", "the loss has weight 1, and sft next to it that of nll")
    elif weights not in (None, [1.0], 1.0):
        c.refuse("loss_weights", "Keel has each loss by itself")
    if types in (["sft"], "sft"):
        c.refuse("loss_type", "the likelihood of an answer alone is stage sft")
    for key, entry in c.program.keys.items():
        if entry.by != "trl_preference" or key == "loss_weights":
            continue
        own, reads = str(entry.to), PREFERENCE_LOSSES[name].keys
        if own not in reads or (dpo and own == "smoothing" and name != "robust"):
            # TRL reads no margin but SimPO's, and of DPO's losses robust alone smooths.
            silent = dpo or own == "margin" or not c[key]
            (c.ignore if silent else c.refuse)(key, f"the loss {name} does not read it")
        elif key in c.given or c[key] != reads[own]:
            yield own, float(c[key])


def trl_entropy(c: Foreign) -> Iterator[tuple[str, Any]]:
    """The entropy bonus: its coefficient, or the rule that moves it."""
    if not c["use_adaptive_entropy"]:
        yield "algorithm.entropy", c["entropy_coef"]
        return
    for key in ("entropy_coef_min", "entropy_coef"):
        if c[key]:
            c.refuse(key, "0 is the lower bound, and as a start the one where both do the same")
    names = {"target": "target", "delta": "coef_delta", "maximum": "coef_max"}
    yield "algorithm.entropy", {name: c[f"entropy_{key}"] for name, key in names.items()}


def trl_masks(c: Foreign) -> Iterator[tuple[str, Any]]:
    """Which tokens the surrogate keeps."""
    masks: list[dict[str, Any]] = []
    if c["top_entropy_quantile"] < 1 and (c["entropy_coef"] or c["use_adaptive_entropy"]):
        c.refuse("top_entropy_quantile", "Keel's entropy bonus is a mean over all tokens")
    elif c["top_entropy_quantile"] < 1:
        masks.append({"kind": "top_entropy", "share": c["top_entropy_quantile"]})
    if c["off_policy_mask_threshold"] is not None:
        masks.append({"kind": "off_policy_sequences", "bound": c["off_policy_mask_threshold"]})
    if masks:
        yield "algorithm.masks", masks


def trl_correction(c: Foreign) -> Iterator[tuple[str, Any]]:
    """Importance weights for vLLM's log-probabilities."""
    if not c["use_vllm"] or not c["vllm_importance_sampling_correction"]:
        return
    if c["loss_type"] == "vespo":
        c.refuse("loss_type", "TRL takes vLLM's weights into the kernel of VESPO")
        return
    level, _, kind = c["vllm_importance_sampling_mode"].partition("_")
    cap, floor = c["vllm_importance_sampling_clip_max"], c["vllm_importance_sampling_clip_min"]
    yield "algorithm.corrections.kind", kind
    yield "algorithm.corrections.level", level
    yield "algorithm.corrections.cap", float(c["vllm_importance_sampling_cap"] or cap or 1e9)
    if kind == "mask":
        yield "algorithm.corrections.floor", float(floor or 0.0)
    elif floor is not None:
        c.refuse("vllm_importance_sampling_clip_min", "weights are cut from above only")
