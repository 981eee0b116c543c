"""Kernels against references, and the decoded step against its floor: parts b and c of `gpu.py`."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from benchmarks import expected as expectation
from benchmarks.gpu_job import Job, seen
from benchmarks.sides import SEED
from keel.analysis.costs import floor_ms


def kernels(job: Job) -> None:
    """Error and speed of each kernel at Qwen2.5's heads, against torch in float64 or float32."""
    job.row("bandwidth of a copy, GB/s", (copied := job.bandwidth()) / 1e9)
    for heads, width in ((14, 64), (12, 128)):
        for rows, context in ((3, 70),) if job.dry else ((8, 2048), (256, 2048)):
            _attention(job, heads, width, rows, context, copied)
    _draw(job, copied)
    _flash(job)


def _attention(job: Job, heads: int, width: int, rows: int, context: int, copied: float) -> None:
    from keel.models.attention import Rules
    from keel.models.paged import PAGE_TOKENS, attend_pages, store

    each = -(-context // PAGE_TOKENS)
    on: dict[str, Any] = {"device": job.device, "dtype": job.dtype}
    keys, values = (torch.randn(rows * each + 1, 2, PAGE_TOKENS, width, **on) for _ in range(2))
    table = torch.randperm(rows * each, device=job.device).add(1).view(rows, each).int()
    length = torch.full((rows,), context, dtype=torch.int32, device=job.device)
    query, rules = torch.randn(rows, heads, width, **on), Rules(width**-0.5)
    splits = max(1, min(264 // (rows * 2), each, 16))

    def attend() -> torch.Tensor:
        return attend_pages(query, keys, values, table, length, rules, splits=splits)

    name = f"{heads} heads of {width}, {rows} rows of {context:,}"
    some = slice(0, 8)
    near = (query[some].double(), keys.double(), values.double(), table[some], length[some])
    error = (attend()[some].double() - attend_pages(*near, rules)).abs().max().item()
    del near
    job.row(f"attend_pages, error: {name}", error, asked="≤ 0.02", met=error <= 0.02)
    read = 2 * rows * context * 2 * width * keys.element_size()
    speed = read / job.timed(attend) / 1e9
    job.row(f"attend_pages, GB/s: {name}", speed, expected=copied / 1e9)
    new = torch.randn(2, rows * each, 2, width, **on)
    page, place = table.flatten().long(), torch.arange(rows * each, device=job.device) % PAGE_TOKENS
    store(keys, values, new[0], new[1], page, place)
    same = torch.equal(keys[page, :, place], new[0]) and torch.equal(values[page, :, place], new[1])
    took = job.timed(lambda: store(keys, values, new[0], new[1], page, place))
    job.row(
        f"store, GB/s: {rows * each:,} tokens of {width}",
        2 * new.numel() * new.element_size() / took / 1e9,
        asked="equal", met=same,
    )  # fmt: skip


def _draw(job: Job, copied: float) -> None:
    from keel.models.draw import draw_tokens

    rows, vocabulary = (4, 300) if job.dry else (256, 151_936)
    logits = 3 * torch.randn(rows, vocabulary, device=job.device)
    numbers = torch.rand(rows, dtype=torch.float64, device=job.device)
    tokens, log_prob = draw_tokens(logits, numbers, 1.0)
    exact, _ = draw_tokens(logits.double(), numbers, 1.0)
    same = (tokens == exact).double().mean().item()
    job.row("draw_tokens, share equal to float64's", same, asked="≥ 0.98", met=same >= 0.98)
    wanted = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    error = (log_prob.double() - wanted).abs().max().item()
    job.row("draw_tokens, error of log-probabilities", error, asked="≤ 1e-4", met=error <= 1e-4)
    speed = 4 * logits.numel() / job.timed(lambda: draw_tokens(logits, numbers, 1.0)) / 1e9
    job.row("draw_tokens, GB/s", speed, expected=copied / 1e9)


def _flash(job: Job) -> None:
    from keel.models.attention import PackedLayout, Rules

    lengths = [9, 20, 5] if job.dry else [300, 1024, 77, 2048] * 4
    on: dict[str, Any] = {"device": job.device, "dtype": job.dtype}
    query = torch.randn(sum(lengths), 14, 64, **on)
    key, value = (torch.randn(sum(lengths), 2, 64, **on) for _ in range(2))
    layout, rules = PackedLayout(lengths), Rules(64**-0.5)
    out = layout.attend_tokens(query, key, value, rules)
    exact = PackedLayout(lengths).attend_tokens(query.double(), key.double(), value.double(), rules)
    error = (out.double() - exact).abs().max().item()
    job.row("packed attention, error", error, asked="≤ 0.03", met=error <= 0.03)
    operations = 4 * 14 * 64 * sum(n * (n + 1) / 2 for n in lengths)
    took = job.timed(lambda: layout.attend_tokens(query, key, value, rules))
    job.row("packed attention, forward, TFLOP/s", operations / took / 1e12)


def decode(job: Job) -> None:
    """Milliseconds of a decoded step as the engine asks for it, 16 steps at once."""
    copied = job.bandwidth()
    here = None if job.dry else seen()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    job.row("machine", f"{here.name if here else 'CPU'}, {versions}")
    known = here and here.bandwidth
    job.row("bandwidth of a copy, GB/s", copied / 1e9, expected=known and known / 1e9)
    for size in ("0.5B", "1.5B"):
        decoded = Decoding(job, size)
        for context in (20, 70) if job.dry else expectation.CONTEXTS:
            for rows in (4, 2) if job.dry else sorted(expectation.ROWS, reverse=True):
                floor = floor_ms(decoded.shape, rows, context, copied)
                taken = decoded.step_ms(rows, context)
                judged = rows >= 256
                first = f"first call {decoded.first:.1f} s"
                job.row(
                    f"decoded step, ms: {size}, {rows} rows of {context:,}",
                    taken,
                    expected=floor,
                    asked="≤ 1.7 × floor" if judged else "",
                    met=taken <= expectation.SLOWER * floor if judged else None,
                    note=first if job.dry or decoded.captured else f"{first}, not captured",
                )
        del decoded
        if not job.dry:
            torch.cuda.empty_cache()


class Decoding:
    """A decoder of random weights whose rows have contexts that nothing was computed for.

    The model is float32, as one that learns by default; the weights that sample are a copy.
    """

    def __init__(self, job: Job, size: str) -> None:
        from keel.engines.static import StaticDecoder
        from keel.models.families import prepare
        from keel.models.policy import token_count
        from keel.models.shape import shape_of

        self.job = job
        self.model = job.model(size, torch.float32)
        prepare(self.model, True)
        self.tokenizer = job.tokenizer(size)
        self.shape = shape_of(self.model)
        self.decoder = StaticDecoder(self.model, tokens=token_count(self.tokenizer))

    @property
    def captured(self) -> bool:
        return bool(getattr(self.decoder, "_captures", True))

    @torch.no_grad()
    def step_ms(self, rows: int, context: int) -> float:
        """Of a step of `rows` rows, each with `context` tokens on pages of its own."""
        import numpy as np

        from keel.engines.sampler import Answers, Stops, Uniforms
        from keel.engines.scheduler import Request
        from keel.models.paged import PAGE_TOKENS
        from keel.types import Sampling

        decoder, steps = self.decoder, self.decoder.steps
        sampling = Sampling(steps, ignore_eos=True)
        vocabulary = int(self.model.config.vocab_size)
        decoder.begin(
            Request(
                prompts=[np.zeros(context, dtype=np.int64)] * rows,
                limits_P=np.full(rows, steps, dtype=np.int64),
                n=1,
                sampling=sampling,
                stops=Stops((), sampling, self.tokenizer, vocabulary),
                uniforms=Uniforms([str(row) for row in range(rows)], 1, SEED),
                answers=Answers(rows, 1, self.tokenizer),
                rows=rows,
                prefill_tokens=16_384,
            )
        )
        each = -(-(context + steps) // PAGE_TOKENS)
        pages = decoder.allocator.take(rows * each)
        rng = np.random.default_rng(SEED)
        decoder.buffers.token[:rows] = 2
        given: dict[str, Any] = {
            "position": np.full(rows, context, dtype=np.int64),
            "last": np.full(rows, context + steps, dtype=np.int64),
            "pages": np.array(pages, dtype=np.int32).reshape(rows, each),
            "uniform": rng.random((steps, rows)),
        }

        def run() -> None:
            decoder.buffers.live[:rows] = True
            decoder.decode(steps, **given)

        start = time.perf_counter()
        run()
        self.job.wait()
        self.first = time.perf_counter() - start
        taken = self.job.timed(run, 3, 4)
        decoder.allocator.give(pages)
        return 1e3 * taken / steps
