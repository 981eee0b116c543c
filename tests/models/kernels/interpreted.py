"""The Triton kernels in Triton's interpreter: run by `test_triton` in a process of its own, since
the interpreter is chosen as Triton is imported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from keel.models.attention import Rules
from keel.models.kernels import draw, paged, readout
from tests.models.kernels import triton_cases as cases

# numpy warns of what the kernels mean: infinities and, in some tests, what is not a number.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
HALF, SINGLE = (torch.float16, 2e-3), (torch.float32, 1e-5)
QUICK = {
    ("plain", torch.float16),
    ("window", torch.float32),
    ("window-of-a-page", torch.float16),
    ("softcap", torch.float32),
    ("itself", torch.float16),
    ("sinks", torch.float16),
    ("all", torch.float32),
    ("pages-split", torch.float16),
}


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numpy 2.4 refuses `int(array)` of one element, by which Triton 3.6 reads a loop's bounds."""
    before = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        before(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def attend(*given: Any, splits: int) -> Tensor:
    """The kernel, which the public function would not choose on a CPU."""
    *tensors, rules = given
    assert isinstance(rules, Rules)
    words = rules.scaling, rules.window, rules.softcap, rules.sinks
    return paged.attend_pages(*tensors, *words, splits)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            marks=() if (name, kind[0]) in QUICK else pytest.mark.slow,
            id=f"{name}-{at}",
        )
        for name in cases.CASES
        for at, kind in (("half", HALF), ("single", SINGLE))
    ],
)
def test_attention(name: str, kind: tuple[torch.dtype, float]) -> None:
    cases.check_attention(attend, name, *kind)


@pytest.mark.slow
@pytest.mark.parametrize("splits", range(1, 9))
def test_each_number_of_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = Rules(0.2, 500, 10.0, cases.SINKS[:4])
    monkeypatch.setitem(cases.CASES, "here", ([700, 0, 1, 64], (4, 2), 64, rules, splits))
    cases.check_attention(attend, "here", *SINGLE)


def test_mixed_precision() -> None:
    cases.check_mixed_precision(attend, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_store(dtype: torch.dtype) -> None:
    cases.check_store(paged.store, dtype)


@pytest.mark.parametrize(
    ("size", "temperature", "spread"),
    [
        (11, 0.0, 8.0),
        (300, 1.7, 1.0),
        (5000, 0.0, 1.0),
        (5000, 0.6, 8.0),
        (151_936, 1.0, 3.0),
        pytest.param(151_936, 0.0, 8.0, marks=pytest.mark.slow),
        pytest.param(262_144, 1.0, 1.0, marks=pytest.mark.slow),
        pytest.param(262_144, 0.6, 8.0, marks=pytest.mark.slow),
    ],
)
def test_tokens(size: int, temperature: float, spread: float) -> None:
    cases.check_tokens(draw.draw_tokens, size, temperature, spread, torch.float32, "cpu")


def test_tokens_of_half_precision() -> None:
    cases.check_tokens(draw.draw_tokens, 300, 1.0, 3.0, torch.float16, "cpu")


def test_mass() -> None:
    cases.check_mass(draw.draw_tokens)


def test_greedy_ties() -> None:
    cases.check_greedy_ties(draw.draw_tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_numbers(temperature: float) -> None:
    cases.check_not_numbers(draw.draw_tokens, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("size", [48, 5000])
def test_frequencies(size: int) -> None:
    cases.check_frequencies(draw.draw_tokens, size, 1000)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", cases.READOUTS)
def test_readout(name: str, entropy: bool) -> None:
    cases.check_readout(readout, name, entropy)
