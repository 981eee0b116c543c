"""The keys that say where prompts and their judgement come from. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from keel.algorithms.terms import FrozenModel, KeyUse, Positive, UnusedIf
from keel.config.fields import SEPARATE_VALIDATION, AsTuple, BadRows, Real, Seconds, Tokens
from keel.config.model import NO_CONVERSATION
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
    `tools` (a list of JSON schemas, or its JSON text) goes to the chat template."""
    answer: str | None = None
    """Column of the gold answer, or of a list of which any entry is right; `answers.text` is a key
    of a column's table."""
    system: str | None = None
    """System message; makes each prompt a conversation."""
    raw: Annotated[bool, _NO_TEMPLATE] = False
    """Do not put plain prompts through the chat template. By default they are the turn of the user
    if the tokenizer has one."""
    bad_rows: Annotated[BadRows, _GENERATED] = "stop"
    """Whether an example that gives no prompt stops the run before its first step, or is recorded
    in the run folder's quarantine/."""
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
    """Subtract the mean and divide by the standard deviation, over the completions of a prompt or
    of the step."""
    gate_below: Real | None = None
    """If the value is below this, the reward of the completion is `gated_reward`, and the rewards
    that are no gates are not called."""
    gated_reward: Real = 0.0
    """The reward of a completion whose value is below `gate_below`."""
    correctness: Annotated[bool | None, _UNREAD_VERDICT, NEVER_EVALUATED] = None
    """Whether a value of at least `evaluation.threshold` means a right answer, so that pass@k is
    defined; None: as the function declares."""
    options: Annotated[dict[str, Any], _UNREAD_OPTION] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    @model_validator(mode="after")
    def _no_secret(self) -> RewardSource:
        """Before the recipe is written anywhere."""
        name = self.options.get("api_key_env")
        if self.function == "judge" and isinstance(name, str) and (reason := wrong_key_name(name)):
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
    """Whether a reward that fails stops the run, or is left out for the completions concerned."""


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
    """Do not put plain prompts through the chat template. By default they are the turn of the user
    if the tokenizer has one."""
    empty: Literal["refuse", "drop", "keep"] = "refuse"
    """What happens to an example with an empty answer; dropped ones are counted."""
    bad_rows: BadRows = "stop"
    """Whether an example that cannot be read stops the run, or is recorded in the run folder's
    quarantine/."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of `datasets.load_dataset`."""
