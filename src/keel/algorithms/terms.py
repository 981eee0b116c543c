"""What every term of an algorithm is made of: parameters, equations and what explains them.

A term class (a surrogate, an advantage, ...) is a frozen pydantic model: its fields are the keys of
the recipe, its methods compute it (by tensor methods, or by `keel.objective`, imported at the first
call so that this package loads without torch) and write its equation with the fields' values.
Equations are in the subset of LaTeX that `symbols` reads.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, Union, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from keel.algorithms.symbols import function, prose_to_unicode, quote, to_unicode

if TYPE_CHECKING:
    from torch import Tensor

    from keel.algorithms.signals import Signals

CHOICE = "Keel's choice"
"""Marks in a source what no paper fixes."""
RECIPE = "set in the recipe"


class FrozenModel(BaseModel):
    """Frozen, closed to unknown keys, strict about types, never infinite."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        strict=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _read_tables(cls, data: Any) -> Any:
        """TOML has no null: `"none"` unsets any field that may be absent. A table that sets
        some keys keeps the others of the field's default."""
        if not isinstance(data, dict):
            return data
        return {
            k: None if v == "none" and _optional(cls, k) else _filled(cls, k, v)
            for k, v in data.items()
        }


def _filled(cls: type[BaseModel], key: str, value: Any) -> Any:
    info = cls.model_fields.get(key)
    if info is None or not isinstance(info.default, BaseModel) or not isinstance(value, dict):
        return value
    return {**info.default.model_dump(exclude_unset=True), **value}


def _optional(cls: type[BaseModel], key: str) -> bool:
    info = cls.model_fields.get(key)
    return info is not None and type(None) in get_args(info.annotation)


@dataclass(frozen=True, slots=True)
class KeyUse:
    """A key that a recipe sets, as the condition of an `UnusedIf` reads it.

    `table` holds the annotated field and `value` is the field's value there; `siblings` counts the
    entries of the list that the table stands in (1 without a list). `leaf` is the last part of the
    key that is set, which may be deeper than the field. `facts` is what the loaded parts add to the
    recipe (`keel.preflight.settings.Facts`).
    """

    leaf: str
    value: Any
    table: Any
    siblings: int
    stage: Any
    recipe: Any
    facts: Any


@dataclass(frozen=True, slots=True)
class UnusedIf:
    """Marks a recipe field, `Annotated[float, UnusedIf(...)]`, that is valid but without effect
    where `condition` holds; `keel check` reports the key and `why`, formatted with the `KeyUse` as
    `key`. A mark on a table covers all keys in it except those named by `but`.
    """

    condition: Callable[[KeyUse], bool]
    why: str
    but: tuple[str, ...] = ()


SINGLE_UPDATE = UnusedIf(
    lambda key: key.stage.single_update,
    "each batch is used for one optimizer step (epochs = 1, minibatches = 1), so the weights are "
    "still those that sampled it",
    but=("kind", "function", "options"),
)
Positive = Annotated[float, Field(gt=0, le=1e9)]
Coefficient = Annotated[float, Field(ge=0, le=1e9)]
"""At most 1e9, as the square of that is finite in float32."""
Unit = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1)]
EntryPoint = Annotated[str, Field(pattern=r"^[^:]+:[\w.]+$")]
"""A Python object, as `module:name` or `path/to/file.py:name`."""


class TermChoice(FrozenModel):
    """A term that the recipe chooses by `kind`; each subclass is one kind.

    A function of `keel.objective` under the name of the kind computes it, unless it does so itself;
    the fields are the options of that function.
    """

    kind: str
    source: ClassVar[str] = ""
    """The paper, and the equation in it."""
    module: ClassVar[str] = ""
    """Of `keel.objective`, with the function."""
    reads: ClassVar[tuple[str, ...]] = ()
    """The signals that the function takes."""

    def computed(self, signals: Signals) -> Tensor:
        """What the function gives."""
        given = {name: signals.need(name) for name in self.reads}
        found: Tensor = getattr(Lazy(self.module), self.kind)(**given, **self._options())
        return found

    def _options(self) -> dict[str, Any]:
        return self.model_dump(exclude={"kind", "whiten"})


class RewardDivergence(Protocol):
    """A divergence that is part of the reward."""

    @property
    def active(self) -> bool: ...


class Choices(Protocol):
    """What a term reads of the algorithm it belongs to (`spec.Algorithm`)."""

    @property
    def advantage(self) -> TermChoice: ...
    @property
    def ratio(self) -> str: ...
    @property
    def ratio_per_sequence(self) -> bool: ...
    @property
    def per_token_advantage(self) -> bool: ...
    @property
    def needs_reward(self) -> bool: ...
    @property
    def reads_components(self) -> bool: ...
    @property
    def needs_positive(self) -> bool: ...
    @property
    def reward_divergence(self) -> RewardDivergence | None: ...


def _as_tuple(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.values()) if all(key.isdecimal() for key in value) else (value,)
    return tuple(value) if isinstance(value, list) else value


AsTuple = BeforeValidator(_as_tuple)
"""TOML has lists only; a key below a list that is not set (`tasks.name`) sets its first entry."""


def one_of(base: type[TermChoice]) -> Any:
    """The annotation of a field that takes any kind of term that is defined below `base`."""
    return Annotated[Union[tuple(base.__subclasses__())], Field(discriminator="kind")]


class Lazy:
    """The functions of a module of `keel.objective`, which is imported at the first use."""

    def __init__(self, name: str) -> None:
        self._name = f"keel.objective.{name}"

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def user_function(entry: str, options: dict[str, Any], arguments: str) -> tuple[str, str]:
    """A user's `module:function` in a formula, and its options in a sentence."""
    given = quote(", ".join(f"{key} = {value!r}" for key, value in options.items()))
    return f"{function(entry)}({arguments})_n", f" With {given}." if options else ""


# ---------------------------------------------------------------- explanations

TermKey = Literal[
    "advantage", "ratio", "surrogate", "masks", "weights", "divergence", "distillation", "value",
    "entropy", "auxiliary", "corrections", "epochs",
]  # fmt: skip


Teacher = Literal["model", "models", "server", "live", "base", "averaged"]
"""Other models, loaded or on a server, or the policy itself: as it is, as it was, or averaged."""


OldLogProbs = Literal["trainer", "engine", "log_linear"]
"""Who computes log π_old: the trainer before the update, the engine as it sampled, or both, by how
far the weights that sampled are behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a recipe adds to an algorithm. None leaves the symbol standing for the figure.

    `max_tokens` is C, the completion budget; `overlong_buffer` is in tokens, `overlong_share` the
    same as a share of C, where C is not known.
    """

    group_size: int | None = None
    prompts_per_step: int | None = None
    max_tokens: int | None = None
    epochs: int = 1
    minibatches: int | None = None
    reward: Literal["model", "rule"] = "model"
    value: Literal["head", "critic"] = "critic"
    lora: bool = False
    temperature: float = 1.0
    dynamic_sampling: bool = False
    overlong_buffer: int = 0
    overlong_share: float = 0.0
    length_penalty: float = 0.0
    truncated_factor: float = 1.0
    mask_truncated: bool = False
    old_log_probs: OldLogProbs = "trainer"
    reference_reset_every: int | None = None
    reference_measured: bool = False
    teacher: Teacher = "model"
    teachers: int = 1

    @property
    def step_sequences(self) -> int | None:
        """Completions of a step, where both factors are known."""
        if self.prompts_per_step is None or self.group_size is None:
            return None
        return self.prompts_per_step * self.group_size

    @property
    def one_update(self) -> bool:
        """Whether each batch is used for one optimizer step (an unknown count is taken as one)."""
        return self.epochs == 1 and self.minibatches in (None, 1)


@dataclass(frozen=True, slots=True)
class Equation:
    """`left relation right`, the right side in parts between which a line may be broken."""

    left: str
    parts: tuple[str, ...]
    relation: str = "="

    @property
    def latex(self) -> str:
        return f"{self.left} {self.relation} {' '.join(self.parts)}"

    @property
    def unicode(self) -> str:
        return to_unicode(self.latex)

    def json(self) -> dict[str, str]:
        return {"unicode": self.unicode, "latex": self.latex}


def equation(left: str, *parts: str, relation: str = "=") -> Equation:
    """An equation from its sides."""
    return Equation(left, parts, relation)


@dataclass(frozen=True, slots=True)
class Description:
    """A term's equations with their figures, and what they mean."""

    equations: tuple[Equation, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Term(Description):
    """One choice of the algorithm, described, with its symbol and its source."""

    key: TermKey
    symbol: str
    title: str
    kind: str
    source: str

    @property
    def keels_choice(self) -> bool:
        """Whether some figure here is Keel's, where no paper fixes it."""
        return CHOICE in self.source

    def json(self) -> dict[str, Any]:
        return {
            "term": self.key,
            "symbol": {"unicode": to_unicode(self.symbol), "latex": self.symbol},
            "title": self.title,
            "kind": self.kind,
            "equations": [e.json() for e in self.equations],
            "text": prose_to_unicode(self.text),
            "source": self.source,
            "keels_choice": self.keels_choice,
        }


@dataclass(frozen=True, slots=True)
class ModelUse:
    """A role in the objective and what fills it; `loaded` where it takes weights of its own."""

    role: Literal["policy", "reference", "teacher", "reward", "value"]
    what: str
    loaded: bool

    def json(self) -> dict[str, Any]:
        return {"role": self.role, "what": prose_to_unicode(self.what), "loaded": self.loaded}
