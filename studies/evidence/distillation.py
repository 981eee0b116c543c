"""On-policy distillation against GRPO: what a student reaches, by the tokens that it sampled.

A teacher of eight times the student's weights is trained once for a task: supervised on right
answers, then by GRPO. The student starts where all presets of `studies.evidence.algorithms` start,
and learns from the teacher (opd) or from the reward (GRPO), each at its own learning rate.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from keel.analysis.statistics import Array, Interval, bootstrap_interval, iqm, mean_interval
from keel.runs.reader import load
from studies.common import courses as read_courses
from studies.common import keel, markdown, shown, write_csv
from studies.evidence import algorithms
from studies.evidence.algorithms import BASELINE, HERE, RATES, RESULTS

STUDENT = "opd"
ARMS = (STUDENT, BASELINE)
MEASURED = RESULTS / "distillation"
TEACHER_SEED = 1000
RARE = "sort_digits_rare"
"""Sorting digits from a start that hardly ever samples a right answer, with the same teacher."""
LEVELS = {"sort_digits": 0.8, "reverse": 0.5, RARE: 0.2}
"""By task the accuracy that tokens are counted to; for the first two one that GRPO reaches on most
seeds."""
EARLY = 20
"""A step at which accuracies are compared besides the last."""
COLUMNS = ("step", "tokens", "accuracy")
EVALUATED = {"evaluation": {"every": 5}}


def teacher_recipe(task: str) -> dict[str, Any]:
    """The recipe of a task's teacher."""
    return {
        "extends": str(HERE / f"{task}.toml"),
        "seed": TEACHER_SEED,
        "model": {"build": {"hidden_size": 128, "layers": 4, "heads": 4}},
        "sft": {"demonstration": "keel.data.tasks:gold", "steps": 400},
        "rl": {"steps": 20, "optimizer": {"learning_rate": 1e-4}},
    }


def train_teacher(out: Path, task: str) -> Path:
    """The folder of a task's teacher, trained and exported unless it is there."""
    folder = out / "teachers"
    model, run, recipe = folder / task, folder / f"{task}-run", folder / f"{task}.toml"
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        recipe.write_text(tomli_w.dumps(teacher_recipe(task)))
        keel("train", recipe, "--run", run)
        keel("export", run, model)
    return model


def run(out: Path, seeds: int = 10, tasks: Sequence[str] = tuple(LEVELS)) -> None:
    """Train teachers and students, and keep the results."""
    MEASURED.mkdir(parents=True, exist_ok=True)
    teachers = {}
    for task in tasks:
        folder = out / "distillation" / task
        taught = "sort_digits" if task == RARE else task
        teacher = {"teacher": {"name": str(train_teacher(out, taught))}}
        known = tomllib.loads(RATES.read_text()).get(task, {})
        if missing := [arm for arm in ARMS if arm not in known]:
            algorithms.choose_rates(folder / "tune", task, missing, {STUDENT: teacher})
        rates = tomllib.loads(RATES.read_text())[task]
        keys = {STUDENT: {**teacher, **EVALUATED}, BASELINE: EVALUATED}
        paths = algorithms.write_recipes(folder / "recipes", task, rates, ARMS, keys)
        chosen = ("--seeds", seeds, "--baseline", BASELINE)
        keel("compare", *paths, *chosen, "--out", folder / "arms")
        algorithms.keep(folder / "arms", MEASURED / task, "distillation")
        rows = _measured(folder / "arms" / "runs", seeds)
        write_csv(MEASURED / task / "tokens.csv", ("arm", "seed", *COLUMNS), rows)
        teachers[taught] = _teacher(out / "teachers" / f"{taught}-run")
    text = json.dumps(teachers, ensure_ascii=False, indent=1) + "\n"
    (MEASURED / "teachers.json").write_text(text)


def _measured(runs: Path, seeds: int) -> Iterable[tuple[str, int, int, int, float]]:
    """Arm, seed, step, tokens sampled by then and accuracy, for each evaluation of each run."""
    for arm in ARMS:
        for seed in range(seeds):
            one = load(runs / arm / f"seed-{seed}")
            tokens, last = 0, one.info()["evaluation"]["rl"]["before"]["mean"]
            yield arm, seed, 0, tokens, last
            for row in one.metrics("rl"):
                tokens += int(row["rollout/tokens"])
                if row.get("eval/pass@1") is not None:
                    yield arm, seed, row["step"], tokens, row["eval/pass@1"]


def _teacher(folder: Path) -> dict[str, Any]:
    """A teacher's accuracy after its stages."""
    evaluations = load(folder).info()["evaluation"]["rl"]
    return {
        when: {key: evaluations[when][key] for key in ("mean", "low", "high", "n")}
        for when in ("before", "after")
    }


# ---------------------------------------------------------------- read from the results


@cache
def courses(task: str) -> Mapping[str, list[Array]]:
    """By arm and seed (3, evaluations): steps, tokens sampled by then, accuracy."""
    return read_courses(MEASURED / task / "tokens.csv", *COLUMNS)


def tokens_to(course: Array, level: float) -> float:
    """The tokens sampled until the accuracy first reaches a level, on a line between evaluations;
    infinite where it does not."""
    _, tokens, accuracy = course
    at = int(np.argmax(accuracy >= level))
    if accuracy[at] < level:
        return np.inf
    if at == 0:
        return 0.0
    share = (level - accuracy[at - 1]) / (accuracy[at] - accuracy[at - 1])
    return float(tokens[at - 1] + share * (tokens[at] - tokens[at - 1]))


def savings(task: str) -> tuple[Interval, list[int]]:
    """How many times the tokens of opd GRPO takes to the level: the geometric mean over seeds with
    Student's interval, and by arm the seeds that never reach it, which count as if they had at
    their end."""
    ends = {
        arm: [min(tokens_to(one, LEVELS[task]), one[1, -1]) for one in courses(task)[arm]]
        for arm in ARMS
    }
    late = [sum(one[2].max() < LEVELS[task] for one in courses(task)[arm]) for arm in ARMS]
    found = mean_interval(np.log(ends[BASELINE]) - np.log(ends[STUDENT]))
    low, mean, high = (float(np.exp(x)) for x in (found.low, found.mean, found.high))
    return Interval(mean, low, high, found.n), late


def accuracies(task: str, arm: str, step: int) -> Array:
    """The accuracy of each seed at a step."""
    return np.array([course[2, course[0] == step].item() for course in courses(task)[arm]])


def table() -> str:
    """Tokens to the level, and accuracies at equal steps, on both tasks."""
    rows = []
    for task in LEVELS:
        for arm in ARMS:
            reached = [tokens_to(course, LEVELS[task]) for course in courses(task)[arm]]
            known = [x for x in reached if np.isfinite(x)]
            sampled = np.mean([course[1, -1] for course in courses(task)[arm]])
            cells = [
                shown(bootstrap_interval(accuracies(task, arm, step), iqm), 100)
                for step in (EARLY, int(courses(task)[arm][0][0, -1]))
            ]
            middle = f"{np.median(reached):,.0f}" if len(known) > len(reached) / 2 else "–"
            level, share = f"{LEVELS[task]:.0%}", f"{len(known)} of {len(reached)}"
            rows.append((task, arm, level, share, middle, *cells, f"{sampled:,.0f}"))
    head = ("task", "arm", "level", "seeds that reach it", "tokens to it, median",
            f"accuracy after {EARLY} steps, %", "after all, %", "tokens in all")  # fmt: skip
    return markdown(head, rows)


def savings_table() -> str:
    """The ratio of tokens, and differences in accuracy, paired by seed."""
    rows = []
    for task in LEVELS:
        ratio, late = savings(task)
        cells = []
        for step in (EARLY, int(courses(task)[STUDENT][0][0, -1])):
            ours, other = (accuracies(task, arm, step) for arm in ARMS)
            cells.append(shown(mean_interval(100 * (ours - other)), sign="+"))
        rows.append((task, shown(ratio, digits=2), " and ".join(map(str, late)), *cells))
    head = ("task", "tokens of grpo over those of opd", "seeds below the level, opd and grpo",
            f"points above grpo after {EARLY} steps", "after all")  # fmt: skip
    return markdown(head, rows)


def teachers_table() -> str:
    """Accuracy of the teachers."""
    found = json.loads((MEASURED / "teachers.json").read_text())
    rows = [
        (task, *(shown(Interval(**one[when]), 100) for when in ("before", "after")))
        for task, one in found.items()
    ]
    return markdown(("task", "after supervised fine-tuning, %", "after GRPO, %"), rows)
