"""Weights in panels, as `product.h` reads them, against what their definition says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from keel.models.kernels.decode import PANEL, Panels, filled, library

pytestmark = pytest.mark.skipif(library(torch.float32) is None, reason="no compiler")


def columns(panels: Panels) -> Tensor:
    """Column by column: (columns, inputs as filled up)."""
    count, inputs, wide, unit = panels.panels.shape
    return panels.panels.permute(0, 2, 1, 3).reshape(count * wide, inputs * unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (16, 16), (40, 37), (33, 64), (70, 255)])
def test_a_weight_lies_in_panels(
    outputs: int, inputs: int, gated: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    first, second = (torch.randn(outputs, inputs, generator=generator) for _ in range(2))
    scale = torch.randn(inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    # One weight by columns, as a transposed one lies.
    parts = (first.T.contiguous().T, bias), (second, None)
    panels = Panels(dtype, *parts, scale=scale, gated=gated)
    step = PANEL // 2 if gated else PANEL
    message, biases = columns(panels), panels.bias
    assert biases is not None
    want = torch.zeros(len(message), filled(inputs, dtype))
    want_bias = torch.zeros(len(message))
    for part, weight in enumerate((first, second)):
        for row in range(outputs):
            at = part * outputs + row
            if gated:
                at = row // step * PANEL + part * step + row % step
            want[at, :inputs] = weight[row] * scale
            want_bias[at] = bias[row] if part == 0 else 0.0
    assert torch.equal(message, want.to(dtype))
    assert torch.equal(biases, want_bias)
    assert panels.shape == (2 * outputs, inputs)
