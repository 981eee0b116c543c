from __future__ import annotations

import time

import pytest

from keel.graders.stated import answer_part, before_stop, opened, unwrapped

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
    ],
)
def test_tags_around_a_final_answer_are_passed_over(text: str, inside: str) -> None:
    assert unwrapped(text) == inside


@pytest.mark.parametrize(
    "text",
    [
        "<answer>24</answer> or <answer>25</answer>",
        "It is not <answer>25</answer>",
        "It isn't <answer>25</answer>",
        "3<answer>25</answer>",
        "3 * <answer>25</answer>",
        "less than <answer>25</answer>",
        "<answer>25</answer>/5",
        "<answer>25</answer> is wrong",
        "25</answer>",
        "<answer>25",
    ],
)
def test_tags_within_a_sentence_stay(text: str) -> None:
    assert unwrapped(text) == text


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
        unwrapped(text)
        before_stop(text, ["</a>"])
        assert time.process_time() - begun < 5
