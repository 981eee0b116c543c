"""The keys that say where prompts and their judgement come from. Torch-free."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from keel.algorithms.spec import FrozenModel, KeyUse, Positive, UnusedIf
from keel.config.fields import SEPARATE_VALIDATION, AsTuple, BadRows, Real, Tokens
from keel.config.model import NO_CONVERSATION
from keel.config.secrets import wrong_address, wrong_key_name

Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A time limit: a year at the most, since clocks count to some number."""
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


# A run's `keel eval` evaluates as its last stage says, even where training does not evaluate.
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


class TaskSource(FrozenModel):
    """One task of a mixture; `name` is a built-in, `reasoning_gym:NAME`, `jsonl`, `parquet`,
    `datasets`, or a Python entry `module:function`."""

    name: str
    weight: Annotated[Positive, _ONE_TASK] = 1.0
    path: str | None = None
    """Data file of the train split (jsonl, parquet), or the `datasets` name."""
    validation_path: str | None = None
    """Data file (or split) of the validation split; without it a share is split off by content."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1), SEPARATE_VALIDATION, _GENERATED] = 0.1
    prompt: str = "{prompt}"
    """How a row becomes a prompt: a format string over its columns (or the messages column)."""
    answer: str | None = None
    """Column that holds the gold answer."""
    system: str | None = None
    """System message; makes the prompt a conversation."""
    raw: Annotated[bool, _NO_TEMPLATE] = False
    """Plain prompts are read as they stand. Otherwise they are the user's turn where the tokenizer
    has a chat template."""
    bad_rows: Annotated[BadRows, _GENERATED] = "stop"
    """A stored row that no prompt can be made of stops the run before its first step, or is left
    out into the run folder's quarantine/, with its line and the reason."""
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
    """One reward: a function by `module:function` or the name of a built-in (keel rewards)."""

    function: str
    name: str | None = None
    weight: Real = 1.0
    """Of its value in the sum; 0 watches a component without learning from it."""
    clip: Annotated[Annotated[tuple[Real, Real], AsTuple] | None, _UNWEIGHTED] = None
    """Bounds that its value is cut to, before it is normalised and weighed."""
    normalise: Annotated[Literal["none", "group", "batch"], _UNWEIGHTED] = "none"
    """Less the mean, over the standard deviation, of a prompt's completions or of the step's."""
    gate_below: Real | None = None
    """Below this value `gated_reward` is the completion's whole reward, and the
    rewards that are no gates are not asked."""
    gated_reward: Real = 0.0
    """The reward of a completion that is below `gate_below`."""
    correctness: Annotated[bool | None, _UNREAD_VERDICT, NEVER_EVALUATED] = None
    """Whether evaluation.threshold of it means right, so that pass@k is defined; None: as the
    function declares itself (rules of right and wrong, code, verdicts of built-in tasks)."""
    options: Annotated[dict[str, Any], _UNREAD_OPTION] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_secret(self) -> RewardSource:
        """Before the recipe is written anywhere."""
        for option, wrong in (("api_key_env", wrong_key_name), ("url", wrong_address)):
            value = self.options.get(option)
            if self.function == "judge" and isinstance(value, str) and (reason := wrong(value)):
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
    """How rewards are called. With no functions, the task's own verdict is the reward."""

    functions: Annotated[tuple[RewardSource, ...], AsTuple] = ()
    timeout: Seconds = 60.0
    """Seconds that one call of one function may take."""
    on_error: Literal["stop", "skip"] = "stop"


class Prompts(FrozenModel):
    """What happens to a prompt before it is sampled."""

    max_tokens: Tokens | None = None
    """Longer prompts are left out and counted; None means what the context holds."""
    chat_template: TemplateKeywords = Field(default_factory=dict)
    """Keyword arguments of the tokenizer's chat template, such as enable_thinking."""


class PreferenceData(FrozenModel):
    """Rows that people, models or rules judged; `name` is `jsonl`, `parquet`, `datasets`, or a
    Python entry `module:function` that returns rows."""

    name: str
    path: str | None = None
    """Data file of the train split (jsonl, parquet), or the `datasets` name."""
    validation_path: str | None = None
    """Data file (or split) of the validation split; without it a share is split off by content."""
    validation_fraction: Annotated[float, Field(gt=0, lt=1), SEPARATE_VALIDATION] = 0.1
    group: str | None = None
    """Column whose equal values stay in one split, and are one cluster in an interval; the prompt
    unless set."""
    columns: dict[str, str] = Field(default_factory=dict)
    """The file's own names of columns, as in {prompt = "question"}."""
    raw: bool = False
    """Plain prompts are read as they stand. Otherwise they are the user's turn where the tokenizer
    has a chat template."""
    empty: Literal["refuse", "drop", "keep"] = "refuse"
    """What becomes of a row with an empty answer; dropped ones are counted."""
    bad_rows: BadRows = "stop"
    """A row that cannot be read stops the run, or is left out into the run folder's quarantine/,
    with its line and the reason."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of `datasets.load_dataset`."""
