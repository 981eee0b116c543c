"""Value models: a head on the policy's hidden states, or a critic with a backbone of its own."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from keel.config.model import Autocast, Model
from keel.models.families import hidden_states
from keel.models.head import ValueHead
from keel.models.loading import load_model, naming_key
from keel.models.lora import plain_copy
from keel.models.packed import Packed
from keel.models.policy import Policy
from keel.models.probe import prepare
from keel.models.sharded import within
from keel.types import KeelError

__all__ = ["Critic", "ValueHead", "critic_from_policy", "load_critic", "value_head_for"]


def value_head_for(policy: Policy) -> ValueHead:
    """A new value head on the policy's hidden states."""
    return ValueHead(policy.hidden_size, policy.model.dtype).to(policy.device)


class Critic(nn.Module):
    """A value model with its own backbone."""

    def __init__(self, backbone: PreTrainedModel, autocast: Autocast = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.autocast = autocast
        width = backbone.config.get_text_config().hidden_size
        self.head = ValueHead(width, backbone.dtype).to(backbone.device)

    def values(self, packed: Packed) -> Float[Tensor, "N"]:
        """V of the state before each scored token, read at `source_N`."""
        hidden_NH = within(
            self.backbone, lambda: hidden_states(self.backbone, packed, self.autocast)
        )
        values: Tensor = self.head(hidden_NH)
        return values


def critic_from_policy(policy: Policy) -> Critic:
    """A critic whose backbone starts as the policy's is now (adapters merged in the copy)."""
    return Critic(plain_copy(policy.model).base_model, policy.autocast)


def load_critic(name: str, policy: Policy, spec: Model, seed: int) -> Critic:
    """A critic whose backbone comes from a folder or the hub; all else as in the policy's spec.

    It reads the policy's tokens, so it must have been trained with the same tokenizer. Raises
    KeelError where it does not load or its vocabulary is too small.
    """
    own = {"name": name, "build": None, "revision": None, "lora": None}
    with naming_key("value.name"):
        model = load_model(spec.model_copy(update=own), seed)
    rows = model.get_input_embeddings().weight.shape[0]
    if rows < len(policy.tokenizer):
        raise KeelError(
            f"value.name = {name!r} has embeddings for {rows} tokens but the policy's tokenizer "
            f"makes {len(policy.tokenizer)}: choose a critic of the policy's own family"
        )
    prepare(model, spec.autocast)
    policy.set_checkpointing(model)
    return Critic(model.base_model, spec.autocast)
