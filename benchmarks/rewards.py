"""What rewards cost: 512 completions in one call of the scorer, against 512 calls of one each.

    OMP_NUM_THREADS=1 python benchmarks/rewards.py                    # prints a Markdown table
    python benchmarks/rewards.py --kinds math judge --repeats 1       # some of the rows
    python benchmarks/rewards.py --kinds outcome --device cuda --hidden 1024 --layers 12

Both sides are one `Scorer`, so that threads, checks and metrics are in both. Every pass gets
completions that none before had, since equal ones are judged once; rows "8 equal" have them equal
within each group. Figures are medians of the repeats; the two sides take turns in going first.
What starts once a run (imports, worker processes, models, connections) has started before, but for
the judge's, whose every pass begins with an empty cache and no connection. Before it is timed, each
kind has to give the same rewards both ways.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from keel.config.model import BuildModel, Model
from keel.config.sources import RewardSource, TaskSource
from keel.data.tasks.build import build_task
from keel.rewards import Scorer, load_reward
from keel.rewards.registry import RewardContext
from keel.types import Completion, Group, Prompt, Task

SERVER = Path(__file__).with_name("judge_server.py")
GROUP = 8
"""Completions of a prompt."""
CONCURRENCY = 16
RULES: dict[str, dict[str, Any]] = {
    "exact_match": {},
    "format_match": {"tags": ["think", "answer"]},
    "repetition": {},
    "language": {"wanted": "en", "share": True},
    "step_match": {},
}
"""Rewards of the text alone, and their options."""
KINDS = ("task", *RULES, "math", "code", "outcome", "process", "judge")
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
"""Each is a token."""
ADDITION = "addition"
AGREEMENT = 1e-4
"""Packed otherwise, float32 sums of a model's forward pass round otherwise."""

Made = tuple[Prompt, list[str]]
"""A prompt, and the answers to it."""


@dataclass(frozen=True)
class Case:
    """A row of the table.

    `function` None is the task's own verdict. `make` gives the prompt of a number and the answers
    to it. `singles` bounds how many are measured one by one; the rest is scaled. `starts` says
    what a pass begins with: what the pass before left, an empty cache, or one that holds it all.
    """

    name: str
    function: str | None
    make: Callable[[int], Made]
    options: dict[str, Any] = field(default_factory=dict)
    singles: int = 1_000_000
    starts: Literal["warm", "empty", "full"] = "warm"
    equal: bool = False


class Bench:
    """Where a case's scorers and completions come from."""

    def __init__(self, folder: Path, spec: BuildModel, device: str) -> None:
        from keel.models.policy import load_policy

        self.folder, self.device = folder, device
        self.policy = load_policy(Model(build=spec, device="cpu"), 0)
        self.tokenizer = self.policy.tokenizer
        self.tasks: dict[str, Task] = {ADDITION: build_task(TaskSource(name=ADDITION), 0)}
        self._numbers = itertools.count()

    def models(self) -> dict[str, Path]:
        """Reward models of random weights, on the policy's backbone, by what they judge."""
        import torch

        from keel.models.reward import reward_model_from

        generator = torch.Generator().manual_seed(0)
        folders = {}
        for kind in ("outcome", "process"):
            model = reward_model_from(self.policy, kind, 0)
            with torch.no_grad():
                for weight in model.head.parameters():
                    weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
            folders[kind] = self.folder / kind
            model.save(folders[kind])
        return folders

    def scorer(self, case: Case, folder: Path | None = None) -> Scorer:
        """A new scorer of the case; `folder` is where it finds and leaves paid answers."""
        if case.function is None:
            return Scorer((), self.tasks)
        folder = folder or self.new_folder()
        source = RewardSource(function=case.function, options=case.options)
        around = RewardContext(tokenizer=self.tokenizer, folder=folder, device=self.device)
        return Scorer([load_reward(source, around)], self.tasks, timeout=3600.0)

    def new_folder(self) -> Path:
        """One that nothing is in yet."""
        return self.folder / f"pass-{next(self._numbers)}"

    def groups(self, case: Case, count: int, salt: int) -> list[Group]:
        """So many groups, of answers that no other salt has."""
        made = [case.make(salt * count + number) for number in range(count)]
        return [
            Group(prompt, tuple(self.completion(texts[0 if case.equal else k]) for k in range(8)))
            for prompt, texts in made
        ]

    def completion(self, text: str) -> Completion:
        """The text as a policy would have written it."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens = np.array([*ids, self.tokenizer.eos_token_id], dtype=np.int64)
        log_probs = np.full(len(tokens), -1.0, dtype=np.float32)
        return Completion(tokens, log_probs, np.ones(len(tokens), dtype=np.bool_), "eos", text)


def singly(groups: Sequence[Group]) -> list[list[Group]]:
    """The calls of one completion each."""
    return [[Group(group.prompt, (one,))] for group in groups for one in group.completions]


def rewards(scorer: Scorer, calls: Sequence[Sequence[Group]]) -> list[float | None]:
    """The rewards of calls, one after the other."""
    scored = [scorer(call, 1) for call in calls]
    return [v.reward for one in scored for verdicts in one.results for v in verdicts]


def compare(bench: Bench, case: Case, completions: int, repeats: int) -> dict[str, Any]:
    """The figures of a case: seconds of each pass, both ways."""
    count = completions // GROUP
    kept = agree(bench, case)
    passes: dict[str, list[float]] = {"batch": [], "singly": []}
    asked = min(case.singles, completions)
    salts = itertools.count(1)
    try:
        for repeat in range(repeats):
            for side in list(passes)[:: 1 if repeat % 2 == 0 else -1]:
                groups = bench.groups(case, count, next(salts))
                calls = [groups] if side == "batch" else singly(groups)[:asked]
                scorer = kept if case.starts == "warm" else started(bench, case, groups)
                start = time.perf_counter()
                for call in calls:
                    scorer(call, 1)
                seconds = time.perf_counter() - start
                passes[side].append(seconds * (1 if side == "batch" else completions / asked))
                if scorer is not kept:
                    scorer.close()
    finally:
        kept.close()
    batch, one_by_one = (statistics.median(seconds) for seconds in passes.values())
    return {
        "kind": case.name,
        "batch": batch,
        "one_by_one": one_by_one,
        "ratio": one_by_one / batch,
        "measured_one_by_one": asked,
        "completions": completions,
        "passes": passes,
    }


def agree(bench: Bench, case: Case) -> Scorer:
    """Score some groups both ways, which must come to the same; the scorer, warm."""
    groups = bench.groups(case, 4, 0)
    kept = bench.scorer(case)
    together = rewards(kept, [groups])
    other = kept if case.starts == "warm" else bench.scorer(case)
    apart = rewards(other, singly(groups))
    if other is not kept:
        other.close()
    for a, b in zip(together, apart, strict=True):
        assert a is not None, f"{case.name}: no reward"
        assert b is not None, f"{case.name}: no reward"
        assert abs(a - b) <= AGREEMENT, f"{case.name}: {a} in the batch, {b} alone"
    assert case.equal or len(set(together)) > 1, f"{case.name}: all rewards are {together[0]}"
    return kept


def started(bench: Bench, case: Case, groups: Sequence[Group]) -> Scorer:
    """A new scorer: on an empty cache, or on one that another scorer has filled."""
    folder = bench.new_folder()
    if case.starts == "full":
        before = bench.scorer(case, folder)
        before(groups, 1)
        before.close()
    return bench.scorer(case, folder)


WORDS = ("First", "To begin", "At first", "At the start", "Before all", "Now", "So", "Well")


def worked(number: int) -> Made:
    """A sum worked out in a few lines, written in eight ways; every other one ends wrongly."""
    a, b = 100 + 3 * number, 41 + 7 * number
    steps = "{}, the two numbers are added, which makes {}.\nThen the sum is doubled to {}."
    texts = []
    for k, word in enumerate(WORDS):
        twice = 2 * (a + b) + k % 2
        message = steps.format(word, a + b, twice)
        texts.append(f"<think>\n{message}\n</think>\n<answer>{twice}</answer>")
    columns = {"answer": texts[0]}
    question = f"What is twice the sum of {a} and {b}?"
    return Prompt(f"sums/train/{number}", question, columns, ADDITION), texts


def fraction(number: int) -> Made:
    """A fraction in eight ways, half of them another number."""
    top, bottom = 3 * number + 1, 3 * number + 5
    texts = [
        f"{word}, both are brought to one denominator, and the answer is "
        rf"$\boxed{{\frac{{{(k + 1) * top + k % 2}}}{{{(k + 1) * bottom}}}}}$."
        for k, word in enumerate(WORDS)
    ]
    columns = {"answer": rf"\frac{{{top}}}{{{bottom}}}"}
    return Prompt(f"fractions/train/{number}", f"What is number {number}?", columns), texts


def program(number: int) -> Made:
    """A function of a few lines in eight ways, half of them wrong, and its tests."""
    texts = [
        f"{word}, this is the function:\n```python\ndef scaled(numbers):\n    total = {k % 2}\n"
        f"    for x in numbers:\n        total += {number} * x\n    return total\n```\n"
        for k, word in enumerate(WORDS)
    ]
    lists: tuple[list[int], ...] = ([], [1], [2, 3], [-1, 1], [5, 5, 5])
    tests = [f"assert scaled({numbers}) == {number * sum(numbers)}" for numbers in lists]
    columns = {"tests": tests}
    return Prompt(f"code/train/{number}", f"Sum, times {number}.", columns), texts


def cases(
    bench: Bench, kinds: Sequence[str] | None, url: Callable[[], str], slow: int
) -> Iterator[Case]:
    """The rows, those of these kinds; what only some need is made for them alone."""

    def wanted(*names: str) -> list[str]:
        return [name for name in names if kinds is None or name in kinds]

    addition = bench.tasks[ADDITION]

    def added(number: int) -> Made:
        prompt = addition.prompt("train", number)
        gold = int(str(addition.gold(prompt)))
        return prompt, [str(gold + k) for k in range(GROUP)]

    if wanted("task"):
        yield Case("task (exact)", None, added)
    for name in wanted(*RULES):
        # The texts are all in English: what is right or wrong of them is in the share alone.
        make = mixed if name in ("language", "repetition", "format_match") else worked
        yield Case(name, name, make, RULES[name])
    if wanted("math"):
        for equal in (False, True):
            yield Case("math", "math", fraction, singles=8 * slow, equal=equal)
    if wanted("code"):
        yield Case("code", "code", program, singles=slow)
    if learned := wanted("outcome", "process"):
        folders = bench.models()
        for name in learned:
            options: dict[str, Any] = {"model": str(folders[name])}
            yield Case(name, name, worked, options)
            if name == "outcome":
                yield Case(name, name, worked, options, equal=True)
                apart = {**options, "process": True}
                yield Case("outcome, own process", name, worked, apart)
    if wanted("judge"):
        options = {"model": "judge", "url": url(), "concurrency": CONCURRENCY}
        yield Case("judge", "judge", worked, options, slow, "empty")
        yield Case("judge", "judge", worked, options, slow, "empty", equal=True)
        yield Case("judge, second pass", "judge", worked, options, starts="full")


def mixed(number: int) -> Made:
    """Answers of `worked`, every other one rambling on in German and out of its tags."""
    prompt, texts = worked(number)
    more = "\nThat is all. Und so geht es immer weiter und weiter, und so geht es immer weiter."
    return prompt, [text + more * (k % 2) for k, text in enumerate(texts)]


@contextmanager
def judges(latency: float) -> Iterator[Callable[[], str]]:
    """The address of a server in a process of its own, started once somebody asks."""
    processes: list[subprocess.Popen[str]] = []

    def url() -> str:
        command = [sys.executable, str(SERVER), str(latency)]
        processes.append(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=True
            )
        )
        assert processes[0].stdout is not None
        return f"http://127.0.0.1:{int(processes[0].stdout.readline())}/v1"

    try:
        yield url
    finally:
        for process in processes:
            process.communicate()


def line(figures: dict[str, Any]) -> str:
    """A row of the table."""
    scaled = figures["measured_one_by_one"] < figures["completions"]
    mark = f" (from {figures['measured_one_by_one']})" if scaled else ""
    return (
        f"| {figures['kind']} | {figures['batch']:.3g} s | {figures['one_by_one']:.3g} s{mark} | "
        f"{figures['ratio']:.3g} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    parser.add_argument("--completions", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--slow", type=int, default=64, help="how many slow ones go one by one")
    parser.add_argument("--latency", type=float, default=0.05, help="seconds of the judge's server")
    parser.add_argument("--device", default="cpu", help="of the reward models")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.completions < GROUP or arguments.completions % GROUP:
        parser.error(f"--completions {arguments.completions}: give a multiple of {GROUP}")
    spec = BuildModel(
        alphabet=CHARACTERS,
        hidden_size=arguments.hidden,
        layers=arguments.layers,
        heads=max(4, arguments.hidden // 64),
        context=512,
    )
    rows = []
    print(
        f"{os.cpu_count()} cores, OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}, "
        f"load average {os.getloadavg()[0]:.1f} at the start; medians of {arguments.repeats}\n\n"
        f"    python benchmarks/rewards.py {' '.join(sys.argv[1:])}\n\n"
        f"| reward | {arguments.completions} in one call | one by one | ratio |\n|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder, judges(arguments.latency) as url:
        bench = Bench(Path(folder), spec, arguments.device)
        for case in cases(bench, arguments.kinds, url, arguments.slow):
            figures = compare(bench, case, arguments.completions, arguments.repeats)
            if case.equal:
                figures["kind"] += f", {GROUP} equal"
            rows.append(figures)
            print(line(figures), flush=True)
    print(f"\nload average {os.getloadavg()[0]:.1f} at the end")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
