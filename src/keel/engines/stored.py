"""An engine that returns what a run sampled (RUN/rollouts), to train on it again or otherwise.

The prompts of step n are those of the run's step n, in its order, taken from the recipe's tasks by
their ids; rewards are called on the stored completions. The log-probs are those that the run's
engine sampled with. The one batch of a run with `steps = 0` is spread over the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from keel.config.sources import Rollout
from keel.models.text import token_texts
from keel.runs.reader import Record, Run, load
from keel.runs.rows import prompt_text
from keel.runs.values import clean_text
from keel.types import (
    Capabilities,
    Completion,
    Engine,
    Group,
    KeelError,
    OnGroup,
    Prompt,
    PromptSupply,
    Sampling,
)

CAPABILITIES = Capabilities(replays=True)
Groups = tuple[tuple[Record, ...], ...]
"""The records of each group's completions."""
SEARCHED = 20_000
"""Train prompts that are passed over, at the most, in the search for those of a step."""


def check_stored(rollout: Rollout, here: bool = True, steps: int = 0) -> None:
    """Raise KeelError if no run is named, or the recipe samples what stored rollouts lack, or has
    more steps than were stored."""
    if rollout.stored is None:
        raise KeelError('rollout.engine = "stored" needs rollout.stored: name a run folder')
    lacks = (
        ("max_turns", rollout.max_turns > 1, "1"),
        ("program", rollout.program is not None, '"none"'),
        ("async_level", rollout.async_level > 0, "0"),
        ("dynamic_sampling", rollout.dynamic_sampling, "false"),
    )
    for key, asked, off in lacks:
        if asked:
            raise KeelError(
                f'rollout.engine = "stored" returns whole completions of the groups that were kept,'
                f" one step after the other: set rollout.{key} = {off}",
                key=f"rollout.{key}",
            )
    run = load(rollout.stored)
    places = _places(run, rollout)
    if steps and places == [0]:  # of a run with `steps = 0`
        groups = len(groups_of(run.rollouts(0, rollout.stored_stage)))
        places = list(range(1, 1 + groups // rollout.prompts_per_step))
        if steps > len(places):
            raise _too_few(run, groups, rollout.prompts_per_step)
    if lacking := [n for n in range(1, steps + 1) if n not in places]:
        first = lacking[0]
        fix = f"set steps = {first - 1}" if first > 1 else "it needs rollouts_every = 1 there"
        raise KeelError(
            f"rollout.stored: no rollouts of step {first} in {run.folder.path}, which has "
            f"steps {places[0]} to {places[-1]}: {fix}",
            key="steps",
        )


def _too_few(run: Run, groups: int, size: int) -> KeelError:
    """What is wrong with steps that use more than the one batch of a run."""
    return KeelError(
        f"rollout.stored: {run.folder.path} sampled {groups} prompts: set steps and "
        f"rollout.prompts_per_step (now {size}) to use no more",
        key="steps",
    )


def build_stored(model: Any, tokenizer: Any, *, rollout: Rollout, **_: Any) -> StoredEngine:
    """The engine of a recipe; see `keel.engines.registry.build_engine`."""
    check_stored(rollout)
    assert rollout.stored is not None
    return StoredEngine(load(rollout.stored), rollout, tokenizer)


def _places(run: Run, rollout: Rollout) -> list[int]:
    """The steps whose rollouts are there. Raises KeelError if there are none."""
    names = [place.stage for place in run.rollout_places()]
    stages = sorted({run.stages[at] for at in names})
    stage = rollout.stored_stage or (stages[0] if len(stages) == 1 else None)
    if stage is None or stage not in stages:
        known = ", ".join(stages) or "no stage: set rollouts_every = 1 there"
        raise KeelError(
            f"rollout.stored_stage: run {run.folder.path} has rollouts of {known}"
            + (": name one" if stages else ""),
            key="rollout.stored_stage",
        )
    places = run.rollout_places()
    return [place.step for place in places if run.stages[place.stage] == stage]


@dataclass(frozen=True, eq=False)
class StoredStep:
    """The groups of a step: each has the records of its completions."""

    number: int
    groups: Groups

    @property
    def ids(self) -> list[str]:
        """Those of the groups' prompts."""
        return [group[0]["prompt_id"] for group in self.groups]


def completion_of(record: Record) -> Completion:
    """A stored completion; what was said in between several turns of the policy is left out."""
    own = zip(record["pieces"], record["written"], strict=True)
    text = "".join(piece for piece, written in own if written)
    return Completion(
        tokens=np.array(record["tokens"], dtype=np.int64),
        log_probs=np.array(record["log_probs"], dtype=np.float32),
        written=np.array(record["written"], dtype=np.bool_),
        finish=record["finish"],
        text=record["completion"] if all(record["written"]) else text,
        weight_version=record["weight_version"],
    )


def groups_of(records: Sequence[Record]) -> Groups:
    """The records of a step by their group."""
    return tuple(tuple(rows) for _, rows in groupby(records, key=lambda one: one["group"]))


def find_prompts(
    stream: PromptSupply, wanted: Sequence[tuple[str, str]], what: str
) -> list[Prompt]:
    """The next prompts of a stream with these ids and texts, in the order that is `wanted`; others
    are passed over. Raises KeelError, which names `what`, if one does not come or has changed."""
    found: dict[str, list[Prompt]] = {}
    left = [name for name, _ in wanted]
    for _ in range(SEARCHED + len(left)):
        if not left:
            break
        (prompt,) = stream.take(1)
        if prompt.id in left:
            left.remove(prompt.id)
            found.setdefault(prompt.id, []).append(prompt)
    if left:
        raise KeelError(
            f"{what}: prompt {left[0]!r} is not among the next {SEARCHED} of the recipe's tasks: "
            "give the tasks, their order and the seed of that run"
        )
    ordered = [found[name].pop(0) for name, _ in wanted]
    for prompt, (_, text) in zip(ordered, wanted, strict=True):
        if prompt_text(prompt.content) != text:
            raise KeelError(
                f"{what}: prompt {prompt.id!r} has another text there than in the recipe's tasks: "
                "give the tasks of that run"
            )
    return ordered


class StoredEngine(Engine):
    """Returns the groups of step `weight_version` + 1 of a run, in the tokens of the policy.

    Raises KeelError for a step that was not stored, another tokenizer, and settings that the stored
    completions do not meet.
    """

    capabilities = CAPABILITIES

    def __init__(self, run: Run, rollout: Rollout, tokenizer: Any) -> None:
        self.run, self.stage, self.tokenizer = run, rollout.stored_stage, tokenizer
        self._sampled_once = _places(run, rollout) == [0]
        self._prompts_per_step = rollout.prompts_per_step
        self._step: StoredStep | None = None

    def step(self) -> StoredStep:
        """What is stored of the step to come."""
        number = self.weight_version + 1
        if self._step is None or self._step.number != number:
            try:
                records = self.run.rollouts(0 if self._sampled_once else number, self.stage)
            except KeelError as error:
                raise KeelError(f"rollout.stored: {error}", key="rollout.stored") from error
            self._check(records)
            groups = groups_of(records)
            if self._sampled_once:
                groups = self._part(groups, number)
            self._step = StoredStep(number, groups)
        return self._step

    def _part(self, groups: Groups, number: int) -> Groups:
        """A step's part of the one batch. Raises KeelError if the steps before have used it up."""
        size = self._prompts_per_step
        if number * size > len(groups):
            raise _too_few(self.run, len(groups), size)
        return groups[(number - 1) * size : number * size]

    def prompts_of(self, stream: PromptSupply) -> PromptSupply:
        return StoredPrompts(stream, self)

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """The first `n` stored completions of each prompt."""
        step = self.step()
        if sampling.temperature == 0:
            raise self._unmet(step, "holds no greedy completions, which the algorithm needs")
        left = list(step.groups)
        made = []
        for prompt in prompts:
            group = next(one for one in left if one[0]["prompt_id"] == prompt.id)
            left.remove(group)
            longest = max(len(one["tokens"]) for one in group[:n])
            if len(group) < n:
                raise self._unmet(step, f"has groups of {len(group)}: lower rollout.group_size")
            if longest > sampling.max_tokens:
                raise self._unmet(
                    step, f"has completions of {longest} tokens: raise rollout.max_tokens"
                )
            made.append(Group(prompt, tuple(map(completion_of, group[:n]))))
        return made

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Nothing: it samples with no weights."""

    def _check(self, records: Sequence[Record]) -> None:
        """Raise KeelError for the tokens of another tokenizer, or several turns."""
        where = f"rollout.stored: step {self.weight_version + 1} of {self.run.folder.path}"
        if not all(all(one["written"]) for one in records):
            raise KeelError(f"{where} has completions of several turns, which cannot be replayed")
        ids = sorted({token for one in records for token in one["tokens"]})
        known = [token for token in ids if token < len(self.tokenizer)]
        texts = token_texts(self.tokenizer, known)
        for token, piece in _pieces(records):
            own = clean_text(texts[token]) if token in texts else None
            if own != piece:
                raise KeelError(
                    f"{where} was sampled with another tokenizer: token {token} is {piece!r} there "
                    f"and {own!r} to this policy: use a model with the tokenizer of that run",
                    key="rollout.stored",
                )

    def _unmet(self, step: StoredStep, why: str) -> KeelError:
        return KeelError(f"rollout.stored: step {step.number} of {self.run.folder.path} {why}")


def _pieces(records: Sequence[Record]) -> Iterator[tuple[int, str]]:
    for one in records:
        yield from zip(one["tokens"], one["pieces"], strict=True)


class StoredPrompts:
    """The prompts of a stream that an engine has completions of, in its order."""

    def __init__(self, stream: PromptSupply, engine: StoredEngine) -> None:
        self.stream, self.engine = stream, engine

    def take(self, k: int) -> list[Prompt]:
        """The prompts of the engine's step, `k` at most."""
        step = self.engine.step()
        if len(step.groups) < k:
            raise KeelError(
                f"rollout.stored: step {step.number} has {len(step.groups)} groups: set "
                f"rollout.prompts_per_step = {len(step.groups)} instead of {k}",
                key="rollout.prompts_per_step",
            )
        wanted = [(g[0]["prompt_id"], prompt_text(g[0]["prompt"])) for g in step.groups[:k]]
        return find_prompts(self.stream, wanted, f"rollout.stored: step {step.number}")

    @property
    def left_out(self) -> Mapping[str, int]:
        return self.stream.left_out

    def state(self) -> dict[str, Any]:
        return self.stream.state()
