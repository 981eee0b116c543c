"""A recipe from its start, or from its newest checkpoint, to its end."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from keel.analysis.diagnosis.table import DiagnosisMonitor
from keel.config.entry import PASSED, load_entry
from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe
from keel.learn.token_budget import LESS, oom_context
from keel.models.kernels import fingerprint
from keel.models.loading import describe_model
from keel.models.policy import (
    Policy,
    load_policy,
    needs_resolution,
    resolve_autocast,
    time_products,
)
from keel.platform.files import make_folder, write_text
from keel.platform.signals import Interrupt, ProcessLost, keep_freed
from keel.platform.time_limit import Hung
from keel.runs import checkpoint, lifecycle
from keel.runs.callbacks import check_callbacks
from keel.runs.layout import RunFolder
from keel.runs.lifecycle import texts
from keel.runs.reader import read_run_json
from keel.runs.trackers import open_trackers
from keel.runs.writer import RunWriter, update_run_json
from keel.training.recipe_checks import leaks, validate_later_stages
from keel.training.setup import PairLabeller, RunContext
from keel.training.state import Progress, check_base, read_progress, restore_policy
from keel.training.template_time import templates_at
from keel.types import KeelError

REPORTED = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


def train(
    recipe: Recipe | None,
    folder: Path | str | None = None,
    *,
    resume: bool = False,
    callbacks: Sequence[object] = (),
    inputs: Callable[[Path], None] | None = None,
    labeller: PairLabeller | None = None,
) -> RunFolder:
    """Run a recipe into a run folder (the next free one under runs/ unless named).

    `callbacks` are described in `keel.runs.callbacks`. `inputs` writes the files that the recipe
    names by `$RUN/inputs/` into a folder of a new run. `labeller` has people label pairs.

    With `resume` the run continues from the folder's newest whole checkpoint, under the folder's
    own recipe; of another that is given it takes over what `lifecycle.change_recipe` allows. Raises
    Interrupted after Ctrl-C or SIGTERM, with a checkpoint written; KeelError for what a user can
    fix.
    """
    if recipe is None and not resume:
        raise KeelError("there is no recipe to run: name one, or resume a run")
    check_callbacks(callbacks)
    text, name = ("", "") if recipe is None else (to_toml(recipe), recipe.name)
    resumed = lifecycle.resume_run(folder) if resume else None
    known = text if resumed is None else resumed.recipe.read_text("utf-8")
    for key, value in texts(tomllib.loads(known)):
        if PASSED.fullmatch(value):
            load_entry(value, key)
    if resumed is not None and text:
        lifecycle.change_recipe(resumed, text)
    place = resumed or lifecycle.create_run(text, name, folder, inputs)
    recipe = load_recipe(place.recipe)
    before: Path | None = None
    left, lost = recipe.cluster.restarts, ""
    stopping: Interrupt | None = None
    while True:
        try:
            with lifecycle.run_lifecycle(place, resume, callbacks) as (writer, start):
                stopping = writer.interrupt
                progress = Progress(stage=0) if start is None else _progress_of(start, recipe)
                writer.recorder.event("resumed" if resume else "started", step=progress.step)
                if lost:
                    writer.note(lost)
                if start != before:
                    before, left = start, recipe.cluster.restarts
                writer.callbacks.add(DiagnosisMonitor(writer.warn))
                with keeping_stacks(writer), templates_at(run=place, record=True):
                    run_stages(recipe, writer, progress, start, labeller)
            return place
        except KeelError as error:
            if not isinstance(error.__cause__, ProcessLost) or recipe.cluster.ray is None:
                raise
            if left == 0 or stopping:
                raise
            left, resume = left - 1, True
            lost = f"{error.__cause__}: going on from the newest checkpoint"


@contextmanager
def keeping_stacks(writer: RunWriter) -> Iterator[None]:
    """Write the stack of a call that hangs into the run folder; running out of memory is a
    KeelError."""
    try:
        with oom_context("a model or batch was made ready", LESS):
            yield
    except Hung as error:
        if not error.stack:
            raise
        count = len(list(writer.folder.faults.glob("hang-*.txt")))
        target = writer.folder.faults / f"hang-{count + 1}.txt"
        make_folder(target.parent)
        write_text(target, f"{error}\n\n{error.stack}")
        writer.recorder.event("hung", text=str(error), stack=target.name)
        raise KeelError(f"{error}; its stack is in {target}") from error


def run_stages(
    recipe: Recipe,
    writer: RunWriter,
    progress: Progress,
    start: Path | None,
    labeller: PairLabeller | None = None,
) -> None:
    """Every stage from `progress` on, each from the model before it."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    keep_freed()
    local = recipe.model
    if recipe.cluster.ray is not None:  # whose processes compute
        local = recipe.model.model_copy(update={"device": "cpu"})
    policy = load_policy(local, recipe.seed)
    processes, gpus = recipe.cluster.processes, torch.cuda.device_count()
    if processes > 1 and policy.device.type == "cuda" and processes > gpus:
        raise KeelError(
            f"cluster.processes = {processes}, but torch sees GPUs for {gpus} of them: set at most "
            'that many, or model.device = "cpu"'
        )
    if start is not None:
        check_base(policy, recipe.model, start)
        restore_policy(start, policy)
    if labeller is not None:
        labeller.check(writer.folder)
    threads = torch.get_num_threads()
    if start is None:
        writer.callbacks.note(
            f"model: {describe_model(recipe.model, policy.model)}, {recipe.model.dtype} on "
            f"{policy.device}; CPU threads: {threads}"
        )
    lifecycle.write_metadata(
        writer, recipe.name, recipe.seed, threads, REPORTED, fingerprint("decode")
    )
    if recipe.cluster.ray is None or not recipe.cluster.gpus:  # else it computes on other devices
        recipe = settle_autocast(recipe, policy, writer)
    validate_later_stages(recipe, policy, progress.stage)
    for leak in leaks(recipe):
        writer.note(str(leak))
    for number in range(progress.stage, len(recipe.stages)):
        stage = recipe.stages[number]
        if number > progress.stage:
            start = None
            progress = Progress(stage=number, tokens=progress.tokens)
        trackers = open_trackers(
            stage.trackers,
            writer.folder,
            name=writer.folder.path.name,
            recipe=recipe.model_dump(mode="json"),
        )
        context = RunContext(recipe, replace(writer, trackers=trackers), policy, start, labeller)
        writer.callbacks.stage(stage.name, stage.stage, stage.steps, progress.step)
        try:
            progress = stage.train(context, progress)
        finally:
            for tracker in trackers:
                tracker.close()
        done = progress.step == stage.steps
        if done:  # not of an interrupted stage: its resumed run records the same in the end
            update_run_json(writer.folder, {"tokens": progress.tokens})
        if (not done or number + 1 < len(recipe.stages)) and writer.stopped():
            return
    _prune(recipe, writer.folder)
    update_run_json(writer.folder, {"finished": True})
    writer.recorder.event("finished")


def settle_autocast(recipe: Recipe, policy: Policy, writer: RunWriter) -> Recipe:
    """The recipe and the policy with what `model.autocast = "auto"` stands for on this CPU.

    A timing decides once; run.json keeps the decision, so that a resumed run computes the same.
    """
    if not needs_resolution(recipe.model, policy):
        return recipe
    chosen = read_run_json(writer.folder).get("autocast")
    if chosen is None:
        times = time_products(policy.model)
        chosen = "bfloat16" if times.bfloat16_pays else "float32"
        writer.note(f'model.autocast = "auto": {chosen} from here on, since {times}')
        update_run_json(writer.folder, {"autocast": chosen})
    model = resolve_autocast(recipe.model, policy, chosen == "bfloat16")
    return recipe.model_copy(update={"model": model})


def _progress_of(start: Path, recipe: Recipe) -> Progress:
    """The progress of a checkpoint. Raises KeelError if its stage now has fewer steps."""
    progress = read_progress(start)
    stage = recipe.stages[progress.stage]
    if progress.step > stage.steps:
        raise KeelError(
            f"{stage.name}.steps = {stage.steps}, but checkpoint {start.name} has taken "
            f"{progress.step}: raise it, or delete the checkpoints after step {stage.steps}"
        )
    return progress


def _prune(recipe: Recipe, folder: RunFolder) -> None:
    """Delete old checkpoints that a killed process left."""
    best: dict[str, int] = read_run_json(folder).get("best", {})
    known = {
        folder.stages.index(name): step for name, step in best.items() if name in folder.stages
    }
    kept = [folder.checkpoint(stage, step) for stage, step in known.items()]
    checkpoint.prune(folder, recipe.stages[-1].checkpoints.keep, kept)
