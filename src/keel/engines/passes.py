"""How the engine runs a model: its own modules, or compiled code that says what they say."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from keel.engines.batch import Moves
from keel.engines.compiled import compiled
from keel.engines.decoding import StepLayout
from keel.engines.store import Entering, Live, Places, Store
from keel.models.layout import PackedLayout

Ints = npt.NDArray[np.int64]


class Pass(Protocol):
    """A backbone with the keys and values of what is being decoded.

    Entries are as in `Batch`: rows with an answer under way, and slots with their prompts.
    """

    def admit(self, entering: Entering, ahead: int) -> None:
        """Make room for prompts; there will never be more than `ahead` slots."""
        ...

    def reserve(self, places_R: Ints, ahead: int) -> None:
        """Make room for so many places of each live row; there will never be more than `ahead`."""
        ...

    def __call__(
        self,
        tokens: Int[Tensor, "T"],
        positions: Int[Tensor, "T"],
        entering: Entering,
        live: Live | None,
    ) -> Float[Tensor, "T H"]:
        """Prompts that enter, end to end, then one token of each live row: the states of each."""
        ...

    def drop(self, rows: Moves, rows_left: int, slots: Moves, slots_left: int) -> None:
        """Entries move into the places of others, which are gone."""
        ...


def pass_of(model: PreTrainedModel, longest_prompt: int, longest_answer: int) -> Pass:
    """The quickest pass that says what the model's own modules say, with its weights of now."""
    found = compiled(model, longest_prompt + longest_answer)
    return found or ModulePass(model, longest_prompt, longest_answer)


class ModulePass:
    """`Pass` through the model's own modules, on any device."""

    def __init__(self, model: PreTrainedModel, longest_prompt: int, longest_answer: int) -> None:
        self._backbone = model.base_model
        self._device = model.device
        self._store = Store(longest_prompt, longest_answer)

    def admit(self, entering: Entering, ahead: int) -> None:
        most = int(entering.lengths.max())
        self._store.prompts.reserve(ahead, most, entering.first)

    def reserve(self, places_R: Ints, ahead: int) -> None:
        self._store.answers.reserve(ahead, int(places_R.max()), len(places_R))

    def __call__(
        self, tokens: Tensor, positions: Tensor, entering: Entering, live: Live | None
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
