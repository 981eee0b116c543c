"""How the engine runs a model: its own modules, or compiled code that says what they say."""

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

from keel.engines.cpu.backbone import compiled
from keel.engines.decode_attention import StepLayout
from keel.engines.kv_cache import DecodeRows, KVCache, Places, Prefill
from keel.engines.prefix_cache import PrefixCache
from keel.engines.scheduler import Ended, Moves
from keel.models.attention.layout import PackedLayout

Ints = npt.NDArray[np.int64]


class ModelRunner(Protocol):
    """A backbone with the keys and values of what is being decoded.

    Entries are as in `Batch`: rows with an answer under way, and slots with their prompts.
    """

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        """How many of each prompt's first tokens have keys and values from an earlier call. These
        are the prompts that `admit` makes room for, in this order."""
        ...

    def admit(self, entering: Prefill, ahead: int) -> None:
        """Make room for prompts; there will never be more than `ahead` slots."""
        ...

    def reserve(self, places_R: Ints, ahead: int) -> None:
        """Make room for so many places of each live row; there will never be more than `ahead`."""
        ...

    def __call__(
        self,
        tokens: Int[Tensor, "T"],
        positions: Int[Tensor, "T"],
        entering: Prefill,
        live: DecodeRows | None,
    ) -> Float[Tensor, "T H"]:
        """What enters of prompts, then one token of each live row: the states of each."""
        ...

    def keep(self, ended: Ended) -> None:
        """Leave keys and values of a row, which is dropped next, to a later call."""
        ...

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        """Entries move into the places of others, which are gone."""
        ...


def pass_of(
    model: PreTrainedModel,
    longest_prompt: int,
    longest_answer: int,
    dtype: torch.dtype | None = None,
    beginnings: PrefixCache | None = None,
) -> ModelRunner:
    """The quickest pass that says what the model's own modules say, with its weights of now.

    With a `dtype` it works on a copy of the weights in that one, which goes with the pass.
    `beginnings`: what earlier calls left, and where this one leaves something; None: nothing.
    """
    longest = longest_prompt + longest_answer
    found = compiled(model, longest, dtype or torch.float32, beginnings)
    return found or ModulePass(model, longest_prompt, longest_answer, dtype)


class ModulePass:
    """`ModelRunner` through the model's own modules, or a copy of them in `dtype`, on any device.

    It leaves nothing to a later call.
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
        self._store = KVCache(longest_prompt, longest_answer)

    def recall(self, prompts: Sequence[Ints]) -> Ints:
        return np.zeros(len(prompts), dtype=np.int64)

    def keep(self, ended: Ended) -> None:
        pass

    def admit(self, entering: Prefill, ahead: int) -> None:
        most = int(entering.lengths.max())
        self._store.prompts.reserve(ahead, most, entering.first)

    def reserve(self, places_R: Ints, ahead: int) -> None:
        self._store.answers.reserve(ahead, int(places_R.max()), len(places_R))

    def __call__(
        self, tokens: Tensor, positions: Tensor, entering: Prefill, live: DecodeRows | None
    ) -> Tensor:
        slot, place = (torch.from_numpy(x).to(self._device) for x in entering.places())
        layout = StepLayout(
            store=self._store,
            prompts=PackedLayout(entering.lengths.tolist()) if len(entering.lengths) else None,
            prompt_places=Places(slot, place),
            live=live,
        )
        out = self._backbone(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, layout=layout
        )
        states: Tensor = out.last_hidden_state[0]
        return states

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        self._store.answers.copy(*rows)
        self._store.prompts.copy(*slots)


def cast_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with its weights, adapters included, in `dtype`: those that two modules share stay
    shared, and those that have the type already are the module's own. What has it whole is given
    back as it is. Buffers keep their type: frequencies of rotations are not to be rounded."""
    parameters = list(module.parameters())
    if all(p.dtype == dtype for p in parameters if p.is_floating_point()):
        return module
    # A memo of what is copied already: no copy in the old type is ever there.
    made: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to(dtype) if p.is_floating_point() else p.detach(), False)
        for p in parameters
    }
    return copy.deepcopy(module, made)
