"""How far a judge that saw each pair in both orders can be trusted. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keel.analysis.statistics import Interval, mean_interval, share_interval
from keel.preferences.records import JudgedPair, LabelRecord, mean_label
from keel.preferences.statistics import cohen_kappa, longer_preferred, shown, verdict
from keel.preferences.store import PreferenceStore

FIGURES = {
    "order_consistency": "same in both orders",
    "position_bias": "position bias",
    "longer_preferred": "longer preferred",
}


@dataclass(frozen=True, slots=True)
class TwoOrders:
    """A pair and a judge's labels of it, with its first completion shown first and second."""

    pair: JudgedPair
    first: LabelRecord
    second: LabelRecord

    @property
    def decided(self) -> bool:
        """Whether both orders have a verdict."""
        return self.first.value is not None and self.second.value is not None

    @property
    def value(self) -> float:
        """P(the first completion is better): the mean of the two."""
        found = mean_label((self.first, self.second))
        return 0.5 if found is None else found[0]

    @property
    def place(self) -> int:
        """1 if both orders prefer the answer shown first, −1 if the one shown second, else 0."""
        sides = (self.first.value or 0.0) - 0.5, 0.5 - (self.second.value or 0.0)
        return (min(sides) > 0) - (max(sides) < 0)


def audit_judges(store: PreferenceStore) -> list[dict[str, Any]]:
    """Of each judge and rubric with labels in both orders: how it judged, ready for JSON.

    Intervals are of 95 %, clustered by prompt. Of several labels of one order the last counts.

    - `order_consistency`: the share of pairs with the same verdict in both orders;
    - `position_bias`: how much more often both orders prefer the place shown first than the
      second, in [−1, 1];
    - `longer_preferred`: the share of pairs of different lengths with a winner that is the longer;
    - `models`: the mean label of each model's completions against other models' (½: a tie);
    - `own`: that of the judge's own completions, None if there are none, and by people on the
      same pairs if they labelled some;
    - `people`: accuracy and Cohen's κ against people's mean label (first, second or tie).
    """
    found: dict[tuple[str, str], list[TwoOrders]] = {}
    for pair in store.judged_pairs():
        orders: dict[tuple[str, str], dict[str, LabelRecord]] = {}
        for label in pair.labels:
            if label.source == "judge" and label.shown_first is not None:
                key = (label.annotator, label.rubric)
                orders.setdefault(key, {})[label.shown_first] = label
        for key, sides in orders.items():
            if len(sides) == 2:
                found.setdefault(key, []).append(TwoOrders(pair, sides["first"], sides["second"]))
    return [_audit(*key, pairs) for key, pairs in found.items()]


def _audit(judge: str, rubric: str, every: Sequence[TwoOrders]) -> dict[str, Any]:
    pairs = [pair for pair in every if pair.decided]
    prompts = [pair.pair.prompt.id for pair in pairs]
    same = [pair.first.value == pair.second.value for pair in pairs]
    return {
        "judge": judge,
        "rubric": rubric,
        "pairs": len(pairs),
        "no_verdict": len(every) - len(pairs),
        "ties": sum(pair.value == 0.5 for pair in pairs),
        "order_consistency": share_interval(same, prompts).as_dict(),
        "position_bias": _position(pairs).as_dict(),
        "longer_preferred": longer_preferred((pair.pair, pair.value) for pair in pairs).as_dict(),
        **_models(judge, pairs),
        "people": _people(pairs),
    }


def _position(pairs: Sequence[TwoOrders]) -> Interval:
    """The mean of `place`, in [−1, 1].

    Where all pairs are alike their spread says nothing: others are then at most as many as
    `share_interval` leaves room for.
    """
    places = [pair.place for pair in pairs]
    prompts = [pair.pair.prompt.id for pair in pairs]
    found = mean_interval(places, prompts)
    low, high = found.low, found.high
    if len(set(places)) == 1:
        others = 1 - share_interval([1.0] * len(places), prompts).low
        room = others if places[0] == 0 else 2 * others
        low, high = found.mean - room, found.mean + room
    return Interval(found.mean, max(low, -1.0), min(high, 1.0), found.n)


def _models(judge: str, pairs: Sequence[TwoOrders]) -> dict[str, Any]:
    """Of pairs of two models: how each fares, and the judge's own completions."""
    values: dict[str, list[tuple[float, str]]] = {}
    by_people: list[tuple[float, str]] = []
    for pair in pairs:
        first, second, prompt = pair.pair.first, pair.pair.second, pair.pair.prompt.id
        if first.model == second.model:
            continue
        for model, value in ((first.model, pair.value), (second.model, 1 - pair.value)):
            values.setdefault(model, []).append((value, prompt))
        people = _by_people(pair.pair)
        if judge in (first.model, second.model) and people is not None:
            by_people.append((people if first.model == judge else 1 - people, prompt))
    rates = [{"model": name, "win_rate": _mean(some)} for name, some in sorted(values.items())]
    own = _mean(values[judge]) if judge in values else None
    return {
        "models": rates,
        "own": own,
        "own_by_people": _mean(by_people) if by_people else None,
    }


def _people(pairs: Sequence[TwoOrders]) -> dict[str, Any] | None:
    """Agreement with people on the pairs that they labelled; None if there are none."""
    known = [(pair, value) for pair in pairs if (value := _by_people(pair.pair)) is not None]
    if not known:
        return None
    judged = [verdict(pair.value) for pair, _ in known]
    people = [verdict(value) for _, value in known]
    prompts = [pair.pair.prompt.id for pair, _ in known]
    same = [one == other for one, other in zip(judged, people, strict=True)]
    return {
        "pairs": len(known),
        "accuracy": share_interval(same, prompts).as_dict(),
        "cohen_kappa": cohen_kappa(judged, people, prompts).as_dict(),
    }


def _by_people(pair: JudgedPair) -> float | None:
    """The mean of people's labels."""
    found = mean_label(label for label in pair.labels if label.source == "human")
    return None if found is None else found[0]


def _mean(values: Sequence[tuple[float, str]]) -> dict[str, float | int]:
    shares, prompts = zip(*values, strict=True)
    return share_interval(shares, prompts).as_dict()


def audit_lines(judges: Sequence[Mapping[str, Any]]) -> list[str]:
    """An audit for people, a line each."""
    lines = []
    for judge in judges:
        lines.append(
            f"judge {judge['judge']}: {judge['pairs']} pairs in both orders, {judge['ties']} ties, "
            f"{judge['no_verdict']} without a verdict"
        )
        rubric = " ".join(judge["rubric"].split())
        lines.append(f"  rubric: {rubric if len(rubric) <= 70 else rubric[:69] + '…'}")
        lines += [_figure(name, judge[key]) for key, name in FIGURES.items()]
        lines += [_figure(f"wins of {row['model']}", row["win_rate"]) for row in judge["models"]]
        if judge["own"] is not None:
            lines.append(_figure("its own completions", judge["own"]))
        if judge["own_by_people"] is not None:
            lines.append(_figure("these, by people", judge["own_by_people"]))
        if judge["people"] is not None:
            lines.append(_figure("accuracy, of people", judge["people"]["accuracy"]))
            lines.append(_figure("Cohen's κ, of people", judge["people"]["cohen_kappa"]))
    return lines or ["no pair has a judge's labels in both orders"]


def _figure(name: str, value: Mapping[str, Any]) -> str:
    return f"  {name:<22} {shown(value)}   n = {value['n']}"
