"""Builds the parts of a stage from its recipe: prompts, rewards, models, optimizers, settings.

Loops and parts take what is built here; they do not read the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedModel
from transformers.utils import chat_template_utils

from keel.cluster.parts import PlacedReward
from keel.config.benchmarks import benchmarks
from keel.config.entry import load_function
from keel.config.evaluation import SampledEvaluation, SamplingSource
from keel.config.fields import derive, unknown
from keel.config.judging import JudgingStage
from keel.config.schema import Recipe
from keel.config.sources import Prompts, Rewards, RewardSource, Rollout, TaskSource
from keel.config.stage import StageConfig
from keel.data.mixture import PromptStream, build_tasks, stored, validation_prompts
from keel.engines.endpoint.programs import ProgramConfig
from keel.engines.registry import build_engine
from keel.learn.advantages import check_steps
from keel.learn.memory import TokenBudget, measure_on
from keel.models.chat import Encoder
from keel.models.lora import dropout_on
from keel.models.policy import Policy
from keel.models.reward import RewardModel
from keel.platform.calls import LoopThread
from keel.rewards.registry import MADE, NamedReward, RewardContext, load_reward, read_options
from keel.rewards.scorer import Scorer
from keel.runs.layout import RunFolder
from keel.runs.reader import read_run_json
from keel.runs.rows import LeftOut, counted, write_quarantine
from keel.runs.writer import RunWriter, update_run_json
from keel.training.rollout import Sampler
from keel.training.state import Progress
from keel.types import Engine, KeelError, Prompt, Task

S = TypeVar("S", bound=StageConfig)
ENCODED_BEFORE = 10_000
"""Stored examples of a stage that are encoded before the first step, to find the bad ones."""
TEMPLATE_TIME = "template_time"
"""The key of run.json."""
_CLOCK: Any = chat_template_utils
"""The module whose clock transformers renders with: it passes no functions to a template."""


class PairLabeller(Protocol):
    """Has people label pairs that a stage sampled (`sampled.people`)."""

    def check(self, folder: RunFolder) -> None:
        """Raise KeelError if labels that a stage of the run began with are missing."""

    def label(
        self,
        folder: RunFolder,
        stage: JudgingStage,
        *,
        model: RewardModel,
        encode: Callable[[Any], Any],
        limit: int | None,
        seed: int,
    ) -> str:
        """Write the train rows of a stage: its pool, with the labels of people for some pairs.

        People get the pairs of which `model` is least sure; none is longer than `limit` tokens as
        `encode` makes them. Returns a line on what was labelled. Raises KeelError while people have
        not labelled all that were chosen.
        """


@dataclass(frozen=True, eq=False)
class RunContext:
    """The recipe of a run, its writer, its policy, and the checkpoint to resume from."""

    recipe: Recipe
    writer: RunWriter
    policy: Policy
    resume_from: Path | None
    labeller: PairLabeller | None = None
    taken: int = 0
    """Steps that the stage has taken when it is set up."""
    lasting: dict[str, int] = field(default_factory=dict)
    """The steps of stages whose number follows from their data."""

    @property
    def folder(self) -> RunFolder:
        return self.writer.folder

    def resolved(self, stage: S, size: int | None, batch: int) -> S:
        """The stage with its number of steps, which takes `batch` of `size` examples at a time."""
        if not stage.unresolved:
            return stage
        stage = stage.lasting(size, batch)
        if self.taken > stage.steps:
            raise KeelError(
                f"{stage.name}.num_train_epochs is {stage.steps} steps, but the run has taken "
                f"{self.taken}: raise it"
            )
        self.lasting[stage.name] = stage.steps
        known = read_run_json(self.folder).get("steps", {})
        update_run_json(self.folder, {"steps": {**known, stage.name: stage.steps}})
        self.writer.callbacks.stage(stage.name, stage.stage, stage.steps, self.taken)
        return stage


@dataclass(frozen=True, eq=False)
class PromptSource:
    """A stage's tasks, and the stream of encoded prompts over them."""

    tasks: dict[str, Task]
    weights: list[float]
    encoder: Encoder
    stream: PromptStream

    def validation(self, n: int, left_out: list[str] | None = None) -> list[Prompt]:
        """The first prompts of the validation split; `left_out` takes the ids of those that are
        too long or cannot be encoded."""

        def prepare(prompt: Prompt) -> Prompt | None:
            encoded = self.encoder(prompt)
            if encoded is None and left_out is not None:
                left_out.append(prompt.id)
            return encoded

        return validation_prompts(list(self.tasks.values()), self.weights, n, prepare)

    def size(self) -> int | None:
        """The number of train prompts that are not left out; None if a task has no end."""
        sizes = {name: task.size("train") for name, task in self.tasks.items()}
        if None in sizes.values():
            return None
        prompts = (
            self.tasks[name].prompt("train", at) for name in sizes for at in range(sizes[name] or 0)
        )
        return sum(self.encoder.wrong(prompt) is None for prompt in prompts)


def open_prompts(
    run: RunContext,
    stage: str,
    sources: Sequence[TaskSource],
    prompts: Prompts,
    seed: int,
    *,
    max_tokens: int,
    key: str = "rollout.max_tokens",
    state: Mapping[str, Any] | None = None,
) -> PromptSource:
    """The prompts of tasks, encoded, without those that leave no room for `max_tokens` of answer.

    `key` is that of `max_tokens` in the recipe, `state` that of the stream to resume. Stored
    examples that give no prompt are in the run folder's quarantine when this returns.
    """
    chat = run.policy.tokenizer.chat_template is not None
    tasks = {task.name: task for task in build_tasks(sources, run.recipe.seed, chat=chat)}
    source = prompt_source(
        run.policy, tasks, sources, prompts, derive(seed, "prompts"),
        max_tokens=max_tokens, key=key, note=run.writer.note,
    )  # fmt: skip
    _quarantine_prompts(run, stage, tasks, source.encoder)
    if state:
        source.stream.restore(state)
    return source


def prompt_source(
    policy: Policy,
    tasks: dict[str, Task],
    sources: Sequence[TaskSource],
    prompts: Prompts,
    seed: int,
    *,
    max_tokens: int,
    key: str = "rollout.max_tokens",
    note: Callable[[str], None] | None = None,
) -> PromptSource:
    """The prompts of tasks, encoded for a policy; `key` is that of `max_tokens` in the recipe."""
    lenient = {name for name, s in zip(tasks, sources, strict=True) if s.bad_rows == "quarantine"}
    weights = [source.weight for source in sources]
    encoder = Encoder(
        policy.tokenizer,
        longest_prompt(prompts.max_tokens, policy.context, max_tokens, key),
        prompts.chat_template,
        forgiven=lenient,
        note=note,
        raw={name for name, source in zip(tasks, sources, strict=True) if source.raw},
        served=policy.served,
    )
    stream = PromptStream(list(tasks.values()), weights, seed, encoder)
    return PromptSource(tasks, weights, encoder, stream)


def _quarantine_prompts(
    run: RunContext, stage: str, tasks: Mapping[str, Task], encoder: Encoder
) -> None:
    """Write the stored examples that give no prompt to the quarantine, and note how many.

    Tasks are encoded for that in order, as long as they have at most `ENCODED_BEFORE` examples in
    total; examples of other tasks that cannot be encoded are found when they are reached.
    """
    left: list[LeftOut] = []
    room = ENCODED_BEFORE
    for name, task in tasks.items():
        data = stored(task)
        if data is None:
            continue
        left += data.left_out
        examples = data.size("train") + data.size("validation")
        if examples <= room:
            room -= examples
            left += data.refused(encoder.wrong, forgiven=name in encoder.forgiven)
            encoder.known.add(name)
    target = run.folder.quarantine / f"{stage}-prompts.jsonl"
    write_quarantine(target, left)
    if left and run.resume_from is None:
        run.writer.note(f"{stage}: rows left out: {counted(left)} (quarantine/{target.name})")


def dropout_of(recipe: Recipe, stage: StageConfig) -> Callable[[int], AbstractContextManager[None]]:
    """What the steps of a stage are taken in: the dropout of the adapter that learns, with random
    numbers that are a function of the recipe's seed, the stage and the step."""
    base = stage.base_model
    adapter = recipe.model.lora if base is None else base.lora
    if adapter is None or not adapter.dropout:
        return lambda number: nullcontext()
    return lambda number: dropout_on(derive(recipe.seed, stage.name, "dropout", number))


def token_budget(run: RunContext, stage: StageConfig, progress: Progress) -> TokenBudget:
    """The stage's token budget, or what has fitted into memory since.

    "auto" is found by a trial on CUDA, if one process trains: several would have to agree. What
    samples meanwhile takes memory, too, so there is none with `async_level`.
    """
    cluster = run.recipe.cluster
    tried = stage.token_budget == "auto" and cluster.processes == 1 and cluster.ray is None
    tried &= stage.sampling is None or stage.sampling.rollout.async_level == 0
    measure = measure_on(run.policy.device) if tried else None
    budget = TokenBudget(stage.initial_token_budget, run.writer.note, measure)
    if progress.token_budget is not None:
        budget.restore(progress.token_budget)
    return budget


def longest_prompt(
    wanted: int | None, context: int | None, max_tokens: int, key: str = "rollout.max_tokens"
) -> int | None:
    """The longest prompt with which an answer of `max_tokens` tokens still fits the context.

    `key` is that of `max_tokens` in the recipe.
    """
    if context is None:
        return wanted
    if context <= max_tokens:
        raise KeelError(
            f"{key} = {max_tokens} leaves no room for a prompt in the model's "
            f"context of {context} tokens: lower it",
            key=key if "." in key else "prompts.max_tokens",
        )
    if wanted is not None and wanted + max_tokens > context:
        raise KeelError(
            f"prompts.max_tokens = {wanted} and {key} = {max_tokens} are more than "
            f"the model's context of {context} tokens: lower one of them",
            key="prompts.max_tokens",
        )
    return context - max_tokens if wanted is None else wanted


def reward_context(
    recipe: Recipe | None, folder: RunFolder | None, policy: Policy
) -> RewardContext:
    """The parts of a run that rewards may use; without a folder they keep no files."""
    return context_of(recipe, folder, policy.tokenizer, str(policy.device))


def context_of(
    recipe: Recipe | None, folder: RunFolder | None, tokenizer: Any, device: str
) -> RewardContext:
    """The same where no policy is loaded."""
    stages = () if recipe is None else recipe.stages
    names = [stage.name for stage in stages if stage.reward_model is not None]
    return RewardContext(
        tokenizer=tokenizer,
        models={} if folder is None else {name: folder.model(name) for name in names},
        folder=None if folder is None else folder.rewards,
        device=device,
        seed=0 if recipe is None else recipe.seed,
        template_time=time_read_by(tokenizer.chat_template),
    )


def load_rewards(
    rewards: Rewards, around: RewardContext, remote: Mapping[int, PlacedReward] | None = None
) -> list[NamedReward]:
    """The reward functions, in order; those of some places may be `remote`."""
    elsewhere = remote or {}
    return [
        elsewhere[place].named() if place in elsewhere else load_reward(source, around)
        for place, source in enumerate(rewards.functions)
    ]


def build_scorer(
    sampling: SamplingSource,
    functions: Sequence[NamedReward],
    tasks: Mapping[str, Task],
    *,
    needed: bool = True,
    shaped: bool = False,
    loop: LoopThread | None = None,
) -> Scorer:
    """The scorer of what a stage samples; `needed`: it learns from rewards; `shaped`: with the
    penalties of length."""
    rewards, rollout = sampling.rewards, sampling.rollout
    return Scorer(
        functions,
        tasks,
        timeout=rewards.timeout,
        on_error=rewards.on_error,
        max_tokens=rollout.max_tokens,
        overlong_buffer=rollout.overlong_buffer if shaped else 0,
        length_penalty=rollout.length_penalty if shaped else 0.0,
        truncated_factor=rollout.truncated_factor if shaped else 1.0,
        needed=needed,
        loop=loop,
        stop=rollout.stop,
    )


def of_benchmark(
    sampling: SamplingSource, policy: Policy, max_tokens: int | None
) -> SamplingSource:
    """What a stage samples of a benchmark, if its task is one: with the benchmark's stop strings,
    prompts of any length and, unless `max_tokens` is given, its longest completion, at most half
    of the context."""
    (source,) = sampling.tasks
    entry = benchmarks().get(source.name)
    if entry is None:
        return sampling
    chat = policy.tokenizer.chat_template is not None and not source.raw
    limit = max_tokens or min(entry.max_tokens, (policy.context or 2 * entry.max_tokens) // 2)
    update = {"stop": () if chat else tuple(entry.stop), "max_tokens": limit}
    return replace(
        sampling,
        rollout=sampling.rollout.model_copy(update=update),
        prompts=sampling.prompts.model_copy(update={"max_tokens": None}),
    )


def benchmark_stops(tasks: Sequence[TaskSource], tokenizer: Any) -> tuple[str, ...]:
    """The stop strings of benchmarks, if all tasks are some whose prompts are texts with worked
    examples: a model goes on with a question and answer of its own, and the last answer counts."""
    entries = [
        benchmarks().get(source.name)
        for source in tasks
        if tokenizer.chat_template is None or source.raw
    ]
    stops = [one.stop for one in entries if one is not None]
    if len(stops) < len(tasks):
        return ()
    return tuple(dict.fromkeys(stop for one in stops for stop in one))


def with_stops(rollout: Rollout, tasks: Sequence[TaskSource], tokenizer: Any) -> Rollout:
    """The rollout with the stop strings of its benchmarks, unless it has its own."""
    found = () if rollout.stop else benchmark_stops(tasks, tokenizer)
    return rollout.model_copy(update={"stop": found}) if found else rollout


def settle_stops(
    recipe: Recipe, tokenizer: Any, note: Callable[[str], None] | None = None
) -> Recipe:
    """The recipe with the stop strings of the benchmarks that stages of rollouts learn from."""

    def settle(rollout: Rollout, tasks: Sequence[TaskSource]) -> Rollout:
        found = with_stops(rollout, tasks, tokenizer)
        if found is not rollout and note is not None:
            note(f"stop strings of {', '.join(one.name for one in tasks)}: {list(found.stop)}")
        return found

    stages = tuple(stage.with_rollout(settle) for stage in recipe.stages)
    return recipe.model_copy(update={"stages": stages})


def rollout_engine(
    policy: Policy,
    rollout: Rollout,
    *,
    model: PreTrainedModel | None = None,
    log: Path | None = None,
    note: Callable[[str], None] | None = None,
) -> Engine:
    """The engine of a recipe, with the weights of `model` in the recipe's `rollout.dtype`.

    Without `model`, with the policy's own weights in their own dtype. A server that it starts
    writes to `log`, and `note` gets a line for each restart of it.
    """
    return build_engine(
        rollout,
        model=policy.model if model is None else model,
        tokenizer=policy.tokenizer,
        autocast=policy.autocast,
        dtype="model" if model is None else rollout.dtype,
        log=log,
        note=note,
    )


def build_sampler(
    engine: Engine,
    source: PromptSource,
    scorer: Scorer,
    rollout: Rollout,
    seed: int,
    *,
    less: str = "",
    step: int = 0,
) -> Sampler:
    """What samples completions by an engine, whose count of syncs begins at `step`, the steps that
    the stage has taken."""
    engine.weight_version = step
    program = None
    if rollout.program is not None:
        program = ProgramConfig(
            name=rollout.program,
            function=load_function(rollout.program, "program"),
            limit=rollout.max_programs,
            timeout=rollout.timeout,
            skips=rollout.on_error == "skip",
        )
    return Sampler(
        engine=engine,
        chat=source.encoder.chat,
        tasks=source.tasks,
        stream=engine.prompts_of(source.stream),
        scorer=scorer,
        config=rollout,
        seed=seed,
        less=less,
        program=program,
    )


# ---------------------------------------------------------------- what goes together


def longest_sequence(sampling: SamplingSource, policy: Policy) -> int | None:
    """The most tokens that a prompt and its completion may have; None if there is no limit."""
    prompt, answer = sampling.prompts.max_tokens, sampling.rollout.max_tokens
    return policy.context if prompt is None else prompt + answer


def check_taught(sampling: SamplingSource, names: Collection[str]) -> None:
    """Raise KeelError for a teacher of a task that is none of these."""
    for at, name in enumerate(() if sampling.teacher is None else sampling.teacher.tasks):
        if name not in names:
            key = f"teacher.by_task.{at}.task"
            raise KeelError(f"{key} = {name!r}: {unknown('task', name, names)}", key=key)


def check_rewards(sampling: SamplingSource) -> list[str]:
    """The names of a stage's rewards, without loading a model or calling a server.

    Raises KeelError as the stage would: for an unknown option, a duplicate name, or weights that
    are all 0 if the stage learns from rewards.
    """
    named = [replace(_named(source), function=None) for source in sampling.rewards.functions]
    with closing(Scorer(named, needed=sampling.needs_reward)) as scorer:
        return [one.name for one in scorer.functions]


def check_evaluated(sampling: SamplingSource) -> None:
    """The rewards of a stage, and which of them decides its evaluation. Raises KeelError."""
    names = check_rewards(sampling)
    if sampling.evaluation is not None and sampling.evaluation.prompts:
        check_component(sampling.evaluation, names)


def check_rewards_of_steps(sampling: SamplingSource) -> None:
    """Raise KeelError if the rewards are known to be of steps and the advantage cannot use them,
    or the reverse. User functions show it when they are called."""
    if sampling.algorithm is None:
        return
    learned = [source for source in sampling.rewards.functions if source.weight]
    there = [_of_steps(source) for source in learned]
    if True in there:
        check_steps(sampling.algorithm, True)
    elif None not in there:
        check_steps(sampling.algorithm, False)


def _of_steps(source: RewardSource) -> bool | None:
    """Whether a reward is of steps; None for a user's function."""
    if ":" in source.function:
        return None
    aggregate = source.options.get("aggregate", "steps")
    return source.function == "step_match" or (source.function, aggregate) == ("process", "steps")


def check_component(choice: SampledEvaluation, names: list[str]) -> None:
    """Raise KeelError if the reward that decides an evaluation is none of the stage's."""
    if choice.component is not None and choice.component not in names:
        guess = unknown("reward", choice.component, names)
        raise KeelError(f"evaluation.component: {guess}")


def _named(source: RewardSource) -> NamedReward:
    """A reward by name and weight; of one that needs a model or a server only the options are
    checked."""
    if source.function not in MADE:
        return load_reward(source)
    read_options(source)
    return NamedReward(source.name or source.function, source)


# ---------------------------------------------------------------- the time of templates


@contextmanager
def templates_at(
    time: str | None = None, run: RunFolder | None = None, *, record: bool = False
) -> Iterator[None]:
    """Chat templates that are rendered in the block are given this time (ISO 8601), or the one of a
    run, which with `record` begins when a template first asks for it; else the present one."""
    before = _CLOCK.datetime

    def now() -> datetime:
        nonlocal time
        if time is None and run is not None:
            time = read_run_json(run).get(TEMPLATE_TIME)
            if time is None and record:
                time = before.now().isoformat(timespec="seconds")
                update_run_json(run, {TEMPLATE_TIME: time})
        found: datetime = before.now() if time is None else datetime.fromisoformat(time)
        return found

    _CLOCK.datetime = SimpleNamespace(now=now)
    try:
        yield
    finally:
        _CLOCK.datetime = before


def time_read_by(template: Any) -> str | None:
    """The time that a chat template is given now; None for one that does not ask for it."""
    return _CLOCK.datetime.now().isoformat() if "strftime_now" in str(template) else None
