"""Labels chosen by uncertainty against labels chosen at random: accuracy, and labels saved.

    python -m studies.active_selection --data ../shared/data --seeds 10

Problems: four synthetic ones with a hidden reward and noisy labels (features of one size in every
direction; pools of which half or most pairs are near-copies of a few; a nonlinear reward on random
features), and PandaLM's answers with the share of three people's votes, on 48 principal components
of hashed words, held out by prompt. Every arm of a seed starts from the same random labels and sees
the same labels of the same pairs. Intervals are over seeds, with Bonferroni's correction for the
arms of a problem.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import expit

from keel.analysis.comparison import RESAMPLES, around, difference_interval
from keel.analysis.statistics import Array, Interval
from keel.preferences.selection import (
    METHODS,
    HeadPosterior,
    Method,
    laplace_beliefs,
    likeliest_posterior,
    select_pairs,
)
from studies.common import heading, line, shown

START, BATCH, MOST, POOL, HELD = 20, 20, 300, 600, 400
REACHED = 200
"""The labels whose accuracy, chosen at random, the other arms are to reach."""
WIDTH = 20
PRECISIONS = (0.01, 0.1, 1.0, 10.0, 100.0)
BUCKETS, COMPONENTS = 2048, 48
_WORD = re.compile(r"[a-z']+|\d+|[^\sa-z\d]")


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """A pool with the labels that are given when asked, and pairs to be measured on.

    `sign_C` says which answer of a held-out pair is better (1 or −1).
    """

    feature_CH: Array
    label_C: Array
    held_CH: Array
    sign_C: Array


# ---------------------------------------------------------------- problems


def linear(seed: int, share: float) -> Problem:
    """A linear reward; the difference of two answers has a standard deviation of 2.

    A `share` of the pool's pairs are near-copies of eight.
    """
    generator = np.random.default_rng([seed, share > 0])
    head = generator.normal(size=WIDTH) * 2 / np.sqrt(WIDTH)
    pool = generator.normal(size=(POOL, WIDTH))
    if share:
        few = generator.normal(size=(8, WIDTH))
        copies = int(share * POOL)
        pool[:copies] = few[generator.integers(0, 8, copies)]
        pool[:copies] += 0.05 * generator.normal(size=(copies, WIDTH))
    held = generator.normal(size=(HELD, WIDTH))
    asked = generator.random(POOL) < expit(pool @ head)
    return Problem(pool, asked.astype(float), held, np.sign(held @ head))


def nonlinear(seed: int) -> Problem:
    """A reward that no head on the 64 random Fourier features fits exactly."""
    generator = np.random.default_rng([seed, 2])
    inward, outward = generator.normal(size=(6, 12)), generator.normal(size=12)
    frequency, phase = generator.normal(size=(6, 64)) * 0.7, generator.uniform(0, 2 * np.pi, 64)

    def sides(count: int) -> tuple[Array, Array]:
        answers = generator.normal(size=(2, count, 6))
        features = np.cos(answers @ frequency + phase) * np.sqrt(2 / 64) * 3
        reward = np.tanh(answers @ inward) @ outward
        return features[0] - features[1], reward[0] - reward[1]

    pool, gap = sides(POOL)
    held, held_gap = sides(HELD)
    asked = generator.random(POOL) < expit(gap)
    return Problem(pool, asked.astype(float), held, np.sign(held_gap))


def hashed(text: str) -> Array:
    """log(1 + count) of the words in each bucket."""
    counts = np.zeros(BUCKETS)
    for word in _WORD.findall(text.lower()):
        counts[zlib.crc32(word.encode("utf-8", "replace")) % BUCKETS] += 1
    return np.asarray(np.log1p(counts))


def real(seed: int, rows: Sequence[tuple[str, Array, float]]) -> Problem:
    """Of (cluster, feature difference, label): a third of the clusters held out, the rest the pool.

    The components are those of the pool's features, whose labels are not needed for that.
    """
    generator = np.random.default_rng([seed, 3])
    turned = np.where(generator.random(len(rows)) < 0.5, 1.0, -1.0)
    feature = np.array([row[1] for row in rows]) * turned[:, None]
    label = 0.5 + turned * (np.array([row[2] for row in rows]) - 0.5)
    apart = np.array([zlib.crc32(f"{seed}:{row[0]}".encode()) % 3 == 0 for row in rows])
    pool = generator.permutation(np.flatnonzero(~apart))[: 2 * POOL]
    held = np.flatnonzero(apart & (label != 0.5))
    _, spread, directions = np.linalg.svd(feature[pool], full_matrices=False)
    project = directions[:COMPONENTS].T / np.sqrt((spread[:COMPONENTS] ** 2).sum() / len(pool))
    project *= np.sqrt(COMPONENTS)
    sign = np.sign(label[held] - 0.5)
    return Problem(feature[pool] @ project, label[pool], feature[held] @ project, sign)


def pandalm_rows(path: Path) -> list[tuple[str, Array, float]]:
    """The rows of PandaLM's test set; a label is the mean of the votes (1: first, 2, 0: a tie)."""
    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        one, other = str(row["response1"]), str(row["response2"])
        if one.strip() and other.strip() and one != other:
            votes = [{0: 0.5, 1: 1.0, 2: 0.0}[row[f"annotator{n}"]] for n in (1, 2, 3)]
            prompt = f"{row['instruction']}\n\n{row['input']}"
            found.append((prompt, hashed(one) - hashed(other), float(np.mean(votes))))
    return found


def problems(data: Path) -> dict[str, Callable[[int], Problem]]:
    """By name, each made from a seed."""
    panda = pandalm_rows(data / "pandalm" / "testset-v1.json")
    return {
        "even": lambda seed: linear(seed, 0),
        "half redundant": lambda seed: linear(seed, 0.5),
        "redundant": lambda seed: linear(seed, 0.9),
        "nonlinear": nonlinear,
        "pandalm": lambda seed: real(seed, panda),
    }


# ---------------------------------------------------------------- labels chosen one batch at a time


def accuracy(problem: Problem, posterior: HeadPosterior) -> float:
    said = np.sign(posterior.differences(problem.held_CH)) * problem.sign_C
    return float(np.mean((said + 1) / 2))


def learn(problem: Problem, method: Method, seed: int) -> list[float]:
    """Accuracy after each batch."""
    generator = np.random.default_rng([seed, 4])
    asked = list(generator.permutation(len(problem.label_C))[:START])
    curve = []
    while True:
        known = problem.feature_CH[asked], problem.label_C[asked]
        posterior = likeliest_posterior(*known, precisions=PRECISIONS)
        curve.append(accuracy(problem, posterior))
        if len(asked) >= MOST:
            return curve
        rest = np.setdiff1d(np.arange(len(problem.label_C)), asked)
        beliefs = laplace_beliefs(posterior, problem.feature_CH[rest])
        asked += rest[select_pairs(method, BATCH, beliefs, seed + len(asked)).index].tolist()


def labels_needed(curve: Array, level: float) -> float:
    """Labels until the accuracy is reached, on the line between batches; the most where never."""
    above = np.flatnonzero(curve >= level)
    if not above.size:
        return float(MOST)
    at = int(above[0])
    if at == 0:
        return float(START)
    share = (level - curve[at - 1]) / (curve[at] - curve[at - 1])
    return float(START + BATCH * (at - 1 + share))


def needed_interval(arm: Array, random: Array, confidence: float) -> Interval:
    """Labels that the arm's mean curve over seeds needs for what random has after `REACHED`."""
    at, seeds = (REACHED - START) // BATCH, len(arm)

    def of(chosen: Array) -> float:
        return labels_needed(arm[chosen].mean(axis=0), float(random[chosen, at].mean()))

    generator = np.random.default_rng(0)
    found = [of(generator.integers(0, seeds, seeds)) for _ in range(RESAMPLES)]
    return around(of(np.arange(seeds)), np.array(found), seeds, confidence)


def curves_table(name: str, curves: Mapping[Method, Array]) -> list[str]:
    """A line an arm: accuracies, the differences from random, the labels needed."""
    confidence = 1 - 0.05 / (len(curves) - 1)
    random = curves["random"]
    lines = []
    for method, curve in curves.items():
        middle = [100 * curve[:, (n - START) // BATCH].mean() for n in (100, REACHED, MOST)]
        cells = [name, method, *(f"{value:.1f}" for value in middle)]
        if method != "random":
            gap = difference_interval(curve.mean(axis=1), random.mean(axis=1), confidence)
            needed = needed_interval(curve, random, confidence)
            cells += [shown(gap, 100, digits=2), shown(needed, digits=0)]
        else:
            cells += ["", str(REACHED)]
        lines.append(line(cells))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--problems", nargs="+")
    chosen = parser.parse_args()
    seeds, start = range(chosen.seeds), time.perf_counter()
    made = problems(chosen.data)
    table = []
    for name in chosen.problems or made:
        instances = [made[name](seed) for seed in seeds]
        curves = {
            method: np.array([learn(p, method, s) for p, s in zip(instances, seeds, strict=True)])
            for method in METHODS
        }
        table += curves_table(name, curves)
        took = f"{name}: {time.perf_counter() - start:.0f} s"
        print(took, *table[-len(METHODS) :], sep="\n", file=sys.stderr, flush=True)
    reached = ("at 100, %", f"at {REACHED}", f"at {MOST}")
    print(heading("problem", "labels by", *reached, "less random", "needed"), *table, sep="\n")


if __name__ == "__main__":
    main()
