"""The parts of `gpu.py`, each in a process: `python -m benchmarks.gpu_parts FUNCTION JOB ROWS`.

Models are Qwen2.5's by shape, with random weights made on the card. A row says what was measured;
what is expected is counted (`keel.analysis.costs`) from the card's figures, a decoded step's floor
from the bandwidth that a copy was measured to have. Only what has a number asked is judged.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import expected as expectation
from benchmarks.gpu_job import Job, seen
from benchmarks.gpu_kernels import decode, kernels
from benchmarks.loop_keel import recipe
from benchmarks.sides import SEED, Size, measure
from keel.analysis.cards import GIB
from keel.analysis.costs import Budget

EARLY = 2
"""Steps that are not counted: kernels are compiled, graphs captured, memory taken."""
MFU = {"0.5B": 35, "1.5B": 45}
"""Asked of the update, in percent."""
BUDGETS = {"0.5B": 16_384, "1.5B": 8_192}
"""Tokens of a micro-batch: the activations of more at 1.5B do not fit into 80 GB."""


def odd(*, completions: Sequence[str], **columns: Any) -> list[float]:
    """The reward: the share of characters with an odd number."""
    return [sum(ord(letter) % 2 for letter in text) / max(len(text), 1) for text in completions]


# ---------------------------------------------------------------- the loop


def loop(job: Job) -> None:
    """Steps of GRPO; with `saving` those that have to fit into 40 GiB, with `compiled` those whose
    updates are compiled, too."""
    keys: dict[str, Any] = {"token_budget": BUDGETS[job.size]}
    if job.compiled:
        keys["model.compile"] = True
    if job.saving:
        job.shrink(40 * GIB)
        keys = {"model.activation_checkpointing": True, "token_budget": 4096}
    train(job, torch.float32, keys, steps=EARLY + (1 if job.saving else 3))


def qlora(job: Job) -> None:
    """Steps on a frozen base in 4 bits, on a card that is made to have 24 GB."""
    from importlib.util import find_spec

    if find_spec("bitsandbytes") is None:
        return job.row("QLoRA", note="skipped: bitsandbytes is not installed; see --wheels")
    job.shrink(24e9)
    keys = {
        "model.quantisation": "nf4",
        "model.lora.rank": 16,
        "model.activation_checkpointing": True,
        "token_budget": 4096,
    }
    return train(job, job.dtype, keys, steps=EARLY + 1, completions=16 if job.dry else 64)


def policy_of(job: Job, spec: Any, dtype: torch.dtype) -> Any:
    """What `load_policy` would load from a folder, without the folder."""
    from keel.models import lora
    from keel.models.families import note_choices, prepare
    from keel.models.policy import Policy

    model = job.model(job.size, dtype)
    note_choices(model, spec)
    more: dict[str, Any] = {}
    if spec.quantisation is not None:
        from keel.models.quantised import QuantisationEffect, QuantisedLinear

        linear = [n for n, m in model.base_model.named_modules() if type(m) is torch.nn.Linear]
        for path in linear:  # each weight is freed before the next one is quantised
            parent, _, name = path.rpartition(".")
            owner = model.base_model.get_submodule(parent)
            setattr(owner, name, QuantisedLinear(getattr(owner, name), model.device))
        model.float()  # what is not in 4 bits is as model.dtype says
        more["quantisation"] = QuantisationEffect(1.0, "random", 0.0, 0.0, 0)
    prepare(model, spec.autocast)
    if spec.lora is not None:
        lora.add_lora(model, spec.lora, SEED)
    return Policy(
        model,
        job.tokenizer(job.size),
        autocast=spec.autocast,
        activation_checkpointing=spec.activation_checkpointing,
        **more,
    )


def train(
    job: Job, dtype: torch.dtype, keys: dict[str, Any], *, steps: int, completions: int = 0
) -> None:
    """Run the loop and report after each step; the process ends after the last one, so that no
    checkpoint is written."""
    from keel.config.load import load_recipe
    from keel.runs.callbacks import Callback, RunState
    from keel.training import run

    work, folder = job.work, job.folder / "model"
    config = job.config(job.size)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    job.tokenizer(job.size).save_pretrained(folder)
    write_prompts(job, "prompts", work.completions)
    write_prompts(job, "validation", 1)
    given = {
        "model": str(folder),
        "prompts": str(job.folder / "prompts.jsonl"),
        "validation": str(job.folder / "validation.jsonl"),
        "seed": SEED,
        "learning_rate": 1e-7,
        "group": expectation.GROUP,
        "completions": completions or work.completions,
        "max_tokens": work.most if not completions else work.most // 2,
        "steps": 1000,
        "threads": None,
    }
    made = recipe(given)
    del made["threads"]
    made["model"]["device"] = job.device
    made["stages"][0]["rewards"]["functions"] = [{"function": "benchmarks.gpu_parts:odd"}]
    for key, value in keys.items():
        table, parts = (made if "." in key else made["stages"][0]), key.split(".")
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = value
    shape = []

    def load(spec: Any, _: int) -> Any:
        made = policy_of(job, spec, dtype)
        shape.append(made.shape)
        return made

    run.load_policy = load  # type: ignore[attr-defined]

    class Steps(Callback):
        """Reports."""

        def on_step(self, state: RunState) -> None:
            if state.step > EARLY:
                report(job, state.folder, shape[0])
            if state.step == steps:
                os._exit(0)

    run.train(load_recipe(made), job.folder / "run", callbacks=[Steps()])


def write_prompts(job: Job, name: str, count: int) -> None:
    """Random letters, of about as many tokens as `work` says."""
    rng = random.Random(f"{SEED} {name}")
    every = (rng.choices("abcdefghij", k=rng.randint(*job.work.short)) for _ in range(count))
    lines = (json.dumps({"prompt": "".join(letters)}) + "\n" for letters in every)
    (job.folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")


def report(job: Job, folder: Path, shape: Any) -> None:
    """The rows of a loop: medians over its counted steps."""
    from keel.runs.reader import load

    done = load(folder)
    rows = [{**a, **b} for a, b in zip(done.metrics(), done.timings(), strict=False)][EARLY:]

    def median(key: str) -> float | None:
        found = [one[key] for one in rows if key in one]
        return statistics.median(found) if found else None

    size, name = job.size, f"{job.size}{', 4,096 tokens, checkpointing' * job.saving}"
    name += ", model.compile = true" * job.compiled
    whole = size in MFU and not job.saving
    speed = median("speed/step")
    wanted = 10 * expectation.TRL if size == "0.5B" else None
    one = seen() if whole and not job.dry else None
    counted = None
    if one is not None and one.peak:
        counted = expectation.loop_tokens(shape, one, expectation.UTILISATION[size])
    job.row(
        f"loop, completion tokens/s: {name}",
        speed,
        expected=counted,
        asked=f"≥ {wanted:,}" if wanted and whole else "",
        met=speed >= wanted if wanted and whole and speed and not job.dry else None,
        note=f"mean length {(median('completions/mean_length') or 0):.0f}",
    )
    job.row(f"loop, s a step: {name}", median("total"))
    job.row(f"loop, s by phase: {name}", phases(folder))
    job.row(f"loop, generated tokens/s: {name}", median("speed/generation"))
    utilisation = median("mfu/update")
    if whole and utilisation is not None:
        percent, least = 100 * utilisation, MFU[size]
        given = {"expected": least, "asked": f"≥ {least}", "met": percent >= least}
        job.row(f"MFU of the update, %: {name}", percent, **given)
    peaks = [value for one in rows for key, value in one.items() if key.startswith("memory/")]
    if not job.dry:
        peaks.append(torch.cuda.max_memory_reserved() / GIB)
        most = 40 if job.saving else 24e9 / GIB if size == "7B" else None
        asked = f"≤ {most:.3g}" if most else ""
        fits = max(peaks) <= most if most else None
        counted = planned(job)
        job.row(f"peak memory, GiB: {name}", max(peaks), expected=counted, asked=asked, met=fits)
    keys = ("sampling/kl/k1", "sampling/kl/k3", "sampling/effective_sample_size")
    gaps = (f"{key.split('/')[-1]} {median(key):.2g}" for key in keys if median(key) is not None)
    job.row(f"engine mismatch: {name}", ", ".join(gaps))


def phases(folder: Path) -> str:
    """The median seconds of a step's phases, without the early steps."""
    from keel.runs.reader import load

    rows = load(folder).timings()[EARLY:]
    found = {
        phase: statistics.median(row[phase] for row in rows if phase in row)
        for phase in ("rollout", "score", "update", "sync", "record")
        if any(phase in row for row in rows)
    }
    return ", ".join(f"{phase} {seconds:.4f}" for phase, seconds in found.items())


def planned(job: Job) -> float | None:
    """GiB that `benchmarks.expected` counts for this run, without the cache's pages."""
    size = job.size if job.saving or job.size != "1.5B" else None
    plans = [plan for plan, _ in expectation.plans().values()]
    found = next((p for p in plans if p.shape == expectation.qwen(size or "0.5B")), None)
    return None if size is None or found is None else Budget(found, seen()).total / GIB


def trl(job: Job) -> None:
    """TRL's step with the model and prompts of part d, bfloat16 autocast, micro-batches of 32."""
    if job.trl_python is None:
        return job.row("TRL", note="skipped: name its Python by --trl-python")
    work, folder = job.work, job.folder / "model"
    job.model(job.size, torch.float32).save_pretrained(folder)
    job.tokenizer(job.size).save_pretrained(folder)
    write_prompts(job, "prompts", work.completions)
    if not job.dry:
        torch.cuda.empty_cache()
    given = {
        "model": str(folder), "prompts": str(job.folder / "prompts.jsonl"),
        "seed": SEED, "learning_rate": 1e-7,
        "group": expectation.GROUP, "completions": work.completions, "max_tokens": work.most,
        "steps": 3, "threads": os.cpu_count() or 1, "micro": min(32, work.completions),
        "bf16": not job.dry, "device": job.device,
    }  # fmt: skip
    done = measure("loop_trl.py", given, job.trl_python)
    rates = [a / b for a, b in zip(done["tokens"], done["seconds"], strict=True)][1:]
    name = f"TRL's loop, completion tokens/s: {job.size}"
    job.row(name, statistics.median(rates), expected=expectation.TRL)
    return None


# ---------------------------------------------------------------- profiles, quickstart


def profiles(job: Job) -> None:
    """The kernels that take most time in 32 decoded tokens, and in a micro-batch."""
    from benchmarks import update
    from keel.config.stage import Optimizer
    from keel.engines.native import NativeEngine
    from keel.learn.learner import Learner
    from keel.learn.memory import TokenBudget
    from keel.learn.optimizer import WeightOptimizer, trainable
    from keel.types import Prompt, Sampling

    job.size = "0.5B"
    policy = policy_of(job, load_spec(job), torch.float32)
    vocabulary = int(policy.model.config.vocab_size)
    rng = random.Random(SEED)
    rows, length, tokens = (4, 6, 4) if job.dry else (64, 100, 32)
    prompts = [
        Prompt(f"{i}", "", tokens=tuple(rng.choices(range(2, vocabulary), k=length)))
        for i in range(rows)
    ]
    engine = NativeEngine(policy.model, policy.tokenizer)
    sampling = Sampling(tokens, ignore_eos=True)
    top(job, f"{tokens} decoded tokens", lambda: engine.sample(prompts, 1, sampling, SEED))
    optimizer = WeightOptimizer(trainable(policy.model), Optimizer())
    learner = Learner(policy, optimizer, TokenBudget(16_384))
    some = Size(0, 0, 8, 8 if job.dry else 512, 0)
    batch = update.batches(vocabulary, some, length, job.device)["once"]
    top(job, "a micro-batch", lambda: update.seconds(learner, batch))


def load_spec(job: Job) -> Any:
    from keel.config.model import Model

    return Model(name="random", device="cpu" if job.dry else "auto")


def top(job: Job, what: str, call: Callable[[], Any], count: int = 16) -> None:
    """Rows of the kernels that took most time in a call, after one call before."""
    from torch.profiler import ProfilerActivity, profile

    call()
    job.wait()
    kinds = [ProfilerActivity.CPU] if job.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    start = time.perf_counter()
    with profile(activities=kinds) as seen:
        call()
        job.wait()
    wall = time.perf_counter() - start
    key = "self_cpu_time_total" if job.dry else "self_device_time_total"
    # Operators repeat the time of their kernels, which are events of their own.
    events = [
        event
        for event in seen.key_averages()
        if job.dry
        or (
            str(event.device_type).endswith("CUDA")
            and not getattr(event, "is_user_annotation", False)
        )
    ]
    events.sort(key=lambda event: getattr(event, key), reverse=True)
    busy = sum(getattr(event, key) for event in events) / 1e3
    job.row(f"profile of {what}: kernels, ms", busy, expected=1e3 * wall, note="expected: the wall")
    for place, event in enumerate(events[:count], 1):
        taken = getattr(event, key) / 1e3
        name = f"profile of {what} {place:2}: {event.key[:90]}"
        job.row(name, taken, note=f"ms, {taken / max(busy, 1e-9):.0%}, {event.count} calls")


def quickstart(job: Job) -> None:
    """Seconds of a step of reinforcement learning, median after five."""
    from keel.config import recipes
    from keel.config.load import load_recipe
    from keel.runs.callbacks import Callback, RunState
    from keel.training.run import train as run

    made = tomllib.loads((Path(recipes.__path__[0]) / "quickstart.toml").read_text("utf-8"))
    made["model"]["device"] = job.device
    first, second = made["stages"]
    first["steps"], second["steps"] = (1, 6) if job.dry else (20, 40)
    first["optimizer"]["warmup_steps"] = 1
    if job.dry:
        second["rollout"]["prompts_per_step"] = 2
    second["evaluation"] = {"prompts": 0}
    steps: list[float] = []

    class Steps(Callback):
        """Reports."""

        def on_step(self, state: RunState) -> None:
            if state.kind == second["stage"] and state.step > 5:
                steps.append(state.seconds)
                taken = statistics.median(steps)
                met = None if job.dry else taken <= 0.1
                job.row("quickstart, s a step", taken, asked="≤ 0.1", met=met)
                job.row("quickstart, s by phase", phases(state.folder))

    run(load_recipe(made), job.folder / "run", callbacks=[Steps()])


PARTS = {one.__name__: one for one in (kernels, decode, loop, qlora, trl, profiles, quickstart)}


def main() -> None:
    name, given, rows = sys.argv[1:]
    job = json.loads(Path(given).read_text("utf-8"))
    found = Job(**{**job, "folder": Path(job["folder"]), "rows": Path(rows)})
    if not found.dry and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA GPU: --dry-run runs all parts on a CPU")
    PARTS[name](found)


if __name__ == "__main__":
    main()
