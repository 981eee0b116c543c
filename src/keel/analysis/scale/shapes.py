"""The cost model's inputs: a model, a machine, efficiencies, a step's work, its parallelism."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The widths of a decoder with gated MLPs (three matrices).

    `query` and `key_value` are heads times head width. `mlp` is the width of a dense layer's MLP.
    Sparse models have `experts` of `expert_mlp` in all layers but the first `dense_layers`, and
    send each token to `active` of them and to `shared` ones that all tokens take. `vectors` counts
    the biases and norms of a layer. For latent attention, `attention` overrides the weights of a
    layer's attention and `cached` the numbers a layer stores of a token.
    """

    name: str
    layers: int
    hidden: int
    query: int
    key_value: int
    mlp: int
    vocabulary: int
    tied: bool = False
    vectors: int = 0
    experts: int = 0
    active: int = 0
    shared: int = 0
    expert_mlp: int = 0
    dense_layers: int = 0
    attention: int = 0
    cached: int = 0

    @property
    def attention_weights(self) -> int:
        """Of a layer: H·(q + 2·kv) + q·H."""
        return self.attention or self.hidden * (2 * self.query + 2 * self.key_value)

    @property
    def cached_numbers(self) -> int:
        """Of a token in a layer: its key and its value."""
        return self.cached or 2 * self.key_value

    @property
    def sparse_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def mlp_of_token(self) -> int:
        """The mean width of the MLPs that a token goes through in a layer."""
        own = self.sparse_layers * (self.active + self.shared) * self.expert_mlp
        return (own + (self.layers - self.sparse_layers) * self.mlp) // self.layers


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device: dense flop/s, bytes/s of its memory, bytes of memory; bytes/s in one direction to
    devices of its node (`link`) and to others (`network`); devices in a node."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    node: int = 8


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The shares of a device's figures that programs reach, and fixed times in seconds.

    `train` and `forward` are of the flop/s, `sparse` multiplies them for a mixture of experts;
    `decode` is of the flop/s in decoding, `bandwidth` of the memory's and `network` of the links'.
    A decode step takes `step_overhead`, `layer_overhead` for each layer, and `hop` for each
    all-reduce between the devices of an engine (ten times that across nodes). A micro-batch of the
    trainer takes `pass_overhead`.
    """

    train: float = 0.40
    forward: float = 0.40
    sparse: float = 0.50
    decode: float = 0.50
    bandwidth: float = 0.60
    network: float = 0.70
    step_overhead: float = 5e-3
    layer_overhead: float = 0.0
    hop: float = 15e-6
    pass_overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """A step: sequences of a group share a prompt; `mean` and `most` completion tokens.

    `scored` forward passes over all tokens come before the update (old policy, reference), `epochs`
    passes learn, in `minibatches` optimizer steps each. `reward` is seconds that nothing overlaps.
    Packed, the update reads a prompt once for its group, as Keel does.
    """

    sequences: int
    group: int
    prompt: int
    mean: float
    most: int
    scored: int = 1
    epochs: int = 1
    minibatches: int = 1
    reward: float = 0.0
    packed: bool = True

    @property
    def tokens(self) -> float:
        """What one pass over the batch reads."""
        prompts = self.sequences / self.group if self.packed else self.sequences
        return self.sequences * self.mean + prompts * self.prompt

    @property
    def longest(self) -> int:
        return self.prompt + self.most


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a step lies on devices.

    Trained on `trainers`: each copy of the model is split over `model` devices (`pipeline` of them
    stages), and its states over `shards` more (FSDP); the rest are replicas. Sampled on `samplers`
    by engines of `tensor` devices. Synchronous steps use the same devices for both; asynchronous
    ones are `separate`. `micro_tokens` pass a rank at once; `checkpointing` recomputes layers;
    `offloaded` moves the trainer's states to the host while the same devices sample.
    """

    trainers: int
    samplers: int
    tensor: int = 1
    model: int = 1
    pipeline: int = 1
    shards: int = 1
    separate: bool = False
    checkpointing: bool = True
    micro_tokens: int = 16_384
    offloaded: bool = False

    @property
    def devices(self) -> int:
        return self.trainers + self.samplers if self.separate else self.trainers
