from __future__ import annotations

import pytest

from keel.graders.answers import in_tag
from keel.graders.stated import answer_part, before_stop, opened

OPENINGS = {
    "<think>\n": "</think>",
    "<reasoning>\n": "</reasoning>",
    "[THINK]": "[/THINK]",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<scratchpad>\n": "</scratchpad>",
}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("36", "36"),
        ("<think>35</think>36", "36"),
        ("[THINK]35 or 37[/THINK]36", "36"),
        ("<think>35</think>\n<think>no</think>36", "36"),
        ("<Thinking>35</Thinking>36", "36"),
        ("<reasoning>35</reasoning><answer>36</answer>", "<answer>36</answer>"),
        ("<think><thought>35</thought>37</think>36", "36"),
        ("<think>a <think> b</think>36", "36"),
        ("35</think>36", "36"),
        ("<|begin_of_thought|>35<|end_of_thought|>36", "36"),
        ("<seed:think>35</seed:think>36", "36"),
        (
            "<|channel|>analysis<|message|>35<|end|><|start|>assistant<|channel|>final<|message|>36",
            "36",
        ),
        ("analysisWe get 35.assistantfinal36", "36"),
        ("◁think▷35◁/think▷36", "36"),
        ("<|START_THINKING|>35<|END_THINKING|>36", "36"),
        ("<unused94>thought\n35<unused95>36", "36"),
        ("<scratchpad>35</scratchpad>36", "36"),
        ("<think >35</think >36", "36"),
        ("<|thinking|>35<|/thinking|>36", "36"),
        ("<|think|>35<|end_think|>36", "36"),
        ("<reason>35</reason>36", "36"),
        ("<thought>35</thought>36", "36"),
        ("[REASONING]35[/REASONING]36", "36"),
        ("<|begin_of_reasoning|>35<|end_of_reasoning|>36", "36"),
        ("<think >36", None),
        ("<|thinking|>36", None),
        ("<reason>36", None),
        ("<|im_start|>36", "<|im_start|>36"),
        ("◁think▷36", None),
        ("<|START_THINKING|>36", None),
        ("<unused94>thought\n36", None),
        ("analysis of it: 36", "analysis of it: 36"),
        ("36<think>", None),
        ("<think>36", None),
        ("<think>35</think>36<think>", None),
        ("<think><thought>35</thought>36", None),
        ("[THINK]36[/think]", None),
        ("<|channel|>analysis<|message|>36", None),
        ("<|channel|>commentary to=f <|constrain|>json<|message|>36", None),
        ("analysisWe get 36.", None),
        # Mentioned, not used.
        ("Close it with `</think>`: 36", "Close it with `</think>`: 36"),
        ("<think>I must write </think> last? '</think>' it is</think>36", "36"),
        ('re.sub(r"<think>.*?</think>", "", s)', 're.sub(r"<think>.*?</think>", "", s)'),
        ("<think>it's 35</think>That's 36", "That's 36"),
        ('<think>It is "35".</think>"36"', '"36"'),
        ("[THINK]```py\n1\n```[/THINK]```py\n2\n```", "```py\n2\n```"),
        ("the [thought] of a <b>thought</b>", "the [thought] of a <b>thought</b>"),
    ],
)
def test_only_what_follows_the_last_thought_counts(text: str, part: str | None) -> None:
    assert answer_part(text) == part


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_thought_that_the_template_opened(opening: str) -> None:
    assert opened(opening) == opening
    assert answer_part("so 36", opening) is None
    end = OPENINGS[opening]
    assert answer_part(f"35{end}36", opening) == "36"
    assert answer_part(f"{opening}35{end}36", opening) == "36"
    assert not opened(opening + end)
    assert answer_part("36", opening + end) == "36"


def test_openings_that_are_no_thoughts() -> None:
    for opening in ("", "Sure: ", "<think>\n\n</think>\n\n"):
        assert (opened(opening), answer_part("36", opening)) == ("", "36")
    assert answer_part("36</answer>", "<answer>") == "<answer>36</answer>"


def test_the_tag_of_a_recipe() -> None:
    assert in_tag("<sol>25</sol> so 7", "sol") == "25"
    assert in_tag("<x>1</x> no, <x>25</x>", "x") == "25"
    assert in_tag("- <x>25</x>", "x") == in_tag("1. **<x>25</x>**", "x") == "25"
    for text in ("<sol>25", "25</sol>", "25", "<answer>25</answer>"):
        assert in_tag(text, "sol") is None
    for text in ("-<sol>25</sol>", "3 * <sol>25</sol>", "<sol>25</sol>0", "<sol>25</sol>/5"):
        assert in_tag(text, "sol") is None


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [
        ("25\nUser: 7", ["\nUser:"], "25"),
        ("25</s>", ["</s>", "x"], "25"),
        ("25###5", ["5###", "###"], "2"),
        ("25\n\nQuestion:", ["\n\nQ", "\n\nQuestion:"], "25"),
        ("25", ["Q"], "25"),
        ("25", [""], "25"),
        ("<answer>25</answer>", ["</answer>"], "<answer>25</answer>"),
        ("<answer>25</answer>\nx", ["</answer>\n"], "<answer>25</answer>\n"),
        ("25</answer>", ["</answer>"], "25"),
        ('{"a": [1]} x', ["}"], '{"a": [1]}'),
        ("a}", ["}"], "a"),
    ],
)
def test_the_text_before_a_stop_string(text: str, stop: list[str], before: str) -> None:
    assert before_stop(text, stop) == before
