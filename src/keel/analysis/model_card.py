"""The card of an exported model: README.md with the hub's metadata, and the curve. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

from keel.algorithms.symbols import prose_to_unicode
from keel.analysis.metrics import stage_columns
from keel.analysis.plots import stage_curve
from keel.config.entry import PASSED
from keel.config.load import RUN_FOLDER, load_recipe
from keel.config.schema import Recipe, Stage
from keel.config.secrets import without_secrets
from keel.platform import files
from keel.runs.layout import Place
from keel.runs.lifecycle import texts
from keel.runs.reader import Column, Run

CARD, CURVE = "README.md", "curve.png"
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
"""The hub's task of what a class of transformers loads."""
_HUB_NAME = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*", re.ASCII)


def write_card(
    folder: Path, run: Run, at: Place, *, name: str, loader: str, adapter: bool, checkpoint: str
) -> None:
    """Write the card of the model in `folder`, which is of the run at `at`, and its curve.

    `name` is the model's on the hub, or its folder, `loader` the class that loads it, `checkpoint`
    empty if it is not of one. A function of its arguments and the run folder. Raises KeelError if
    the recipe or the metrics cannot be read.
    """
    from jinja2 import Environment, StrictUndefined

    recipe = load_recipe(run.folder.recipe)
    stage, info = recipe.stages[at.stage], run.info()
    columns = stage_columns(run, stage.name)
    stage_curve(folder / CURVE, stage.stage, columns, recipe.name, f"stage {stage.name}")
    figures = dict(_figures(columns, at.step))
    base = _base(recipe, at.stage)
    lora = recipe.model.lora is not None
    explained = {one.name: one.explain(lora) for one in recipe.stages[: at.stage + 1]}
    reports = (info.get(kind, {}).get(stage.name, {}) for kind in ("evaluation", "measured"))
    sizes = dict(size for report in reports for one in report.values() for size in _sizes(one))
    taken = _steps(run) | {stage.name: at.step}
    environment = Environment(undefined=StrictUndefined, trim_blocks=True)
    source = resources("keel.analysis").joinpath("model_card.md.j2").read_text(encoding="utf-8")
    text = environment.from_string(source).render(
        metadata=_metadata(recipe, stage, base, figures, name, PIPELINES[loader], adapter),
        name=name,
        description=recipe.description,
        origin=base or _origin(recipe),
        stages=[
            f"{taken.get(one.name, 0):,} steps of "
            f"{one.stage if found is None else found.title} ({one.name})"
            for one in recipe.stages[: at.stage + 1]
            for found in (explained[one.name],)
        ],
        checkpoint=checkpoint,
        stage=stage.name,
        evaluation=[
            {
                "measure": measure,
                "before": _shown(before),
                "after": _shown(after),
                "n": sizes.get(_set_of(stage, measure), "–"),
            }
            for measure, (before, after) in figures.items()
        ],
        sets=_sets(stage),
        curve=CURVE if (folder / CURVE).is_file() else None,
        objectives=[
            {
                "objective": one.objective,
                "reading": prose_to_unicode(one.reading),
                "terms": one.terms,
            }
            for one in explained.values()
            if one is not None
        ],
        load=_loading(name, base, loader, adapter),
        recipe=run.folder.recipe.read_text(encoding="utf-8").strip(),
        passed=list(dict.fromkeys(_passed(run))),
        seed=recipe.seed,
        versions=info["versions"],
    )
    # A path of this account's tells its name.
    home = re.escape(str(Path.home()).rstrip("/") or "no home")
    text = re.sub(rf"(?<![\w./~-]){home}(?![\w.-])", "~", without_secrets(text))
    files.write_text(folder / CARD, text)


def _passed(run: Run) -> Iterator[str]:
    """The names of functions, and of files of the run folder, that only the run has."""
    for _, value in texts(run.recipe()):
        if PASSED.fullmatch(value) or value.startswith(RUN_FOLDER):
            yield f"`{value}`"


def _base(recipe: Recipe, number: int) -> str | None:
    """The model that the exported one was begun from; None if no one has it but the run."""
    stage = recipe.stages[number]
    if stage.trains_policy:
        return recipe.model.name
    chosen = stage.base_model
    if chosen is not None and (chosen.name is not None or chosen.stage is not None):
        return chosen.name
    trained = any(one.trains_policy for one in recipe.stages[:number])
    return None if trained else recipe.model.name


def _origin(recipe: Recipe) -> str:
    if recipe.model.build is not None:
        return f"A new {recipe.model.build.family} model"
    return f"{recipe.model.name}, as earlier stages left it"


def _steps(run: Run) -> dict[str, int]:
    """The last recorded step of each stage."""
    return {row["stage"]: row["step"] for row in run.metrics()}


def _sizes(report: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The number of rows or prompts of an evaluation (``) and of each set's, by its name."""
    if "n" in report:
        yield "", report["n"]
    for name, one in report.get("sets", {}).items():
        yield name, one["n"]


def _sets(stage: Stage) -> dict[str, str]:
    """The task of each further set that a stage is evaluated on, by the set's name."""
    evaluation = None if stage.sampling is None else stage.sampling.evaluation
    sets = () if evaluation is None else evaluation.sets
    return {one.name: _named(one.task.path or one.task.name) for one in sets}


def _set_of(stage: Stage, measure: str) -> str:
    """The set that a measure is of; empty if it is of the validation split."""
    name = measure.partition("/")[0]
    return name if name in _sets(stage) else ""


Figure = tuple[float, float | None, float | None]
"""A value, and the ends of its interval."""


def _figures(
    columns: Mapping[str, Column], step: int
) -> Iterator[tuple[str, tuple[Figure | None, Figure | None]]]:
    """What was evaluated, by name: before the stage and after the step."""
    for name in columns:
        if name.startswith("eval/") and f"{name}/low" in columns:
            before, after = (_at(columns, name, place) for place in (0, step))
            if after is not None:
                yield name.removeprefix("eval/"), (before, after)


def _at(columns: Mapping[str, Column], name: str, step: int) -> Figure | None:
    found = []
    for end in ("", "/low", "/high"):
        column = columns.get(f"{name}{end}")
        values = [] if column is None else column.values[column.steps == step]
        found.append(float(values[-1]) if len(values) and math.isfinite(values[-1]) else None)
    value, low, high = found
    return None if value is None else (value, low, high)


def _shown(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    value, low, high = figure
    return f"{value:.3f}" + ("" if low is None or high is None else f" [{low:.3f}, {high:.3f}]")


def _metadata(
    recipe: Recipe,
    stage: Stage,
    base: str | None,
    figures: Mapping[str, tuple[Figure | None, Figure | None]],
    name: str,
    pipeline: str,
    adapter: bool,
) -> str:
    """The metadata that the hub reads, as YAML."""
    from huggingface_hub import EvalResult, ModelCardData

    data = sorted({path for one in recipe.stages for path in _data(one) if _on_hub(path)})
    tasks, sets = _tasks(stage), _sets(stage)
    results = []
    for measure, (_, after) in figures.items():
        named = _set_of(stage, measure)
        on = [sets[named]] if named else tasks
        if after is not None and on:
            where = f"set {named}" if named else "validation split"
            one = EvalResult(
                task_type=pipeline,
                dataset_type=on[0],
                dataset_name=f"{', '.join(on)} ({where})",
                dataset_split=named or "validation",  # else the hub takes all for one's
                metric_type=measure.removeprefix(f"{named}/") if named else measure,
                metric_value=round(after[0], 6),
            )
            results.append(one)
    kinds = [one.stage for one in recipe.stages]
    explained = [one.explain(recipe.model.lora is not None) for one in recipe.stages]
    card = ModelCardData(
        base_model=base if _on_hub(base) else None,
        license=_license(base or recipe.model.name),
        library_name="peft" if adapter else "transformers",
        pipeline_tag=pipeline,
        datasets=data or None,
        tags=list(dict.fromkeys(["keel", *kinds, *(one.name for one in explained if one)])),
        model_name=name.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    return card.to_yaml().strip()


def _tasks(stage: Stage) -> list[str]:
    """The names of what a stage is evaluated on; paths by their last part."""
    data = None if stage.judged is None else stage.judged.data
    found = [str(one.path or one.name) for one in (*stage.trained_tasks, data) if one is not None]
    return list(map(_named, found))


def _named(path: str) -> str:
    """A name of the hub, or the last part of a path."""
    return path if _on_hub(path) else Path(path).name


def _data(stage: Stage) -> Iterator[str]:
    """The names of data sets that a stage reads by the library `datasets`."""
    for one in (*stage.trained_tasks, stage.preference_data):
        if one is not None and one.name == "datasets" and one.path is not None:
            yield one.path


def _on_hub(name: str | None) -> bool:
    """Whether a name can be one of the hub, and is not a path here."""
    return name is not None and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _license(base: str | None) -> str | None:
    """The license that the card of the base model states, in its folder or the hub's cache."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    if base is None:
        return None
    place = Path(base) / CARD
    if not place.is_file() and _on_hub(base):
        cached = try_to_load_from_cache(base, CARD)
        place = Path(cached) if isinstance(cached, str) else place
    try:
        stated = (
            ModelCard.load(place, ignore_metadata_errors=True).data if place.is_file() else None
        )
    except (OSError, ValueError):
        return None
    found = getattr(stated, "license", None)
    return found if isinstance(found, str) else None


def _loading(name: str, base: str | None, loader: str, adapter: bool) -> str:
    """The lines of Python that load the model."""
    if not adapter:
        return (
            f"from transformers import {loader}, AutoTokenizer\n\n"
            f"model = {loader}.from_pretrained({name!r})\n"
            f"tokenizer = AutoTokenizer.from_pretrained({name!r})"
        )
    outputs = {"text-classification": ", num_labels=1", "token-classification": ", num_labels=2"}
    return (
        f"from peft import PeftModel\nfrom transformers import {loader}, AutoTokenizer\n\n"
        f"base = {loader}.from_pretrained({base or 'BASE'!r}{outputs.get(PIPELINES[loader], '')})\n"
        f"model = PeftModel.from_pretrained(base, {name!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({base or 'BASE'!r})"
    )
