"""The native engine with generation slowed down, as that of a model too large for its machine.

It sleeps for each token that it sampled, so that what else runs has the processor meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from keel.engines.native import NativeEngine
from keel.types import Group, OnGroup, Prompt, Sampling

SECONDS = 1e-3
"""Per token: 256 completions of six tokens take a second and a half."""


class SlowEngine(NativeEngine):
    """Samples what the native engine does, later."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        groups = super().sample(prompts, n, sampling, seed, on_group=on_group)
        written = sum(int(c.written.sum()) for group in groups for c in group.completions)
        time.sleep(written * SECONDS)
        return groups


def slow(
    *, model: Any, tokenizer: Any, max_num_seqs: int, autocast: bool, dtype: str
) -> SlowEngine:
    """For `rollout.engine`."""
    return SlowEngine(model, tokenizer, max_num_seqs=max_num_seqs, autocast=autocast)
