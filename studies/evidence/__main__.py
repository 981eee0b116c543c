"""Run the measurements behind docs/algorithms and docs/evidence.

python -m studies.evidence             # all of them, and the pages: some six hours on two cores
python -m studies.evidence tune        # each preset's learning rate; writes rates.toml
python -m studies.evidence compare     # each preset over ten seeds; writes results/
python -m studies.evidence stability   # PPO, GRPO and GSPO at four rates
python -m studies.evidence lengths     # how long answers become under GRPO and Dr. GRPO
python -m studies.evidence memory      # peak memory by the models that an algorithm holds
python -m studies.evidence replay      # reward models that go on learning, with earlier rows
python -m studies.evidence distillation  # a student by a teacher and by GRPO; half an hour
python -m studies.evidence trained     # recipes smollm2-*, after `make real-model`; hours
python -m studies.evidence variants    # later variants over ten seeds; an hour
python -m studies.evidence pages       # tables and pictures from results/; a minute

What is finished in --out is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from studies.evidence import (
    algorithms,
    distillation,
    lengths,
    memory,
    pages,
    replay,
    trained,
    variants,
)

STUDIES: dict[str, Callable[[Path], None]] = {
    "tune": algorithms.tune,
    "compare": algorithms.compare,
    "stability": algorithms.stability,
    "lengths": lengths.train,
    "memory": memory.measure,
    "distillation": distillation.run,
    "replay": replay.measure,
    "trained": trained.measure,
    "variants": variants.measure,
    "pages": lambda out: pages.write(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES, nargs="*", metavar="STUDY")
    parser.add_argument("--out", type=Path, default=Path("comparisons/evidence"))
    arguments = parser.parse_args()
    for study in arguments.study or STUDIES:
        STUDIES[study](arguments.out.absolute())


if __name__ == "__main__":
    main()
