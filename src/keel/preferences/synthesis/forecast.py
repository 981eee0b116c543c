"""What a synthesis will take in tokens, dollars and hours. Torch-free.

Tokens in are proportional to the bytes sent; tokens out, seconds and requests are means. Both are
of a sample of prompts that were paid for, or assumed where no request may be sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from keel.analysis.statistics import mean_interval
from keel.preferences.store.records import CompletionRecord, CostRecord, PromptRecord
from keel.preferences.store.store import PreferenceStore
from keel.preferences.synthesis.completions import content_bytes, missing_samples
from keel.preferences.synthesis.labels import question_bytes, unjudged
from keel.preferences.synthesis.ledger import CallUsage, Role
from keel.preferences.synthesis.options import (
    CompletionModel,
    ModelFolder,
    ModelServer,
    SynthesisOptions,
    judge_options,
)
from keel.preferences.synthesis.pairing import different_texts
from keel.rewards.judge.prompts import pair_question

BYTES_A_TOKEN = 4.0
"""Of English text, about."""
REPLY_TOKENS = 80.0
"""A judge's reply: one or two sentences in JSON."""
UNITS = ("dollars", "input_tokens", "output_tokens", "hours")

Roles = Sequence[tuple[Role, CompletionModel]]
Usages = Mapping[tuple[Role, str], CallUsage]
"""What each model took, by its role and name."""


@dataclass(frozen=True, slots=True)
class CallRates:
    """What one completion or label takes. `calls` counts requests, of which `bytes_out` is the
    text; `seconds` is None where unknown."""

    tokens_a_byte: float
    tokens_out: float
    bytes_out: float
    seconds: float | None
    calls: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a model takes for completions or labels. `dollars` and `hours` are None where unknown;
    the hours of a model folder are the machine's."""

    role: Role
    model: str
    count: float
    input_tokens: float
    output_tokens: float
    dollars: float | None
    hours: float | None
    machine: bool = False


@dataclass(frozen=True, slots=True)
class CostForecast:
    """What a synthesis takes in all, by model. `basis` says what it was made from.

    `margin` is the relative half-width of the 95 % interval of what lies ahead, from how far the
    prompts of the sample differ; None where there is none.
    """

    rows: tuple[ModelCosts, ...]
    basis: str
    margin: float | None = None

    def total(self, unit: str, machine: bool = False) -> float | None:
        """The sum over the servers (or the machine); None where a part is unknown."""
        values = [getattr(row, unit) for row in self.rows if row.machine == machine]
        return None if None in values else math.fsum(values)

    def as_dict(self) -> dict[str, Any]:
        totals = {unit: self.total(unit) for unit in UNITS}
        machine = any(row.machine for row in self.rows)
        totals |= {"machine_hours": self.total("hours", machine=True)} if machine else {}
        rows = [asdict(row) for row in self.rows]
        return {**totals, "margin": self.margin, "basis": self.basis, "models": rows}

    def entries(self, plan: str, round: int) -> list[CostRecord]:
        """Its entries of the ledger, one set for each plan."""
        found = []
        for row in self.rows:
            kind, units = ("gpu", ("hours",)) if row.machine else ("api", UNITS)
            for unit in units:
                if (amount := getattr(row, unit)) is not None:
                    name = unit.replace("_", " ")
                    id = f"forecast/{plan}/{row.role}/{row.model}/{name}"
                    purpose = f"{row.role} of {row.model}"
                    found.append(
                        CostRecord(id, kind, amount, name, purpose, round, True)  # type: ignore[arg-type]
                    )
        return found


def recorded_forecast(store: PreferenceStore, plan: str) -> CostForecast | None:
    """The forecast of a plan that is in the ledger already."""
    begin = f"forecast/{plan}/"
    rows = store.database.rows(
        "SELECT purpose, kind, unit, amount FROM costs WHERE forecast"
        " AND substr(id, 1, ?) = ? ORDER BY seq",
        (len(begin), begin),
    )
    found: dict[tuple[str, str], dict[str, float]] = {}
    for purpose, kind, unit, amount in rows:
        found.setdefault((purpose, kind), {})[unit.replace(" ", "_")] = amount
    if not found:
        return None
    models = []
    for (purpose, kind), amounts in found.items():
        role, _, model = purpose.partition(" of ")
        models.append(
            ModelCosts(
                role,  # type: ignore[arg-type]
                model,
                math.nan,
                amounts.get("input_tokens", 0.0),
                amounts.get("output_tokens", 0.0),
                amounts.get("dollars"),
                amounts.get("hours"),
                kind == "gpu",
            )
        )
    return CostForecast(tuple(models), "as it was made before")


def roles_of(options: SynthesisOptions) -> Roles:
    """Every model with what it is asked for."""
    asked: list[tuple[Role, CompletionModel]] = [("completions", one) for one in options.models]
    return [*asked, ("labels", options.judge)] if options.judge is not None else asked


def forecast_rest(
    store: PreferenceStore,
    options: SynthesisOptions,
    prompts: Sequence[PromptRecord],
    usages: Usages,
    different: float,
    tokens_a_byte: float | None = None,
) -> tuple[ModelCosts, ...]:
    """What these prompts have yet to take, by what the models took so far.

    `different` is the share of completions whose text is new to their prompt. Where a model took
    nothing yet its rates are assumed (see `assumed_rates`).
    """
    rates = {
        (role, model.model): measured_rates(usages.get((role, model.model)))
        or assumed_rates(store, options, role, model, tokens_a_byte)
        for role, model in roles_of(options)
    }
    missing = {
        model.model: {p.id: len(n) for p, n in missing_samples(store, options, model, prompts)}
        for model in options.models
    }
    waiting: dict[str, int] = {}
    if options.judge is not None:
        for pair in unjudged(store, options, options.judge, (p.id for p in prompts)):
            waiting[pair.prompt] = waiting.get(pair.prompt, 0) + 1
    paired = dict(store.database.rows("SELECT prompt, COUNT(*) FROM pairs GROUP BY prompt"))
    counts = dict.fromkeys(rates, 0.0)
    sent = dict.fromkeys(rates, 0.0)
    frame = question_bytes(pair_question("", "", "", rubric=options.rubric))
    for prompt in prompts:
        new = {name: missing[name].get(prompt.id, 0) for name in missing}
        size = content_bytes(prompt.content)
        for name, count in new.items():
            counts["completions", name] += count
            sent["completions", name] += count * size
        if options.judge is not None:
            there = different_texts(list(store.completions(prompt.id)))
            lengths = {name: rates["completions", name].bytes_out for name in new}
            longest = _mean_length(there, new, lengths)
            texts = len(there) + different * sum(new.values())
            pairs = max(0.0, min(options.pairs, texts * (texts - 1) / 2) - paired.get(prompt.id, 0))
            labels = 2 * (pairs + waiting.get(prompt.id, 0))
            key: tuple[Role, str] = ("labels", options.judge.model)
            counts[key] += labels
            sent[key] += labels * (frame + size + 2 * longest)
    return tuple(
        _costs(options, role, model, counts[role, model.model], sent[role, model.model], rates)
        for role, model in roles_of(options)
    )


def spent_so_far(options: SynthesisOptions, usages: Usages) -> tuple[ModelCosts, ...]:
    """What the models took in this process."""
    found = []
    for role, model in roles_of(options):
        usage = usages.get((role, model.model)) or CallUsage()
        seconds = usage.seconds
        if isinstance(model, ModelServer):
            seconds /= judge_options(options, model, role == "labels").concurrency
        priced = isinstance(model, ModelServer) and model.price is not None
        found.append(
            ModelCosts(
                role,
                model.model,
                usage.asked,
                usage.tokens_in,
                usage.tokens_out,
                usage.dollars if priced else None,
                seconds / 3600,
                isinstance(model, ModelFolder),
            )
        )
    return tuple(found)


def add_costs(one: Sequence[ModelCosts], other: Sequence[ModelCosts]) -> tuple[ModelCosts, ...]:
    """Two lists of the same models, added up."""

    def both(a: float | None, b: float | None) -> float | None:
        return None if a is None or b is None else a + b

    return tuple(
        ModelCosts(
            a.role,
            a.model,
            a.count + b.count,
            a.input_tokens + b.input_tokens,
            a.output_tokens + b.output_tokens,
            both(a.dollars, b.dollars),
            both(a.hours, b.hours),
            a.machine,
        )
        for a, b in zip(one, other, strict=True)
    )


def relative_margin(usages: Usages) -> float | None:
    """By what share the mean tokens of a prompt may be off, from those of the sample."""
    tokens: dict[str, float] = {}
    for usage in usages.values():
        for prompt, count in usage.of_prompt.items():
            tokens[prompt] = tokens.get(prompt, 0.0) + count
    found = mean_interval(list(tokens.values()))
    if found.n < 2 or found.mean <= 0:
        return None
    return (found.high - found.mean) / found.mean


def measured_rates(usage: CallUsage | None) -> CallRates | None:
    """The rates of a model that was asked; None of one that was not."""
    if usage is None or not usage.asked:
        return None
    calls = max(usage.calls, 1)
    return CallRates(
        usage.tokens_in / max(usage.bytes_in, 1),
        usage.tokens_out / (calls if usage.calls else usage.asked),
        usage.bytes_out / usage.asked,
        usage.seconds / usage.timed if usage.timed else None,
        usage.calls / usage.asked if usage.calls else 1.0,
    )


def assumed_rates(
    store: PreferenceStore,
    options: SynthesisOptions,
    role: Role,
    model: CompletionModel,
    tokens_a_byte: float | None,
) -> CallRates:
    """Rates without a request: those of the model's records in the store, else assumptions.

    A token is four bytes unless `tokens_a_byte` is given, a completion as long as it may be, and a
    judge's reply 80 tokens.
    """
    ratio = tokens_a_byte or 1 / BYTES_A_TOKEN
    if role == "labels":
        sql = "SELECT NULL, NULL, AVG(seconds) FROM labels WHERE source = 'judge' AND annotator = ?"
    else:
        sql = (
            "SELECT AVG(tokens), AVG(LENGTH(CAST(text AS BLOB))), AVG(seconds)"
            " FROM completions WHERE model = ?"
        )
    tokens, size, seconds = store.database.rows(sql, (model.model,))[0]
    if tokens is None:
        tokens = REPLY_TOKENS if role == "labels" else float(options.sampling.max_tokens)
    return CallRates(ratio, tokens, tokens / ratio if size is None else size, seconds)


def forecast_lines(forecast: CostForecast, budget: float | None = None) -> list[str]:
    """A forecast for people, a line each."""
    lines = [f"forecast, from {forecast.basis}"]
    for row in forecast.rows:
        count = "" if row.count != row.count else f"{row.count:.0f} "
        tokens = f"{row.input_tokens:.0f} tokens in, {row.output_tokens:.0f} out"
        if row.machine:
            tokens = f"{row.output_tokens:.0f} tokens out"
        lines.append(
            f"  {count}{row.role} of {row.model}: {tokens}, "
            f"{_dollars(row.dollars) if not row.machine else 'own machine'}, {_hours(row.hours)}"
        )
    servers = any(not row.machine for row in forecast.rows)
    total = forecast.total("dollars")
    if servers:
        margin = "" if forecast.margin is None else f" ± {100 * forecast.margin:.0f} % of the rest"
        lines.append(f"  total: {_dollars(total)}, {_hours(forecast.total('hours'))}{margin}")
    if budget is not None and total is not None and total > budget:
        lines.append(f"  the budget of ${budget:g} will not cover it")
    return lines


def _dollars(value: float | None) -> str:
    """An amount, or that it is unknown."""
    return "dollars unknown (no price)" if value is None else f"${value:.4g}"


def _hours(value: float | None) -> str:
    """A time, or that it is unknown."""
    if value is None:
        return "time unknown"
    for unit, hours in (("h", 1.0), ("min", 1 / 60)):
        if value >= hours:
            return f"{value / hours:.3g} {unit}"
    return f"{3600 * value:.2g} s"


def _costs(
    options: SynthesisOptions,
    role: Role,
    model: CompletionModel,
    count: float,
    sent: float,
    rates: Mapping[tuple[Role, str], CallRates],
) -> ModelCosts:
    rate = rates[role, model.model]
    calls = count * rate.calls
    hours = None if rate.seconds is None else calls * rate.seconds / 3600
    hours = 0.0 if not count else hours
    if isinstance(model, ModelFolder):
        return ModelCosts(role, model.model, count, 0.0, calls * rate.tokens_out, None, hours, True)
    tokens_in, tokens_out = sent * rate.calls * rate.tokens_a_byte, calls * rate.tokens_out
    dollars = None
    if model.price is not None:
        dollars = (tokens_in * model.price[0] + tokens_out * model.price[1]) / 1e6
    if hours is not None:
        hours /= judge_options(options, model, role == "labels").concurrency
    return ModelCosts(role, model.model, count, tokens_in, tokens_out, dollars, hours)


def _mean_length(
    there: Sequence[CompletionRecord], new: Mapping[str, int], lengths: Mapping[str, float]
) -> float:
    """The mean length of a prompt's completions, in bytes, with those to come."""
    sizes = [float(len(one.text.encode())) for one in there]
    total = math.fsum(sizes) + sum(new[name] * lengths[name] for name in new)
    count = len(sizes) + sum(new.values())
    return total / count if count else 0.0
