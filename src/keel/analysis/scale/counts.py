"""Weights, operations and bytes of a model: the equations of docs/scale.md, each once."""

from __future__ import annotations

from keel.analysis.scale.shapes import ModelShape

ADAM_BYTES = 16
"""Of a float32 parameter under Adam: weight, gradient and two moments of 4 bytes (ZeRO,
arXiv:1910.02054, section 3.1, has the same sum for mixed precision)."""


def parameters(shape: ModelShape) -> int:
    """N = (2 − tied)·V·H + L·(attention + vectors) + dense layers·3·H·F + sparse layers·(
    (experts + shared)·3·H·F_e + H·experts) + H; checked against models that are built."""
    sparse = (shape.experts + shape.shared) * 3 * shape.hidden * shape.expert_mlp
    sparse += shape.hidden * shape.experts
    dense = 3 * shape.hidden * shape.mlp
    return (
        (2 - shape.tied) * shape.vocabulary * shape.hidden
        + shape.layers * (shape.attention_weights + shape.vectors)
        + (shape.layers - shape.sparse_layers) * dense
        + shape.sparse_layers * sparse
        + shape.hidden
    )


def multiplied(shape: ModelShape) -> int:
    """Weights that one token is multiplied with: attention, its MLPs or experts, and the head."""
    active = (shape.active + shape.shared) * 3 * shape.hidden * shape.expert_mlp
    active += shape.hidden * shape.experts
    return (
        shape.vocabulary * shape.hidden
        + shape.layers * shape.attention_weights
        + (shape.layers - shape.sparse_layers) * 3 * shape.hidden * shape.mlp
        + shape.sparse_layers * active
    )


def forward_flops(shape: ModelShape, context: float) -> float:
    """Of a token that sees `context` tokens: 2·N_multiplied + 4·L·q·context (queries with keys, and
    weights with values; Kaplan et al., arXiv:2001.08361, table 1)."""
    return 2.0 * multiplied(shape) + 4.0 * shape.layers * shape.query * context


def training_flops(shape: ModelShape, context: float, checkpointing: bool) -> float:
    """Of a token: 3 × forward (the backward pass costs two), 4 × where layers are recomputed: the
    6·N and 8·N of Korthikanti et al. (arXiv:2205.05198, section 5)."""
    return (4.0 if checkpointing else 3.0) * forward_flops(shape, context)


def cache_bytes(shape: ModelShape, size: int = 2) -> int:
    """Keys and values of a token, in bytes: L · cached numbers · size."""
    return shape.layers * shape.cached_numbers * size


def experts_read(shape: ModelShape, rows: float) -> float:
    """The expected number of a layer's experts that `rows` tokens use: E·(1 − (1 − k/E)^rows), if
    each token's k are random."""
    if not shape.experts:
        return 0.0
    missed: float = (1.0 - shape.active / shape.experts) ** rows
    return shape.experts * (1.0 - missed)


def weight_bytes_read(shape: ModelShape, rows: float, size: int = 2) -> float:
    """Weights that a decode step of `rows` tokens reads, in bytes: all but the input embedding, and
    of the experts those used."""
    expert = 3 * shape.hidden * shape.expert_mlp
    idle = shape.sparse_layers * (shape.active - experts_read(shape, rows)) * expert
    return size * (multiplied(shape) - idle)


def activation_bytes(
    layers: int, hidden: int, query: int, key_value: int, mlp: int, working: int, saved: bool
) -> int:
    """Of a token in a backward pass, in bytes.

    A layer keeps the inputs of both norms in float32 (2 · 4·H) and, in the working type, 2·H of the
    norms' outputs, 2·q + 2·kv of the attention and 3·F of the MLP. With checkpointing (not
    `saved`) there are L layer inputs of 4·H and the whole of one layer.
    """
    inside = 2 * hidden + 2 * query + 2 * key_value + 3 * mlp
    layer = 2 * 4 * hidden + working * inside
    return layers * layer if saved else layers * 4 * hidden + layer


def ring_bytes(size: float, devices: int) -> float:
    """Bytes through a device's link in a ring all-gather or reduce-scatter of `size` bytes:
    (n − 1)/n · size (Thakur, Rabenseifner and Gropp 2005). An all-reduce is both."""
    return size * (devices - 1) / devices


def pipeline_bubble(stages: int, micro_batches: float) -> float:
    """The idle share of a pipeline: (p − 1) / (m + p − 1) (Narayanan et al., arXiv:2104.04473)."""
    return (stages - 1) / (micro_batches + stages - 1)
