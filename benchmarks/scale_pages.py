"""The tables of docs/scale.md: from benchmarks/scale.json, and from the cost model itself."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.scale_published import Published, published
from keel.analysis.scale.catalogue import DEFAULT, HARDWARE, MODELS
from keel.analysis.scale.counts import multiplied, parameters
from keel.analysis.scale.lengths import expected_maximum
from keel.analysis.scale.plan import MODEL, WORTH, ScalePlan, best_plan, scaling_limit
from keel.analysis.scale.shapes import Workload
from keel.analysis.scale.step import staleness

PAGE = Path(__file__).resolve().parent.parent / "docs" / "scale.md"
TABLE = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)
APPLIED = ("Qwen2.5-1.5B", "Qwen2.5-7B", "Llama-3.1-70B", "DeepSeek-V3")
DEVICES = (8, 64, 1024)
MACHINE = HARDWARE["H100"]
WORK = Workload(sequences=2048, group=16, prompt=512, mean=4096, most=16_384)
DOLLARS = 2.0
"""An hour of a device: what DeepSeek-V3's report assumes (December 2024)."""
GB = 1e9


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def seconds(value: float) -> str:
    """Three digits at most, and none after the point from 10 on."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(value: float) -> str:
    return f"{100 * value:+.0f} %".replace("-", "−")


# ---------------------------------------------------------------- measured


def fitted_table(found: Mapping[str, Any]) -> str:
    """What was measured of the machine, and the efficiencies that fit its parts."""
    own, rate = found["machine"], found["fitted"]
    reduced = statistics.median(one["bytes_per_second"] for one in found["all_reduce"])
    rows = (
        ("float32 matmul of 1,024³, one thread", f"{own['flops'] / 1e9:.0f} Gflop/s", "measured"),
        ("copy of 128 MiB, read and written", f"{own['bandwidth'] / 1e9:.1f} GB/s", "measured"),
        ("all-reduce, gloo, two processes", f"{reduced / 1e6:.0f} MB/s", "measured, median"),
        ("a decode step", f"{1e3 * rate['step_overhead']:.2g} ms", "fitted"),
        ("a layer of a decode step", f"{1e3 * rate['layer_overhead']:.2g} ms", "fitted"),
        ("share of the matmul in decoding", f"{rate['decode']:.2g}", "fitted"),
        ("a micro-batch of the update", f"{1e3 * rate['pass_overhead']:.2g} ms", "fitted"),
        ("share of the matmul in the update", f"{rate['train']:.2g}", "fitted"),
        ("share of the copy in the optimizer", f"{rate['bandwidth']:.2g}", "fitted"),
    )
    return markdown(("part", "figure", ""), rows)


def step_errors(found: Mapping[str, Any]) -> list[float]:
    """Predicted over measured less one, of whole steps."""
    return [sum(one["predicted"].values()) / one["measured"]["cpu"] - 1 for one in found["steps"]]


def steps_table(found: Mapping[str, Any]) -> str:
    """Steps of sizes and settings that were not fitted."""
    rows = []
    for one, error in zip(found["steps"], step_errors(found), strict=True):
        law = f"{one['mean']}" if one["mean"] == one["most"] else f"{one['mean']} of {one['most']}"
        measured, predicted = one["measured"], one["predicted"]
        rows.append(
            (
                f"{one['hidden']} × {one['layers']}",
                f"{one['completions']}",
                law,
                f"{measured['cpu']:.2f}",
                f"{predicted['rollout']:.2f} + {predicted['update']:.2f}",
                percent(error),
            )
        )
    head = (
        *("width × layers", "completions", "tokens", "step measured, s"),
        *("rollout + update predicted, s", "error"),
    )
    return markdown(head, rows) + "\n\n" + _errors("Steps", step_errors(found))


def _errors(what: str, errors: Sequence[float]) -> str:
    sizes = [abs(one) for one in errors]
    middle, worst = 100 * statistics.median(sizes), 100 * max(sizes)
    return f"{what}: absolute error {middle:.0f} % in the median, {worst:.0f} % at worst."


# ---------------------------------------------------------------- published


def published_table() -> str:
    """Steps of others' runs and the model's."""
    rows, found = [], published()
    for one in found:
        parts = "—"
        if one.cost is not None:
            cost = one.cost
            times = (cost.generation, cost.tail, cost.score, cost.update, cost.sync)
            parts = " / ".join(map(seconds, times))
        rows.append(
            (
                one.name,
                one.setting,
                f"{one.measured:g} {one.unit}",
                seconds(one.predicted),
                percent(one.error),
                parts,
            )
        )
    head = (
        "model",
        "run",
        "published",
        "predicted",
        "error",
        "generation / tail / score / update / sync, s",
    )

    def errors(chosen: Callable[[Published], bool]) -> list[float]:
        return [one.error for one in found if chosen(one)]

    return "\n\n".join(
        (
            markdown(head, rows),
            _errors("All", errors(lambda one: True)),
            _errors("Steps of dense models", errors(_dense)),
            _errors("Steps of mixtures of experts", errors(_sparse)),
        )
    )


def _dense(one: Published) -> bool:
    return one.cost is not None and not MODELS[one.name].experts


def _sparse(one: Published) -> bool:
    return one.cost is not None and bool(MODELS[one.name].experts)


# ---------------------------------------------------------------- applied


def models_table() -> str:
    """The models of the application."""
    rows = [
        (name, f"{parameters(MODELS[name]):,}", f"{multiplied(MODELS[name]):,}") for name in APPLIED
    ]
    return markdown(("model", "weights", "multiplied with a token"), rows)


def plans_table() -> str:
    """The fastest layout of each model on 8, 64 and 1,024 devices."""
    rows = []
    for name in APPLIED:
        for devices in DEVICES:
            for separate in (False, True):
                plan = best_plan(MODELS[name], MACHINE, DEFAULT, devices, WORK, separate)
                spread, cost, memory = plan.spread, plan.cost, plan.memory
                held = f"{memory.training / GB:.0f} / {memory.sampling / GB:.0f}"
                first = (name, f"{devices:,}", "async" if separate else "sync")
                if not plan.fits:
                    rows.append((*first, "does not fit", held, *["—"] * 9))
                    continue
                share = f"{spread.trainers}+{spread.samplers}, " if separate else ""
                split = f"m{spread.model}, " if spread.model > 1 else ""
                layout = f"{share}{split}s{spread.shards}, t{spread.tensor}"
                layout += ", recompute" if spread.checkpointing else ""
                times = (cost.generation, cost.tail, cost.score, cost.update, cost.sync)
                rows.append(
                    (
                        *first,
                        layout,
                        held,
                        *map(seconds, times),
                        f"**{seconds(cost.seconds)}**",
                        f"{cost.tokens_per_device:,.0f}",
                        f"{cost.price(DOLLARS):,.0f}",
                        f"{lag(plan)}" if separate else "0",
                    )
                )
    head = (
        *("model", "GPUs", "mode", "layout", "GB train / sample"),
        *("generation", "of it tail", "score", "update", "sync", "step, s"),
        *("tokens/s per GPU", "$ per 1,000 steps", "lag"),
    )
    return markdown(head, rows)


def lag(plan: ScalePlan) -> int:
    """Versions that the oldest token of an asynchronous batch lies behind."""
    rows = max(WORK.sequences * plan.spread.tensor / plan.spread.samplers, 1.0)
    # All rows of an engine are decoded at once: a mean sequence takes the batch's seconds.
    longest = expected_maximum(WORK.mean, WORK.most, rows)
    return staleness(longest, plan.cost.generation / WORK.mean, plan.cost.seconds)


def limits_table() -> str:
    """Up to how many devices doubling them is worth it."""
    rows = []
    for name in APPLIED:
        for separate in (False, True):
            limit = scaling_limit(MODELS[name], MACHINE, DEFAULT, WORK, separate)
            mode = "async" if separate else "sync"
            if limit is None:
                rows.append((name, mode, "does not fit", "—", "—", "—"))
                continue
            gain = f"{limit.gain:.2f} ×" if limit.gain else "not reached"
            counts = (f"{limit.first:,}", f"{limit.devices:,}")
            rows.append((name, mode, *counts, gain, limit.part))
    head = ("model", "mode", "fits from", "scales to", "next doubling", "largest part there")
    return markdown(head, rows)


def constants_table() -> str:
    """The default efficiencies and the devices' figures."""
    rows = [
        (
            one.name,
            f"{one.flops / 1e12:.0f}",
            f"{one.bandwidth / 1e12:.2f}",
            *(f"{size / GB:.0f}" for size in (one.memory, one.link, one.network)),
        )
        for one in HARDWARE.values()
    ]
    head = ("device", "Tflop/s, bf16", "memory, TB/s", "memory, GB", "node, GB/s", "network, GB/s")
    rate = DEFAULT
    shares = (
        f"Efficiencies: update {rate.train:g} and scoring {rate.forward:g} of the flop/s, times "
        f"{rate.sparse:g} for mixtures of\nexperts; decoding {rate.bandwidth:g} of the memory's "
        f"bytes/s or {rate.decode:g} of the flop/s; networks {rate.network:g}. A decode step adds\n"
        f"{1e3 * rate.step_overhead:g} ms, an all-reduce {1e6 * rate.hop:g} µs (150 across nodes), "
        f"two a layer. A doubling that gains less than {WORTH:g} × does not\nscale. Copies over "
        f"{', '.join(map(str, MODEL))} GPUs are tried where FSDP alone does not fit."
    )
    return markdown(head, rows) + "\n\n" + shares


def tables(found: Mapping[str, Any]) -> dict[str, Callable[[], str]]:
    """All tables by name."""
    return {
        "fitted": lambda: fitted_table(found),
        "steps": lambda: steps_table(found),
        "published": published_table,
        "models": models_table,
        "plans": plans_table,
        "limits": limits_table,
        "constants": constants_table,
    }


def filled(text: str, found: Mapping[str, Any]) -> str:
    """The page with its tables as the code and the file have them."""
    made = tables(found)
    return TABLE.sub(
        lambda one: f"<!-- table {one[1]} -->\n\n{made[one[1]]()}\n\n<!-- end -->", text
    )


def write(found: Mapping[str, Any]) -> None:
    """Fill the page."""
    PAGE.write_text(filled(PAGE.read_text("utf-8"), found), "utf-8")
