"""`keel eval` of a reward model: what judged rows from a file say of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from keel.analysis.calibration import PairReport
from keel.analysis.reward_plots import margin_picture, reliability_picture
from keel.config.judging import ProcessRewardModelStage
from keel.config.load import load_run_recipe
from keel.config.model import Model
from keel.config.preference_data import PreferenceData
from keel.data.preferences.dataset import read_labelled, read_pairs, read_steps
from keel.models.reward import load_reward_model
from keel.runs.checkpoint import check_model
from keel.runs.files import make_folder
from keel.runs.layout import RECIPE, RunFolder
from keel.training.judged_data import label_encoder, pair_encoder, step_encoder
from keel.training.reward_metrics import Measured, measure_labels, measure_pairs, measure_steps
from keel.types import KeelError

Rows = Literal["pairs", "labels", "steps"]
SEPARATOR, THRESHOLD = "\n", 0.5
"""How steps are read where no stage says it."""


def evaluate_reward_model(
    model: Path | str,
    rows: Rows,
    path: str,
    *,
    stage: str | None = None,
    separator: str | None = None,
    threshold: float | None = None,
    token_budget: int = 16_384,
    pictures: Path | None = None,
) -> Measured:
    """An outcome model on pairs or labelled answers, or a process model on answers in steps.

    `model` is a folder or hub name, or a run, of which `stage` names the stage that made the model.
    All rows of the file count (JSONL, or Parquet by its ending). Steps are read by the `separator`
    and `threshold` of that stage unless they are given; of another model by a newline and 0.5. With
    `pictures`, a folder, the reliability and the margins are drawn there.

    Raises KeelError where the model, the file or the folder for the pictures will not do.
    """
    name, recipe_stage = _found(model, stage)
    if pictures is not None:
        _make(pictures)
    kind: Literal["outcome", "process"] = "process" if rows == "steps" else "outcome"
    loaded = load_reward_model(Model(name=name), kind)
    reader = loaded.reader(_raw(model, recipe_stage))
    judge = partial(loaded.judge, token_budget=token_budget)
    source = PreferenceData(
        name="parquet" if path.endswith(".parquet") else "jsonl", path=path, empty="keep"
    )
    encoded: list[Any]
    if rows == "pairs":
        pairs = read_pairs(source)
        encoded = list(map(pair_encoder(reader), (*pairs.train, *pairs.heldout)))
        measured = measure_pairs(_short(encoded, loaded.context), judge)
    elif rows == "labels":
        labelled = read_labelled(source)
        encoded = list(map(label_encoder(reader), (*labelled.train, *labelled.heldout)))
        measured = measure_labels(_short(encoded, loaded.context), judge)
    else:
        steps = read_steps(source)
        own_separator, own_threshold = _reading(model, recipe_stage)
        separator = own_separator if separator is None else separator
        encoded = list(map(step_encoder(reader, separator), (*steps.train, *steps.heldout)))
        threshold = own_threshold if threshold is None else threshold
        measured = measure_steps(_short(encoded, loaded.context), judge, threshold)
    if pictures is not None:
        draw(measured, pictures, Path(path).stem, Path(name).name)
    return measured


def draw(measured: Measured, folder: Path, name: str, title: str) -> None:
    """Reliability and, of pairs, margins, as pictures NAME-reliability.png and NAME-margins.png."""
    make_folder(folder)
    reliability_picture(measured.calibrated, folder / f"{name}-reliability.png", title)
    if isinstance(measured.report, PairReport):
        margin_picture(measured.report, folder / f"{name}-margins.png", title)


def model_of(model: Path | str, stage: str | None) -> str:
    """The folder of a run's reward model, or the model's own name."""
    return _found(model, stage)[0]


def _found(model: Path | str, stage: str | None) -> tuple[str, str | None]:
    """The model's folder or name and, of a run, the stage that made it."""
    if not (Path(model) / RECIPE).is_file():
        if stage is not None:
            raise KeelError(f"{model} is no run folder, so it has no stage {stage!r}: drop --stage")
        return str(model), None
    folder = RunFolder.open(model)
    made = [name for name in folder.stages if folder.model(name).is_dir()]
    if stage is None and len(made) == 1:
        stage = made[0]
    if stage not in made:
        names = ", ".join(made) or "none"
        raise KeelError(
            f"run {model} has no reward model of stage {stage!r}: name one by --stage ({names})"
        )
    check_model(folder.model(stage))
    return str(folder.model(stage)), stage


def _raw(run: Path | str, stage: str | None) -> bool:
    """Whether a run's stage read plain prompts without the chat template."""
    if stage is None:
        return False
    recipe = load_run_recipe(RunFolder.open(run).recipe)
    made = next(one for one in recipe.stages if one.name == stage)
    return bool(getattr(made, "raw", False))


def _reading(run: Path | str, stage: str | None) -> tuple[str, float]:
    """The separator and the threshold by which a run's stage read steps, or the usual ones."""
    if stage is not None:
        recipe = load_run_recipe(RunFolder.open(run).recipe)
        made = next(one for one in recipe.stages if one.name == stage)
        if made.records == "steps":
            steps = cast(ProcessRewardModelStage, made)
            return steps.separator, steps.threshold
    return SEPARATOR, THRESHOLD


def _make(pictures: Path) -> None:
    """The folder, before the model is loaded: a wrong word should not cost minutes."""
    try:
        pictures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise KeelError(f"cannot make {pictures}: {why}: give another --pictures") from error


def _short(rows: list[Any], context: int | None) -> list[Any]:
    long = [row for row in rows if context is not None and row.longest > context]
    if long:
        raise KeelError(
            f"{len(long)} of the {len(rows)} rows are longer than the model's context of {context} "
            "tokens: leave them out of the file"
        )
    return rows
