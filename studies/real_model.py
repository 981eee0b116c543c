"""A trained model through everything: greedy decoding, and every kind of stage, killed and resumed.

    make real-model
    python -m studies.real_model [--questions 50] [--case NAME …]

Greedy completions are compared with transformers' `generate`, token by token. Then each case of
tests/real/cases.py takes three steps, is killed after the third, goes on from the checkpoint of the
second, and is compared with an uninterrupted run byte for byte. Its model is exported, loaded by
plain transformers and compared with the run's own. Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from keel.training.export import export
from tests.real.cases import CASES, recipe
from tests.real.export import furthest_log_prob, furthest_score
from tests.real.greedy import greedy
from tests.real.model import QUESTIONS
from tests.shared import shared_path
from tests.soak import killing

CLOSE = 1e-4
"""float32: sums in another order, over 30 layers."""


def questions(count: int) -> list[str]:
    """Short ones, then problems of GSM8K."""
    lines = shared_path("data/gsm8k/test.jsonl").read_text("utf-8").splitlines()
    return [*QUESTIONS, *(json.loads(line)["question"] for line in lines)][:count]


def decode(count: int) -> Iterator[str]:
    """What is wrong with the greedy completions."""
    found = greedy(questions(count), max_tokens=64)
    ties = [one for one in found if one.gap is not None]
    tokens = sum(one.tokens for one in found)
    print(f"greedy: {len(found) - len(ties)} of {len(found)} equal, {tokens} tokens", flush=True)
    for one in ties:
        print(f"  token {one.at} of {one.question[:60]!r}: logits {one.gap:.2g} apart")
    yield from (f"greedy: {one.question}" for one in found if not one.excused)


def train(case: str) -> Iterator[str]:
    """What is wrong with one case."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="keel-real-") as name:
        folder, plan = Path(name), [killing.Instant("row", 3)]
        made = recipe(case, folder)
        killing.whole(made, folder / "whole")
        outcome = killing.killed(made, folder / "killed", folder / "whole", plan)
        judge = next((one.name for one in made.stages if one.name.endswith("reward_model")), None)
        exported = export(folder / "whole", folder / "model", stage=judge)
        measure = furthest_log_prob if judge is None else furthest_score
        gap = measure(folder / "whole", exported)
    seconds = time.perf_counter() - start
    same = "the same bytes" if not outcome.differences else f"{len(outcome.differences)} differ"
    print(
        f"{case}: {len(outcome.kills)} kill, {same}; export {gap:.1e}; {seconds:.0f} s", flush=True
    )
    yield from (f"{case}: {difference}" for difference in outcome.differences)
    if outcome.kills != plan:
        yield f"{case}: not killed"
    if not gap < CLOSE:
        yield f"{case}: the exported model is {gap:.1e} away"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--case", nargs="*", choices=CASES, default=CASES)
    given = parser.parse_args()
    torch.set_num_threads(1)
    killing.PATIENCE = 3600.0
    wrong = list(decode(given.questions)) if given.questions else []
    for case in given.case:
        wrong += train(case)
    for one in wrong:
        print(one)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
