"""`keel runs diff`"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

from keel.runs.diff.checkpoints import CheckpointDifference
from keel.runs.diff.compare import Difference, First, Point, diff
from keel.runs.diff.rollouts import SEQUENCE, RolloutsDifference
from keel.runs.diff.values import Around, Change

SHOWN = 6
"""Keys or metrics that are told one by one."""
WIDTH = 60
DIFFERENT = 1
END = "the end"
"""What a completion has where it has no token any more."""


def run(arguments: argparse.Namespace) -> int:
    """Two runs beside each other; ends with 0 where they are the same and 1 where they differ."""
    found = diff(arguments.a, arguments.b)
    if arguments.json:
        print(json.dumps(found.as_dict(), ensure_ascii=False, allow_nan=False))
    else:
        print("\n".join(told(found)))
    return 0 if found.same else DIFFERENT


def told(found: Difference) -> Iterator[str]:
    """The lines that say it to people."""
    recipe = f"same recipe but {_pairs(found.recipe)}" if found.recipe else "same recipe"
    yield f"{found.a} and {found.b}: {recipe}"
    if found.surroundings:
        yield f"made with {_against(found.surroundings)}"
    if found.first is None:
        yield _agreed(found)
    else:
        yield from _parted(found, found.first)
    yield _reach(found)
    if found.reach_a == found.reach_b:
        for name, count in zip((found.a, found.b), found.rollouts_only, strict=True):
            if count:
                yield f"only {name} has the rollouts of {_count(count, 'step')}"


def _agreed(found: Difference) -> str:
    if not found.stages:
        return "nothing to compare: their first stages differ"
    if any(change.name == "stages" for change in found.recipe):
        return f"no difference in what they have in common, {_stages(found)}"
    looked = _count(found.checkpoints, "checkpoint")
    if found.reach_a == found.reach_b:
        return f"no difference in any step, nor in {looked} that both have"
    return f"no difference as far as both go, nor in {looked} that both have"


def _stages(found: Difference) -> str:
    return f"stage{'' if len(found.stages) == 1 else 's'} {', '.join(found.stages)}"


def _reach(found: Difference) -> str:
    if found.reach_a == found.reach_b:
        return f"both go to {_point(found.reach_a)}"
    return f"{found.a} goes to {_point(found.reach_a)}, {found.b} to {_point(found.reach_b)}"


def _point(point: Point | None) -> str:
    return "no step" if point is None else f"{point.stage} step {point.step}"


# ---------------------------------------------------------------- the first difference


def _parted(found: Difference, first: First) -> Iterator[str]:
    head = f"first difference: {first.stage} step {first.step}"
    if first.only_in is not None:
        has, lacks = (found.a, found.b) if first.only_in == "a" else (found.b, found.a)
        what = "its row of metrics.jsonl" if first.where == "metrics" else "its rollouts"
        yield f"{head}: {what} only in {has}, though {lacks} goes further"
    elif first.where == "rows" and found.rows is not None:
        rows = found.rows
        yield (
            f"first difference: {rows.stage}, before its first step: row {rows.row} of its sampled "
            f"{rows.side} rows: {_against(rows.changes)}, in {first.phase}"
        )
    elif first.where == "rollouts" and found.rollouts is not None:
        yield from _rollouts(head, found.rollouts)
    elif first.where == "checkpoint" and found.checkpoint is not None:
        yield _checkpoint(head, found.checkpoint)
    metrics = found.metrics
    if metrics is not None and first.where == "metrics":
        yield f"{head}: metrics, in {first.phase}"
    elif metrics is not None:
        yield f"metrics first differ at {metrics.stage} step {metrics.step}"
    if metrics is not None:
        yield from (f"  {line}" for line in _metrics(metrics.changes))


def _rollouts(head: str, found: RolloutsDifference) -> Iterator[str]:
    who = f"sequence {found.sequence} (prompt {found.prompt_id})"
    if found.column == SEQUENCE:
        a, b = found.rows
        yield f"{head}, {who}: {a} sequences against {b}, in {found.phase}"
    else:
        where = "" if found.token is None else f", token {found.token}"
        what = "" if found.column == "tokens" else f"{found.column} "
        absent = END if found.token is not None else "none"
        values = f"{_value(found.a, absent)} against {_value(found.b, absent)}"
        apart = f" ({_count(found.ulps, 'ulp')})" if found.ulps is not None else ""
        yield f"{head}, {who}{where}: {what}{values}{apart}, in {found.phase}"
    if found.text is not None:
        yield f"  {_text(found.text)}"
    token = found.tokens
    if token is not None and found.column != "tokens":
        values = f"{_value(token.a, END)} against {_value(token.b, END)}"
        yield f"  first token: sequence {token.sequence}, token {token.token}: {values}"
        yield f"  {_text(token.text)}"
    if not found.columns:
        return
    width = max(len(column.name) for column in found.columns)
    yield f"  {'differing':<{width}}  sequences    tokens     at most  first at sequence:token"
    for column in found.columns:
        first = (
            f"{column.sequence}" if column.token is None else f"{column.sequence}:{column.token}"
        )
        tokens = "" if column.tokens is None else str(column.tokens)
        most = "" if column.largest is None else f"{column.largest:.3g}"
        yield f"  {column.name:<{width}}  {column.sequences:>9} {tokens:>9} {most:>11}  {first}"
    yield f"  of {min(found.rows)} sequences"


def _text(text: Around) -> str:
    before = json.dumps(text.before, ensure_ascii=False)
    a, b = (json.dumps(part, ensure_ascii=False) for part in (text.a, text.b))
    return f"text: after {before}, {a} against {b}" if text.before else f"text: {a} against {b}"


def _checkpoint(head: str, found: CheckpointDifference) -> str:
    line = f"{head}: its checkpoint's {found.file}"
    if found.name is None:
        return f"{line}: {_value(found.a)} against {_value(found.b)}, in learning"
    at = f"{found.name}{list(found.index)}" if found.index is not None else found.name
    line += f", {at}: {_value(found.a)} against {_value(found.b)}"
    if found.ulps is not None:
        line += f" ({_count(found.ulps, 'ulp')})"
    more = [f"{found.differing} of {found.elements} elements"] if found.elements else []
    kind = "key" if found.elements is None and found.index is None else "tensor"
    more += [_count(found.tensors, kind)] if found.tensors is not None else []
    return f"{line}, in learning; {', '.join(more)} of the file differ"


def _metrics(changes: Sequence[Change]) -> Iterator[str]:
    width = max(len(change.name) for change in changes[:SHOWN])
    for change in changes[:SHOWN]:
        apart = "" if change.difference is None else f" (by {change.difference:.3g})"
        yield f"{change.name:<{width}}  {_value(change.a)} against {_value(change.b)}{apart}"
    if len(changes) > SHOWN:
        yield f"and {len(changes) - SHOWN} more"


# ---------------------------------------------------------------- words


def _pairs(changes: Sequence[Change]) -> str:
    told = [f"{c.name} ({_value(c.a)}, {_value(c.b)})" for c in changes[:SHOWN]]
    return ", ".join(told + _more(changes))


def _against(changes: Sequence[Change]) -> str:
    told = [
        f"{c.name.removeprefix('versions.')} {_value(c.a)} against {_value(c.b)}"
        for c in changes[:SHOWN]
    ]
    return ", ".join(told + _more(changes))


def _more(changes: Sequence[Change]) -> list[str]:
    return [f"and {len(changes) - SHOWN} more"] if len(changes) > SHOWN else []


def _value(value: Any, absent: str = "none") -> str:
    """A value on one line."""
    if value is None:
        return absent
    if isinstance(value, bool):
        return str(value).lower()
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return text if len(text) <= 2 * WIDTH else text[: 2 * WIDTH] + "…"


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
