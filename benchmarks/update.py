"""The update alone, forward and backward: packed against padded, prompts shared and not.

    python -m benchmarks.update                      # prints a Markdown table
    python -m benchmarks.update --rows equal-20 --repeats 9 --json update.json
    python -m benchmarks.update --smoke              # tiny, in seconds

A row is LENGTHS-PROMPT: random prompts of PROMPT tokens, and random completions of 60 tokens each
(`equal`) or of geometric lengths with that mean and at most 200 (`ragged`); 64 sequences in groups
of 8. For prompts of 2,000 tokens they are one group of 16, with completions of 50. The model is the
fp32 Llama that `loop.py` has (256 wide, 6 layers), with random weights.

- padded: transformers' own model with its own attention, all sequences padded right to the longest,
  under a mask. The head sees the places of completions alone. It learns from so many sequences at
  a time as keep to --padded-tokens, padding counted.
- packed: `keel.learn.learner.backward` with no prompt shared.
- shared: the same, as a run has it: a prompt once for its group.

All three have one loss, GRPO's without a divergence, on the first update of a step, and end in the
same gradient: of each parameter to 1e-4 of its norm, which is checked before anything is timed. The
packed sides also make what a run records (entropy, ratios), the padded one the loss alone. The
sides take turns in going first; reported are medians over the repeats, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from benchmarks.loop_keel import ALPHABET, chance
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.config.model import BuildModel, Model
from keel.config.optimisation import Optimizer
from keel.learn.batch import Batch, Estimates, TrainBatch, from_groups
from keel.learn.learner import Learner, backward
from keel.learn.loss import prepare
from keel.learn.optimizer import AdamW, trainable
from keel.learn.token_budget import TokenBudget
from keel.models.build import build_model
from keel.models.policy import Policy, load_policy
from keel.types import Completion, Group, Prompt

SIDES = ("padded", "packed", "shared")
BUDGET = 16_384
"""A recipe's token budget where it names none."""
PADDED = 2048
AGREEMENT = 1e-4
"""Of a parameter's gradient: float32 sums of some ten thousand tokens, in another order."""
SEED = 0
MODEL = BuildModel(alphabet=ALPHABET, hidden_size=256, layers=6, heads=4, context=4096)
SMALL = BuildModel(alphabet=ALPHABET, hidden_size=32, layers=1, heads=4, context=4096)
"""For --smoke."""
FIRST = 2
"""The smallest token id that is a character."""


@dataclass(frozen=True)
class Case:
    """A row of the table. `length` is of a completion, and the mean of ragged ones, up to `most`"""

    lengths: str
    prompt: int
    group: int = 8
    sequences: int = 64
    length: int = 60
    most: int = 200

    @property
    def name(self) -> str:
        return f"{self.lengths}-{self.prompt}"


LONG = Case("equal", 2000, group=16, sequences=16, length=50)
CASES = (
    Case("ragged", 20),
    Case("equal", 20),
    Case("ragged", 500),
    Case("equal", 500),
    LONG,
)
SMOKE = (
    Case("ragged", 20, 4, 8, 6, 20),
    Case("equal", 20, 4, 8, 6),
    Case("equal", 2000, 2, 2, 5),
)


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Made-up groups, and the advantage of each of their sequences."""

    groups: Sequence[Group]
    advantage_S: Tensor

    @property
    def completions(self) -> list[tuple[Prompt, Completion]]:
        return [(group.prompt, one) for group in self.groups for one in group.completions]


# ---------------------------------------------------------------- what is learned from


def rollouts(vocabulary: int, case: Case) -> Rollouts:
    """Groups of random tokens, as the case has them."""
    rng = np.random.default_rng(SEED)
    count = case.sequences // case.group
    lengths = np.full(case.sequences, case.length)
    if case.lengths == "ragged":
        drawn = rng.geometric(chance(case.length, case.most), case.sequences)
        lengths = drawn.clip(max=case.most)

    def completion(length: int) -> Completion:
        tokens = rng.integers(FIRST, vocabulary, length)
        written = np.ones(length, dtype=np.bool_)
        return Completion(tokens, np.full(length, -4.0, np.float32), written, "length", "")

    groups = []
    for number in range(count):
        ids = tuple(rng.integers(FIRST, vocabulary, case.prompt).tolist())
        own = lengths[number * case.group : (number + 1) * case.group].tolist()
        groups.append(Group(Prompt(f"{number}", "", tokens=ids), tuple(map(completion, own))))
    advantage_S = torch.from_numpy(rng.standard_normal(case.sequences).astype(np.float32))
    return Rollouts(groups, advantage_S)


def grpo() -> Algorithm:
    """GRPO's row, without its divergence."""
    return PRESETS["grpo"].algorithm.model_copy(update={"divergence": None})


def prepared(row: Algorithm, made: Rollouts, shared: bool) -> TrainBatch[Batch]:
    """The batch that `backward` takes."""
    batch = from_groups(made.groups)
    advantage_N = made.advantage_S.repeat_interleave(batch.lengths_S)
    batch = batch if shared else replace(batch, prompt_lengths=())
    return prepare(row, batch, Estimates(advantage_N), max_tokens=0)


def learner_of(policy: Policy) -> Learner:
    """All that an update needs; nothing is stepped here."""
    return Learner(policy, AdamW(trainable(policy.model), Optimizer()), TokenBudget(BUDGET))


def built(spec: BuildModel) -> Policy:
    """A policy with random weights, on the CPU."""
    return load_policy(Model(build=spec, device="cpu"), SEED)


# ---------------------------------------------------------------- the padded side


@dataclass(frozen=True, eq=False)
class Padded:
    """The same sequences as (S, L), filled up on the right, and their completions as (S, C)."""

    ids_SL: Tensor
    seen_SL: Tensor
    token_SC: Tensor
    written_SC: Tensor
    advantage_S: Tensor
    prompt: int


def padded(made: Rollouts, pad: int) -> Padded:
    """All prompts have one length, so that completions begin at one place."""
    pairs = made.completions
    prompt = len(pairs[0][0].tokens)
    longest = max(len(one) for _, one in pairs)
    ids = torch.full((len(pairs), prompt + longest), pad)
    seen = torch.zeros_like(ids)
    for i, (asked, one) in enumerate(pairs):
        ids[i, : prompt + len(one)] = torch.tensor([*asked.tokens, *one.tokens.tolist()])
        seen[i, : prompt + len(one)] = 1
    answers = slice(prompt, None)
    return Padded(ids, seen, ids[:, answers], seen[:, answers], made.advantage_S, prompt)


def padded_backward(model: nn.Module, batch: Padded, low: float, high: float, tokens: int) -> None:
    """Leave the gradient of GRPO's loss in the parameters, so many tokens at a time.

    −(1/S) Σ_s (1/|o_s|) Σ_t min(ρ A_s, clip(ρ, 1−low, 1+high) A_s), where ρ = π / π.detach().
    """
    sequences, width = batch.ids_SL.shape
    rows = max(1, tokens // width)
    for start in range(0, sequences, rows):
        part = slice(start, start + rows)
        logits = model(
            input_ids=batch.ids_SL[part],
            attention_mask=batch.seen_SL[part],
            use_cache=False,
            logits_to_keep=width - batch.prompt + 1,
        ).logits[:, :-1]
        log_prob = logits.log_softmax(-1).gather(-1, batch.token_SC[part, :, None])[..., 0]
        ratio = (log_prob - log_prob.detach()).exp()
        advantage, written = batch.advantage_S[part, None], batch.written_SC[part]
        least = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        mean = (least * written).sum(1) / written.sum(1)
        (-mean.sum() / sequences).backward()  # type: ignore[no-untyped-call]


# ---------------------------------------------------------------- figures


@dataclass(frozen=True, eq=False)
class Bench:
    """Two models of one set of weights."""

    learner: Learner
    plain: Any
    padded_tokens: int

    def sides(self, case: Case) -> dict[str, Callable[[], None]]:
        """What leaves a gradient, for each side."""
        row = grpo()
        made = rollouts(self.plain.config.vocab_size, case)
        filled = padded(made, self.plain.config.pad_token_id)
        batches = {name: prepared(row, made, name == "shared") for name in SIDES[1:]}
        clip = row.surrogate
        assert clip.kind == "clip"

        def plain() -> None:
            padded_backward(self.plain, filled, clip.low, clip.high, self.padded_tokens)

        def ours(name: str) -> None:
            # A batch keeps what it works out of itself, and a run has a new one each step.
            backward(self.learner, row, replace(batches[name]), 0.0, BUDGET)

        return {"padded": plain, "packed": lambda: ours("packed"), "shared": lambda: ours("shared")}

    def clear(self) -> None:
        """Drop the gradients of both models."""
        self.learner.clear()
        self.plain.zero_grad(set_to_none=True)

    def gradients(self, side: str) -> dict[str, Tensor]:
        """What a side has left, by the parameters' names."""
        model = self.plain if side == "padded" else self.learner.policy.model
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert len(found) == len(list(model.parameters())), "a parameter has no gradient"
        return found


def bench_of(spec: BuildModel, padded_tokens: int) -> Bench:
    policy = built(spec)
    plain = build_model(spec, SEED, torch.float32)
    plain.load_state_dict(policy.model.state_dict())
    return Bench(learner_of(policy), plain.train(), padded_tokens)


def agree(bench: Bench, case: Case) -> float:
    """The largest difference of a parameter's gradient over its norm; asserts that it is small."""
    found = {}
    for name, once in bench.sides(case).items():
        bench.clear()
        once()
        found[name] = bench.gradients(name)
    wanted = found["padded"]
    largest = 0.0
    for side in SIDES[1:]:
        for name, gradient in wanted.items():
            apart = float((found[side][name] - gradient).norm() / gradient.norm())
            assert apart <= AGREEMENT, f"{case.name}, {side}: {name} differs by {apart:.1e}"
            largest = max(largest, apart)
    return largest


def compare(bench: Bench, case: Case, repeats: int) -> dict[str, Any]:
    """A row's figures: seconds of each side, by turns."""
    apart = agree(bench, case)
    sides = bench.sides(case)
    passes: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeats):
        turn = number % len(sides)
        for name in [*SIDES[turn:], *SIDES[:turn]]:
            bench.clear()
            start = time.perf_counter()
            sides[name]()
            passes[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(some) for name, some in passes.items()}
    lengths = [len(one) for _, one in rollouts(FIRST + 1, case).completions]
    return {
        "row": case.name,
        **asdict(case),
        "completion_tokens": sum(lengths),
        "tokens": sum(lengths) + case.prompt * case.sequences,
        "padded_tokens": (max(lengths) + case.prompt) * case.sequences,
        "seconds": seconds,
        "packed_ratio": seconds["padded"] / seconds["packed"],
        "shared_ratio": seconds["packed"] / seconds["shared"],
        "whole_ratio": seconds["padded"] / seconds["shared"],
        "gradient_difference": apart,
        "passes": passes,
    }


HEAD = (
    "| lengths | prompt | group | sequences | tokens written | padded, s | packed, s | shared, s "
    "| padded / packed | packed / shared | padded / shared |\n" + "|---" * 11 + "|"
)


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    seconds = " | ".join(f"{row['seconds'][name]:.3g}" for name in SIDES)
    return (
        f"| {row['lengths']} | {row['prompt']:,} | {row['group']} | {row['sequences']} "
        f"| {row['completion_tokens']:,} | {seconds} | {row['packed_ratio']:.2f} "
        f"| {row['shared_ratio']:.2f} | {row['whole_ratio']:.2f} |"
    )


def report(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What goes into the file; None is a ratio whose row was not asked for."""
    named = {row["row"]: row for row in rows}
    return {
        "shared_ratio": named.get(LONG.name, {}).get("shared_ratio"),
        **{
            f"packed_{lengths}_ratio": named.get(f"{lengths}-20", {}).get("packed_ratio")
            for lengths in ("ragged", "equal")
        },
        "rows": rows,
        "settings": settings,
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
    }


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--padded-tokens", type=int, default=PADDED, metavar="N")
    parser.add_argument("--smoke", action="store_true", help="tiny, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(words)
    if min(arguments.repeats, arguments.threads, arguments.padded_tokens) < 1:
        parser.error("--repeats, --threads and --padded-tokens have to be 1 or more")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parsed(words)
    torch.set_num_threads(arguments.threads)
    repeats = 1 if arguments.smoke else arguments.repeats
    spec = SMALL if arguments.smoke else MODEL
    bench = bench_of(spec, arguments.padded_tokens)
    print(f"{os.cpu_count()} cores, {arguments.threads} threads, medians of {repeats}\n\n{HEAD}")
    rows = []
    for case in SMOKE if arguments.smoke else CASES:
        if arguments.rows is None or case.name in arguments.rows:
            rows.append(compare(bench, case, repeats))
            print(line(rows[-1]), flush=True)
    settings = {"threads": arguments.threads, "repeats": repeats, "model": spec.model_dump()}
    settings |= {"padded_tokens": arguments.padded_tokens, "smoke": arguments.smoke}
    if arguments.json:
        written = json.dumps(report(rows, settings), indent=2) + "\n"
        arguments.json.write_text(written, "utf-8")


if __name__ == "__main__":
    main()
