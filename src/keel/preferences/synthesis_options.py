"""What synthesises preferences: models, prices and settings; and what it takes, by a forecast.

Torch-free.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from keel.analysis.statistics import Interval, mean_interval
from keel.config.errors import explain_validation
from keel.config.fields import unknown
from keel.config.secrets import wrong_secret
from keel.preferences.records import CostKind, CostRecord, CostUnit
from keel.rewards.judge_questions import RUBRIC, JudgeOptions
from keel.rewards.judge_requests import Asker
from keel.types import KeelError, Sampling

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


# ---------------------------------------------------------------- models and settings

OPENAI = "openai"
"""After the @ of a model: OpenAI's own server."""
SERVER_KEYS = (
    *("limit_name", "extra", "without", "concurrency", "retries", "timeout"),
    *("max_tokens", "seed", "structured", "attempts", "temperature"),
)
"""Options of a judge that `ModelServer.options` may have; a model that writes has the first six."""
_SERVED = re.compile(rf"(.+?)@({OPENAI}|https?://.*)")
REQUESTS = ".requests"
"""What the name of the file of paid requests ends with; it lies next to the store."""
COMPLETION_SECONDS = 120.0
"""How long a completion may take, unless the options say otherwise."""
SAMPLING = Sampling(max_tokens=512)


@dataclass(frozen=True, slots=True)
class ModelServer:
    """A model on an OpenAI-compatible server; `url` None is OpenAI's.

    `price` is dollars for a million input and output tokens, None if they are unknown.
    `api_key_env` names the environment variable of the API key. `options` are those of a judge
    (`SERVER_KEYS`, see `keel.rewards.judge_questions`), such as `timeout` or `extra`.
    """

    model: str
    url: str | None = None
    price: tuple[float, float] | None = None
    api_key_env: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that the native engine samples from, a folder or a hub name; it costs no dollars.

    At most `max_num_seqs` completions are sampled at once.
    """

    model: str
    device: str = "auto"
    max_num_seqs: int = 64


CompletionModel = ModelServer | ModelFolder


@dataclass(frozen=True, slots=True)
class SynthesisOptions:
    """What is sampled, paired and judged.

    Every one of `models` writes `samples` completions a prompt with `sampling`. Each prompt gets at
    most `pairs` pairs, which the `judge` (None: no one) compares by the `rubric`; `reference` is a
    column of the prompt with an answer that deserves full marks. `budget` is the most dollars that
    all runs on the store may cost together. `forecast_prompts` is how many prompts the forecast is
    made from.
    """

    models: Sequence[CompletionModel] = ()
    judge: ModelServer | None = None
    samples: int = 4
    sampling: Sampling = SAMPLING
    pairs: int = 6
    rubric: str = RUBRIC
    reference: str | None = None
    round: int = 0
    seed: int = 0
    budget: float | None = None
    forecast_prompts: int = 4

    def __post_init__(self) -> None:
        names = [model.model for model in self.models]
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if twice is not None:
            raise KeelError(f"model {twice!r} is given twice: raise samples instead")
        if self.sampling.temperature == 0 and self.samples > 1:
            raise KeelError(
                f"temperature = 0 makes the {self.samples} completions of a model equal: raise "
                "temperature, or set samples = 1"
            )
        if self.budget is not None and self.budget <= 0:
            raise KeelError(f"budget = {self.budget:g}: give dollars above 0")
        for server in self.servers:
            if self.budget is not None and server.price is None:
                raise KeelError(
                    f"budget = {self.budget:g}: the price of {server.model!r} is unknown: give its "
                    "price (0,0 if it is free), or drop the budget"
                )

    @property
    def servers(self) -> tuple[ModelServer, ...]:
        """Every model that requests are sent to, the judge last."""
        servers = [model for model in self.models if isinstance(model, ModelServer)]
        return (*servers, *([self.judge] if self.judge is not None else []))

    def sampling_of(self, model: CompletionModel) -> dict[str, Any]:
        """The settings that are stored with each of a model's completions."""
        found: dict[str, Any] = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "max_tokens": self.sampling.max_tokens,
            "seed": self.seed,
        }
        if isinstance(model, ModelServer) and (extra := model.options.get("extra")):
            found["extra"] = dict(extra)
        return found

    @property
    def identity(self) -> list[Any]:
        """What its completions, pairs and labels depend on; neither prices nor servers."""
        return [
            {model.model: self.sampling_of(model) for model in self.models},
            None if self.judge is None else self.judge.model,
            *(self.samples, self.pairs, self.rubric, self.reference, self.round),
        ]


def parse_model(text: str) -> CompletionModel:
    """`NAME@http://HOST:PORT/v1`, `NAME@openai`, or a model folder or hub name.

    Raises KeelError for a server without a model's name.
    """
    found = _SERVED.fullmatch(text)
    if found is not None:
        name, where = found.groups()
        return ModelServer(name, None if where == OPENAI else where)
    if "@" in text and not Path(text).exists():
        # An address may hold a password, so it is not repeated.
        shown = "with an address" if "://" in text else repr(text)
        raise KeelError(
            f"model {shown}: write NAME@http://HOST:PORT/v1, NAME@{OPENAI}, or a model folder"
        )
    return ModelFolder(text)


def build_asker(store: Path, options: SynthesisOptions, server: ModelServer, role: Role) -> Asker:
    """What sends requests to a server. Raises KeelError for options, or a key that is not set."""
    known = SERVER_KEYS if role == "labels" else SERVER_KEYS[:6]
    for key in server.options:
        if key not in known:
            raise KeelError(f"options of {server.model}: {unknown('key', key, known)}")
    wrong = wrong_secret(server.options)
    if wrong is not None:
        raise KeelError(f"options of {server.model}: {wrong}")
    given: dict[str, Any] = {"model": server.model, "seed": options.seed}
    extra: dict[str, Any] = {}
    if role == "completions":
        sampling = options.sampling
        given |= {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "structured": "text",
            "timeout": COMPLETION_SECONDS,
        }
        extra = {"top_p": sampling.top_p} if sampling.top_p != 1 else {}
    given |= {**server.options, "url": server.url, "api_key_env": server.api_key_env}
    given["extra"] = {**extra, **server.options.get("extra", {})}
    if server.price is not None:
        given |= dict(zip(("price_in", "price_out"), server.price, strict=True))
        if options.budget is not None and any(server.price):
            given["budget"] = options.budget
    try:
        return Asker(JudgeOptions.model_validate(given), requests_path(store))
    except ValidationError as error:
        raise KeelError(
            f"model {server.model!r}: {explain_validation(error, given, JudgeOptions)}"
        ) from None


def requests_path(store: Path) -> Path:
    """The file of a store's paid requests."""
    return store.with_name(store.name + REQUESTS)
