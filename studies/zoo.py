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
ALPHABET = "0123456789+=>"
SORT = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 5}}
LONG_SORT = {"name": "sort_digits", "options": {"min_digits": 7, "max_digits": 9}}
EASY_SORT = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 3}}
PLAIN = {"preset": "reinforce_pp", "divergence": None}
FREE = {"preset": "grpo", "divergence": None}
"""GRPO that nothing holds near its start."""
COLLAPSED = (
    "entropy-collapse",
    "no-signal",
    "learning-rate-high",
    "kl-runaway",
    "repetition",
    "length-explosion",
    "truncation",
)
"""What a policy that breaks down may show in addition."""
GAMED = (*COLLAPSED, "gold-falls", "saturated-reward")
"""What a policy that games its reward may show in addition."""


@dataclass(frozen=True)
class Case:
    """A run: what is wrong with it (None: healthy), what may follow from that, its recipe."""

    name: str
    expected: str | None
    follows: tuple[str, ...]
    recipe: Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A run with what it was diagnosed with: finished, and in flight (with the step)."""

    case: Case
    seed: int
    ids: tuple[str, ...]
    warned: Mapping[str, int]


def cases(policy: str) -> list[Case]:
    """All runs; `policy` is the folder of a model that sorts digits right now and then."""
    return [*broken(policy), *healthy(policy)]


def broken(policy: str) -> list[Case]:
    """At least one run of each condition."""
    start = {"model": {"name": policy}}
    sum_task = [{"name": f"{PARTS}:Calculator"}]
    careless = [{"name": f"{PARTS}:CarelessCalculator"}]
    turns = {"max_tokens": 8, "max_turns": 2}
    by_sequence = {**PLAIN, "weights": {"kind": "sequence_mean"}}
    one_each = {"prompts_per_step": 64, "group_size": 1}
    idle = {"optimizer": {"learning_rate": 1e-8}}
    measured = {"measured": True}
    several = {"epochs": 4, "minibatches": 4}
    cases = [
        ("hot", "learning-rate-high", COLLAPSED, _rl(start, FREE, rate=1e-2, steps=60)),
        (
            "hot-epochs",
            "clip-saturated",
            COLLAPSED,
            _rl(start, FREE, epochs=8, minibatches=4, rate=5e-4, steps=40),
        ),
        (
            "hot-gspo",
            "clip-saturated",
            COLLAPSED,
            _rl(start, "gspo", **several, rate=5e-4, steps=40),
        ),
        (
            "one-answer",
            "entropy-collapse",
            GAMED,
            _rl(_random(), FREE, rewards=_rewards("first_place"), steps=120, rate=3e-3),
        ),
        (
            "one-sum",
            "entropy-collapse",
            COLLAPSED,
            _rl(
                _random(),
                FREE,
                tasks=sum_task,
                rewards=_rewards("place_match"),
                rollout=turns,
                steps=120,
                rate=1e-3,
            ),
        ),
        ("cold", "learning-rate-low", (), _rl(start, rate=1e-7, steps=60)),
        (
            "cold-epochs",
            "clip-idle",
            ("learning-rate-low",),
            _rl(start, FREE, minibatches=4, rate=1e-7),
        ),
        ("too-hard", "no-signal", (), _rl(_random(), tasks=[LONG_SORT])),
        ("any-text", "saturated-reward", (), _rl(start, rewards=_rewards("any_text"))),
        (
            "too-easy",
            "saturated-reward",
            ("entropy-collapse",),
            _rl(start, rewards=_rewards("digits_first"), steps=60),
        ),
        (
            "proxy",
            "gold-falls",
            GAMED,
            _rl(start, FREE, rewards=_rewards("nines", ("place_match", 0.0))),
        ),
        (
            "proxy-eval",
            "gold-falls",
            GAMED,
            _rl(
                start,
                FREE,
                rewards=_rewards("nines", ("exact_match", 0.0)),
                evaluation={"every": 10, "prompts": 100},
            ),
        ),
        (
            "paid-by-length",
            "length-reward",
            GAMED,
            _rl(start, FREE, rewards=_rewards("long_and_right"), rollout={"max_tokens": 20}),
        ),
        (
            "entropy-bonus",
            "length-explosion",
            (*COLLAPSED, "length-bias"),
            _rl(start, {**FREE, "entropy": 0.4}, rollout={"max_tokens": 28}, steps=120),
        ),
        (
            "sequence-mean",
            "length-bias",
            COLLAPSED,
            _rl(
                start,
                by_sequence,
                tasks=[EASY_SORT, LONG_SORT],
                rollout={"max_tokens": 28},
                steps=120,
                rate=1e-4,
            ),
        ),
        (
            "noise",
            "kl-runaway",
            COLLAPSED,
            _rl(start, FREE, rewards=_rewards("noise"), reference=measured, rate=1e-3, steps=120),
        ),
        (
            "no-beta",
            "kl-runaway",
            GAMED,
            _rl(start, FREE, rewards=_rewards("nines"), reference=measured, rate=1e-3, steps=120),
        ),
        (
            "dead-critic",
            "value-model",
            (),
            _rl(start, "ppo", rollout=one_each, value=idle, rate=1e-5, steps=50),
        ),
        ("short-budget", "truncation", ("no-signal",), _rl(start, rollout={"max_tokens": 4})),
        (
            "masked",
            "truncation",
            ("no-signal",),
            _rl(start, rollout={"max_tokens": 4, "mask_truncated": True}),
        ),
        (
            "rounded-engine",
            "engine-mismatch",
            (),
            _rl(start, minibatches=2, rollout={"engine": f"{PARTS}:rounded"}),
        ),
        (
            "colder-engine",
            "engine-mismatch",
            (),
            _rl(start, rollout={"engine": f"{PARTS}:colder"}),
        ),
        (
            "refrain",
            "repetition",
            (*GAMED, "length-reward"),
            _rl(
                start,
                FREE,
                rewards=_rewards("refrain"),
                rollout={"max_tokens": 24},
                rate=1e-3,
                steps=120,
            ),
        ),
        (
            "marks-only",
            "format-hacking",
            GAMED,
            _rl(
                _random(), FREE, tasks=[LONG_SORT], rewards=_rewards("marked", "inside"), rate=1e-3
            ),
        ),
        (
            "marks-alone",
            "format-hacking",
            (*GAMED, "length-reward"),
            _rl(start, FREE, rewards=_rewards("marks"), rate=1e-3),
        ),
        (
            "careless-calculator",
            "environment-words",
            GAMED,
            _rl(_random(), FREE, tasks=careless, rollout=turns, rate=1e-3),
        ),
    ]
    return [Case(*one) for one in cases]


def healthy(policy: str) -> list[Case]:
    """Runs with nothing wrong: several algorithms, tasks, sizes and lengths."""
    start = {"model": {"name": policy}}
    wide = {"model": {"build": {**_random()["model"]["build"], "hidden_size": 96, "layers": 3}}}
    one_each = {"prompts_per_step": 96, "group_size": 1}
    critic = {"warmup_steps": 5, "optimizer": {"learning_rate": 1e-3}}
    evaluated = {"every": 25, "prompts": 100}
    two_lengths = {"tasks": [EASY_SORT, SORT], "rollout": {"max_tokens": 28}}
    turns = {"max_tokens": 24, "max_turns": 2}
    recipes = {
        "grpo": _rl(start),
        "grpo-long": _rl(start, steps=150, evaluation=evaluated),
        "gspo": _rl(start, "gspo", minibatches=2),
        "ppo": _rl(start, "ppo", steps=60, rollout=one_each, rate=3e-5, value=critic),
        "rloo": _rl(start, "rloo"),
        "dapo": _rl(start, "dapo", minibatches=2, rollout={"max_tokens": 8}),
        "reinforce_pp": _rl(start, "reinforce_pp", rate=2e-4),
        "dr_grpo": _rl(start, "dr_grpo", rate=2e-4),
        "remax": _rl(start, "remax", rate=1e-4),
        "opo-wide": _rl(wide, "opo", rewards=_rewards("place_match"), steps=100, rate=1e-3),
        "two-rewards": _rl(start, rewards=_rewards("place_match", ("digits_first", 0.2))),
        "sapo": _rl(start, "sapo", minibatches=2),
        "second-try": _rl(start, tasks=[{"name": f"{PARTS}:SecondTry"}], rollout=turns),
        "token-mean": _rl(start, PLAIN, **two_lengths, rate=5e-5),
        "one-token": _rl(
            start, rewards=_rewards("first_place"), rollout={"max_tokens": 1}, steps=40, rate=1e-4
        ),
    }
    return [Case(name, None, (), recipe) for name, recipe in recipes.items()]


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
    found: list[Row] = []
    for seed in map(int, arguments.seeds.split(",")):
        folder = arguments.out / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        for case in cases(half_trained(folder, seed)):
            if wanted is None or case.name in wanted:
                found.append(look(case, run(case, folder, seed), seed))
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


# ---------------------------------------------------------------- details


def _random() -> dict[str, Any]:
    size = {"alphabet": ALPHABET, "hidden_size": 64, "layers": 2, "heads": 2, "context": 48}
    return {"model": {"build": {"family": "llama", **size}}}


def _rl(
    model: Mapping[str, Any], algorithm: Any = "grpo", rate: float = 3e-4, **keys: Any
) -> dict[str, Any]:
    """A recipe of one stage on short sorting tasks; tables of `keys` are merged into it."""
    recipe: dict[str, Any] = {
        "threads": 1,
        "stage": "rl",
        "steps": 80,
        "algorithm": algorithm,
        "tasks": [SORT],
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_tokens": 10},
        "optimizer": {"learning_rate": rate},
        "evaluation": {"every": 0, "prompts": 50},
        "checkpoints": {"every": 1000, "keep": 1},
        **model,
    }
    for key, value in keys.items():
        merged = key in ("rollout", "evaluation")
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
