"""BIG-Bench Mistake as rows for Keel: traces in words, renamed, and with mistakes put in.

A trace is a prompt, steps, and the index of the first wrong step (none: all are right). All traces,
validation ones too, are written in few words: of brackets only these, those of the stack with their
height in it as one word; of shuffled objects who is named, and who holds what as one word. These
two are read without their prompt, which the steps repeat but for the rare one that does not follow
it. Train traces become more: one of the right steps is changed and is then the first wrong one, and
names without meaning (kinds of brackets, people with what they hold at the start) are exchanged.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

TASKS = (
    "dyck_languages",
    "tracking_shuffled_objects",
    "multistep_arithmetic",
    "word_sorting",
    "logical_deduction",
)
WORD = re.compile(r"[A-Za-z']+|\d|[^\s]")
UNKNOWN = "<unk>"
BRACKETS = ("()", "[]", "{}", "<>")
OPENING = tuple(pair[0] for pair in BRACKETS)
HIGHEST = 30
PEOPLE = ("Alice", "Bob", "Claire", "Dave", "Eve")
THINGS = tuple(f"thing{letter}" for letter in "ABCDEFG")
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A solution in steps of words. `key` is its input, or that of the first trace with the very
    same words: names aside, two inputs may be the same."""

    key: str
    prompt: Words
    steps: tuple[Words, ...]
    first_error: int | None

    @property
    def right(self) -> int:
        """How many steps are right, from the first on."""
        return len(self.steps) if self.first_error is None else self.first_error

    @property
    def length(self) -> int:
        """Words, a line's end counted as one."""
        return len(self.prompt) + 1 + sum(len(step) + 1 for step in self.steps)


def read_traces(folder: Path, task: str) -> list[Trace]:
    """All traces of a task, in the file's order."""
    traces = []
    same: dict[tuple[Words, ...], str] = {}
    with (folder / f"{task}.jsonl").open(encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            prompt = WORD.findall(row["input"])
            steps = [WORD.findall(step) for step in row["steps"]]
            if task == "dyck_languages":
                prompt, steps = [], [_brackets(step) for step in steps]
            elif task == "tracking_shuffled_objects":
                things = _things(row["input"])
                prompt, steps = [], [_holdings(step, things) for step in steps]
            words = tuple(map(tuple, steps))
            key = same.setdefault((tuple(prompt), *words), row["input"])
            traces.append(Trace(key, tuple(prompt), words, row["mistake_index"]))
    return traces


def fold_of(key: str, folds: int, shuffle: int) -> int:
    """The fold of a key, by its hash."""
    return int(hashlib.sha256(f"{shuffle} {key}".encode()).hexdigest(), 16) % folds


def _brackets(words: Sequence[str]) -> list[str]:
    """The brackets of a step, the sign before the stack, and "empty"; see `numbered`."""
    return numbered([word for word in words if word in "()[]{}<>;" or word == "empty"])


def numbered(words: Sequence[str]) -> list[str]:
    """Each bracket that a stack may hold with its height in it, "[:3"; from the last height on
    all are alike."""
    begins = words.index(";") + 1 if ";" in words else 0
    stack = [
        f"{word}:{min(height, HIGHEST)}" if word in OPENING else word
        for height, word in enumerate(words[begins:], start=1)
    ]
    return [*words[:begins], *stack]


def _things(prompt: str) -> dict[str, str]:
    """One name for each thing, by the words that the options at the prompt's end have for it.

    An option is "(A) The Great Gatsby."; a step may say "Gatsby". A is what Alice has first.
    """
    options = [WORD.findall(text) for text in re.findall(r"\([A-G]\) (.+?)\.?$", prompt, re.M)]
    shared = {"the", "of", "a"}.union(set.intersection(*(set(words) for words in options)))
    names: dict[str, str] = {}
    for words, thing in zip(options, THINGS, strict=False):
        for word in words:
            if word.lower() not in shared and word not in shared:
                names.setdefault(word.lower(), thing)
    return names


def _holdings(words: Sequence[str], things: dict[str, str]) -> list[str]:
    """Who is named, what, and "answer"; "Alice:thingB" where a thing follows a person.

    Neighbouring holdings are put in the order of the names.
    """
    people = {short: name for name in PEOPLE for short in (name, name[0])}
    found: list[str] = []
    last = ""
    for word in words:
        message = word
        if last == "(":
            option = "ABCDEFG".find(word)
            word = THINGS[option] if option >= 0 else word
        elif word in people:
            word = people[word]
        else:
            word = things.get(word.lower(), word)
        last = message
        if word in THINGS and found and found[-1] in PEOPLE:
            found[-1] += ":" + word
        elif word in THINGS and found and found[-1].endswith(word):
            continue
        elif word in PEOPLE or word in THINGS or word == "answer":
            found.append(word)
    return in_order(found)


def in_order(words: Sequence[str]) -> list[str]:
    """The words, each run of holdings in the order of the names."""
    ordered: list[str] = []
    for holds, run in itertools.groupby(words, lambda word: ":" in word):
        same = list(run)
        ordered += sorted(same) if holds else same
    return ordered


# ---------------------------------------------------------------- names exchanged


def renamed(task: str, trace: Trace, rng: random.Random) -> Trace:
    """The trace with other names for what the task does not care about."""
    if task == "dyck_languages":
        kinds = rng.sample(BRACKETS, len(BRACKETS))
        names = dict(zip("".join(BRACKETS), "".join(kinds), strict=True))
    elif task == "tracking_shuffled_objects":
        # Each person takes what they have at the start along: Alice still begins with thing A.
        there = 5 if any("Eve" in word for step in trace.steps for word in step) else 3
        order = rng.sample(range(there), there)
        names = {PEOPLE[a]: PEOPLE[b] for a, b in enumerate(order)}
        names |= {THINGS[a]: THINGS[b] for a, b in enumerate(order)}
    else:
        return trace

    def other(words: Words) -> Words:
        new = [":".join(names.get(part, part) for part in word.split(":")) for word in words]
        return tuple(in_order(new)) if task == "tracking_shuffled_objects" else tuple(new)

    return replace(trace, prompt=other(trace.prompt), steps=tuple(map(other, trace.steps)))


# ---------------------------------------------------------------- mistakes put in


def with_mistake(task: str, trace: Trace, rng: random.Random) -> Trace | None:
    """A trace with one of its right steps changed; None where none can be."""
    change, first = CHANGES.get(task, (_change_words, 1))
    if trace.right <= first:
        return None
    for _ in range(20):
        k = rng.randrange(first, trace.right)
        step = change(trace, k, rng)
        if step and step != trace.steps[k]:
            return replace(
                trace, steps=(*trace.steps[:k], step, *trace.steps[k + 1 :]), first_error=k
            )
    return None


def _change_brackets(trace: Trace, k: int, rng: random.Random) -> Words | None:
    """Brackets of the stack left out, put in, or exchanged, mostly at its end; or the bracket that
    is read is another."""
    words = [word.split(":")[0] for word in trace.steps[k]]
    begins = words.index(";") + 1 if ";" in words else 0
    stack = [word for word in words[begins:] if word != "empty"]
    count, chance = rng.choice((1, 1, 2, 2, 3)), rng.random()
    at = len(stack) if rng.random() < 0.6 else rng.randrange(len(stack) + 1)
    if chance < 0.2 and begins:
        words[0] = rng.choice("()[]{}<>")
        return tuple(numbered(words))
    if chance < 0.6:
        at = max(min(at, len(stack) - count), 0)
        del stack[at : at + count]
    elif chance < 0.85:
        stack[at:at] = [rng.choice(OPENING) for _ in range(min(count, 2))]
    elif stack:
        stack[min(at, len(stack) - 1)] = rng.choice(OPENING)
    return tuple(numbered([*words[:begins], *(stack or ["empty"])]))


def _change_things(trace: Trace, k: int, rng: random.Random) -> Words | None:
    """Two things exchanged, one held twice, or held as a step before."""
    words = [word.split(":") for word in trace.steps[k]]
    places = [i for i, word in enumerate(words) if len(word) == 2]
    if not places:
        return None
    i, chance = rng.choice(places), rng.random()
    others = [j for j in places if j != i]
    before = dict(word.split(":") for word in trace.steps[k - 1] if ":" in word)
    if not others:
        words[i][1] = rng.choice(THINGS[: 5 if "Eve" in before else 3])
    elif chance < 0.5:
        j = rng.choice(others)
        words[i][1], words[j][1] = words[j][1], words[i][1]
    elif chance < 0.75:
        words[i][1] = words[rng.choice(others)][1]
    else:
        for place in places if chance < 0.9 else [i]:
            words[place][1] = before.get(words[place][0], words[place][1])
    return tuple(map(":".join, words))


def _change_numbers(trace: Trace, k: int, rng: random.Random) -> Words | None:
    """After the first equals sign: another digit, a minus more or less, another operation."""
    words = list(trace.steps[k])
    after = words.index("=") if "=" in words else -1
    digits = [i for i, word in enumerate(words) if i > after and word.isdigit()]
    signs = [i for i, word in enumerate(words) if i > after and word in "+-*"]
    if not digits:
        return None
    i, chance = rng.choice(digits), rng.random()
    if chance < 0.5:
        words[i] = str((int(words[i]) + rng.choice((-2, -1, 1, 2))) % 10)
    elif chance < 0.8:
        if words[i - 1] == "-":
            del words[i - 1]
        else:
            words.insert(i, "-")
    elif signs:
        words[rng.choice(signs)] = rng.choice("+-*")
    return tuple(words)


def _change_words(trace: Trace, k: int, rng: random.Random) -> Words | None:
    """A word exchanged for one that follows the same word elsewhere, left out, doubled, moved."""
    words = list(trace.steps[k])
    if len(words) < 2:
        return None
    i, chance = rng.randrange(len(words)), rng.random()
    if chance < 0.6:
        before = words[i - 1] if i else None
        message = (trace.prompt, *trace.steps[: k + 1])
        others = [
            b
            for line in message
            for a, b in itertools.pairwise(line)
            if a == before and b != words[i]
        ]
        if not others:
            return None
        words[i] = rng.choice(others)
    elif chance < 0.75:
        del words[i]
    elif chance < 0.85:
        words.insert(i, words[i])
    else:
        j = rng.randrange(len(words))
        words[i], words[j] = words[j], words[i]
    return tuple(words)


Change = Callable[[Trace, int, random.Random], Words | None]
CHANGES: dict[str, tuple[Change, int]] = {
    "dyck_languages": (_change_brackets, 2),
    "tracking_shuffled_objects": (_change_things, 1),
    "multistep_arithmetic": (_change_numbers, 0),
}
"""How a step of a task is changed, and the first step that is."""
