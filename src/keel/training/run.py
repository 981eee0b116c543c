"""A recipe from its start or its newest checkpoint to its end, and what is checked of its later
stages before its first step."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from keel.analysis.alerts import AlertSender, check_alerts
from keel.analysis.diagnosis.table import DiagnosisMonitor
from keel.cluster.placement import placement_of
from keel.config.entry import PASSED, load_entry, load_function
from keel.config.load import load_recipe, to_toml
from keel.config.schema import Recipe, Stage
from keel.data.mixture import build_tasks
from keel.data.preferences import READERS
from keel.data.sft import read_sft
from keel.data.splits import KINDS
from keel.engines.registry import capabilities_of, check_engine, check_requests
from keel.learn.memory import LESS, keeping_threads, oom_context
from keel.learn.optimizer import check_optimizer
from keel.learn.teacher_server import served_teacher
from keel.models.kernels import fingerprint
from keel.models.loading import describe_model, read_config
from keel.models.policy import (
    Policy,
    load_policy,
    needs_resolution,
    resolve_autocast,
    time_products,
)
from keel.models.reference import check_teachers
from keel.models.reward import check_classifier
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
from keel.training.judging import keys_of_base, other_model
from keel.training.leaks import leaks, stored_sets
from keel.training.setup import (
    PairLabeller,
    RunContext,
    check_evaluated,
    check_rewards_of_steps,
    longest_sequence,
    settle_stops,
    templates_at,
)
from keel.training.speed import CudaMemory
from keel.training.state import Progress, check_base, read_progress, restore_policy
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
        lifecycle.change_recipe(resumed, to_toml(load_recipe(tomllib.loads(known))), text)
    elif recipe is not None:
        check_alerts(recipe.alerts)  # before there is a folder
    place = resumed or lifecycle.create_run(text, name, folder, inputs)
    recipe = load_recipe(place.recipe)
    check_alerts(recipe.alerts)
    alerts = AlertSender(recipe.alerts, place.path)
    before: Path | None = None
    left, lost = recipe.cluster.restarts, ""
    stopping: Interrupt | None = None
    with alerts.at_end(lambda: bool(read_run_json(place).get("finished"))):
        # On from the newest checkpoint, as often as processes of Ray may end.
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
                    writer.callbacks.add(DiagnosisMonitor(alerts.attach(writer.warn)))
                    writer.callbacks.add(alerts)
                    templates = templates_at(run=place, record=True)
                    with keeping_threads(), keeping_stacks(writer), templates:
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
    if processes > 1 and policy.device.type == "mps":
        raise KeelError(f"cluster.processes = {processes}: there is one MPS device, set it to 1")
    if policy.device.type == "cuda":
        writer.clock.memory = CudaMemory(policy.device)
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
        if policy.quantisation is not None:
            writer.note(str(policy.quantisation))
    lifecycle.write_metadata(
        writer, recipe.name, recipe.seed, threads, REPORTED, fingerprint("decode")
    )
    if recipe.cluster.ray is None or not recipe.cluster.gpus:  # else it computes on other devices
        recipe = settle_autocast(recipe, policy, writer)
    recipe = settle_stops(recipe, policy.tokenizer, writer.note if start is None else None)
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
        of_stage, taken = replace(writer, trackers=trackers), progress.step
        context = RunContext(recipe, of_stage, policy, start, labeller, taken)
        if not stage.unresolved:
            writer.callbacks.stage(stage.name, stage.stage, stage.steps, taken)
        failed = True
        try:
            progress = stage.train(context, progress)
            failed = False
        finally:
            of_stage.close_trackers(failed)
        done = progress.is_over(context.lasting.get(stage.name, stage.steps))
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
    if progress.step > stage.steps and not stage.unresolved:
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


# ---------------------------------------------------------------- later stages


def validate_later_stages(recipe: Recipe, policy: Policy, current: int) -> None:
    """Check the data, models and rewards of the stages after number `current`; of that stage too
    its optimizers, its engine, and whether its advantage and its rewards of steps fit.

    Raises KeelError as the stage itself would.
    """
    here = recipe.cluster.ray in (None, "local")
    for stage in recipe.stages[current:]:
        with _naming(stage):
            for optimizer in stage.optimizers if here else ():
                check_optimizer(optimizer)
        if stage.sampling is not None:
            rollout = stage.sampling.rollout
            with _naming(stage):
                check_rewards_of_steps(stage.sampling)
                check_engine(rollout, here, stage.steps)
                offered = placement_of(recipe.cluster).offers(capabilities_of(rollout.engine))
                check_requests(stage.sampling, engine=offered)
                if rollout.program is not None:
                    load_function(rollout.program, "program")
    chat = policy.tokenizer.chat_template is not None
    for stage in recipe.stages[current + 1 :]:
        tasks = [(source, False) for source in stage.trained_tasks]
        evaluation = None if stage.sampling is None else stage.sampling.evaluation
        if evaluation is not None:
            tasks += [(one.task, True) for one in evaluation.sets]
        for task, whole in tasks:
            # What a Python function returns may be expensive to make.
            if ":" not in task.name:
                with _naming(stage):
                    build_tasks((task,), recipe.seed, chat=chat, whole=whole)
        if stage.sampling is not None:
            with _naming(stage):
                check_evaluated(stage.sampling)
                if (teacher := stage.sampling.teacher) is not None:
                    longest = longest_sequence(stage.sampling, policy)
                    check_teachers(teacher, policy, recipe.model, longest)
                    served_teacher(teacher, policy)
        data, records = stage.preference_data, stage.records
        # The records of a Python function may be expensive to make.
        if data is not None and records is not None and data.name in KINDS:
            READERS[records](data, recipe.seed)
        for source in stored_sets(stage).values():
            read_sft(source, recipe.seed)
        base, kind = stage.base_model, stage.reward_model
        if base is not None and kind is not None and base.stage is None:
            config = policy.model.config
            if base.name is not None:
                with keys_of_base(f"{stage.name}.base"):
                    config = read_config(other_model(recipe, base.name))
            check_classifier(config, kind)


@contextmanager
def _naming(stage: Stage) -> Iterator[None]:
    """Errors name the stage."""
    try:
        yield
    except KeelError as error:
        raise KeelError(f"stage {stage.name!r}: {error}") from error
