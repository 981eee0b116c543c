"""The instructions of IFEval: of each a text that follows it and one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from keel.graders.instructions import CHECKS, followed
from keel.types import KeelError

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["sun", "moon"]}, "Sunny moon", "the sun"),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"},
     "Tea, tea!", "tea"),
    ("keywords:forbidden_words", {"forbidden_words": ["rain"]}, "a train", "no Rain"),
    ("keywords:letter_frequency",
     {"letter": "o", "let_frequency": 2, "let_relation": "less than"}, "One", "Oslo o"),
    ("language:response_language", {"language": "de"}, "Das ist ein ganz kurzer deutscher Satz.",
     "This is a rather short English sentence."),
    ("language:response_language", {"language": "kn"}, "ನಮಸ್ಕಾರ ಪ್ರಪಂಚ", "hello world"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"},
     "One. Two!", "Version 1.5 only."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"},
     "two words", "these are three"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\n\"So, b", "so a\n\nb"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "x\np.p. s: y", "P.S. y"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n* b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**",
     "*a* ** **"),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2},
     "PART 1\na\nPART 2\nb", "PART one"),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Sun>>\nx", "<< >> <Sun>"),
    ("combination:two_responses", {}, "a\n******\nb", "a\n******\na"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "say it. It.", "It. Say it."),
    ("startend:end_checker", {"end_phrase": "The end."}, "x. the END.", "The end. x"),
    ("startend:quotation", {}, '"quoted"', '"'),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"},
     "GO NOW", "GO now"),
    ("change_case:english_capital", {}, "THIS IS A SENTENCE IN ENGLISH", "This is one"),
    ("change_case:english_lowercase", {}, "this is a sentence in english",
     "das ist ein ganzer deutscher satz hier"),
    ("punctuation:no_comma", {}, "a; b", "a, b"),
    # What the published program makes of odd answers.
    ("detectable_format:constrained_response", {}, "So: My answer is yes.", "my answer is yes."),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"}, "a\n\n'\"So'll", "a\n\n**so**"),
    ("length_constraints:nth_paragraph_first_word",
     {"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "so"}, "so\n\n\n\na", "\n\nso\n\na"),
    ("detectable_format:json_format", {}, '{"a": 1}\n```', '```javascript\n{"a": 1}\n```'),
    ("detectable_format:title", {}, "<<a > b>>", "<<>>>>"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "p. s. x", "p .s. x"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "*\n* a", "-\n* a"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "- a\n*", "- a\n* b"),
    ("detectable_format:multiple_sections", {"section_spliter": "PART ", "num_sections": 1},
     "PART1", "part 1"),
    ("change_case:capital_word_frequency", {"capital_frequency": 4, "capital_relation": "at least"},
     "NASA's CAN'T (A,B)", "NASA CAN 1:2 a"),
    ("change_case:capital_word_frequency",
     {"capital_frequency": 3, "capital_relation": "less than"}, "I'm A-B", "I'm A--B"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"},
     "Dr. B. Lee waits... and waits, e.g. Here", '"Go!" he said.'),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     '"Go." (Now!) Well', "Inc. of the U.S. is. Big"),
]  # fmt: skip


def detect(text: str) -> str:
    return "de" if "deutscher" in text else "en"


def test_every_instruction_has_a_case() -> None:
    assert {name for name, *_ in CASES} == CHECKS.keys()
    assert len(CHECKS) == 25


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_instruction_is_followed_or_not(
    name: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    padded = {**arguments, "another": None}  # as the hub's table has them
    assert [followed(text, [name], [padded], detect) for text in (right, wrong, " ")] == [
        [True], [False], [False],
    ]  # fmt: skip


def test_loose_rule_drops_lines_and_asterisks() -> None:
    names, arguments = ["startend:quotation", "punctuation:no_comma"], [{}, {}]
    text = 'Sure, here it is:\n**"Go on."**\nAnything else, tell me.'
    assert followed(text, names, arguments, detect) == [False, False]
    assert followed(text, names, arguments, detect, loose=True) == [True, True]


def test_unknown_instruction_or_argument_is_refused() -> None:
    words = "length_constraints:number_words"
    for names, arguments, match in (
        (["keywords:none"], [{}], "'keywords:none' is not an instruction"),
        ([words], [{"num_words": 2}], "hold num_words: .* arguments num_words, relation"),
        ([words], ["{}"], "'{}' is not a table of arguments"),
        ([words], [], "and a list with the arguments of each"),
        ([words], "[{}]", "and a list with the arguments of each"),
    ):
        with pytest.raises(KeelError, match=match):
            followed("x", names, arguments, detect)  # type: ignore[arg-type]
