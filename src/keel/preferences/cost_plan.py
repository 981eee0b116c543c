"""What a plan of preference data costs, line by line, for a pocket calculator to check."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from operator import add, mul, truediv
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from keel.algorithms.spec import FrozenModel
from keel.config.errors import explain_validation
from keel.config.fields import unknown
from keel.types import KeelError

Amount = Annotated[float, Field(ge=0, le=1e12)]
Share = Annotated[float, Field(ge=0, le=10)]
Many = Annotated[int, Field(ge=1, le=10**12)]
WORK: Mapping[str, Callable[[float, float], float]] = {"×": mul, "/": truediv, "+": add}
Unit = Literal["", "tokens", "hours", "seconds", "TFLOP", "TFLOP/s", "dollars"]


class Price(FrozenModel):
    """A price, and where it is from."""

    value: Amount
    unit: str
    note: str


class ApiCalls(FrozenModel):
    """Calls of a model behind an API; prices by name, in dollars per million tokens."""

    name: str
    calls: Many
    repeated: Share = 0.0
    """The share of calls that are made again."""
    input_tokens: Amount
    output_tokens: Amount
    input_price: str
    output_price: str


class PeopleLabels(FrozenModel):
    """Labels of people, paid by the hour."""

    name: str
    labels: Many
    checks: Share = 0.0
    """Pairs with a known answer, for each label."""
    seconds: Amount
    """For one label."""
    wage: str
    """The name of a price in dollars per hour."""
    fee: Share = 0.0
    """Of a platform, on top of the wages."""


class GpuTraining(FrozenModel):
    """Training runs on one GPU."""

    name: str
    billion_parameters: Annotated[float, Field(gt=0, le=1e6)]
    pairs: Many
    tokens: Amount
    """Of a pair."""
    epochs: Many = 1
    runs: Many = 1
    overhead: Share = 0.0
    """What is not training, as a share of the training time."""
    teraflops: Annotated[float, Field(gt=0, le=1e6)]
    """Of the GPU, as its data sheet says."""
    utilisation: Annotated[float, Field(gt=0, le=1)]
    price: str
    """The name of a price in dollars per hour."""


class PlanPart(FrozenModel):
    """Things that are bought together, and what they are to cost."""

    name: str
    low: Amount
    high: Amount
    api: tuple[ApiCalls, ...] = Field(default=(), strict=False)
    human: tuple[PeopleLabels, ...] = Field(default=(), strict=False)
    gpu: tuple[GpuTraining, ...] = Field(default=(), strict=False)


class CostPlan(FrozenModel):
    """Prices of a date, and what is to be bought."""

    date: str
    prices: dict[str, Price]
    parts: Annotated[tuple[PlanPart, ...], Field(min_length=1, strict=False)]


@dataclass(frozen=True, slots=True)
class SumLine:
    """`text` = `value`, worked from left to right; money is rounded to cents, the rest to six
    significant digits, before it is used again."""

    label: str
    text: str
    value: float
    unit: Unit

    def __str__(self) -> str:
        shown = f"${self.value:,.2f}" if self.unit == "dollars" else number(self.value)
        unit = "" if self.unit == "dollars" else f" {self.unit}"
        return f"{self.label:<18} {self.text} = {shown}{unit}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        return {"label": self.label, "text": self.text, "value": self.value, "unit": self.unit}


Lines = tuple[SumLine, ...]


@dataclass(frozen=True, slots=True)
class PartCost:
    """A part with the lines of each item, and their sum in dollars."""

    part: PlanPart
    items: tuple[tuple[str, Lines], ...]
    total: SumLine

    @property
    def within(self) -> bool:
        """Whether it costs what it is to cost."""
        return self.part.low <= self.total.value <= self.part.high


def shipped_plan() -> Path:
    """The plan that comes with Keel."""
    return Path(str(resources.files("keel.preferences") / "cost_plan.toml"))


def read_plan(path: Path) -> CostPlan:
    """A plan from a TOML file. Raises KeelError, in one line, on whatever is wrong with it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KeelError(f"plan {path}: cannot be read: {error}: fix it, or name another") from None
    try:
        return CostPlan.model_validate(data)
    except ValidationError as error:
        raise KeelError(f"plan {path}: {explain_validation(error, data, CostPlan)}") from None


def plan_costs(plan: CostPlan) -> Iterator[PartCost]:
    """Each part's sum. Raises KeelError where a price is not there."""
    for part in plan.parts:
        items = [
            *((item.name, _api(item, plan)) for item in part.api),
            *((item.name, _human(item, plan)) for item in part.human),
            *((item.name, _gpu(item, plan)) for item in part.gpu),
        ]
        if not items:
            raise KeelError(f"part {part.name!r} is empty: give it api, human or gpu")
        first, *rest = (lines[-1].value for _, lines in items)
        terms = [term for value in rest for term in ("+", value)]
        yield PartCost(part, tuple(items), _line("together", "dollars", first, *terms))


def _api(item: ApiCalls, plan: CostPlan) -> Lines:
    """Tokens per call × calls × price."""
    calls = _line("calls", "", item.calls, "×", 1 + item.repeated)
    lines = [calls]
    for side, tokens, price in (
        ("input", item.input_tokens, item.input_price),
        ("output", item.output_tokens, item.output_price),
    ):
        spent = _line(f"{side} tokens", "tokens", calls.value, "×", tokens)
        dollars = _price(plan, price)
        cost = _line(f"{side} cost", "dollars", spent.value, "/", 1_000_000, "×", dollars)
        lines += [spent, cost]
    return (*lines, _line("cost", "dollars", lines[2].value, "+", lines[4].value))


def _human(item: PeopleLabels, plan: CostPlan) -> Lines:
    """Seconds per label × wage."""
    labels = _line("labels and checks", "", item.labels, "×", 1 + item.checks)
    time = _line("time", "hours", labels.value, "×", item.seconds, "/", 3_600)
    wages = _line("wages", "dollars", time.value, "×", _price(plan, item.wage))
    return (
        labels,
        time,
        wages,
        _line("cost with the fee", "dollars", wages.value, "×", 1 + item.fee),
    )


def _gpu(item: GpuTraining, plan: CostPlan) -> Lines:
    """FLOP 6 N tokens / (FLOP/s × utilisation) × price.

    6 N: 2 N forward, 4 N backward (Kaplan et al. 2020 [2001.08361]). LoRA needs no gradients of the
    frozen weights, about 4 N, so that this is an upper bound.
    """
    tokens = _line("tokens", "tokens", item.pairs, "×", item.tokens, "×", item.epochs)
    # 10⁹ parameters × tokens are 10⁻³ TFLOP.
    billions = item.billion_parameters
    work = _line("6 N tokens", "TFLOP", 6, "×", billions, "×", tokens.value, "/", 1_000)
    speed = _line("speed", "TFLOP/s", item.teraflops, "×", item.utilisation)
    run = _line("time of a run", "hours", work.value, "/", speed.value, "/", 3_600)
    time = _line("time of all", "hours", run.value, "×", item.runs, "×", 1 + item.overhead)
    cost = _line("cost", "dollars", time.value, "×", _price(plan, item.price))
    return tokens, work, speed, run, time, cost


def _line(label: str, unit: Unit, first: float, *rest: float | str) -> SumLine:
    """Numbers with ×, / or + between them, from left to right."""
    value, text = float(first), number(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        value = WORK[str(sign)](value, float(term))
        text += f" {sign} {number(float(term))}"
    value = round(value, 2) if unit == "dollars" else float(f"{value:.6g}")
    return SumLine(label, text, value, unit)


def number(value: float) -> str:
    """A number as it is printed: its digits, with commas between thousands."""
    text = f"{value:,.9f}".rstrip("0").rstrip(".")
    return text if float(text.replace(",", "")) or not value else f"{value:.6g}"


def _price(plan: CostPlan, name: str) -> float:
    if name not in plan.prices:
        raise KeelError(unknown("price", name, plan.prices))
    return plan.prices[name].value
