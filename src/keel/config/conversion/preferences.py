"""What TRL's losses on judged answers read: a rule, as those of `rules`."""

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
