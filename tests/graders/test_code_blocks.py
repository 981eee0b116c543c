from __future__ import annotations

import pytest

from keel.graders.code_blocks import python_code

DOC = '  """\n  ```\n  f()\n  ```\n  """\n'
NAMED = DOC.replace("```", "```py", 1)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\n```py\n  b\n```", "  b\n"),
        ("```python\na\n```\nwhich prints\n```text\nb\n```", "a\n"),
        ("```Python title\na\n", "a\n"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("s = '```'", "s = '```'"),
        ("```python\na\n```\nOutput:\n```\n5\n```", "a\n"),
        ("```\na\n```\nthen\n```\nb\n```\n```text\nc\n```", "b\n"),
        # In a list: the fence's own blanks are not the code's.
        ("- So:\n  ```python\n  if x:\n      y\n  ```\n- done", "if x:\n    y\n"),
        ("1. ```py\n   x = 1\n   y = 2\n   ```", "x = 1\ny = 2\n"),
        ("10.\n\t```python\n\tx = 1\n\n\ty = 2\n\t```\n", "x = 1\n\ny = 2\n"),
        # In a docstring, by itself, with a name, and of a body alone.
        (f"```py\ndef f():\n{DOC}```\n1", f"def f():\n{DOC}"),
        (f"```py\ndef f():\n{NAMED}```", f"def f():\n{NAMED}"),
        (f"```py\n{NAMED}```\n```\n5\n```", NAMED),
        (f"- ```py\n  if x:\n{DOC.replace('  ', '    ')}  ```", f"if x:\n{DOC}"),
        ("> ```python\n> if x:\n>     y\n> ```", "if x:\n    y\n"),
        ("~~~python\nx = 1\n```\n~~~\n", "x = 1\n```\n"),
        # Not closed before the next begins; code that is no Python; a longer fence; tags.
        ("```py\na(\n```py\nb\n```", "b\n"),
        ("```py\na(\n```\nb\n```text\n)\n```", "a(\n"),
        ('````py\ns = """\n```\n"""\n````', 's = """\n```\n"""\n'),
        ("<answer>```python\nx = 1\n```</answer>", "x = 1\n"),
        ("Here it is: ```python\nx = 1\n```", "x = 1\n"),
    ],
)
def test_the_code_of_a_text(text: str, code: str) -> None:
    assert python_code(text) == code


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


HELPER = "def add(a, b):\n    return a + b\n"
MAIN = "def total(values):\n    out = 0\n    for v in values: out = add(out, v)\n    return out\n"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (f"```py\n{HELPER}```\nthen\n```py\n{MAIN}```", f"{HELPER}\n{MAIN}"),
        (f"```py\n{MAIN}```\nwith\n```py\n{HELPER}```", f"{MAIN}\n{HELPER}"),
        (f"```py\n{HELPER}```\n```py\n{MAIN}```\n```py\ntotal([1])\n```", f"{HELPER}\n{MAIN}"),
        ("```py\nimport re\n```\n```py\ndef total(s): return re.x(s)\n```",
         "import re\n\ndef total(s): return re.x(s)\n"),
        ("```py\nONE = 1\n```\n```py\ndef one(): return ONE\n```\n"
         "```py\ndef total(): return one()\n```",
         "ONE = 1\n\ndef one(): return ONE\n\ndef total(): return one()\n"),
        # A fence that is complete is alone; other languages and other helpers are not joined.
        (f"```py\n{HELPER}```\n```py\n{HELPER}\n{MAIN}```", f"{HELPER}\n{MAIN}"),
        (f"```py\ndef sub(): pass\n```\n```py\n{MAIN}```", MAIN),
        (f"```js\nadd = 1\n```\n```py\n{MAIN}```", MAIN),
        (f"```py\ndef total(v): return 1\n```\n```py\n{MAIN}```", MAIN),
    ],
)  # fmt: skip
def test_fences_that_define_what_the_last_uses_are_joined(text: str, code: str) -> None:
    assert python_code(text, {"total"}) == code


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
