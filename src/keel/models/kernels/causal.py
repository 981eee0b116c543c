"""`causal.c` from Python: causal attention over packed segments on a CPU, with gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.models.kernels import load

Ints = npt.NDArray[np.int64]
PANEL = 32
"""Keys in a panel, as in tile.h; a head's width must be a multiple."""
KEYS, QUERIES = 256, 64
"""Block sizes of the backward pass, as in causal.c."""
TWICE = 1.4
"""Measured cost of the backward pass in two passes, over its cost in one."""
_ROWS, _LANES = 12, 16
"""Rows of the largest tile, and floats of the widest vector."""
_NAMES = ("keel_causal", "keel_causal_families", "keel_causal_queries", "keel_causal_keys")


class _Pieces(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("start", "length", "follows", "follower", "followers")),
        ("tokens", c_int64),
    )


class _CausalScratch(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("heads", "shared", "width", "window", "threads", "room")),
        ("scaling", c_float),
        ("pieces", _Pieces),
        ("items", c_int64),
        *((name, c_void_p) for name in ("piece", "first", "count", "query", "key", "value")),
        *((name, c_int64) for name in ("query_step", "key_step", "value_step")),
        *((name, c_void_p) for name in ("out", "norm", "grad", "delta")),
        *((name, c_void_p) for name in ("d_query", "d_key", "d_value", "rooms")),
    )


@dataclass(frozen=True, eq=False)
class Items:
    """Units of work for the threads, the longest first: `count` tokens of a segment from `first`,
    or a whole family (a prefix with the segments that follow it), by its prefix."""

    piece: Ints
    first: Ints
    count: Ints


class CausalPlan:
    """How the work on segments is divided; `lengths` and `follows` as in `Segments`."""

    def __init__(self, lengths: Sequence[int], follows: Sequence[int] = ()) -> None:
        self.length: Ints = np.array(lengths, dtype=np.int64)
        self.start: Ints = self.length.cumsum() - self.length
        self.follows: Ints = np.array(follows or [-1] * len(lengths), dtype=np.int64)
        after = np.flatnonzero(self.follows >= 0)
        self.follower: Ints = after[np.argsort(self.follows[after], kind="stable")]
        counts = np.bincount(self.follows[after], minlength=len(lengths))
        self.followers: Ints = np.concatenate([[0], counts.cumsum()])
        before = np.where(self.follows >= 0, self.length[self.follows], 0)
        seeing: npt.NDArray[np.float64] = np.zeros(len(lengths))
        np.add.at(seeing, self.follows[after], self.length[after])
        self.forward = self._asking(KEYS, before)
        self.queries = self._asking(QUERIES, before)
        self.keys = self._answering(KEYS, seeing)
        self.families, self._largest = self._rooted(self.length * (before + self.length / 2))
        self._wide = int(_filled(before + self.length).max())

    def room(self, width: int) -> int:
        """Floats of scratch memory for each thread."""
        forward = 2 * self._wide * width + _ROWS * (self._wide + _LANES)
        return max(forward, 2 * KEYS * width + 2 * QUERIES * (KEYS + _LANES))

    def in_one_pass(self, shared: int, threads: int) -> bool:
        """Whether one pass over families is faster backward than two, over queries and over keys.

        Families in order of size are done at the latest after an even share of all but the largest
        and then the largest (Graham 1966, Bounds for certain multiprocessing anomalies); the two
        passes divide evenly.
        """
        largest = self._largest / shared
        return (1 - largest) / threads + largest <= TWICE / threads

    def _rooted(self, work: npt.NDArray[np.float64]) -> tuple[Items, float]:
        """Families, and the largest one's share, given the work of each segment."""
        family = np.where(self.follows < 0, np.arange(len(work)), self.follows)
        whole = np.bincount(family, weights=work)
        piece = np.flatnonzero(self.follows < 0)
        piece = piece[np.argsort(-whole[piece], kind="stable")]
        items = Items(piece, np.zeros_like(piece), self.length[piece])
        return items, float(whole.max() / whole.sum())

    def _asking(self, most: int, before: Ints) -> Items:
        """Blocks of queries, which see their prefix and their segment up to themselves."""
        piece, first, count = self._cut(most)
        return _longest(piece, first, count, count * (before[piece] + first + count / 2))

    def _answering(self, most: int, seeing: npt.NDArray[np.float64]) -> Items:
        """Blocks of keys, seen by the later tokens of their segment and by what follows it."""
        piece, first, count = self._cut(most)
        after = self.length[piece] - first - count / 2
        return _longest(piece, first, count, count * (after + seeing[piece]))

    def _cut(self, most: int) -> tuple[Ints, Ints, Ints]:
        """Segment, first token and count of each block of at most so many tokens."""
        counts = -(-self.length // most)
        piece = np.repeat(np.arange(len(counts)), counts)
        first = most * (np.arange(len(piece)) - np.repeat(counts.cumsum() - counts, counts))
        return piece, first, np.minimum(self.length[piece] - first, most)


def _longest(piece: Ints, first: Ints, count: Ints, work: npt.NDArray[np.float64]) -> Items:
    order = np.argsort(-work, kind="stable")
    return Items(piece[order], first[order], count[order])


def _filled(count: Ints) -> Ints:
    filled: Ints = -(-count // PANEL) * PANEL
    return filled


def library() -> Any:
    """The compiled functions, or None."""
    found = load("causal")
    if found is not None:
        for name in _NAMES:
            getattr(found, name).restype = None
    return found


def applies(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is compiled code for these tensors (T, heads, D)."""
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype == torch.float32
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and library() is not None
    )


def attend(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "T Hkv D"],
    value: Float[Tensor, "T Hkv D"],
    plan: CausalPlan,
    scaling: float,
    window: int | None,
) -> Float[Tensor, "T H D"]:
    """softmax(scaling · q·k) v over the tokens that each token sees, within the window."""
    width = query.shape[-1]
    if width % PANEL:  # zeros add nothing to a product
        query, key, value = (F.pad(x, (0, -width % PANEL)) for x in (query, key, value))
    query, key, value = (_dense_heads(x) for x in (query, key, value))
    out: Tensor = _Causal.apply(query, key, value, plan, scaling, window)  # type: ignore[no-untyped-call]
    return out[..., :width]


def _dense_heads(x: Tensor) -> Tensor:
    """The same, the heads of each token contiguous; tokens may have any stride."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
        out, norm = forward(query, key, value, *options)
        ctx.save_for_backward(query, key, value, out, norm)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = backward(grad.contiguous(), ctx.saved_tensors, *ctx.options)
        return *found, None, None, None


def forward(
    query: Tensor, key: Tensor, value: Tensor, plan: CausalPlan, scaling: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """The output (T, H, D), and the logarithms of the softmax's denominators (T, H)."""
    out, norm = query.new_empty(query.shape), query.new_empty(query.shape[:2])
    room = _room(query, plan)
    work = _work(query, key, value, plan, scaling, window, room)
    work.out, work.norm = out.data_ptr(), norm.data_ptr()
    _run("keel_causal", work, plan.forward)
    return out, norm


def backward(
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    plan: CausalPlan,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given the output's; `saved` are these three, the output
    and the logarithms."""
    query, key, value, out, norm = saved
    made = tuple(x.new_empty(x.shape) for x in (query, key, value))
    delta, room = torch.empty_like(norm), _room(query, plan)
    work = _work(query, key, value, plan, scaling, window, room)
    for name, tensor in zip(
        ("out", "norm", "grad", "delta", "d_query", "d_key", "d_value"),
        (out, norm, grad, delta, *made),
        strict=True,
    ):
        assert tensor.is_contiguous()
        setattr(work, name, tensor.data_ptr())
    if plan.in_one_pass(work.shared, work.threads):
        _run("keel_causal_families", work, plan.families)
    else:
        _run("keel_causal_queries", work, plan.queries)
        _run("keel_causal_keys", work, plan.keys)
    return made[0], made[1], made[2]


def _room(query: Tensor, plan: CausalPlan) -> Tensor:
    return query.new_empty(torch.get_num_threads(), plan.room(query.shape[-1]))


def _work(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: CausalPlan,
    scaling: float,
    window: int | None,
    room: Tensor,
) -> _CausalScratch:
    names = ("start", "length", "follows", "follower", "followers")
    pieces = {name: getattr(plan, name).ctypes.data for name in names}
    return _CausalScratch(
        heads=query.shape[1],
        shared=key.shape[1],
        width=query.shape[2],
        window=window or 0,
        threads=room.shape[0],
        room=room.shape[1],
        scaling=scaling,
        pieces=_Pieces(**pieces, tokens=len(query)),
        query=query.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        query_step=query.stride(0),
        key_step=key.stride(0),
        value_step=value.stride(0),
        rooms=room.data_ptr(),
    )


def _run(name: str, work: _CausalScratch, items: Items) -> None:
    work.items = len(items.piece)
    for field in ("piece", "first", "count"):
        setattr(work, field, getattr(items, field).ctypes.data)
    getattr(library(), name)(byref(work))
