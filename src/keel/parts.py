"""The parts of a training loop of your own: `keel.load_policy`, `keel.make_engine` and the rest.

One step, with `policy`, `algorithm`, `engine` and `learner` made by the functions below:

    groups = engine.sample(prompts, 8, keel.Sampling(max_tokens=64), seed=step)
    batch = learner.score(keel.from_groups(groups, policy.device), old=True, reference=True)
    estimates = keel.estimate(algorithm, batch, rewards, beta)      # one reward a completion
    ready = keel.prepare(algorithm, batch, estimates, max_tokens=64)
    losses = learner.update(algorithm, ready, beta, (rate, rate))   # one optimizer step
    engine.sync(learner.weights())

`learner.score` is for an algorithm that reads the policy before the update, a reference, or values;
GRPO without a divergence and with one update a batch needs none of them. `docs/howto/own-loop.md`
has variations. Evaluations, records, checkpoints and resuming are those of `keel.train`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.config.fields import unknown
from keel.config.layers import DEFAULT_PRESET, merge
from keel.config.model import Model
from keel.config.sources import Rollout
from keel.config.stage import Optimizer
from keel.learn.learner import Learner
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.models import policy as policies
from keel.models.chat import Encoder
from keel.models.policy import Policy
from keel.models.reference import critic_from_policy, reference_for
from keel.training.setup import rollout_engine
from keel.types import Content, Engine, KeelError, Prompt


def load_policy(model: str | Path | Mapping[str, Any], seed: int = 0) -> Policy:
    """The policy: a folder, a hub name, or the table `model` of a recipe as a dict.

    `seed` decides the weights of a model that is built and of a LoRA adapter. Raises KeelError if
    the model cannot be loaded or trained.
    """
    table = model if isinstance(model, Mapping) else {"name": str(model)}
    return policies.load_policy(Model(**table), seed)


def load_algorithm(name: str = DEFAULT_PRESET, **terms: Any) -> Algorithm:
    """A preset's algorithm with other `terms`, as a recipe's table `algorithm` has them.

    `load_algorithm("grpo", divergence=None)`, `load_algorithm("ppo", surrogate={"low": 0.1})`.
    """
    if name not in PRESETS:
        raise KeelError(unknown("algorithm", name, PRESETS))
    return Algorithm.model_validate(merge(PRESETS[name].algorithm.model_dump(), terms))


def make_engine(policy: Policy, **rollout: Any) -> Engine:
    """What samples with the policy's weights: `engine.sample(prompts, n, sampling, seed)` gives a
    group of `n` completions for each prompt.

    `rollout` are keys of a recipe's table of that name: `engine`, `max_num_seqs`, `vllm`.
    """
    return rollout_engine(policy, Rollout(**rollout))


def make_learner(
    policy: Policy,
    algorithm: Algorithm,
    *,
    optimizer: Mapping[str, Any] | None = None,
    token_budget: int = 16_384,
    temperature: float = 1.0,
) -> Learner:
    """The policy with its optimizer, and the reference and the critic that the algorithm needs.

    `optimizer` is a recipe's table of that name, `token_budget` the largest micro-batch in tokens,
    `temperature` the one that completions are sampled with.
    """
    choice = Optimizer(**(optimizer or {}))
    critic = None if algorithm.value is None else critic_from_policy(policy)
    return Learner(
        policy=policy,
        optimizer=WeightOptimizer(trainable(policy), choice),
        budget=TokenBudget(token_budget),
        reference=reference_for(policy) if algorithm.needs_reference else None,
        critic=critic,
        value_optimizer=None if critic is None else WeightOptimizer(trainable(critic), choice),
        temperature=temperature,
    )


def encode_prompts(policy: Policy, prompts: Sequence[Content | Prompt]) -> list[Prompt]:
    """Texts or lists of messages as prompts in tokens; texts go without the chat template.

    A `keel.Prompt` keeps its id and columns. Raises KeelError for one that cannot be encoded or
    does not fit the model's context.
    """
    encode = Encoder(policy.tokenizer, policy.context, raw=("",), served=policy.served)
    found = []
    for number, content in enumerate(prompts):
        given = content if isinstance(content, Prompt) else Prompt(str(number), content)
        encoded = encode(given)
        if encoded is None:
            raise KeelError(f"prompt {given.id!r} is longer than the context: shorten it")
        found.append(encoded)
    return found
