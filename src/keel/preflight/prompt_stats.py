"""The prompts of a stage, as its first step would see them, and how long they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from keel.config.sampling import Rollout, SamplingSource
from keel.config.schema import Recipe, SFTStage
from keel.config.seeds import derive
from keel.config.sources import Prompts, Rewards, TaskSource
from keel.config.stage import StageConfig
from keel.data.tasks import PromptStream, build_tasks, heldout, stored
from keel.data.tasks.base import BaseTask, position
from keel.data.tasks.build import Renamed
from keel.data.tasks.user import UserTask
from keel.models.chat import Encoder
from keel.models.policy import Policy
from keel.runs.quarantine import LeftOut
from keel.training.setup import longest_prompt, raw_tasks
from keel.types import Content, KeelError, Prompt, Task

STORED, DRAWN = 1_000, 128
"""Prompts whose length is measured: of a task with rows, and of one without end. A share of 5 %
is then known to within 1.4 % (95 %); reasoning-gym draws take milliseconds each."""


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """What a stage samples, with its seeds.

    `key` begins the names of its keys in the recipe, with a dot where it is not empty; `seed` is
    that of the stage's prompts, `first_seed` that of the first step's rollouts.
    """

    stage: str
    key: str
    sampling: SamplingSource
    seed: int
    first_seed: int

    @property
    def rollout(self) -> Rollout:
        return self.sampling.rollout

    @property
    def rewards(self) -> Rewards:
        return self.sampling.rewards

    def setting(self, name: str) -> str:
        """The key of a setting of the rollouts."""
        prefix = self.key.removesuffix(self.sampling.key)
        return f"{prefix}{self.sampling.setting(name)}"


def sampling_plan(recipe: Recipe, stage: StageConfig) -> SamplingPlan | None:
    """What a stage samples; None where it samples nothing."""
    sampling = stage.sampling
    if sampling is None:
        return None
    prefix = f"{stage.name}." if len(recipe.stages) > 1 else ""
    seed = derive(recipe.seed, stage.name, *sampling.seed_name)
    first = derive(seed, *sampling.first_draw)
    return SamplingPlan(stage.name, f"{prefix}{sampling.key}", sampling, seed, first)


@dataclass(frozen=True, slots=True)
class LongestPrompt:
    """An encoded prompt; `raw` where it goes without the chat template. `other` is a prompt with
    another content, where one is known."""

    prompt: Prompt
    raw: bool
    other: Prompt | None = None


@dataclass(frozen=True, eq=False)
class PromptStats:
    """A stage's tasks and prompts.

    `lengths` are in tokens, by task; `limit` is the longest allowed; `first` are the first step's
    prompts, encoded (none where `stopped` says why); `rows` counts the train rows, None where a
    task has no end; `repeated` how many of them say what a row before says, `stored` counts the
    rows of both sides. `heldout` and `learned` are the places of held-out prompts and of train rows
    (`data.tasks.base.position`), `heldout_tokens` the lengths of the former.
    """

    tasks: Mapping[str, Task]
    limit: int | None
    lengths: Mapping[str, tuple[int, ...]]
    first: tuple[Prompt, ...]
    rows: int | None
    repeated: int = 0
    left_out: tuple[LeftOut, ...] = ()
    stopped: str | None = None
    stored: int = 0
    heldout: frozenset[float] = field(default_factory=frozenset)
    learned: frozenset[float] = field(default_factory=frozenset)
    heldout_tokens: tuple[int, ...] = ()
    longest: LongestPrompt | None = None
    """Of those within the limit."""
    differs: str | None = None
    """How a prompt reads that tokenizer.json and AutoTokenizer read differently."""
    read: str = ""
    """How plain prompts are read, in words."""

    @property
    def over(self) -> Mapping[str, int]:
        """By task, how many of the lengths are over the limit."""
        if self.limit is None:
            return dict.fromkeys(self.lengths, 0)
        return {name: sum(n > self.limit for n in ns) for name, ns in self.lengths.items()}

    @property
    def conversations(self) -> bool:
        return any(not isinstance(prompt.content, str) for prompt in self.first)

    @property
    def replies(self) -> bool:
        """Whether any task can answer the policy."""
        return any(_replies(task) for task in self.tasks.values())


def prompted(
    sources: Sequence[TaskSource],
    choice: Prompts,
    policy: Policy,
    recipe_seed: int,
    stage_seed: int,
    *,
    room: int,
    take: int,
    held: int,
) -> PromptStats:
    """The prompts of a stage; `room` is for the answer, `take` how many the first step has, `held`
    how many are held out. Raises KeelError where a task cannot be made or nothing fits at all."""
    tasks = {task.name: task for task in build_tasks(sources, recipe_seed)}
    weights = [source.weight for source in sources]
    limit = longest_prompt(choice.max_tokens, policy.context, room)
    lenient = {n for n, s in zip(tasks, sources, strict=True) if s.bad_rows == "quarantine"}
    raw = raw_tasks(tasks, sources)
    encoder, free = (
        Encoder(
            policy.tokenizer, tokens, choice.chat_template, forgiven=lenient, raw=raw,
            served=policy.served,
        )
        for tokens in (limit, None)
    )  # fmt: skip
    stopped: str | None = None
    lengths: dict[str, tuple[int, ...]] = dict.fromkeys(tasks, ())
    first: list[Prompt] = []
    away: list[Prompt] = []
    longest: LongestPrompt | None = None
    try:
        for name, task in tasks.items():
            encoded = _encoded(task, free)
            lengths[name] = tuple(len(prompt.tokens) for prompt in encoded)
            within = [p for p in encoded if limit is None or len(p.tokens) <= limit]
            own = max(within, key=lambda p: len(p.tokens), default=None)
            before = 0 if longest is None else len(longest.prompt.tokens)
            if own is not None and len(own.tokens) > before:
                longest = LongestPrompt(own, name in raw)
        stream = PromptStream(list(tasks.values()), weights, derive(stage_seed, "prompts"), encoder)
        drawn = stream.take(take)
        _of_their_tasks(drawn, tasks)
        first = drawn
        away = heldout(list(tasks.values()), weights, held, encoder) if held else []
    except KeelError as error:
        stopped = str(error)
    if longest is not None:
        content = longest.prompt.content
        other = next((p for p in (*away, *first) if p.content != content), None)
        longest = replace(longest, other=other)
    kept = [data for task in tasks.values() if (data := stored(task)) is not None]
    places = [position(entry.body) for data in kept for entry in data.sides["train"].entries]
    sizes = [task.size("train") for task in tasks.values()]
    return PromptStats(
        tasks=tasks,
        limit=limit,
        lengths=lengths,
        first=tuple(first),
        rows=None if None in sizes else sum(n for n in sizes if n is not None),
        repeated=sum(n - 1 for n in Counter(places).values()),
        left_out=tuple(row for data in kept for row in data.left_out),
        stopped=stopped,
        stored=sum(len(side.entries) for data in kept for side in data.sides.values()),
        heldout=frozenset(_body(prompt, sources, tasks) for prompt in away),
        learned=frozenset(places),
        heldout_tokens=tuple(len(prompt.tokens) for prompt in away),
        longest=longest,
        differs=free.differs or encoder.differs,
        read=how_read(policy.tokenizer, any(source.raw for source in sources)),
    )


def plain_content(content: Content) -> Any:
    """A prompt's content as JSON has it."""
    return content if isinstance(content, str) else [dict(turn) for turn in content]


def how_read(tokenizer: Any, raw: bool) -> str:
    """How plain prompts are read: through the chat template, or as they stand."""
    if not getattr(tokenizer, "chat_template", None):
        return "as they stand: the tokenizer has no chat template"
    return "as they stand (raw = true)" if raw else "as the user's turn of the chat template"


def places_of(task: Task) -> list[int]:
    """Train prompts of a task that are looked at: all, or so many, evenly spread."""
    size = task.size("train")
    if size is None:
        return list(range(DRAWN))
    step = max(size / STORED, 1.0)
    return [int(at * step) for at in range(min(size, STORED))]


def _of_their_tasks(prompts: Sequence[Prompt], tasks: Mapping[str, Task]) -> None:
    for prompt in prompts:
        if prompt.task not in tasks:
            raise KeelError(
                f"prompt {prompt.id!r} says that it is of task {prompt.task!r}: give the Prompt "
                f"its task's name ({', '.join(map(repr, tasks))}), by which its answers are judged"
            )


def _encoded(task: Task, encoder: Encoder) -> list[Prompt]:
    """The train prompts that are looked at."""
    encoded = (encoder(task.prompt("train", at)) for at in places_of(task))
    return [prompt for prompt in encoded if prompt is not None]


def _body(prompt: Prompt, sources: Sequence[TaskSource], tasks: Mapping[str, Task]) -> float:
    """Where the prompt without its system message lies: what stored rows are told apart by."""
    content = prompt.content
    if isinstance(content, str):
        return position(content)
    turns = list(content)
    if any(source.system for source in sources) and turns[0]["role"] == "system":
        turns = turns[1:]
    data = stored(tasks[prompt.task])
    plain = data is None or isinstance(data.sides["heldout"].entries[0].body, str)
    if len(turns) == 1 and (plain or any(source.system is not None for source in sources)):
        return position(turns[0]["content"])
    return position(turns)


def _replies(task: Task) -> bool:
    while isinstance(task, Renamed):
        task = task.task
    if isinstance(task, UserTask):
        inner = task.inner
        reply: Any = getattr(type(inner), "reply", None)
        return reply is not None and reply is not BaseTask.reply
    return type(task).reply is not BaseTask.reply


def first_of(recipe: Recipe, stage: SFTStage, policy: Policy) -> PromptStats:
    """The prompts of a stage that imitates."""
    return prompted(
        stage.tasks,
        stage.prompts,
        policy,
        recipe.seed,
        derive(recipe.seed, stage.name),
        room=1,
        take=stage.batch_size,
        held=0,
    )
