"""What `keel train` prints at the end."""

from __future__ import annotations

import pytest

from keel.cli.train import _example


@pytest.mark.parametrize(
    ("reward", "passed", "mark"),
    [
        (1.0, True, "1"),
        (0.0, False, "0"),
        (2.31, False, "wrong, reward 2.31"),
        (-0.5, True, "right, reward -0.5"),
        (1.0, False, "wrong, reward 1"),
        (None, True, "right, reward -"),
        (2.31, None, "2.31"),
        (None, None, "-"),
    ],
)
def test_examples_say_whether_answers_are_right(
    reward: float | None, passed: bool | None, mark: str
) -> None:
    """Accuracy is printed with them, and may be of another reward than the one trained on."""
    example = {"prompt": "1+1?", "completion": "2", "reward": reward, "passed": passed}
    assert _example(example) == f"  [{mark}] 1+1? 2"
    earlier = {key: value for key, value in example.items() if key != "passed"}
    assert _example(earlier) == f"  [{'-' if reward is None else f'{reward:g}'}] 1+1? 2"
