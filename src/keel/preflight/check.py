"""`keel check`: loads everything that a recipe names, samples and scores one batch, trains nothing.

It reports, stage by stage, what would go wrong, with the evidence and the key to change. What
depends on earlier training cannot be inspected, which is reported too. No run folder is written,
and no judge is paid: its price is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from keel.analysis.alerts import check_alerts
from keel.analysis.cards import card, card_named
from keel.analysis.costs import Budget
from keel.config.fields import derive
from keel.config.load import Source, load_recipe
from keel.config.schema import Recipe
from keel.engines.compiled import is_llama_like
from keel.learn.advantages import check_entries
from keel.learn.memory import keeping_threads
from keel.learn.optimizer import trainable
from keel.learn.teacher_server import served_teacher
from keel.models.chat import ChatEncoder
from keel.models.kernels import fingerprint
from keel.models.policy import (
    Policy,
    load_policy,
    needs_resolution,
    resolve_autocast,
    time_products,
)
from keel.models.reference import load_critic, load_teachers
from keel.models.shape import model_config, without_weights
from keel.platform.signals import free_memory
from keel.preflight import settings
from keel.preflight.budget import of_budget, plan_of
from keel.preflight.context import (
    Figure,
    Finding,
    SamplingPlan,
    StageContext,
    StageStops,
    found,
    percent,
)
from keel.preflight.judge_cost import dollars, over_budget
from keel.preflight.settings import Facts, unused_keys
from keel.preflight.stages import (
    inspect_demonstrations,
    inspect_imitation,
    inspect_preference_data,
    inspect_sampling_stage,
)
from keel.preflight.trial import TrialProcess, TrialResult, trial_recipe
from keel.runs.trackers import check_trackers
from keel.training.leaks import leaks
from keel.training.setup import longest_sequence, settle_stops
from keel.types import KeelError

FROZEN_SHARE = 0.5
"""More than half of the weights not moving is more than rounding: in float32 at the same rate it
is a few in a thousand."""
WEIGHTS_READ = 4_000_000
"""Weights that are read, of each tensor, to see how many a step would move."""


@dataclass(frozen=True)
class StageReport:
    """A stage's figures, what of it could not be inspected (`skipped_checks`), and what it takes.

    `measured` is of two steps at its longest sequences: `memory`, the seconds of a `step` by phase,
    and those of all its steps (`seconds`), with their `cost`. `judge` is the forecast of its judges
    in dollars. `budget` is the counted memory of a card (`keel.analysis.costs.Budget`).
    """

    name: str
    kind: str
    figures: dict[str, Figure]
    skipped_checks: tuple[str, ...] = ()
    measured: dict[str, Any] = field(default_factory=dict)
    judge: dict[str, float] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The result of a check, which took `seconds`; `total` has the seconds and the cost of all
    stages together."""

    recipe: str
    stages: tuple[StageReport, ...]
    findings: tuple[Finding, ...]
    seconds: float
    total: dict[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        found = [f"\n  {one.severity}: {one.what}" for one in self.findings]
        return f"Report({self.recipe!r}, {len(found)} findings)" + "".join(found)

    def as_dict(self) -> dict[str, Any]:
        """The report in JSON types."""
        return asdict(self)


def check(
    source: Source,
    overrides: Sequence[str] = (),
    price: float | None = None,
    *,
    runs: bool = True,
    process: TrialProcess | None = None,
) -> Report:
    """Inspect a recipe: a TOML file, a shipped name or a mapping, with `key=value` overrides.

    `price` is of an hour of this machine. The recipe itself runs for two steps in a separate
    process, which may have been started before (`process`); not without `runs`.
    Raises KeelError if the recipe cannot be read or its model not be loaded; whatever else would
    stop a stage is a finding.
    """
    start = time.perf_counter()
    written = load_recipe(source, overrides)
    missing = _missing(written)
    recipe = _on_cpu(written) if missing.startswith("model.device") else written
    with keeping_threads(recipe.threads):
        policy = load_policy(recipe.model, recipe.seed)
        settled, figures = _settled(recipe, policy)
        contexts = [
            StageContext(settled, stage, policy, figures=dict(figures)) for stage in settled.stages
        ]
        with suppress(StageStops), contexts[0].stops("before its first step", "alerts"):
            check_alerts(recipe.alerts)
        for context in contexts:
            _inspect(context)
        budgets = _budgets(settled, policy, contexts)
        of_keys = unused_keys(source, overrides, written, _facts(written, policy, contexts))
        of_model = list(check_model(recipe, policy))
        device = policy.device
    for context in contexts:
        del context.policy  # the trial loads its own, in the same memory
        if missing:
            context.skipped_checks.append(f"memory and time: not run, since {missing}")
    del policy
    measured: list[dict[str, Any]] = [{} for _ in contexts]
    if runs and not missing:
        measured = measure(contexts, device, process)
    if price is not None:
        for own in filter(None, measured):
            own["cost"] = round(own["seconds"] / 3600 * price, 4)
    findings = [
        *of_keys,
        *of_model,
        *_leaks(recipe),
        *(
            one
            for context, own in zip(contexts, measured, strict=True)
            for one in settings.of_stop_rules(context, bool(own))
        ),
        *over_budget([forecast for context in contexts for forecast in context.forecasts]),
        *(one for context in contexts for one in context.findings),
    ]
    findings = sorted(dict.fromkeys(findings), key=lambda one: one.severity != "error")
    stages = tuple(
        StageReport(
            c.stage.name,
            c.stage.stage,
            c.figures,
            tuple(c.skipped_checks),
            own,
            dollars(c.forecasts),
            budget,
        )
        for c, own, budget in zip(contexts, measured, budgets, strict=True)
    )
    seconds = round(time.perf_counter() - start, 3)
    return Report(recipe.name, stages, tuple(findings), seconds, _total(stages))


def check_card(source: Source, overrides: Sequence[str], device: str) -> Report:
    """Count what a recipe takes on a card, named or by its size, that need not be here.

    Of the model only its config is read. Raises KeelError as `check` does, and for another card.
    """
    start = time.perf_counter()
    wanted, recipe = card(device), load_recipe(source, overrides)
    model = without_weights(model_config(recipe.model), recipe.model.trust_remote_code)
    stages, findings = [], []
    left_out = ("all but memory, which is counted: without --device the recipe is loaded and run",)
    for stage in recipe.stages:
        budget = Budget(plan_of(recipe, stage, model, wanted.memory), wanted)
        findings += list(of_budget(budget, recipe, stage))
        own = budget.as_dict()
        stages.append(StageReport(stage.name, stage.stage, {}, left_out, budget=own))
    seconds = round(time.perf_counter() - start, 3)
    return Report(recipe.name, tuple(stages), tuple(findings), seconds, _total(stages))


def _budgets(
    recipe: Recipe, policy: Policy, contexts: Sequence[StageContext]
) -> list[dict[str, Any]]:
    """The counted memory of each stage on the GPU that the policy is on; empty on a CPU."""
    if policy.device.type != "cuda":
        return [{} for _ in contexts]
    seen = torch.cuda.get_device_properties(policy.device)
    here = card_named(seen.name, seen.total_memory)
    # Adapters in place, and weights in 4 bits, are counted from the recipe.
    model = without_weights(policy.model.config, recipe.model.trust_remote_code)
    budgets: list[dict[str, Any]] = []
    for context in contexts:
        example = None if context.longest is None else context.longest.tokens
        try:
            plan = plan_of(recipe, context.stage, model, here.memory, example, context.shown)
        except KeelError:  # a model that does not load, which is a finding already
            budgets.append({})
            continue
        budget = Budget(plan, here)
        budgets.append(budget.as_dict())
        context.add(*of_budget(budget, recipe, context.stage))
    return budgets


def _missing(recipe: Recipe) -> str:
    """What the recipe needs to run that this process does not have; empty if nothing."""
    cluster = recipe.cluster
    if cluster.ray is not None:
        return f'cluster.ray = "{cluster.ray}": this is one process'
    if cluster.processes > 1:
        return f"cluster.processes = {cluster.processes}: set it to 1 to run it as one process"
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(recipe.model.device, True):
        return f'model.device = "{recipe.model.device}", and torch sees no GPU here'
    return ""


def _on_cpu(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cpu"})})


def _total(stages: Sequence[StageReport]) -> dict[str, float]:
    """Seconds and cost of all stages together, those of judges included."""
    seconds = sum(stage.measured.get("seconds", 0.0) for stage in stages)
    costs = [stage.measured["cost"] for stage in stages if "cost" in stage.measured]
    costs += [stage.judge["estimate"] for stage in stages if stage.judge]
    return {"seconds": round(seconds, 1), **({"cost": round(sum(costs), 4)} if costs else {})}


def _settled(recipe: Recipe, policy: Policy) -> tuple[Recipe, dict[str, Figure]]:
    """The recipe with what `model.autocast = "auto"` stands for here, and the figure of it;
    and that of a base in 4 bits. And with the stop strings of benchmarks."""
    figures: dict[str, Figure] = {}
    recipe = settle_stops(recipe, policy.tokenizer)
    if policy.quantisation is not None:
        figures["quantisation"] = str(policy.quantisation)
    if not needs_resolution(recipe.model, policy):
        return recipe, figures
    times = time_products(policy.model)
    model = resolve_autocast(recipe.model, policy, times.bfloat16_pays)
    chosen = "bfloat16" if times.bfloat16_pays else "float32"
    figures["autocast"] = f"{chosen}, since {times}"
    return recipe.model_copy(update={"model": model}), figures


def _inspect(context: StageContext) -> None:
    """One stage by itself."""
    stage = context.stage
    unknown = f"of {stage.num_train_epochs:g} epochs" if stage.unresolved else stage.steps
    context.figures["steps"] = unknown
    _check_settings(context)
    with suppress(StageStops), context.stops("before its first step", f"{context.prefix}trackers"):
        check_trackers(stage.trackers)
    parts: tuple[tuple[Any, Callable[[StageContext, Any], None]], ...] = (
        (stage.demonstrated, inspect_demonstrations),
        (stage.imitated, inspect_imitation),
        (stage.judged, inspect_preference_data),
        (context.plan, _check_objective),
        (context.plan, inspect_sampling_stage),
    )
    for part, inspect in parts:
        if part is not None:
            with suppress(StageStops):
                inspect(context, part)
    # The number of steps may follow from the data.
    optimizers = {"optimizer": stage.optimizer, "value.optimizer": stage.value_model[1]}
    for key, optimizer in optimizers.items():
        if optimizer is not None:
            key = f"{context.prefix}{key}"
            context.add(*settings.of_optimizer(optimizer, context.stage.steps, key))
    if stage.prompts_in_step is not None and context.prompts and context.prompts.rows:
        prompts = context.stage.steps * stage.prompts_in_step
        context.figures["epochs"] = round(prompts / context.prompts.rows, 2)


def _check_settings(context: StageContext) -> None:
    """Findings from the stage's values alone."""
    stage, model, key = context.stage, context.recipe.model, f"{context.prefix}optimizer"
    if stage.trains_policy:
        context.add(*settings.of_adapter(model, stage.optimizer, key))
    plan = context.plan
    if plan is not None:
        context.add(*settings.of_rewards(plan.sampling.rewards, f"{plan.key}rewards"))


def _check_objective(context: StageContext, plan: SamplingPlan) -> None:
    """The loop of a stage, and the other models and functions that its objective names."""
    recipe, stage, prefix, sampling = context.recipe, context.stage, context.prefix, plan.sampling
    algorithm = sampling.algorithm
    if algorithm is None:
        return
    context.add(*settings.of_objective(sampling, recipe.model, prefix))
    name, _ = stage.value_model
    with suppress(StageStops), context.stops("as its objective is made", f"{prefix}algorithm"):
        check_entries(algorithm)
    if name is not None:
        with context.stops("as its value model is made", f"{prefix}value.name"):
            seed = derive(recipe.seed, stage.name)
            load_critic(name, context.policy, recipe.model, seed)
    if sampling.teacher is not None and sampling.teacher.name is not None:
        with context.stops("as its teacher is made", f"{prefix}teacher.name"):
            longest = longest_sequence(sampling, context.policy)
            if served_teacher(sampling.teacher, context.policy) is None:
                load_teachers(sampling.teacher, context.policy, recipe.model, longest)


def check_model(recipe: Recipe, policy: Policy) -> Iterator[Finding]:
    """Findings of the model and its tokenizer."""
    tokenizer = policy.tokenizer
    named = getattr(getattr(policy.model, "generation_config", None), "eos_token_id", None)
    ids = () if named is None else (named,) if isinstance(named, int) else tuple(named)
    own = tokenizer.eos_token_id
    # Keel stops at either; a server of the saved model at those of its generation config alone.
    if ids and own not in (None, *ids) and ChatEncoder(tokenizer).closing[1] not in ids:
        facts = {"spelled": str(tokenizer.eos_token), "own": own}
        yield found("eos-differs", "model.name", stops=", ".join(map(str, ids)), **facts)
    if is_llama_like(policy.model.base_model) and fingerprint("decode") == "none":
        yield found("no-compiler", "CC")
    trained = next((stage for stage in recipe.stages if stage.trains_policy), None)
    if recipe.model.dtype == "bfloat16" and trained is not None:
        rate = trained.optimizer.learning_rate
        share = unmoved_share(policy, rate)
        if share > FROZEN_SHARE:
            key = f"{trained.name}.optimizer.learning_rate"
            facts = {"rate": rate, "share": percent(share), "rate_key": key}
            yield found("frozen-weights", "model.dtype", **facts)


@torch.no_grad()
def unmoved_share(policy: Policy, rate: float) -> float:
    """The share of trained bfloat16 weights of which a step of `rate` is less than half of the last
    bit: |w| in [2^e, 2^(e+1)) has a last bit of 2^(e−7)."""
    unmoved = count = 0
    for _, parameter in trainable(policy):
        if parameter.dtype != torch.bfloat16:
            continue
        some = parameter.detach().flatten()[:WEIGHTS_READ].float().abs()
        last = torch.exp2(torch.floor(torch.log2(some.clamp_min(1e-30))) - 7)
        unmoved += int((last / 2 > rate).sum())
        count += some.numel()
    return unmoved / count if count else 0.0


def _leaks(recipe: Recipe) -> Iterator[Finding]:
    """A finding for each two stages of which one evaluates on what the other learns from: any
    validation prompt is one too many."""
    for leak in {(leak.trained, leak.stage): leak for leak in leaks(recipe)}.values():
        same, kind = leak.trained == leak.stage, "task" if "tasks" in leak.table else "set"
        key = f"{leak.table}.{'validation_fraction' if same else 'validation_path'}"
        fix = f"give both stages the same files, or the validation_path of {leak.stage!r}"
        if same:
            fix = (
                "give both the same validation_fraction, or the same validation_path, or leave "
                "these rows out of one of them"
            )
        yield found(
            "trained-on-validation", f"{leak.trained}.{key}" if len(recipe.stages) > 1 else key,
            trained=leak.trained, evaluated="it" if same else repr(leak.stage),
            shared=leak.shared, held=leak.held, fix=fix,
            place=f"of another {kind} of it" if same else "there",
        )  # fmt: skip


def _facts(recipe: Recipe, policy: Policy, contexts: Sequence[StageContext]) -> Facts:
    """What the loaded parts add to the recipe."""
    prompts = {c.stage.name: c.prompts for c in contexts if c.prompts is not None}
    stored = any(stage.preference_data is not None for stage in recipe.stages)
    known = len(prompts) == len(contexts) and not stored
    conversations = any(stats.conversations for stats in prompts.values())
    name = recipe.model.name
    return Facts(
        cpu=policy.device.type == "cpu" and recipe.model.device in ("auto", "cpu"),
        local=name is not None and Path(name).expanduser().is_dir(),
        kv_heads=hasattr(policy.model.config, "num_key_value_heads"),
        template=policy.tokenizer.chat_template is not None,
        conversations=True if conversations else False if known else None,
        unread={c.stage.name: c.unread for c in contexts},
        replies={name: stats.replies for name, stats in prompts.items()},
    )


# ---------------------------------------------------------------- the trial


def measure(
    contexts: Sequence[StageContext], device: torch.device, process: TrialProcess | None = None
) -> list[dict[str, Any]]:
    """What a trial of each stage took, in JSON types; empty if it was not run.

    A lack of memory is added to the stage's findings. `process` may have been started before.
    """
    examples = {c.stage.name: c.longest for c in contexts if c.longest is not None}
    prompts = {c.stage.name: c.step_prompts for c in contexts if c.step_prompts is not None}
    with process or TrialProcess() as process:
        recipe = trial_recipe(contexts[0].recipe, examples, prompts, process.folder)
        if recipe is None:
            return [{} for _ in contexts]
        room = available_memory(device)
        # The limit is of the machine's memory, in which CUDA reserves more than a GPU has.
        limit = room if device.type == "cpu" else None
        result = process.run(recipe, examples, str(device), limit)
    return [_measured(context, result, str(device), room) for context in contexts]


def available_memory(device: torch.device) -> int | None:
    """Bytes that a run could take in this process's place; None if the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return free_memory()


def _measured(
    context: StageContext, result: TrialResult, device: str, room: int | None
) -> dict[str, Any]:
    """What the trial of a stage took; findings and what was left out go into its context."""
    stage, own = context.stage, result.stages.get(context.stage.name)
    key, free = f"{context.prefix}token_budget", f", and {(room or 0) / 2**30:.2f} GiB are free"
    if result.full and stage.name == (result.stopped or context.recipe.stages[0].name):
        need = "more than there is" + ("" if room is None else free)
        evidence = f"a step stopped in the phase {result.phase!r}: {result.why}"
        context.add(found("out-of-memory", key, need=need, evidence=evidence))
    if own is None:
        if context.longest is not None:
            why = " ran out of memory" if result.full else f": {result.why}"
            stopped = result.stopped or "its process"
            context.skipped_checks.append(f"memory and time: {stopped!r}{why}")
        return {}
    if room is not None and own["peak"] > room:
        need, evidence = f"{own['peak'] / 2**30:.2f} GiB{free}", f"in the phase {own['phase']!r}"
        context.add(found("out-of-memory", key, need=need, evidence=evidence))
    context.metrics |= {name for name in own["metrics"] if not name.startswith("rewards/trial/")}
    step = own["seconds"] | ({"rewards": context.scoring} if context.scoring else {})
    share = 1.0
    if stage.prompts_in_step and context.step_prompts is not None:
        share = stage.prompts_in_step / context.step_prompts
    seconds = {phase: round(share * time, 3) for phase, time in step.items()}
    memory = {name: own[name] for name in ("peak", "phase", "phases")}
    return {
        "memory": {"device": device, **memory, "room": room},
        "step": seconds,
        "seconds": round(max(stage.steps, 1) * sum(seconds.values()), 1),
    }
