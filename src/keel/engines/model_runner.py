"""How the engine runs a model: through its own modules, or by compiled code."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.engines.compiled import compiled
from keel.engines.kv_cache import DecodeRows, KVStore, Prefill, PrefixCache, StepLayout
from keel.engines.scheduler import DecodeBatch, Moves
from keel.models.attention import PackedLayout

Ints = npt.NDArray[np.int64]


class ModelRunner(Protocol):
    """A backbone with the keys and values of what is being decoded.

    Entries are as in `DecodeBatch`: a row for each live answer, a slot for each of their prompts.
    """

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        """How many of each prompt's first tokens have keys and values from an earlier call. `admit`
        is called for these prompts, in this order."""
        ...

    def admit(self, entering: Prefill, ahead: int) -> None:
        """Make room for prompts; there will never be more than `ahead` slots."""
        ...

    def reserve(self, places_R: Ints, ahead: int) -> None:
        """Make room for these places of each live row; there will be at most `ahead` rows."""
        ...

    def __call__(
        self,
        tokens: Int[Tensor, "T"],
        positions: Int[Tensor, "T"],
        entering: Prefill,
        live: DecodeRows | None,
    ) -> Float[Tensor, "T H"]:
        """The hidden states of the prompt tokens that enter, then of one token of each live row."""
        ...

    def keep(self, batch: DecodeBatch, row: int) -> None:
        """Keep the keys and values of a row for a later call, before it is dropped."""
        ...

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        """Remove entries: those of `rows` and `slots` move to the places of removed ones."""
        ...


def make_runner(
    model: PreTrainedModel,
    longest_prompt: int,
    longest_answer: int,
    dtype: torch.dtype | None = None,
    prefix_cache: PrefixCache | None = None,
) -> ModelRunner:
    """A runner for the model's current weights: compiled code if it supports the model.

    With a `dtype` it works on a copy of the weights in that type. `prefix_cache` holds the keys and
    values of earlier calls, and receives this call's.
    """
    longest = longest_prompt + longest_answer
    found = compiled(model, longest, dtype or torch.float32, prefix_cache)
    return found or ModuleRunner(model, longest_prompt, longest_answer, dtype)


class ModuleRunner:
    """`ModelRunner` through the model's own modules, or a copy of them in `dtype`, on any device.

    It keeps nothing for a later call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        longest_prompt: int,
        longest_answer: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._backbone = model.base_model if dtype is None else cast_copy(model.base_model, dtype)
        self._device = model.device
        self._prompts, self._answers = KVStore(longest_prompt), KVStore(longest_answer)

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        return np.zeros(len(prompts), dtype=np.int64)

    def keep(self, batch: DecodeBatch, row: int) -> None:
        pass

    def admit(self, entering: Prefill, ahead: int) -> None:
        most = int(entering.lengths.max())
        self._prompts.reserve(ahead, most, entering.first)

    def reserve(self, places_R: Ints, ahead: int) -> None:
        self._answers.reserve(ahead, int(places_R.max()), len(places_R))

    def __call__(
        self, tokens: Tensor, positions: Tensor, entering: Prefill, live: DecodeRows | None
    ) -> Tensor:
        slot, place = (torch.from_numpy(x).to(self._device) for x in entering.places())
        layout = StepLayout(
            stores=(self._prompts, self._answers),
            prompts=PackedLayout(entering.lengths.tolist()) if len(entering.lengths) else None,
            prompt_places=(slot, place),
            live=live,
        )
        out = self._backbone(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout
        )
        states: Tensor = out.last_hidden_state[0]
        return states

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        self._answers.copy(*rows)
        self._prompts.copy(*slots)


def cast_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with its weights and adapters in `dtype`; the module itself if it has that type.

    Weights that two modules share stay shared, and those that have the type are not copied. Buffers
    keep their type: the frequencies of rotary embeddings must not be rounded."""
    parameters = list(module.parameters())
    if all(p.dtype == dtype for p in parameters if p.is_floating_point()):
        return module
    # A memo for deepcopy, so that no copy in the old type exists.
    made: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(dtype) if p.is_floating_point() else p.detach(), False)
        for p in parameters
    }
    return copy.deepcopy(module, made)
