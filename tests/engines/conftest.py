"""Small matrices gain nothing from threads, and tests share the cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
