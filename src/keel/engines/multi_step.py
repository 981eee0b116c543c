"""Several steps of decoding in one call of compiled code, while no row enters or ends.

The Python code between two calls costs as much as a step of a small model. The result of a row
depends neither on the other rows nor on how its steps are divided into calls.
"""

from __future__ import annotations

from ctypes import addressof

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from keel.engines.compiled import CompiledRunner
from keel.engines.model_runner import DecodeRows, ModelRunner
from keel.engines.sampler import AHEAD, Uniforms
from keel.engines.scheduler import DecodeBatch
from keel.engines.stopping import Stops
from keel.models.head import Head, compiled_weight
from keel.models.kernels import sample as drawing
from keel.models.kernels import steps as compiled
from keel.models.kernels.decode import PAGE, pointer
from keel.models.kernels.head import HeadWeight
from keel.types import Sampling

Ints = npt.NDArray[np.int64]
SLICE = 0.05
"""Seconds after which a call starts no further step, so that its caller can check for signals."""


def make_multi_step(
    forward: ModelRunner, head: Head, sampling: Sampling, stops: Stops
) -> MultiStep | None:
    """None if compiled code cannot do a whole step: with another runner, a head with a scale or a
    soft cap, stop strings, or a token to sample that might lack an embedding."""
    plain = head.scale == 1.0 and head.softcap is None
    weight = compiled_weight(head) if plain else None
    ends_V = stops.by_token
    if not isinstance(forward, CompiledRunner) or weight is None or ends_V is None:
        return None
    embed, outputs = forward.embed, weight.shape[0]
    known = embed.is_contiguous() and outputs <= min(len(embed), len(ends_V))
    if not (known and drawing.library() and compiled.library()):
        return None
    return MultiStep(forward, weight, sampling, ends_V)


class MultiStep:
    """Feeds the last token of each row and samples its next one, some steps at a time."""

    def __init__(
        self,
        runner: CompiledRunner,
        weight: HeadWeight,
        sampling: Sampling,
        ends_V: npt.NDArray[np.int8],
    ) -> None:
        self._runner, self._weight = runner, weight
        self._sampling, self._ends = sampling, ends_V
        functions = runner.functions
        self._calls = {
            "decode": compiled.address(functions.keel_decode),
            "norm": compiled.address(functions.keel_norm),
            "logits": compiled.address(weight.function),
            "draw": compiled.address(drawing.library().keel_draw),
            "layers": addressof(runner.layers),
            "step": addressof(runner.step),
            "count": len(runner.layers),
            "weight": pointer(runner.norm[0]),
            "epsilon": runner.norm[1],
            "hidden": runner.embed.shape[1],
            "embed": pointer(runner.embed),
            "room": PAGE,
            "ends": ends_V.ctypes.data,
        }

    def __call__(self, batch: DecodeBatch, uniforms: Uniforms) -> tuple[Ints, Tensor]:
        """Tokens and log-probabilities (steps, R) of the live rows: at least one step, and no step
        after one in which a row ends."""
        most, rows = _most(batch), len(batch.sequence)
        runner = self._runner
        runner.reserve(batch.made + most - 1, batch.ahead)
        live = DecodeRows(batch.slot, batch.made - 1, batch.length, torch.device("cpu"))
        step = runner.prepare(torch.from_numpy(batch.place), live, most)
        numbers = torch.from_numpy(uniforms.take(batch.sequence, batch.made, most))
        product = self._weight.of(step.x)
        draw = drawing.draw_of(product.out, numbers.new_empty(rows), self._sampling)
        draw.tokens.copy_(torch.from_numpy(batch.token))
        tokens = draw.tokens.new_empty(most, rows)
        log_probs = numbers.new_empty(most, rows)
        # These structures must live as long as the call.
        head, chance = product.pointers(), draw.pointers()
        done = compiled.run(
            compiled.StepsArguments(
                **self._calls,
                head=addressof(head),
                chance=addressof(chance),
                rows=rows,
                most=step.pages.shape[1],
                pages=step.pages.ctypes.data,
                x=pointer(step.x),
                position=pointer(step.positions),
                end=step.end.ctypes.data,
                page=step.mapping.page.ctypes.data,
                place=step.mapping.place.ctypes.data,
                token=pointer(draw.tokens),
                number=pointer(draw.uniform),
                log_prob=pointer(draw.log_probs),
                numbers=pointer(numbers),
                tokens=pointer(tokens),
                log_probs=pointer(log_probs),
                steps=most,
                seconds=SLICE,
            )
        )
        return tokens[:done].numpy(), log_probs[:done]


def _most(batch: DecodeBatch) -> int:
    """Steps until a row's budget is used up, or the longest row has filled its page: so no row
    takes a page more than PAGE steps before it needs it."""
    left = int((batch.limit - batch.made).min())
    page = PAGE - (int(batch.made.max()) - 1) % PAGE
    assert page <= AHEAD
    return min(left, page)
