"""What runs on CUDA GPUs: `make test-gpu`. Elsewhere every test is skipped with its reason."""

from __future__ import annotations

import pytest
import torch


def needs_gpus(count: int) -> list[pytest.MarkDecorator]:
    """The marks of a module whose tests need so many GPUs."""
    have = torch.cuda.device_count()
    reason = f"needs {count} CUDA GPU{'s' if count > 1 else ''}, torch sees {have}"
    return [pytest.mark.gpu, pytest.mark.skipif(have < count, reason=reason)]
