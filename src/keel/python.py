"""Keel from Python: `keel.train`, `keel.check`, `keel.evaluate` and `keel.load`.

`train` takes what `keel train` takes, or the parts of a recipe as live objects (see
`keel.training.live`), and ends in the same function.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from keel.analysis.progress import watching
from keel.config.entry import passed
from keel.config.load import Source, in_run_folder, load_recipe
from keel.config.schema import Recipe
from keel.runs import reader
from keel.runs.layout import RECIPE, RunFolder
from keel.runs.lifecycle import texts
from keel.types import KeelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from keel.preflight.check import Report
    from keel.view.summary import Summary


def _path(model: Any) -> Path:
    """The path that stands for a run or a model."""
    if not isinstance(model, str | os.PathLike):
        raise KeelError(
            f"a {type(model).__name__} is not a run: pass a run, its folder or a model's name"
        )
    return Path(model)


def evaluate(
    model: Path | str | reader.Run,
    *,
    task: str | Mapping[str, Any] | None = None,
    data: Any = None,
    rewards: Any = (),
    checkpoint: str = "last",
    prompts: int | None = None,
    samples: int | None = None,
    k: Sequence[int] | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    max_tokens: int | None = None,
    component: str | None = None,
    threshold: float | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Greedy pass@1 and, with `samples`, sampled accuracy, pass@k and maj@k, with 95 % intervals.

    Args:
        model: a run, its folder, a model's folder or hub name.
        task: a benchmark or another task by name, a file, or the recipe's table as a dict; a run's
            own unless given.
        data: the rows that are scored: a list of dicts, a `datasets.Dataset` or a file (.jsonl,
            .parquet), read as the task's (of a benchmark in its layout on the hub), or as rows of
            `prompt` and `answer`.
        rewards: a function, a name or a recipe's table as a dict, or a list of these. Functions
            that a run was trained with stand for themselves in its recipe, with their keys there;
            others take the place of its rewards.
        checkpoint: of a run: "last", "best" or a name.
        prompts: how many validation prompts (200; of rows that are given, all).
        samples: completions sampled of each prompt (0: greedy only).
        k: values of k of pass@k and maj@k (the number of samples).
        temperature: of the samples, as `top_k`, `top_p` and `min_p`.
        max_tokens: of a completion.
        component: the name of the reward that decides.
        threshold: the least value of a correctness that is right (1).
        seed: of the samples (the run's).

    Returns:
        `mean`, `low`, `high` and `n` of the greedy `measure` (pass@1 or reward), the same of
        `sampled`, `pass@k` and `maj@k`; see `keel.training.evaluation.evaluate` for the rest.

    Raises:
        KeelError: the model, the task or the rewards will not do.
    """
    from keel.training.evaluation import evaluate as run
    from keel.training.live import named, written_rows

    names, functions = named(rewards if isinstance(rewards, list | tuple) else [rewards])
    chosen: dict[str, Any] = {
        "prompts": prompts, "samples": samples, "k": k, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "min_p": min_p, "max_tokens": max_tokens, "component": component,
        "threshold": threshold, "seed": seed,
    }  # fmt: skip
    given = {name: value for name, value in chosen.items() if value is not None}
    with (
        tempfile.TemporaryDirectory() as folder,
        passed({**getattr(model, "functions", {}), **functions}),
    ):
        if data is not None:
            answers = not names and not (_path(model) / RECIPE).is_file()
            given["rows"] = written_rows(data, Path(folder), answers)
        return run(
            os.fspath(_path(model)), task=task, rewards=names, checkpoint=checkpoint, **given
        )


_evaluate = evaluate
"""`TrainedRun` has a method of the same name."""


@dataclass(frozen=True, slots=True, repr=False)
class TrainedRun(reader.Run):
    """A run folder, opened for reading, its model, and the functions that it was trained with."""

    functions: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Those that were passed to `keel.train` or `keel.load`, by their names in the recipe."""

    def _repr_html_(self) -> str | None:
        """What a notebook shows; None, so that it shows the `repr`, if the run cannot be read."""
        from keel.view.summary import html

        try:
            return html(self)
        except KeelError:
            return None

    def summary(self) -> Summary:
        """How far each stage is, its evaluations before and after, time, tokens and disk use."""
        from keel.view.summary import summarise

        return summarise(self)

    def plot(self, *metrics: str, stage: str | None = None) -> Figure:
        """A matplotlib figure of metrics of a stage, one under the other.

        Without metrics what the stage gains; without `stage` the last that has records. Raises
        KeelError for a metric that it does not have.
        """
        from keel.view.summary import figure_of

        return figure_of(self, metrics, stage)

    def report(self, path: Path | str | None = None) -> Path:
        """Write the run as one HTML file (`keel report`), RUN/report.html unless named.

        Returns its path. Raises KeelError if the run cannot be read or the file written.
        """
        from keel.view.report import write_report

        return write_report(self.folder.path, None if path is None else Path(path))

    evaluate = _evaluate

    def export(self, folder: Path | str | None = None, **choices: Any) -> Path:
        """`keel.export` of this run."""
        from keel.training.export import export

        return export(self.folder.path, folder, **choices)

    def continue_(self, **arguments: Any) -> TrainedRun:
        """Go on from the newest checkpoint, with the functions that this run holds.

        `steps` and the other keys that may change are recorded as changes of the recipe; see
        `keel.train`, which takes the other arguments.
        """
        return train(self, **arguments)

    def policy(self, checkpoint: str = "last") -> PreTrainedModel:
        """The trained policy as transformers loads it, LoRA merged, on the CPU.

        `checkpoint` is "last", "best" (selected on the validation split) or a name. Raises
        KeelError if there is none.
        """
        from transformers import AutoModelForCausalLM

        from keel.training.export import export

        with tempfile.TemporaryDirectory() as folder:
            export(self.folder.path, f"{folder}/model", checkpoint=checkpoint)
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
        return model


def load(path: Path | str | reader.Run, functions: Sequence[Any] = ()) -> TrainedRun:
    """The run in a folder; `functions` are those that were passed when it was trained.

    Raises KeelError if there is none.
    """
    from keel.training.live import named

    return TrainedRun(RunFolder.open(_path(path)), named(functions)[1])


def train(
    recipe: Source | Recipe | reader.Run | None = None,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[object] | object | None = (),
    progress: bool = True,
    **arguments: Any,
) -> TrainedRun:
    """Train, and return the run.

    Args:
        recipe: a TOML file, a shipped recipe's name, a dict or a loaded recipe; optional where the
            arguments say it all. A run that `keel.train` or `keel.load` returned is resumed.
        folder: of the run; the next free one under runs/ unless given.
        resume: continue the run in `folder` from its newest checkpoint. Functions must be passed
            again. Of the recipe only other `steps`, rates and intervals may be given
            (`keel.runs.lifecycle.CHANGEABLE`), and any key of a stage that has not begun, which are
            recorded; the rest is refused if it differs.
        callbacks: objects with any of the methods of `keel.Callback`.
        progress: show a bar (on a terminal and in a notebook), or a line of a step every 5 s.
        model: a loaded transformers model (with `tokenizer`), a run or its folder (its newest
            checkpoint, LoRA merged), a model folder or hub name, or the recipe's table as a dict.
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
        keel.platform.signals.Interrupted: Ctrl-C or SIGTERM; there is a checkpoint.
    """
    from keel.preferences.labeller import PeopleLabeller
    from keel.training.live import collect_inputs
    from keel.training.run import train as run

    functions: dict[str, Any] = {}
    if isinstance(recipe, reader.Run):
        if folder is not None:
            raise KeelError("folder: a run goes on in its own: leave it out, or pass its recipe()")
        functions.update(getattr(recipe, "functions", {}))
        folder, recipe, resume = recipe.folder.path, None, True
    if resume and folder is None:
        raise KeelError("resume=True continues a run: pass its folder")
    known = RunFolder.open(folder) if resume and folder is not None else None
    if known is not None and recipe is None:
        recipe = reader.Run(known).recipe()
        functions.update(_passed_again(arguments, recipe, known))
    given = collect_inputs(recipe, **arguments)
    functions.update(given.functions)
    several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    several = [] if callbacks is None else several
    console = Console(quiet=not progress)
    with passed(functions), watching(console) as shown:
        if known is not None:
            given.check_data(known.inputs)
        place = run(
            load_recipe(given.recipe),
            folder,
            resume=resume,
            callbacks=[shown, *several],
            inputs=given.write,
            labeller=PeopleLabeller(),
        )
    return TrainedRun(place, functions)


def _passed_again(
    arguments: dict[str, Any], recipe: Mapping[str, Any], known: RunFolder
) -> Mapping[str, Any]:
    """The functions among `rewards` of a run that goes on, which are taken out of the arguments.

    Raises KeelError for a reward that its recipe does not have.
    """
    from keel.training.live import named

    rewards = arguments.get("rewards", ())
    rewards = rewards if isinstance(rewards, list | tuple) else [rewards]
    if any(isinstance(one, Mapping) for one in rewards):  # compared with the recipe's tables
        return {}
    arguments.pop("rewards", None)
    names, functions = named(rewards)
    own = {value for _, value in texts(recipe)}
    if others := [str(name) for name in names if name not in own]:
        raise KeelError(
            f"rewards: the recipe of {known.path} has no {', '.join(others)}: leave them out, or "
            "start a new run"
        )
    return functions


def check(
    recipe: Source | Recipe | reader.Run | None = None,
    *,
    price: float | None = None,
    **arguments: Any,
) -> Report:
    """Load all that a run would, sample and score one batch, and report what would go wrong.

    The arguments are those of `train`; `price` is per hour of this machine. Nothing is kept.
    Raises KeelError if the recipe or its model cannot be read.
    """
    from keel.preflight.check import check as inspect
    from keel.training.live import collect_inputs

    functions: Mapping[str, Any] = getattr(recipe, "functions", {})
    own = recipe.folder.recipe if isinstance(recipe, reader.Run) else recipe
    given = collect_inputs(own, **arguments)
    with tempfile.TemporaryDirectory() as folder, passed({**functions, **given.functions}):
        given.write(Path(folder) / "inputs")
        return inspect(in_run_folder(given.recipe, Path(folder)), price=price)
