"""Every key of a recipe with its default, as a page: `python -m keel.config.reference`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from keel.config.control import ControlRecipe, PolicyGradientStage, QLearningStage
from keel.config.entry import DEFAULT_KIND, stage_kinds
from keel.config.errors import models_in
from keel.config.schema import Expected, Recipe

Row = tuple[str, str, str]
"""A key, its default, its description."""
Table = dict[str, tuple[str, str]]

HEAD = """# Every key of a recipe

`name`, `description`, `seed`, `threads`, `model`, `cluster` and `alerts` apply to the whole recipe,
the other keys to a stage: at the top level if there is one stage, else in its `[[stages]]` table,
whose key `stage` is its kind. On the command line a key applies to the stage that it names
(`sft.steps=10`), else to the last, and to the entry of a list that it numbers (`tasks.0.path=x`),
or to its only one. `extends = "NAME"` starts from another recipe. `"none"` unsets a key.
`[repeat]` runs stages several times ([how to](howto/stages.md#run-stages-several-times)).

In parentheses is the default. A key without one is unset (None) or empty; a table without one has
the defaults of its keys. A description begins with the values that a key may have, if they are few.
A key of several kinds is described once; the other kinds list only what differs.

Paths in a recipe's file are relative to its folder; on the command line and in Python, to the
working folder. The recipe in a run folder has them absolute. The keys of an algorithm are those of
[its terms](algorithms/README.md), and `keel explain` shows them.

Recipes of `keel control` have one stage. The defaults of an algorithm, or of a tuned pair of
algorithm and environment, replace the defaults below ([control](algorithms/control.md)).
"""


def markdown() -> str:
    """The whole page. A key of several kinds of stages is described for the first of them; the
    others list it by name, and only what differs with its default."""
    lines = [HEAD]
    tables: tuple[tuple[str, type[BaseModel]], ...] = (
        ("The recipe", Recipe),
        *_stages(),
        ("The recipe of `keel control`", ControlRecipe),
        ("Stage `policy_gradient`", PolicyGradientStage),
        ("Stage `q_learning`", QLearningStage),
    )
    described: dict[Row, str] = {}
    texts: set[tuple[str, str]] = set()
    before: dict[str, Table] = {}
    for title, model in tables:
        rows = [*_keys(model, "")]
        lines.append(f"\n## {title}\n")
        for other in dict.fromkeys(described.values()):
            same = [row[0] for row in rows if described.get(row) == other and "." not in row[0]]
            if same:
                listed = ", ".join(f"`{key.strip('[]')}`" for key in same)
                lines.append(f"As in [{other}](#{_anchor(other)}): {listed}.\n")
        skipped: set[str] = set()
        for row in rows:
            key, default, what = row
            plain = key.strip("[]")
            if row in described:
                continue
            described[row] = title
            if plain in skipped:
                continue
            if (key, what) in texts:
                what = ""
            else:
                note, same_keys = _as_before(plain, _table(plain, rows), before)
                if any(what == text for _, text in texts) and note:
                    what = ""
                what = f"{what} {note}".strip()
                skipped |= same_keys
            shown = f"`{key}`{default and f' ({default})'}"
            lines.append(f"- {shown}: {what}" if what else f"- {shown}")
            texts.add((key, row[2]))
            before.setdefault(plain, _table(plain, rows))
    return "\n".join(lines) + "\n"


def _table(name: str, rows: list[Row]) -> Table:
    """The keys of a table, without its name: default and description."""
    found = ((key.strip("[]"), default, what) for key, default, what in rows)
    return {
        key.removeprefix(f"{name}."): (default, what)
        for key, default, what in found
        if key.startswith(f"{name}.")
    }


def _as_before(name: str, table: Table, before: dict[str, Table]) -> tuple[str, set[str]]:
    """What to say of a table that has keys of an earlier one, and the keys that this describes."""
    best, same = "", set[str]()
    for other, keys in before.items():
        equal = {key for key in table if keys.get(key) == table[key]}
        if other == name or not equal:
            continue
        if keys.keys() == table.keys():
            return f"With the keys of `{other}`.", {f"{name}.{key}" for key in equal}
        equal = {key for key in equal if "." not in key}
        if len(equal) > len(same):
            best, same = other, equal
    if len(same) < 5:  # listed here, as they are not worth a look elsewhere
        return "", set()
    listed = ", ".join(f"`{key}`" for key in table if key in same)
    return f"As in `{best}`: {listed}.", {f"{name}.{key}" for key in same}


def _anchor(title: str) -> str:
    return title.lower().replace("`", "").replace(" ", "-")


def _stages() -> list[tuple[str, type[BaseModel]]]:
    """The kinds of stages, the one of a flat recipe first."""
    named = [(str(kind.model_fields["stage"].default), kind) for kind in stage_kinds()]
    ordered = sorted(named, key=lambda one: (one[0] != DEFAULT_KIND, one[0]))
    return [(f"Stage `{name}`", kind) for name, kind in ordered]


def _keys(
    model: type[BaseModel], prefix: str, values: BaseModel | None = None
) -> Iterator[tuple[str, str, str]]:
    """The keys of a model; `values` is the default of the field that holds it, which may differ
    from the model's own."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{name}"
        inner = next(models_in(info), None)
        if key in ("stages", "stage"):
            continue
        if name == "algorithm":
            yield f"{key}.preset", "`grpo`", "Preset; each of its terms can be set, too."
            continue
        if inner is None:
            yield key, _default(info, values and getattr(values, name)), _text(info)
            continue
        many = "tuple" in str(info.annotation)
        about = (inner.__doc__ or "").split("\n\n")[0]
        off = info.default is None and "`none`"
        yield f"[[{key}]]" if many else key, off or _default(info), " ".join(about.split())
        if inner is not Expected:  # not for settings: it is the note of a shipped recipe
            own = info.default if isinstance(info.default, inner) else None
            yield from _keys(inner, f"{key}.", own)


def _default(info: FieldInfo, value: Any = None) -> str:
    if info.is_required():
        return "required"
    if value is None:
        value = info.default if info.default_factory is None else {}
    if value is None or isinstance(value, BaseModel) or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value!r}`".replace("'", '"')


def _text(info: FieldInfo) -> str:
    choices = [a for a in get_args(info.annotation) if isinstance(a, str)]
    listed = f"{', '.join(f'`{c}`' for c in choices)}. " if choices else ""
    return listed + " ".join((info.description or "").split())


if __name__ == "__main__":
    print(markdown(), end="")
