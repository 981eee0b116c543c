"""`keel prefs select`: which pairs to label next, and who labels them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.analysis.statistics import Array, Interval
from keel.cli.prefs_store import new_file, write_errors
from keel.platform.files import write_bytes
from keel.preferences.acquisition import select_pairs
from keel.preferences.annotation.gold import gold_labels
from keel.preferences.routing import Labeller, Routing, label_gains, route_labels
from keel.preferences.selection import (
    HeldOutCheck,
    MethodChoice,
    UncertaintyPlan,
    choose_method,
    held_out_check,
    hints,
    near_copies,
    pool_beliefs,
)
from keel.preferences.store.pool import (
    LabelPool,
    judge_agreement,
    prefer_pairs,
    read_pool,
    read_texts,
)
from keel.preferences.store.store import PreferenceStore
from keel.preferences.word_features import (
    principal_features,
    scaled_features,
    word_differences,
)
from keel.runs.values import plain, record_line
from keel.types import KeelError

COUNT, SHOWN, FEWEST_JUDGED = 100, 20, 20
"""Pairs of a batch unless given, pairs that are printed, and what an accuracy is measured on."""
ROUTING = ("budget", "judge_price", "human_price")


@dataclass(frozen=True, slots=True, eq=False)
class PoolFeatures:
    """Features of some pairs; `at` are their places in the pool, `long` how many do not fit."""

    feature_CH: Array
    at: dict[int, int]
    what: str
    long: int

    def of(self, places: Sequence[int]) -> Array:
        """The features of places."""
        return self.feature_CH[[self.at[place] for place in places]]


@dataclass(frozen=True, slots=True)
class Labellers:
    """The judge and people, and the agreement that the judge's accuracy is from, if measured."""

    both: tuple[Labeller, Labeller]
    measured: Interval | None


def run(arguments: argparse.Namespace) -> None:
    """Choose, set priorities, and print what was chosen and how far it can be relied on."""
    _refuse(arguments)
    out = None if arguments.out is None else new_file(arguments.out)
    with PreferenceStore(Path(arguments.store)) as store:
        pool = read_pool(store, arguments.source)
        labellers = _labellers(store, arguments)
        result, chosen = _choose(store, pool, labellers, arguments)
        people = [row["pair"] for row in chosen if row["labeller"] == "human"]
        priorities = prefer_pairs(store, people, pool.priority)
    rows = [{**row, "priority": priorities.get(row["pair"])} for row in chosen]
    if out is not None:
        with write_errors(out):
            write_bytes(out, b"".join(record_line(row, {}) for row in rows))
    result = {"store": arguments.store, **result, "chosen": rows, "out": arguments.out}
    if arguments.json:
        print(json.dumps(plain(result), ensure_ascii=False))
    else:
        print("\n".join(_lines(result)))


def _refuse(arguments: argparse.Namespace) -> None:
    """Raises KeelError for options that contradict each other."""
    given = [name for name in ROUTING if getattr(arguments, name) is not None]
    if given and len(given) < len(ROUTING):
        missing = ", ".join(f"--{n.replace('_', '-')}" for n in ROUTING if n not in given)
        raise KeelError(f"who labels depends on the budget and both prices: give {missing} too")
    for name in ("judge_accuracy", "human_accuracy"):
        accuracy = getattr(arguments, name)
        option = f"--{name.replace('_', '-')}"
        if accuracy is not None and not given:
            raise KeelError(f"{option} has no effect without a budget: give --budget and prices")
        if accuracy is not None and accuracy <= 0.5:
            raise KeelError(f"{option} {accuracy:g}: such labels tell nothing: give more than 0.5")
    for name in given:
        if not getattr(arguments, name) > 0:
            raise KeelError(f"--{name.replace('_', '-')} 0: give a number above 0")
    if arguments.stage is not None and arguments.model is None:
        raise KeelError("--stage has no effect without a model: give --model RUN")
    if arguments.ensemble == 1:
        raise KeelError("--ensemble 1: one head has no spread: give 2 or more")
    if arguments.by == "random" and not given:
        for name in ("model", "ensemble"):
            if getattr(arguments, name) is not None:
                raise KeelError(f"--{name} has no effect with --by random: drop one of the two")


def _places(
    store: PreferenceStore, pool: LabelPool, arguments: argparse.Namespace
) -> tuple[list[int], list[int]]:
    """The pairs to choose among, and those to learn from. Gold pairs have a known label."""
    gold = gold_labels(store)
    asked = np.array([id not in gold for id in pool.ids], dtype=bool)
    if arguments.round is not None:
        asked &= pool.rounds == arguments.round
    if not asked.any():
        which = "" if arguments.round is None else f" of round {arguments.round}"
        raise KeelError(f"{arguments.store}: there is no pair{which}: add pairs first")
    found = np.flatnonzero(asked & ~pool.people_C), np.flatnonzero(~np.isnan(pool.label_C))
    if not found[0].size:
        raise KeelError(f"{arguments.store}: people have labelled every pair: add pairs first")
    if arguments.pool is not None:
        found = tuple(  # type: ignore[assignment]
            np.sort(np.random.default_rng([arguments.seed, n]).permutation(part)[: arguments.pool])
            for n, part in enumerate(found)
        )
    return found[0].tolist(), found[1].tolist()


def _features(
    store: PreferenceStore,
    pool: LabelPool,
    candidates: Sequence[int],
    labelled: Sequence[int],
    arguments: argparse.Namespace,
) -> PoolFeatures:
    places = sorted({*candidates, *labelled})
    texts = read_texts(store, [pool.ids[place] for place in places])
    if arguments.model is None:
        found = principal_features(word_differences((t.chosen, t.rejected) for t in texts))
        what = f"hashed words on {found.shape[1]} principal components"
        return PoolFeatures(found, {place: row for row, place in enumerate(places)}, what, 0)
    from keel.preferences.features import text_features

    states = text_features(arguments.model, texts, arguments.stage)
    fits = np.asarray(~np.isnan(states).any(axis=1))
    kept = [place for place, fit in zip(places, fits, strict=True) if fit]
    what = f"hidden states of {arguments.model} ({states.shape[1]})"
    rows = {place: row for row, place in enumerate(kept)}
    return PoolFeatures(scaled_features(states[fits]), rows, what, int((~fits).sum()))


def _labellers(store: PreferenceStore, arguments: argparse.Namespace) -> Labellers | None:
    """The judge and people; None without a budget."""
    if arguments.budget is None:
        return None
    accuracy, measured = arguments.judge_accuracy, None
    if accuracy is None:
        measured = judge_agreement(store)
        accuracy = measured.mean
        if measured.n < FEWEST_JUDGED:
            raise KeelError(
                f"{arguments.store}: a judge and people both decided {measured.n} pairs, too few "
                f"to measure its accuracy ({FEWEST_JUDGED} needed): give --judge-accuracy"
            )
        if accuracy <= 0.5:
            raise KeelError(
                f"{arguments.store}: the judge agrees with people on {100 * accuracy:.0f} % of "
                "pairs, which is no better than chance: leave its labels out"
            )
    people = 1.0 if arguments.human_accuracy is None else arguments.human_accuracy
    judge = Labeller("judge", arguments.judge_price, accuracy)
    return Labellers((judge, Labeller("human", arguments.human_price, people)), measured)


def _choose(
    store: PreferenceStore,
    pool: LabelPool,
    labellers: Labellers | None,
    arguments: argparse.Namespace,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is known of the pool, and a row for each pair that is chosen."""
    candidates, labelled = _places(store, pool, arguments)
    if arguments.by == "random" and labellers is None:
        order = np.random.default_rng(arguments.seed).permutation(candidates)
        rows = [_row(pool, place) for place in order[: arguments.count or COUNT]]
        return _known(len(labelled), len(candidates), choose_method("random", None)), rows
    features = _features(store, pool, candidates, labelled, arguments)
    candidates, labelled = ([p for p in q if p in features.at] for q in (candidates, labelled))
    if not candidates:
        raise KeelError(f"{arguments.store}: no pair fits the model's context: name another model")
    plan = UncertaintyPlan(arguments.ensemble or 0, arguments.seed)
    known = features.of(labelled), pool.label_C[labelled]
    check = held_out_check(*known, [pool.prompts[place] for place in labelled], plan)
    pool_CH = features.of(candidates)
    method = choose_method(arguments.by, near_copies(pool_CH, arguments.seed))
    beliefs = pool_beliefs(*known, pool_CH, plan)
    count = arguments.count or (COUNT if labellers is None else len(candidates))
    picked = select_pairs(method.method, count, beliefs, arguments.seed)
    result = _known(len(labelled), len(candidates), method, features, check)

    def row(at: int, **more: Any) -> dict[str, Any]:
        believed = {
            "probability": float(beliefs.uncertainty.probability_C[at]),
            "deviation": float(np.sqrt(beliefs.variance_C[at])),
        }
        return _row(pool, candidates[at]) | believed | more

    if labellers is None:
        scored = zip(picked.index, picked.score, strict=True)
        return result, [row(at, score=float(score)) for at, score in scored]
    gains = label_gains(beliefs, labellers.both)[:, picked.index]
    gains[0, pool.judge_C[candidates][picked.index]] = 0.0  # the judge has labelled these
    routing = route_labels(gains, [one.price for one in labellers.both], arguments.budget)
    routed = zip(picked.index[routing.index], routing.labeller, routing.gain, strict=True)
    rows = [
        row(at, labeller=labellers.both[who].name, score=float(gain)) for at, who, gain in routed
    ]
    return result | {"routing": _routing(routing, labellers, arguments.budget)}, rows


def _known(
    labelled: int,
    unlabelled: int,
    method: MethodChoice,
    features: PoolFeatures | None = None,
    check: HeldOutCheck | None = None,
) -> dict[str, Any]:
    return {
        "labelled": labelled,
        "unlabelled": unlabelled,
        "features": None if features is None else features.what,
        "left_out_long": 0 if features is None else features.long,
        "by": method.method,
        "reason": method.reason,
        "held_out": None
        if check is None
        else {"learned": check.learned, "n": check.held_out, **check.report.as_dict()},
        "hints": [] if features is None else hints(labelled, check),
        "routing": None,
    }


def _row(pool: LabelPool, place: int) -> dict[str, Any]:
    return {"pair": pool.ids[place], "labeller": "human"}


def _routing(routing: Routing, labellers: Labellers, budget: float) -> dict[str, Any]:
    """How the budget is spent."""
    each = [
        {
            "labeller": one.name,
            "pairs": int((routing.labeller == number).sum()),
            "price": one.price,
            "accuracy": one.accuracy,
            "gain": float(routing.gain[routing.labeller == number].sum()),
        }
        for number, one in enumerate(labellers.both)
    ]
    measured = None if labellers.measured is None else labellers.measured.as_dict()
    return {
        "budget": budget,
        "spent": routing.spent,
        "labellers": each,
        "judge_agreement": measured,
    }


# ---------------------------------------------------------------- for people


def _lines(result: Mapping[str, Any]) -> list[str]:
    lines = [
        f"{result['store']}: {result['labelled']:,} labelled pairs to learn from, "
        f"{result['unlabelled']:,} without a person's label to choose from"
    ]
    if result["features"] is not None:
        lines.append(f"features: {result['features']}")
    if result["left_out_long"]:
        lines.append(f"left out: {result['left_out_long']} pairs longer than the model's context")
    if result["held_out"] is not None:
        lines.append(_held_out(result["held_out"]))
    lines.append(f"by {result['by']}: {result['reason']}")
    lines += [f"hint: {hint}" for hint in result["hints"]]
    if result["routing"] is not None:
        lines += _routed(result["routing"])
    chosen = result["chosen"]
    if not chosen:
        return [*lines, "no pair is chosen: the budget buys no label that tells anything"]
    lines.append(f"{'pair':<34}{'labeller':<10}{'score':>9}{'p(first)':>10}{'s.d.':>8}")
    for row in chosen[:SHOWN]:
        figures = "".join(
            f"{row[name]:>{width}.{digits}f}" if name in row else f"{'–':>{width}}"
            for name, width, digits in (
                ("score", 9, 4),
                ("probability", 10, 3),
                ("deviation", 8, 2),
            )
        )
        lines.append(f"{row['pair']:<34}{row['labeller']:<10}{figures}")
    if len(chosen) > SHOWN:
        lines.append(f"… and {len(chosen) - SHOWN:,} more (--out FILE, --json)")
    people = sum(row["labeller"] == "human" for row in chosen)
    lines.append(f"{people:,} pairs are first in people's queue, in this order")
    if result["out"] is not None:
        lines.append(f"{result['out']}: {len(chosen):,} rows")
    return lines


def _held_out(found: Mapping[str, Any]) -> str:
    pairs = found["pairs"]
    accuracy, gain = _interval(pairs["accuracy"], 100, 0), _interval(found["gain"], 1, 4)
    return (
        f"on {found['n']:,} held-out labelled pairs: accuracy {accuracy} %, calibration error "
        f"{100 * pairs['ece']:.1f} %, log loss {pairs['log_loss']:.3f} (ln 2 = 0.693: no "
        f"knowledge), gain of the variance {gain}"
    )


def _routed(routing: Mapping[str, Any]) -> list[str]:
    found = routing["judge_agreement"]
    lines = []
    if found is not None:
        interval = _interval(found, 100, 0)
        lines.append(f"the judge agrees with people on {interval} % of {found['n']} pairs")
    for one in routing["labellers"]:
        lines.append(
            f"{one['labeller']}: {one['pairs']:,} pairs × ${one['price']:g} = "
            f"${one['pairs'] * one['price']:,.2f}, accuracy {one['accuracy']:.3f}, "
            f"gain {one['gain']:.2f} nats"
        )
    return [*lines, f"together ${routing['spent']:,.2f} of ${routing['budget']:,.2f}"]


def _interval(value: Mapping[str, Any], scale: float, digits: int) -> str:
    mean, *ends = (value[name] for name in ("mean", "low", "high"))
    if mean is None:
        return "undefined"
    known = all(end is not None for end in ends)
    text = f" [{scale * ends[0]:.{digits}f}, {scale * ends[1]:.{digits}f}]" if known else ""
    return f"{scale * mean:.{digits}f}{text}"
