"""Published runs, and what the cost model says of them with its default efficiencies.

The figures are of the sources named; the constants below say what
is assumed where a source leaves something out. Nothing of the model was fitted to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from keel.analysis.scale.catalogue import DEFAULT, HARDWARE, MODELS
from keel.analysis.scale.counts import parameters, training_flops
from keel.analysis.scale.shapes import Parallelism, Workload
from keel.analysis.scale.step import StepCost, step_cost

NEMO = (
    "[NeMo RL 0.4](https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md)"
)
DEEPSEEK = "[DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 1"
BAICHUAN = "[Baichuan-7B, issue 137](https://github.com/baichuan-inc/Baichuan-7B/issues/137)"
LLAMA = (
    "[Llama 3.1's model card]"
    "(https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md)"
)
PROMPT = 110
"""Tokens of a prompt in NeMo's runs: its tokens per second, seconds and devices give the tokens of
a step, which exceed the completions' by 102 to 130 a sequence."""
GROUP = 32
"""Completions of a prompt there: assumed; it decides prefill alone, which is under 1 %."""


@dataclass(frozen=True)
class Published:
    """A figure of a published run and what the model predicts for it."""

    name: str
    setting: str
    unit: str
    measured: float
    predicted: float
    source: str
    cost: StepCost | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Row:
    """A row of NeMo RL's table; `train` is tensor, context and pipeline parallel."""

    model: str
    separate: bool
    longest: int
    mean: int
    devices: int
    sequences: int
    tensor: int
    train: tuple[int, int, int]
    seconds: float


ROWS = (
    Row("Llama-3.1-8B", False, 4096, 1060, 16, 2048, 1, (1, 1, 2), 97.7),
    Row("Llama-3.1-8B", True, 4096, 1129, 16, 2048, 1, (1, 1, 2), 74.6),
    Row("DeepSeek-V3", False, 1536, 745, 256, 512, 32, (1, 1, 16), 154),
    Row("DeepSeek-V3", True, 1536, 744, 512, 512, 32, (1, 1, 16), 77.9),
    Row("Qwen3-235B-A22B", False, 8192, 5671, 128, 512, 16, (2, 2, 8), 506),
    Row("Qwen3-235B-A22B", True, 8192, 5691, 256, 512, 8, (4, 1, 8), 241),
    Row("Qwen3-30B-A3B", False, 4096, 3154, 32, 2048, 4, (2, 1, 1), 225),
    Row("Qwen3-30B-A3B", True, 4096, 3158, 32, 2048, 2, (1, 1, 2), 244),
    Row("Qwen3-32B", False, 4096, 3206, 32, 2048, 4, (4, 1, 4), 393),
    Row("Qwen3-32B", True, 4096, 3207, 64, 2048, 4, (4, 1, 4), 215),
)


def of_nemo(row: Row) -> Published:
    """Two scoring passes (policy and reference), optimizer batches of 512; where both sides have
    their own devices, half each."""
    side = row.devices // 2 if row.separate else row.devices
    copy = row.train[0] * row.train[1] * row.train[2]
    spread = Parallelism(
        side,
        side,
        tensor=row.tensor,
        model=copy,
        pipeline=row.train[2],
        separate=row.separate,
        micro_tokens=row.longest,
        offloaded=True,
    )
    work = Workload(
        *(row.sequences, GROUP, PROMPT, row.mean, row.longest - PROMPT),
        scored=2,
        minibatches=row.sequences // 512,
        packed=False,
    )
    cost = step_cost(MODELS[row.model], HARDWARE["H100"], DEFAULT, spread, work)
    mode = "one step off" if row.separate else "synchronous"
    setting = f"{row.devices} H100, {row.sequences:,} × {row.mean:,} of {row.longest:,}, {mode}"
    return Published(row.model, setting, "s per step", row.seconds, cost.seconds, NEMO, cost)


def hours(model: str, machine: str, context: float, tokens: float) -> float:
    """Device hours of pre-training without recomputation: tokens · 3·forward / reached flop/s."""
    shape, device = MODELS[model], HARDWARE[machine]
    reached = device.flops * DEFAULT.train * (DEFAULT.sparse if shape.experts else 1)
    return tokens * training_flops(shape, context, checkpointing=False) / reached / 3600


def published() -> list[Published]:
    """All of them."""
    return [
        *map(of_nemo, ROWS),
        Published(
            "DeepSeek-V3",
            "pre-training on 2,048 H800 in FP8, sequences of 4,096",
            "thousand H800 hours per 10¹² tokens",
            180,
            hours("DeepSeek-V3", "H800", 2048, 1e12) / 1e3,
            DEEPSEEK,
        ),
        Published(
            "Llama-3.1-405B",
            "pre-training, 15·10¹² tokens, sequences of 8,192",
            "million H100 hours",
            30.84,
            hours("Llama-3.1-405B", "H100", 4096, 15e12) / 1e6,
            LLAMA,
        ),
        Published(
            "Baichuan-7B",
            "pre-training on a thousand A800",
            "Tflop/s per device",
            182,
            HARDWARE["A800"].flops * DEFAULT.train / 1e12,
            BAICHUAN,
        ),
    ]


def summary(found: Sequence[Published], error: Callable[[Published], float]) -> tuple[float, float]:
    """The median and the largest absolute error."""
    errors = sorted(abs(error(one)) for one in found)
    middle = len(errors) // 2
    median = errors[middle] if len(errors) % 2 else (errors[middle - 1] + errors[middle]) / 2
    return median, errors[-1]


if __name__ == "__main__":
    for one in published():
        parts = ""
        if one.cost is not None:
            cost = one.cost
            parts = f"gen {cost.generation:.0f} (tail {cost.tail:.0f}) score {cost.score:.0f} "
            parts += f"update {cost.update:.0f} sync {cost.sync:.1f}"
        size = parameters(MODELS[one.name]) / 1e9
        print(
            f"{one.name} {size:.0f}B {one.setting}: {one.measured:g} {one.unit}, "
            f"predicted {one.predicted:.1f} ({one.error:+.0%}) {parts}"
        )
