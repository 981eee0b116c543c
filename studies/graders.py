"""Graders on real answers: right ones in many dressings, wrong ones in as many ways.

    python -m studies.graders DATA          # the folder of gsm8k/test.jsonl, math/math500.jsonl
    python -m studies.graders DATA --rows 50

`numeric_match` on GSM8K's test set and `math` on MATH-500, by the functions they go by. A false
refusal is a gold answer in a dressing that gets 0; a false accept a wrong answer that gets 1:
neighbouring numbers, every other answer of a sample of the set, several candidates at once, the
question or its premises repeated without an answer, and equations that do not hold. An answer in
words has no dressing with a unit, and answers that differ in a unit or a name alone (`5` and
`x=5`) are no two. Prints each fault, and a Markdown table of the counts.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from keel.graders.answers import only_repeats, stated_number
from keel.graders.expressions import same_answer
from studies.common import heading, line, read_lines

DRESSINGS = {
    "plain": "{}",
    "box": r"Hence $\boxed{{{}}}$.",
    "hashes": "3 + 4 = 7\n#### {}",
    "sentence": "First 7. The answer is {}.",
    "units": r"\boxed{{{}\text{{ cm}}}}",
    "headings": "#### Step 1: take 5\n3 + 4 = 7\n#### 2. Add 9\nThe answer is ${}$.",
    "final answer": "**Final Answer**\n\n{}",
    "display": "Thus the answer is\n\\[ {} \\]",
    "bold": "**Answer: {}**",
    "inline": "So the final answer is \\({}\\).",
    "display box": "We get 3 + 4 = 7.\n\n\\[ \\boxed{{{}}} \\]",
    "bold hashes": "3 + 4 = 7\n#### **{}**",
    "wide box": r"$\boxed{{ {} }}$.",
    "text box": "$$\\boxed{{{}}}$$\n\nLet me know if you need more steps!",
    "statement": "Step 1: 3 + 4 = 7.\nStep 2: 7 * 2 = 14.\n\nFinal answer: ${}$",
    "short box": r"\fbox{{{}}}",
}
LISTS = ("{} or {}", "#### {} or {}", r"\boxed{{{}}} or \boxed{{{}}}", "The answer is {}, {}.")
QUESTIONS = ("{}", "{0} {0}", "Question: {}\nAnswer:", "{}\nI do not know.")
FALSE = (r"\boxed{{{0} + 1 = {0}}}", "#### 2 * 3 + {0} = {0}", "So 5 + {0} = {0}", "{0} - 1 = {0}.")
"""Equations that do not hold and come to the gold number."""
Right = Callable[[str, str], bool]


def numeric(gold: str, message: str) -> bool:
    """Whether the text ends on the gold number."""
    wanted, given = stated_number(gold, evaluated=False), stated_number(message)
    return wanted is not None and given is not None and given.value == wanted.value


def mathematical(gold: str, message: str) -> bool:
    """Whether the text ends on the gold answer."""
    return same_answer(gold, message) is True


def _less_names(answer: str) -> str:
    """An answer less its name and units, fractions and thousands written one way."""
    answer = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", answer)
    answer = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", answer)
    unit = r"\^ ?\{?\\circ\}?|(?<=\d) ?\\(?:text|mbox)\{[^{}]*\}(?:\^\d)?"
    return re.sub(rf"^[a-z] ?= ?|{unit}", "", answer).strip()


def neighbours(gold: str) -> Iterator[str]:
    """Answers that differ in one number, sign or letter."""
    for found in re.finditer(r"\d+", gold):
        for value in (int(found[0]) + 1, int(found[0]) + 10):
            yield f"{gold[: found.start()]}{value}{gold[found.end() :]}"
    if "-" in gold:
        yield gold.replace("-", "", 1)
    yield f"-({gold})" if gold.strip("0") else "1"
    yield gold + " + 1"
    if re.fullmatch(r"\d+", gold) and int(gold) > 1:
        yield from (gold + ".5", gold + "000", gold + "!", gold + "^2", gold + "x", f"1/{gold}")


def measure(rows: list[tuple[str, str]], right: Right, generator: random.Random) -> Counter[str]:
    """Count the tries and the faults of a grader on questions and answers; print the faults."""
    counts: Counter[str] = Counter()
    answers = list(dict.fromkeys(gold for _, gold in rows))

    def wrong(kind: str, gold: str, message: str, question: str = "") -> None:
        counts[kind] += 1
        if right(gold, message) and not (question and only_repeats(message, question)):
            counts[f"{kind}: accepted"] += 1
            print(f"accepted ({kind}): {message[-100:]!r} for {gold!r}")

    for question, gold in rows:
        for name, dressing in DRESSINGS.items():
            if name == "units" and not re.search(r"\d", gold):
                continue
            counts["right"] += 1
            if not right(gold, dressing.format(gold)):
                counts["right: refused"] += 1
                print(f"refused ({name}): {gold!r}")
        for near in neighbours(gold):
            wrong("neighbours", gold, rf"\boxed{{{near}}}")
        for other in generator.sample(answers, min(10, len(answers))):
            if _less_names(other) != _less_names(gold):
                wrong("other answers", gold, rf"\boxed{{{other}}}")
                for several in LISTS:
                    pair = generator.sample([gold, other], 2)
                    wrong("several", gold, several.format(*pair))
        for repeated in QUESTIONS:
            wrong("question", gold, repeated.format(question), question)
        sentences = re.split(r"(?<=[.!?])\s+", question)
        for some in (sentences[:-1], sentences[-2::-1], sentences[:1]):
            wrong("premises", gold, " ".join(some), question)
        if re.fullmatch(r"\d+", gold):
            for false in FALSE:
                wrong("false equation", gold, false.format(gold))
    return counts


def main() -> None:
    """Measure both graders and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gsm8k = _rows(options.data / "gsm8k/test.jsonl", "question")
    gsm8k = [(question, gold.rpartition("#### ")[2]) for question, gold in gsm8k]
    math = _rows(options.data / "math/math500.jsonl", "problem")
    rules = {"numeric_match, GSM8K": (gsm8k, numeric), "math, MATH-500": (math, mathematical)}
    found = {
        name: measure(rows[: options.rows], right, random.Random(options.seed))
        for name, (rows, right) in rules.items()
    }
    kinds = ["right", "neighbours", "other answers", "several", "question", "premises"]
    kinds.append("false equation")
    print(heading("", *kinds))
    for name, counts in found.items():
        faults = [counts[f"{k}: {'refused' if k == 'right' else 'accepted'}"] for k in kinds]
        cells = (f"{fault} of {counts[k]:,}" for k, fault in zip(kinds, faults, strict=True))
        print(line((name, *cells)))


def _rows(path: Path, question: str) -> list[tuple[str, str]]:
    return [(row[question], row["answer"]) for row in read_lines(path)]


if __name__ == "__main__":
    main()
