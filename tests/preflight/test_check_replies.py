"""An environment whose reply spells the answer is found; one that only computes is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.config.load import load_recipe
from keel.preflight.check import check
from tests.training.small import FAST

TASKS = """
from keel.data.tasks.base import BaseTask
from keel.types import Prompt


class Sum(BaseTask):
    name = "sums"

    def size(self, side):
        return 40

    def prompt(self, side, index):
        a = index if side == "train" else 40 + index
        return Prompt(f"sums/{side}/{index}", f"{a}+17=", {"answer": str(a + 17)}, self.name)

    def gold(self, prompt):
        return prompt.columns["answer"]

    def score(self, prompt, completion):
        return float(completion.text.strip() == self.gold(prompt))


class Spells(Sum):
    def reply(self, prompt, text):
        return f"no, {self.gold(prompt)}"


class SpellsLate(Sum):
    def reply(self, prompt, text):
        return f"no, {self.gold(prompt)}" if "wrong" in text else "wrong"


class Echoes(Sum):
    def reply(self, prompt, text):
        return f"you said {text}, attempt 18"


class Computes(Sum):
    def reply(self, prompt, text):
        a, plus, b = text.partition("+")
        return str(int(a) + int(b)) if a.isdigit() and b.isdigit() else "0"
"""


@pytest.mark.parametrize(
    ("task", "turns", "found"),
    [("Spells", 2, True), ("SpellsLate", 3, True), ("SpellsLate", 2, False), ("Spells", 1, False),
     ("Echoes", 3, False), ("Computes", 3, False)],
)  # fmt: skip
def test_a_reply_that_spells_the_answer(task: str, turns: int, found: bool, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(TASKS)
    words = [
        f"tasks=[{{name='{path}:{task}'}}]", f"rollout.max_turns={turns}", "rewards.functions=[]",
        "model.build.alphabet=0123456789+=> ,abcdefghijklmnopqrstuvwxyz",
    ]  # fmt: skip
    recipe = load_recipe("tiny", [*FAST, *words])
    findings = check("tiny", [*FAST, *words], predicts=False).findings
    assert recipe.stages[0].rollout.max_turns == turns  # type: ignore[union-attr]
    kinds = [one.kind for one in findings]
    assert ("reply-holds-answer" in kinds) is found, [one.evidence for one in findings]


def test_a_stop_that_cannot_match_would_stop_the_run() -> None:
    report = check("tiny", [*FAST, "rollout.stop=['É']"], predicts=False)
    (found,) = [one for one in report.findings if one.kind == "would-stop"]
    assert "stop = 'É'" in found.evidence
