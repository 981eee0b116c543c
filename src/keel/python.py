"""Keel from Python: `keel.train`, `keel.check` and `keel.load`.

`train` takes what `keel train` takes, or the parts of a recipe as live objects (see
`keel.training.live`), and ends in the same function.
"""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from keel.analysis.progress import watching
from keel.config.entry import passed
from keel.config.load import Source, in_run_folder, load_recipe, to_toml
from keel.config.schema import Recipe
from keel.runs import reader
from keel.runs.layout import RunFolder
from keel.runs.values import changes
from keel.types import KeelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from keel.preflight.check import Report


class TrainedRun(reader.Run):
    """A run folder, opened for reading, and its model."""

    __slots__ = ()

    def policy(self, checkpoint: str = "last") -> PreTrainedModel:
        """The trained policy as transformers loads it, LoRA merged, on the CPU.

        `checkpoint` is "last", "best" (selected on the validation split) or a name. Raises
        KeelError where there is none.
        """
        from transformers import AutoModelForCausalLM

        from keel.training.export import export

        with tempfile.TemporaryDirectory() as folder:
            export(self.folder.path, f"{folder}/model", checkpoint=checkpoint)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        return model


def load(path: Path | str) -> TrainedRun:
    """The run in a folder. Raises KeelError where there is none."""
    return TrainedRun(RunFolder.open(path))


def train(
    recipe: Source | Recipe | None = None,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[object] = (),
    progress: bool = True,
    **arguments: Any,
) -> TrainedRun:
    """Train, and return the run.

    Args:
        recipe: a TOML file, a shipped recipe's name, a dict or a loaded recipe; optional where the
            arguments say it all.
        folder: of the run; the next free one under runs/ unless given.
        resume: continue the run in `folder` from its newest checkpoint. Pass the arguments of the
            first call again; of a run of which only functions were passed, these are enough.
        callbacks: objects with any of the methods of `keel.Callback`.
        progress: show a bar (on a terminal, and in a notebook that has ipywidgets) or a line per
            step.
        model: a loaded transformers model (with `tokenizer`), a folder or hub name, or the
            recipe's table as a dict.
        tokenizer: of a loaded model.
        data: of the last stage: a `datasets.Dataset`, a list of dicts, a file (.jsonl, .parquet),
            the name of a task, or the recipe's table as a dict.
        eval_data: for the validation split, of the same type; else a tenth of `data` is held out.
        rewards: a function, a name or a recipe's table as a dict; or a list of these.
        algorithm: a preset's name, a `Preset` or an `Algorithm` of `keel.algorithms`.
        **arguments: any other key of a recipe: `steps=50`, `rollout={"max_tokens": 64}`,
            `**{"optimizer.learning_rate": 1e-5}`. Wherever a recipe names a function, the function
            itself can be given.

    Raises:
        KeelError: something is wrong with the arguments, or stops the run.
        keel.runs.process.Interrupted: Ctrl-C or SIGTERM; there is a checkpoint.
    """
    from keel.training.live import objects
    from keel.training.run import train as run

    given = objects(recipe, **arguments)
    console = Console(quiet=not progress)
    with passed(given.functions), watching(console) as shown:
        every = (shown, *callbacks)
        if not resume:
            place = run(load_recipe(given.recipe), folder, callbacks=every, inputs=given.write)
        else:
            if folder is None:
                raise KeelError("resume=True continues a run: pass its folder")
            known = RunFolder.open(folder)
            if recipe is not None or set(arguments) - {"rewards"}:
                _check_same(known, load_recipe(given.recipe))
                given.check_data(known.inputs)
            place = run(None, folder, resume=True, callbacks=every)
    return TrainedRun(place)


def check(
    recipe: Source | Recipe | None = None, *, price: float | None = None, **arguments: Any
) -> Report:
    """Load all that a run would, sample and score one batch, and report what would go wrong.

    The arguments are those of `train`; `price` is per hour of this machine. Nothing is kept.
    Raises KeelError where the recipe or its model cannot be read.
    """
    from keel.preflight.check import check as inspect
    from keel.training.live import objects

    given = objects(recipe, **arguments)
    with tempfile.TemporaryDirectory() as folder, passed(given.functions):
        given.write(Path(folder) / "inputs")
        return inspect(in_run_folder(given.recipe, Path(folder)), price=price)


def _check_same(folder: RunFolder, recipe: Recipe) -> None:
    """Raise KeelError where the arguments are not those that a run began with."""
    known = tomllib.loads(folder.recipe.read_text("utf-8"))
    differing = list(changes(known, tomllib.loads(to_toml(recipe))))
    if differing:
        one = differing[0]
        raise KeelError(
            f"resume=True: {one.name} is {one.b}, but the run in {folder.path} has {one.a}: pass "
            f"the arguments of the first call, or change {folder.recipe.name} there"
        )
