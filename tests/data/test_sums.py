"""What the recipes for a trained model train on."""

from __future__ import annotations

import pytest

from keel.data.sums import GUESSED, Products, product_messages, sum_messages, sums
from keel.types import Prompt
from tests.data.made import completion

PRODUCTS = Products()
PROMPT = Prompt("products/train/0", "What is 12 * 34?", {"answer": "408"}, "products")
CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 12, "b": 34}}</tool_call>'


def test_every_sum_is_right_and_a_conversation() -> None:
    rows = sums()
    assert len(rows) == len({row["prompt"] for row in rows}) == 48 * 48
    assert {"prompt": "What is 17 + 25? Answer with the number only.", "answer": "42"} in rows
    first = sum_messages()[0]["messages"]
    assert [turn["content"] for turn in first] == [rows[0]["prompt"], rows[0]["answer"]]


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (CALL, "408"),
        (CALL + "\n", "408"),
        (f"It is 7.{CALL}408{CALL.replace('12', '10')}", "340"),
        ("<tool_call>12 * 34</tool_call>", 'error: give a and b, as in {"a": 12, "b": 34}'),
        (CALL + "408", None),
        ("408", None),
    ],
)
def test_calculator_answers_a_call(text: str, reply: str | None) -> None:
    assert PRODUCTS.reply(PROMPT, text) == reply


@pytest.mark.parametrize(
    ("text", "score"), [("408", 1), (CALL + "408", 1), (CALL, 0), ("", 0), ("It is 12", 0)]
)
def test_the_last_number_counts(text: str, score: float) -> None:
    assert PRODUCTS.score(PROMPT, completion(text)) == score


def test_demonstrations_guess_wrongly_or_call_the_tool() -> None:
    rows = [row["messages"] for row in product_messages()]
    guessed = [turns for turns in rows if len(turns) == 2]
    assert abs(len(guessed) / len(rows) - GUESSED) < 0.03
    for turns in rows:
        a, b = turns[0]["content"].removeprefix("What is ").removesuffix("?").split(" * ")
        assert (turns[-1]["content"] == str(int(a) * int(b))) == (len(turns) == 4)
        if len(turns) == 4:
            assert PRODUCTS.reply(PROMPT, turns[1]["content"]) == turns[2]["content"]
