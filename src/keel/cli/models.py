"""`keel models`"""

from __future__ import annotations

import argparse

from transformers import CONFIG_MAPPING

from keel.cli.output import print_result
from keel.models.families import FAMILIES
from keel.models.reward import STOCK, has_classifier


def run(arguments: argparse.Namespace) -> None:
    """The model families, and which reward models can be made of each."""
    kinds = {
        family: {kind: has_classifier(CONFIG_MAPPING[family], kind) for kind in STOCK}
        for family in sorted(FAMILIES)
    }
    width = max(map(len, kinds))
    lines = [f"{'family':<{width}}  policy  LoRA  value model  reward model  process reward model"]
    for family, has in kinds.items():
        outcome, process = ("yes" if has[kind] else "no" for kind in ("outcome", "process"))
        lines.append(f"{family:<{width}}  yes     yes   yes          {outcome:<12}  {process}")
    lines.append(
        "\nThe family is model_type in the model's config.json. Tests on a CPU, with a small model"
        "\nof each: packed log-probabilities equal those of transformers; with LoRA the reference"
        "\nis the base; a value model has gradients. A loaded model is compared with transformers"
        "\nagain, and refused if it differs. A family that is not listed is refused."
    )
    print_result(arguments, kinds, lines)
