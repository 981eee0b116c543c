"""How often the host reads from the device in an update, whatever the number of micro-batches.

Counted on a CPU, where a read is free: every operator and method that a GPU's host waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keel.algorithms.presets import PRESETS
from keel.config.stage import Optimizer
from keel.learn import learner as learner_module
from keel.learn.learner import Learner
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.learn.ranks import ONE
from keel.models.reference import value_head_for
from keel.objective import segments
from tests.cluster.updates import built, parts_of

READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero",
    "_unique2", "bincount", "unique_dim", "unique_consecutive",
}  # fmt: skip
METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


class Watch(TorchDispatchMode):
    """Counts the operators whose result the host needs before it goes on."""

    def __init__(self, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen
        self.within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        counts = name in READS and not self.within
        counts |= name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in ("index", "index_put", "index_put_"):
            counts |= any(x is not None and x.dtype == torch.bool for x in args[1])
        self.seen[name] += counts
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The reads within the block, by name."""
    seen: Counter[str] = Counter()
    watch = Watch(seen)

    def patched(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Tensor, *args: Any) -> Any:
            outer, watch.within = watch.within, True
            seen[name] += not outer
            try:
                return plain(self, *args)
            finally:
                watch.within = outer

        return method

    with monkeypatch.context() as patches, watch:
        for name in METHODS:
            patches.setattr(Tensor, name, patched(name, getattr(Tensor, name)))
        yield seen


def learner(name: str, lora: bool) -> Learner:
    """With a reference; of "ppo, head" the value model is a head on the policy."""
    made = built(name.partition(",")[0], lora, ONE)
    if "head" not in name:
        return made
    head = value_head_for(made.policy)
    both = [*trainable(made.policy), *trainable(head)]
    joint = WeightOptimizer(both, Optimizer(learning_rate=1e-3))
    return replace(made, critic=None, value_head=head, optimizer=joint, value_optimizer=None)


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("name", ["ppo", "ppo, head", "grpo", "gspo"])
def test_an_update_reads_three_times_at_most(
    name: str, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass, in a few, and in one for each sequence."""
    found, preset = learner(name, lora), name.partition(",")[0]
    algorithm = PRESETS[preset].algorithm.model_copy(update={"divergence": None})
    part = parts_of(found, preset, 0)[0].batch
    micro: Counter[int] = Counter()
    scores = Learner.scores

    def watched(self: Learner, *given: Any) -> Any:
        micro[len(totals)] += 1
        return scores(self, *given)

    monkeypatch.setattr(Learner, "scores", watched)
    totals: list[int] = []
    for choice in (PRESETS[preset].algorithm, algorithm):
        for tokens in (10_000, 60, 1):
            one = replace(found, budget=TokenBudget(tokens))
            with counted(monkeypatch) as seen:
                one.update(choice, part, 0.05, (1e-3, 1e-3))
            totals.append(sum(seen.values()))
            assert totals[-1] <= 3, (tokens, +seen)
        assert len(set(totals[-3:])) == 1
    assert micro[0] <= 2 < micro[1] < micro[2]
    # Losses with norms, and the weights after the step; of GSPO also which advantages are all zero.
    assert totals[0] == (3 if preset == "gspo" else 2)


def test_scores_are_read_by_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = learner("ppo, head", False)
    batch = parts_of(found, "ppo", 0)[0].batch.actions
    with counted(monkeypatch) as seen:
        replace(found, budget=TokenBudget(60)).score(batch, old=True, reference=True)
    assert not +seen


def test_counter_counts_what_a_host_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, flags = torch.arange(3.0), torch.tensor([True, False, True])
    reads: list[Callable[[], Any]] = [
        lambda: numbers[1].item(), lambda: float(numbers[1]), lambda: bool(flags[0]),
        lambda: numbers.tolist(), lambda: numbers.cpu(), lambda: numbers.numpy(),
        lambda: numbers[flags], lambda: flags.nonzero(),
        lambda: segments.spread(numbers, torch.tensor([1, 0, 2])), lambda: numbers.unique(),
    ]  # fmt: skip
    for read in reads:
        with counted(monkeypatch) as seen:
            read()
        assert sum(seen.values()) == 1, +seen
    with counted(monkeypatch) as seen:
        segments.spread(numbers, torch.tensor([1, 0, 2]), total=3)
    assert not +seen
    assert learner_module.read([numbers[1], numbers[2]]) == [1.0, 2.0]
