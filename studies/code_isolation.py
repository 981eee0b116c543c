"""Code apart from its tests: what cheats, solutions and wrong variants get, and what it costs.

    OMP_NUM_THREADS=1 python -m studies.code_isolation HumanEval.jsonl.gz   # prints Markdown
    python -m studies.code_isolation HumanEval.jsonl.gz --mutants 1 --repeats 1 --problems 20

Cheats (`tests/graders/cheats.py`) are judged in both isolations. Every solution of HumanEval has to
pass. Variants of the solutions, changed in one place each (`tests/graders/mutants.py`), are first
judged without Keel: a plain Python process runs the program and then the published test. Those
that pass there are equivalent as far as the test can say; all others have to fail in Keel too. Time
is that of one judgement of a solution, by the clock and in all its processes, each isolation in
turn.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.graders.unit_tests import Checked, Isolation, read_tests, run_tests
from keel.platform.sandbox import Limits, Sandbox
from keel.rewards.code import in_threads
from studies.common import markdown
from tests.graders.cheats import CHEATS, SHAPES, Cheat
from tests.graders.mutants import mutants

ISOLATIONS: tuple[Isolation, ...] = ("process", "shared")
PLAIN_SECONDS = 5.0
"""A variant that takes longer in a plain process has not passed; solutions take well under 1 s."""

Problem = dict[str, Any]


def judged(
    sandbox: Sandbox, problem: Problem, program: str, isolation: Isolation = "process"
) -> Checked:
    """What Keel makes of a program, the problem's prompt known."""
    read = read_tests(problem["test"], problem["entry_point"], prompt=problem["prompt"])
    return run_tests(sandbox, program, read, isolation=isolation)


def passes_plainly(problem: Problem, program: str) -> bool:
    """Whether a program passes the published test in a Python process without Keel."""
    name = problem["entry_point"]
    whole = f"import random\nrandom.seed(0)\n{program}\n{problem['test']}\ncheck({name})\n"
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({2**29}, {2**29}))\n"
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-s", "-c", limit + whole],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PLAIN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def paid_cheats(sandbox: Sandbox, isolation: Isolation, workers: int) -> int:
    """How many of the cheats are paid, wholly or in part."""

    def paid(cheat: Cheat) -> bool:
        tests, name, prompt = SHAPES[cheat.shape]
        read = read_tests(tests, name, prompt=prompt)
        return run_tests(sandbox, prompt + cheat.code, read, isolation=isolation).share > 0

    return sum(in_threads(paid, CHEATS, workers))


def solution(problem: Problem) -> str:
    """The published solution, whole."""
    return str(problem["prompt"] + problem["canonical_solution"])


def times(
    sandbox: Sandbox, problems: Sequence[Problem], repeats: int
) -> dict[Isolation, tuple[float, float]]:
    """Medians of the seconds and of the processor seconds of a judgement."""
    found: dict[Isolation, list[tuple[float, float]]] = {one: [] for one in ISOLATIONS}
    for problem in problems:
        for _ in range(repeats):
            for isolation in ISOLATIONS:
                before, start = _processor(), time.perf_counter()
                judged(sandbox, problem, solution(problem), isolation)
                spent = time.perf_counter() - start, _processor() - before
                found[isolation].append(spent)
    return {
        one: tuple(map(statistics.median, zip(*each, strict=True))) for one, each in found.items()
    }


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the tables; the command ends with 1 where anything is not as it must."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", type=Path, help="HumanEval.jsonl.gz")
    parser.add_argument("--problems", type=int, default=1000, help="so many at most")
    parser.add_argument("--mutants", type=int, default=4, help="variants of each solution")
    parser.add_argument("--repeats", type=int, default=3, help="of each time")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(words)
    lines = gzip.decompress(given.data.read_bytes()).splitlines()[: given.problems]
    problems: list[Problem] = [json.loads(line) for line in lines]
    sandbox = Sandbox(Limits())

    paid = {one: paid_cheats(sandbox, one, given.workers) for one in ISOLATIONS}
    print(markdown((f"of {len(CHEATS)} cheats", "paid"), paid.items()), flush=True)

    def ends(case: tuple[Problem, str]) -> tuple[bool, bool]:
        problem, program = case
        return passes_plainly(problem, program), judged(sandbox, *case).status == "passed"

    right = in_threads(ends, [(one, solution(one)) for one in problems], given.workers)
    cases = [
        (one, text)
        for one in problems
        for text in mutants(solution(one), one["entry_point"], given.mutants, seed=0)
    ]
    changed = in_threads(ends, cases, given.workers)
    passed = sum(apart for _, apart in right)
    wrong = [apart for plainly, apart in changed if not plainly]
    same = [apart for plainly, apart in changed if plainly]
    kinds = [
        ("solutions", len(right), passed),
        ("variants that fail without Keel", len(wrong), sum(wrong)),
        ("variants that pass without Keel", len(same), sum(same)),
    ]
    print("", markdown(("programs", "number", "pass"), kinds), sep="\n", flush=True)
    for (problem, text), (plainly, apart) in zip(cases, changed, strict=True):
        if plainly != apart:
            print(f"\n{problem['task_id']}: {plainly} without Keel, {apart} with it\n{text}")

    spent = times(sandbox, problems, given.repeats)
    each = [(one, f"{1e3 * clock:.1f}", f"{1e3 * cpu:.1f}") for one, (clock, cpu) in spent.items()]
    ratios = [f"{a / b:.2f}" for a, b in zip(spent["process"], spent["shared"], strict=True)]
    head = ("one judgement", "ms", "processor ms")
    print("", markdown(head, [*each, ("ratio", *ratios)]), sep="\n")
    if paid["process"] or passed < len(right) or any(wrong) or not all(same):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
