"""The update alone, forward and backward: a prompt once for its group, and repeated.

    python -m benchmarks.update                      # prints a Markdown table
    python -m benchmarks.update --prompts 2000 --repeats 9 --json update.json

One GRPO update (`keel.learn.learner.backward`) on made-up rollouts of the fp32 Llama of `loop.py`
(256 wide, 6 layers): 64 completions of 60 tokens in groups of 8, or 16 of 50 in one group for a
prompt of 2,000 tokens. Both sides end in the same gradient, of each parameter to 1e-4 of its norm,
which is checked before anything is timed. The sides take turns; reported are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.sides import ALPHABET, SEED, SMOKE, Size, alternate, begin, parser, row, save
from keel.algorithms.presets import PRESETS
from keel.config.model import BuildModel, Model
from keel.config.stage import Optimizer
from keel.learn.batch import Batch, Estimates, TrainBatch, from_groups
from keel.learn.learner import Learner, backward
from keel.learn.loss import prepare
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.models.policy import load_policy
from keel.types import Completion, Group, Prompt

BUDGET = 16_384
"""A recipe's token budget where it names none."""
AGREEMENT = 1e-4
"""Of a parameter's gradient: float32 sums of some ten thousand tokens, in another order."""
FIRST = 2
"""The smallest token id that is a character."""
ALGORITHM = PRESETS["grpo"].algorithm.model_copy(update={"divergence": None})


def learner(size: Size) -> Learner:
    spec = BuildModel(
        alphabet=ALPHABET, hidden_size=size.hidden, layers=size.layers, heads=4, context=4096
    )
    policy = load_policy(Model(build=spec, device="cpu"), SEED)
    return Learner(
        policy, WeightOptimizer(trainable(policy.model), Optimizer()), TokenBudget(BUDGET)
    )


def batches(
    vocabulary: int, size: Size, prompt: int, device: str = "cpu"
) -> dict[str, TrainBatch[Batch]]:
    """The same rollouts for each side."""
    rng = np.random.default_rng(SEED)
    long = prompt >= 2000
    count, length = (size.completions // 4, 50) if long else (size.completions, size.mean)
    group = count if long else min(8, count)

    def completion() -> Completion:
        tokens = rng.integers(FIRST, vocabulary, length)
        written = np.ones(length, dtype=np.bool_)
        return Completion(tokens, np.full(length, -4.0, np.float32), written, "length", "")

    groups = [
        Group(
            Prompt(f"{number}", "", tokens=tuple(rng.integers(FIRST, vocabulary, prompt).tolist())),
            tuple(completion() for _ in range(group)),
        )
        for number in range(count // group)
    ]
    advantage_S = torch.from_numpy(rng.standard_normal(count).astype(np.float32)).to(device)
    shared = from_groups(groups, device)
    estimates = Estimates(advantage_S.repeat_interleave(shared.lengths_S))
    return {
        "once": prepare(ALGORITHM, shared, estimates, max_tokens=0),
        "repeated": prepare(ALGORITHM, replace(shared, prompt_lengths=()), estimates, max_tokens=0),
    }


def seconds(learner: Learner, batch: TrainBatch[Batch]) -> float:
    """Of one forward and backward pass, which leaves a gradient."""
    learner.clear()
    start = time.perf_counter()
    # A batch keeps what it works out of itself, and a run has a new one each step.
    backward(learner, ALGORITHM, replace(batch), 0.0, BUDGET)
    return time.perf_counter() - start


def difference(learner: Learner, sides: dict[str, TrainBatch[Batch]]) -> float:
    """The largest difference of a parameter's gradient over its norm; raises if it is large."""
    found = {}
    for side, batch in sides.items():
        seconds(learner, batch)
        found[side] = {
            n: p.grad.clone()
            for n, p in learner.policy.model.named_parameters()
            if p.grad is not None
        }
    apart = {
        name: float((found["once"][name] - wanted).norm() / wanted.norm())
        for name, wanted in found["repeated"].items()
    }
    name, largest = max(apart.items(), key=lambda item: item[1])
    assert largest <= AGREEMENT, f"{name} differs by {largest:.1e}"
    return largest


def main(words: Sequence[str] | None = None) -> None:
    asked = parser(__doc__)
    asked.add_argument("--repeats", type=int, default=5)
    asked.add_argument("--prompts", nargs="+", type=int, default=[20, 500, 2000], help="tokens")
    chosen = asked.parse_args(words)
    torch.set_num_threads(chosen.threads)
    size = SMOKE if chosen.smoke else Size()
    one = learner(size)
    vocabulary = int(one.policy.model.config.vocab_size)
    begin(chosen.threads, "prompt", "repeated, s", "once, s", "ratio")
    rows: list[dict[str, Any]] = []
    for prompt in chosen.prompts:
        sides = batches(vocabulary, size, prompt)
        apart = difference(one, sides)
        repeats = 1 if chosen.smoke else chosen.repeats
        taken = alternate([*sides], repeats, lambda side, _, sides=sides: seconds(one, sides[side]))
        once, repeated = (statistics.median(taken[side]) for side in ("once", "repeated"))
        ratio = repeated / once
        figures = {"once": once, "repeated": repeated, "ratio": ratio, "difference": apart}
        rows.append({"prompt": prompt, **figures})
        row(f"{prompt:,}", f"{repeated:.3g}", f"{once:.3g}", f"{ratio:.2f}")
    save(chosen.json, rows, size=vars(size))


if __name__ == "__main__":
    main()
