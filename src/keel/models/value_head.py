"""A value head: one number from each hidden state."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ValueHead(nn.Module):
    """v(s) = w · h + b: one linear layer that starts at zero, so that every value starts at 0.

    In float32 (float64 for a float64 model), also under autocast.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(
            hidden_size, 1, dtype=torch.promote_types(dtype, torch.float32), device="meta"
        )
        # Empty, then zero: nn.Linear's own start would draw from the global random state.
        self.linear.to_empty(device="cpu")
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Float[Tensor, "N H"]) -> Float[Tensor, "N"]:
        """Values of the states, with the gradient to the states."""
        with torch.autocast(hidden_NH.device.type, enabled=False):
            out: Tensor = self.linear(hidden_NH.to(self.linear.weight.dtype))
        return out[:, 0]
