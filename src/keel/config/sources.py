"""What a stage reads and samples: tasks, rewards, preference data, rollouts, evaluation."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from keel.algorithms.spec import Algorithm
from keel.algorithms.terms import (
    AsTuple,
    Coefficient,
    FrozenModel,
    KeyUse,
    OldLogProbs,
    Positive,
    Unit,
    UnusedIf,
)
from keel.config.fields import (
    SEPARATE_VALIDATION,
    Answers,
    BadRows,
    Count,
    Ids,
    Index,
    Real,
    Seconds,
    Temperature,
    Tokens,
    Words,
)
from keel.config.layers import DEFAULT_PRESET, GROUP_SIZE, PROMPTS_PER_STEP
from keel.config.model import NO_CONVERSATION, SAME_DTYPE
from keel.config.secrets import wrong_key_name

LEARNED = ("outcome", "process")
"""Rewards that are models in memory."""


def _option_unread(key: KeyUse) -> bool:
    """Whether the options of a built-in reward leave one of them without effect."""
    leaf, options = key.leaf, key.value
    if key.table.function in LEARNED:
        return leaf in ("timeout", "memory_mb") and not options.get("process")
    if key.table.function != "judge":
        return False
    if options.get("mode", "rubric") == "rubric":
        return leaf in ("against", "rivals", "both_orders")
    fixed = options.get("against", "group") != "group"
    return leaf in ("low", "high") or (leaf == "rivals" and fixed)


# A run's `keel eval` evaluates as its last stage says, even if training does not evaluate.
NEVER_EVALUATED = UnusedIf(
    lambda key: key.stage.evaluation.prompts == 0 and key.stage is not key.recipe.stages[-1],
    "evaluation.prompts = 0 disables evaluation",
)
_UNREAD_KEYWORD = UnusedIf(
    lambda key: key.leaf in key.facts.unread.get(key.stage.name, ()),
    "the chat template gives the same text without it",
)
_GENERATED = UnusedIf(
    lambda key: key.facts.generates(key.table.name), 'prompts of "{key.table.name}" are generated'
)
_ONE_TASK = UnusedIf(lambda key: key.siblings == 1, "every prompt is of the only task")
_ONE_SET = UnusedIf(lambda key: key.siblings == 1, "every example is of the only set")
_STREAMED = UnusedIf(lambda key: key.table.streams, "no share of a streamed set is split off")
_NO_TEMPLATE = UnusedIf(
    lambda key: key.facts.template is False, "the tokenizer has no chat template"
)
_UNWEIGHTED = UnusedIf(lambda key: key.table.weight == 0, "weight = 0 only logs the value")
_UNREAD_VERDICT = UnusedIf(
    lambda key: key.stage.sampling.evaluation is None, "no evaluation of this stage reads it"
)
_UNREAD_OPTION = UnusedIf(
    _option_unread, 'the other options of "{key.table.function}" leave it unread'
)
TemplateKeywords = Annotated[dict[str, Any], _UNREAD_KEYWORD, NO_CONVERSATION]
"""Keyword arguments of the tokenizer's chat template."""


ENDINGS = {".jsonl": "jsonl", ".jsonl.gz": "jsonl", ".parquet": "parquet"}


class FileSource(FrozenModel):
    """A source whose `name` may be left out if `path` is a file of a known ending."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_its_path(cls, data: Any) -> Any:
        if not isinstance(data, dict) or "name" in data:
            return data
        path = str(data.get("path", ""))
        kind = next((kind for ending, kind in ENDINGS.items() if path.endswith(ending)), None)
        if path and kind is None:
            raise ValueError(
                f"path = {path!r} is not a {', '.join(ENDINGS)} file: convert it, or set name to "
                'what reads it, such as "datasets"'
            )
        return data if kind is None else {"name": kind, **data}


class TaskSource(FileSource):
    """A task that prompts come from."""

    name: str
    """A built-in task (`keel tasks`), `reasoning_gym:NAME`, `jsonl`, `parquet`, `datasets`, or
    `module:function`. May be left out if `path` ends in `.jsonl`, `.jsonl.gz` or `.parquet`."""
    weight: Annotated[Positive, _ONE_TASK] = 1.0
    """Share of the stage's prompts, relative to the other tasks."""
    path: str | None = None
    """Data file of the train split (.jsonl, .parquet), or the name of a data set."""
    validation_path: str | None = None
    """Data file of the validation split, or the name of a split; None: a share of the train data.
    """
    validation_fraction: Annotated[float, Field(gt=0, lt=1), SEPARATE_VALIDATION, _GENERATED] = 0.1
    """The share of the prompts in the validation split, chosen by their content."""
    prompt: str = "{prompt}"
    """The prompt as a format string over the columns, or the column that holds messages. A column
    `tools` (a list of JSON schemas, or its JSON text) goes to the chat template. Of a column
    `messages` (or `conversations`), also without being named if there is no `prompt`, the
    assistant's turn at the end is not in the prompt but the answer."""
    answer: str | None = None
    """Column of the gold answer, or of a list of which any entry is right; `answers.text` is a key
    of a column's table."""
    system: str | None = None
    """System message; makes each prompt a conversation."""
    raw: Annotated[bool, _NO_TEMPLATE] = False
    """Do not put plain prompts through the chat template, which by default makes them the user's
    turn."""
    bad_rows: Annotated[BadRows, _GENERATED] = "stop"
    """Whether an unreadable example stops the run before its first step, or is recorded in the run
    folder's quarantine/."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the generator, or of `datasets.load_dataset`."""

    @model_validator(mode="after")
    def _raw_or_system(self) -> TaskSource:
        if self.raw and self.system is not None:
            raise ValueError(
                "raw = true reads prompts without the chat template, and system makes them "
                "conversations: drop one of them"
            )
        return self


CORRECTNESS = ("exact_match", "numeric_match", "choice", "place_match", "math", "code", "ifeval")
"""Built-in rewards whose 1 means that the answer is right."""


class RewardSource(FrozenModel):
    """A reward function; the weighted sum of all is the reward."""

    function: str
    """Name of a built-in (`keel rewards`), or `module:function` or `file.py:function`."""
    name: str | None = None
    """Name in metrics; None: that of the function."""
    weight: Real = 1.0
    """Factor of its value in the sum; with 0 it is only logged."""
    clip: Annotated[Annotated[tuple[Real, Real], AsTuple] | None, _UNWEIGHTED] = None
    """Bounds of its value, applied before normalisation and weight."""
    normalise: Annotated[Literal["none", "group", "batch"], _UNWEIGHTED] = "none"
    """Standardise over the completions of a prompt or of the step."""
    gate_below: Real | None = None
    """Below this value the completion's reward is `gated_reward`, and rewards that are not gates
    are not called."""
    gated_reward: Real = 0.0
    """The reward below `gate_below`."""
    correctness: Annotated[bool | None, _UNREAD_VERDICT, NEVER_EVALUATED] = None
    """Whether a value of at least `evaluation.threshold` means a right answer; None: as the
    function declares."""
    options: Annotated[dict[str, Any], _UNREAD_OPTION] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _no_secret(self) -> RewardSource:
        """Before the recipe is written anywhere."""
        name = self.options.get("api_key_env")
        if (
            self.function in ("judge", "http")
            and isinstance(name, str)
            and (reason := wrong_key_name(name))
        ):
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _in_order(self) -> RewardSource:
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"clip = {list(self.clip)}: give the lower bound first")
        if self.gate_below is None and self.gated_reward != 0.0:
            raise ValueError(
                f"gated_reward = {self.gated_reward:g} has no effect without gate_below: set it too"
            )
        return self


class Rewards(FrozenModel):
    """How rewards are called. Without functions, the task's own score is the reward."""

    functions: Annotated[tuple[RewardSource, ...], AsTuple] = ()
    timeout: Seconds = 60.0
    """Seconds for one call of one function."""
    on_error: Literal["stop", "skip"] = "stop"
    """Whether a reward that fails stops the run, or is left out."""


class Prompts(FrozenModel):
    """How prompts are encoded."""

    max_tokens: Tokens | None = None
    """Longer prompts are left out and counted; None: what the context allows."""
    chat_template: TemplateKeywords = Field(default_factory=dict)
    """Keyword arguments of the tokenizer's chat template, such as enable_thinking."""


class PreferenceData(FileSource):
    """Preference data: pairs, labelled answers, or labelled steps."""

    name: str
    """`jsonl`, `parquet`, `datasets`, or a function `module:function` that returns examples. May be
    left out if `path` ends in `.jsonl`, `.jsonl.gz` or `.parquet`."""
    path: str | None = None
    """Data file of the train split (.jsonl, .parquet), or the name of a data set."""
    validation_path: str | None = None
    """Data file of the validation split, or the name of a split; None: a share of the train data.
    """
    validation_fraction: Annotated[float, Field(gt=0, lt=1), SEPARATE_VALIDATION] = 0.1
    """The share of the prompts in the validation split, chosen by their content."""
    group: str | None = None
    """Column whose equal values stay in one split and form one cluster in intervals; None: the
    prompt."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns in the file, for example {prompt = "question"}."""
    raw: bool = False
    """Do not put plain prompts through the chat template, which by default makes them the user's
    turn."""
    empty: Literal["refuse", "drop", "keep"] = "refuse"
    """What happens to an example with an empty answer; dropped ones are counted."""
    bad_rows: BadRows = "stop"
    """Whether an unreadable example stops the run, or is recorded in the run folder's
    quarantine/."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of `datasets.load_dataset`."""


class SFTData(FileSource):
    """Examples to imitate: `messages`, `prompt` and `completion`, or `text`, by their columns."""

    name: str
    """`jsonl`, `parquet`, `datasets`, or a function `module:function` that returns examples. May be
    left out if `path` ends in `.jsonl`, `.jsonl.gz` or `.parquet`."""
    weight: Annotated[Positive, _ONE_SET] = 1.0
    """Share of the stage's examples (with `packing`: of its blocks), relative to the other sets."""
    path: str | None = None
    """Data file of the train split (.jsonl, .parquet), or the name of a data set."""
    validation_path: str | None = None
    """Data file of the validation split, or the name of a split; None: a share of the train data,
    or of a streamed set none."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1), SEPARATE_VALIDATION, _STREAMED] = 0.1
    """The share of the examples in the validation split, chosen by the content of their prompt."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of the columns in the file, for example {prompt = "question", completion = "answer"}.
    """
    system: str | None = None
    """System message of the conversations that have none."""
    raw: Annotated[bool, _NO_TEMPLATE] = False
    """Do not put a plain `prompt` and `completion` through the chat template, which by default
    makes them turns."""
    bad_rows: BadRows = "stop"
    """Whether an unreadable example stops the run, or is recorded in the run folder's
    quarantine/."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of `datasets.load_dataset`: `split`, `name`, or
    `streaming = true` to read examples in order as steps need them."""

    @property
    def streams(self) -> bool:
        """Whether the examples are read as steps need them."""
        return self.name == "datasets" and bool(self.options.get("streaming"))


# ---------------------------------------------------------------- how completions are sampled

PAST_THE_END = UnusedIf(
    lambda key: key.value > key.stage.steps and not key.stage.unresolved,
    "the stage ends after {key.stage.steps} steps",
)
_NO_REPLIES = UnusedIf(
    lambda key: key.facts.replies.get(key.stage.name) is False, "no task of the stage replies"
)
_ONE_TURN = UnusedIf(lambda key: key.table.max_turns == 1, "rollout.max_turns is 1: no replies")
_NO_REFILLS = UnusedIf(
    lambda key: not key.table.dynamic_sampling, "rollout.dynamic_sampling is off: no refills"
)
_NO_REWARD = UnusedIf(
    lambda key: not key.stage.algorithm.needs_reward,
    'advantage "{key.stage.algorithm.advantage.kind}" reads no reward',
)
_NO_GROUP = UnusedIf(
    lambda key: key.table.group_size == 1, "a single completion is as long as its group's mean"
)
_MANY_TURNS = UnusedIf(
    lambda key: key.table.max_turns > 1, "with several turns rewards are called after sampling"
)
_OTHER_ENGINE = UnusedIf(lambda key: key.table.server is not key.value, "another engine samples")
_REPLAYED = UnusedIf(
    lambda key: key.table.replayed is not None, "the stored run has chosen its prompts"
)
_NOT_STORED = UnusedIf(lambda key: key.table.replayed is None, "the engine samples")
_ON_CPU = UnusedIf(lambda key: key.facts.cpu, "the model is on a CPU")
_RUNS_ALREADY = UnusedIf(lambda key: key.table.url is not None, "rollout.vllm.url is set")
_SERVES_ITS_OWN = UnusedIf(
    lambda key: key.table.server is not None and key.table.server.url is not None,
    "rollout.vllm.url is set, and that server has its own",
)
_NO_PROGRAM = UnusedIf(lambda key: key.table.program is None, "rollout.program is not set")
_PROGRAM = UnusedIf(
    lambda key: key.table.program is not None, "rollout.program decides what is said in turn"
)


_SAMPLES_ALWAYS = UnusedIf(
    lambda key: key.stage.rollout.async_level > 0,
    "with rollout.async_level the server samples while the trainer works",
)


class VllmServer(FrozenModel):
    """The server of `rollout.engine = "vllm"`."""

    url: str | None = None
    """Address of a server that runs on this machine, instead of one that Keel starts:
    `http://HOST:PORT` or `unix:PATH`."""
    python: Annotated[str | None, _RUNS_ALREADY] = None
    """The Python of vLLM's environment, relative to the recipe's folder; unset:
    `KEEL_VLLM_PYTHON`."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1), _RUNS_ALREADY] = 0.4
    """Share of the GPU's memory that vLLM may use; the trainer needs the rest."""
    sleep_level: Annotated[Literal[0, 1, 2] | None, _ON_CPU, _SAMPLES_ALWAYS] = None
    """How the server frees the GPU while the trainer works: 1 moves its weights to the host and
    drops the cache, 2 drops both (all weights are sent again), 0 keeps both; unset: 1 on the
    trainer's GPU, else 0."""
    gpus: Annotated[Ids, _RUNS_ALREADY, _ON_CPU] = ()
    """GPUs of the server, counted as torch counts them; none: the trainer's."""
    arguments: Annotated[Words, _RUNS_ALREADY] = ()
    """Further arguments of `vllm serve`."""
    start_timeout: Annotated[Seconds, _RUNS_ALREADY] = 600.0
    """Seconds in which the server has to answer after its start."""

    @property
    def interpreter(self) -> str | None:
        """The Python that has vLLM, as an absolute path unless it is to be found in PATH; None
        if none is named."""
        name = self.python or os.environ.get("KEEL_VLLM_PYTHON") or None
        # Not resolved: a virtual environment's Python is a link.
        return os.path.abspath(os.path.expanduser(name)) if name and "/" in name else name


class Curriculum(FrozenModel):
    """Which prompts are asked: unseen ones, and those of a moving pass rate within a window."""

    low: Unit = 0.1
    """Least pass rate of a prompt."""
    high: Unit = 0.9
    """Highest pass rate of a prompt."""
    threshold: Real = 0.0
    """A completion is right if its reward (without length penalty) is more than this."""
    decay: Unit = 0.5
    """Weight of the past in the moving average of the pass rate."""
    revisit: Count = 4
    """A prompt outside the window is asked at every n-th time that it comes."""


class Rollout(FrozenModel):
    """How completions are sampled."""

    prompts_per_step: Count = PROMPTS_PER_STEP
    """Prompts of a step."""
    group_size: Answers = GROUP_SIZE
    """Completions of each prompt."""
    max_tokens: Tokens = 256
    """Longest completion, in tokens, replies of the environment included."""
    temperature: Temperature = 1.0
    """Temperature of the sampling distribution."""
    top_k: Index = 0
    """Sample from the k most likely tokens. Must be 0 (off) in training."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the tokens with this total probability. Must be 1 (off) in training."""
    min_p: Unit = 0.0
    """Sample from tokens with this share of the top probability. Must be 0 (off) in training."""
    stop: Words = ()
    """Strings that end a completion."""
    stop_ids: Ids = ()
    """Token ids that end a completion."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token, up to `max_tokens`: to measure memory and speed."""
    max_turns: Annotated[Answers, _PROGRAM, _NO_REPLIES] = 1
    """Turns of the policy in one completion, for tasks that reply."""
    reply_role: Annotated[Literal["user", "tool"], _PROGRAM, _ONE_TURN, _NO_REPLIES] = "user"
    """The role of a reply in a conversation."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards (without length penalty) are all equal; the preset's unless
    set."""
    max_refills: Annotated[Count, _NO_REFILLS] = 10
    """How often a step samples again for dropped groups."""
    curriculum: Annotated[Curriculum | None, _REPLAYED] = None
    """Choose prompts by their pass rate."""
    mask_truncated: bool = False
    """Leave completions that reach `max_tokens` out of the loss. The weights of the others do not
    change."""
    overlong_buffer: Annotated[Index, _NO_REWARD] = 0
    """Length of the soft length penalty at the end of the budget, in tokens (DAPO); the preset's
    unless set."""
    truncated_factor: Annotated[Unit, _NO_REWARD] = 1.0
    """What the reward of a completion that reaches `max_tokens` is multiplied by, before
    penalties of length ("stop properly", ProRL)."""
    length_penalty: Annotated[Coefficient, _NO_REWARD, _NO_GROUP] = 0.0
    """Weight β of a penalty of length, β max(p, 1/G) L / mean(L): p is the share of the group's G
    rewards above 0, mean(L) the group's mean length (ALP)."""
    old_log_probs: OldLogProbs = "trainer"
    """Who computes log π_old; with `log_linear` (A-3PO) no pass does, but for terms of the whole
    batch: it lies between the policy and the engine, by how many updates the latter is behind; at
    one or none it is the engine's, and corrections are 1."""
    engine: str = "native"
    """`native`, `vllm` ([how to](howto/vllm.md)), `stored` (what another run sampled), or
    `module:function` of a function that returns an engine (see [extending](extending.md))."""
    stored: Annotated[str | None, _NOT_STORED] = None
    """Run folder whose rollouts the engine `stored` returns, those of step n in step n ([how
    to](howto/rollouts.md))."""
    stored_stage: Annotated[str | None, _NOT_STORED] = None
    """The stage of that run, if several have rollouts."""
    program: str | None = None
    """`module:function` of a program that leads each conversation over an OpenAI-compatible
    endpoint (see [agents](howto/agents.md))."""
    max_programs: Annotated[Answers, _NO_PROGRAM] = 64
    """Programs that run at once."""
    on_error: Annotated[Literal["stop", "skip"], _NO_PROGRAM] = "stop"
    """Whether a program that raises after an answer stops the run, or its completion is left
    out."""
    dtype: Annotated[Literal["model", "bfloat16"], SAME_DTYPE, _SERVES_ITS_OWN] = "model"
    """Of the engine's weights, keys and values. bfloat16 needs `algorithm.corrections`. The native
    engine evaluates in the model's dtype."""
    timeout: Seconds = 1800.0
    """Seconds without a new token after which the engine counts as hung, or without a request the
    program. With vLLM: of each request, a whole completion."""
    max_num_seqs: Answers = 256
    """Sequences that the engine decodes at once."""
    overlap_rewards: Annotated[bool, _PROGRAM, _MANY_TURNS] = False
    """Score the first groups while the last ones are still being sampled."""
    async_level: Annotated[int, Field(ge=0, le=64)] = 0
    """How many steps ahead a copy of the model samples: the most updates between the weights that
    began a completion and those trained on it. Needs `algorithm.corrections`; more than 1 needs
    `cluster.ray` or another engine that keeps earlier weights."""
    vllm: Annotated[VllmServer, _OTHER_ENGINE] = VllmServer()
    """The vLLM server."""

    @property
    def in_order(self) -> bool:
        """Whether a step decides which prompts are left for the next."""
        return self.dynamic_sampling or self.curriculum is not None

    @property
    def server(self) -> VllmServer | None:
        """The settings of the engine's server; None: it has none."""
        return {"vllm": self.vllm}.get(self.engine)

    @property
    def replayed(self) -> str | None:
        """The run whose rollouts are returned; None: an engine samples."""
        return {"stored": self.stored}.get(self.engine)

    @model_validator(mode="after")
    def _on_policy(self) -> Rollout:
        for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, key) != off:
                raise ValueError(
                    f"rollout.{key} = {getattr(self, key)} samples from a truncated distribution, "
                    "but the loss scores the full softmax, which is off policy: "
                    f"set rollout.{key} = {off} (evaluation may truncate)"
                )
        return self


class NamedAlgorithm(Algorithm):
    """A row and the preset that its defaults came from."""

    preset: str = DEFAULT_PRESET
