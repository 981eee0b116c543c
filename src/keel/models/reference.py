"""The reference policy, which the divergence holds the policy to."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from keel.models import lora
from keel.models.backbone import hidden_states
from keel.models.families import head_of
from keel.models.head import Head, log_probs
from keel.models.packed import Packed
from keel.models.policy import Policy


class Reference(Protocol):
    """A policy that does not learn."""

    @property
    def head(self) -> Head:
        """How its logits come from its hidden states."""
        ...

    def hidden(self, packed: Packed) -> Float[Tensor, "N H"]:
        """Its hidden states at the scored tokens; no gradient."""
        ...

    def log_probs(self, packed: Packed, temperature: float = 1.0) -> Float[Tensor, "N"]:
        """log π_ref of each scored token; no gradient."""
        ...

    def refresh(self, policy: Policy) -> None:
        """Become what the policy is now."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The tensors that `restore` needs; empty where the policy's base is all there is."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        ...


def reference_for(policy: Policy, state: Mapping[str, Tensor] | None = None) -> Reference:
    """A reference equal to the policy as it is now, or the one that a checkpoint's `state` holds.

    With LoRA it is the base with the adapter off, at no memory, or a second frozen adapter where
    the policy's has already learned; without, a frozen copy.
    """
    reference = AdapterOff(policy) if policy.has_lora else FrozenCopy(policy)
    if state is not None:
        # A resumed policy has learned since; an empty state says that its base is the reference.
        reference.restore(state)
    elif policy.has_lora and not lora.is_untouched(policy.model):
        reference.refresh(policy)
    return reference


class FrozenCopy:
    """A copy of the policy's model."""

    def __init__(self, policy: Policy) -> None:
        self.model = lora.plain_copy(policy.model).requires_grad_(False).eval()
        self.autocast = policy.autocast

    @property
    def head(self) -> Head:
        return head_of(self.model)

    @torch.no_grad()
    def hidden(self, packed: Packed) -> Float[Tensor, "N H"]:
        return hidden_states(self.model, packed, self.autocast)

    @torch.no_grad()
    def log_probs(self, packed: Packed, temperature: float = 1.0) -> Float[Tensor, "N"]:
        return log_probs(self.hidden(packed), self.head, packed.scored(), temperature)

    def refresh(self, policy: Policy) -> None:
        self._take(lora.plain_weights(policy.model))

    def state(self) -> dict[str, Tensor]:
        """Every parameter and persistent buffer once; tied ones under the first of their names."""
        parameters = dict(self.model.named_parameters())
        tied = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if name in parameters or name not in tied
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self.state().keys():
            raise ValueError("the reference's weights do not fit: another model was saved")
        self._take(state)

    @torch.no_grad()
    def _take(self, weights: Mapping[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(weights[name])


class AdapterOff:
    """The policy's own base with the adapter off, or with a second, frozen adapter once re-set."""

    def __init__(self, policy: Policy) -> None:
        self.model = policy.model
        self.autocast = policy.autocast

    @property
    def head(self) -> Head:
        return head_of(self.model)

    def _speaking(self) -> AbstractContextManager[None]:
        if lora.has_reference(self.model):
            return lora.reference_adapter(self.model)
        return lora.adapter_off(self.model)

    @torch.no_grad()
    def hidden(self, packed: Packed) -> Float[Tensor, "N H"]:
        with self._speaking():
            return hidden_states(self.model, packed, self.autocast)

    @torch.no_grad()
    def log_probs(self, packed: Packed, temperature: float = 1.0) -> Float[Tensor, "N"]:
        return log_probs(self.hidden(packed), self.head, packed.scored(), temperature)

    def refresh(self, policy: Policy) -> None:
        lora.freeze_reference(policy.model)

    def state(self) -> dict[str, Tensor]:
        if not lora.has_reference(self.model):
            return {}
        return lora.adapter_weights(self.model, lora.REFERENCE)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            return
        lora.freeze_reference(self.model)
        own = lora.adapter_weights(self.model, lora.REFERENCE)
        if own.keys() != state.keys():
            raise ValueError("the reference adapter does not fit: another one was saved")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])
