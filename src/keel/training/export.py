"""From a run to a plain model folder."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from keel.analysis.model_card import write_card
from keel.config.load import load_recipe
from keel.config.model import Model
from keel.config.schema import Recipe
from keel.models.loading import ADAPTER as WEIGHTS_OF_ADAPTER
from keel.models.policy import BASE, Policy, load_policy
from keel.models.tokenizer_round_trip import (
    PROBES,
    difference,
    differing,
    quiet,
    same_rules,
    written_in,
)
from keel.platform.files import is_taken
from keel.runs import checkpoint
from keel.runs.checkpoint import MANIFEST, check_model
from keel.runs.layout import RECIPE, FolderEntry, Place, RunFolder
from keel.runs.reader import load
from keel.training.hub import check_upload, upload
from keel.training.state import POLICY, checkpoint_policy, holds_adapter, read_progress
from keel.types import KeelError, text_of

ADAPTER = "adapter"
"""Folder of an adapter next to the model that it is merged into."""


def pick_checkpoint(folder: RunFolder, which: str = "last") -> Path:
    """The checkpoint folder that `which` names: last, best, or its own name."""
    entries = folder.list_checkpoints()
    newest = checkpoint.newest_whole(folder, _warn)
    if newest is None:
        raise KeelError(
            f"run {folder.path} has no whole checkpoint: let it run, or --resume (with steps = 0 "
            "nothing is trained)"
        )
    if which == "last":
        return newest.path
    if which == "best":
        return _best(folder, newest)
    named = [entry.path for entry in entries if entry.path.name == which]
    if not named:
        names = ", ".join(entry.path.name for entry in entries)
        raise KeelError(f"run {folder.path} has no checkpoint {which!r}: there are {names}")
    wrong = checkpoint.damage(named[0])
    if wrong is not None:
        raise KeelError(f"checkpoint {named[0]} is damaged ({wrong}): choose another")
    return named[0]


def run_or_model(model: Path | str) -> tuple[Recipe | None, RunFolder | None]:
    """The run's recipe and folder, if it is a run."""
    path = Path(model)
    if not (path / RECIPE).is_file():
        # Loading reports what is wrong with an adapter's folder.
        known = any((path / name).is_file() for name in ("config.json", WEIGHTS_OF_ADAPTER))
        if path.exists() and not known:
            raise KeelError(f"{path} is neither a run folder nor a model folder: give one of them")
        return None, None
    folder = RunFolder.open(model)
    return load_recipe(folder.recipe), folder


def policy_of(model: Path | str, checkpoint: str = "last", device: str | None = None) -> Policy:
    """The policy of a run's checkpoint, of a model folder, or of the hub, to sample from; on the
    recipe's device unless another is given."""
    recipe, folder = run_or_model(model)
    given = {} if device is None else {"device": device}
    if recipe is None or folder is None:
        policy = load_policy(Model(name=str(model)).model_copy(update=given), 0)
    else:
        spec = recipe.model.model_copy(update=given)
        policy = checkpoint_policy(spec, recipe.seed, pick_checkpoint(folder, checkpoint))
    policy.model.requires_grad_(False)  # so that a GPU's memory is not kept for an update
    return policy


@dataclass(frozen=True, slots=True)
class Exported:
    """A model that was exported; `checkpoint` is the one it is from, None of a reward model.

    `running` says that the run had not ended: it may leave newer checkpoints.
    """

    folder: Path
    checkpoint: str | None
    running: bool
    url: str | None = None


def export(
    run: Path | str,
    folder: Path | str | None = None,
    *,
    checkpoint: str = "last",
    stage: str | None = None,
    adapter: bool = False,
    hub: str | None = None,
    private: bool = False,
) -> Path:
    """Write a checkpoint's policy, LoRA merged, to a new folder that plain transformers loads.

    With `stage`, the reward model that this stage made; without it, that of the last stage if no
    stage trains the policy. With `adapter`, only the LoRA adapter, to
    be put on its base by peft. A card (README.md) says what the model is. With `hub`, OWNER/NAME,
    the folder (NAME unless given) becomes a new model of the Hugging Face hub, by the token that
    `hf auth login` or HF_TOKEN set. Raises KeelError if plain AutoTokenizer would read texts of the
    run otherwise than the run did, and if the hub does not take the folder.
    """
    return exported(
        run,
        folder,
        checkpoint=checkpoint,
        stage=stage,
        adapter=adapter,
        hub=hub,
        private=private,
    ).folder


def exported(
    run: Path | str,
    folder: Path | str | None = None,
    *,
    checkpoint: str = "last",
    stage: str | None = None,
    adapter: bool = False,
    hub: str | None = None,
    private: bool = False,
) -> Exported:
    """`export`, and what it took."""
    if hub is not None:
        check_upload(hub)
    elif folder is None:
        raise KeelError("name the FOLDER to export to, or give --hub OWNER/NAME")
    elif private:
        raise KeelError("--private is for a model on the hub: give --hub OWNER/NAME too")
    target = Path(folder or str(hub).rpartition("/")[2])
    name = hub or target.name
    if target.exists():
        raise KeelError(f"{target} exists: export into a new folder")
    if stage is not None and checkpoint != "last":
        raise KeelError("--stage exports the model at the stage's end: drop --checkpoint")
    if not isinstance(run, str | PathLike):
        raise KeelError(f"a {type(run).__name__} is not a run: pass a run or its folder")
    running, place = is_taken(Path(run)), RunFolder.open(run)
    stages = load_recipe(place.recipe).stages
    if stage is None and checkpoint == "last" and not any(one.trains_policy for one in stages):
        stage = stages[-1].name  # the policy is as it was
    if stage is not None:
        source = Path(reward_model_of(run, stage)[0])
        columns = load(place.path).columns(stage).values()
        last = max((int(column.steps[-1]) for column in columns), default=0)
        _write(place, source, target, adapter, name, Place(place.stages.index(stage), last))
        return _uploaded(Exported(target, None, running), hub, private)
    while True:
        source = pick_checkpoint(place, checkpoint)
        try:
            at = next(e.place for e in place.list_checkpoints() if e.path.name == source.name)
            _write(place, source, target, adapter, name, at, of_checkpoint=True)
        except KeelError:
            if source.exists() or not running:
                raise
            continue  # the run has deleted it meanwhile, and has a newer one
        return _uploaded(Exported(target, source.name, running), hub, private)


def _uploaded(made: Exported, hub: str | None, private: bool) -> Exported:
    return made if hub is None else replace(made, url=upload(made.folder, hub, private=private))


def _write(
    place: RunFolder,
    source: Path,
    target: Path,
    adapter: bool,
    name: str,
    at: Place,
    *,
    of_checkpoint: bool = False,
) -> None:
    """The model of a checkpoint, or one of a stage, in a new folder; nothing if that fails. Its
    card calls it `name`; it is of the run at `at`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A folder that this call alone made: what is next to the target stays as it is.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as made:
            aside = Path(made) / target.name
            if of_checkpoint and not adapter and holds_adapter(source):
                recipe = load_recipe(place.recipe)
                original = recipe.model.model_copy(update={"quantisation": None})
                if original != recipe.model:
                    print(
                        "keel: the adapter is added to the original weights, not to those in "
                        "4 bits that it learned on",
                        file=sys.stderr,
                    )
                checkpoint_policy(original, recipe.seed, source).save(aside)
                shutil.rmtree(aside / ADAPTER)
            else:
                _copy(source / POLICY if of_checkpoint else source, aside, adapter)
            if not adapter:
                _check_tokens(place, aside)
            with _without_card():
                write_card(
                    aside,
                    load(place.path),
                    at,
                    name=name,
                    loader="AutoModelForCausalLM" if of_checkpoint else class_of(source),
                    adapter=adapter,
                    checkpoint=source.name if of_checkpoint else "",
                )
            aside.rename(target)
    except OSError as error:
        raise KeelError(f"cannot write {target}: {error.strerror or error}") from error


@contextmanager
def _without_card() -> Iterator[None]:
    """A run whose metrics are damaged has its model all the same."""
    try:
        yield
    except KeelError as error:
        print(f"keel: the exported model has no card: {error}", file=sys.stderr)


def _copy(source: Path, aside: Path, adapter: bool) -> None:
    """Copy a model, or its adapter alone, as it lies in the run folder."""
    if adapter and (source / ADAPTER).is_dir():  # next to a merged model
        source = source / ADAPTER
    elif adapter and not (source / BASE).is_file():
        raise KeelError(f"{source} has no adapter: drop --adapter, which is for models with lora")
    shutil.copytree(source, aside, ignore=shutil.ignore_patterns(ADAPTER, MANIFEST))


def _check_tokens(run: RunFolder, model: Path) -> None:
    """Raise KeelError if AutoTokenizer does not read texts as the saved tokenizer.json does."""
    own = written_in(model)
    if own is None:
        return
    try:
        with quiet():
            stock = AutoTokenizer.from_pretrained(model)
    except Exception as error:  # its own code, which is trusted where the model is served, or not
        if "trust_remote_code" in str(error):
            return
        raise KeelError(f"the exported tokenizer does not load: {error}") from error
    if same_rules(own, stock):
        return
    where = difference(own, stock, (*PROBES, *_texts(run)))
    if where is not None:
        raise KeelError(differing(str(run.path), where))


def _texts(run: RunFolder) -> list[str]:
    """Prompts and completions of the last step whose rollouts were kept and can be read."""
    reader = load(run.path)
    for place in reversed(reader.rollout_places()):
        try:
            rows = reader.rollouts(place.step, run.stages[place.stage])
        except KeelError:  # damaged: the texts of an earlier step serve as well
            continue
        return [text for row in rows for text in _texts_of(row)]
    return []


def _texts_of(row: Mapping[str, Any]) -> list[str]:
    """The texts of a rollout."""
    prompt = row["prompt"]
    turns = [prompt] if isinstance(prompt, str) else list(map(text_of, prompt))
    return [*turns, row["completion"]]


def class_of(folder: Path) -> str:
    """The class of transformers that loads an exported model."""
    made = json.loads((folder / "config.json").read_text("utf-8")).get("architectures") or [""]
    for name in ("SequenceClassification", "TokenClassification"):
        if made[0].endswith(name):
            return f"AutoModelFor{name}"
    return "AutoModelForCausalLM"


def reward_model_of(model: Path | str, stage: str | None) -> tuple[str, str | None]:
    """A reward model's folder or name and, of a run, the stage that made it."""
    if not (Path(model) / RECIPE).is_file():
        if stage is not None:
            raise KeelError(
                f"{model} is not a run folder, so it has no stage {stage!r}: drop --stage"
            )
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


def _warn(path: Path, wrong: str) -> None:
    print(f"keel: checkpoint {path} is damaged ({wrong}): using one before", file=sys.stderr)


def _best(folder: RunFolder, newest: FolderEntry) -> Path:
    best = read_progress(newest.path).best_step
    if best is None:
        raise KeelError(f"run {folder.path} was never evaluated in its last stage: use last")
    return pick_checkpoint(folder, folder.checkpoint(newest.place.stage, best).name)
