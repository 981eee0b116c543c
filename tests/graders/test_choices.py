from __future__ import annotations

import pytest

from keel.graders.choices import chosen, label_of
from keel.graders.expressions import same_answer
from keel.rewards.rules import choice
from keel.rewards.validation import Wrong

# fmt: off
CHOSEN = [
    "B", "b", "(b)", "B.", "B)", "[B]", "**B**", "Option B", "option b", "The answer is B",
    "The answer is: B", "The answer is b.", "the correct answer is (B).",
    "Answer: (B) 12 apples", r"\boxed{B}", r"\boxed{\text{Option B}}", r"$\boxed{\text{B}}$",
    r"The final answer is $\boxed{(B)}$.", "I choose B.", "I pick B because it fits.",
    "My choice is B.", "So the best option is B.", "B is correct.",
    "B is right because A is too small.", "The best answer is B) 12.", "It must be B.",
    "Therefore, (B) is the correct choice.", "Correct option: B",
    "Hence, option B is the correct answer.", "选B",
    "答案选B",
    "应选 B", "选项B正确。", "本题选B。", "答案为B", "正确答案：B", "正解：B", "答えはBです",
    "Bが正解です。", "정답은 B",
    "คำตอบคือ B", "ตอบ B", "ข้อ B", "Die Antwort ist B.", "Die richtige Lösung ist B.",
    "Antwort B ist richtig.", "La respuesta es B.", "La opción B es correcta.",
    "La réponse est B.", "La bonne réponse est la B.", "C'est la réponse B.",
    "The answer is choice B.", "B - 12", "B: 12", "B. 12", "Answer - B", "ANSWER: B",
    "Final answer: B", "The correct letter is B.", "#### B", "**Answer**: B",
    "Answer: **B. 12**", "The answer is \"B\".", "Looking at the options, B is the best choice.",
    "Only B works.", "So we select (B).", "The solution is B", "answer=B",
    "The correct statement is B.", "A, C and D are wrong, so the answer is B.",
    "Since A is false, B must be the answer.", "B is the answer", "Statement B is true.",
    r"\boxed{B) photosynthesis}", "The right choice is (B), as A needs light.",
    "B because A is too small.", r"\boxed{\textbf{(B) }14}", "9+5=14，因此正确答案是B。",
    "Also ist Antwort (B) richtig.", "La bonne réponse est l'option B, car 9 + 5 = 14.",
]
NOT_CHOSEN = [
    "A or B", "(A) and (B)", "B, C", "It is either B or C.", "B is false.",
    "B is incorrect, C as well.", "Not B.", "B?", "The answer isn't B.",
    r"\boxed{A} or \boxed{B}", r"\boxed{B,C}", r"\boxed{\text{not B}}", "Answer: A/B",
    "Answer: A & B", "All of A, B and C.", "B cannot be true.", "(B) cannot be true.",
    "Neither A nor B.", "I would rule out B.", "B is tempting, but wrong.",
    "The answer is between B and C.", "Answers: B C", r"\boxed{AB}", r"\boxed{A \text{ and } B}",
    "It is not the case that B is correct.", "Option B seems wrong.",
    "If B were true, C would be too.", "The answer is B. Wait, no, C.", "The answer is B. No, C.",
    "答案是A和B。",
    "答案是A、B。",
    "不选B。", "答えはBではない。", "Answer: B or maybe C", "Vitamin B", "Plan B",
    "The answer is vitamin B12.", "None of the above", "The answer is A. The answer is B.",
    "Answer: A\nAnswer: B", "B) is not right", "B: wrong", "Option A: 12\nOption B: 13",
    "A: 12\nB: 13", "Options: A, B", "I choose A over B", "B > A", "Choose B and C.",
    "B is not correct.", " The answer could be B.", "B (but maybe C)",
]
# fmt: on


@pytest.mark.parametrize("text", CHOSEN)
def test_an_option_in_the_usual_phrasings(text: str) -> None:
    assert chosen(text) == "B"
    assert same_answer("B", text) is True
    assert same_answer("(C)", text) is False


@pytest.mark.parametrize("text", NOT_CHOSEN)
def test_two_labels_or_a_denied_one_are_no_choice(text: str) -> None:
    assert chosen(text) != "B"
    assert same_answer("B", text) is False


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
