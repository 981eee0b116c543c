"""Each finding from facts: where it is raised, where it is not, and what it says."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import get_args

import pytest

from keel.algorithms.presets import PRESETS
from keel.config.load import load_recipe, shipped
from keel.config.model import Lora, Model
from keel.config.optimisation import Optimizer
from keel.config.schema import RLStage
from keel.config.sources import Rewards, RewardSource
from keel.preflight.finding import Finding
from keel.preflight.finding_kinds import Kind, percent
from keel.preflight.findings import prompts as p
from keel.preflight.findings import samples as s
from keel.preflight.findings import settings as c
from keel.preflight.lengths import BudgetShare, holding, quantile
from keel.runs.quarantine import LeftOut
from tests.source_tree import ROOT

HELD = BudgetShare(40, True)


def kind(finding: Finding | None) -> str | None:
    return None if finding is None else finding.kind


# ---------------------------------------------------------------- lengths


def test_a_budget_that_holds_95_percent_of_what_all_ended() -> None:
    lengths = list(range(1, 101))
    assert holding(lengths, [True] * 100) == BudgetShare(95, True)
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile([7], 0.95) == 7


def test_cut_completions_are_known_to_be_longer_only() -> None:
    """By hand (Kaplan and Meier): of 10, 4 end at 5, 3 are cut there, 2 of 3 end at 8, 1 at 9.

    S(5) = 6/10, S(8) = 6/10 · 1/3 = 0.2, S(9) = 0.
    """
    lengths = [5, 5, 5, 5, 5, 5, 5, 8, 8, 9]
    ended = [True] * 4 + [False] * 3 + [True] * 3
    assert holding(lengths, ended, 0.4) == BudgetShare(5, True)
    assert holding(lengths, ended, 0.41) == BudgetShare(8, True)
    assert holding(lengths, ended, 0.8) == BudgetShare(8, True)
    assert holding(lengths, ended, 0.81) == BudgetShare(9, True)


def test_where_too_few_end_there_is_a_lower_bound() -> None:
    assert holding([4, 8, 8, 8], [True, False, False, False]) == BudgetShare(8, False)
    assert str(BudgetShare(8, False)) == "more than 8"
    with pytest.raises(ValueError, match="no lengths"):
        holding([], [])


# ---------------------------------------------------------------- completions and rewards


@pytest.mark.parametrize(
    ("cut", "n", "raised"),
    # The interval's lower end: 20 of 256 are surely more than 5 %, 19 not; nor are 2 of 16.
    [(0, 256, False), (19, 256, False), (20, 256, True), (2, 16, False), (3, 16, True)],
)
def test_truncated_where_surely_more_than_one_in_twenty_is_cut(
    cut: int, n: int, raised: bool
) -> None:
    found = s.truncated(cut, n, 10, HELD, "rollout.max_tokens")
    assert (found is not None) == raised
    if found is not None:
        assert found.key == "rollout.max_tokens"
        assert "40 tokens hold 95 %" in found.evidence
        assert found.mend == "raise it to 40"


def test_all_cut_is_another_finding() -> None:
    assert s.truncated(32, 32, 10, BudgetShare(40, False), "k") is None
    assert s.eos_never(31, 32, 10, HELD, "k") is None
    assert s.eos_never(31, 31, 10, HELD, "k") is None  # too few to say
    found = s.eos_never(32, 32, 10, BudgetShare(40, False), "k")
    assert found is not None
    assert found.severity == "error"
    assert "nor do they within 40" in found.evidence
    assert "sft" in found.mend
    few = s.truncated(16, 16, 10, BudgetShare(40, False), "k")
    assert few is not None
    assert few.mend == "raise it to 40 or more"
    later = s.eos_never(32, 32, 10, HELD, "k")
    assert later is not None
    assert later.mend == "raise it to 40"


def test_gold_answers_over_the_budget() -> None:
    assert s.gold_over_budget([], 10, "k") is None
    assert s.gold_over_budget([5] * 30 + [11, 11], 10, "k") is None
    found = s.gold_over_budget([5] * 20 + [15] * 12, 10, "k")
    assert found is not None
    assert found.severity == "warning"
    assert "12 of 32" in found.evidence
    assert found.mend == "raise it to 15 or more"
    every = s.gold_over_budget([11] * 8, 10, "k")
    assert every is not None
    assert every.severity == "error"
    assert s.gold_over_budget([10] * 8, 10, "k") is None


def test_gold_answers_that_cannot_be_written() -> None:
    assert s.gold_unwritable([], 8, "k") is None
    found = s.gold_unwritable(["the gold answer holds '#'"], 8, "k")
    assert found is not None
    assert "1 of 8" in found.evidence
    assert "'#'" in found.evidence


@pytest.mark.parametrize(
    ("best", "full", "samples", "raised"),
    [
        ([1.0] * 8, 1.0, [0.0], None),
        ([0.0] * 8, 1.0, [0.0], "error"),
        ([0.0] * 8, 1.0, [1.0, 0.0], "error"),
        ([0.5] * 8, 1.0, [0.0], "error"),  # a rule of right and wrong owes it 1
        ([0.5] * 8, 1e-9, [0.0], None),  # a function of the user's does not
        ([0.0] * 8, 1e-9, [-3.0], None),  # the distance to the answer: nothing is more than 0
        ([0.0] * 8, 1e-9, [0.0, 0.0], "error"),
        ([-math.inf] * 8, 1.0, [0.0], "error"),
        ([None] * 8, 1.0, [0.0], None),  # it has nothing to judge by
        ([1.0] * 31 + [0.0], 1.0, [0.0], None),  # one odd row
        ([1.0] * 24 + [0.0] * 8, 1.0, [0.0], "warning"),
    ],
)
def test_gold_refused(
    best: list[float | None], full: float, samples: list[float], raised: str | None
) -> None:
    found = s.gold_refused("correct", ["#### 7"] * len(best), best, full, samples, "tasks.answer")
    assert (None if found is None else found.severity) == raised
    if found is not None:
        assert "'#### 7'" in found.evidence


@pytest.mark.parametrize(
    ("values", "gold", "raised"),
    [
        ([0.0] * 32, [1.0, 1.0], True),
        ([0.0] * 31, [1.0, 1.0], False),
        ([0.0] * 31 + [0.1], [1.0], False),
        ([0.0] * 32, [0.0], False),
        ([0.0] * 32, [], False),
        ([0.0] * 32, [None, 0.5], True),
    ],
)
def test_a_reward_that_only_the_gold_answer_earns(
    values: list[float], gold: list[float | None], raised: bool
) -> None:
    found = s.reward_zero("correct", values, gold, "rewards.functions")
    assert (found is not None) == raised
    if found is not None:
        assert found.severity == "warning"  # so few samples leave room for one in ten
        assert "at most 11 %" in found.evidence


def test_a_reward_that_never_varies() -> None:
    assert s.reward_constant([1.0] * 31, 5, "k") is None
    assert s.reward_constant([1.0] * 31 + [0.9], 5, "k") is None
    found = s.reward_constant([0.5] * 32, 5, "rl.rewards.functions")
    assert found is not None
    assert found.key == "rl.rewards.functions"
    assert "0.5 for each of 32" in found.evidence
    gate = s.reward_constant([0.0] * 32, 5, "rewards.functions.0.gate", "the gate 'g' is shut")
    assert gate is not None
    assert (gate.key, gate.evidence[-20:]) == ("rewards.functions.0.gate", "the gate 'g' is shut")
    same = s.reward_constant([0.5] * 32, 1, "rl.rewards.functions")
    assert same is not None
    assert same.key == "rl.rollout.temperature"


@pytest.mark.parametrize(
    ("flat", "groups", "members", "raised"),
    [
        (8, 8, 4, True),
        (7, 8, 4, False),
        (24, 32, 8, False),
        (26, 32, 8, True),
        (32, 32, 1, False),
        (0, 0, 8, False),
    ],
)
def test_groups_without_variance(flat: int, groups: int, members: int, raised: bool) -> None:
    found = s.zero_variance(flat, groups, members, None, "rollout.group_size")
    assert (found is not None) == raised


def test_dynamic_sampling_says_how_often_it_would_refill() -> None:
    found = s.zero_variance(28, 32, 8, 10, "k")
    assert found is not None
    assert "about 8 rounds fill a step, 11 are made" in found.evidence
    every = s.zero_variance(32, 32, 8, 10, "k")
    assert every is not None
    assert "no number of refills" in every.evidence


# ---------------------------------------------------------------- prompts and rows


@pytest.mark.parametrize(
    ("over", "n", "severity"),
    [(0, 100, None), (2, 100, None), (4, 100, "warning"), (1, 2, "warning"), (3, 3, "error")],
)
def test_prompts_over_length(over: int, n: int, severity: str | None) -> None:
    lengths = [5] * (n - over) + [99] * over
    found = p.prompts_over_length("t", lengths, 50, "what is left", "prompts.max_tokens")
    assert (None if found is None else found.severity) == severity
    if found is not None:
        assert f"{over} of {n}" in found.evidence
        assert "the longest 99" in found.evidence
        own = p.prompts_over_length("t", lengths, 50, "", "prompts.max_tokens", own=True)
        assert own is not None
        assert own.mend.startswith("raise it to ")
    assert p.prompts_over_length("t", lengths, None, "", "k") is None
    assert p.prompts_over_length("t", lengths, 99, "", "k") is None


def test_rows_over_length() -> None:
    assert p.rows_over_length(0, 50, 10, 9, 9, "max_tokens") is None
    assert p.rows_over_length(9, 50, None, 99, 20, "max_tokens") is None
    found = p.rows_over_length(9, 50, 10, 99, 20, "max_tokens")
    assert found is not None
    assert found.severity == "warning"
    assert found.mend.startswith("raise it to 20")
    every = p.rows_over_length(50, 50, 10, 99, 20, "max_tokens")
    assert every is not None
    assert every.severity == "error"


def test_unreadable_and_repeated_rows() -> None:
    bad = [LeftOut("a.jsonl", at, f"a.jsonl, line {at}: no column", {}) for at in range(9)]
    long = [LeftOut("a.jsonl", 1, "long", {}, "long")] * 99
    assert p.unreadable(long, 100, "k") is None
    assert p.unreadable(bad[:1], 1_000, "k") is None
    found = p.unreadable(bad, 91, "tasks.bad_rows")
    assert found is not None
    assert "9 of 100; a.jsonl, line 0" in found.evidence
    assert p.repeated(5, 100, "k") is None
    assert p.repeated(0, 0, "k") is None
    again = p.repeated(40, 100, "k")
    assert again is not None
    assert "60 different" in again.evidence


def test_one_leaked_prompt_is_told() -> None:
    assert p.trained_on_held_out(0, 50, "sft", "rl", "k") is None
    found = p.trained_on_held_out(1, 50, "sft", "rl", "k")
    assert found is not None
    assert "1 of the 50" in found.evidence
    own = p.trained_on_held_out(1, 50, "rl", "rl", "k")
    assert own is not None
    assert "same validation_fraction" in own.mend


# ---------------------------------------------------------------- settings


def test_warm_up_that_outlasts_the_stage() -> None:
    assert c.warm_up(Optimizer(warmup_steps=100), 100, "optimizer") is None
    found = c.warm_up(Optimizer(warmup_steps=200, learning_rate=1e-4), 100, "optimizer")
    assert found is not None
    assert found.key == "optimizer.warmup_steps"
    assert "5e-05, 50 % of 0.0001" in found.evidence


def rewards(*functions: RewardSource, timeout: float = 60.0) -> Rewards:
    return Rewards(functions=functions, timeout=timeout)


def test_a_timeout_that_is_cut() -> None:
    slow = RewardSource(function="outcome", options={"model": "m", "timeout": 300.0})
    mine = RewardSource(function="a:b", options={"timeout": 300.0})
    found = list(c.timeouts(rewards(mine, slow), "rewards"))
    assert [one.key for one in found] == ["rewards.timeout"]
    assert "functions.1" in found[0].evidence
    assert list(c.timeouts(rewards(slow, timeout=300.0), "rewards")) == []


def test_code_that_shares_its_tests_interpreter() -> None:
    mine = RewardSource(function="m:f", options={"isolation": "shared"})
    shared = RewardSource(function="code", options={"isolation": "shared"})
    apart = RewardSource(function="code", options={"isolation": "process"})
    (finding,) = c.shared_interpreters(rewards(apart, mine, shared), "rewards")
    assert finding.kind == "shared-interpreter"
    assert finding.key == "rewards.functions.2.options.isolation"


def stage(**keys: object) -> RLStage:
    return RLStage.model_validate({"tasks": [{"name": "addition"}], **keys})


def test_settings_of_a_stage() -> None:
    assert c.overlong(stage(rollout={"overlong_buffer": 256}), "rollout") is None
    assert kind(c.overlong(stage(rollout={"overlong_buffer": 257}), "rollout")) == (
        "overlong-covers-all"
    )
    assert c.reuse(stage(algorithm="rloo"), "epochs") is None
    assert c.reuse(stage(algorithm="ppo"), "epochs") is None
    assert kind(c.reuse(stage(algorithm="rloo", epochs=2), "epochs")) == "reuse-without-ratio"


GSPO = {"preset": "gspo"}
STILL: list[dict[str, object]] = [
    {"algorithm": GSPO, "minibatches": 1},
    {"algorithm": "dapo", "minibatches": 1},
    {"algorithm": "ppo", "epochs": 1},
    {"algorithm": "ppo_kl_penalty", "epochs": 1},
    {"algorithm": {"preset": "grpo", "ratio": "sequence"}},
    # The old log-probs are of the weights as the step begins: only the correction sees the lag.
    {
        "algorithm": {**GSPO, "correction": {"kind": "truncate"}},
        "minibatches": 1,
        "rollout": {"async_level": 1},
    },
    {"algorithm": {"preset": "grpo", "surrogate": {"kind": "cispo"}}},
]
MOVES: list[dict[str, object]] = [
    *({"algorithm": name} for name in PRESETS),
    {"algorithm": GSPO, "minibatches": 1, "epochs": 2},
    {"algorithm": GSPO, "minibatches": 1, "rollout": {"old_log_probs": "engine"}},
    {"algorithm": {"preset": "grpo", "surrogate": {"high": 0.28}}},
]


def test_a_ratio_that_cannot_move_is_found_and_no_other() -> None:
    for keys in STILL:
        assert kind(c.still_ratio(stage(**keys), "minibatches")) == "ratio-stays-1", keys
    for keys in MOVES:
        assert c.still_ratio(stage(**keys), "minibatches") is None, keys


@pytest.mark.parametrize("name", shipped())
def test_no_shipped_recipe_has_a_ratio_that_cannot_move(name: str) -> None:
    stages = load_recipe(name).stages
    assert not any(isinstance(one, RLStage) and one.ratio_stays_one for one in stages)


def test_weights_that_do_not_move() -> None:
    assert c.frozen_weights("float32", 0.9, 1e-6, "k") is None
    assert c.frozen_weights("bfloat16", 0.5, 1e-6, "k") is None
    found = c.frozen_weights("bfloat16", 0.97, 1e-6, "optimizer.learning_rate")
    assert found is not None
    assert "97 %" in found.evidence
    adapter = Model(name="a/b", lora=Lora())
    assert c.adapter_rate(Model(name="a/b"), Optimizer(), "k") is None
    assert kind(c.adapter_rate(adapter, Optimizer(), "k")) == "adapter-hardly-moves"
    assert c.adapter_rate(adapter, Optimizer(learning_rate=1e-5), "k") is None


def test_a_model_that_could_be_quicker() -> None:
    assert kind(c.no_compiler("none")) == "no-compiler"
    assert c.no_compiler("3fa25c0d9e11") is None


# ---------------------------------------------------------------- judges, kinds, the page


def test_shares_in_words() -> None:
    assert [percent(x) for x in (0.0, 0.004, 0.051, 0.5, 1.0)] == [
        "0 %", "0.4 %", "5.1 %", "50 %", "100 %",
    ]  # fmt: skip


def raised_kinds() -> Sequence[str]:
    """Every kind that the code raises: the first argument of `found`."""
    kinds = []
    for path in sorted((ROOT / "src/keel/preflight").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "found" and node.args:
                    assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}"
                    kinds.append(str(node.args[0].value))
                assert node.func.id != "Finding" or path.name == "finding_kinds.py", path.name
    return kinds


def test_every_kind_is_raised_and_on_the_page() -> None:
    page = (ROOT / "docs/check.md").read_text(encoding="utf-8")
    assert set(raised_kinds()) == set(get_args(Kind))
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    named = {line.split("`")[1] for line in rows}
    assert named == set(get_args(Kind))
