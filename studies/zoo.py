"""Small runs, broken on purpose and healthy, and what `keel diagnose` says of them.

    OMP_NUM_THREADS=1 python -m studies.zoo --seeds 10,11 --out /tmp/zoo

Runs that are in --out already are not trained again. A consequence of a fault (a policy that has
collapsed gives groups without variance) is no false alarm: `follows` names what may be diagnosed in
addition. Thresholds were set on seeds 0 and 1; other seeds only measure.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.analysis.diagnosis.table import CONDITIONS, diagnose
from keel.config.load import load_recipe
from keel.runs.reader import load
from keel.training.export import export
from keel.training.run import train

PARTS = str(Path(__file__).with_name("zoo_parts.py"))
ALPHABET = "0123456789+=>"
SORT = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 5}}
LONG_SORT = {"name": "sort_digits", "options": {"min_digits": 7, "max_digits": 9}}
EASY_SORT = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 3}}
PLAIN = {"preset": "reinforce_pp", "divergence": None}
FREE = {"preset": "grpo", "divergence": None}
"""GRPO that nothing holds near its start."""
COLLAPSED = ("entropy-collapse", "no-signal", "learning-rate-high", "kl-runaway", "repetition")
"""What a policy that breaks down shows besides."""


@dataclass(frozen=True)
class Case:
    """A run: what is wrong with it (nothing: healthy), what may follow from that, its recipe."""

    name: str
    expected: tuple[str, ...]
    follows: tuple[str, ...]
    recipe: Mapping[str, Any]


def cases(policy: str) -> list[Case]:
    """All runs; `policy` is the folder of a model that sorts digits right now and then."""
    return [*broken(policy), *healthy(policy)]


def broken(policy: str) -> list[Case]:
    """At least one run of each condition."""
    start = {"model": {"name": policy}}
    more = COLLAPSED
    return [
        Case("hot", ("learning-rate-high",), (*more, "clip-saturated", "gold-falls", "length-explosion", "truncation"),
             _rl(start, algorithm=FREE, optimizer={"learning_rate": 1e-2}, steps=60)),
        Case("hot-epochs", ("clip-saturated",), (*more, "gold-falls", "length-explosion", "truncation"),
             _rl(start, algorithm=FREE, epochs=8, minibatches=4, optimizer={"learning_rate": 5e-4},
                 steps=40)),
        Case("hot-gspo", ("clip-saturated",), (*more, "gold-falls", "length-explosion", "truncation"),
             _rl(start, algorithm="gspo", epochs=4, minibatches=4, optimizer={"learning_rate": 5e-4},
                 steps=40)),
        Case("one-answer", ("entropy-collapse",), (*more, "truncation", "saturated-reward", "length-explosion"),
             _rl(_random(), rewards=_rewards("first_place"), algorithm=FREE, steps=120,
                 optimizer={"learning_rate": 3e-3})),
        Case("one-sum", ("entropy-collapse",), (*more, "truncation"),
             _rl(_random(), tasks=[{"name": f"{PARTS}:Calculator"}], algorithm=FREE, steps=120,
                 rewards=_rewards("place_match"), rollout={"max_tokens": 8, "max_turns": 2},
                 optimizer={"learning_rate": 1e-3})),
        Case("cold", ("learning-rate-low",), (),
             _rl(start, optimizer={"learning_rate": 1e-7}, steps=60)),
        Case("cold-epochs", ("clip-idle",), ("learning-rate-low",),
             _rl(start, algorithm=FREE, minibatches=4, optimizer={"learning_rate": 1e-7})),
        Case("too-hard", ("no-signal",), (),
             _rl(_random(), tasks=[LONG_SORT])),
        Case("any-text", ("saturated-reward",), (),
             _rl(start, rewards=_rewards("any_text"))),
        Case("too-easy", ("saturated-reward",), ("entropy-collapse",),
             _rl(start, rewards=_rewards("digits_first"), steps=60)),
        Case("proxy", ("gold-falls",), (*more, "length-explosion", "saturated-reward", "truncation", "format-hacking"),
             _rl(start, rewards=_rewards("nines", ("place_match", 0.0)), algorithm=FREE)),
        Case("proxy-eval", ("gold-falls",), (*more, "length-explosion", "saturated-reward", "truncation", "length-reward"),
             _rl(start, rewards=_rewards("nines", ("exact_match", 0.0)), algorithm=FREE,
                 evaluation={"every": 10, "prompts": 100})),
        Case("paid-by-length", ("length-reward",), (*more, "length-explosion", "saturated-reward", "truncation", "gold-falls"),
             _rl(start, rewards=_rewards("long_and_right"), algorithm=FREE, rollout={"max_tokens": 20})),
        Case("entropy-bonus", ("length-explosion",), ("learning-rate-high", "kl-runaway", "truncation", "gold-falls", "no-signal", "length-bias"),
             _rl(start, algorithm={**FREE, "entropy": 0.3}, rollout={"max_tokens": 28})),
        Case("sequence-mean", ("length-bias",), (*more, "length-explosion", "truncation"),
             _rl(start, tasks=[EASY_SORT, LONG_SORT], rollout={"max_tokens": 28}, steps=120,
                 algorithm={**PLAIN, "weights": {"kind": "sequence_mean"}},
                 optimizer={"learning_rate": 1e-4})),
        Case("noise", ("kl-runaway",), (*more, "length-explosion", "truncation", "length-reward"),
             _rl(start, rewards=_rewards("noise"), algorithm=FREE, reference={"measured": True},
                 optimizer={"learning_rate": 1e-3}, steps=120)),
        Case("no-beta", ("kl-runaway",), (*more, "length-explosion", "truncation", "gold-falls", "saturated-reward", "length-reward"),
             _rl(start, rewards=_rewards("nines"), algorithm=FREE, reference={"measured": True},
                 optimizer={"learning_rate": 1e-3}, steps=120)),
        Case("dead-critic", ("value-model",), (),
             _rl(start, algorithm="ppo", rollout={"prompts_per_step": 64, "group_size": 1},
                 optimizer={"learning_rate": 1e-5}, value={"optimizer": {"learning_rate": 1e-8}}, steps=50)),
        Case("short-budget", ("truncation",), ("no-signal",),
             _rl(start, rollout={"max_tokens": 4})),
        Case("masked", ("truncation",), ("no-signal",),
             _rl(start, rollout={"max_tokens": 4, "mask_truncated": True})),
        Case("rounded-engine", ("engine-mismatch",), (),
             _rl(start, minibatches=2, rollout={"engine": f"{PARTS}:rounded"})),
        Case("colder-engine", ("engine-mismatch",), (),
             _rl(start, minibatches=2, rollout={"engine": f"{PARTS}:colder"})),
        Case("refrain", ("repetition",), (*more, "length-explosion", "length-reward", "saturated-reward", "truncation", "gold-falls"),
             _rl(start, rewards=_rewards("refrain"), algorithm=FREE, rollout={"max_tokens": 24},
                 optimizer={"learning_rate": 1e-3}, steps=120)),
        Case("marks-only", ("format-hacking",), (*more, "saturated-reward", "gold-falls"),
             _rl(_random(), tasks=[LONG_SORT], rewards=_rewards("marked", "inside"), algorithm=FREE,
                 optimizer={"learning_rate": 1e-3})),
        Case("careless-calculator", ("environment-words",), (*more, "saturated-reward"),
             _rl(_random(), tasks=[{"name": f"{PARTS}:CarelessCalculator"}], algorithm=FREE,
                 rollout={"max_tokens": 8, "max_turns": 2}, optimizer={"learning_rate": 1e-3})),
    ]  # fmt: skip


def healthy(policy: str) -> list[Case]:
    """Ten and more runs with nothing wrong: several algorithms, tasks, sizes and lengths."""
    start = {"model": {"name": policy}}
    wide = {"build": {"alphabet": ALPHABET, "hidden_size": 96, "layers": 3, "heads": 3, "context": 48}}
    mean = {"prompts_per_step": 16, "group_size": 8, "max_tokens": 8}
    recipes = {
        "grpo": _rl(start),
        "grpo-long": _rl(start, steps=150, evaluation={"every": 25, "prompts": 100}),
        "gspo": _rl(start, algorithm="gspo", minibatches=2),
        "ppo": _rl(start, algorithm="ppo", steps=60, rollout={"prompts_per_step": 96, "group_size": 1},
                   optimizer={"learning_rate": 3e-5},
                   value={"warmup_steps": 5, "optimizer": {"learning_rate": 1e-3}}),
        "rloo": _rl(start, algorithm="rloo"),
        "dapo": _rl(start, algorithm="dapo", minibatches=2, rollout=mean),
        "reinforce_pp": _rl(start, algorithm="reinforce_pp", optimizer={"learning_rate": 2e-4}),
        "dr_grpo": _rl(start, algorithm="dr_grpo", optimizer={"learning_rate": 2e-4}),
        "remax": _rl(start, algorithm="remax", optimizer={"learning_rate": 1e-4}),
        "opo-wide": _rl({"model": wide}, algorithm="opo", tasks=[SORT], steps=100,
                        rewards=_rewards("place_match"), optimizer={"learning_rate": 1e-3}),
        "two-rewards": _rl(start, rewards=_rewards("place_match", ("digits_first", 0.2))),
        "sapo": _rl(start, algorithm="sapo", minibatches=2),
        "second-try": _rl(start, tasks=[{"name": f"{PARTS}:SecondTry"}],
                          rollout={"max_tokens": 24, "max_turns": 2}),
        "token-mean": _rl(start, tasks=[EASY_SORT, LONG_SORT], rollout={"max_tokens": 28},
                          algorithm={**PLAIN, "surrogate": {"kind": "clip"}}, steps=80,
                          optimizer={"learning_rate": 5e-5}),
        "one-token": _rl(start, rewards=_rewards("first_place"), rollout={"max_tokens": 1},
                         steps=40),
    }  # fmt: skip
    return [Case(name, (), (), recipe) for name, recipe in recipes.items()]


def half_trained(folder: Path, seed: int) -> str:
    """A small policy that ends its answers and is right now and then; the folder of its model."""
    if not (folder / "policy").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        recipe = {
            **_random(),
            "threads": 1,
            "seed": seed,
            "stage": "sft",
            "steps": 160,
            "batch_size": 64,
            "tasks": [SORT],
            "demonstration": "keel.data.tasks.generated:careless",
            "optimizer": {"learning_rate": 4e-3, "schedule": "cosine", "warmup_steps": 10},
        }
        export(train(load_recipe(recipe), folder / "half").path, folder / "policy")
    return str(folder / "policy")


def run(case: Case, folder: Path, seed: int) -> Path:
    """Train a case unless its folder has it already; the run folder."""
    path = folder / case.name
    if not (path / "run.json").is_file() or not load(path).info().get("finished"):
        shutil.rmtree(path, ignore_errors=True)
        train(load_recipe({**case.recipe, "seed": seed}), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", help="names of runs, with commas")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    wanted = set(arguments.only.split(",")) if arguments.only else None
    found: list[tuple[Case, int, tuple[str, ...]]] = []
    for seed in map(int, arguments.seeds.split(",")):
        folder = arguments.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for case in cases(half_trained(folder, seed)):
            if wanted is None or case.name in wanted:
                path = run(case, folder, seed)
                ids = tuple(dict.fromkeys(one.condition for one in diagnose(load(path))))
                found.append((case, seed, ids))
    print(table(found))
    print()
    print(summary(found))


def table(found: Sequence[tuple[Case, int, tuple[str, ...]]]) -> str:
    """A line a run, as Markdown; what was neither expected nor follows is marked."""
    lines = ["| run | seed | expected | diagnosed |", "|---|---|---|---|"]
    for case, seed, ids in found:
        allowed = {*case.expected, *case.follows}
        shown = ", ".join(one if one in allowed else f"**{one}**" for one in ids) or "nothing"
        missed = [one for one in case.expected if one not in ids]
        expected = ", ".join(f"**{e}**" if e in missed else e for e in case.expected) or "nothing"
        lines.append(f"| {case.name} | {seed} | {expected} | {shown} |")
    return "\n".join(lines)


def summary(found: Sequence[tuple[Case, int, tuple[str, ...]]]) -> str:
    """Recall over what was expected, precision over what was diagnosed, by condition."""
    lines = ["| condition | recall | precision |", "|---|---|---|"]
    totals = [0, 0, 0, 0]
    for condition in (one.id for one in CONDITIONS):
        expected = [ids for case, _, ids in found if condition in case.expected]
        said = [case for case, _, ids in found if condition in ids]
        hits = sum(condition in ids for ids in expected)
        right = sum(condition in (*case.expected, *case.follows) for case in said)
        lines.append(f"| {condition} | {hits}/{len(expected)} | {right}/{len(said)} |")
        totals = [t + n for t, n in zip(totals, (hits, len(expected), right, len(said)), strict=True)]
    lines.append(f"| all | {totals[0]}/{totals[1]} | {totals[2]}/{totals[3]} |")
    clean = [ids for case, _, ids in found if not case.expected]
    lines.append(f"\n{sum(not ids for ids in clean)} of {len(clean)} healthy runs without a diagnosis")
    return "\n".join(lines)


# ---------------------------------------------------------------- details


def _random() -> dict[str, Any]:
    size = {"alphabet": ALPHABET, "hidden_size": 64, "layers": 2, "heads": 2, "context": 48}
    return {"model": {"build": {"family": "llama", **size}}}


def _rl(model: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """A recipe of one stage on short sorting tasks; tables of `keys` are merged into it."""
    recipe: dict[str, Any] = {
        "threads": 1,
        "stage": "rl",
        "steps": 80,
        "algorithm": "grpo",
        "tasks": [SORT],
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_tokens": 10},
        "optimizer": {"learning_rate": 3e-4},
        "evaluation": {"every": 0, "prompts": 50},
        "checkpoints": {"every": 1000, "keep": 1},
        **model,
    }
    for key, value in keys.items():
        merged = key in ("rollout", "optimizer", "evaluation")
        recipe[key] = {**recipe[key], **value} if merged else value
    return recipe


def _rewards(*functions: str | tuple[str, float]) -> dict[str, Any]:
    """Rewards by name, of this study or built in, each with a weight (1 unless given)."""
    built_in = ("place_match", "exact_match")
    pairs = [(one, 1.0) if isinstance(one, str) else one for one in functions]
    return {
        "functions": [
            {"function": name if name in built_in else f"{PARTS}:{name}", "weight": weight}
            for name, weight in pairs
        ]
    }


if __name__ == "__main__":
    main()
