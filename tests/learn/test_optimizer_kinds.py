"""Kinds of optimizers and where they step: equal to torch's, restored bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keel.config.stage import Optimizer
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.learn.ranks import save_learned
from keel.training.state import restore_optimizers
from tests.models import tiny

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "offloaded": {"offload": "cpu"},
    "adamw_8bit": {"kind": "adamw_8bit"},
    "muon": {"kind": "muon"},
    "offloaded 8-bit": {"kind": "adamw_8bit", "offload": "cpu"},
}


class Weights(nn.Module):
    """A matrix inside of a layer, large enough for 8 bits, an embedding, a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Parameter(torch.randn(11, 64, generator=generator).to(dtype))
        self.layers = nn.ModuleList([nn.Linear(64, 80, bias=False)])
        with torch.no_grad():
            self.layers[0].weight.copy_(torch.randn(80, 64, generator=generator))
        self.norm = nn.Parameter(torch.ones(64, dtype=dtype))
        self.to(dtype)


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def stepped(module: nn.Module, choice: Optimizer, steps: range) -> WeightOptimizer:
    optimizer = WeightOptimizer(trainable(module), choice)
    run(module, optimizer, steps)
    return optimizer


def run(module: nn.Module, optimizer: WeightOptimizer, steps: range) -> None:
    for seed in steps:
        give_gradients(module, seed)
        optimizer.step(0.01)


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", list(KINDS))
def test_resumed_optimizer_continues_bit_for_bit(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    choice = Optimizer(weight_decay=0.1, **KINDS[kind])
    one = Weights(dtype)
    before = stepped(one, choice, range(3))
    save_learned(tmp_path, {"optimizer": before}, {}, None)
    two = Weights(dtype)
    two.load_state_dict(one.state_dict())
    after = WeightOptimizer(trainable(two), choice)
    restore_optimizers(tmp_path, {"optimizer": after})
    run(one, before, range(3, 6))
    run(two, after, range(3, 6))
    assert equal(values(one), values(two))
    assert all(torch.equal(value, after.state()[key]) for key, value in before.state().items())
    forgetful = Weights(dtype)  # a state that is not restored gives other weights
    stepped(forgetful, choice, range(3, 6))
    assert not equal(values(one), values(forgetful))


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit", "muon"])
def test_offloaded_steps_equal_those_on_the_device(kind: Any) -> None:
    one, two = Weights(), Weights()
    stepped(one, Optimizer(kind=kind), range(3))
    moved = stepped(two, Optimizer(kind=kind, offload="cpu"), range(3))
    assert equal(values(one), values(two))
    assert not any(key.endswith("/master") for key in moved.state())


def test_offloaded_masters_keep_what_bfloat16_would_lose() -> None:
    """A rate of 1e-4 is below half of the last bit of a norm's ones."""
    plain, moved = Weights(torch.bfloat16), Weights(torch.bfloat16)
    for module, offload in ((plain, "none"), (moved, "cpu")):
        optimizer = WeightOptimizer(trainable(module), Optimizer(offload=offload))  # type: ignore[arg-type]
        for _ in range(100):
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step(1e-4)
    assert plain.norm.unique().tolist() == [1.0]
    assert moved.norm.float().unique().tolist() == pytest.approx([0.99], abs=2**-9)


def test_muon_takes_matrices_inside_of_layers() -> None:
    policy = tiny.policy("llama", rank=None)
    optimizer = WeightOptimizer(trainable(policy), Optimizer(kind="muon"))
    for _, parameter in optimizer.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    muon = {k.rpartition("/")[0] for k in optimizer.state() if k.endswith("/momentum_buffer")}
    adam = {k.rpartition("/")[0] for k in optimizer.state() if k.endswith("/exp_avg")}
    every = {name for name, _ in optimizer.parameters}
    assert muon | adam == every
    assert not muon & adam
    assert {n for n in every if ".layers." in n and "norm" not in n} == muon


def test_muon_steps_are_of_the_size_of_adamws() -> None:
    """0.2 of the rate as the root mean square (arXiv:2502.16982, section 2.2); Newton-Schulz
    leaves singular values between 0.7 and 1.2."""
    module = Weights()
    before = module.layers[0].weight.detach().clone()
    stepped(module, Optimizer(kind="muon"), range(1))
    moved = (module.layers[0].weight.detach() - before) / 0.01
    assert 0.12 < float(moved.square().mean().sqrt()) < 0.26


def test_eight_bit_state_is_of_bytes_for_large_tensors() -> None:
    optimizer = stepped(Weights(), Optimizer(kind="adamw_8bit"), range(1))
    dtypes = {k: v.dtype for k, v in optimizer.state().items() if k.endswith("/state1")}
    assert dtypes == {
        "embed/state1": torch.float32,
        "norm/state1": torch.float32,
        "layers.0.weight/state1": torch.uint8,
    }


@pytest.mark.parametrize("kind", list(KINDS))
def test_pending_bytes_are_those_of_the_state(kind: str) -> None:
    """Counts of steps (4 bytes each) aside; of 8 bits there are tables of a kilobyte, too."""
    module = nn.Linear(256, 256, bias=False) if "8" in kind else Weights()
    optimizer = WeightOptimizer(trainable(module), Optimizer(**KINDS[kind]))
    before = optimizer.pending
    run(module, optimizer, range(1))
    held = sum(v.nbytes for v in optimizer.state().values() if v.numel() > 1)
    assert before == (0 if "offload" in kind else pytest.approx(held, rel=0.02))
    assert optimizer.pending == 0


def test_eight_bit_steps_follow_those_of_adamw() -> None:
    """The moments have a relative error of some percent, so the weights' moves have, too."""
    one, two, start = Weights(), Weights(), Weights()
    stepped(one, Optimizer(), range(5))
    stepped(two, Optimizer(kind="adamw_8bit"), range(5))
    first, second, zero = (m.layers[0].weight.detach() for m in (one, two, start))
    gap = float((first - second).norm() / (first - zero).norm())
    assert 0 < gap < 0.1
