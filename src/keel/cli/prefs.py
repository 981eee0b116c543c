"""`keel prefs import`, `export` and `stats`."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.cli import prefs_store
from keel.data.preferences import fields as judged
from keel.data.preferences.fields import Fields
from keel.data.preferences.schema import Preference
from keel.data.tables import read_file
from keel.platform.files import write_bytes
from keel.platform.sqlite import is_database
from keel.preferences.published import (
    TEST_SET,
    Annotated,
    Imported,
    compare,
    is_llmbar,
    read_judges,
    read_llmbar,
    read_pandalm,
)
from keel.preferences.store.formats import ANNOTATORS
from keel.preferences.summary import agreement, summarise
from keel.runs.values import plain, record_line
from keel.types import KeelError

COUNTS = (
    *("rows", "prompts", "ties", "soft", "margins", "empty_answers", "read_as_text"),
    *("duplicates", "contradictions"),
)


@dataclass(frozen=True, slots=True)
class Source:
    """What the statistics are of: pairs, each one's votes where every row has them."""

    pairs: Sequence[Preference]
    votes: Sequence[Sequence[Any]] | None = None
    judges: dict[str, Any] | None = None
    read_as_text: int = 0


def run(arguments: argparse.Namespace) -> None:
    """The action that the command line names."""
    if arguments.action == "import":
        (_import if arguments.store is None else prefs_store.import_file)(arguments)
    elif arguments.action == "export":
        prefs_store.export_file(arguments)
    else:
        _stats(arguments)


# ---------------------------------------------------------------- import


def _import(arguments: argparse.Namespace) -> None:
    """Write a published data set as rows of prompt/chosen/rejected."""
    out = prefs_store.new_file(arguments.out)
    if arguments.kind not in ANNOTATORS:
        raise KeelError(f"{arguments.kind}: give --store FILE, then keel prefs export writes rows")
    for option in ("source", "annotator", "round"):
        if getattr(arguments, option) is not None:
            raise KeelError(f"--{option}: rows have none: give --store FILE")
    found = _reader(arguments.kind)(Path(arguments.path))
    kept = [row for row in found.rows if arguments.keep_empty or not row.is_empty]
    with prefs_store.write_errors(out):
        write_bytes(out, b"".join(record_line(row.row(), {}) for row in kept))
    shares = [row.preference().probability for row in kept]
    result = {
        "out": str(out),
        "rows": len(kept),
        "ties": shares.count(0.5),
        "soft": sum(0.5 < share < 1 for share in shares),
        "left_out_empty": len(found.rows) - len(kept),
        "read_as_text": found.read_as_text,
    }
    if arguments.json:
        print(json.dumps(result, ensure_ascii=False))
        return
    print(f"{out}: {len(kept)} rows, {result['ties']} ties, {result['soft']} soft labels")
    if result["left_out_empty"]:
        print(f"left out: {result['left_out_empty']} rows with an empty answer (--keep-empty)")
    if found.read_as_text:
        print(f"read as text: {found.read_as_text} answers that were a JSON true or false")


def _reader(kind: str) -> Any:
    return {"pandalm": read_pandalm, "llmbar": read_llmbar}[kind]


# ---------------------------------------------------------------- stats


def _stats(arguments: argparse.Namespace) -> None:
    """What each file or folder holds."""
    results = [_described(path) for path in arguments.files]
    if arguments.json:
        print(json.dumps(plain(results), ensure_ascii=False))
        return
    for number, result in enumerate(results):
        lines = prefs_store.table(result) if "labels_by" in result else _table(result)
        print("\n" * bool(number) + "\n".join(lines))


def _described(path: str) -> dict[str, Any]:
    if is_database(Path(path)):
        return prefs_store.described(path)
    source = _published(Path(path)) if Path(path).is_dir() else _rows(path)
    result: dict[str, Any] = {"file": path, **summarise(source.pairs)}
    if source.read_as_text:
        result["read_as_text"] = source.read_as_text
    if source.votes is not None:
        try:
            people = agreement(source.votes, [json.dumps(p.prompt) for p in source.pairs])
        except ValueError as error:
            raise KeelError(f"{path}: column 'votes': {error}: give every row as many") from None
        result |= {"people": people} if people else {}
    return result | ({"judges": source.judges} if source.judges else {})


def _published(folder: Path) -> Source:
    """PandaLM's folder with the models' verdicts, or LLMBar's."""
    if (folder / TEST_SET).is_file():
        found = read_pandalm(folder)
        judges = {j.name: _against(j, found.rows) for j in read_judges(folder, found.rows)}
        return _annotated(found, judges)
    if is_llmbar(folder):
        return _annotated(read_llmbar(folder), {})
    raise KeelError(f"{folder}: holds neither PandaLM's {TEST_SET} nor LLMBar: give a file of rows")


def _annotated(found: Imported, judges: dict[str, Any]) -> Source:
    pairs = [row.preference() for row in found.rows]
    return Source(pairs, [row.votes for row in found.rows], judges, found.read_as_text)


def _against(judge: Any, rows: Sequence[Annotated]) -> dict[str, Any]:
    found = compare(judge, rows)
    return {
        "accuracy": found.accuracy.as_dict(),
        "cohen_kappa": found.kappa.as_dict(),
        "accuracy_of_all": found.accuracy_of_all.as_dict(),
        "unusable": found.unusable,
        "no_majority": found.split,
    }


def _rows(path: str) -> Source:
    """Rows of prompt/chosen/rejected, with their votes where every row has a list of them."""
    if path.endswith(".json"):
        raise KeelError(f"{path}: not rows, one a line: run keel prefs import first")
    table = read_file(path)
    places = [
        (row, table.where.place(line)) for row, line in zip(table.rows, table.lines, strict=True)
    ]
    pairs = [judged.pair(Fields(row, place), place) for row, place in places]
    if not any("votes" in row for row in table.rows):
        return Source(pairs)
    return Source(pairs, [_votes(Fields(row, place)) for row, place in places])


def _votes(fields: Fields) -> Sequence[Any]:
    if not fields.has("votes"):
        raise fields.wrong("votes", "other rows have votes: give every row a list of them, or none")
    votes = fields.value("votes")
    fine = isinstance(votes, list) and all(isinstance(vote, int | str) for vote in votes)
    if not fine or not votes:
        raise fields.wrong("votes", "give a list with each judge's verdict, a number or a text")
    return list(votes)


def _table(result: dict[str, Any]) -> list[str]:
    """The statistics for people, a line each."""
    lines = [result["file"]]
    for name in COUNTS:
        lines += [f"  {name:<18}{result[name]:>8}"] if name in result else []
    for side, length in result["characters"].items():
        median, mean = length["median"], length["mean"]
        lines.append(f"  {side + ' length':<18}{median:>8.0f}   median characters, mean {mean:.0f}")
    lines.append(_share("longer preferred", result["longer_preferred"], "mean"))
    people = result.get("people")
    if people:
        lines.append(f"  {'judges a row':<18}{people['judges']:>8}")
        lines.append(f"  {'unanimous':<18}{people['unanimous']:>8}")
        lines.append(_share("judges agree", people["pairwise"]))
        lines.append(_share("Fleiss' κ", people["fleiss_kappa"]))
    for name, judge in result.get("judges", {}).items():
        lines.append(f"  {name}, compared with the majority; {judge['unusable']} verdicts unusable")
        lines.append(_share("  accuracy", judge["accuracy"]))
        lines.append(_share("  Cohen's κ", judge["cohen_kappa"]))
        if judge["unusable"]:
            lines.append(_share("  these as wrong", judge["accuracy_of_all"]))
    return lines


def _share(name: str, value: dict[str, Any], key: str = "value") -> str:
    if math.isnan(value[key]):
        return f"  {name:<18}undefined   n = {value['n']}"
    low, high = value["low"], value["high"]
    # Of rows that tell no interval, such as those of one prompt, the ends are NaN.
    interval = "–" if math.isnan(low) or math.isnan(high) else f"[{low:.3f}, {high:.3f}]"
    return f"  {name:<18}{value[key]:>8.3f}   {interval}   n = {value['n']}"
