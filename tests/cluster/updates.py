"""Ten updates on ragged batches in one of several processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from keel.algorithms.auxiliary import DemonstrationNLL, PositiveNLL, Replies
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.config.model import Autocast, BuildModel, Lora, Model
from keel.config.stage import Optimizer
from keel.learn.advantages import estimate, outcome
from keel.learn.batch import from_groups
from keel.learn.learner import Learner
from keel.learn.loss import demonstrated
from keel.learn.memory import TokenBudget
from keel.learn.optimizer import WeightOptimizer, trainable
from keel.learn.ranks import ONE, Ranks
from keel.models.policy import load_policy
from keel.models.reference import FrozenPolicy, critic_from_policy, reference_for
from keel.models.sharded import shard, whole
from keel.training.rl import Minibatch, minibatches
from keel.types import Completion, Group, Prompt, RewardResult

Device = Literal["cpu", "cuda"]
STEPS, PROMPTS, ANSWERS, MOST = 10, 4, 3, 24
TOKENS = 64
"""The token budget: several micro-batches a rank, of different numbers."""


AUXILIARY = (PositiveNLL(threshold=0.2), Replies(), DemonstrationNLL(coefficient=0.3))
EXACT = "auxiliary"
"""A case in which no part of a pass is in float32, so that sums differ by their order alone."""


def algorithm_of(name: str) -> Algorithm:
    """A preset's; that of the case `EXACT` has all auxiliary terms."""
    if name == EXACT:
        return PRESETS["dapo"].algorithm.model_copy(update={"auxiliary": AUXILIARY})
    return PRESETS[name].algorithm


def main(rank: int, count: int, rendezvous: str, case: str, out: Path, device: Device) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    if count > 1:
        backend = "gloo" if device == "cpu" else "nccl"
        dist.init_process_group(
            backend, init_method=f"file://{rendezvous}", rank=rank, world_size=count
        )
    name, _, lora = case.partition("+")
    learner = built(name, bool(lora), Ranks(rank, count) if count > 1 else ONE, device)
    metrics = [step(learner, name, number) for number in range(STEPS)]
    weights = {name: whole(p.detach()) for name, p in trainable(learner.policy)}
    if learner.critic is not None:
        weights |= {f"critic/{name}": whole(p.detach()) for name, p in trainable(learner.critic)}
    if rank == 0:
        save_file(
            {name: w.contiguous() for name, w in weights.items()}, out / "weights.safetensors"
        )
        (out / "metrics.json").write_text(json.dumps(metrics))


def built(
    name: str,
    lora: bool,
    ranks: Ranks,
    device: Device = "cpu",
    autocast: Autocast = False,
    family: str = "llama",
) -> Learner:
    """The learner of a preset, of a small Llama; sharded if there are several ranks."""
    algorithm = algorithm_of(name)
    family = "gpt2" if name == EXACT else family
    kv_heads = 2 if family == "llama" else None
    build = BuildModel(
        family=family, hidden_size=32, layers=2, heads=4, kv_heads=kv_heads, context=64
    )
    adapter = Lora(rank=4, alpha=8.0) if lora else None
    exact = name == EXACT or algorithm.needs_teacher
    dtype: Literal["float64", "float32"] = "float64" if exact else "float32"
    autocast = False if name == EXACT else autocast
    model = Model(build=build, lora=adapter, device=device, autocast=autocast, dtype=dtype)
    policy = load_policy(model, seed=0)
    reference = reference_for(policy)
    teachers = []
    for seed in (1, 2) if name == "opd" else (1,):
        expert = load_policy(model, seed)
        for weight in expert.parameters():
            weight.data *= 2.0  # more certain than the policy
        teachers.append(FrozenPolicy(expert.model.eval(), False, expert.tokens))
    critic = None if algorithm.value is None else critic_from_policy(policy)
    if ranks.count > 1:
        mesh = init_device_mesh(device, (ranks.count,))
        shard(policy.model, mesh)
        for teacher in teachers:
            shard(teacher.model, mesh)
        if not lora:
            shard(reference.model, mesh)
        if critic is not None:
            shard(critic.backbone, mesh)
            shard(critic.head, mesh)
    choice = Optimizer(learning_rate=1e-3)
    return Learner(
        policy=policy,
        optimizer=WeightOptimizer(trainable(policy), choice),
        budget=TokenBudget(TOKENS),
        reference=reference,
        teachers=teachers if algorithm.needs_teacher else [],
        critic=critic,
        value_optimizer=None if critic is None else WeightOptimizer(trainable(critic), choice),
        ranks=ranks,
    )


def step(learner: Learner, name: str, number: int) -> list[dict[str, float]]:
    """The updates on one batch of random completions; their metrics."""
    algorithm, found = algorithm_of(name), []
    for part in parts_of(learner, name, number):
        batch = part.batch
        if algorithm.demonstrations:
            shown = from_groups(sampled(number + 1)[0], learner.policy.device)
            batch = demonstrated(algorithm, batch, shown.select(range(5)), 1)
        found.append(dict(learner.update(algorithm, batch, 0.05, (1e-3, 1e-3)).metrics))
    return found


def parts_of(learner: Learner, name: str, number: int) -> list[Minibatch]:
    """A batch of random completions, scored, in two mini-batches."""
    algorithm = algorithm_of(name)
    groups, results = sampled(number)
    batch = from_groups(groups, learner.policy.device, replies=name == EXACT)
    if len(learner.teachers) > 1:
        batch = replace(batch, teachers=tuple(group % 2 for group in batch.groups))
    batch = learner.score(batch, old=True, reference=True)
    estimates = estimate(algorithm, batch, outcome(groups, results, None), 0.05)
    return minibatches(
        algorithm, batch, estimates, range(batch.sequences),
        count=2, max_tokens=MOST, seed=number,
    )  # fmt: skip


def sampled(number: int) -> tuple[list[Group], list[list[RewardResult]]]:
    """Ragged completions, among them one of a token and one whose rewards are all equal."""
    rng = np.random.default_rng(number)
    groups, results = [], []
    for at in range(PROMPTS):
        prompt = Prompt(
            str(at), "", tokens=tuple(rng.integers(0, 40, rng.integers(1, 12)).tolist())
        )
        lengths: Sequence[int] = [int(n) for n in rng.integers(1, MOST + 1, ANSWERS)]
        completions = tuple(completion(rng, n) for n in lengths)
        groups.append(Group(prompt, completions))
        rewards = rng.normal(size=ANSWERS) if at else np.ones(ANSWERS)
        results.append([RewardResult(float(reward)) for reward in rewards])
    return groups, results


def completion(rng: np.random.Generator, length: int) -> Completion:
    written = rng.random(length) < 0.8
    written[-1] = True
    scores = np.where(written, rng.normal(-3, 0.3, length), 0).astype(np.float32)
    tokens = rng.integers(0, 40, length)
    return Completion(tokens, scores, written, "eos", "")
