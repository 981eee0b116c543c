"""The cost model of docs/scale.md on this machine: parts measured, efficiencies fitted, steps
predicted of models and settings that were not fitted.

    python -m benchmarks.scale                       # prints the tables
    python -m benchmarks.scale --write               # and writes benchmarks/scale.json and the page
    python -m benchmarks.scale --pages               # writes the page, measures nothing
    python -m benchmarks.scale --smoke               # tiny, in seconds

Parts: a float32 matmul, a copy of memory, the native engine's decode steps of equal lengths, the
update of a batch (`keel.learn.learner.backward`), the optimizer's step, and an all-reduce of a
model's gradients between two processes (gloo). Seconds are the processor's, except of the
all-reduce. Three numbers are fitted to the decode steps
(seconds of a step, of a layer, and a share of the matmul's flop/s), and two to the updates
(seconds of a micro-batch, a share of the flop/s). Then
`keel train` runs whole steps of other widths, depths, batches and lengths (`benchmarks.loop_keel`),
and the model's seconds are compared with theirs. Models have float32 weights; one thread.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from benchmarks.loop_keel import ALPHABET, prepare
from benchmarks.update import BUDGET, Case, grpo, learner_of, prepared, rollouts
from keel.analysis.scale.counts import parameters, ring_bytes
from keel.analysis.scale.shapes import Efficiency, Hardware, ModelShape, Parallelism, Workload
from keel.analysis.scale.step import (
    decode_seconds,
    generation_seconds,
    optimizer_seconds,
    pass_seconds,
)
from keel.config.model import Model
from keel.engines.native import NativeEngine
from keel.learn.learner import backward
from keel.learn.optimizer import step_all
from keel.models.policy import Policy, load_policy
from keel.types import Prompt, Sampling

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).with_name("scale.json")
FLOAT = 4
VOCABULARY = len(ALPHABET) + 2
PROMPT = 20
GROUP = 8
ALONE = Parallelism(1, 1, checkpointing=False, micro_tokens=BUDGET)


@dataclass(frozen=True)
class Size:
    """A model of four heads and an MLP of four times its width."""

    hidden: int
    layers: int


@dataclass(frozen=True)
class Step:
    """A whole step to predict: completions of a mean length, cut at `most`, or all as long."""

    size: Size
    completions: int
    mean: int
    most: int

    @property
    def work(self) -> Workload:
        return Workload(
            self.completions, GROUP, PROMPT, self.mean, self.most, scored=0, minibatches=1
        )


@dataclass(frozen=True)
class Scope:
    """What is measured: for the fit, and for the comparison."""

    sizes: tuple[Size, ...]
    rows: tuple[int, ...]
    steps: tuple[Step, ...]
    repeats: int
    length: int


FULL = Scope(
    (Size(64, 2), Size(128, 4), Size(256, 6)),
    (8, 32, 64),
    (
        Step(Size(96, 3), 32, 40, 40),
        Step(Size(96, 3), 64, 60, 200),
        Step(Size(192, 5), 32, 40, 40),
        Step(Size(192, 5), 64, 60, 200),
        Step(Size(320, 8), 16, 80, 80),
        Step(Size(320, 8), 48, 40, 160),
    ),
    repeats=3,
    length=40,
)
SMOKE = Scope((Size(32, 1), Size(64, 2)), (8,), (Step(Size(48, 2), 8, 8, 8),), 1, 6)


# ---------------------------------------------------------------- parts


def median_seconds(
    once: Callable[[], object], repeats: int, clock: Callable[[], float] = time.process_time
) -> float:
    """The median of some passes, after one that does not count.

    The clock is of the process, which other programs on the machine change less than the wall's;
    with one thread and nothing to wait for, both show the same on a quiet machine.
    """
    once()
    passes = []
    for _ in range(repeats):
        start = clock()
        once()
        passes.append(clock() - start)
    return statistics.median(passes)


def machine(repeats: int) -> Hardware:
    """This machine's flop/s of a float32 matmul and bytes/s of a copy, read and written."""
    size, numbers = 1024, 2**25
    left, right = torch.randn(size, size), torch.randn(size, size)
    source, target = torch.zeros(numbers), torch.zeros(numbers)
    flops = 2 * size**3 / median_seconds(lambda: left @ right, repeats)
    copied = 2 * FLOAT * numbers / median_seconds(lambda: target.copy_(source), repeats)
    return Hardware("this machine", flops, copied, 1e15, copied, copied)


def model_in(folder: Path, size: Size, mean: int, most: int) -> Path:
    """A folder with models of a size: `ragged` and `equal` lengths, and prompts."""
    own = folder / f"{size.hidden}-{size.layers}-{mean}-{most}"
    if not own.exists():
        own.mkdir(parents=True)
        lengths = {"mean": mean, "most": most, "short": (PROMPT, PROMPT), "long": (PROMPT, PROMPT)}
        prepare({**asdict(size), **lengths}, own)
    return own


def shape_of(policy: Policy) -> ModelShape:
    """The shape that a model's config describes; its count of weights is checked."""
    config = policy.model.config
    shape = ModelShape(
        "built",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query=config.hidden_size,
        key_value=config.num_key_value_heads * config.head_dim,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings,
        vectors=2 * config.hidden_size,
    )
    assert parameters(shape) == sum(p.numel() for p in policy.model.parameters())
    return shape


def policy_of(folder: Path) -> Policy:
    return load_policy(Model(name=str(folder), device="cpu"), 0)


def decode_parts(folder: Path, scope: Scope) -> list[dict[str, Any]]:
    """Seconds of a decode step, for each size and number of rows."""
    found = []
    for size, rows in itertools.product(scope.sizes, scope.rows):
        policy = policy_of(model_in(folder, size, scope.length, scope.length) / "equal")
        engine = NativeEngine(policy.model, policy.tokenizer)
        prompts = [
            Prompt(f"{i}", "", tokens=tuple(range(2 + i, 2 + i + PROMPT)))
            for i in range(rows // GROUP)
        ]

        def once(
            engine: NativeEngine = engine,
            prompts: Sequence[Prompt] = tuple(prompts),
            tokens: int = scope.length,
        ) -> None:
            engine.sample(prompts, GROUP, Sampling(max_tokens=tokens), 0)

        seconds = median_seconds(once, scope.repeats) / scope.length
        found.append({**asdict(size), "rows": rows, "seconds": seconds})
    return found


def update_parts(folder: Path, scope: Scope) -> list[dict[str, Any]]:
    """Seconds of an update, forward and backward, and of the optimizer's step, for each size and
    number of sequences."""
    found = []
    for size, rows in itertools.product(scope.sizes, scope.rows):
        policy = policy_of(model_in(folder, size, scope.length, scope.length) / "equal")
        learner, row = learner_of(policy), grpo()
        batch = prepared(
            row,
            rollouts(VOCABULARY, Case("equal", PROMPT, GROUP, rows, scope.length)),
            shared=True,
        )
        update = median_seconds(
            lambda: backward(learner, row, replace(batch), 0.0, BUDGET),  # noqa: B023
            scope.repeats,
        )

        def apply() -> None:
            for parameter in policy.model.parameters():  # noqa: B023
                parameter.grad = torch.ones_like(parameter)
            step_all([learner.optimizer], [1e-6])  # noqa: B023

        stepped = median_seconds(apply, scope.repeats)
        found.append({**asdict(size), "rows": rows, "seconds": update, "optimizer": stepped})
    return found


def all_reduce_parts(folder: Path, scope: Scope) -> list[dict[str, Any]]:
    """Seconds of an all-reduce of a model's gradients between two processes."""
    found = []
    for size in scope.sizes:
        policy = policy_of(model_in(folder, size, scope.length, scope.length) / "equal")
        numbers = parameters(shape_of(policy))
        place = folder / f"rendezvous-{numbers}"
        command = [sys.executable, "-m", "benchmarks.scale", "--rank"]
        settings = [str(place), str(numbers), str(scope.repeats)]
        around = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        pair = [
            subprocess.Popen(
                [*command, str(rank), *settings],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=around,
            )
            for rank in range(2)
        ]
        printed = [one.communicate(timeout=300)[0] for one in pair]
        seconds = float(printed[0])
        moved = 2 * ring_bytes(FLOAT * numbers, 2)
        found.append({**asdict(size), "seconds": seconds, "bytes_per_second": moved / seconds})
    return found


def reduce_rank(rank: int, place: str, numbers: int, repeats: int) -> float:
    """One of the two processes of an all-reduce."""
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    values = torch.ones(numbers)
    seconds = median_seconds(lambda: dist.all_reduce(values), repeats, time.perf_counter)
    dist.destroy_process_group()
    return seconds


# ---------------------------------------------------------------- the fit


def shape_in(size: Mapping[str, Any]) -> ModelShape:
    """The shape of a size: as `loop_keel.prepare` builds it."""
    width = int(size["hidden"])
    mlp = int(size.get("mlp", 4 * width))
    return ModelShape(
        "built", int(size["layers"]), width, width, width, mlp, VOCABULARY, True, 2 * width
    )


def fit_decode(device: Hardware, parts: Sequence[Mapping[str, Any]], length: int) -> Efficiency:
    """The seconds of a step and of a layer and the share of the flop/s with the least squares of
    predicted over measured less one: of 400 shares, each with the best seconds, which are linear
    and not negative."""
    measured = np.array([one["seconds"] for one in parts])
    layers = np.array([one["layers"] for one in parts], float)

    def solved(share: float) -> tuple[float, Efficiency]:
        rate = Efficiency(decode=share, bandwidth=1.0, step_overhead=0.0)
        roof = np.array(
            [
                decode_seconds(
                    shape_in(one), device, rate, 1, one["rows"], PROMPT + length / 2, FLOAT
                )
                for one in parts
            ]
        )
        matrix = np.stack([np.ones(len(parts)), layers], 1) / measured[:, None]
        (step, layer), rest = nnls(matrix, 1 - roof / measured)
        return rest, replace(rate, step_overhead=float(step), layer_overhead=float(layer))

    return min(map(solved, np.geomspace(1e-3, 1, 400).tolist()), key=lambda one: one[0])[1]


def fit_update(
    device: Hardware, rate: Efficiency, parts: Sequence[Mapping[str, Any]], length: int
) -> Efficiency:
    """The seconds of a micro-batch and the share of the flop/s with the least squares of predicted
    over measured less one; of the optimizer's step, the median share of the copy's bytes/s."""
    plain = replace(rate, train=1.0, bandwidth=1.0)
    ideal, stepped = [], []
    for one in parts:
        shape = shape_in(one)
        work = Workload(one["rows"], GROUP, PROMPT, length, length)
        ideal.append(pass_seconds(shape, device, plain, ALONE, work, learn=True))
        stepped.append(optimizer_seconds(shape, device, plain, ALONE) / one["optimizer"])
    measured = np.array([one["seconds"] for one in parts])
    matrix = np.stack([np.ones(len(parts)), np.array(ideal)], 1) / measured[:, None]
    (overhead, slowness), _ = nnls(matrix, np.ones(len(parts)))
    if slowness == 0:
        raise SystemExit("updates of larger models took no longer: measure again")
    share = float(1 / slowness)
    return replace(
        rate,
        train=share,
        forward=share,
        pass_overhead=float(overhead),
        bandwidth=statistics.median(stepped),
    )


def predict(device: Hardware, rate: Efficiency, step: Step, mlp: int) -> dict[str, float]:
    """Seconds of a step's sampling and update, by the cost model.

    The fit of decoding has the whole bandwidth; the fitted share is of the optimizer's.
    """
    shape = shape_in({**asdict(step.size), "mlp": mlp})
    decoding = replace(rate, bandwidth=1.0)
    sampled, _ = generation_seconds(
        shape, device, decoding, step.work, 1, 1, step.completions, FLOAT
    )
    learned = pass_seconds(shape, device, rate, ALONE, step.work, learn=True)
    learned += optimizer_seconds(shape, device, rate, ALONE)
    return {"rollout": sampled, "update": learned}


# ---------------------------------------------------------------- whole steps


def whole_step(folder: Path, step: Step, repeats: int) -> dict[str, Any]:
    """Medians over some steps of `keel train`, the first uncounted: seconds of the processor, and
    by the wall clock those of a step and of two of its phases."""
    place = model_in(folder, step.size, step.mean, step.most)
    kind = "equal" if step.mean == step.most else "ragged"
    job = {
        "steps": repeats + 1,
        "prompts": str(place / "short.jsonl"),
        "validation": str(place / "validation.jsonl"),
        "completions": step.completions,
        "group": GROUP,
        "max_tokens": step.most,
        "learning_rate": 1e-6,
        "seed": 0,
        "threads": 1,
        "model": str(place / kind),
        "keel": [],
        "folder": str(place / f"run-{step.completions}"),
    }
    asked, answer = place / "job.json", place / "result.json"
    asked.write_text(json.dumps(job), "utf-8")
    command = [sys.executable, "benchmarks/loop_keel.py", "train", str(asked), str(answer)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"keel train failed:\n{done.stderr[-2000:]}")
    found = json.loads(answer.read_text("utf-8"))
    phases = {
        name: statistics.median(row[name] for row in found["phases"][1:])
        for name in ("rollout", "update")
    }
    both = {name: statistics.median(found[name][1:]) for name in ("cpu", "seconds")}
    return {**phases, **both}


def measure(scope: Scope, folder: Path) -> dict[str, Any]:
    """All parts and whole steps."""
    device = machine(scope.repeats)
    decoded, updated = decode_parts(folder, scope), update_parts(folder, scope)
    policy = policy_of(model_in(folder, scope.sizes[0], scope.length, scope.length) / "equal")
    steps = [
        {
            **asdict(step.size),
            "completions": step.completions,
            "mean": step.mean,
            "most": step.most,
            "measured": whole_step(folder, step, scope.repeats),
        }
        for step in scope.steps
    ]
    return {
        "machine": {
            "flops": device.flops,
            "bandwidth": device.bandwidth,
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "torch": torch.__version__,
        },
        "mlp_ratio": shape_of(policy).mlp / scope.sizes[0].hidden,
        "length": scope.length,
        "decode": decoded,
        "update": updated,
        "all_reduce": all_reduce_parts(folder, scope),
        "steps": steps,
    }


def concluded(found: Mapping[str, Any]) -> dict[str, Any]:
    """The measured figures with the fit to the parts and the prediction of each step."""
    own, ratio = found["machine"], found["mlp_ratio"]
    rates = (own["flops"], own["bandwidth"])
    device = Hardware("this machine", *rates, 1e15, own["bandwidth"], own["bandwidth"])
    decoded, updated = (
        [{**one, "mlp": round(ratio * one["hidden"])} for one in found[name]]
        for name in ("decode", "update")
    )
    length = found["length"]
    rate = fit_update(device, fit_decode(device, decoded, length), updated, length)
    steps = []
    for one in found["steps"]:
        size = Size(one["hidden"], one["layers"])
        step = Step(size, one["completions"], one["mean"], one["most"])
        predicted = predict(device, rate, step, round(ratio * size.hidden))
        steps.append({**one, "predicted": predicted})
    return {**found, "fitted": asdict(rate), "steps": steps}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--smoke", action="store_true", help="tiny, in seconds")
    parser.add_argument("--write", action="store_true", help="write the JSON file and the page")
    parser.add_argument("--pages", action="store_true", help="write the page, measure nothing")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.smoke and asked.write:
        parser.error("--smoke measures too little to be written: drop --write or --smoke")
    if asked.rank:
        rank, place, numbers, repeats = asked.rank
        print(reduce_rank(int(rank), place, int(numbers), int(repeats)))
        return
    from benchmarks import scale_pages

    if not asked.pages:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            found = concluded(measure(SMOKE if asked.smoke else FULL, Path(folder)))
        print(scale_pages.fitted_table(found), scale_pages.steps_table(found), sep="\n\n")
        if asked.write:
            RESULT.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if asked.pages or asked.write:
        scale_pages.write(json.loads(RESULT.read_text("utf-8")))


if __name__ == "__main__":
    main()
