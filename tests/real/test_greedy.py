"""A trained model's greedy completions are those of transformers."""

from __future__ import annotations

import pytest

from tests.real.greedy import greedy
from tests.real.model import QUESTIONS

pytestmark = pytest.mark.real


def test_greedy_completions_equal_generate() -> None:
    found = greedy(QUESTIONS, max_tokens=40)
    assert sum(one.tokens for one in found) > 100
    assert [one for one in found if not one.excused] == []
    assert sum(one.gap is None for one in found) >= len(found) - 1
