"""Stop rules: what ends a stage before its last step (`stop_when`).

The counts of a rule are a function of the records in metrics.jsonl, so that a resumed run goes on
with those of an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keel.config.stage import StopRule
from keel.runs.reader import read_run_json
from keel.runs.writer import RunWriter, update_run_json


class StopRules:
    """The rules of a stage, and how many records each has counted."""

    def __init__(self, rules: Sequence[StopRule], records: Iterable[Mapping[str, Any]]) -> None:
        """`records` are those of the stage so far."""
        self._counters = [_Counter(rule) for rule in rules]
        for record in records:
            self(record)

    def __call__(self, metrics: Mapping[str, Any]) -> StopRule | None:
        """Count the metrics of a step; the first rule that ends the stage after it, if any."""
        met = [one.rule for one in self._counters if one.add(metrics)]
        return met[0] if met else None


class _Counter:
    """Records in a row beyond the rule's bound, or since the best one."""

    def __init__(self, rule: StopRule) -> None:
        self.rule = rule
        self._count = -1 if rule.bound is None else 0
        self._best = -math.inf

    def add(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the rule is met by metrics that hold its own."""
        rule = self.rule
        if rule.metric not in metrics:
            return False
        found = metrics[rule.metric]
        # A value that is not finite is null in a record: never better, never beyond a bound.
        value = -math.inf if found is None or not math.isfinite(found) else rule.sign * found
        if rule.bound is None:
            self._count = 0 if value > self._best else self._count + 1
            self._best = max(self._best, value)
        else:
            self._count = self._count + 1 if value > rule.sign * rule.bound else 0
        return self._count >= rule.patience


def record_stop(writer: RunWriter, stage: str, step: int, rule: StopRule) -> None:
    """Note which rule ended a stage, and put it into run.json as `stopped`."""
    stopped = read_run_json(writer.folder).get("stopped", {}) | {
        stage: {"step": step, "rule": str(rule)}
    }
    update_run_json(writer.folder, {"stopped": stopped})
    writer.note(f"{stage} ends after step {step}: {rule} (stop_when)")
