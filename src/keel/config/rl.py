"""What a stage of reinforcement learning is configured with. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from keel.algorithms.presets import PRESETS
from keel.algorithms.terms import AsTuple, FrozenModel, UnusedIf
from keel.config.benchmarks import with_graders
from keel.config.evaluation import Evaluation, SamplingSource
from keel.config.fields import Count, Index, MicroBatchTokens, StageName, Tokens
from keel.config.layers import resolve_algorithm
from keel.config.model import TeacherModel
from keel.config.sources import (
    LEARNED,
    PAST_THE_END,
    NamedAlgorithm,
    Prompts,
    Rewards,
    Rollout,
    SFTData,
    TaskSource,
)
from keel.config.stage import ImitationSource, Optimizer, StageConfig

if TYPE_CHECKING:
    from keel.algorithms.render import Explanation
    from keel.config.model import Cluster, Model

VALUE_LEARNING_RATE = 1e-5
MAX_COMPLETIONS = 2**24
"""Of one step: beyond, the step's records alone fill a machine's memory."""

_NO_VALUE = UnusedIf(
    lambda key: key.stage.algorithm.value is None,
    'advantage "{key.stage.algorithm.advantage.kind}" has no value model',
)
_NO_REFERENCE = UnusedIf(lambda key: not key.stage.keeps_reference, "no reference policy is kept")
_NEVER_RESET = UnusedIf(
    lambda key: (key.value or 0) >= key.stage.steps and not key.stage.unresolved,
    "the stage ends after {key.stage.steps} steps",
)
_MEASURED_ANYWAY = UnusedIf(
    lambda key: key.stage.measures_reference, "the objective itself needs the divergence"
)


class Value(FrozenModel):
    """The value model: a head on the policy's backbone, or a critic with its own.

    Its output layer starts at 0 in either case.
    """

    kind: Literal["head", "critic"] = "critic"
    """A head on the policy, or a critic with a backbone of its own."""
    name: str | None = None
    """Folder or hub name of the backbone of a critic; None: a copy of the policy."""
    optimizer: Optimizer | None = Optimizer(learning_rate=VALUE_LEARNING_RATE)
    """Of the critic, or of the head's own weights. The default rate is 1e-5, as in verl and
    OpenRLHF, since the output layer starts at 0, or the policy's if that is higher. None: the
    policy's optimizer."""
    warmup_steps: Index = 0
    """Steps at the start in which only the value model learns; the policy's schedule begins after
    them."""


class ReferenceConfig(FrozenModel):
    """The frozen reference policy of the divergence."""

    reset_every: Annotated[Count | None, _NO_REFERENCE, _NEVER_RESET] = None
    """Copy the policy to the reference every n steps."""


class MeasuredReferenceConfig(ReferenceConfig):
    """The frozen reference policy of the divergence."""

    measured: Annotated[bool, _MEASURED_ANYWAY] = False
    """Log the divergence to the reference even if it is not in the objective (β = 0)."""


class MixedDemonstrations(FrozenModel):
    """Examples that are imitated in the same optimizer steps (`algorithm.auxiliary`)."""

    data: Annotated[tuple[SFTData, ...], AsTuple, Field(min_length=1)]
    """Sets of examples, each with its weight; the assistant's turns are imitated."""
    batch_size: Count = 32
    """Examples of an optimizer step, drawn by the seed and the step."""
    max_tokens: Tokens | None = None
    """Longer examples are cut there; None: the model's context."""


class RolloutStage(StageConfig):
    """What a stage has that learns from its own rollouts by an algorithm."""

    learns_from_rollouts: ClassVar[bool] = True

    stage: str = "rl"
    name: StageName = "rl"
    tasks: Annotated[tuple[TaskSource, ...], AsTuple, Field(min_length=1)]
    prompts: Prompts = Prompts()
    rewards: Rewards = Rewards()
    algorithm: NamedAlgorithm
    rollout: Rollout = Rollout()
    steps: Index = 100
    """Steps, each of rollouts and the updates on them. 0 samples and scores one batch
    ([how to](howto/rollouts.md#sample-without-training))."""
    epochs: Count = 1
    """Passes over each step's batch (μ); the preset's unless set."""
    minibatches: Count = 1
    """Optimizer steps per epoch, each on a part of the step's completions; the preset's unless set.
    Parts differ by one completion at most."""
    token_budget: MicroBatchTokens = "auto"
    """Most model-input tokens of a micro-batch; a longer sequence is computed alone. On a CPU at
    most 640, unless more share a prompt. `auto` is 16,384, on one GPU [set by the first
    update](howto/memory.md#the-token-budget)."""
    optimizer: Optimizer = Optimizer()
    value: Annotated[Value, _NO_VALUE] = Value()
    reference: MeasuredReferenceConfig = MeasuredReferenceConfig()
    teacher: TeacherModel | None = None
    """The teacher of on-policy distillation."""
    demonstrations: MixedDemonstrations | None = None
    """The examples of the auxiliary term `demonstrations`."""
    evaluation: Evaluation = Evaluation()
    rollouts_every: Annotated[Index, PAST_THE_END] = 1
    """Write the rollouts of every n-th step; 0 writes none."""

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return with_graders(_with_value_rate(resolve_algorithm(data)))

    @model_validator(mode="after")
    def _sizes(self) -> RolloutStage:
        r = self.rollout
        if r.prompts_per_step * r.group_size > MAX_COMPLETIONS:
            raise ValueError(
                f"rollout.prompts_per_step = {r.prompts_per_step} times rollout.group_size = "
                f"{r.group_size} is more than {MAX_COMPLETIONS:,} completions in a step: lower one"
            )
        if self.algorithm.needs_groups and r.group_size < 2:
            raise ValueError(
                f'advantage "{self.algorithm.advantage.kind}" compares the completions of one '
                f"prompt: rollout.group_size = {r.group_size} leaves nothing to compare"
            )
        if r.dynamic_sampling and r.group_size < 2:
            raise ValueError(
                "rollout.dynamic_sampling drops groups without variance, and a group of one never "
                "has any: set rollout.dynamic_sampling = false, or rollout.group_size = 2 or more"
            )
        if r.dynamic_sampling and not self.algorithm.needs_reward:
            raise ValueError(
                f'advantage "{self.algorithm.advantage.kind}" reads no reward, and '
                "rollout.dynamic_sampling drops groups by their rewards: set "
                "rollout.dynamic_sampling = false"
            )
        if r.curriculum is not None and r.curriculum.low > r.curriculum.high:
            raise ValueError(
                f"rollout.curriculum.low = {r.curriculum.low} is above high = {r.curriculum.high}: "
                "no prompt would fit"
            )
        if r.async_level and (not self.algorithm.weighs or r.old_log_probs == "engine"):
            raise ValueError(
                f"rollout.async_level = {r.async_level} trains on rollouts of older weights: set "
                'algorithm.corrections.kind = "truncate" or "mask" and rollout.old_log_probs = '
                '"trainer", which weigh them, or rollout.async_level = 0'
            )
        if self.algorithm.corrections and r.old_log_probs == "engine":
            raise ValueError(
                "algorithm.corrections weigh the trainer's old log-probs against the engine's, and "
                'rollout.old_log_probs = "engine" makes them the same: set it to "trainer"'
            )
        if r.old_log_probs == "log_linear":
            self._check_log_linear()
        if r.dtype != "model" and not self.algorithm.weighs:
            both = "" if r.old_log_probs == "trainer" else ' and rollout.old_log_probs = "trainer"'
            raise ValueError(
                f'rollout.dtype = "{r.dtype}" samples with log-probs that are not the trainer\'s, '
                'and nothing corrects for that: set algorithm.corrections.kind = "truncate"'
                f'{both}, or rollout.dtype = "model"'
            )
        if self.value.kind == "head" and self.value.name:
            raise ValueError(
                "value.name is the backbone of a critic, and a head is on the policy's: set "
                'value.kind = "critic", or leave it out'
            )
        if not self.unresolved:
            self.check_steps()
        if self.minibatches > r.prompts_per_step * r.group_size:
            raise ValueError(
                f"minibatches = {self.minibatches} is more than the "
                f"{r.prompts_per_step * r.group_size} completions of a step"
            )
        return self

    @model_validator(mode="after")
    def _rewards_are_read(self) -> RolloutStage:
        advantage = self.algorithm.advantage
        for key in ("overlong_buffer", "length_penalty") if self.algorithm.needs_positive else ():
            if getattr(self.rollout, key):
                raise ValueError(
                    f'advantage "{advantage.kind}" divides by the mean reward, which a length '
                    f"penalty makes negative: set rollout.{key} = 0"
                )
        if advantage.reads_components and self.rollout.truncated_factor != 1:
            raise ValueError(
                f'advantage "{advantage.kind}" reads each reward as its function gives it: '
                "rollout.truncated_factor would be lost, leave it out"
            )
        for at, source in enumerate(self.rewards.functions if advantage.reads_components else ()):
            for key, unset in (("clip", None), ("normalise", "none"), ("gate_below", None)):
                if getattr(source, key) != unset:
                    raise ValueError(
                        f'advantage "{advantage.kind}" reads each reward as its function gives it: '
                        f"rewards.functions.{at}.{key} would be lost, leave it out"
                    )
        return self

    @model_validator(mode="after")
    def _teacher_is_read(self) -> RolloutStage:
        if self.algorithm.needs_teacher and self.teacher is None:
            raise ValueError(
                "the algorithm reads a teacher: set teacher.name to the folder or hub name of a "
                "model with the policy's tokenizer, or teacher.prompt to what the policy is shown "
                "as its own teacher"
            )
        if self.teacher is not None and not self.algorithm.needs_teacher:
            raise ValueError(
                "a teacher is set, but the algorithm reads none: "
                'set algorithm = "opd", or teacher = "none"'
            )
        if self.teacher is not None and self.teacher.url is not None:
            self._check_served(self.teacher.url)
        others = [term.kind for term in self.algorithm.auxiliary if term.of != "completions"]
        shown = self.teacher is not None and self.teacher.prompt is not None
        if others and shown and self.algorithm.loss_distillation is not None:
            raise ValueError(
                f'algorithm.auxiliary "{others[0]}" scores tokens that teacher.prompt has no place '
                'for: set distillation.place = "advantage", or leave one of the two out'
            )
        if self.teacher is not None and self.teacher.by_task:
            self._check_teachers()
        if self.teacher is not None and self.teacher.kept and self.reference.reset_every:
            raise ValueError(
                f'teacher.weights = "{self.teacher.weights}" is kept in the place of the reference '
                "policy, which reference.reset_every moves: drop that, or set teacher.weights = "
                '"live"'
            )
        averaged = self.teacher is not None and self.teacher.averaged
        if averaged and self.scores_reference:
            raise ValueError(
                'teacher.weights = "averaged" is kept in the place of the reference policy, which '
                'is read too: set teacher.weights = "live", or divergence = "none" and '
                "reference.measured = false"
            )
        return self

    def _check_served(self, url: str) -> None:
        """What a server's log-probabilities are not enough for."""
        if self.algorithm.loss_distillation is not None:
            raise ValueError(
                f"teacher.url = {url!r} gives log-probabilities of sampled tokens, and "
                'distillation.place = "loss" reads the vocabulary: set it to "advantage", or load '
                "the teacher (leave out teacher.url)"
            )
        if self.rollout.temperature != 1:
            raise ValueError(
                f"teacher.url = {url!r} gives log-probabilities at temperature 1, and those of the "
                f"policy are at rollout.temperature = {self.rollout.temperature:g}: set it to 1, "
                "or load the teacher (leave out teacher.url)"
            )

    @model_validator(mode="after")
    def _demonstrations_are_read(self) -> RolloutStage:
        if (self.algorithm.demonstrations is None) != (self.demonstrations is None):
            raise ValueError(
                "demonstrations.data holds the examples of algorithm.auxiliary.kind = "
                '"demonstrations": set both or none of the two'
            )
        if self.demonstrations and any(one.streams for one in self.demonstrations.data):
            raise ValueError(
                "demonstrations.data is drawn from as a whole, and a streamed set has no known "
                "end: leave out options.streaming"
            )
        return self

    def _check_teachers(self) -> None:
        if not self.algorithm.scores_teacher:
            raise ValueError(
                "teacher.by_task gives log-probabilities before the update, and distillation.place "
                '= "loss" reads the vocabulary: set it to "advantage", or leave out by_task'
            )

    def _check_log_linear(self) -> None:
        key, algorithm = 'rollout.old_log_probs = "log_linear"', self.algorithm
        if not self.rollout.async_level or not algorithm.weighs:
            raise ValueError(
                f"{key} lies between the policy and the older one that sampled, whose tokens are "
                "then weighed: set rollout.async_level = 2 and "
                'algorithm.corrections.kind = "truncate"'
            )
        if algorithm.ratio == "none":
            raise ValueError(f'ratio = "none" has no old policy: set {key} to "trainer"')
        divergence = algorithm.divergence
        before = (
            ('divergence.where = "reward"', algorithm.reward_divergence),
            ("divergence.adaptive", divergence is not None and divergence.adaptive),
            (f'advantage.kind = "{algorithm.advantage.kind}"', algorithm.advantage.reads_squares),
            ('distillation.place = "advantage"', algorithm.scores_teacher),
            ("reference.measured", self.reference.measured),
            *((f'corrections.kind = "{kind}"', True) for kind in ("normalise", "custom")
              if any(one.kind == kind for one in algorithm.corrections)),
        )  # fmt: skip
        for name in (name for name, reads in before if reads):
            raise ValueError(
                f"{name} reads log-probs before the update, and {key} computes none: set it to "
                '"trainer"'
            )

    @property
    def imitated(self) -> ImitationSource | None:
        if self.demonstrations is None:
            return None
        return ImitationSource(
            data=self.demonstrations.data,
            batch_size=self.demonstrations.batch_size,
            max_tokens=self.demonstrations.max_tokens,
            template_keywords=self.prompts.chat_template,
            key="demonstrations.",
        )

    @property
    def samples_only(self) -> bool:
        """Whether the stage samples and scores one batch, and trains on nothing."""
        return not (self.steps or self.unresolved)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        if self.samples_only:
            return ()
        own = None if self.algorithm.value is None else self.value.optimizer
        return (self.optimizer,) if own is None else (self.optimizer, own)

    @property
    def sampling(self) -> SamplingSource:
        return SamplingSource(
            key="",
            tasks=self.tasks,
            prompts=self.prompts,
            rewards=self.rewards,
            rollout=self.rollout,
            train_prompts=max(self.steps, 1) * self.rollout.prompts_per_step,
            validation_prompts=0 if self.samples_only else self.evaluation.prompts,
            seed_name=(),
            first_draw=("rollout", 1, 0),
            algorithm=self.algorithm,
            evaluation=self.evaluation,
            teacher=self.teacher,
            epochs=self.epochs,
            ratio_stays_one=self.ratio_stays_one,
            own_ratio=self.own_ratio,
        )

    @property
    def value_model(self) -> tuple[str | None, Optimizer | None]:
        has_value = self.algorithm.value is not None
        return (self.value.name, self.value.optimizer) if has_value else (None, None)

    @property
    def trains_critic(self) -> bool:
        return self.algorithm.value is not None and self.value.kind == "critic"

    @property
    def prompts_in_step(self) -> int:
        return self.rollout.prompts_per_step

    def with_rollout(self, change: Callable[[Rollout, Sequence[TaskSource]], Rollout]) -> Self:
        return self.model_copy(update={"rollout": change(self.rollout, self.tasks)})

    def on_examples(
        self, *, tasks: tuple[TaskSource, ...], rewards: Rewards, prompts: int | None, **_: Any
    ) -> Self:
        taken = min(self.rollout.prompts_per_step, prompts or self.rollout.prompts_per_step)
        sampled = {"prompts_per_step": taken, "ignore_eos": True, "stop": (), "stop_ids": ()}
        sampled |= {"mask_truncated": False, "program": None}
        sampled |= {"engine": "native"} if self.rollout.replayed is not None else {}
        return self.model_copy(
            update={
                "tasks": tasks,
                "rewards": rewards,
                "rollout": self.rollout.model_copy(update=sampled),
                "minibatches": min(self.minibatches, taken * self.rollout.group_size),
                "value": self.value.model_copy(update={"warmup_steps": 0}),
                "evaluation": Evaluation(prompts=0),
            }
        )

    def check_steps(self) -> None:
        warmup = self.value.warmup_steps
        if self.algorithm.value is not None and warmup >= self.steps > 0:
            raise ValueError(
                f"value.warmup_steps = {warmup} leaves the policy none of the stage's "
                f"{self.steps} steps: set it lower, or steps higher"
            )

    @property
    def evaluation_interval(self) -> int:
        return self.evaluation.every

    @property
    def evaluation_metrics(self) -> tuple[str, ...]:
        return self.evaluation.metrics

    @property
    def compares(self) -> bool:
        return self.algorithm.needs_groups

    @property
    def keeps_reference(self) -> bool:
        return self.scores_reference or (self.teacher is not None and self.teacher.kept)

    @property
    def scores_reference(self) -> bool:
        """Whether the divergence to the reference is in the objective, or measured."""
        return self.algorithm.needs_reference or self.reference.measured

    def explain(self, lora: bool) -> Explanation:
        from keel.algorithms.explain import explain_algorithm
        from keel.algorithms.terms import Setting

        rollout = self.rollout
        learned = any(one.function in LEARNED for one in self.rewards.functions)
        setting = Setting(
            group_size=rollout.group_size,
            prompts_per_step=rollout.prompts_per_step,
            max_tokens=rollout.max_tokens,
            epochs=self.epochs,
            minibatches=self.minibatches,
            reward="model" if learned else "rule",
            value=self.value.kind,
            lora=lora,
            temperature=rollout.temperature,
            dynamic_sampling=rollout.dynamic_sampling,
            overlong_buffer=rollout.overlong_buffer,
            length_penalty=rollout.length_penalty,
            truncated_factor=rollout.truncated_factor,
            mask_truncated=rollout.mask_truncated,
            old_log_probs=rollout.old_log_probs,
            reference_reset_every=self.reference.reset_every,
            reference_measured=self.reference.measured,
            teacher="model" if self.teacher is None else self.teacher.where,
            teachers=1 if self.teacher is None else len(self.teacher.each),
        )
        return explain_algorithm(self.algorithm, preset=self.algorithm.preset, context=setting)

    def check_processes(self, model: Model, cluster: Cluster) -> None:
        """What a dtype, several processes, and more than one step ahead cannot do."""
        averaged = self.teacher is not None and self.teacher.averaged
        if averaged and model.dtype == "bfloat16" and model.lora is None:
            raise ValueError(
                f'{self.name}.teacher.weights = "averaged" does not go with model.dtype = '
                '"bfloat16", in which a share of a step is rounded away: set model.dtype = '
                '"float32", or model.lora'
            )
        resets = averaged or self.reference.reset_every
        if cluster.processes > 1 and model.lora is not None and resets:
            which = "teacher.weights" if averaged else "reference.reset_every"
            raise ValueError(
                f"{self.name}.{which} with model.lora does not go with "
                f"cluster.processes = {cluster.processes}: leave one of them out"
            )
        elsewhere = cluster.processes > 1 or cluster.ray is not None
        key = None if model.lora is None else model.lora.unlike_plain()
        if elsewhere and key is not None:
            raise ValueError(
                f"model.lora.{key} does not go with cluster.processes > 1 or cluster.ray, which "
                "are untested with it: leave one of them out"
            )
        if elsewhere and self.rollout.replayed is not None:
            raise ValueError(
                f'{self.name}.rollout.engine = "stored" does not go with cluster.processes > 1 or '
                "cluster.ray: leave one of them out"
            )
        if key not in (None, "dropout") and self.rollout.server is not None:
            raise ValueError(
                f'model.lora.{key} does not go with {self.name}.rollout.engine = "vllm", which is '
                'sent the factors of plain adapters: set it to "native"'
            )
        if cluster.processes > 1:
            self._check_sharded(model)
        decides = "dynamic_sampling" if self.rollout.dynamic_sampling else "curriculum"
        if self.rollout.async_level > 1 and self.rollout.in_order:
            raise ValueError(
                f"{self.name}.rollout.async_level = {self.rollout.async_level} does not go with "
                f"rollout.{decides}, by which a step decides which prompts are left for the next: "
                "set rollout.async_level = 1"
            )

    def _check_sharded(self, model: Model) -> None:
        """What weights that are spread over several processes cannot have."""
        several = "does not go with cluster.processes > 1"
        for key in ("optimizer", "value.optimizer"):
            choice = self.optimizer if key == "optimizer" else self.value.optimizer
            if choice is not None and choice.kind != "adamw":
                raise ValueError(
                    f"{self.name}.{key}.kind = {choice.kind!r} {several}, whose weights are "
                    'sharded: set it to "adamw"'
                )
            if choice is not None and choice.offload != "none":
                raise ValueError(
                    f"{self.name}.{key}.offload = {choice.offload!r} {several}: set "
                    "cluster.offload instead"
                )
        if model.quantisation is not None:
            raise ValueError(f"model.quantisation {several}: leave one of them out")

    @property
    def single_update(self) -> bool:
        """Whether each batch takes one optimizer step from the weights that its old log-probs are
        computed with, so that every importance ratio is 1."""
        return self.epochs * self.minibatches == 1 and self.rollout.old_log_probs == "trainer"

    @property
    def own_ratio(self) -> bool:
        """Whether the loss may take the log-probs of its single update for the old ones: no term
        compares them with others."""
        divergence = self.algorithm.divergence
        adaptive = divergence is not None and divergence.adaptive is not None
        compared = bool(self.algorithm.corrections) or self.algorithm.whole_batch
        return self.single_update and not compared and not adaptive

    @property
    def measures_reference(self) -> bool:
        """Whether the objective itself needs the divergence to the reference before an update."""
        divergence = self.algorithm.divergence
        return (
            divergence is not None
            and self.algorithm.needs_reference
            and self.rollout.old_log_probs == "trainer"
            and (
                self.epochs * self.minibatches > 1
                or divergence.where == "reward"
                or divergence.adaptive is not None
            )
        )

    @property
    def ratio_stays_one(self) -> bool:
        """Whether the loop gives the ratio no chance to move, in an objective made for one that
        moves. Presets that their papers run on policy (GRPO) are not meant."""
        algorithm = self.algorithm
        if algorithm.ratio == "none" or not self.single_update:
            return False
        preset = PRESETS[algorithm.preset]
        on_policy = preset.epochs * preset.minibatches == 1
        own = (
            algorithm.ratio == preset.algorithm.ratio
            and algorithm.surrogate.kind == preset.algorithm.surrogate.kind
        )
        to_old = algorithm.divergence is not None and algorithm.divergence.to == "old"
        return (algorithm.surrogate.bounds_ratio and not (on_policy and own)) or to_old


def _with_value_rate(stage: dict[str, Any]) -> dict[str, Any]:
    """The stage, its value model's learning rate not below the policy's. Idempotent."""
    algorithm = stage.get("algorithm")
    if not isinstance(algorithm, dict) or not algorithm.get("value"):
        return stage
    policy, value = stage.get("optimizer", {}), stage.get("value", {})
    if not isinstance(policy, dict) or not isinstance(value, dict):
        return stage
    own = value.get("optimizer", {})
    rate = policy.get("learning_rate", 0.0)
    if not isinstance(own, dict) or "learning_rate" in own or not isinstance(rate, float):
        return stage
    rate = max(VALUE_LEARNING_RATE, rate)
    return {**stage, "value": {**value, "optimizer": {**own, "learning_rate": rate}}}
