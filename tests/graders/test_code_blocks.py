from __future__ import annotations

import tomllib
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from keel.graders.code_blocks import python_code

TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("code.toml").read_text("utf-8"))
MAIN = "def total(values):\n    out = 0\n    for v in values: out = add(out, v)\n    return out\n"


@pytest.mark.parametrize("row", TABLE["blocks"], ids=itemgetter("text"))
def test_the_code_of_a_text(row: dict[str, str]) -> None:
    assert python_code(row["text"]) == row["code"]


@pytest.mark.parametrize(
    ("after", "own"),
    [
        ("```python\nprint(f(1))\n```", True),
        ("```py\nfrom solution import f\nassert f(1) == 2\n```", True),
        ("```python\n>>> f(1)\n2\n```", True),
        ("```python\nclass T(TestCase):\n    def test(self): f(1)\n```", True),
        ("```python\nf = abs\n```", False),
        ("```py3\ndef f(x): return 3\n```", False),
        ("```python\n    return 3\n```", False),
    ],
)
def test_fences_without_the_function_are_examples(after: str, own: bool) -> None:
    code = "def f(x):\n    return x + 1\n"
    text = f"```python\n{code}```\nSo:\n{after}"
    assert (python_code(text, {"f"}) == code) == own
    assert python_code(text, {"g"}) != code


@pytest.mark.parametrize("row", TABLE["joined"], ids=itemgetter("text"))
def test_fences_that_define_what_the_last_uses_are_joined(row: dict[str, str]) -> None:
    assert python_code(row["text"], {"total"}) == row["code"]


@pytest.mark.parametrize(
    "text",
    [
        "[PYTHON]\n{}[/PYTHON]",
        "Here:\n[PYTHON]\n{}[/PYTHON]\nDone.",
        "[CODE]\n{}[/CODE]",
        "<answer>\n{}</answer>",
        "<python>{}</python> as asked",
        "<solution>\n{}",
        "[PYTHON]\n```python\n{}```\n[/PYTHON]",
        "[PYTHON]\ndef no(): pass\n[/PYTHON]\nbetter\n[PYTHON]\n{}[/PYTHON]",
    ],
)
def test_code_between_tags(text: str) -> None:
    assert python_code(text.format(MAIN), {"total"}) == MAIN


def test_tags_within_code_stay() -> None:
    code = 'def total(s):\n    return s.replace("<answer>", "</answer>")\n'
    assert python_code(code, {"total"}) == code
