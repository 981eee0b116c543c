"""A device without float64, as MPS: what is computed on it, and what on the CPU.

There is no such device here. The CPU is declared to have none, so that what would be moved to the
CPU stays where it is, and any float64 number in a forward pass, a loss or an update is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from keel.config.model import BuildModel, Model
from keel.learn.learner import Learner
from keel.models import head, loading
from keel.objective import weights
from keel.training import rl
from keel.types import KeelError
from tests.training.small import metrics, run

IN_THE_LOOP = ("minibatches", "_token_values", "_before_update", "_engine_difference")
"""Parts of a step that compute on the model's device."""


class NoFloat64(TorchDispatchMode):
    """Raises for an operator that gives a float64 tensor, or `reads` one."""

    reads = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((found, args) if self.reads else found):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64:
                raise AssertionError(f"{func} gives float64")
        return found


class NoFloat64AtAll(NoFloat64):
    reads = True


def within(mode: Callable[[], Any], function: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        with mode():
            return function(*args, **kwargs)

    return called


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("score", "update"):
        monkeypatch.setattr(Learner, name, within(NoFloat64AtAll, getattr(Learner, name)))
    for name in IN_THE_LOOP:
        monkeypatch.setattr(rl, name, within(NoFloat64, getattr(rl, name)))
    for name in ("sequence_mean", "token_mean", "constant", "sequence_sum"):
        # Weights of lengths, which are on the CPU by then.
        usual = getattr(weights, name)
        monkeypatch.setattr(weights, name, within(_disable_current_modes, usual))


@pytest.mark.parametrize(
    "keys",
    [
        ("algorithm=grpo", "minibatches=2"),
        ("algorithm=ppo",),
        ("algorithm=rloo", "model.lora.rank=2"),
    ],
    ids=["grpo", "ppo", "rloo-lora"],
)
def test_steps_compute_no_float64_on_the_device(
    keys: tuple[str, ...], tmp_path: Path, watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("steps=2", "evaluation.prompts=0", *keys)
    with pytest.raises(AssertionError, match="float64"):  # the test can fail
        run(tmp_path / "usual", *common)
    for module in ("models.head", "learn.batch", "learn.optimizer"):
        monkeypatch.setattr(f"keel.{module}.lacks_float64", lambda device: True)
    rows = metrics(run(tmp_path / "run", *common))
    assert len(rows) == 2
    assert all(row["loss"] is not None for row in rows)


def test_mps_is_taken_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for there in (False, True):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        assert loading.choose_device("auto").type == "cpu"
        if there:
            assert loading.choose_device("mps").type == "mps"
            spec = Model(build=BuildModel(family="llama"), dtype="float64", device="mps")
            with pytest.raises(KeelError, match="mps has none"):
                loading.load_model(spec, 0)
        else:
            with pytest.raises(KeelError, match=r'= "mps" but torch sees no GPU of that kind'):
                loading.choose_device("mps")
    assert head.place_of_float64(torch.device("mps")).type == "cpu"
    assert head.place_of_float64(torch.device("cuda")).type == "cuda"
