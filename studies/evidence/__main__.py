"""Run the measurements behind the pages of docs/algorithms.

python -m studies.evidence gae       # bias and variance of GAE and baselines; a minute
python -m studies.evidence tune      # each preset's learning rate; writes rates.toml
python -m studies.evidence compare   # each preset over ten seeds; writes results/
"""

from __future__ import annotations

import argparse
from pathlib import Path

from studies.evidence import algorithms, gae


def main() -> None:
    parser = argparse.ArgumentParser(description="The measurements behind docs/algorithms.")
    parser.add_argument("study", choices=("gae", "tune", "compare"))
    parser.add_argument("--out", type=Path, default=Path("comparisons/evidence"))
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    if arguments.study == "gae":
        print(gae.tables(arguments.seeds))
    elif arguments.study == "tune":
        algorithms.tune(out)
    else:
        algorithms.compare(out, arguments.seeds)


if __name__ == "__main__":
    main()
