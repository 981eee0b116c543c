"""Evaluation on the validation split: greedy pass@1 and sampled pass@k, or the mean reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Literal

from keel.analysis.statistics import mean_interval, wilson_interval
from keel.config.fields import derive
from keel.config.sampling import Evaluation
from keel.data.columns import shown_gold
from keel.rewards.registry import NamedReward
from keel.rewards.scorer import Scorer
from keel.runs.rollouts import RolloutRow
from keel.training.loop import EvaluationResult
from keel.training.recipe_checks import check_component
from keel.training.rollout import Sampler, completion_rows
from keel.types import Group, Prompt, RewardResult, Sampling

EXAMPLES = 4
"""How many completions an evaluation shows."""


@dataclass(frozen=True, eq=False)
class Evaluator:
    """Evaluates the policy on validation prompts."""

    sampler: Sampler
    scorer: Scorer
    prompts: Sequence[Prompt]
    config: Evaluation

    def __post_init__(self) -> None:
        check_component(self.config, [f.name for f in self.scorer.functions])

    @property
    def judging(self) -> NamedReward | None:
        """The reward that is declared as correctness, if any."""
        return self.scorer.judging(self.config.component)

    def __call__(self, step: int) -> EvaluationResult:
        """The report: `mean`, `low`, `high` (95 %), `n` of greedy pass@1; with k > 0 also `sampled`
        and `pass@k`.

        Prompts without a verdict (no gold answer) are left out of `n`, and `unjudged` counts them.
        If no reward that is declared as correctness gives a verdict, `measure` is "reward", the
        figures are of the reward (of `evaluation.component`, else the whole), and there is no
        pass@k. Every evaluation samples with the same random
        numbers. `spent` is what paid rewards cost, if there are any.
        """
        budget = self.sampler.config
        greedy = Sampling(
            max_tokens=budget.max_tokens,
            temperature=0.0,
            stop=budget.stop,
            stop_ids=budget.stop_ids,
        )
        spent: dict[str, float] = {}
        groups, results = self._judge(1, greedy, step, spent)
        rows = self._rows(groups, results, "greedy")
        lengths = [int(group.completions[0].written.sum()) for group in groups]
        report: dict[str, Any] = {
            **self._greedy(groups, results),
            "mean_length": sum(lengths) / len(lengths),
        }
        if self.config.samples > 0:
            figures, sampled = self._sampled(greedy, step, spent)
            report |= figures
            rows += sampled
        if spent:
            report["spent"] = spent
        report["examples"] = [
            {**_example(group, judged), "passed": row.passed}
            for group, judged, row in zip(groups, results, rows, strict=False)
        ][:EXAMPLES]
        return EvaluationResult(
            report, metrics(report), score=report["mean"], rows=rows, before=report
        )

    def _sampled(
        self, greedy: Sampling, step: int, spent: dict[str, float]
    ) -> tuple[dict[str, Any], list[RolloutRow]]:
        c, k = self.config, self.config.samples
        sampling = replace(
            greedy, temperature=c.temperature, top_k=c.top_k, top_p=c.top_p, min_p=c.min_p
        )
        groups, results = self._judge(k, sampling, step, spent)
        rows = self._rows(groups, results, "sampled")
        if not self._judges(groups, results):
            return {"sampled": _mean_reward([self._rewards(judged) for judged in results])}, rows
        verdicts = [self._verdicts(*one) for one in zip(groups, results, strict=True)]
        right = [one for one in verdicts if one]
        figures = {
            "sampled": _rate_interval([mean(one) for one in right]),
            f"pass@{k}": wilson_interval(sum(map(any, right)), len(right)).as_dict(),
        }
        return figures, rows

    def _rows(
        self,
        groups: Sequence[Group],
        results: Sequence[Sequence[RewardResult]],
        mode: Literal["greedy", "sampled"],
    ) -> list[RolloutRow]:
        """The completions as records."""
        rows = completion_rows(groups, results, self.sampler.chat.tokenizer)
        known = self._judges(groups, results)
        passed = [
            self._passed(group.prompt, result) if known else None
            for group, judged in zip(groups, results, strict=True)
            for result in judged
        ]
        return [replace(row, mode=mode, passed=one) for row, one in zip(rows, passed, strict=True)]

    def _judge(
        self, n: int, sampling: Sampling, step: int, spent: dict[str, float]
    ) -> tuple[list[Group], Sequence[Sequence[RewardResult]]]:
        """Groups of `n` and their results; what they cost is added to `spent`."""
        seed = derive(self.sampler.seed, "evaluation")
        groups, scored = self.sampler.sample_and_score(
            self.prompts, n, sampling, seed, self.scorer, step
        )
        for name in self.scorer.spending:
            spent[name] = spent.get(name, 0.0) + float(scored.metrics.get(name, 0.0))
        return groups, scored.results

    def _greedy(
        self, groups: Sequence[Group], results: Sequence[Sequence[RewardResult]]
    ) -> dict[str, Any]:
        if not self._judges(groups, results):
            return {**_mean_reward([self._rewards(one) for one in results]), "measure": "reward"}
        every = [self._verdicts(*one) for one in zip(groups, results, strict=True)]
        passed = [verdict for one in every for verdict in one]
        report = {**wilson_interval(sum(passed), len(passed)).as_dict(), "measure": "pass@1"}
        unjudged = len(every) - len(passed)
        return {**report, "unjudged": unjudged} if unjudged else report

    def _judges(self, groups: Sequence[Group], results: Sequence[Sequence[RewardResult]]) -> bool:
        """Whether a reward that is declared as correctness gives a verdict; of a stage that needs
        no reward, whether it gave any value."""
        if self.judging is not None and not self.scorer.needed:
            name = self.judging.name
            return any(one.components.get(name) is not None for each in results for one in each)
        return any(self._verdicts(*one) for one in zip(groups, results, strict=True))

    def _verdicts(self, group: Group, results: Sequence[RewardResult]) -> list[bool]:
        """Whether each completion that has a verdict is right."""
        found = (self._passed(group.prompt, result) for result in results)
        return [verdict for verdict in found if verdict is not None]

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


def metrics(report: dict[str, Any]) -> dict[str, float]:
    """An evaluation as metrics of its step."""
    found = {report.get("measure", "pass@1"): report}
    found |= {k: v for k, v in report.items() if k.startswith("pass@")}
    if "sampled" in report:
        found["sampled"] = report["sampled"]
    out = {"eval/mean_length": report["mean_length"]}
    out |= {f"eval/{name}": value for name, value in report.get("spent", {}).items()}
    for name, interval in found.items():
        ends = {"": interval["mean"], "/low": interval["low"], "/high": interval["high"]}
        out |= {f"eval/{name}{end}": value for end, value in ends.items() if value is not None}
    return out


def _mean_reward(rewards: Sequence[Sequence[float]]) -> dict[str, float | int | None]:
    """The mean over prompts of each one's mean reward; None if there are too few rewards."""
    interval = mean_interval([mean(one) for one in rewards if one]).as_dict()
    return {name: value if math.isfinite(value) else None for name, value in interval.items()}


def _rate_interval(rates: Sequence[float]) -> dict[str, float | int]:
    """The mean of rates by prompt; Wilson's interval if all are 0, or all 1."""
    if len(set(rates)) == 1 and rates[0] in (0.0, 1.0):
        return wilson_interval(round(sum(rates)), len(rates)).as_dict()
    return mean_interval(rates).as_dict()


def _example(group: Group, results: Sequence[RewardResult]) -> dict[str, Any]:
    content = group.prompt.content
    return {
        "prompt": content if isinstance(content, str) else [dict(m) for m in content],
        "completion": group.completions[0].transcript,
        "reward": results[0].reward,
    }
