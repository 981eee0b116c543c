"""Preference data as tokens: pairs and labelled answers, filtered by length, in epochs; and sampled
from the policy: it answers prompts, and rewards score the answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from keel.config.fields import derive
from keel.config.judging import PROMPTS_AT_ONCE, SampledData
from keel.config.stage import Records
from keel.data.columns import prompt_columns
from keel.data.judged_rows import JudgedRow, Labelled, Preference, Stepwise
from keel.data.preferences import encode_row, without_bad
from keel.data.splits import Splits
from keel.data.tasks import SEED_NAMES
from keel.models.packed import PackedSizes, sizes_on
from keel.models.reward import Answered, Reader, joined
from keel.platform.files import write_jsonl
from keel.rewards.calls import without_stop
from keel.runs.layout import RunFolder
from keel.runs.rows import LeftOut
from keel.training.rollout import Sampler
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Split


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """Two answers to one prompt, in tokens. `cluster` is the same for related examples."""

    chosen: Answered
    rejected: Answered
    probability: float
    margin: float
    cluster: str

    @property
    def length(self) -> int:
        return len(self.chosen.tokens) + len(self.rejected.tokens)

    @property
    def longest(self) -> int:
        return max(len(self.chosen.tokens), len(self.rejected.tokens))


@dataclass(frozen=True, slots=True)
class Marked:
    """One answer in tokens, and a label (0 to 1) for each of its ends; None if there is none."""

    answer: Answered
    labels: tuple[float | None, ...]
    cluster: str

    @property
    def length(self) -> int:
        return len(self.answer.tokens)

    @property
    def longest(self) -> int:
        return self.length


A = TypeVar("A")
R = TypeVar("R", Preference, Labelled, Stepwise)
E = TypeVar("E", EncodedPair, Marked)


@dataclass(frozen=True, slots=True)
class Ready(Generic[E]):
    """Both splits, encoded; of each the number of examples left out for being too long.

    `left_out` are all the examples that are not used.
    """

    train: tuple[E, ...]
    validation: tuple[E, ...]
    long: int
    long_validation: int
    left_out: tuple[LeftOut, ...] = ()


def ready(
    splits: Splits[R],
    encode: Callable[[R], E],
    limit: int | None,
    validation_rows: int,
    stage: str,
    *,
    quarantine: bool = False,
) -> Ready[E]:
    """The rows of at most `limit` tokens; of the validation split a random `validation_rows`.

    With `quarantine` rows that cannot be encoded are left out. Raises KeelError if no train row is
    left, or none of a validation split that had some.
    """
    splits = without_bad(splits, encode) if quarantine else splits
    left = list(splits.left_out)
    train, long = _fitting(splits.train, encode, limit, left)
    some = some_rows(splits.validation, validation_rows)
    held, long_validation = _fitting(some, encode, limit, left)
    if not train:
        raise KeelError(
            f"stage {stage!r}: each of the {len(splits.train)} train rows is longer than "
            f"{limit} tokens: raise {stage}.max_tokens, or use a model with a longer context"
        )
    if long_validation and not held:
        raise KeelError(
            f"stage {stage!r}: each of the {long_validation} validation rows is longer than "
            f"{limit} tokens: raise {stage}.max_tokens, or set {stage}.evaluation.rows = 0"
        )
    return Ready(train, held, long, long_validation, tuple(left))


def encoder(records: Records, reader: Reader, separator: str = "\n") -> Callable[[Any], Any]:
    """What encodes examples of a kind: preferences as pairs of answers, labelled answers, judged at
    their end, or answers in steps with `separator` between them, judged at the end of each."""

    def pair(row: Preference) -> EncodedPair:
        return EncodedPair(
            reader.answer(row.prompt, row.chosen, row.id, tools=row.tools),
            reader.answer(row.prompt, row.rejected, row.id, tools=row.tools),
            row.probability,
            row.margin,
            cluster_of(row),
        )

    def labelled(row: Labelled) -> Marked:
        answer = reader.answer(row.prompt, row.completion, row.id, tools=row.tools)
        return Marked(answer, (row.label,), cluster_of(row))

    def steps(row: Stepwise) -> Marked:
        answer = reader.steps(row.prompt, joined(row.steps, separator), row.id, tools=row.tools)
        return Marked(answer, row.labels, cluster_of(row))

    kinds: dict[Records, Callable[[Any], Any]]
    kinds = {"pairs": pair, "labels": labelled, "steps": steps}
    return kinds[records]


def cluster_of(row: JudgedRow) -> str:
    """What related examples have in common: their group, or else their prompt."""
    if row.group is not None:
        return row.group
    prompt = row.prompt
    return prompt if isinstance(prompt, str) else json.dumps(list(prompt), sort_keys=True)


def of_step(rows: Sequence[E], size: int, number: int, seed: int) -> list[E]:
    """The rows of step `number` (from 1): epochs end to end, each a permutation of all rows.

    The permutation of epoch e is seeded by `SeedSequence([seed, e])`, so that the rows are a
    function of seed and step.
    """
    n = len(rows)
    places = range((number - 1) * size, number * size)
    orders = {
        epoch: np.random.default_rng(np.random.SeedSequence([seed, epoch])).permutation(n)
        for epoch in {place // n for place in places}
    }
    return [rows[int(orders[place // n][place % n])] for place in places]


def sizes_of(rows: Sequence[EncodedPair] | Sequence[Marked], device: torch.device) -> PackedSizes:
    """The sizes by which examples are cut into micro-batches."""
    return sizes_on(device, [row.length for row in rows])


def some_rows(rows: Sequence[A], n: int) -> Sequence[A]:
    """At most n of the rows, the same ones each time."""
    if len(rows) <= n:
        return rows
    return [rows[at] for at in sorted(np.random.default_rng(0).permutation(len(rows))[:n].tolist())]


def _fitting(
    rows: Iterable[R], encode: Callable[[R], E], limit: int | None, left: list[LeftOut]
) -> tuple[tuple[E, ...], int]:
    """The rows that fit, encoded, and the number of the others, which go to `left`."""
    kept, long = [], 0
    for row in rows:
        found = encode_row(row, encode)
        if limit is None or found.longest <= limit:
            kept.append(found)
            continue
        long += 1
        if row.origin is not None:
            reason = f"{found.longest} tokens, more than {limit}"
            left.append(row.origin.left_out(reason, "long"))
    return tuple(kept), long


# ---------------------------------------------------------------- sampled from the policy


Rows = list[dict[str, Any]]
Make = Callable[[Group, Sequence[RewardResult], SampledData, np.random.Generator], Rows]
"""Makes examples from the scored answers to one prompt."""


def write_rows(
    sampler: Sampler,
    choice: SampledData,
    folder: RunFolder,
    stage: str,
    make: Make,
    *,
    validation: Sequence[Prompt],
) -> str:
    """Write the examples of both splits to files of the run folder, unless they exist.

    Returns a line with the number of examples and prompts. Raises KeelError if nothing can be
    learned from the answers.
    """
    counts = []
    for split in ("train", "validation"):
        train = split == "train"
        pool = train and choice.people is not None
        target = folder.pool(stage) if pool else folder.rows(stage, split)
        if target.exists():
            continue
        prompts = sampler.stream.take(choice.train) if train else validation[: choice.validation]
        rows = list(_examples(sampler, choice, prompts, split, make))
        if not rows:
            raise KeelError(
                f"stage {stage!r}: the {len(prompts)} {split} prompts gave no example to learn "
                "from, since all answers to a prompt have the same reward, or none: raise "
                "sampled.group_size or sampled.temperature, or fix sampled.rewards"
            )
        write_jsonl(target, rows)
        counts.append(f"{len(rows)} {split} rows from {len(prompts)} prompts")
    return "; ".join(counts)


def sampled_pairs(
    group: Group, results: Sequence[RewardResult], choice: SampledData, rng: np.random.Generator
) -> Rows:
    """Pairs of answers with different texts and rewards, at most `choice.pairs` of them."""
    pairs = [
        (a, b) if x > y else (b, a)
        for (a, x), (b, y) in itertools.combinations(_rewarded(group, results), 2)
        if x != y and a.text != b.text
    ]
    different = list({(a.text, b.text): (a, b) for a, b in pairs}.values())
    order = rng.permutation(len(different))[: choice.pairs]
    rows = []
    for at in order.tolist():
        chosen, rejected = different[at]
        inverted = bool(rng.random() < choice.noise)
        if inverted:
            chosen, rejected = rejected, chosen
        row = {
            **prompt_columns(group.prompt.content, group.prompt.tools),
            "chosen": chosen.text,
            "rejected": rejected.text,
        }
        rows.append(row if choice.people is None else {**row, "inverted": inverted})
    return rows


def sampled_labels(
    group: Group, results: Sequence[RewardResult], choice: SampledData, rng: np.random.Generator
) -> Rows:
    """Each different answer with its reward, which must lie between 0 and 1, as its label."""
    rows = []
    for text, reward in {c.text: r for c, r in _rewarded(group, results)}.items():
        label = _share(reward, group)
        label = 1 - label if rng.random() < choice.noise else label
        rows.append(
            {
                **prompt_columns(group.prompt.content, group.prompt.tools),
                "completion": text,
                "label": label,
            }
        )
    return rows


def sampled_steps(separator: str, decode: Callable[[Sequence[int]], str]) -> Make:
    """Each different answer cut into its steps, with the steps' rewards (0 to 1) as labels.

    `decode` gives the text of tokens, to find where in the text a scored step ends.
    """

    def make(
        group: Group, results: Sequence[RewardResult], choice: SampledData, rng: np.random.Generator
    ) -> Rows:
        rows = {}
        for completion, result in zip(group.completions, results, strict=True):
            if result.steps:
                texts, shares = _split_steps(completion, result, decode, group)
                labels = [1 - s if rng.random() < choice.noise else s for s in shares]
                texts[:-1] = [text.removesuffix(separator) for text in texts[:-1]]
                rows[completion.text] = {
                    **prompt_columns(group.prompt.content, group.prompt.tools),
                    "completions": texts,
                    "labels": labels,
                }
        return list(rows.values())

    return make


def _examples(
    sampler: Sampler, choice: SampledData, prompts: Sequence[Prompt], split: Split, make: Make
) -> Iterator[dict[str, Any]]:
    if split == "validation":  # accuracy is relative to the rewards themselves
        choice = choice.model_copy(update={"noise": 0.0, "people": None})
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        seed = derive(sampler.seed, "answers", SEED_NAMES[split], start)
        part = prompts[start : start + PROMPTS_AT_ONCE]
        sampled = sampler.sample(part, choice.group_size, sampler.sampling, seed)
        groups = [without_stop(group, sampler.sampling.stop) for group in sampled]
        scored = sampler.scorer(groups, 0)
        for number, (group, results) in enumerate(zip(groups, scored.results, strict=True)):
            rng = np.random.default_rng(
                derive(sampler.seed, "rows", SEED_NAMES[split], start + number)
            )
            yield from make(group, results, choice, rng)


def _rewarded(group: Group, results: Sequence[RewardResult]) -> list[tuple[Completion, float]]:
    return [
        (completion, result.reward)
        for completion, result in zip(group.completions, results, strict=True)
        if result.reward is not None
    ]


def _split_steps(
    completion: Completion,
    result: RewardResult,
    decode: Callable[[Sequence[int]], str],
    group: Group,
) -> tuple[list[str], list[float]]:
    """The text of each step, the last with the rest of the completion, and its label."""
    ids = completion.tokens.tolist()
    ends = [len(decode(ids[: step.end + 1])) for step in result.steps]
    ends[-1] = len(completion.text)
    texts = [completion.text[a:b] for a, b in itertools.pairwise([0, *ends])]
    return texts, [_share(step.reward, group) for step in result.steps]


def _share(reward: float, group: Group) -> float:
    if not 0 <= reward <= 1:
        raise KeelError(
            f"prompt {group.prompt.id!r}: the reward {reward:g} cannot be a label, which lies "
            "between 0 and 1: use a reward of correctness in sampled.rewards"
        )
    return reward
