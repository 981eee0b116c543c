"""Decoding over static buffers: one function a token, captured as a graph on CUDA.

A step feeds the last token of each of R rows, writes its keys and values into pages, attends over
the row's pages, samples the next token, and marks the rows that ended. All it reads and writes has
a fixed address, so that CUDA replays it without the host; several steps are replayed before their
tokens are read. On a CPU the same function runs as it is.

Rows are padded to a bucket. A row that ended, or has no sequence, writes to page 0, which
nothing reads. Beyond rounding, what a row samples depends on its own tokens and numbers alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from keel.config.model import Autocast
from keel.engines.page_layouts import ContinuedLayout, EntryLayout, LayerShapes, RowLayout
from keel.engines.sampler import AHEAD, GOING, draw
from keel.engines.sampling_weights import SamplingWeights
from keel.engines.scheduler import Pages, Request
from keel.models.attention import ATTENTION, Attending, PackedLayout, install, uncompiled
from keel.models.families import uses_autocast
from keel.models.head import Head, logits
from keel.models.paged import PAGE_TOKENS
from keel.types import KeelError, Sampling

Ints = npt.NDArray[np.int64]

STEPS = 16
"""Most tokens of a row between two reads by the host."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows that a graph is captured for."""
MOST_GRAPHS = 256
"""Captured steps that are kept: clients of a server may ask for any temperature."""
SHARE = 0.4
"""Of the free memory of a GPU, for pages: the update needs the rest."""
GROWTH = 1.25
"""A pool that is large enough for a sequence is replaced if it can be so many times as large."""
BUSY = 264
"""Programs of attention that keep a GPU busy: two for each multiprocessor of an H100."""

_log = logging.getLogger(__name__)


def bucket_of(rows: int) -> int:
    """The smallest bucket for so many rows."""
    return next((size for size in BUCKETS if size >= rows), -(-rows // 256) * 256)


class Buffers:
    """What a step reads and writes, for `rows` rows of `pages` pages, and `steps` steps.

    `token` is fed next, at `position`, `last` is the position whose token is the budget's last.
    `at` is the number of the step: that of the row of `uniform` to sample with, and of `tokens` and
    `log_probs` to write.
    """

    def __init__(self, rows: int, pages: int, steps: int, device: torch.device) -> None:
        def whole(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows, self.width = rows, pages
        self.token: Int[Tensor, "R"] = whole(rows)
        self.position: Int[Tensor, "R"] = whole(rows)
        self.last: Int[Tensor, "R"] = whole(rows)
        self.live: Bool[Tensor, "R"] = whole(rows, dtype=torch.bool)
        self.pages: Int[Tensor, "R P"] = whole(rows, pages, dtype=torch.int32)
        self.uniform: Float[Tensor, "K R"] = whole(steps, rows, dtype=torch.float64)
        self.at: Int[Tensor, "1"] = whole(1)
        self.tokens: Int[Tensor, "K R"] = whole(steps, rows)
        self.log_probs: Float[Tensor, "K R"] = whole(steps, rows, dtype=torch.float32)


class Record:
    """Tokens and log-probabilities (K, R) that were computed, on their way to the host."""

    def __init__(self, tokens: Tensor, log_probs: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._tokens, self._log_probs = _pinned(tokens), _pinned(log_probs)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._tokens, self._log_probs = tokens.clone(), log_probs.clone()

    def read(self) -> tuple[Ints, npt.NDArray[np.float32]]:
        """The values; waits until they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._tokens.numpy(), self._log_probs.numpy()


def _pinned(values: Tensor) -> Tensor:
    target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return target.copy_(values, non_blocking=True)


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the block an operator that waits for the device raises RuntimeError.

    Such a step cannot be captured, and a capture that fails leaves torch's allocator damaged.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "bincount", "equal")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        )
        lengths = name == "repeat_interleave" and not (kwargs or {}).get("output_size")
        moves = (kwargs or {}).get("device")
        to_host = moves is not None and torch.device(moves).type == "cpu" and _on_gpu(args)
        if name in self.WAITS or masks or lengths or to_host:
            raise RuntimeError(f"it waits for the result of {func}")
        return func(*args, **(kwargs or {}))


def _on_gpu(values: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.is_cuda for x in values)


class StaticDecoder:
    """A model's decoding step over static buffers, with the pages of keys and values.

    It lives as long as its engine: captured graphs hold the addresses of weights and buffers. The
    model's parameters may change in place, but not be replaced.
    `most_pages` bounds the pages (None: what the rows need, and on CUDA a share of what is free);
    `steps` are those between two reads by the host.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokens: int,
        autocast: Autocast = True,
        dtype: torch.dtype | None = None,
        steps: int = STEPS,
        most_pages: int | None = None,
    ) -> None:
        if not 1 <= steps <= AHEAD:
            raise ValueError(f"steps = {steps}: give 1 to {AHEAD}")
        if model.config._attn_implementation != ATTENTION:
            install(model)
        self.device: torch.device = model.device
        self.steps = steps
        self.allocator = Pages(0)
        rounded = torch.bfloat16 if uses_autocast(model, autocast) else model.dtype
        self._weights = SamplingWeights(model, dtype or rounded)
        self._head: Head = replace(self._weights.head, tokens=tokens)
        if self._head.dtype == "auto" and self._head.weight.dtype == torch.bfloat16:
            self._head = replace(self._head, dtype="bfloat16")
        # Without a cache of casts: a graph would hold its addresses.
        self._autocast = torch.autocast(
            self.device.type,
            torch.bfloat16,
            enabled=self._weights.quantised and rounded == torch.bfloat16,
            cache_enabled=False,
        )
        self._most_pages = most_pages
        trained = (p for p in model.parameters() if p.requires_grad)
        self._update_bytes = sum(3 * max(4, p.element_size()) * p.numel() for p in trained)
        """Gradients and two moments, which may not be there yet if pages are allocated."""
        self._pools: list[tuple[Tensor, Tensor]] = []
        self._buffers: Buffers | None = None
        self._ends: Tensor | None = None
        self._sampling = Sampling(1)
        self._kind: tuple[float, ...] = ()
        self._graphs: dict[tuple[int, tuple[float, ...]], Any] = {}
        self._graph_pool: Any = None
        self._captures = self.device.type == "cuda"
        self._stream: Any = None

    @property
    def buffers(self) -> Buffers:
        """Those of the last `begin`."""
        assert self._buffers is not None
        return self._buffers

    def begin(self, request: Request) -> None:
        """Take the model's weights, and make room for the rows and pages of a call.

        Raises KeelError if there is no memory for the pages of one sequence.
        """
        with torch.autocast(self.device.type, enabled=False):
            self._weights.refresh()
        chosen = request.sampling
        self._sampling = chosen
        self._kind = chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p
        rows, width = request.rows, -(-request.longest // PAGE_TOKENS)
        least = 1 + width + 1 + -(-request.longest_prompt // PAGE_TOKENS)
        wanted = bucket_of(rows) * (width + 1) + 1
        if self._buffers is None or rows > self.buffers.rows or width > self.buffers.width:
            before = (0, 0) if self._buffers is None else (self.buffers.rows, self.buffers.width)
            rows, wide = max(rows, before[0]), max(width, before[1])
            if 0 < before[1] < wide:
                wide *= 2  # so that longer prompts rarely mean new graphs
            self._forget_graphs()
            self._buffers = Buffers(bucket_of(max(rows, 2)), wide, self.steps, self.device)
        self._reserve(least, wanted)
        ends_V = request.stops.codes_V
        table = torch.from_numpy(ends_V)
        if self._ends is None or len(self._ends) != len(table):
            self._forget_graphs()
            self._ends = torch.empty_like(table, device=self.device)
        self._ends.copy_(table)

    def clear(self) -> None:
        """Free all pages, as after an interrupted call whose pages are unknown."""
        self.allocator = Pages(self.allocator.count)

    def _reserve(self, least: int, wanted: int) -> None:
        """Have pages: as many as `wanted` if there is memory, at least `least`; those that are
        taken stay."""
        have = self.allocator.count
        if have >= wanted or (self._most_pages is not None and have >= least):
            return
        shapes = LayerShapes()
        # As many tokens as a step has: compiled code is tuned for what it meets first.
        some = torch.zeros(self.buffers.rows, dtype=torch.int64, device=self.device)
        self.forward(some, some, shapes)
        size = sum(
            2 * heads * PAGE_TOKENS * width * dtype.itemsize
            for heads, width, dtype in shapes.found.values()
        )
        count = wanted if self._most_pages is None else max(self._most_pages, least)
        if self.device.type == "cuda":
            free = torch.cuda.mem_get_info(self.device)[0]
            free += torch.cuda.memory_reserved(self.device)
            free -= torch.cuda.memory_allocated(self.device) - have * size
            free = max(free - self._update_bytes, 0)
            count = min(count, int(SHARE * free) // size)
            if max(count, have) < least:
                raise KeelError(
                    f"the GPU has {free / 2**30:.3g} GiB left after the update's, of which "
                    f"sampling may take {100 * SHARE:.0f} %: too little for the keys and "
                    f"values of one sequence ({least * size / 2**30:.3g} GiB); "
                    "lower rollout.max_tokens, or see what saves memory (docs/howto/memory.md)"
                )
        if have >= least and count < GROWTH * have:
            return
        self._forget_graphs()
        if not self.allocator.used:
            self._pools = []
        kept = self._pools
        self._pools = []
        for layer, (heads, width, dtype) in sorted(shapes.found.items()):
            old = kept[layer] if kept else ()
            shape = (count, heads, PAGE_TOKENS, width)
            new = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))
            for source, target in zip(old, new, strict=False):
                target[: len(source)] = source
            self._pools.append(new)  # type: ignore[arg-type]
        self.allocator.grow(count)

    # ------------------------------------------------------------ what a run asks for

    def upload(self, values: npt.NDArray[Any]) -> Tensor:
        """An array on the device; the host does not wait."""
        made = torch.from_numpy(values)
        if self.device.type != "cuda":
            return made.to(self.device)
        return made.pin_memory().to(self.device, non_blocking=True)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages of all layers."""
        if not source:
            return
        old, new = (self.upload(np.array(x, dtype=np.int64)) for x in (source, target))
        for pair in self._pools:
            for pool in pair:
                pool.index_copy_(0, new, pool.index_select(0, old))

    def enter(
        self, tokens: Ints, known: Ints, counts: Ints, pages_E: npt.NDArray[np.int32]
    ) -> Float[Tensor, "E V"]:
        """The logits after the last token of each of E entries.

        `tokens` are those that enter, end to end, `counts` of each entry, after `known` ones whose
        keys and values its pages hold already. Entries without known tokens come first.
        """
        entry = np.repeat(np.arange(len(counts)), counts)
        ends = counts.cumsum()
        inside = np.arange(len(tokens)) - np.repeat(ends - counts, counts) + known[entry]
        page = pages_E[entry, inside // PAGE_TOKENS]
        whole = int((known == 0).sum())
        split = int(counts[:whole].sum())
        page_T, place_T = self.upload(page.astype(np.int64)), self.upload(inside % PAGE_TOKENS)
        continued = None
        if whole < len(counts):
            rows = RowLayout(
                pools=self._pools,
                page_R=page_T[split:],
                place_R=place_T[split:],
                pages_R=self.upload(pages_E[entry[split:]]),
                length_R=self.upload((inside[split:] + 1).astype(np.int32)),
            )
            continued = self._continued(rows, counts[whole:], known[whole:], pages_E[whole:])
        packed = PackedLayout(counts[:whole].tolist()) if whole else None
        layout = EntryLayout(packed, continued, self._pools, page_T, place_T)
        states = self.forward(self.upload(tokens), self.upload(inside), layout)
        return self._logits(states.index_select(0, self.upload(ends - 1)))

    def _continued(
        self, rows: RowLayout, counts: Ints, known: Ints, pages_E: npt.NDArray[np.int32]
    ) -> ContinuedLayout:
        keys = counts + known
        entry = np.repeat(np.arange(len(keys)), keys)
        place = np.arange(len(entry)) - np.repeat(keys.cumsum() - keys, keys)
        page = pages_E[entry, place // PAGE_TOKENS].astype(np.int64)
        ends = [np.concatenate([[0], x.cumsum()]).astype(np.int32) for x in (counts, keys)]
        return ContinuedLayout(
            rows,
            (self.upload(page), self.upload(place % PAGE_TOKENS)),
            (self.upload(ends[0]), self.upload(ends[1])),
            (int(counts.max()), int(keys.max())),
        )

    def first(
        self,
        logits_R: Float[Tensor, "R V"],
        uniform_R: npt.NDArray[np.float64],
        row: int,
        more: Ints,
    ) -> Record:
        """Sample the first tokens of rows from `row` on; `more` says which may go on after it."""
        drawn, log_prob = draw(logits_R, self.upload(uniform_R), self._sampling)
        assert self._ends is not None
        into = slice(row, row + len(drawn))
        self.buffers.token[into] = drawn
        going = self._ends.index_select(0, drawn) == GOING
        self.buffers.live[into] = going & self.upload(more.astype(np.bool_))
        return Record(drawn[None], log_prob[None].float())

    def close_rows(self, kept: Ints) -> None:
        """The rows `kept`, ascending, become the first ones."""
        index = self.upload(kept)
        for values in (self.buffers.token, self.buffers.live):
            values[: len(kept)] = values.index_select(0, index)

    def decode(
        self,
        steps: int,
        *,
        position: Ints,
        last: Ints,
        pages: npt.NDArray[np.int32],
        uniform: npt.NDArray[np.float64],
    ) -> Record:
        """Feed `steps` tokens of each of the first R rows, the first at `position`."""
        own, rows = self.buffers, len(position)
        # A lone row would need compiled code of its own.
        size = bucket_of(max(rows, 2) if self._weights.compiled else rows)
        own.position[:rows] = self.upload(position)
        own.last[:rows] = self.upload(last)
        own.pages[:rows, : pages.shape[1]] = self.upload(pages)
        own.uniform[:steps, :rows] = self.upload(uniform)
        own.live[rows:size] = False
        own.position[rows:size] = 0
        own.at.zero_()
        self._replay(size, steps)
        return Record(own.tokens[:steps, :rows], own.log_probs[:steps, :rows])

    # ------------------------------------------------------------ the step

    def forward(self, tokens: Tensor, positions: Tensor, layout: Any) -> Float[Tensor, "T H"]:
        """The last hidden states of tokens."""
        with torch.autocast(self.device.type, enabled=False), self._autocast:
            out = self._weights.backbone(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=False,
                layout=Attending(layout),
            )
        states: Tensor = out.last_hidden_state[0]
        return states

    def _logits(self, states: Tensor) -> Float[Tensor, "T V"]:
        return logits(states, self._head)

    def _step(self, rows: int) -> None:
        """One token of the first `rows` rows: everything between two tokens, on the device."""
        own = self.buffers
        token, position, live = own.token[:rows], own.position[:rows], own.live[:rows]
        assert self._ends is not None
        page = own.pages[:rows].gather(1, (position // PAGE_TOKENS)[:, None])[:, 0]
        heads = self._pools[0][0].shape[1]
        layout = RowLayout(
            pools=self._pools,
            page_R=torch.where(live, page, 0),
            place_R=position % PAGE_TOKENS,
            pages_R=own.pages[:rows],
            length_R=torch.where(live, position + 1, 0).to(torch.int32),
            splits=max(1, min(BUSY // (rows * heads), own.width, 8)),
        )
        # Copies: compiled code would be made again for a part of a larger buffer.
        scores = self._logits(self.forward(token.clone(), position.clone(), layout))
        uniform = own.uniform.index_select(0, own.at)[0, :rows]
        drawn, log_prob = draw(scores, uniform, self._sampling)
        own.tokens[:, :rows].index_copy_(0, own.at, drawn[None])
        own.log_probs[:, :rows].index_copy_(0, own.at, log_prob[None].float())
        token.copy_(torch.where(live, drawn, token))
        going = (self._ends.index_select(0, drawn) == GOING) & (position < own.last[:rows])
        position.add_(live.to(position.dtype))
        live.logical_and_(going)
        own.at.add_(1)

    def _replay(self, rows: int, steps: int) -> None:
        graph = self._graph(rows) if self._captures else None
        for _ in range(steps):
            if graph is None:
                self._step(rows)
            else:
                graph.replay()

    def _graph(self, rows: int) -> Any:
        """The captured step of a bucket; None if the model cannot be captured."""
        key = rows, self._kind
        if key not in self._graphs:
            if len(self._graphs) >= MOST_GRAPHS:
                self._forget_graphs()
            with self._kept():
                self._graphs[key] = self._capture(rows)
        return self._graphs[key]

    def _forget_graphs(self) -> None:
        """Drop what holds addresses that are no longer used."""
        self._graphs.clear()
        self._graph_pool = None

    def _capture(self, rows: int) -> Any:
        """The step as a graph; None if the model reads numbers on the host, or capture fails."""
        own, here = self.buffers, torch.cuda.current_stream(self.device)
        if self._stream is None:  # one for all: libraries keep a workspace for each
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        own.live[:rows] = False  # a warm-up writes to the scratch page only
        self._stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                self._warm(rows)  # compiles kernels, and makes what libraries make at first
                # torch would give up for good what it compiled if it met such a mode.
                with uncompiled(self._weights.backbone), NoHostReads():  # type: ignore[no-untyped-call]
                    self._warm(rows)
            here.wait_stream(self._stream)
            # Another thread may train meanwhile.
            with torch.cuda.graph(
                graph,
                pool=self._graph_pool,
                stream=self._stream,
                capture_error_mode="thread_local",
            ):
                self._step(rows)
        except RuntimeError as error:
            torch.cuda.set_stream(here)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            here.wait_stream(self._stream)
            self._captures = False
            _log.warning(
                "the decoding step of %s cannot be captured as a CUDA graph (%s): it runs without",
                type(self._weights.backbone).__name__,
                str(error).splitlines()[0],
            )
            return None
        self._graph_pool = self._graph_pool or graph.pool()
        return graph

    def _warm(self, rows: int) -> None:
        """A step whose results are not read."""
        self.buffers.at.zero_()
        self._step(rows)
        self.buffers.at.zero_()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Within the block the buffers of rows may change; they are as before afterwards."""
        own = self.buffers
        names = ("token", "position", "live")
        before = {name: getattr(own, name).clone() for name in names}
        try:
            yield
        finally:
            for name, values in before.items():
                getattr(own, name).copy_(values)
            own.at.zero_()
