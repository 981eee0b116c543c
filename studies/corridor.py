"""A walk in a corridor, in which different walks come through the same rooms: GRPO against GiGPO.

    python -m studies.corridor [--algorithm grpo] [--steps 60] [--seed 0] [key=value ...]

prints the mean reward of every tenth step.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from keel.config.load import load_recipe
from keel.data.tasks import BaseTask
from keel.runs.reader import load
from keel.training.run import train
from keel.types import Completion, Observation, Prompt, Split

ROOMS, START, MOST = 7, 3, 8
"""Rooms in a row, the room to begin in, and the moves of a walk at the most."""
RECIPE = Path(__file__).parent / "evidence" / "corridor.toml"


class Corridor(BaseTask):
    """The prompt names a room; the policy moves by `+` and `-`, one a turn, and is replied the room
    that it is in, which is the state. 1 for getting there within the moves."""

    name = "corridor"
    correctness = True

    def prompt(self, split: Split, index: int) -> Prompt:
        """A room two or three moves away, by the index."""
        goal = [room for room in range(ROOMS) if abs(room - START) > 1][index % (ROOMS - 3)]
        return Prompt(f"corridor/{split}/{index}", f"{goal}", {"goal": goal}, self.name)

    def reply(self, prompt: Prompt, text: str) -> str | None:
        """The room after the moves so far; None in the one that was named."""
        room = reached(text, prompt.columns["goal"])
        return None if room == prompt.columns["goal"] else Observation(f"{room}", f"room {room}")

    def score(self, prompt: Prompt, completion: Completion) -> float:
        goal = prompt.columns["goal"]
        return float(reached(completion.text, goal) == goal)


def reached(text: str, goal: int) -> int:
    """The room after the moves in a text, of which those after the goal do not count."""
    room = START
    for move in text:
        if room != goal and move in "+-":
            room = min(max(room + (1 if move == "+" else -1), 0), ROOMS - 1)
    return room


def rewards(algorithm: str, steps: int, seed: int, *overrides: str) -> list[float]:
    """The mean reward of each step."""
    keys = (f"algorithm={algorithm}", f"steps={steps}", f"seed={seed}", "evaluation.prompts=0")
    with tempfile.TemporaryDirectory() as scratch:
        folder = train(load_recipe(str(RECIPE), [*keys, *overrides]), Path(scratch) / "run")
        return [row["reward"] for row in load(folder.path).metrics()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithm", default="grpo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = parser.parse_args()
    found = rewards(given.algorithm, given.steps, given.seed, *given.overrides)
    for at in range(0, len(found), 10):
        part = found[at : at + 10]
        print(f"{given.algorithm} step {at + len(part)}: reward {sum(part) / len(part):.2f}")


if __name__ == "__main__":
    main()
