"""The share of a run's time that recording and checkpoints take.

    python studies/recording.py [RECIPE ...] [-- key=value ...]

Runs each recipe at its own intervals (checkpoints every 100 steps by default, rollouts of every
step) and adds up timings.jsonl and events.jsonl: seconds of recording (metrics, rollouts), of
checkpoints (written, hashed, synced), and of everything else.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from keel.config.load import load_recipe
from keel.runs.reader import Run, load
from keel.training.run import train

RECIPES = ("quickstart", "quickstart-ppo", "reward-model-quickstart")


def shares(run: Run) -> dict[str, float]:
    """Seconds of recording, of checkpoints and of the steps themselves; how many of the latter."""
    timings = run.timings()
    checkpoints = [event for event in run.events() if event["event"] == "checkpoint"]
    return {
        "steps": float(len(timings)),
        "work": sum(row["total"] for row in timings),
        "record": sum(row["record"] for row in timings),
        "checkpoint": sum(event["seconds"] for event in checkpoints),
        "checkpoints": float(len(checkpoints)),
        "bytes": float(sum(event["bytes"] for event in checkpoints)),
    }


def main(words: list[str]) -> None:
    cut = words.index("--") if "--" in words else len(words)
    recipes, overrides = words[:cut] or list(RECIPES), words[cut + 1 :]
    print("| recipe | steps | work | recording | checkpoints | share |")
    print("|---|---|---|---|---|---|")
    for name in recipes:
        with tempfile.TemporaryDirectory() as folder:
            found = shares(load(train(load_recipe(name, overrides), Path(folder) / "run").path))
        spent = found["record"] + found["checkpoint"]
        share = spent / (spent + found["work"])
        print(
            f"| {Path(name).stem} | {found['steps']:.0f} | {found['work']:.1f} s "
            f"| {found['record']:.2f} s | {found['checkpoint']:.2f} s "
            f"({found['checkpoints']:.0f}, {found['bytes'] / 1e6:.0f} MB) | {share:.2%} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
