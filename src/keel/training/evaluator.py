"""Evaluation on the validation split, and on further sets: what is sampled, judged and recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any, Literal

from keel.analysis.statistics import majority, mean_interval, pass_at_k, wilson_interval
from keel.config.evaluation import SampledEvaluation
from keel.config.fields import derive
from keel.data.benchmarks import BenchmarkTask
from keel.data.columns import shown_gold
from keel.graders.formats import normalise
from keel.graders.notation import plain, squeezed
from keel.graders.numbers import read_number
from keel.rewards.registry import NamedReward
from keel.rewards.rules import stated_texts
from keel.rewards.scorer import Scored, Scorer
from keel.runs.rows import RolloutRow
from keel.runs.writer import due
from keel.training.loop import EvaluationResult
from keel.training.rollout import Results, Sampler
from keel.training.setup import check_component
from keel.training.state import completion_rows
from keel.types import Group, Prompt, RewardResult, Sampling

EXAMPLES = 4
"""How many completions an evaluation shows."""
WHOLE_TEXTS = ("task", "exact_match", "place_match")
"""Rewards that compare the whole text, so that it is its own normal form."""
EXTRACTING = ("math", "numeric_match", "choice")
"""Rewards that log what they compare as `extracted`."""


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates the policy on validation prompts."""

    sampler: Sampler
    scorer: Scorer
    prompts: Sequence[Prompt]
    config: SampledEvaluation
    name: str = ""
    """Of a further set; its metrics are `eval/NAME/…`."""

    def __post_init__(self) -> None:
        check_component(self.config, [f.name for f in self.scorer.functions])

    @property
    def judging(self) -> NamedReward | None:
        """The reward that is declared as correctness, if any."""
        return self.scorer.judging(self.config.component)

    @property
    def protocol(self) -> str | None:
        """How benchmarks are asked and sampled, in words; None if a task is not one."""
        tasks = list(self.sampler.tasks.values())
        asked = [one.protocol for one in tasks if isinstance(one, BenchmarkTask)]
        if len(asked) < len(tasks):
            return None
        c, rollout = self.config, self.sampler.config
        stop = f", stop strings {list(rollout.stop)}" if rollout.stop else ""
        how_asked = "; ".join(dict.fromkeys(asked))
        text = f"{how_asked}, at most {rollout.max_tokens} tokens{stop}; greedy"
        if c.samples == 0:
            return text
        off = {"temperature": None, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        chosen = {name: getattr(c, name) for name in off if getattr(c, name) != off[name]}
        how = ", ".join(f"{name} {value:g}" for name, value in chosen.items())
        return f"{text}, and {c.samples} sample{'s' * (c.samples > 1)} at {how}"

    def __call__(self, step: int) -> EvaluationResult:
        """The report: `mean`, `low`, `high` (95 %), `n` of greedy pass@1; with samples also
        `sampled` (mean@n, which estimates pass@1), `pass@k` and, if answers can be compared,
        `maj@k`; of a benchmark its `protocol`.

        Prompts without a verdict (no gold answer) are left out of `n`, and `unjudged` counts them.
        If no reward that is declared as correctness gives a verdict, `measure` is "reward", the
        figures are of the reward (of `evaluation.component`, else the whole), and there is no
        pass@k. Every evaluation samples with the same random
        numbers. `spent` is what paid rewards cost, if there are any.
        """
        greedy = replace(self.sampler.sampling, temperature=0.0, ignore_eos=False)
        spent: dict[str, float] = {}
        groups, scored, verdicts = self._judge(1, greedy, step, spent)
        results = scored.results
        rows = self._rows(groups, results, verdicts, "greedy")
        lengths = [int(group.completions[0].written.sum()) for group in groups]
        report: dict[str, Any] = {
            **self._greedy(results, verdicts),
            "mean_length": sum(lengths) / len(lengths),
        }
        figures = getattr(self.judging and self.judging.function, "figures", ())
        if logged := {name: scored.metrics[name] for name in figures if name in scored.metrics}:
            report["figures"] = logged
        if self.config.samples > 0:
            sampled_figures, sampled = self._sampled(greedy, step, spent)
            report |= sampled_figures
            rows += sampled
        if spent:
            report["spent"] = spent
        if self.protocol is not None:
            report["protocol"] = self.protocol
        report["examples"] = [
            {**_example(groups[at], results[at]), "passed": rows[at].passed}
            for at in _spread(len(groups), EXAMPLES)
        ]
        return EvaluationResult(
            report,
            metrics(report, f"eval/{self.name}/" if self.name else "eval/"),
            score=report["mean"],
            scored=f"eval/{report['measure']}",
            rows=rows,
            before=report,
        )

    def _judge(
        self, n: int, sampling: Sampling, step: int, spent: dict[str, float]
    ) -> tuple[list[Group], Scored, list[list[bool | None]] | None]:
        """Groups of `n`, what they got, and whether each completion is right, None if no reward
        that is declared as correctness gives a verdict; what they cost is added to `spent`."""
        seed = derive(self.sampler.seed, "evaluation")
        groups, scored = self.sampler.sample_and_score(
            self.prompts, n, sampling, seed, self.scorer, step
        )
        for name in self.scorer.spending:
            spent[name] = spent.get(name, 0.0) + float(scored.metrics.get(name, 0.0))
        verdicts = [
            [self._passed(group.prompt, result) for result in judged]
            for group, judged in zip(groups, scored.results, strict=True)
        ]
        given: list[object] = [verdict for each in verdicts for verdict in each]
        if self.judging is not None and not self.scorer.needed:  # not that it failed everywhere
            name = self.judging.name
            given = [one.components.get(name) for each in scored.results for one in each]
        known = any(one is not None for one in given)
        return groups, scored, verdicts if known else None

    def _greedy(
        self, results: Sequence[Results], verdicts: list[list[bool | None]] | None
    ) -> dict[str, Any]:
        if verdicts is None:
            return {**_mean_reward([self._rewards(one) for one in results]), "measure": "reward"}
        passed = [verdict for one in verdicts for verdict in one if verdict is not None]
        report = {**wilson_interval(sum(passed), len(passed)).as_dict(), "measure": "pass@1"}
        unjudged = len(verdicts) - len(passed)
        return {**report, "unjudged": unjudged} if unjudged else report

    def _sampled(
        self, greedy: Sampling, step: int, spent: dict[str, float]
    ) -> tuple[dict[str, Any], list[RolloutRow]]:
        c, k = self.config, self.config.samples
        sampling = replace(
            greedy, temperature=c.temperature, top_k=c.top_k, top_p=c.top_p, min_p=c.min_p
        )
        groups, scored, verdicts = self._judge(k, sampling, step, spent)
        results = scored.results
        rows = self._rows(groups, results, verdicts, "sampled")
        if verdicts is None:
            return {"sampled": _mean_reward([self._rewards(judged) for judged in results])}, rows
        answers = self._answers(groups, scored)
        blank: list[list[str | None]] = [[None] * k] * len(verdicts)
        votes = [
            [(a, verdict) for a, verdict in zip(*one, strict=True) if verdict is not None]
            for one in zip(answers or blank, verdicts, strict=True)
        ]
        votes = [one for one in votes if one]
        figures = {"sampled": _rate_interval([mean(v for _, v in one) for one in votes])}
        several = [at for at in c.at if at > 1]  # of one sample, both are the mean
        for at in several:
            rates = [pass_at_k(sum(v for _, v in one), len(one), at) for one in votes]
            figures[f"pass@{at}"] = _share_interval(rates)
        for at in several if answers is not None else ():
            figures[f"maj@{at}"] = _share_interval([majority_at_k(one, at) for one in votes])
        return figures, rows

    def _answers(self, groups: Sequence[Group], scored: Scored) -> list[list[str | None]] | None:
        """The answer of each completion in the normal form of the reward that judges: what it
        logged as `extracted`, or the text that it compares; None if it does neither."""
        judging = self.judging
        if judging is None:
            return None
        function, alone = judging.source.function, len(self.scorer.functions) == 1
        logged = scored.extras.get(f"{judging.name}/extracted", scored.extras.get("extracted"))
        flat: list[str | None]
        if logged is not None and (alone or function in EXTRACTING):
            form = _same_mathematics if function == "math" else normalise
            flat = [None if one is None else form(str(one)) for one in logged]
        elif function in WHOLE_TEXTS:
            own = [(c.text, g.prompt.opening) for g in groups for c in g.completions]
            tag = judging.source.options.get("tag")
            stated = stated_texts([text for text, _ in own], tag, [opening for _, opening in own])
            flat = [None if one is None else normalise(one) for one in stated]
        else:
            return None
        found = iter(flat)
        return [[next(found) for _ in group.completions] for group in groups]

    def _rows(
        self,
        groups: Sequence[Group],
        results: Sequence[Results],
        verdicts: list[list[bool | None]] | None,
        mode: Literal["greedy", "sampled"],
    ) -> list[RolloutRow]:
        """The completions as records."""
        rows = completion_rows(groups, results, self.sampler.chat.tokenizer)
        passed = [verdict for one in verdicts or () for verdict in one] or [None] * len(rows)
        return [replace(row, mode=mode, passed=one) for row, one in zip(rows, passed, strict=True)]

    def _passed(self, prompt: Prompt, result: RewardResult) -> bool | None:
        """None if the prompt's gold answer is empty. An answer whose reward fails is wrong: to make
        a reward fail must not raise the accuracy."""
        if self.judging is None:
            return None
        value = result.components.get(self.judging.name)
        if value is None:
            columns = prompt.columns
            return None if "answer" in columns and shown_gold(columns["answer"]) is None else False
        return value >= self.config.threshold

    def _rewards(self, results: Sequence[RewardResult]) -> list[float]:
        """The rewards of the completions that have one."""
        name = self.config.component
        rewards = [v.reward if name is None else v.components.get(name) for v in results]
        return [reward for reward in rewards if reward is not None]


def _same_mathematics(text: str) -> str:
    """What answers of mathematics are counted by: the value of a number, else the text without
    blanks, each command of LaTeX in one spelling."""
    number = read_number(text)
    return squeezed(plain(text)) if number is None else str(number.value)


def majority_at_k(votes: Sequence[tuple[str | None, bool]], k: int) -> float:
    """The share of right majorities of k samples, over the blocks of k that follow each other.

    The blocks are disjoint, so that the mean is unbiased; samples past the last whole block are
    left out, and fewer than k are one block.
    """
    starts = range(0, max(len(votes) - k, 0) + 1, k)
    return mean(float(majority(votes[at : at + k])) for at in starts)


def metrics(report: Mapping[str, Any], prefix: str = "eval/") -> dict[str, float]:
    """An evaluation as metrics of its step."""
    found = {report.get("measure", "pass@1"): report}
    found |= {k: v for k, v in report.items() if k.startswith(("pass@", "maj@"))}
    if "sampled" in report:
        found["sampled"] = report["sampled"]
    out = {f"{prefix}mean_length": report["mean_length"]}
    for part in ("spent", "figures"):
        out |= {f"{prefix}{name}": value for name, value in report.get(part, {}).items()}
    for name, interval in found.items():
        ends = {"": interval["mean"], "/low": interval["low"], "/high": interval["high"]}
        out |= {f"{prefix}{name}{end}": value for end, value in ends.items() if value is not None}
    return out


def _mean_reward(rewards: Sequence[Sequence[float]]) -> dict[str, float | int | None]:
    """The mean over prompts of each one's mean reward; None if there are too few rewards."""
    interval = mean_interval([mean(one) for one in rewards if one]).as_dict()
    return {name: value if math.isfinite(value) else None for name, value in interval.items()}


def _rate_interval(rates: Sequence[float]) -> dict[str, float | int]:
    """The mean of rates by prompt; Wilson's interval if all are 0, or all 1."""
    return _share_interval(rates) if len(set(rates)) == 1 else _mean_of_shares(rates)


def _share_interval(rates: Sequence[float]) -> dict[str, float | int]:
    """The same for rates that may be verdicts: Wilson's interval if each is 0 or 1."""
    if set(rates) <= {0.0, 1.0}:
        return wilson_interval(round(sum(rates)), len(rates)).as_dict()
    return _mean_of_shares(rates)


def _mean_of_shares(rates: Sequence[float]) -> dict[str, float | int]:
    """Student's interval of the mean, as far as a share can be: from 0 to 1."""
    found = mean_interval(rates).as_dict()
    return found | {"low": max(found["low"], 0.0), "high": min(found["high"], 1.0)}


def _spread(count: int, most: int) -> list[int]:
    """Indices at equal distances: neighbours of a file may be alike."""
    return [at * count // most for at in range(most)] if count > most else list(range(count))


def _example(group: Group, results: Sequence[RewardResult]) -> dict[str, Any]:
    content = group.prompt.content
    return {
        "prompt": content if isinstance(content, str) else [dict(m) for m in content],
        "completion": group.completions[0].transcript,
        "reward": results[0].reward,
    }


# ---------------------------------------------------------------- further sets


@dataclass(frozen=True, eq=False)
class Evaluators:
    """The evaluation of a stage and those of its further sets, each with its interval in steps."""

    main: Evaluator
    every: int
    sets: Sequence[tuple[Evaluator, int]] = ()
    best: str | None = None
    """The metric that selects the best checkpoint."""

    def due(self, step: int) -> bool:
        """Whether one of them is due after a step."""
        return any(due(every, step) for every in (self.every, *(every for _, every in self.sets)))

    def __call__(self, step: int, whole: bool) -> EvaluationResult:
        """Those that are due after a step, or the `whole`. The report is the main one's, with those
        of the sets as `sets`; the completions of a set have its name as `extra/evaluation_set`."""
        found = self.main(step) if whole or due(self.every, step) else None
        sets = {one.name: one(step) for one, every in self.sets if whole or due(every, step)}
        if found is not None and not self.sets:
            return found if self.best is None else self._scored(found)
        report = {} if found is None else dict(found.report)
        if sets:
            report["sets"] = {
                name: {part: value for part, value in one.report.items() if part != "examples"}
                for name, one in sets.items()
            }
        rows = [*(found.rows if found else ())]
        for name, one in sets.items():
            above = max((row.group for row in rows), default=-1) + 1
            extras = {"evaluation_set": name}
            rows += [replace(row, group=above + row.group, extras=extras) for row in one.rows]
        every = [*([found] if found else ()), *sets.values()]
        figures = dict(chain.from_iterable(one.metrics.items() for one in every))
        score, scored = (found.score, found.scored) if found else (None, None)
        all_made = len(every) == 1 + len(self.sets)
        made = EvaluationResult(
            report, figures, score=score, scored=scored, rows=rows, before=report, whole=all_made
        )
        return made if self.best is None else self._scored(made)

    def _scored(self, found: EvaluationResult) -> EvaluationResult:
        return replace(found, score=found.metrics.get(self.best or ""), scored=self.best)
