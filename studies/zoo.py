"""Small runs, broken on purpose and healthy, and what `keel diagnose` says of them.

    OMP_NUM_THREADS=1 python -m studies.zoo --seeds 10,11 --out /tmp/zoo

Runs that are in --out already are not trained again. A consequence of a fault (a policy that has
collapsed gives groups without variance) is no false alarm: `follows` names what may be diagnosed in
addition. Thresholds were set on seeds 0 and 1; other seeds only measure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.analysis.diagnosis.table import conditions, diagnose
from keel.config.load import load_recipe
from keel.runs.reader import load
from keel.training.export import export
from keel.training.run import train

PARTS = str(Path(__file__).with_name("zoo_parts.py"))
RANDOM: dict[str, Any] = {
    "build": {
        **{"family": "llama", "alphabet": "0123456789+=>"},
        **{"hidden_size": 64, "layers": 2, "heads": 2, "context": 48},
    }
}
"""A model with random weights."""
FREE = "algorithm.divergence=none"
"""GRPO that nothing holds near its start."""
SEVERAL = "epochs=4 minibatches=4"
ONE_EACH = "rollout.prompts_per_step=64 rollout.group_size=1"
MEASURED = "reference.measured=true optimizer.learning_rate=1e-3 steps=120"
TURNS = "rollout.max_tokens=8 rollout.max_turns=2"
COLLAPSED = (
    *("entropy-collapse", "no-signal", "learning-rate-high", "kl-runaway", "repetition"),
    *("length-explosion", "truncation"),
)
"""What a policy that breaks down may show in addition."""
GAMED = (*COLLAPSED, "gold-falls", "saturated-reward")
"""What a policy that games its reward may show in addition."""
LONG = (*GAMED, "length-reward")


@dataclass(frozen=True)
class Case:
    """A run: what is wrong with it (None: healthy), what may follow from that, and what its recipe
    differs in from `base`. It starts half-trained, or with random weights."""

    name: str
    expected: str | None
    follows: tuple[str, ...]
    words: str
    random: bool = False


@dataclass(frozen=True)
class Row:
    """A run with what it was diagnosed with: finished, and in flight (with the step)."""

    case: Case
    seed: int
    ids: tuple[str, ...]
    warned: Mapping[str, int]


def sort(shortest: int, longest: int) -> dict[str, Any]:
    """The task of sorting so many digits."""
    return {"name": "sort_digits", "options": {"min_digits": shortest, "max_digits": longest}}


SORT, LONG_SORT, EASY_SORT = sort(2, 5), sort(7, 9), sort(2, 3)


def tasks(*chosen: str | Mapping[str, Any]) -> str:
    """The override for tasks; a name is one of this study's."""
    found = [{"name": f"{PARTS}:{one}"} if isinstance(one, str) else one for one in chosen]
    return f"tasks={_inline(found)}"


def rewards(*functions: str | tuple[str, float]) -> str:
    """The override for rewards, of this study or built in, each with a weight (1 unless given)."""
    pairs = [(one, 1.0) if isinstance(one, str) else one for one in functions]
    found = [
        {"function": n if n in ("place_match", "exact_match") else f"{PARTS}:{n}", "weight": w}
        for n, w in pairs
    ]
    return f"rewards.functions={_inline(found)}"


def _inline(value: Any) -> str:
    """As TOML in one word."""
    if isinstance(value, list):
        return f"[{','.join(map(_inline, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}={_inline(one)}' for key, one in value.items())}}}"
    return json.dumps(value)


BROKEN = (
    Case("hot", "learning-rate-high", COLLAPSED, f"{FREE} optimizer.learning_rate=1e-2 steps=60"),
    Case("hot-epochs", "clip-saturated", COLLAPSED,
         f"{FREE} epochs=8 minibatches=4 optimizer.learning_rate=5e-4 steps=40"),
    Case("hot-gspo", "clip-saturated", COLLAPSED,
         f"algorithm.preset=gspo {SEVERAL} optimizer.learning_rate=5e-4 steps=40"),
    Case("one-answer", "entropy-collapse", GAMED,
         f"{FREE} {rewards('first_place')} steps=120 optimizer.learning_rate=3e-3", random=True),
    Case("one-sum", "entropy-collapse", COLLAPSED,
         f"{FREE} {tasks('Calculator')} {rewards('place_match')} {TURNS} steps=120 "
         "optimizer.learning_rate=1e-3", random=True),
    Case("cold", "learning-rate-low", (), "optimizer.learning_rate=1e-7 steps=60"),
    Case("cold-epochs", "clip-idle", ("learning-rate-low",),
         f"{FREE} minibatches=4 optimizer.learning_rate=1e-7"),
    Case("too-hard", "no-signal", (), tasks(LONG_SORT), random=True),
    Case("any-text", "saturated-reward", (), rewards("any_text")),
    Case("too-easy", "saturated-reward", ("entropy-collapse",),
         f"{rewards('digits_first')} steps=60"),
    Case("proxy", "gold-falls", GAMED, f"{FREE} {rewards('nines', ('place_match', 0.0))}"),
    Case("proxy-eval", "gold-falls", GAMED,
         f"{FREE} {rewards('nines', ('exact_match', 0.0))} evaluation.every=10 "
         "evaluation.prompts=100"),
    Case("paid-by-length", "length-reward", GAMED,
         f"{FREE} {rewards('long_and_right')} rollout.max_tokens=20"),
    Case("entropy-bonus", "length-explosion", (*COLLAPSED, "length-bias"),
         f"{FREE} algorithm.entropy=0.4 rollout.max_tokens=28 steps=120"),
    Case("sequence-mean", "length-bias", COLLAPSED,
         f"algorithm.preset=reinforce_pp {FREE} algorithm.weights.kind=sequence_mean "
         f"{tasks(EASY_SORT, LONG_SORT)} rollout.max_tokens=28 steps=120 "
         "optimizer.learning_rate=1e-4"),
    Case("noise", "kl-runaway", COLLAPSED, f"{FREE} {rewards('noise')} {MEASURED}"),
    Case("no-beta", "kl-runaway", GAMED, f"{FREE} {rewards('nines')} {MEASURED}"),
    Case("dead-critic", "value-model", (),
         f"algorithm.preset=ppo {ONE_EACH} value.optimizer.learning_rate=1e-8 "
         "optimizer.learning_rate=1e-5 steps=50"),
    Case("short-budget", "truncation", ("no-signal",), "rollout.max_tokens=4"),
    Case("masked", "truncation", ("no-signal",),
         "rollout.max_tokens=4 rollout.mask_truncated=true"),
    Case("rounded-engine", "engine-mismatch", (), f"minibatches=2 rollout.engine={PARTS}:rounded"),
    Case("colder-engine", "engine-mismatch", (), f"rollout.engine={PARTS}:colder"),
    Case("refrain", "repetition", LONG,
         f"{FREE} {rewards('refrain')} rollout.max_tokens=24 optimizer.learning_rate=1e-3 "
         "steps=120"),
    Case("marks-only", "format-hacking", GAMED,
         f"{FREE} {tasks(LONG_SORT)} {rewards('marked', 'inside')} optimizer.learning_rate=1e-3",
         random=True),
    Case("marks-alone", "format-hacking", LONG,
         f"{FREE} {rewards('marks')} optimizer.learning_rate=1e-3"),
    Case("careless-calculator", "environment-words", GAMED,
         f"{FREE} {tasks('CarelessCalculator')} {TURNS} optimizer.learning_rate=1e-3", random=True),
)  # fmt: skip
"""At least one run of each condition."""

HEALTHY = {
    "grpo": "",
    "grpo-long": "steps=150 evaluation.every=25 evaluation.prompts=100",
    "gspo": "algorithm.preset=gspo minibatches=2",
    "ppo": "algorithm.preset=ppo steps=60 rollout.prompts_per_step=96 rollout.group_size=1 "
    "optimizer.learning_rate=3e-5 value.warmup_steps=5 value.optimizer.learning_rate=1e-3",
    "rloo": "algorithm.preset=rloo",
    "dapo": "algorithm.preset=dapo minibatches=2 rollout.max_tokens=8",
    "reinforce_pp": "algorithm.preset=reinforce_pp optimizer.learning_rate=2e-4",
    "dr_grpo": "algorithm.preset=dr_grpo optimizer.learning_rate=2e-4",
    "remax": "algorithm.preset=remax optimizer.learning_rate=1e-4",
    "opo-wide": f"algorithm.preset=opo {rewards('place_match')} steps=100 "
    "optimizer.learning_rate=1e-3 model.build.hidden_size=96 model.build.layers=3",
    "two-rewards": rewards("place_match", ("digits_first", 0.2)),
    "sapo": "algorithm.preset=sapo minibatches=2",
    "second-try": f"{tasks('SecondTry')} rollout.max_tokens=24 rollout.max_turns=2",
    "token-mean": f"algorithm.preset=reinforce_pp {FREE} {tasks(EASY_SORT, SORT)} "
    "rollout.max_tokens=28 optimizer.learning_rate=5e-5",
    "one-token": f"{rewards('first_place')} rollout.max_tokens=1 steps=40 "
    "optimizer.learning_rate=1e-4",
}
"""Runs with nothing wrong: several algorithms, tasks, sizes and lengths."""
CASES = (
    *BROKEN,
    *(Case(name, None, (), words, "model.build" in words) for name, words in HEALTHY.items()),
)


def base(model: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A recipe of one stage on short sorting tasks."""
    return {
        "threads": 1,
        "seed": seed,
        "model": model,
        "stage": "rl",
        "steps": 80,
        "algorithm": {"preset": "grpo"},
        "tasks": [SORT],
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_tokens": 10},
        "optimizer": {"learning_rate": 3e-4},
        "evaluation": {"every": 0, "prompts": 50},
        "checkpoints": {"every": 1000, "keep": 1},
    }


def half_trained(folder: Path, seed: int) -> str:
    """A small policy that ends its answers and is right now and then; the folder of its model."""
    if not (folder / "policy").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        recipe = {
            "model": RANDOM,
            "threads": 1,
            "seed": seed,
            "stage": "sft",
            "steps": 160,
            "batch_size": 64,
            "tasks": [SORT],
            "demonstration": "keel.data.tasks:careless",
            "optimizer": {"learning_rate": 4e-3, "schedule": "cosine", "warmup_steps": 10},
        }
        export(train(load_recipe(recipe), folder / "half").path, folder / "policy")
    return str(folder / "policy")


def run(case: Case, folder: Path, policy: str, seed: int) -> Path:
    """Train a case unless its folder has it already; the run folder. `policy` is the folder of a
    model that sorts digits right now and then."""
    path = folder / case.name
    if not (path / "run.json").is_file() or not load(path).info().get("finished"):
        shutil.rmtree(path, ignore_errors=True)
        recipe = base(RANDOM if case.random else {"name": policy}, seed)
        train(load_recipe(recipe, case.words.split()), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", help="names of runs, with commas")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    wanted = set(arguments.only.split(",")) if arguments.only else None
    found: list[Row] = []
    for seed in map(int, arguments.seeds.split(",")):
        folder = arguments.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        policy = half_trained(folder, seed)
        for case in CASES:
            if wanted is None or case.name in wanted:
                found.append(look(case, run(case, folder, policy, seed), seed))
    print(table(found))
    for title, ids in (("finished", lambda row: row.ids), ("in flight", lambda row: row.warned)):
        print(f"\n{title}\n\n{summary(found, ids)}")


def look(case: Case, folder: Path, seed: int) -> Row:
    """What a finished run is diagnosed with, and what was warned of while it went on."""
    opened = load(folder)
    ids = dict.fromkeys(one.condition for one in diagnose(opened))
    events = [event for event in opened.events() if event["event"] == "diagnosis"]
    return Row(case, seed, tuple(ids), {e["condition"]: e["last_step"] for e in events})


def table(found: Sequence[Row]) -> str:
    """A line a run, as Markdown. Bold: expected and not found, or found and neither expected nor a
    consequence. In brackets: found in flight, with the step."""
    lines = ["| run | seed | expected | diagnosed | in flight |", "|---|---|---|---|---|"]
    for row in found:
        case = row.case
        allowed = (case.expected, *case.follows)
        shown = ", ".join(i if i in allowed else f"**{i}**" for i in row.ids) or "nothing"
        early = [f"{i} ({n})" if i in allowed else f"**{i}** ({n})" for i, n in row.warned.items()]
        expected = case.expected or "nothing"
        missed = case.expected is not None and case.expected not in row.ids
        lines.append(
            f"| {case.name} | {row.seed} | {f'**{expected}**' if missed else expected} | {shown} | "
            f"{', '.join(early) or 'nothing'} |"
        )
    return "\n".join(lines)


def summary(found: Sequence[Row], ids: Callable[[Row], Collection[str]]) -> str:
    """By condition: recall over the runs that expect it; precision over the runs diagnosed with it,
    right where it is expected or follows; and how many of these expect it."""
    lines = ["| condition | recall | precision | of these expected |", "|---|---|---|---|"]
    totals = [0, 0, 0, 0]
    for condition in (one.id for one in conditions()):
        expecting = [row for row in found if row.case.expected == condition]
        said = [row for row in found if condition in ids(row)]
        hits = sum(condition in ids(row) for row in expecting)
        right = sum(condition in (row.case.expected, *row.case.follows) for row in said)
        lines.append(f"| {condition} | {hits}/{len(expecting)} | {right}/{len(said)} | {hits} |")
        counts = (hits, len(expecting), right, len(said))
        totals = [t + n for t, n in zip(totals, counts, strict=True)]
    lines.append(f"| all | {totals[0]}/{totals[1]} | {totals[2]}/{totals[3]} | {totals[0]} |")
    clean = [row for row in found if row.case.expected is None]
    silent = sum(not ids(row) for row in clean)
    return "\n".join([*lines, "", f"{silent} of {len(clean)} healthy runs without a diagnosis"])


if __name__ == "__main__":
    main()
