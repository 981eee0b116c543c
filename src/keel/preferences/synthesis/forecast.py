"""What a synthesis will take, from a sample of its prompts that was done first. Torch-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from keel.analysis.statistics import Interval, mean_interval
from keel.preferences.records import CostKind, CostRecord, CostUnit

Role = Literal["completions", "labels"]
"""What a model is asked for."""
Unit = Literal["dollars", "input_tokens", "output_tokens", "hours", "machine_hours"]
UNITS: tuple[Unit, ...] = get_args(Unit)
LEDGER: Mapping[Unit, tuple[CostKind, CostUnit]] = {
    "dollars": ("api", "dollars"),
    "hours": ("api", "hours"),
    "machine_hours": ("gpu", "hours"),
}
"""The forecast's entries of the ledger: kind and unit."""


class Usage:
    """What models took in this process, by role, model, prompt and unit.

    The hours of a server are those of a run that keeps all its requests busy.
    """

    def __init__(self) -> None:
        self.amounts: defaultdict[tuple[Role, str, str, Unit], float] = defaultdict(float)

    def add(self, role: Role, model: str, prompt: str, amounts: Mapping[Unit, float]) -> None:
        """Count what a request for a prompt took."""
        for unit, amount in amounts.items():
            self.amounts[role, model, prompt, unit] += amount


@dataclass(frozen=True, slots=True)
class CostForecast:
    """What `prompts` take in all: means over the `sample` that is done, which they include.

    `models` has the means by role and model, `totals` their sums with 95 % intervals, from how far
    the sample's prompts differ. Dollars are there only if the price of every server is known.
    """

    sample: int
    prompts: int
    models: Mapping[tuple[Role, str], Mapping[Unit, float]]
    totals: Mapping[Unit, Interval]

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "sample": self.sample,
            "prompts": self.prompts,
            "models": [{"role": role, "model": m, **a} for (role, m), a in self.models.items()],
            "totals": {unit: asdict(total) for unit, total in self.totals.items()},
        }

    def entries(self, plan: str, round: int) -> Iterator[CostRecord]:
        """Its entries of the ledger."""
        for unit, (kind, name) in LEDGER.items():
            if unit in self.totals:
                id, amount = f"forecast/{plan}/{unit}", self.totals[unit].mean
                yield CostRecord(id, kind, amount, name, "synthesis", round, forecast=True)

    def lines(self, budget: float | None = None) -> list[str]:
        """The forecast for people, a line each."""
        lines = [f"forecast, from a sample of {self.sample} of {self.prompts} prompts"]
        for (role, name), amounts in self.models.items():
            parts = [_amount(unit, amount) for unit, amount in amounts.items()]
            lines.append(f"  {role} of {name}: {', '.join(parts)}")
        for unit in LEDGER:
            if (total := self.totals.get(unit)) is not None:
                known = math.isfinite(total.low) and math.isfinite(total.high)
                ends = [_amount(unit, end) for end in (total.low, total.high)] if known else []
                interval = f" [{', '.join(ends)}]" if known else ""
                lines.append(f"  total: {_amount(unit, total.mean)}{interval}")
        if "dollars" not in self.totals and "hours" in self.totals:
            lines.append("  total: dollars unknown (no price)")
        if budget is not None and "dollars" in self.totals and self.totals["dollars"].mean > budget:
            lines.append(f"  the budget of ${budget:g} will not cover it")
        return lines


def forecast_costs(
    usage: Usage, priced: bool, sample: Collection[str], prompts: int
) -> CostForecast:
    """From what the prompts of a sample (by id) took, what `prompts` of their kind take.

        n/s Σ_i x_i   [Σ_i x_i + (n − s) low, Σ_i x_i + (n − s) high]

    with n prompts, s of them in the sample, and the interval of their mean.
    """
    scale, rest = prompts / len(sample), prompts - len(sample)
    models: dict[tuple[Role, str], dict[Unit, float]] = {}
    by_prompt: dict[Unit, dict[str, float]] = {}
    for (role, model, prompt, unit), amount in usage.amounts.items():
        if prompt in sample and (priced or unit != "dollars"):
            amounts = models.setdefault((role, model), {})
            amounts[unit] = amounts.get(unit, 0.0) + scale * amount
            by_prompt.setdefault(unit, dict.fromkeys(sample, 0.0))[prompt] += amount
    totals = {}
    for unit in UNITS:
        if unit in by_prompt:
            values = list(by_prompt[unit].values())
            found, done = mean_interval(values), math.fsum(values)
            low, high = (done + rest * max(end, 0.0) for end in (found.low, found.high))
            totals[unit] = Interval(scale * done, low, high, len(values))
    return CostForecast(len(sample), prompts, models, totals)


def _amount(unit: Unit, value: float) -> str:
    """An amount with its unit."""
    if unit == "dollars":
        return f"${value:.4g}"
    if unit.endswith("tokens"):
        return f"{value:.0f} {unit.replace('_', ' ')}"
    of = " of this machine" if unit == "machine_hours" else ""
    for name, hours in (("h", 1.0), ("min", 1 / 60)):
        if value >= hours:
            return f"{value / hours:.3g} {name}{of}"
    return f"{3600 * value:.2g} s{of}"
