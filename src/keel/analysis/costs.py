"""What a model costs, counted from its shape: bytes of memory, operations, seconds at the least.

The bytes of an update on one GPU (`memory`), the tokens that its cache has room for (`Budget`), the
operations of tokens (`Shape.forward`), the bytes of a decoded step (`Shape.decoded_bytes`).
Torch-free; `keel.models.shape` reads the shape off a transformers config.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from keel.analysis.cards import GIB, Card

PAGE = 64
"""Tokens of a page of the cache."""
NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""Of a quantised weight: 4 bits, and for every 64 weights a scale in 8 bits, of which 256 share a
float32 (QLoRA, arXiv 2305.14314, section 3): 0.516, or 0.53 with the blocks' ends."""
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256), "muon": 4.0}
"""Bytes of the optimizer's state for each weight of a matrix: two float32 moments; two of 8 bits
with a float32 scale for every 256; one float32 momentum (other weights have AdamW's two)."""
WORTH = 0.02
"""A change that saves less than this share of what is missing is not named."""
LONGEST = 1024
"""Tokens of the longest sequence if it is not known, below which no budget is named."""
CONTEXT = 1.0 * GIB
"""CUDA's context and libraries."""
FRAGMENTS = 0.03
"""Share of a card that the allocator cannot use. Both are allowances, not counts."""
CHUNK_TOKENS = 16
"""Fewest tokens whose logits are made at a time (`keel.models.head`)."""
CHUNKS = 2
"""Logits of a chunk, whose gradient takes their place, and what is rounded or compared."""

OptimizerKind = Literal["adamw", "adamw_8bit", "muon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A causal language model in numbers.

    `query` and `keys` are features of all query heads and of all key heads (values have as many) of
    a layer; `mlp` the features inside the MLP that a token passes through, of all its experts.
    Weights: `embedding` (positions too), `head` (0 if it is the embedding), `backbone`; of the
    backbone `linear` in linear layers, of which 4 bits can hold those `quantisable` (not GPT-2's
    transposed ones), and `experts` in experts, of which a token passes a `share`.
    `norms` are the features that are normalised for each token, in all layers, the final norm
    included; `rms`: without their mean. `saved` counts the MLP's tensors kept for the backward
    pass. `adapted` is Σ (inputs + outputs) of the backbone's linear layers.
    """

    layers: int
    hidden: int
    heads: int
    query: int
    keys: int
    mlp: int
    vocabulary: int
    embedding: int
    backbone: int
    head: int
    linear: int
    quantisable: int = 0
    experts: int = 0
    share: float = 0.0
    norms: int
    rms: bool = True
    gated: bool = True
    saved: int = 4
    adapted: int = 0

    @property
    def parameters(self) -> int:
        return self.embedding + self.backbone + self.head

    @property
    def active(self) -> float:
        """Weights of the backbone that a token is multiplied with."""
        return self.linear + self.share * self.experts

    # ------------------------------------------------------------ operations

    def forward(self, tokens: int, pairs: float, scored: int) -> float:
        """Floating-point operations of a forward pass, two for each product and sum:

            2 · active · tokens  +  4 · layers · query · pairs  +  2 · vocabulary · hidden · scored

        `pairs` are those of a token and one that it attends to (`attention_pairs`); `scored` tokens
        get logits.
        """
        attention = 4.0 * self.layers * self.query * pairs
        return 2 * self.active * tokens + attention + 2.0 * self.vocabulary * self.hidden * scored

    def update(self, tokens: int, pairs: float, scored: int, rank: int | None = None) -> float:
        """Of a forward and backward pass: three times the forward pass.

        With adapters of `rank` no gradient of the frozen weights is computed: twice its products
        (attention has no weights, so three times as ever), and three times those of the adapters.
        What is computed again (checkpoints, logits of a chunk) does not count (MFU, arXiv
        2204.02311, appendix B).
        """
        if rank is None:
            return 3 * self.forward(tokens, pairs, scored)
        attention = 4.0 * self.layers * self.query * pairs
        adapters = 6.0 * rank * self.adapted * tokens
        return 2 * self.forward(tokens, pairs, scored) + attention + adapters

    def decoded_bytes(self, rows: int, context: int) -> float:
        """Bytes that a decoded step reads: the weights once, the cache of all rows.

        Of experts those that the rows reach, all of them from a few rows on.
        """
        reached = min(1.0, rows * self.share)
        products = self.linear + reached * self.experts + self.vocabulary * self.hidden
        return 2 * products + rows * context * self.cached_bytes()

    def cached_bytes(self, width: float = 2) -> float:
        """Bytes of a token's keys and values; `PAGE` times that is a page. Windows are not used."""
        return 2.0 * self.layers * self.keys * width

    # ------------------------------------------------------------ activations

    def activation_bytes(self, autocast: bool, checkpointed: int = 0) -> float:
        """Bytes that a token of a micro-batch keeps for the backward pass, in all layers.

        For each layer, with h = hidden, q = query, k = keys, f = mlp; s of the MLP's tensors are
        saved (gate, its activation, up and their product: 4; up and its activation: 2). In float32:

            norms   4 · (input, normalised, output)              of h twice (without RMS: 4 · 2)
            attention  4 · (q + q + k + k),  4 · heads           queries, output, keys, values, sums
            MLP     4 · s · f

        Under bfloat16 autocast the residual stream and the norms stay in float32 (8 bytes of each
        feature, 4 without RMS), each product has its own copy of its input (2 · 5h, ungated 2 · 4h)
        and the rest has two bytes a feature. A checkpointed layer keeps its input alone, 4h. The
        hidden states that the head reads, and their gradient, are 8h.
        """
        layer = self._layer_bytes(autocast)
        kept = self.layers - checkpointed
        return kept * layer + checkpointed * 4.0 * self.hidden + 8.0 * self.hidden

    def recomputed_bytes(self, autocast: bool) -> float:
        """Bytes of a token in the one layer whose activations are computed again."""
        return self._layer_bytes(autocast)

    def _layer_bytes(self, autocast: bool) -> float:
        width = 2 if autocast else 4
        norms = self.norms / self.layers
        attention = width * 2 * (self.query + self.keys) + 4 * self.heads
        products = width * self.saved * self.mlp
        if not autocast:
            return 4 * (3 if self.rms else 2) * norms + attention + products
        copies = 2 * (5 if self.gated else 4) * self.hidden
        return (8 if self.rms else 4) * norms + copies + attention + products


def attention_pairs(lengths: Iterable[int], shared: Iterable[int] = ()) -> float:
    """Pairs of a token and one that it attends to, itself included, in causal sequences.

    `shared` are the tokens at the start of each that were computed before:
    Σ n(n + 1)/2 − s(s + 1)/2.
    """
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return pairs - sum(s * (s + 1) / 2 for s in shared)


def floor_ms(shape: Shape, rows: int, context: int, bandwidth: float) -> float:
    """Milliseconds of a decoded step of `rows` sequences at the least: what it reads, in bfloat16,
    at the card's bandwidth (bytes a second)."""
    return 1e3 * shape.decoded_bytes(rows, context) / bandwidth


def mfu(operations: float, seconds: float, peak: float) -> float:
    """The share of the card's peak (operations a second) that an update reaches."""
    return operations / seconds / peak


# ---------------------------------------------------------------- memory


def moments(kind: OptimizerKind, weights: int, matrices: int) -> float:
    """Bytes of an optimizer's state of `weights`, of which `matrices` are in layers' matrices."""
    each = MOMENTS[kind]
    own = matrices if kind == "muon" else weights
    return each * own + MOMENTS["adamw"] * (weights - own)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What decides the memory of a run on one card.

    `weight` is bytes of a master weight. `rank` is that of adapters on `adapted` features (Σ inputs
    + outputs), None without. `copied`: a bfloat16 copy samples. `checkpointed` layers, None for
    all. A micro-batch has `tokens`; `chunk` is bytes of float32 logits that are made at a time.
    `reference` counts copies of the whole model (0: none, or the model with its adapter off);
    `critic` is the shape of a value model with its own backbone, which learns whole and is never
    quantised, by an optimizer of its own (None: the policy's). `extra` is bytes of other models,
    `server` those of a server that samples. `rows` sequences of `longest` tokens are sampled.
    """

    shape: Shape
    tokens: int
    longest: int
    rows: int
    weight: float = 4
    quantised: bool = False
    rank: int | None = None
    adapted: int = 0
    optimizer: OptimizerKind = "adamw"
    offload: bool = False
    autocast: bool = True
    copied: bool = True
    checkpointed: int | None = 0
    chunk: float = 2**30
    head_copy: bool = False
    reference: int = 0
    critic: Shape | None = None
    critic_optimizer: OptimizerKind | None = None
    critic_offload: bool | None = None
    extra: float = 0.0
    server: float = 0.0

    @property
    def trained(self) -> int:
        """Weights that learn."""
        return self.shape.parameters if self.rank is None else self.rank * self.adapted

    @property
    def weights(self) -> float:
        """Bytes of the model, adapters included (float32)."""
        shape = self.shape
        adapters = 0 if self.rank is None else 4.0 * self.rank * self.adapted
        if not self.quantised:
            return self.weight * shape.parameters + adapters
        rest = shape.parameters - shape.quantisable  # it keeps its dtype
        return NF4_BYTES * shape.quantisable + self.weight * rest + adapters

    @property
    def gradients(self) -> float:
        """Bytes of the gradients, as wide as the weights (an adapter's are float32)."""
        return self.trained * (self.weight if self.rank is None else 4.0)

    @property
    def moments(self) -> float:
        """Bytes of the optimizer's state on the card."""
        if self.offload:
            return 0.0
        inside = self.shape.linear + self.shape.experts
        return moments(self.optimizer, self.trained, inside if self.rank is None else self.trained)

    @property
    def activations(self) -> float:
        """Bytes of a micro-batch's activations, with the bfloat16 copies of the weights that
        autocast keeps for the backward pass."""
        shape = self.shape
        count = shape.layers if self.checkpointed is None else min(self.checkpointed, shape.layers)
        each = shape.activation_bytes(self.autocast, count)
        if count:
            each += shape.recomputed_bytes(self.autocast)
        # Autocast keeps the casts of weights that learn; those of a layer computed again go with
        # it, and one frozen layer's are there at a time.
        copies = 0.0
        if self.autocast and self.weight == 4 and not self.quantised:
            layer = (shape.linear + shape.experts) / shape.layers
            copies = 2.0 * layer * (max(shape.layers - count, 1) if self.rank is None else 1)
        return self.tokens * each + copies

    @property
    def head_chunk(self) -> float:
        """Bytes of the logits of a chunk, with a bfloat16 copy of the head if its products are."""
        row = 4.0 * self.shape.vocabulary
        logits = max(CHUNK_TOKENS * row, self.chunk)
        copy = 2.0 * self.shape.vocabulary * self.shape.hidden if self.head_copy else 0.0
        return CHUNKS * logits + copy

    @property
    def others(self) -> float:
        """Bytes of reference, teacher and critic."""
        size = self.shape.parameters
        frozen = self.reference * (self.weight * size if self.rank is None else 4.0 * self.trained)
        return frozen + self._critic_bytes() + self.extra

    def _critic_bytes(self) -> float:
        """Of its weights, gradients and moments; it has no output layer."""
        if self.critic is None:
            return 0.0
        weights = self.critic.parameters - self.critic.head
        held = 2 * self.weight * weights
        if self.offload if self.critic_offload is None else self.critic_offload:
            return held
        inside = self.critic.linear + self.critic.experts
        return held + moments(self.critic_optimizer or self.optimizer, weights, inside)

    def items(self) -> dict[str, float]:
        """Bytes by name, all that is there in an update."""
        copy = 2.0 * self.shape.parameters if self.copied else 0.0
        return {
            "weights": self.weights,
            "sampling copy": copy,
            "gradients": self.gradients,
            "optimizer": self.moments,
            "reference, teacher, critic": self.others,
            "activations": self.activations,
            "head chunk": self.head_chunk,
            "sampling server": self.server,
        }


@dataclass(frozen=True, slots=True)
class Budget:
    """A plan on a card: bytes by name, and what is left for the pages of the cache."""

    plan: MemoryPlan
    card: Card

    @property
    def reserved(self) -> float:
        """Bytes for CUDA's context and what the allocator cannot use."""
        return CONTEXT + FRAGMENTS * self.card.memory

    @property
    def total(self) -> float:
        """Bytes of all but the cache."""
        return sum(self.plan.items().values()) + self.reserved

    @property
    def pages(self) -> int:
        """Pages that the rest of the card has room for."""
        each = PAGE * self.plan.shape.cached_bytes()
        return max(0, int((self.card.memory - self.total) / each))

    @property
    def rows(self) -> int:
        """Sequences of the longest length that are sampled at the same time; 0 if none are."""
        if not self.plan.rows:
            return 0
        return min(self.plan.rows, self.pages // -(-self.plan.longest // PAGE))

    @property
    def over(self) -> float:
        """Bytes that are missing, one of the longest sequences counted; 0 if it fits."""
        least = -(-self.plan.longest // PAGE) * PAGE * self.plan.shape.cached_bytes()
        return max(0.0, self.total + (least if self.plan.rows else 0) - self.card.memory)

    def as_dict(self) -> dict[str, object]:
        """In JSON types: bytes."""
        items = {name: round(size) for name, size in self.plan.items().items()}
        return {
            "card": self.card.name,
            "memory": self.card.memory,
            "items": {**items, "CUDA and fragments": round(self.reserved)},
            "total": round(self.total),
            "left": max(0, round(self.card.memory - self.total)),
            "pages": self.pages,
            "cached_tokens": PAGE * self.pages,
            "rows": self.rows,
            "wanted_rows": self.plan.rows,
            "longest": self.plan.longest,
            "over": round(self.over),
        }


@dataclass(frozen=True, slots=True)
class Saving:
    """A line of the recipe, and the bytes that it saves."""

    line: str
    saved: float
    plan: MemoryPlan


def savings(plan: MemoryPlan, adapters: str = "model.lora.rank") -> list[Saving]:
    """The changes that save memory, each alone, those first that cost least; those without effect
    are left out. `adapters` is the key of their rank; only the policy's can be on 4 bits."""
    return [one for one in _changes(plan, adapters) if one.saved > 0]


def _changes(plan: MemoryPlan, adapters: str) -> Iterator[Saving]:
    before = sum(plan.items().values())

    def change(line: str, **fields: object) -> Saving:
        after = replace(plan, **fields)  # type: ignore[arg-type]
        return Saving(line, before - sum(after.items().values()), after)

    if plan.checkpointed is not None:
        yield change("model.activation_checkpointing = true", checkpointed=None)
    fewer, least = plan.tokens, plan.longest or LONGEST
    while fewer > least:  # a sequence longer than the budget is computed alone
        fewer = max(least, fewer // 4)
        yield change(f"token_budget = {fewer}", tokens=fewer)
    if not plan.offload:
        yield change('optimizer.offload = "cpu"', offload=True)
    if plan.critic_offload is False:
        yield change('value.optimizer.offload = "cpu"', critic_offload=True)
    if plan.optimizer == "adamw":
        yield change('optimizer.kind = "adamw_8bit"', optimizer="adamw_8bit")
    if plan.critic_optimizer == "adamw":
        yield change('value.optimizer.kind = "adamw_8bit"', critic_optimizer="adamw_8bit")
    if plan.rank is None:
        yield change(f"{adapters} = 16", rank=16, adapted=plan.shape.adapted)
    elif not plan.quantised and plan.shape.quantisable and adapters.startswith("model."):
        yield change('model.quantisation = "nf4"', quantised=True, copied=False)


def remedies(budget: Budget, adapters: str = "model.lora.rank") -> tuple[list[Saving], bool]:
    """The changes after which a plan fits its card, one on top of the other, and whether it does.

    At each point a change that is enough, else the one that saves most.
    """
    chosen: list[Saving] = []
    while budget.over:
        found = [one for one in savings(budget.plan, adapters) if one.saved > WORTH * budget.over]
        if not found:
            return chosen, False
        enough = [one for one in found if not Budget(one.plan, budget.card).over]
        chosen.append(enough[0] if enough else max(found, key=lambda one: one.saved))
        budget = Budget(chosen[-1].plan, budget.card)
    return chosen, True
