"""Which keys do nothing in which combination: one table, held complete by a test.

`always.ALWAYS` are the keys that do something wherever they may be set; `IDLE` says of every other
key when it does nothing, and why. The schema refuses what can never be right; here is what is
allowed, and in vain. Keys below `sampled` are those of a stage's own tasks, prompts and rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from keel.algorithms.surrogates import CustomSurrogate, SurrogateTerm
from keel.config.judging import JudgingStage, RewardModelStage
from keel.config.schema import Recipe
from keel.data.tasks.build import GENERATORS
from keel.data.tasks.gym import PREFIX
from keel.preflight.explicit_keys import ExplicitKey, shown
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import found


@dataclass(frozen=True, slots=True)
class Facts:
    """What the loaded parts say that the recipe alone does not.

    `template`: whether the tokenizer has a chat template; `conversations`: whether any prompt is
    one; `replies`: by stage, whether a task of it can
    answer; None where it could not be looked at; `unread`: by stage, the keywords that the chat
    template does not read. `kv_heads`: whether the built family has such;
    `local`: whether model.name is a folder.
    """

    cpu: bool
    local: bool
    kv_heads: bool = True
    template: bool | None = None
    conversations: bool | None = None
    replies: Mapping[str, bool] | None = None
    unread: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class KeyContext:
    """A key that was set, with the stage (or recipe) around it."""

    given: ExplicitKey
    recipe: Recipe
    facts: Facts

    @property
    def stage(self) -> Any:
        assert self.given.stage is not None
        return self.recipe.stages[self.given.stage]


Rule = Callable[[KeyContext], str | None]
"""Why a key does nothing here; None where it does something."""


def idle_keys(keys: Sequence[ExplicitKey], recipe: Recipe, facts: Facts) -> list[Finding]:
    """A finding for each key that was set in vain."""
    out = []
    for key in keys:
        rule = rule_of(key.pattern)
        why = None if rule is None else rule(KeyContext(key, recipe, facts))
        if why is None:
            continue
        name = shown(recipe, key.stage, key.path)
        what = f"{name} = {_said(key.value)} has no effect"
        out.append(found("no-effect", what, why, name, "drop it, or change what makes it idle"))
    return out


def rule_of(pattern: str) -> Rule | None:
    """The rule of a key; None where it always has an effect."""
    return IDLE.get(known_as(pattern))


def known_as(pattern: str) -> str:
    """The name of a key in the table: `sampled` has tasks, prompts and rewards like a stage."""
    short = pattern.removeprefix("sampled.")
    return short if short.split(".")[0] in ("tasks", "prompts", "rewards") else pattern


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if len(value) <= 40 else f'"{value[:39]}…"'
    return "none" if value is None else f"{value!r:.60}"


# ---------------------------------------------------------------- when and why


def _model_is_built(w: KeyContext) -> str | None:
    return "the model is built on the spot" if w.recipe.model.build is not None else None


def _revision(w: KeyContext) -> str | None:
    if w.facts.local:
        return "model.name is a folder, and revisions are of the hub"
    return _model_is_built(w)


def _autocast(w: KeyContext) -> str | None:
    if w.facts.cpu:
        return "on a CPU nothing is autocast"
    if w.recipe.model.dtype != "float32":
        return f'model.dtype = "{w.recipe.model.dtype}": autocast is of float32 weights'
    return None


def _rollout_dtype(w: KeyContext) -> str | None:
    return "it is the model's own" if w.given.value == w.recipe.model.dtype else None


def _alphabet(w: KeyContext) -> str | None:
    build = w.recipe.model.build
    bytes_ = build is not None and build.tokenizer == "bytes"
    return 'model.build.tokenizer = "bytes" knows every byte' if bytes_ else None


def _kv_heads(w: KeyContext) -> str | None:
    build = w.recipe.model.build
    if w.facts.kv_heads or build is None:
        return None
    return f'the family "{build.family}" has no key-value heads of their own'


def _no_conversation(w: KeyContext) -> str | None:
    if w.facts.conversations is not False:
        return None
    return "no prompt is a conversation, so no chat template is used"


def _raw(w: KeyContext) -> str | None:
    if w.facts.template is not False:
        return None
    return "the tokenizer has no chat template, so plain prompts are read as they stand anyway"


def _keyword(w: KeyContext) -> str | None:
    unread = w.given.leaf in w.facts.unread.get(w.stage.name, ())
    return "the chat template writes the same without it" if unread else _no_conversation(w)


def _constant(w: KeyContext) -> str | None:
    constant = w.given.holder.schedule == "constant"
    return 'optimizer.schedule = "constant" keeps all of the rate' if constant else None


def _of_critic(rule: Rule | None = None) -> Rule:
    def why(w: KeyContext) -> str | None:
        if w.stage.algorithm.value is None:
            kind = w.stage.algorithm.advantage.kind
            return f'advantage "{kind}" has no value model'
        return None if rule is None else rule(w)

    return why


def _project(w: KeyContext) -> str | None:
    return None if w.given.holder.wandb else "trackers.wandb is off"


def _weight(w: KeyContext) -> str | None:
    return "there is one task, which is drawn every time" if w.given.beside == 1 else None


def _drawn(w: KeyContext) -> str | None:
    name = w.given.holder.name
    if name in GENERATORS or name.startswith(PREFIX):
        return f'the prompts of "{name}" are drawn, not stored'
    return None


def _heldout_share(w: KeyContext) -> str | None:
    if w.given.holder.heldout_path is not None:
        return "heldout_path is the held-out side, so none is split off"
    return _drawn(w)


def _watched(w: KeyContext) -> str | None:
    return None if w.given.holder.weight else "weight = 0 watches the value as it was said"


def _option(w: KeyContext) -> str | None:
    """An option of a built-in reward."""
    source, leaf = w.given.holder, w.given.leaf
    options = source.options
    if source.function in ("outcome", "process") and leaf in ("timeout", "memory_mb"):
        return None if options.get("process") else "without process = true there is no such process"
    if source.function != "judge":
        return None
    if options.get("mode", "rubric") == "rubric":
        pairwise = ("against", "rivals", "both_orders")
        return 'mode = "rubric" compares no answers' if leaf in pairwise else None
    if leaf in ("low", "high"):
        return 'mode = "pairwise" has no scale'
    fixed = leaf == "rivals" and options.get("against", "group") != "group"
    return "each answer is compared with a fixed one" if fixed else None


def _max_turns(w: KeyContext) -> str | None:
    replies = (w.facts.replies or {}).get(w.stage.name)
    return "the task never replies, so there is one turn" if replies is False else None


def _max_refills(w: KeyContext) -> str | None:
    on = w.stage.rollout.dynamic_sampling
    return None if on else "rollout.dynamic_sampling is off: no step is refilled"


def _overlap(w: KeyContext) -> str | None:
    turns = w.stage.rollout.max_turns
    return f"with rollout.max_turns = {turns} rewards come after it" if turns > 1 else None


def _one_update(w: KeyContext) -> str | None:
    s = w.stage
    if s.epochs * s.minibatches > 1 or s.rollout.old_log_probs == "engine":
        return None
    return (
        "each batch is used for one optimizer step (epochs = 1, minibatches = 1), so nothing has "
        "moved since it was sampled"
    )


def _no_divergence(w: KeyContext) -> str | None:
    d = w.stage.algorithm.divergence
    off = d is not None and d.beta == 0 and d.adaptive is None
    return "algorithm.divergence.beta = 0 switches the divergence off" if off else None


def _horizon(w: KeyContext) -> str | None:
    rule = w.given.holder.rule
    return None if rule == "ziegler" else f'rule = "{rule}" has no horizon'


def _floor(w: KeyContext) -> str | None:
    if w.stage.algorithm.correction.kind == "mask":
        return None
    return 'correction.kind = "truncate" has a cap only'


def _weights_constant(w: KeyContext) -> str | None:
    kind = w.given.holder.kind
    return None if kind == "constant" else f'weights.kind = "{kind}" has no constant'


def _lam(w: KeyContext) -> str | None:
    adaptive = w.given.holder.adaptive_alpha is not None
    return "adaptive_alpha gives the actor's λ, critic_lam the critic's" if adaptive else None


def _unscaled(w: KeyContext) -> str | None:
    plain = getattr(w.given.holder, "scale", None) == "none"
    return 'advantage.scale = "none" divides by nothing' if plain else None


def _reset_every(w: KeyContext) -> str | None:
    stage, every = w.stage, w.given.value
    if not stage.keeps_reference:
        return "no reference policy is kept"
    return f"the stage ends after {stage.steps} steps" if every >= stage.steps else None


def _measured(w: KeyContext) -> str | None:
    """It makes a reference, and the policy's own log-probabilities, be there: if they are not."""
    s = w.stage
    d = s.algorithm.divergence
    known = s.epochs * s.minibatches > 1 or (
        d is not None and (d.where == "reward" or d.adaptive is not None)
    )
    if s.algorithm.needs_reference and known and s.rollout.old_log_probs == "trainer":
        return "the divergence to the reference is part of the objective, and measured anyway"
    return None


def _by_eval(w: KeyContext) -> bool:
    """Whether `keel eval` of the run reads the key, which is of its last stage."""
    return w.stage is w.recipe.stages[-1] and w.stage.stage == "rl" and w.given.leaf != "every"


def _evaluated(w: KeyContext) -> str | None:
    choice = w.stage.evaluation
    key = "rows" if isinstance(w.stage, JudgingStage) else "prompts"
    none = getattr(choice, key) == 0 and not _by_eval(w)
    return f"evaluation.{key} = 0 evaluates never" if none else None


def _correctness(w: KeyContext) -> str | None:
    judging = isinstance(w.stage, JudgingStage)
    return "no evaluation of this stage goes by it" if judging else _evaluated(w)


def _sampled_evaluation(w: KeyContext) -> str | None:
    none = w.stage.evaluation.samples == 0 and not _by_eval(w)
    return _evaluated(w) or ("evaluation.samples = 0 leaves sampling out" if none else None)


def _evaluation_every(w: KeyContext) -> str | None:
    if (why := _evaluated(w)) is not None:
        return why
    late = w.given.value > w.stage.steps
    return f"the stage ends after {w.stage.steps} steps, and is evaluated then" if late else None


def _rollouts_every(w: KeyContext) -> str | None:
    late = w.given.value > w.stage.steps
    return f"the stage ends after {w.stage.steps} steps: no rollouts are written" if late else None


def _pairs(w: KeyContext) -> str | None:
    pairs = isinstance(w.stage, RewardModelStage) and w.stage.learns == "pairs"
    if pairs or w.stage.stage == "dpo":
        return None
    return "the stage learns from labels, not from pairs"


IDLE: Final[Mapping[str, Rule]] = {
    "model.revision": _revision,
    "model.build.alphabet": _alphabet,
    "model.build.kv_heads": _kv_heads,
    "model.autocast": _autocast,
    "model.trust_remote_code": _model_is_built,
    "model.chat_template": _no_conversation,
    "prompts.chat_template": _keyword,
    "chat_template": _keyword,
    "optimizer.final_share": _constant,
    "trackers.project": _project,
    "tasks.weight": _weight,
    "tasks.heldout_share": _heldout_share,
    "tasks.raw": _raw,
    "tasks.bad_rows": _drawn,
    "rewards.functions.clip": _watched,
    "rewards.functions.normalise": _watched,
    "rewards.functions.options": _option,
    "rewards.functions.correctness": _correctness,
    "data.heldout_share": _heldout_share,
    "sampled.pairs": _pairs,
    "sampled.heldout": _evaluated,
    "rollout.max_turns": _max_turns,
    "rollout.dtype": _rollout_dtype,
    "rollout.max_refills": _max_refills,
    "rollout.overlap_rewards": _overlap,
    "algorithm.advantage.lam": _lam,
    "algorithm.advantage.epsilon": _unscaled,
    "algorithm.advantage.ddof": _unscaled,
    **{
        f"algorithm.surrogate.{key}": _one_update
        for term in SurrogateTerm.__subclasses__()
        if term is not CustomSurrogate
        for key in term.model_fields.keys() - {"kind"}
    },
    "algorithm.weights.constant": _weights_constant,
    **{f"algorithm.divergence.{k}": _no_divergence for k in ("to", "where", "estimator")},
    "algorithm.divergence.unbiased": _no_divergence,
    "algorithm.divergence.adaptive.horizon": _horizon,
    "algorithm.value.clip": _one_update,
    "algorithm.correction.floor": _floor,
    **{f"value.{key}": _of_critic() for key in ("kind", "name", "warmup_steps")},
    **{
        f"value.optimizer.{key}": _of_critic(_constant if key == "final_share" else None)
        for key in (
            *("learning_rate", "schedule", "final_share", "warmup_steps", "betas", "epsilon"),
            *("weight_decay", "max_grad_norm"),
        )
    },
    "reference.reset_every": _reset_every,
    "reference.measured": _measured,
    "evaluation.every": _evaluation_every,
    **{f"evaluation.{key}": _evaluated for key in ("samples", "component", "threshold")},
    **{
        f"evaluation.{key}": _sampled_evaluation
        for key in ("temperature", "top_k", "top_p", "min_p")
    },
    "threshold": _evaluated,
    "rollouts_every": _rollouts_every,
}
