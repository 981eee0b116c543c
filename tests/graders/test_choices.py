from __future__ import annotations

import pytest

from keel.graders.answers import label_of
from keel.rewards.outputs import Wrong
from keel.rewards.rules import choice


@pytest.mark.parametrize(
    ("gold", "letter"),
    [
        *(
            ("D", "D"),
            ("(D)", "D"),
            ("D) 14", "D"),
            ("d", "D"),
            (r"\text{(D)}", "D"),
            ("D. 14", "D"),
        ),
        *(("14", ""), ("Dog", ""), ("", ""), ("D or C", "")),
    ],
)
def test_letter_of_a_gold_answer(gold: str, letter: str) -> None:
    assert label_of(gold) == letter


def test_choice_reward_compares_letters() -> None:
    given = choice(
        completions=["B", "B", "x", "<a>B</a> C", "B"],
        answer=["(B)", "C", "B", "B", None],
        tag=None,
    )
    assert given == [1.0, 0.0, 0.0, 0.0, None]
    assert choice(completions=["<a>B</a> C"], answer=["B) 2"], tag="a") == [1.0]
    assert choice(completions=["Which? A or B"], answer=["B"], prompts=["Which? A or B"]) == [0.0]
    (wrong,) = choice(completions=["B"], answer=["12"])
    assert isinstance(wrong, Wrong)
    assert "'12', which is not an option's letter" in wrong.why
