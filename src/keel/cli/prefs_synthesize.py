"""`keel prefs synthesize`: its options, and what it prints."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.cli.main import print_result
from keel.config.fields import unknown
from keel.config.load import read_overrides
from keel.preferences.agreement import audit_lines
from keel.preferences.annotation import read_text
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis import SynthesisReport, read_prompts, synthesize
from keel.preferences.synthesis_options import (
    SAMPLING,
    CompletionModel,
    ModelFolder,
    ModelServer,
    SynthesisOptions,
    Unit,
    parse_model,
)
from keel.types import KeelError, Sampling

STOPPED = 3
"""The exit code if the budget ended it."""
OPTIONS = ("samples", "pairs", "rubric", "reference", "round", "seed", "budget", "forecast_prompts")


def run(arguments: argparse.Namespace) -> int:
    """Sample completions and compare them; `STOPPED` if the budget is used up."""
    options = _options(arguments)
    prompts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    path = Path(arguments.store)
    with PreferenceStore(path, create=prompts is not None) as store:
        report = synthesize(
            store,
            options,
            prompts,
            only_forecast=arguments.only_forecast,
            note=lambda line: print(line, file=sys.stderr, flush=True),
        )
    result = {"store": arguments.store, **report.as_dict()}
    print_result(arguments, result, _lines(arguments.store, report))
    if report.stopped is None:
        return 0
    print(
        f"keel: stopped: {report.stopped.replace('raise budget', 'run it again with a larger')} "
        f"--budget (now {options.budget:g}); what was paid for is kept and not paid again",
        file=sys.stderr,
    )
    return STOPPED


# ---------------------------------------------------------------- options


def _options(arguments: argparse.Namespace) -> SynthesisOptions:
    """Raises KeelError for options that do not fit."""
    prices = {name: _price(text) for name, text in _pairs("price", arguments.price)}
    keys = dict(_pairs("api-key-env", arguments.api_key_env))
    models = [parse_model(text) for text in arguments.model]
    judge = None if arguments.judge is None else parse_model(arguments.judge)
    if isinstance(judge, ModelFolder):
        raise KeelError(
            f"--judge {judge.model!r}: a judge is asked over HTTP: write NAME@http://HOST:PORT/v1 "
            "or NAME@openai"
        )
    if not models and judge is None:
        raise KeelError("nothing to do: give --model to write completions, --judge to compare them")
    names = [one.model for one in (*models, judge) if isinstance(one, ModelServer)]
    for option, given in (("--price", prices), ("--api-key-env", keys)):
        for name in given:
            if name not in names:
                raise KeelError(f"{option}: {unknown('model on a server', name, names)}")
    for option, needed in (("model_set", models), ("judge_set", judge)):
        if getattr(arguments, option) and not needed:
            name = option.partition("_")[0]
            raise KeelError(f"--{name}-set: there is no --{name} that it could be of: drop it")

    def whole(model: CompletionModel, changes: Sequence[str]) -> CompletionModel:
        if isinstance(model, ModelFolder):
            own = {"device": arguments.device, "max_num_seqs": arguments.max_num_seqs}
            return replace(model, **{name: v for name, v in own.items() if v is not None})
        return replace(
            model,
            price=prices.get(model.model),
            api_key_env=keys.get(model.model),
            options=read_overrides(changes),
        )

    chosen: dict[str, Any] = {name: getattr(arguments, name) for name in OPTIONS}
    if arguments.rubric_file is not None:
        chosen["rubric"] = read_text(Path(arguments.rubric_file), "--rubric-file")[0]
    return SynthesisOptions(
        models=tuple(whole(model, arguments.model_set) for model in models),
        judge=None if judge is None else whole(judge, arguments.judge_set),  # type: ignore[arg-type]
        sampling=_sampling(arguments),
        **{name: value for name, value in chosen.items() if value is not None},
    )


def _sampling(arguments: argparse.Namespace) -> Sampling:
    names = ("temperature", "top_p", "max_tokens")
    given = {name: getattr(arguments, name) for name in names}
    return replace(SAMPLING, **{name: value for name, value in given.items() if value is not None})


def _pairs(option: str, words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, equals, value = word.rpartition("=")
        if not equals or not name or not value:
            raise KeelError(f"--{option} {word!r}: write MODEL=VALUE")
        yield name, value


def _price(text: str) -> tuple[float, float]:
    try:
        ends = [float(part) for part in text.split(",")]
    except ValueError:
        ends = []
    if len(ends) != 2 or not all(0 <= end < math.inf for end in ends):
        raise KeelError(f"--price {text!r}: write IN,OUT in dollars a million tokens, as in 2.5,10")
    return ends[0], ends[1]


# ---------------------------------------------------------------- what is printed


def _lines(store: str, report: SynthesisReport) -> list[str]:
    new = ", ".join(f"{count} {name}" for name, count in report.added.items())
    lines = [f"{store}: new: {new}"]
    if any(report.left.values()):
        left = ", ".join(f"{count} {name}" for name, count in report.left.items() if count)
        lines.append(f"left: {left}")
    if report.too_long:
        lines.append(f"left out: {report.too_long} prompts too long for a model folder")
    if (account := report.account) is not None:
        totals = {} if report.forecast is None else report.forecast.totals
        spent = account.spent
        amounts: dict[Unit, float] = {
            "dollars": spent.dollars,
            "input_tokens": spent.tokens_in,
            "output_tokens": spent.tokens_out,
        }
        for unit, amount in amounts.items():
            forecast = f", forecast {totals[unit].mean:.6g}" if unit in totals else ""
            lines.append(f"  {unit.replace('_', ' '):<20}{amount:>12.6g}{forecast}")
    return [*lines, *audit_lines(report.audit)]
