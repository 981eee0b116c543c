"""The store's labels as rows of TRL's form: preferences, and answers in labelled steps."""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.data.messages import prompt_columns
from keel.platform.files import write_bytes
from keel.preferences.store.records import JudgedPair, LabelRecord, Source
from keel.preferences.store.store import PreferenceStore
from keel.runs.values import record_line
from keel.types import KeelError, one_line


@dataclass(frozen=True, slots=True)
class Selection:
    """Which labels count: of these sources, rounds and annotators; of all if None."""

    sources: Collection[Source] | None = None
    rounds: Collection[int] | None = None
    annotators: Collection[str] | None = None

    def takes(self, label: Any) -> bool:
        """Whether a label (or labelled steps) is one of them."""
        return (
            (self.sources is None or label.source in self.sources)
            and (self.rounds is None or label.round in self.rounds)
            and (self.annotators is None or label.annotator in self.annotators)
        )


def mean_label(labels: Iterable[LabelRecord]) -> tuple[float, float] | None:
    """The means of value and margin over the labels that are not skips; None if there is none."""
    found = [(label.value, label.margin) for label in labels if label.value is not None]
    if not found:
        return None
    return sum(v for v, _ in found) / len(found), sum(m for _, m in found) / len(found)


def preference_rows(
    store: PreferenceStore, selection: Selection = Selection()
) -> Iterator[dict[str, Any]]:
    """A row of `id/prompt/chosen/rejected/probability` for each pair with a label that counts.

    `probability` is the mean of the labels' values; `chosen` is the answer with ½ or more, the
    first if both have ½. `margin` is there if it is not 0. Columns of the pair follow.
    """
    for judged in store.judged_pairs():
        found = mean_label(label for label in judged.labels if selection.takes(label))
        if found is not None:
            yield _preference(judged, *found)


def steps_rows(
    store: PreferenceStore, selection: Selection = Selection()
) -> Iterator[dict[str, Any]]:
    """A row of `prompt/completions/labels` for each answer in labelled steps that counts."""
    for record in store.steps():
        if selection.takes(record):
            prompt = store.prompt(record.prompt)
            yield {
                **prompt_columns(prompt.content, prompt.tools),
                "completions": list(record.steps),
                "labels": list(record.labels),
                **record.columns,
            }


def write_rows(out: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Write rows as Parquet if the name ends so, else as JSONL, whole or not at all.

    Returns how many. Raises KeelError if there is none, or Parquet cannot hold them.
    """
    every = list(rows)
    if not every:
        raise KeelError(f"{out}: nothing to write: no label is of this source, round and annotator")
    if out.suffix == ".parquet":
        write_bytes(out, _parquet(out, every))
    else:
        write_bytes(out, b"".join(record_line(row, {}) for row in every))
    return len(every)


def _parquet(out: Path, rows: Sequence[Mapping[str, Any]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
        file = io.BytesIO()
        parquet.write_table(table, file)
    except pyarrow.ArrowException as error:
        raise KeelError(
            f"{out}: a column has values of several types ({one_line(error)}): name a .jsonl file"
        ) from None
    return file.getvalue()


def _preference(judged: JudgedPair, value: float, margin: float) -> dict[str, Any]:
    first = value >= 0.5
    chosen, rejected = judged.first.text, judged.second.text
    columns = judged.pair.columns
    row = {
        "id": columns.get("id", judged.pair.id),
        **prompt_columns(judged.prompt.content, judged.prompt.tools),
        "chosen": chosen if first else rejected,
        "rejected": rejected if first else chosen,
        "probability": value if first else 1 - value,
        **({"margin": margin if first else -margin} if margin else {}),
    }
    return row | {name: columns[name] for name in columns if name not in row}
