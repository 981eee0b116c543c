"""Agreement of the reward `math` with plain math-verify, answer by answer.

    python -m studies.agreement DATA [CORPUS]   # the folder of math/math500.jsonl; a corpus

MATH-500: each gold answer in three dressings, the worked solution, a neighbour of each answer and
the answer of the next problem. The corpus is JSON lines with `gold`, `answer`, `prompt`, `right`.
Prints a table of the counts and every answer on which the two differ; of the corpus, with its
label.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from math_verify import parse, verify

from keel.graders.answers import only_repeats
from keel.graders.expressions import same_answer
from studies.common import heading, line, read_lines

DRESSINGS = (r"\boxed{{{}}}", "Therefore the answer is ${}$.", "So it is\n\\[ \\boxed{{{}}} \\]")
Case = tuple[str, str, str, bool]
"""A gold answer, a text, its question, and whether it is right."""


def theirs(gold: str, text: str) -> bool:
    """Whether math-verify accepts a text as it is by itself."""
    return bool(verify(parse(f"${gold}$"), parse(text)))


def ours(gold: str, text: str, question: str) -> bool:
    """Whether the reward does."""
    if question and only_repeats(text, question):
        return False
    return same_answer(gold, text, question=question) is True


def math500(path: Path) -> Iterator[Case]:
    """Right and wrong answers to each problem."""
    rows = read_lines(path)
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        gold, problem = row["answer"], row["problem"]
        for dressing in DRESSINGS:
            yield gold, dressing.format(gold), problem, True
        yield gold, row["solution"], problem, True
        yield gold, rf"\boxed{{{gold} + 1}}", problem, False
        if other["answer"].replace(" ", "") != gold.replace(" ", ""):
            yield gold, rf"\boxed{{{other['answer']}}}", problem, False


def corpus(path: Path) -> Iterator[Case]:
    """The answers of a corpus that `math` grades, without thoughts, tags and stops."""
    for row in read_lines(path):
        if row["grader"] == "math" and isinstance(row["gold"], str) and row["kind"] > "12":
            yield row["gold"], row["answer"], row.get("prompt", ""), row["right"]


def main() -> None:
    """Print the table, then the differences."""
    logging.disable(logging.CRITICAL)
    sources = {"MATH-500": math500(Path(sys.argv[1]) / "math/math500.jsonl")}
    if len(sys.argv) > 2:
        sources["corpus"] = corpus(Path(sys.argv[2]))
    kinds = ("right: only here", "right: only there", "wrong: here", "wrong: there")
    print(heading("", "answers", "agree", *kinds))
    differences = []
    for name, cases in sources.items():
        counts: Counter[str] = Counter()
        for gold, text, question, right in cases:
            here, there = ours(gold, text, question), theirs(gold, text)
            counts["all"] += 1
            counts["agree"] += here == there
            if here != there:
                label, side = "right" if right else "wrong", "here" if here else "there"
                counts[f"{label} {side}"] += 1
                differences.append(f"{name}, {label}, accepted {side}: {text[-90:]!r} for {gold!r}")
        keys = ("all", "agree", "right here", "right there", "wrong here", "wrong there")
        print(line((name, *(counts[key] for key in keys))))
    print("", *differences, sep="\n")


if __name__ == "__main__":
    main()
