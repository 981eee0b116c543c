from __future__ import annotations

import time

import pytest

from keel.graders.answers import in_tag, stated_number, stated_part
from keel.graders.choices import chosen
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


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("<answer>25</answer>", "25"),
        ("<|begin_of_solution|>\n25\n<|end_of_solution|>", "25"),
        ("<|START_RESPONSE|>25<|END_RESPONSE|>", "25"),
        ("25<end_of_turn>\n<eos>", "25"),
        ("25 [/INST]", "25"),
        ("So:\n<result> 7 </result>.\n", "7"),
        ("The answer is <final_answer>25 eggs</final_answer>", "25 eggs"),
        ("- <answer>25</answer>", "25"),
        ("**<answer>25</answer>**", "25"),
        ("5 + 20 = <answer>25</answer>", "25"),
        ("<answer>24</answer> I recount. <answer>25</answer>", "25"),
        ("<result><b>7</b></result>", "7"),
        ("<answer>25</answer></s>", "25"),
        ("25<|im_end|>", "25"),
        ("25\n###", "25"),
        ("25\n\nQ:", "25"),
        # What follows a tag states nothing.
        ("<answer>36</answer>The total is 25 apples.", "36"),
        ("<answer>36</answer>\nThe total is 25 apples.", "36"),
        ("<response>36</response> That is, 5 * 5 = 25.", "36"),
        ("<answer>36</answer> I used 25 of them.", "36"),
        ("[ANSWER]25[/ANSWER]", "25"),
        ("[FINAL_ANSWER] 25 [/FINAL_ANSWER]", "25"),
        ("<Answer>25</Answer>", "25"),
        ("<output>25</output>", "25"),
        # Not closed at the end.
        ("<answer>25", "25"),
        ("So: <solution>\n25\n", "25"),
        ("<answer>24</answer> No. <answer>25", "25"),
        ("<answer><result>25</result></answer>", "25"),
    ],
)
def test_what_stands_in_a_tag_is_the_answer(text: str, inside: str) -> None:
    assert stated_part(text).strip() == inside


@pytest.mark.parametrize(
    "text",
    [
        "<answer>24</answer> or <answer>25</answer>",
        "It is not <answer>25</answer>",
        "It isn't <answer>25</answer>",
        "3<answer>25</answer>",
        "3 * <answer>25</answer>",
        "-<answer>25</answer>",
        "- 2<answer>25",
        "less than <answer>25</answer>",
        "<answer>25</answer>/5",
        "<answer>25</answer>0",
        "<answer>25</answer> * 2",
        "<answer>25</answer> is wrong",
        "<answer>25</answer> Wait, no: it should be 7.",
        "<answer>-</answer>25",
        "<wrong>25</wrong>",
        "<draft>25</draft>",
        "<not_answer>25</not_answer>",
        r"<wrong>\boxed{25}</wrong>",
        "<step>25</step>",
        "[wrong]25[/wrong]",
        "<previous_answer>25</previous_answer>",
    ],
)
def test_no_answer_in_other_tags_or_an_operand_or_denied(text: str) -> None:
    given = stated_number(text)
    assert given is None or given.value != 25
    assert chosen(text.replace("25", "B")) != "B"


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


def test_hostile_texts_take_no_time() -> None:
    for text in ("<think>" * 9_000, "</a>" * 9_000, " " * 90_000, "'<" * 40_000, "<" * 90_000,
                 "<|channel|>" * 9_000, "analysis" * 9_000, "\n" * 90_000 + "x"):  # fmt: skip
        begun = time.process_time()
        answer_part(text)
        stated_part(text)
        before_stop(text, ["</a>"])
        assert time.process_time() - begun < 5
