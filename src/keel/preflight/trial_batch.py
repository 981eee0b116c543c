"""One batch, sampled as the first step would sample it, within what a machine does in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from keel.data.tasks import PromptStream
from keel.engines.registry import build_engine
from keel.models.families import context_length
from keel.models.policy import Policy
from keel.preflight.prompt_stats import PromptStats, SamplingPlan
from keel.rewards.scorer import Scorer
from keel.training.rollout import Sampler
from keel.types import Group, Prompt

GROUPS = 8
"""So many prompts at the least: a share of eight groups says whether it is most of them."""
MEMBERS = 4
"""So many completions of each at the least, where the recipe asks for more."""
LONGER = 4
"""How many times the budget cut completions are followed, to see where they end."""
SHORTEST = 32
"""Tokens that are sampled at the least, however large the model."""
OPERATIONS: Final = {"cpu": 4e12, "cuda": 4e15}
"""What a batch may cost, in floating-point operations: half a minute on a laptop at the most."""
BYTES: Final = {"cpu": 2e11, "cuda": 4e13}
"""What of weights a batch may read: every step of its decoding reads all of them once."""
LAYERS: Final = {"cpu": 16_000, "cuda": 40_000}
"""Layers that its decoding may go through: each takes half a millisecond or more, however small."""
TRIED = 64
"""Tokens of answers that only try the rewards out."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of a step is sampled. Fewer `tokens` than the budget cut completions early."""

    prompts: int
    members: int
    tokens: int


@dataclass(frozen=True, eq=False)
class TrialBatch:
    """Groups of the first step's prompts, and how long those came to be that were cut.

    `lengths` and `ended` are of each completion in order, after some of the cut ones were followed
    further. `whole`: no completion was cut before the recipe's own budget.
    """

    groups: tuple[Group, ...]
    size: Size
    budget: int
    lengths: tuple[int, ...]
    ended: tuple[bool, ...]

    @property
    def whole(self) -> bool:
        return self.size.tokens >= self.budget

    @property
    def completions(self) -> int:
        return sum(len(group.completions) for group in self.groups)

    @property
    def cut(self) -> int:
        """How many completions did not end within what was sampled."""
        return sum(c.finish == "length" for group in self.groups for c in group.completions)


@dataclass(frozen=True, slots=True)
class Load:
    """What decoding with a model costs: its parameters, the bytes of each, its layers."""

    parameters: int
    width: int
    layers: int
    device: str

    @property
    def steps(self) -> int:
        """How many steps of decoding take seconds."""
        read = BYTES[self.device] / (self.width * self.parameters)
        return max(SHORTEST, int(min(read, LAYERS[self.device] / self.layers)))


def load_of(policy: Policy) -> Load:
    """What decoding with the policy costs."""
    weights = list(policy.model.parameters())
    return Load(
        sum(p.numel() for p in weights),
        weights[0].element_size(),
        int(policy.model.config.get_text_config().num_hidden_layers),
        policy.device.type,
    )


def size_for(prompts: int, members: int, budget: int, load: Load) -> Size:
    """As much of a step as seconds allow: whole, or fewer prompts, then fewer answers to each, then
    shorter ones. A function of its arguments, so that a recipe is always looked at alike.
    """
    tokens = OPERATIONS[load.device] / (2 * load.parameters)
    length = min(budget, load.steps)
    fits = max(1, int(tokens / length))
    if prompts * members > fits:
        prompts = min(prompts, max(GROUPS, fits // members))
    if prompts * members > fits:
        members = min(members, max(MEMBERS, fits // prompts))
    if prompts * members * length > tokens:
        length = min(length, max(SHORTEST, int(tokens / (prompts * members))))
    return Size(prompts, members, length)


def sample(
    policy: Policy, plan: SamplingPlan, source: PromptStats, scorer: Scorer, *, trial: bool
) -> TrialBatch:
    """Completions of the first prompts, the same as those of a run's first step.

    A `trial` is of a policy that is yet to be trained: a few short ones, to try the rewards on.
    """
    rollout, load = plan.rollout, load_of(policy)
    prompts = min(GROUPS, len(source.first)) if trial else len(source.first)
    budget = min(TRIED, rollout.max_tokens) if trial else rollout.max_tokens
    size = size_for(prompts, rollout.group_size, budget, load)
    engine = build_engine(
        rollout.engine,
        model=policy.model,
        tokenizer=policy.tokenizer,
        max_rows=rollout.max_rows,
        autocast=policy.autocast,
        dtype=rollout.dtype,
    )
    sampler = Sampler(
        engine=engine,
        tokenizer=policy.tokenizer,
        tasks=dict(source.tasks),
        stream=PromptStream(list(source.tasks.values()), [1.0] * len(source.tasks), 0),
        scorer=scorer,
        config=rollout,
        seed=plan.seed,
    )
    sampling = replace(sampler.sampling, max_tokens=size.tokens)

    groups = sampler.sample(source.first[: size.prompts], size.members, sampling, plan.first_seed)
    lengths = [len(c) for group in groups for c in group.completions]
    ended = [c.finish != "length" for group in groups for c in group.completions]
    room = min(size.tokens * LONGER, load.steps)
    if not trial and size.tokens == rollout.max_tokens:
        context = context_length(policy.model)
        _follow(sampler, groups, size, plan.first_seed, (room, context), (lengths, ended))
    return TrialBatch(tuple(groups), size, rollout.max_tokens, tuple(lengths), tuple(ended))


def _follow(
    sampler: Sampler,
    groups: Sequence[Group],
    size: Size,
    seed: int,
    bounds: tuple[int, int | None],
    found: tuple[list[int], list[bool]],
) -> None:
    """Sample the prompts with most cut completions on to a larger budget, and write down the ends.

    `bounds` are that budget and the model's context, `found` the lengths and ends so far. The first
    `size.prompts / LONGER` of the prompts are followed, so that it costs about as much as the batch
    did. A completion depends on its prompt, place and seed, so that it begins as it did before.
    """
    lengths, ended = found
    room, context = bounds
    n = size.members
    cut = {at: ended[at * n : (at + 1) * n].count(False) for at in range(len(groups))}
    chosen = sorted((at for at in cut if cut[at]), key=lambda at: -cut[at])
    chosen = sorted(chosen[: math.ceil(len(groups) / LONGER)])
    prompts: list[Prompt] = [groups[at].prompt for at in chosen]
    if context is not None and prompts:
        room = min([room, *(context - len(p.tokens) for p in prompts)])
    if not prompts or room <= size.tokens:
        return
    # An id that comes twice has a stream of its own for each time.
    ids = [group.prompt.id for group in groups]
    if len(set(ids)) < len(ids):
        return
    longer = sampler.sample(prompts, n, replace(sampler.sampling, max_tokens=room), seed)
    for at, group in zip(chosen, longer, strict=True):
        for member, completion in enumerate(group.completions):
            lengths[at * n + member] = len(completion)
            ended[at * n + member] = completion.finish != "length"
