"""Findings from the prompts and the rows of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from keel.analysis.statistics import wilson_interval
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found, percent
from keel.preflight.lengths import quantile
from keel.runs.quarantine import LeftOut

OVER = 0.01
"""One long prompt in a hundred is a tail that is better left out; more is data lost."""
UNREADABLE = 0.01
"""One bad row in a hundred is what leaving them out is meant for."""
REPEATED = 0.2
"""Public sets repeat a few prompts in a hundred. A fifth is a file that was joined with itself."""


def prompts_over_length(
    task: str, lengths: Sequence[int], limit: int | None, room: str, key: str, own: bool = False
) -> Finding | None:
    """Prompts longer than `limit`, by task; `room` says what the limit is, `own` that the user set
    it."""
    over = 0 if limit is None else sum(n > limit for n in lengths)
    if not lengths or limit is None or over == 0:
        return None
    share = wilson_interval(over, len(lengths))
    if over < len(lengths) and share.low <= OVER:
        return None
    held = quantile(lengths, 0.95)
    return found(
        "prompts-over-length",
        f"no prompt of task {task!r} fits: each is left out"
        if over == len(lengths)
        else f"{percent(share.mean)} of the prompts of task {task!r} are left out for their length",
        f"{over} of {len(lengths)} looked at are longer than {limit} tokens ({room}); 95 % have at "
        f"most {held}, the longest {max(lengths)}",
        key,
        f"raise it to {held}, or give shorter prompts"
        if own
        else f"make room for {held} tokens: lower the budget for answers, use a longer context, or "
        "give shorter prompts",
        "error" if over == len(lengths) else "warning",
    )


def rows_over_length(
    over: int, rows: int, limit: int | None, longest: int, held: int, key: str
) -> Finding | None:
    """Judged rows, prompt and answer, that are longer than `limit`; 95 % have at most `held`."""
    if limit is None or rows == 0 or over == 0:
        return None
    share = wilson_interval(over, rows)
    if over < rows and share.low <= OVER:
        return None
    return found(
        "rows-over-length",
        "no row fits: each is left out"
        if over == rows
        else f"{percent(share.mean)} of the rows are left out for their length",
        f"{over} of {rows} are longer than {limit} tokens, prompt and answer; 95 % have at most "
        f"{held}, the longest {longest}",
        key,
        f"raise it to {held} (a model with a longer context, where that is the bound)",
        "error" if over == rows else "warning",
    )


def unreadable(left: Sequence[LeftOut], rows: int, key: str) -> Finding | None:
    """Rows that were left out because they cannot be read."""
    bad = [row for row in left if row.why == "bad"]
    every = rows + len(bad)
    if not bad or wilson_interval(len(bad), every).low <= UNREADABLE:
        return None
    return found(
        "unreadable-rows",
        f"{percent(len(bad) / every)} of the rows cannot be read, and are left out",
        f"{len(bad)} of {every}; {bad[0].reason}",
        key,
        'mend the rows, or the names of their columns; bad_rows = "stop" stops at the first',
    )


def repeated(count: int, rows: int, key: str) -> Finding | None:
    """Rows whose prompt stood in a row before."""
    if rows == 0 or wilson_interval(count, rows).low <= REPEATED:
        return None
    return found(
        "duplicate-prompts",
        f"{percent(count / rows)} of the train prompts are repetitions",
        f"{count} of {rows} rows have the prompt of a row before, so an epoch shows "
        f"{rows - count} different ones",
        key,
        "give each prompt once",
    )


def trained_on_held_out(
    shared: int, held: int, before: str, stage: str, key: str
) -> Finding | None:
    """Held-out prompts of a stage that a stage before learns from: any is one too many."""
    if shared == 0:
        return None
    if before == stage:
        return found(
            "trained-on-held-out",
            f"stage {stage!r} learns from prompts that it evaluates on",
            f"{shared} of the {held} held-out prompts are train prompts of another task of it",
            key,
            "give tasks of one file the same validation_fraction, or the same validation_path",
        )
    return found(
        "trained-on-held-out",
        f"stage {before!r} learns from prompts that {stage!r} evaluates on",
        f"{shared} of the {held} held-out prompts are train prompts there",
        key,
        f"give both stages the same files, or the same validation_path: {stage!r} says which",
    )
