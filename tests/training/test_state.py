"""All that decides the future is in the declared State: whatever else changes over steps is found.

The loop that went on and the one that was restored from its checkpoint are taken apart leaf by
leaf (tests/training/leaves.py). A leaf that changed must lie in what the State saves, or be named
here with the reason why it decides nothing; and all leaves but those must be alike in both loops.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keel.objective
from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe
from keel.data.tasks.mixture import PromptStream
from keel.engines.native import NativeEngine
from keel.learn.optimizer import AdamW
from keel.learn.token_budget import TokenBudget
from keel.platform.signals import Interrupt, Interrupted
from keel.runs import checkpoint
from keel.runs.callbacks import Callbacks
from keel.runs.writer import Clock, Reached, Recorder
from keel.training import loop as loops
from keel.training.run import train
from keel.training.state import State
from tests.soak.cases import CASES
from tests.training.leaves import Leaf, Walk, of_chance, of_process
from tests.training.small import Stop

# Terms import their equations when they are first computed, which is no change of a run's state.
for found in pkgutil.iter_modules(keel.objective.__path__):
    importlib.import_module(f"keel.objective.{found.name}")

Leaves = Mapping[str, Leaf]
WITHOUT = (Recorder, Clock, Reached, Interrupt, Callbacks)
"""The hand that writes, the watch, whoever looks on, the wish to stop: of this process alone."""

SAVED: dict[str, str] = {
    r"\.stream\._(draws|taken\[.*\]|left_out\[.*\])$": "progress.stream",
    r"\.budget\.tokens$": "progress.token_budget",
    r"\.inner\.state(#|\.key#\d+|\[#\d+\].*)$": "the optimizers' moments",
    r"\.prefetcher\._kept\b": "the rollouts that no step has learned from",
    r"\.engine\.weight_version$": "the number of the stage's steps",
    r"\.engine\.model\._(parameters|buffers|modules)\b": "where it is a copy: the policy's weights",
    r"\['reference'\]|\.peft_config#$": "the reference: a second adapter, made when it is re-set",
    r"\._modules\['(lora_\w+|base_layer)'\]\._modules#$": "the same",
    r"\.(lora_alpha|lora_bias|lora_variant|r|scaling|use_dora|use_rslora)#$": "the same",
    r"\._active_adapter(#|\[0\])?$": "the same",
}
"""Leaves that the State saves as numbers or as what is there; tensors are found by their memory."""

FREE: dict[str, str] = {
    r"watchdog\._TICKER\._thread": "the thread that counts time; it comes and goes",
    r"\.inner\.param_groups\[\d+\]\['lr'\]$": "set before every step, from the schedule",
    r"\.stream\._order\b": "the permutation of an epoch, a function of seed and epoch",
    r"\.folder\.made$": "whether a new run that fails may take its folder away again",
    r"\.cache_info$": "a cache of a function of its arguments",
    r"\.config\.(dtype|architectures(#|\[0\])?)$": (
        "transformers fills them in when it saves, with what the weights and the class say"
    ),
    r"\.prefetcher\._last_turn\b": "the order of steps that are sampled at once",
    r"\.(scorer|judge)\._loop\._": "the event loop of rewards that are coroutines",
}
"""Leaves that change and decide nothing, with the reason."""

STOPPED = {
    "ahead": 2,
    "ahead-lora-reset": 2,
    "dynamic": 3,
    "ppo-critic-rate": 2,
    "adaptive-ppo": 2,
    "lora-reset": 3,
    "reset": 3,
    "stored": 3,
    "turns": 2,
    "sft": 2,
    "reward-model-lora": 3,
    "dpo": 3,
    "dpo-ipo-lora": 2,
    "opd": 2,
}
"""The cases, and the step after which each is stopped and restored."""


@dataclass(frozen=True)
class Seen:
    """A loop before its first step and after its last, and the memory that its State saves."""

    before: Leaves
    after: Leaves
    saved: frozenset[int]
    opaque: Mapping[str, str]


def reached(loop: Any, process: bool = False) -> Walk:
    """All leaves of a loop and of the shared random generators; of the whole package, if asked."""
    walk = Walk(WITHOUT)
    for name, value in of_chance():
        walk.walk(value, name)
    walk.walk(loop, "loop")
    for name, value in of_process("keel") if process else ():
        walk.walk(value, name)
    return walk


def saved(state: State, folder: Path) -> frozenset[int]:
    """Where the tensors lie that a State writes."""
    written: list[Tensor] = []
    save = checkpoint.save_tensors

    def watched(path: Path, tensors: Mapping[str, Tensor], *more: Any) -> None:
        written.extend(tensors.values())
        save(path, tensors, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_tensors", watched)
        state.save(folder)
    return frozenset(tensor.data_ptr() for tensor in written)


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Every loop that a run goes through, in order."""
    return look(monkeypatch)


def look(monkeypatch: pytest.MonkeyPatch, process: bool = False) -> list[Seen]:
    seen: list[Seen] = []

    run = loops.run

    def watched(loop: Any, progress: Any) -> Any:
        (parts,) = loop.take_step.args
        before = reached(parts, process)
        progress = run(loop, progress)
        after = reached(parts, process)
        opaque = {**before.opaque, **after.opaque}
        with tempfile.TemporaryDirectory() as folder:
            found = saved(loop.state(progress), Path(folder))
        seen.append(Seen(before.found, after.found, found, opaque))
        return progress

    monkeypatch.setattr(loops, "run", watched)
    return seen


def undeclared(seen: Seen) -> list[str]:
    """The leaves that changed and are neither saved nor known to decide nothing."""
    return [
        name
        for name in differing(seen.before, seen.after)
        if not (name in seen.after and seen.after[name].pointer in seen.saved)
        and not _named(name, SAVED)
    ]


def differing(a: Leaves, b: Leaves) -> list[str]:
    """The leaves that are not the same in both, but those that decide nothing."""
    names = sorted(a.keys() | b.keys())
    return [name for name in names if a.get(name) != b.get(name) and not _named(name, FREE)]


def _named(name: str, table: Mapping[str, str]) -> bool:
    return any(re.search(pattern, name) for pattern in table)


def stopped(case: str, folder: Path) -> None:
    """The case up to the step of the table, with a checkpoint after it."""
    with pytest.raises(Interrupted):
        train(_read(CASES[case].make(folder)), folder / "run", callbacks=[Stop(STOPPED[case])])


def _read(recipe: Recipe) -> Recipe:
    """The recipe as a run that goes on reads it."""
    return load_recipe(tomllib.loads(to_toml(recipe)))


@pytest.mark.quick("ahead", "lora-reset", "dpo")
@pytest.mark.parametrize("case", STOPPED)
def test_state_that_changes_is_declared_and_restored(
    case: str, tmp_path: Path, looking: list[Seen]
) -> None:
    stopped(case, tmp_path)
    (live,) = looking
    assert not live.opaque
    changed = differing(live.before, live.after)
    assert changed, "nothing was looked at"
    assert undeclared(live) == []
    train(None, tmp_path / "run", resume=True)
    assert differing(live.after, looking[1].before) == []


@pytest.mark.quick("process")
@pytest.mark.parametrize("case", ["composed", "process"])
def test_package_globals_do_not_change(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Globals, classes, and the defaults and closures of functions."""
    seen = look(monkeypatch, process=True)
    train(CASES[case].make(tmp_path), tmp_path / "run")
    assert len(seen[0].after) > 5_000
    assert not seen[0].opaque
    assert undeclared(seen[0]) == []


# ---------------------------------------------------------------- undeclared state is found


def _before(
    monkeypatch: pytest.MonkeyPatch, kind: type, method: str, action: Callable[[Any], object]
) -> None:
    """Call the action with the object before each call of its method."""
    real = getattr(kind, method)

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        action(self)
        return real(self, *arguments, **named)

    monkeypatch.setattr(kind, method, called)


def _closure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of a closure that the learner's budget holds."""
    real = TokenBudget.__init__

    def begin(self: Any, tokens: int, printed: Any) -> None:
        notes: list[str] = []

        def remember(text: str) -> None:
            notes.append(text)

        real(self, tokens, remember)
        self.remember = remember

    monkeypatch.setattr(TokenBudget, "__init__", begin)
    _before(monkeypatch, TokenBudget, "fitting", lambda budget: budget.remember("asked"))


def _average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running average of a weight, in a tensor."""

    def average(optimizer: Any) -> None:
        now = optimizer.parameters[0][1].detach()
        optimizer.average = 0.9 * getattr(optimizer, "average", now) + 0.1 * now

    _before(monkeypatch, AdamW, "apply", average)


def _generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared random generator."""
    _before(monkeypatch, NativeEngine, "sample", lambda engine: torch.rand(1))


@pytest.mark.parametrize(
    ("hide", "where"),
    [
        (_closure, r"\.budget\.(_note|remember)\(notes\)#$"),
        (_average, r"\.average$"),
        (_generator, r"^chance\.torch$"),
    ],
)
def test_undeclared_state_is_found(
    hide: Callable[[pytest.MonkeyPatch], None],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(monkeypatch)
    seen = look(monkeypatch)
    stopped("dynamic", tmp_path)
    found = undeclared(seen[0])
    assert any(re.search(where, name) for name in found), found


def test_declared_state_that_is_not_saved_is_found(
    tmp_path: Path, looking: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a State forgets to write does not come back."""
    real = PromptStream.state
    monkeypatch.setattr(PromptStream, "state", lambda self: {**real(self), "draws": 0})
    stopped("dynamic", tmp_path)
    train(None, tmp_path / "run", resume=True)
    lost = differing(looking[0].after, looking[1].before)
    assert [name.rpartition(".")[2] for name in lost] == ["_draws"]
