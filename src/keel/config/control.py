"""The recipe of classic control: environments, networks, the two families of learners, loading.

One stage, `q_learning` or `policy_gradient`; algorithms have the same keys as for language models.
`recipes/control/ppo.toml` holds what PPO starts from anywhere, `ppo.CartPole-v1.toml` what is tuned
for that environment; what the user sets goes on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import Field, model_validator

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm, Preset
from keel.algorithms.terms import AsTuple, FrozenModel, Positive, Unit
from keel.config.entry import DEFAULT_KIND, stage_kind
from keel.config.fields import Count, Index, Seed, Threads, Width, unknown
from keel.config.layers import DEFAULT_PRESET, gather, layer, merge, overlay, resolve_algorithm
from keel.config.load import (
    SHIPPED,
    names_in,
    parse_toml,
    read_toml,
    split_override,
    validated,
)
from keel.config.rl import ReferenceConfig
from keel.config.sources import NamedAlgorithm
from keel.config.stage import Checkpoints, Optimizer
from keel.types import KeelError

FOLDER = SHIPPED / "control"


class Environment(FrozenModel):
    """The Gymnasium environment, and how many of it are stepped together."""

    id: str
    """A registered id, or `module:Id-v0`, which imports the module that registers it."""
    count: Count = 1
    """Number of environments that are stepped together."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`, such as max_episode_steps."""
    vectorization: Literal["sync", "async"] = "sync"
    """All environments in this process, or each in its own process (for slow environments)."""

    @model_validator(mode="after")
    def _no_pictures(self) -> Environment:
        if "render_mode" in self.options:
            raise ValueError(
                "environment.options.render_mode is set by Keel, for the film alone: leave it out"
            )
        return self


class Network(FrozenModel):
    """A multilayer perceptron, one for the policy and one for its values."""

    hidden: Annotated[tuple[Width, ...], AsTuple] = (64, 64)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of the hidden layers."""


class ReturnEvaluation(FrozenModel):
    """Returns of the greedy policy (for a Gaussian, its mean) in separate environments."""

    every: Index = 10_000
    """Environment steps between evaluations; 0: only at the end."""
    episodes: Index = 20
    """Number of episodes; 0: no evaluation."""
    longest: Count = 10_000
    """An episode is cut after this many steps."""


class Watching(FrozenModel):
    """What a run leaves to look at."""

    film: bool = True
    """Write a GIF of one greedy episode at the end, if the environment can be rendered."""


class Exploration(FrozenModel):
    """ε of ε-greedy, falling in a line from `initial` to `final` over a `share` of the steps."""

    initial: Unit = 1.0
    """ε at the start."""
    final: Unit = 0.05
    """ε after the decay."""
    share: Unit = 0.2
    """Share of the steps over which ε decays linearly."""

    def epsilon(self, step: int, steps: int) -> float:
        """ε at an environment step (from 0) of `steps`."""
        done = min(step / max(self.share * steps, 1), 1.0)
        return self.initial + (self.final - self.initial) * done


class ReplayConfig(FrozenModel):
    """The replay buffer of Q-learning, sampled uniformly with replacement."""

    capacity: Count = 50_000
    """Transitions that are kept."""
    warmup: Index = 1_000
    """Environment steps with random actions before the first update."""
    batch_size: Count = 128
    """Transitions in an optimizer step."""


class Target(FrozenModel):
    """The target network: every `every` environment steps it moves by `rate` to the online one."""

    every: Count = 500
    """Environment steps between updates of the target network."""
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 copies the online network; less is Polyak averaging."""


class QLearningStage(FrozenModel):
    """Deep Q-learning (DQN, Mnih et al. 2015), with its double and n-step variants."""

    stage: Literal["q_learning"] = "q_learning"
    name: str = "q_learning"
    """Name of the stage in files and metrics."""
    environment: Environment
    steps: Count = 50_000
    """Environment steps in total."""
    row_every: Count = 1_000
    """Environment steps per record of metrics.jsonl; checkpoints count records."""
    gamma: Unit = 0.99
    """Discount factor."""
    double: bool = False
    """The online network chooses the next action, the target network evaluates it."""
    n_step: Count = 1
    """Rewards in a bootstrapped return."""
    loss: Literal["squared", "huber"] = "squared"
    """Loss of the temporal-difference error."""
    network: Network = Network(activation="relu")
    replay: ReplayConfig = ReplayConfig()
    exploration: Exploration = Exploration()
    update_every: Count = 4
    """Environment steps between updates."""
    updates: Count = 1
    """Optimizer steps per update."""
    target: Target = Target()
    optimizer: Optimizer = Optimizer(learning_rate=5e-4, min_lr_ratio=0.0, max_grad_norm=10.0)
    """Warm-up and schedule count environment steps."""
    evaluation: ReturnEvaluation = ReturnEvaluation()
    checkpoints: Checkpoints = Checkpoints(every=10)
    watching: Watching = Watching()

    @model_validator(mode="after")
    def _sizes(self) -> QLearningStage:
        if self.replay.capacity < self.environment.count * (self.n_step + 1):
            raise ValueError(
                f"replay.capacity = {self.replay.capacity} holds less than {self.n_step + 1} steps "
                f"of each of {self.environment.count} environments: raise it"
            )
        if self.replay.warmup >= self.steps:
            raise ValueError(
                f"replay.warmup = {self.replay.warmup} leaves none of {self.steps} steps to learn "
                "in: lower it"
            )
        return self


class Normalisation(FrozenModel):
    """Running statistics, updated after each iteration."""

    observations: bool = False
    """Subtract their running mean, divide by the standard deviation, clip at ±10."""
    rewards: bool = False
    """Divide by the standard deviation of the discounted return, clip at ±10."""


class PolicyGradientStage(FrozenModel):
    """Policy gradients: collect, estimate advantages, take optimizer steps; again."""

    stage: Literal["policy_gradient"] = "policy_gradient"
    name: str = "policy_gradient"
    """Name of the stage in files and metrics."""
    environment: Environment
    algorithm: NamedAlgorithm
    steps: Count = 100_000
    """Environment steps in total; the last iteration may exceed them."""
    rollout_steps: Count = 128
    """Steps of each environment in an iteration, for advantages that bootstrap (gae, td, n_step).
    """
    rollout_episodes: Count | None = None
    """Episodes in an iteration, for advantages that need whole ones; None: one per environment."""
    group_size: Count = 1
    """Episodes with the same start state, for advantages that compare them."""
    epochs: Count = 1
    """Passes over the steps of an iteration; the preset's unless set."""
    minibatches: Count = 1
    """Optimizer steps per epoch, on steps in random order, or on whole episodes if the algorithm
    reads sequences."""
    target_kl: Positive | None = None
    """End the updates of an iteration once the estimated KL(old‖π) of a mini-batch exceeds this."""
    network: Network = Network()
    log_std: Annotated[float, Field(ge=-20, le=5)] = 0.0
    """Initial logarithm of the standard deviation of a Gaussian policy (continuous actions)."""
    normalisation: Normalisation = Normalisation()
    optimizer: Optimizer = Optimizer(
        learning_rate=3e-4, min_lr_ratio=0.0, epsilon=1e-5, max_grad_norm=0.5
    )
    """Warm-up and schedule count environment steps."""
    reference: ReferenceConfig = ReferenceConfig()
    evaluation: ReturnEvaluation = ReturnEvaluation()
    checkpoints: Checkpoints = Checkpoints(every=20)
    watching: Watching = Watching()

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        resolved = resolve_algorithm(data)
        return {**data, **{k: resolved[k] for k in ("algorithm", "epochs") if k in resolved}}

    @model_validator(mode="after")
    def _on_environments(self) -> PolicyGradientStage:
        algorithm = self.algorithm
        advantage = algorithm.advantage
        if algorithm.distillation is not None:
            raise ValueError(
                "algorithm.distillation has a language model as teacher, not environments: leave "
                "it out"
            )
        if algorithm.surrogate.reads_groups:
            raise ValueError(
                f'surrogate "{algorithm.surrogate.kind}" is for completions, not environments: '
                "choose another"
            )
        if _of_completions(algorithm):
            raise ValueError(
                f'advantage "{advantage.kind}" is for completions, not environments: choose another'
            )
        if any(term.of != "completions" for term in algorithm.auxiliary):
            raise ValueError(
                "algorithm.auxiliary imitates texts, and environments have none: leave it out"
            )
        if algorithm.needs_groups and self.group_size < 2:
            raise ValueError(
                f'advantage "{algorithm.advantage.kind}" compares episodes from one start state: '
                f"group_size = {self.group_size} leaves nothing to compare"
            )
        if algorithm.bootstraps and self.group_size > 1:
            raise ValueError(
                f'advantage "{algorithm.advantage.kind}" compares no episodes: group_size = '
                f"{self.group_size} would only give copies one start state, set it to 1"
            )
        if self.group_size > 1 and self.episodes % self.group_size:
            raise ValueError(
                f"{self.episodes} episodes an iteration (rollout_episodes) do not part into groups "
                f"of {self.group_size}: make rollout_episodes a multiple of group_size"
            )
        if self.minibatches > self.parts:
            raise ValueError(
                f"minibatches = {self.minibatches} is more than the {self.parts} "
                f"{'steps' if algorithm.per_action else 'episodes'} of an iteration"
            )
        if algorithm.needs_reference and self.normalisation.observations:
            raise ValueError(
                "normalisation.observations moves what a frozen reference policy would see: set it "
                'to false, or algorithm.divergence = "none"'
            )
        return self

    @property
    def parts(self) -> int:
        """Into how many mini-batches an iteration can be sure to part."""
        steps = self.rollout_steps if self.algorithm.bootstraps and self.algorithm.per_action else 1
        return steps * (self.environment.count if self.algorithm.bootstraps else self.episodes)

    @property
    def episodes(self) -> int:
        """Episodes to an iteration, if the advantage needs whole ones."""
        return self.rollout_episodes or self.environment.count


ControlStage = Annotated[Union[QLearningStage, PolicyGradientStage], Field(discriminator="stage")]


class ControlRecipe(FrozenModel):
    """One experiment on one environment."""

    name: str = "control"
    """Name of the run folder."""
    description: str = ""
    """Printed when the run starts."""
    seed: Seed = 0
    """Every random number is a function of it."""
    threads: Threads | None = 1
    """CPU threads; small networks are fastest on one."""
    stages: Annotated[tuple[ControlStage, ...], AsTuple, Field(min_length=1, max_length=1)]

    @property
    def stage(self) -> QLearningStage | PolicyGradientStage:
        """The one stage there is."""
        return self.stages[0]


# ---------------------------------------------------------------- loading


def load_control(
    source: str | Path, environment: str | None = None, overrides: Sequence[str] = ()
) -> ControlRecipe:
    """The recipe of an algorithm on an environment, or of a TOML file, with overrides on top.

    Raises KeelError, in one line, on whatever is wrong with it.
    """
    data = overlay(_read(str(source), environment), map(split_override, overrides))
    if environment is not None:
        data = layer(data, {"environment": {"id": environment}})
    return validated(data, ControlRecipe)


def algorithms() -> list[str]:
    """What `keel control` knows by name."""
    own = {name for name in names_in(FOLDER) if "." not in name}
    rows = {name for name, preset in PRESETS.items() if not _of_completions(preset.algorithm)}
    return sorted(own | rows)


def _of_completions(algorithm: Algorithm) -> bool:
    """Whether a term reads what only completions of a language model have."""
    advantage = algorithm.advantage
    reads = (advantage.reads_components, advantage.reads_squares, advantage.reads_turns)
    needs = (algorithm.needs_greedy, algorithm.needs_steps, algorithm.needs_teacher)
    whole = advantage.stateful or algorithm.surrogate.reads_groups
    return any(reads) or any(needs) or whole or algorithm.demonstrations is not None


def tuned() -> list[tuple[str, str]]:
    """The pairs of algorithm and environment whose settings are tuned."""
    parts = (name.partition(".") for name in names_in(FOLDER))
    return sorted((algorithm, environment) for algorithm, dot, environment in parts if dot)


def _read(source: str, environment: str | None) -> dict[str, Any]:
    if source.endswith(".toml") or "/" in source:
        return _read_file(source)
    if source not in PRESETS and source not in algorithms():
        raise KeelError(unknown("algorithm", source, algorithms()))
    if environment is None:
        raise KeelError(f"{source} on which environment? name one with --env, as in CartPole-v1")
    name = f"{source}-{environment.rpartition(':')[2]}".replace("/", "-")
    start = {} if source in names_in(FOLDER) else _of_preset(PRESETS[source])
    data = {"name": name, "stages": [start]}
    for name in (source, f"{source}.{environment}"):
        path = FOLDER / f"{name}.toml"
        if path.is_file():
            data = layer(data, parse_toml(path.read_text(encoding="utf-8"), name))
    return data


def _read_file(source: str) -> dict[str, Any]:
    """A recipe of one's own, over what it extends, or over what its algorithm starts from."""
    own = {"name": Path(source).stem, **read_toml(source)}
    base = own.pop("extends", None)
    if base is not None:
        algorithm, _, environment = str(base).partition(".")
        if algorithm not in algorithms():
            raise KeelError(unknown("algorithm to extend", algorithm, algorithms()))
        below = _read(algorithm, environment or "any")
        place = {"environment": {"id": environment}} if environment else {}
        return layer(layer(below, place), own)
    data = gather(own)
    stages = data["stages"]
    first = stages[0] if isinstance(stages, list) and stages else {}
    if not isinstance(first, dict):
        return data
    if stage_kind(first.get("stage", DEFAULT_KIND)) is not None:
        raise KeelError(f"{source} is a recipe of keel train, not of keel control")
    if first["stage"] != "policy_gradient":
        return data
    row = first.get("algorithm", DEFAULT_PRESET)
    preset = row.get("preset", DEFAULT_PRESET) if isinstance(row, dict) else row
    if preset not in PRESETS:
        return data
    return {**data, "stages": [merge(_of_preset(PRESETS[preset]), first)]}


def _of_preset(preset: Preset) -> dict[str, Any]:
    """A preset of language models as it goes on environments: γ < 1, and no reference policy."""
    row: dict[str, Any] = {"preset": preset.name}
    if "gamma" in type(preset.algorithm.advantage).model_fields:
        row["advantage"] = {"gamma": 0.99}
    if preset.algorithm.divergence is not None and preset.algorithm.divergence.to == "reference":
        row["divergence"] = "none"
    if preset.algorithm.value is not None:
        row["value"] = {"coefficient": 1.0, "clip": "none"}
    return {
        "stage": "policy_gradient",
        "algorithm": row,
        "environment": {"count": 8},
        "group_size": 8 if preset.algorithm.needs_groups else 1,
    }
