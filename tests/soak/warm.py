"""Importing this leaves a process ready to be forked into runs: all loaded that a run loads.

A first run takes seconds to find its libraries, a second one not.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a forked process cannot use CUDA if its parent has

import tempfile
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import peft  # noqa: F401
import torch
import torch.utils.tensorboard

import keel.preferences.labeller
import keel.rewards.learned  # noqa: F401
from keel.training.run import train
from tests.soak.cases import CASES

torch.set_num_threads(1)
with tempfile.TemporaryDirectory(prefix="keel-warm-") as name:
    train(CASES["grpo"].make(Path(name)), Path(name) / "run")
