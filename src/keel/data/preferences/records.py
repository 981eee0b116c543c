"""One judged row from its columns: a pair, a labelled answer, an answer in labelled steps."""

from __future__ import annotations

from keel.data.preferences.fields import Fields, finite, judgement, last_turn
from keel.data.preferences.schema import Labelled, Preference, Stepwise
from keel.types import Content, KeelError

PAIR = ("prompt", "chosen", "rejected", "probability", "margin")
LABELLED = ("prompt", "completion", "label")
FIRST_ERROR = ("first_error", "mistake_index")
STEPWISE = ("prompt", "input", "completions", "steps", "labels", *FIRST_ERROR)
"""The columns that a row of each kind may have; others are passed over."""


def pair(fields: Fields, id: str) -> Preference:
    """`chosen` and `rejected`, with `prompt` unless they are whole conversations."""
    prompt, (chosen, rejected) = last_turn(fields, ("chosen", "rejected"), _prompt(fields))
    probability = fields.share("probability", 1.0)
    if chosen == rejected and probability != 0.5:
        raise KeelError(
            f"{fields.place}: chosen and rejected are the same text and probability is "
            f"{probability:g}: set probability to 0.5 (a tie), or leave the row out"
        )
    margin = fields.number("margin", 0.0)
    return Preference(id, prompt, chosen, rejected, probability, margin, origin=fields.origin)


def labelled(fields: Fields, id: str) -> Labelled:
    """`completion` and `label`, with `prompt` unless the completion is a whole conversation."""
    prompt, (completion,) = last_turn(fields, ("completion",), _prompt(fields))
    label = judgement(fields.value("label"))
    if label is None:
        raise fields.wrong("label", "give true, false or a number from 0 to 1")
    return Labelled(id, prompt, completion, label, origin=fields.origin)


def stepwise(fields: Fields, id: str) -> Stepwise:
    """`completions` (or `steps`) and `labels`, or `first_error` (or `mistake_index`)."""
    prompt = fields.prompt(fields.first("prompt", "input"))
    name = fields.first("completions", "steps")
    steps = fields.texts(name)
    error = next((e for e in FIRST_ERROR if fields.there(e)), None)
    if not fields.has("labels"):
        # With neither, it is the labels that are asked for.
        if error is None:
            raise fields.wrong("labels", "give a list with a label a step, or a first_error column")
        return _until(fields, error, id, prompt, steps)
    if error is not None and fields.has(error):
        raise fields.wrong(error, "the row has labels as well: drop one of the two")
    labels = _labels(fields, name, len(steps))
    return Stepwise(id, prompt, steps, labels, origin=fields.origin)


def _prompt(fields: Fields) -> Content | None:
    return fields.prompt("prompt") if fields.has("prompt") else None


def _labels(fields: Fields, steps: str, count: int) -> tuple[float | None, ...]:
    found = fields.value("labels")
    if not isinstance(found, list | tuple):
        raise fields.wrong("labels", "give a list with a label a step")
    if len(found) != count:
        raise fields.wrong("labels", f"{len(found)} labels for {count} {steps}: give as many")
    labels = tuple(None if label is None else judgement(label) for label in found)
    if any(ours is None and theirs is not None for ours, theirs in zip(labels, found, strict=True)):
        raise fields.wrong("labels", "each is true, false, a number from 0 to 1, or null")
    if all(label is None for label in labels):
        raise fields.wrong("labels", "no step is judged: leave the row out")
    return labels


def _until(
    fields: Fields, column: str, id: str, prompt: Content, steps: tuple[str, ...]
) -> Stepwise:
    """Some writers of Parquet keep integers that may be null as floats, so 3.0 is 3."""
    found = fields.value(column)
    if found is None:
        return Stepwise.until(id, prompt, steps, None, fields.origin)
    index = finite(found)
    if index is None or not 0 <= index < len(steps) or index != int(index):
        raise fields.wrong(
            column, f"give the index of a step, 0 to {len(steps) - 1}, or null where all are right"
        )
    return Stepwise.until(id, prompt, steps, int(index), fields.origin)
