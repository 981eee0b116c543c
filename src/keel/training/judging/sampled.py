"""Preference data sampled from the policy: it answers prompts, and rewards score the answers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keel.config.fields import derive
from keel.config.judging import PROMPTS_AT_ONCE, SampledData
from keel.data.columns import prompt_columns
from keel.data.tasks import SEED_NAMES
from keel.platform.files import make_folder, write_text
from keel.rewards.calls import without_stop
from keel.rewards.scorer import Scorer
from keel.runs.layout import RunFolder
from keel.training.rollout import Sampler
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Split

Rows = list[dict[str, Any]]
Make = Callable[[Group, Sequence[RewardResult], SampledData, np.random.Generator], Rows]
"""Makes examples from the scored answers to one prompt."""


@dataclass(frozen=True, eq=False)
class SampledDataSource:
    """What samples and scores the answers, before a stage."""

    sampler: Sampler
    scorer: Scorer
    validation: Sequence[Prompt]
    choice: SampledData
    seed: int


def write_rows(source: SampledDataSource, folder: RunFolder, stage: str, make: Make) -> str:
    """Write the examples of both splits to files of the run folder, unless they exist.

    Returns a line with the number of examples and prompts. Raises KeelError if nothing can be
    learned from the answers.
    """
    choice = source.choice
    counts = []
    for split in ("train", "validation"):
        train = split == "train"
        pool = train and choice.people is not None
        target = folder.pool(stage) if pool else folder.rows(stage, split)
        if target.exists():
            continue
        prompts = (
            source.sampler.stream.take(choice.train)
            if train
            else source.validation[: choice.validation]
        )
        rows = list(_examples(source, prompts, split, make))
        if not rows:
            raise KeelError(
                f"stage {stage!r}: the {len(prompts)} {split} prompts gave no example to learn "
                "from, since all answers to a prompt have the same reward, or none: raise "
                "sampled.group_size or sampled.temperature, or fix sampled.rewards"
            )
        write_jsonl(target, rows)
        counts.append(f"{len(rows)} {split} rows from {len(prompts)} prompts")
    return "; ".join(counts)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows to a file, one a line, completely or not at all."""
    make_folder(path.parent)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_text(path, "".join(lines))


def read_jsonl(path: Path) -> Rows:
    """The rows of such a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def pairs(
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


def labels(
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


def steps(separator: str, decode: Callable[[Sequence[int]], str]) -> Make:
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
    source: SampledDataSource, prompts: Sequence[Prompt], split: Split, make: Make
) -> Iterator[dict[str, Any]]:
    choice, sampler = source.choice, source.sampler
    if split == "validation":  # accuracy is relative to the rewards themselves
        choice = choice.model_copy(update={"noise": 0.0, "people": None})
    for start in range(0, len(prompts), PROMPTS_AT_ONCE):
        seed = derive(source.seed, "answers", SEED_NAMES[split], start)
        part = prompts[start : start + PROMPTS_AT_ONCE]
        sampled = sampler.sample(part, choice.group_size, sampler.sampling, seed)
        groups = [without_stop(group, sampler.sampling.stop) for group in sampled]
        scored = source.scorer(groups, 0)
        for number, (group, results) in enumerate(zip(groups, scored.results, strict=True)):
            rng = np.random.default_rng(
                derive(source.seed, "rows", SEED_NAMES[split], start + number)
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
