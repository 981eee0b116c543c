"""The peak memory of a stage, predicted before anything is trained.

What lies there all the time is the sum of real tensors; what comes and goes is found by a dry run
of each phase at full size (`memory_ledger`), in the order in which the stage goes through them: no
moments before the first optimizer step, no gradients while sampling.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from keel.config.judging import DPOStage
from keel.config.model import Model
from keel.config.schema import RLStage, Stage
from keel.models import lora
from keel.models.loading import DTYPES
from keel.models.policy import Policy
from keel.models.reference import AdapterOff, FrozenCopy, Reference
from keel.models.reward import RewardModel
from keel.models.value import Critic, ValueHead
from keel.preflight.memory import passes
from keel.preflight.memory.heap import heap
from keel.preflight.memory.ledger import DryRun, Ledger, bytes_of
from keel.preflight.memory.passes import Extent, Row, SampledPass, Twins
from keel.types import Group, Sampling

MIB = 2**20
LIBRARIES, LORA_LIBRARIES = 110 * MIB, 60 * MIB
"""What a run on a CPU loads beside tensors when it first needs it: the model's code, tokenizers,
pyarrow, the kernels' own buffers; and peft."""
HEAP = "heap"
STORE = "key-value store and sampling"
PASSES = 4
"""Micro-batches of an update that are gone through: by then the heap has its holes."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """What takes memory, and how much."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Phase:
    """What is there at one time of the stage, all of it."""

    name: str
    parts: tuple[MemoryPart, ...]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def holes(self) -> int:
        return sum(part.bytes for part in self.parts if part.name == HEAP)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a stage on its device, phase by phase, in the order of the first of each.

    On a CPU it is what the process takes above what it took when Keel was imported; on a GPU what
    torch has allocated there, without the driver's own. Without `holes_seen` what malloc loses in
    holes is left out, on a CPU up to a half of what comes and goes.
    """

    device: str
    phases: tuple[Phase, ...]
    holes_seen: bool = True

    @property
    def highest(self) -> Phase:
        """The phase that decides: where most lives, of those near the peak.

        Holes stay when what lived between them is gone, so that a later phase with little in it
        may have a trifle more; that is counted to the holes of the phase that made them.
        """
        near = [phase for phase in self.phases if phase.bytes >= 0.9 * self.peak]
        phase = max(near, key=lambda phase: phase.bytes - phase.holes)
        if phase.bytes == self.peak:
            return phase
        others = tuple(part for part in phase.parts if part.name != HEAP)
        return Phase(phase.name, (*others, MemoryPart(HEAP, self.peak - phase.bytes + phase.holes)))

    @property
    def peak(self) -> int:
        return max(phase.bytes for phase in self.phases)

    @property
    def parts(self) -> tuple[MemoryPart, ...]:
        """The most that each part ever takes; they need not meet."""
        most: dict[str, int] = {}
        for phase in self.phases:
            for part in phase.parts:
                most[part.name] = max(most.get(part.name, 0), part.bytes)
        return tuple(MemoryPart(name, size) for name, size in most.items())


@dataclass(frozen=True, eq=False)
class HeldModels:
    """The models of a stage as they are loaded, each on its device.

    `reward_model` is what a reward model's stage trains; `judges` are learned rewards that live in
    this process.
    """

    policy: Policy
    reference: Reference | None = None
    value_head: ValueHead | None = None
    critic: Critic | None = None
    reward_model: RewardModel | None = None
    judges: tuple[tuple[str, RewardModel], ...] = ()


def rows_of(groups: Iterable[Group]) -> list[Row]:
    """The lengths of what was sampled (or of demonstrations, as groups of one)."""
    return [
        (Extent(len(group.prompt.tokens), len(completion), number),)
        for number, group in enumerate(groups)
        for completion in group.completions
    ]


def to_budget(stage: RLStage, rows: Sequence[Row], context: int | None) -> list[Row]:
    """The same prompts, each answer as long as the recipe and the model's context allow."""
    limit = stage.rollout.max_tokens * stage.rollout.max_turns
    room = [limit if context is None else min(limit, context - row[0].before) for row in rows]
    return [(replace(row[0], scored=size),) for row, size in zip(rows, room, strict=True)]


def stage_footprint(
    spec: Model,
    stage: Stage,
    held: HeldModels,
    batches: Sequence[Sequence[Row]],
    heldout: Sequence[int] = (),
) -> Footprint:
    """The memory that a stage takes whose steps have rows of these lengths.

    `batches` are steps: the sampled one of an rl stage, several drawn ones where rows are read;
    `heldout` are the tokens of the prompts that an rl stage evaluates on. Takes seconds, and next
    to no memory; gradients and modes of `held` are left as they are. Holes that earlier work left
    in this process's heap count, as they do in a run.
    """
    return _Stage(spec, stage, held, batches, heldout).footprint()


class _Stage:
    """One prediction: the dry run, and what it found so far."""

    def __init__(
        self,
        spec: Model,
        stage: Stage,
        held: HeldModels,
        batches: Sequence[Sequence[Row]],
        heldout: Sequence[int],
    ) -> None:
        self.spec, self.stage, self.held, self.heldout = spec, stage, held, heldout
        self.batches = [list(batch) for batch in batches if batch]
        self.on_cpu = held.policy.device.type == "cpu"
        self.dry = DryRun()
        self.twins = twins_of(self.dry, held)
        self.weights = weights_of(held)
        self.ahead = isinstance(stage, RLStage) and stage.rollout.ahead > 0 and stage.steps > 1
        if self.ahead:
            learning = [p for p in held.policy.parameters() if p.requires_grad]
            size = sum(p.numel() * p.element_size() for p in learning)
            self.weights.append(MemoryPart("engine weights", size))
        self.beside = 0
        """What the next step's rollouts take while this one is learned from."""
        self.moments = 0
        self.phases: dict[str, Phase] = {}
        self.base = self.dry.ledger.now
        self.heap = heap() if self.on_cpu else None
        self.used = 0 if self.heap is None else self.heap.used

    def footprint(self) -> Footprint:
        """Every phase, in the stage's order."""
        self._note("load", [MemoryPart("loading", loading(self.spec, self.held.policy))])
        trained = self.twins.trained()
        with self.dry.running(self.heap) as ledger:
            for again in (False, True)[: 1 + (updates_of(self.stage) > 1)]:
                if isinstance(self.stage, RLStage) and (not again or self.stage.steps > 1):
                    self._rollouts(self.stage, ledger)
                self._update(ledger)
                if not again:
                    kept = [torch.zeros_like(p) for p in trained for _ in range(2)]
                    self.moments = sum(t.numel() * t.element_size() for t in kept)
                    gradients = MemoryPart("gradients", ledger.now - self.base - self.moments)
                    self._note("optimizer step", [gradients])
                for parameter in trained:
                    parameter.grad = None
                ledger.restart()
            if isinstance(self.stage, RLStage) and self.heldout:
                self._evaluation(self.stage, ledger)
            self._checkpoint(ledger)
            del kept
        seen = self.heap is not None or not self.on_cpu
        return Footprint(str(self.held.policy.device), tuple(self.phases.values()), seen)

    # ------------------------------------------------------------ phases

    def _rollouts(self, stage: RLStage, ledger: Ledger) -> None:
        choice, rows, device = stage.rollout, self.batches[0], self.held.policy.device
        firsts = rows[:: choice.group_size]
        prompts = tuple(row[0].before for row in firsts)
        budget = max(row[0].scored for row in rows)
        dtype, turns = DTYPES.get(choice.dtype), choice.max_turns
        call = SampledPass(prompts, budget, choice.group_size, choice.max_rows, dtype, turns)
        sampling = Sampling(max_tokens=budget, temperature=choice.temperature)
        passes.sample(self.twins.policy, call, sampling)
        self._passing("rollout", STORE, ledger)
        if self.ahead:
            self.beside = max(p.bytes for p in self.phases["rollout"].parts if p.name == STORE)
        for model in self.twins.judges:
            passes.judge(model, [_closed(row) for row in rows], stage.token_budget)
            self._passing("rewards", "activations", ledger)
        largest = max(passes.micro_batches(rows, stage.token_budget, device), key=passes.fed)
        passes.measure(self.twins, largest, choice.temperature)
        self._passing("measure", "activations", ledger)

    def _evaluation(self, stage: RLStage, ledger: Ledger) -> None:
        budget = max(row[0].scored for row in self.batches[0])
        call = SampledPass(
            tuple(self.heldout),
            budget,
            max(1, stage.evaluation.samples),
            stage.rollout.max_rows,
            turns=stage.rollout.max_turns,
        )
        passes.sample(self.twins.policy, call, Sampling(max_tokens=budget, temperature=0.0))
        self._passing("evaluation", STORE, ledger)

    def _update(self, ledger: Ledger) -> None:
        stage, device = self.stage, self.held.policy.device
        cut = [
            passes.micro_batches(rows, stage.token_budget, device)
            for batch in self.batches
            for rows in (_minibatches(stage, batch) if isinstance(stage, RLStage) else [batch])
        ]
        # The first pass leaves the gradients, beside which all others of the step run.
        entering = passes.fed if self.twins.reward_model is None else passes.tokens_of
        first, *others = max(cut, key=lambda parts: entering(parts[0]))
        sizes = [entering(part) for part in others]
        largest = sorted(range(len(others)), key=lambda i: -sizes[i])[: PASSES - 1]
        order = [first, *(others[i] for i in sorted(largest))]
        divergence = stage.algorithm.loss_divergence if isinstance(stage, RLStage) else None
        activations, start = 0, ledger.now
        for rows in order:
            before = ledger.now
            said = passes.learn(
                self.twins,
                rows,
                temperature=stage.rollout.temperature if isinstance(stage, RLStage) else 1.0,
                full=divergence is not None and divergence.estimator == "full",
                pairs=isinstance(stage, DPOStage),
            )
            activations = max(activations, ledger.now - before)
            torch.autograd.backward([value.sum() for value in said])
            del said
        both = ledger.peak - start
        activations = min(activations, both)
        parts = [
            MemoryPart("activations", activations),
            MemoryPart("gradients", both - activations),
        ]
        self._note("update", parts)

    def _checkpoint(self, ledger: Ledger) -> None:
        with torch.no_grad():
            trained = self.twins.reward_model or self.twins.policy
            merged = lora.plain_weights(trained.model)
            del merged
        self._passing("checkpoint", "copies", ledger)

    # ------------------------------------------------------------ details

    def _passing(self, phase: str, what: str, ledger: Ledger) -> None:
        size = ledger.peak - self.base - self.moments
        self._note(phase, [MemoryPart(what, size)])

    def _note(self, name: str, passing: list[MemoryPart]) -> None:
        """Keep a phase, unless it took more when it was gone through before."""
        top = self.dry.ledger.top
        self.dry.ledger.restart()
        parts = [*self.weights]
        if self.moments:
            parts.append(MemoryPart("optimizer moments", self.moments))
        parts += passing
        if self.heap is not None and name != "load":
            moving = self.moments + sum(part.bytes for part in passing)
            parts.append(MemoryPart(HEAP, max(top - self.used - moving, 0)))
        if name in ("measure", "update", "optimizer step"):
            parts.append(MemoryPart(STORE, self.beside))
        if self.on_cpu:
            libraries = LIBRARIES + (LORA_LIBRARIES if self.held.policy.has_lora else 0)
            parts.append(MemoryPart("libraries", libraries))
        phase = Phase(name, tuple(part for part in parts if part.bytes))
        if name not in self.phases or self.phases[name].bytes < phase.bytes:
            self.phases[name] = phase


def twins_of(dry: DryRun, held: HeldModels) -> Twins:
    """The models on fake tensors."""
    policy = dry.twin(held.policy)
    reference = None if held.reference is None else copy.copy(held.reference)
    if isinstance(reference, FrozenCopy):
        reference.model = dry.twin(reference.model)
    elif isinstance(reference, AdapterOff):
        reference.model = policy.model
    return Twins(
        policy=policy,
        reference=reference,
        value_head=None if held.value_head is None else dry.twin(held.value_head),
        critic=None if held.critic is None else dry.twin(held.critic),
        reward_model=None if held.reward_model is None else dry.twin(held.reward_model),
        judges=tuple(dry.twin(model) for _, model in held.judges),
    )


def weights_of(held: HeldModels) -> list[MemoryPart]:
    """The weights of each model, those that two share counted once."""
    parts = [MemoryPart("policy weights", bytes_of(held.policy))]
    if isinstance(held.reference, FrozenCopy):
        parts.append(MemoryPart("reference weights", bytes_of(held.reference.model)))
    for name, module in (
        ("value head", held.value_head),
        ("critic weights", held.critic),
        ("reward model weights", held.reward_model),
        *((f"reward {name} weights", model) for name, model in held.judges),
    ):
        if module is not None:
            parts.append(MemoryPart(name, bytes_of(module)))
    return parts


def loading(spec: Model, policy: Policy) -> int:
    """What loading the policy takes beside its weights: those of the type they are made in.

    Files are mapped, and weights of the wanted type stay where they are mapped.
    """
    wanted = bytes_of(policy.model)
    if spec.build is not None:
        made = sum(p.numel() for p in policy.model.parameters()) * 4
        return made - wanted if policy.model.dtype.itemsize < 4 else 0
    folder = Path(str(spec.name)).expanduser()
    files = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return files if abs(files - wanted) > wanted // 10 else 0


def updates_of(stage: Stage) -> int:
    """Optimizer steps of a stage."""
    if isinstance(stage, RLStage):
        return stage.steps * stage.epochs * stage.minibatches
    return stage.steps


def _minibatches(stage: RLStage, rows: Sequence[Row]) -> list[list[Row]]:
    """As many of each group in each, as a draw by chance has on average."""
    parts = (list(rows[at :: stage.minibatches]) for at in range(stage.minibatches))
    return [part for part in parts if part]


def _closed(row: Row) -> Row:
    """With the end-of-sequence token that a reader puts behind an answer."""
    return tuple(replace(extent, scored=extent.scored + 1) for extent in row)
