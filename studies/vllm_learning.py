"""GRPO on the quickstart's task with completions from vLLM against the native engine, over seeds.

    KEEL_VLLM_PYTHON=PYTHON python -m studies.vllm_learning --json vllm-learning.json

The quickstart, shortened to 120 supervised and 30 GRPO steps so that a run takes minutes. Both
engines start from the same supervised model of a seed and train on the same prompts, so
differences of a seed are paired. One server samples for all runs (`rollout.vllm.url`): it starts
with the weights of no run, and each run sends its own before it samples. Runs are whole `keel
train` processes; a result that the JSON file has already is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.comparison import difference_interval, iqm_interval
from keel.analysis.statistics import Interval
from keel.config.load import load_recipe, read_recipe, to_toml
from keel.config.sampling import VllmServer
from keel.engines.vllm.engine import VllmEngine
from keel.models.policy import load_policy
from keel.types import Prompt, Sampling

ROOT = Path(__file__).resolve().parent.parent
SFT_STEPS = 120
SHORTENED = (
    "rl.steps=30",
    "rl.evaluation.every=0",
    "rl.evaluation.samples=0",
    "rl.rollouts_every=0",
    'rl.algorithm.correction.kind="truncate"',
)
ENGINES = ("native", "vllm")
OTHER_SEED = 999
"""Of the weights that the server starts with; no run has it."""


@contextmanager
def server() -> Iterator[str]:
    """The address of a server with the quickstart's model, and weights that no run has."""
    policy = load_policy(load_recipe("quickstart").model, OTHER_SEED)
    engine = VllmEngine(policy.model, policy.tokenizer, server=VllmServer())
    try:
        first = Prompt(id="first", content="", tokens=tuple(policy.tokenizer("12>")["input_ids"]))
        engine.sample([first], 1, Sampling(max_tokens=1), 0)
        assert engine.process is not None
        yield engine.process.url
    finally:
        engine.close()


def run_case(engine: str, seed: int, url: str, folder: Path) -> dict[str, Any]:
    """One run: validation accuracy before and after GRPO, and what its steps measured."""
    target = folder / f"{engine}-{seed}"
    start = time.perf_counter()
    if engine == "native":
        _keel("train", "quickstart", f"sft.steps={SFT_STEPS}", *_keys(target, seed))
    else:
        recipe = _second_stage(folder, seed)
        address = f'rl.rollout.vllm.url="{url}"'
        _keel("train", str(recipe), 'rl.rollout.engine="vllm"', address, *_keys(target, seed))
    seconds = time.perf_counter() - start
    evaluation = json.loads((target / "run.json").read_text())["evaluation"]["rl"]
    lines = (target / "metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, lines) if "reward" in row]
    name = "sampling/sampling_logp_difference"
    return {
        "engine": engine,
        "seed": seed,
        "before": evaluation["before"]["mean"],
        "after": evaluation["after"]["mean"],
        "tokens": steps[-1]["num_tokens"],
        "difference_mean": float(np.mean([row[f"{name}/mean"] for row in steps])),
        "difference_max": max(row[f"{name}/max"] for row in steps),
        "seconds": round(seconds, 1),
    }


def _keys(target: Path, seed: int) -> tuple[str, ...]:
    return (*SHORTENED, f"seed={seed}", "--run", str(target), "--quiet")


def _second_stage(folder: Path, seed: int) -> Path:
    """The quickstart's GRPO stage as a recipe; its model is the native run's supervised one.

    The stage has the same name, on which its seeds depend, and so the same prompts.
    """
    model, recipe = folder / f"sft-{seed}", folder / f"vllm-{seed}.toml"
    checkpoint = f"sft-step-{SFT_STEPS:06d}"
    native = folder / f"native-{seed}"
    if not native.exists():
        _keel("train", "quickstart", f"sft.steps={SFT_STEPS}", *_keys(native, seed))
    _keel("export", str(native), str(model), "--checkpoint", checkpoint)
    whole = read_recipe("quickstart")
    stages = [stage for stage in whole["stages"] if stage["stage"] == "rl"]
    alone = {**whole, "model": {"name": str(model)}, "stages": stages}
    recipe.write_text(to_toml(load_recipe(alone)))
    return recipe


def _keel(*words: str) -> None:
    around = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    subprocess.run([sys.executable, "-m", "keel", *words], check=True, cwd=ROOT, env=around)


def report(rows: list[dict[str, Any]]) -> str:
    """Accuracy of both engines over the seeds that both have, and the paired difference."""
    by = {(row["engine"], row["seed"]): row for row in rows}
    seeds = sorted(s for e, s in by if e == "vllm" and ("native", s) in by)
    lines = [f"{'seed':>4}{'before':>9}{'native':>9}{'vllm':>9}{'difference max':>17}"]
    for seed in seeds:
        native, vllm = by["native", seed], by["vllm", seed]
        assert abs(native["before"] - vllm["before"]) < 0.01, "not the same start"
        lines.append(
            f"{seed:>4}{native['before']:>9.3f}{native['after']:>9.3f}{vllm['after']:>9.3f}"
            f"{vllm['difference_max']:>17.1e}"
        )
    after = {e: np.array([by[e, seed]["after"] for seed in seeds]) for e in ENGINES}
    before = np.array([by["native", seed]["before"] for seed in seeds])
    lines.append(f"before: {_shown(iqm_interval(before))}")
    lines += [f"{engine}: {_shown(iqm_interval(after[engine]))}" for engine in ENGINES]
    paired = difference_interval(after["vllm"], after["native"])
    lines.append(
        f"vllm - native: {_shown(paired)}, mean {after['vllm'].mean():.4f} and "
        f"{after['native'].mean():.4f}"
    )
    return "\n".join(lines)


def _shown(found: Interval) -> str:
    return f"{found.mean:.4f} [{found.low:.4f}, {found.high:.4f}] (IQM, {found.n} seeds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--json", type=Path, required=True, help="results, added to run by run")
    parser.add_argument("--runs", type=Path, help="keep the run folders here")
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
    done = {(row["engine"], row["seed"]) for row in rows}
    missing = [(e, s) for s in arguments.seeds for e in ENGINES if (e, s) not in done]
    if missing:
        with server() as url, tempfile.TemporaryDirectory() as scratch:
            for engine, seed in missing:
                rows.append(run_case(engine, seed, url, arguments.runs or Path(scratch)))
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
                print(rows[-1], flush=True)
    print(report(rows))


if __name__ == "__main__":
    main()
