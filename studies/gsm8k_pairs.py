"""GSM8K as pairs: a right and a wrong solution of one problem; and solutions broken by a program.

What `reward_model_gsm8k.py` learns from and is measured on. The solutions that models wrote come
from `example_model_solutions.jsonl` (four a problem, each marked right or wrong), the broken ones
are made of the gold solutions of `train.jsonl`, whose problems are others. (Cobbe et al. 2021,
arXiv:2110.14168, for both files.)
"""

from __future__ import annotations

import ast
import hashlib
import json
import operator
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

WRITERS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
CALCULATION = re.compile(r"<<([^=<>]+)=([^<>]+)>>")
NUMBER = re.compile(r"\d+\.?\d*")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
HEADING = 6
"""Words of a problem that head its solutions, where the problem itself stands after them."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two different solutions of a problem, the first right, the second wrong."""

    problem: str
    right: str
    wrong: str


def real_pairs(data: Path) -> list[Pair]:
    """Every right solution with every wrong one of the same problem."""
    found = []
    for row in _rows(data / "example_model_solutions.jsonl"):
        message = [row[writer] for writer in WRITERS]
        right = dict.fromkeys(s["solution"] for s in message if s["is_correct"])
        wrong = dict.fromkeys(s["solution"] for s in message if not s["is_correct"])
        found += [Pair(row["question"], a, b) for a in right for b in wrong]
    return found


def gold_solutions(data: Path) -> list[tuple[str, str]]:
    """(problem, solution) of `train.jsonl`, the solution in the form that the models write.

    Raises ValueError where a problem is also one of those that the models solved.
    """
    rows = [
        (row["question"], row["answer"].replace("#### ", "A: "))
        for row in _rows(data / "train.jsonl")
    ]
    solved = {_plain(row["question"]) for row in _rows(data / "example_model_solutions.jsonl")}
    both = [question for question, _ in rows if _plain(question) in solved]
    if both:
        raise ValueError(f"{len(both)} problems are in both files, the first: {both[0]!r}")
    return rows


def share_of(problem: str, salt: str, shares: int) -> int:
    """Which of so many equal shares the problem is in: a function of its text and the salt."""
    return int(hashlib.sha256(f"{salt}:{problem}".encode()).hexdigest(), 16) % shares


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


# ---------------------------------------------------------------- how a model reads them


def laid_out(problem: str, solution: str) -> tuple[str, str]:
    """(prompt, answer): the solution, and after it the problem.

    A causal model's numbers of the problem see those of the solution only where the problem comes
    later. Its first words are the prompt, since a prompt must not be empty.
    """
    return " ".join(problem.split()[:HEADING]) + "\n", f"{solution}\n{problem}"


# ---------------------------------------------------------------- solutions broken by a program


def broken(problem: str, solution: str, rng: random.Random) -> str | None:
    """The solution with one mistake of reasoning whose arithmetic is right again; None if it fails.

    It stops early (0.25), leaves out a step (0.15), takes another operator (0.35), or another
    number of the problem or of an earlier step (0.25); the rest is computed again. Three in four
    mistakes that a fraction or a negative number would give away are made again.
    """
    *lines, last = solution.split("\n")
    if not CALCULATION.search(solution):
        return None
    for _ in range(10):
        kind = rng.random()
        if kind < 0.25:
            made = _stopped(lines, last, rng)
        elif kind < 0.4:
            made = _skipped(lines, last, rng)
        else:
            made = _slipped(problem, lines, last, rng, operators=kind < 0.75)
        if made is None or made == solution:
            continue
        if not _given_away(made, solution) or rng.random() < 0.25:
            return made
    return None


def _given_away(made: str, solution: str) -> bool:
    """Whether it has results that are fractions or below zero where the solution has none."""
    new, old = (
        any(not result.isdigit() for _, result in CALCULATION.findall(text))
        for text in (made, solution)
    )
    return new and not old


def _stopped(lines: Sequence[str], last: str, rng: random.Random) -> str | None:
    """Without the last steps: the answer is what stood there by then."""
    with_results = [n for n, line in enumerate(lines) if CALCULATION.search(line)]
    if len(with_results) < 2:
        return None
    end = with_results[rng.randrange(len(with_results) - 1)]
    result = CALCULATION.findall(lines[end])[-1][1]
    return None if result == _final(last) else "\n".join([*lines[: end + 1], f"A: {result}"])


def _skipped(lines: Sequence[str], last: str, rng: random.Random) -> str | None:
    """Without one step in the middle; what follows uses its result all the same."""
    if len(lines) < 3:
        return None
    left_out = rng.randrange(len(lines) - 1)
    return "\n".join([*lines[:left_out], *lines[left_out + 1 :], last])


def _slipped(
    problem: str, lines: Sequence[str], last: str, rng: random.Random, *, operators: bool
) -> str | None:
    """One calculation with another operator or number, and its result carried on to the end."""
    places = [(n, match) for n, line in enumerate(lines) for match in CALCULATION.finditer(line)]
    chosen = rng.randrange(len(places))
    at, match = places[chosen]
    term, result = match.groups()
    if operators:
        spots = [i for i, character in enumerate(term) if i and character in "+-*/"]
        if not spots:
            return None
        spot = rng.choice(spots)
        other = rng.choice([sign for sign in "+-*/" if sign != term[spot]])
        changed = term[:spot] + other + term[spot + 1 :]
    else:
        known = NUMBER.findall(problem) + [m.group(2) for _, m in places[:chosen]]
        numbers = list(NUMBER.finditer(term))
        if not known or not numbers:
            return None
        number = rng.choice(numbers)
        changed = term[: number.start()] + rng.choice(known) + term[number.end() :]
    value = _value(changed)
    if value is None or value == result:
        return None
    line = lines[at].replace(match.group(0) + result, f"<<{changed}={value}>>{value}")
    line = line.replace(match.group(0), f"<<{changed}={value}>>")
    line = _as_written(term).sub(changed, line)
    moved = {result: value}
    rest = [_carried(later, moved) for later in lines[at + 1 :]]
    answer = moved.get(_final(last), _final(last))
    return "\n".join([*lines[:at], line, *rest, f"A: {answer}"])


def _as_written(term: str) -> re.Pattern[str]:
    """The term as the text around a calculation may have it: with blanks, dollars, and x for *."""
    signs = {"*": "[*x×]", "/": "[/÷]", "-": "[-−–]"}
    parts = [signs.get(part, re.escape(part)) for part in re.findall(r"[\d.]+|\S", term)]
    return re.compile(r"(?<![\d.])" + r"\s*\$?".join(parts) + r"(?![\d])")


def _carried(line: str, moved: dict[str, str]) -> str:
    """The line with the moved numbers in place of the old; `moved` gains the results it changes."""

    def again(match: re.Match[str]) -> str:
        term, result = match.groups()
        changed = _exchanged(term, moved)
        value = _value(changed)
        if value is None:
            return match.group(0)
        if changed != term and value != result:
            moved[result] = value
        return f"<<{changed}={value}>>"

    return _exchanged(CALCULATION.sub(again, line), moved, before=r"(?<![\d.=])")


def _exchanged(text: str, moved: dict[str, str], before: str = r"(?<![\d.])") -> str:
    for old, new in list(moved.items()):
        text = re.sub(before + re.escape(old) + r"(?![\d.])", new, text)
    return text


def _final(last: str) -> str:
    return last.removeprefix("A: ").strip().replace(",", "")


def _value(term: str) -> str | None:
    """What a term of numbers and + - * / comes to, to two places; None where to nothing."""
    try:
        value = _evaluated(ast.parse(term.replace(",", "").replace("x", "*"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, OverflowError):
        return None
    if abs(value) > 1e9:
        return None
    rounded = round(value, 2)
    return str(int(rounded)) if rounded == int(rounded) else str(rounded)


def _evaluated(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        found = OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        return float(found)
    raise ValueError("not a term of numbers")


# ---------------------------------------------------------------- the bag of words


def bag_of_words(
    train: Sequence[Pair], validation: Sequence[Pair], shares: int = 4, *, logarithm: bool = False
) -> Array:
    """Score differences (right less wrong) of validation pairs, by logistic regression on words.

    The difference of the two solutions' counts of each word (or of log(1 + count)), of words that
    are in three train solutions at least; the L2 penalty is the best of five on shares of the train
    problems.
    """
    penalties = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    words = _vocabulary(train)
    rows = _differences(train, words, logarithm)
    share = np.array([share_of(pair.problem, "penalty", shares) for pair in train])
    right = [
        sum(
            float(in_order(rows[share == k] @ _fitted(rows[share != k], penalty)).sum())
            for k in range(shares)
        )
        for penalty in penalties
    ]
    weights = _fitted(rows, penalties[int(np.argmax(right))])
    found: Array = _differences(validation, words, logarithm) @ weights
    return found


def in_order(difference: Array) -> Array:
    """Of differences, right less wrong: 1 where right is above wrong, ½ where they are equal."""
    found: Array = (difference > 0) + 0.5 * (difference == 0)
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z']+|\d+\.?\d*|[^\sa-z\d]", text.lower())


def _vocabulary(pairs: Sequence[Pair], least: int = 3) -> dict[str, int]:
    texts = dict.fromkeys(text for pair in pairs for text in (pair.right, pair.wrong))
    counts = Counter(word for text in texts for word in set(_words(text)))
    kept = [word for word, count in counts.items() if count >= least]
    return {word: number for number, word in enumerate(kept)}


def _differences(pairs: Sequence[Pair], words: dict[str, int], logarithm: bool) -> Array:
    rows = np.zeros((len(pairs), 2, len(words)))
    for row, pair in zip(rows, pairs, strict=True):
        for counts, text in zip(row, (pair.right, pair.wrong), strict=True):
            for word in _words(text):
                if word in words:
                    counts[words[word]] += 1
    if logarithm:
        rows = np.log1p(rows)
    found: Array = rows[:, 0] - rows[:, 1]
    return found


def _fitted(rows: Array, penalty: float) -> Array:
    """The weights that minimise the mean of softplus(−w·x) + penalty |w|²."""
    x = torch.tensor(rows, dtype=torch.float32)
    weight = torch.zeros(x.shape[1], requires_grad=True)
    solver = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        value = F.softplus(-(x @ weight)).mean() + penalty * (weight * weight).sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    solver.step(loss)  # type: ignore[no-untyped-call]
    found: Array = weight.detach().numpy().astype(np.float64)
    return found
