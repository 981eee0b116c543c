"""Findings from facts: where each is raised, where it is not, and what it states."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from keel.algorithms.presets import PRESETS
from keel.config.evaluation import SamplingSource
from keel.config.model import Lora, Model
from keel.config.sources import Rewards, RewardSource
from keel.config.stage import Optimizer
from keel.preflight import prompts as p
from keel.preflight import rewards as r
from keel.preflight import settings as c
from keel.preflight.batch import truncated
from keel.preflight.context import BudgetShare, Finding, catalogue, holding, percent, quantile
from keel.runs.rows import LeftOut
from keel.training.stages.rl import RLStage
from tests.source_tree import ROOT

HELD, MORE = BudgetShare(40, True), BudgetShare(40, False)


def only(findings: Iterable[Finding]) -> Finding | None:
    """The finding, if there is one."""
    found = list(findings)
    assert len(found) < 2
    return found[0] if found else None


def severity(finding: Finding | None) -> str | None:
    return None if finding is None else finding.severity


# ---------------------------------------------------------------- lengths, shares and keys


def test_budget_for_cut_completions_is_the_kaplan_meier_estimate() -> None:
    """By hand: of 10, 4 end at 5, 3 are cut there, 2 of 3 end at 8, 1 at 9.

    S(5) = 6/10, S(8) = 6/10 · 1/3 = 0.2, S(9) = 0.
    """
    lengths = [5, 5, 5, 5, 5, 5, 5, 8, 8, 9]
    ended = [True] * 4 + [False] * 3 + [True] * 3
    for share, tokens in ((0.4, 5), (0.41, 8), (0.8, 8), (0.81, 9)):
        assert holding(lengths, ended, share) == BudgetShare(tokens, True)
    assert holding(list(range(1, 101)), [True] * 100) == BudgetShare(95, True)
    assert holding([4, 8, 8, 8], [True, False, False, False]) == BudgetShare(8, False)
    assert str(BudgetShare(8, False)) == "more than 8"
    assert (quantile([3, 1, 2], 0.5), quantile([7], 0.95)) == (2, 7)
    with pytest.raises(ValueError, match="no lengths"):
        holding([], [])


def test_percent_has_a_decimal_where_small() -> None:
    shares = [percent(x) for x in (0.0, 0.004, 0.051, 0.5, 1.0)]
    assert shares == ["0 %", "0.4 %", "5.1 %", "50 %", "100 %"]


# ---------------------------------------------------------------- completions and rewards


@pytest.mark.parametrize(
    ("cut", "n", "held", "kind", "fix"),
    [
        # The interval's lower end: 20 of 256 are surely more than 5 %, 19 not; nor are 2 of 16.
        (0, 0, HELD, None, ""),
        (19, 256, HELD, None, ""),
        (20, 256, HELD, "truncated", "raise it to 40"),
        (2, 16, HELD, None, ""),
        (3, 16, HELD, "truncated", "raise it to 40"),
        (16, 16, MORE, "truncated", "raise it to 40 or more"),
        (31, 31, HELD, "truncated", "raise it to 40"),  # too few for never
        (32, 32, HELD, "eos-never", "raise it to 40"),
        (32, 32, MORE, "eos-never", "raise it, or name what ends an answer"),
    ],
)
def test_truncated_if_surely_one_in_twenty_is_cut(
    cut: int, n: int, held: BudgetShare, kind: str | None, fix: str
) -> None:
    found = truncated(cut, n, 10, held, "rollout.max_tokens")
    assert (found and found.kind) == kind
    if found is not None:
        assert found.fix.startswith(fix)
        assert found.severity == ("error" if kind == "eos-never" else "warning")
        assert str(held.tokens) in found.evidence


@pytest.mark.parametrize(
    ("lengths", "raised", "evidence"),
    [
        ([], None, ""),
        ([10] * 8, None, ""),
        ([5] * 30 + [11, 11], None, ""),
        ([5] * 20 + [15] * 12, "warning", "12 of 32 gold answers"),
        ([11] * 8, "error", "8 of 8"),
    ],
)
def test_gold_over_budget(lengths: list[int], raised: str | None, evidence: str) -> None:
    found = r.gold_over_budget(lengths, 10, "k")
    assert severity(found) == raised
    assert found is None or evidence in found.evidence


@pytest.mark.parametrize(
    ("best", "full", "samples", "wrong", "raised"),
    [
        ([1.0] * 8, 1.0, [0.0], (), None),
        ([0.0] * 8, 1.0, [0.0], (), "error"),
        ([0.0] * 8, 1.0, [1.0, 0.0], (), "error"),
        ([0.5] * 8, 1.0, [0.0], (), "error"),  # a rule of right and wrong owes it 1
        ([0.5] * 8, 1e-9, [0.0], (), None),  # a function of the user's does not
        ([0.0] * 8, 1e-9, [-3.0], (), None),  # the distance to the answer: nothing is more than 0
        ([0.0] * 8, 1e-9, [0.0, 0.0], (), "error"),
        ([-math.inf] * 8, 1.0, [0.0], (), "error"),
        ([None] * 8, 1.0, [0.0], (), None),  # it has nothing to judge by
        ([1.0] * 31 + [0.0], 1.0, [0.0], (), None),  # one odd row
        ([1.0] * 24 + [0.0] * 8, 1.0, [0.0], (), "warning"),
        # Where 0 is the most there is, a gold answer's 0 is accepted if wrong ones get less.
        ([0.0] * 8, 1e-9, [0.0], [-1.0] * 8, None),
        ([0.0] * 8, 1e-9, [0.0], [0.0] * 8, "error"),
        ([0.0] * 8, 1e-9, [0.0], [None] * 8, "error"),
    ],
)
def test_gold_refused(
    best: list[float | None], full: float, samples: list[float], wrong: Any, raised: str | None
) -> None:
    found = r.gold_refused("correct", ["#### 7"] * len(best), best, full, samples, "k", wrong)
    assert severity(found) == raised
    assert found is None or "'#### 7'" in found.evidence


def test_fix_of_a_users_reward_names_the_column() -> None:
    assert "(tasks.0.answer)" in r.own_reward_fix(False, "tasks.0")
    assert "lists of messages" in r.own_reward_fix(True, "tasks.0")
    assert "lists" not in r.own_reward_fix(False, "tasks.0")


def test_threshold_that_no_gold_answer_reaches() -> None:
    for best, samples in (([], [0.0]), ([1.0], [0.0]), ([0.5], [1.0])):
        assert r.threshold_unreached("r", best, samples, 1.0, "k") is None
    found = r.threshold_unreached("r", [0.2, 0.5], [0.0], 1.0, "k")
    assert found is not None
    assert found.fix.startswith("set it to 0.5")


@pytest.mark.parametrize(
    ("values", "gold", "raised"),
    [
        ([0.0] * 32, [1.0, 1.0], True),
        ([0.0] * 31, [1.0, 1.0], False),
        ([0.0] * 31 + [0.1], [1.0], False),
        ([0.0] * 32, [0.0], False),
        ([0.0] * 32, [], False),
    ],
)
def test_reward_zero_where_only_gold_answers_earn_it(
    values: list[float], gold: list[float], raised: bool
) -> None:
    found = r.reward_zero("correct", values, gold, "rewards.functions")
    assert (found is not None) == raised
    if found is not None:
        assert found.severity == "warning"  # so few samples do not exclude one in ten
        assert "at most 11 %" in found.evidence


def test_reward_constant_names_what_makes_it_so() -> None:
    assert r.reward_constant([1.0] * 31, 5, "k") is None
    assert r.reward_constant([1.0] * 31 + [0.9], 5, "k") is None
    for texts, why, key in (
        (5, None, "rl.rewards.functions"),
        (5, "the gate 'g' is shut", "rl.rewards.functions"),
        (1, None, "rl.rollout.temperature"),
    ):
        found = r.reward_constant([0.5] * 32, texts, "rl.rewards.functions", why)
        assert found is not None
        assert found.key == key
        assert found.evidence.startswith("0.5 for each of 32")
        assert why is None or found.evidence.endswith(why)


@pytest.mark.parametrize(
    ("flat", "groups", "members", "raised"),
    [(8, 8, 4, True), (7, 8, 4, False), (24, 32, 8, False), (26, 32, 8, True), (32, 32, 1, False),
     (0, 0, 8, False)],
)  # fmt: skip
def test_zero_variance_where_surely_most_groups_are_equal(
    flat: int, groups: int, members: int, raised: bool
) -> None:
    found = r.zero_variance(flat, groups, members, None, "rollout.group_size")
    assert (found is not None) == raised


def test_zero_variance_with_dynamic_sampling_states_the_refills() -> None:
    found, every = (r.zero_variance(flat, 32, 8, 10, "k") for flat in (28, 32))
    assert found is not None
    assert "about 8 rounds fill a step, 11 are made" in found.evidence
    assert every is not None
    assert "no number of refills" in every.evidence


# ---------------------------------------------------------------- prompts and rows


@pytest.mark.parametrize(
    ("over", "n", "raised"),
    [(0, 100, None), (2, 100, None), (4, 100, "warning"), (1, 2, "warning"), (3, 3, "error")],
)
def test_over_length(over: int, n: int, raised: str | None) -> None:
    lengths = [5] * (n - over) + [99] * over
    found = p.over_length(
        "rows-over-length", "rows", lengths, 50, "bound", "k", "raise it to {held}"
    )
    assert severity(found) == raised
    if found is not None:
        assert found.evidence.startswith(f"{over} of {n} inspected are longer than 50 tokens (boun")
        assert found.evidence.endswith("the longest 99")
        assert found.fix == f"raise it to {quantile(lengths, 0.95)}"
    for limit in (None, 99):
        assert p.over_length("rows-over-length", "rows", lengths, limit, "", "k", "") is None
    assert p.over_length("rows-over-length", "rows", [], 9, "", "k", "") is None


def test_unreadable_and_repeated_rows() -> None:
    bad = [LeftOut("a.jsonl", at, f"a.jsonl, line {at}: no column", {}) for at in range(9)]
    long = [LeftOut("a.jsonl", 1, "long", {}, "long")] * 99
    assert p.unreadable(long, 100, "k") is None
    assert p.unreadable(bad[:1], 1_000, "k") is None
    found = p.unreadable(bad, 91, "tasks.bad_rows")
    assert found is not None
    assert "9 of 100; a.jsonl, line 0" in found.evidence
    assert p.repeated(5, 100, "k") is p.repeated(0, 0, "k") is None
    again = p.repeated(40, 100, "k")
    assert again is not None
    assert "60 different" in again.evidence


# ---------------------------------------------------------------- settings


def test_warm_up_that_is_longer_than_the_stage() -> None:
    assert only(c.of_optimizer(Optimizer(warmup_steps=99), 100, "optimizer")) is None
    assert only(c.of_optimizer(Optimizer(warmup_ratio=0.1), 1, "optimizer")) is None
    assert only(c.of_optimizer(Optimizer(warmup_steps=100), 100, "optimizer")) is not None
    found = only(c.of_optimizer(Optimizer(warmup_steps=200, learning_rate=1e-4), 100, "optimizer"))
    assert found is not None
    assert found.key == "optimizer.warmup_steps"
    assert "5e-05, 50 % of 0.0001" in found.evidence


def test_reward_timeout_cut_and_shared_interpreter() -> None:
    slow = RewardSource(function="outcome", options={"model": "m", "timeout": 300.0})
    own = RewardSource(function="a:b", options={"timeout": 300.0, "isolation": "shared"})
    shared = RewardSource(function="code", options={"isolation": "shared"})
    apart = RewardSource(function="code", options={"isolation": "process"})
    found = list(c.of_rewards(Rewards(functions=(own, slow, apart, shared)), "rewards"))
    assert [(one.kind, one.key) for one in found] == [
        ("timeout-cut", "rewards.timeout"),
        ("shared-interpreter", "rewards.functions.3.options.isolation"),
    ]
    assert "functions.1" in found[0].evidence
    assert only(c.of_rewards(Rewards(functions=(slow,), timeout=300.0), "rewards")) is None


def sampling(**keys: object) -> SamplingSource:
    return RLStage.model_validate({"tasks": [{"name": "addition"}], **keys}).sampling


GSPO = {"preset": "gspo"}
SHOWN = {"data": [{"name": "my_lab.data:rows"}]}
TEACHER = {"name": "a/teacher"}
OBJECTIVES: list[tuple[dict[str, object], str | None]] = [
    ({"rollout": {"overlong_buffer": 256}}, None),
    ({"rollout": {"overlong_buffer": 257}}, "overlong-covers-all"),
    ({"algorithm": "rloo", "epochs": 2}, "reuse-without-ratio"),
    ({"algorithm": GSPO, "minibatches": 1}, "ratio-stays-1"),
    ({"algorithm": "dapo", "minibatches": 1}, "ratio-stays-1"),
    ({"algorithm": "ppo", "epochs": 1}, "ratio-stays-1"),
    ({"algorithm": "ppo_kl_penalty", "epochs": 1}, "ratio-stays-1"),
    ({"algorithm": {"preset": "grpo", "ratio": "sequence"}}, "ratio-stays-1"),
    ({"algorithm": {"preset": "grpo", "surrogate": {"kind": "cispo"}}}, "ratio-stays-1"),
    ({"algorithm": "gigpo", "rollout": {"max_turns": 2}}, None),
    # The old log-probs are of the weights as the step begins: only the correction sees the lag.
    (
        {
            "algorithm": {**GSPO, "corrections": {"kind": "truncate"}},
            "minibatches": 1,
            "rollout": {"async_level": 1},
        },
        "ratio-stays-1",
    ),
    (
        {
            "algorithm": {**GSPO, "corrections": {"kind": "truncate"}},
            "rollout": {"engine": "vllm"},
        },
        "resume-not-exact",
    ),
    ({"algorithm": GSPO, "minibatches": 1, "epochs": 2}, None),
    ({"algorithm": GSPO, "minibatches": 1, "rollout": {"old_log_probs": "engine"}}, None),
    ({"algorithm": {"preset": "grpo", "surrogate": {"high": 0.28}}}, None),
    *(
        (
            {"algorithm": name}
            | ({"teacher": TEACHER} if preset.algorithm.needs_teacher else {})
            | ({"demonstrations": SHOWN} if preset.algorithm.demonstrations else {}),
            "one-turn" if preset.algorithm.advantage.reads_turns else None,
        )
        for name, preset in PRESETS.items()
    ),
]


@pytest.mark.parametrize(("keys", "kind"), OBJECTIVES, ids=str)
def test_objective_settings(keys: dict[str, object], kind: str | None) -> None:
    found = only(c.of_objective(sampling(**keys), Model(name="a/b"), "rl."))
    assert (found and found.kind) == kind
    assert found is None or found.key.startswith("rl.")


@pytest.mark.parametrize(("epochs", "kind"), [(1, None), (2, "noisy-ratio")])
def test_dropout_moves_the_ratio_of_later_updates(epochs: int, kind: str | None) -> None:
    model = Model(name="a/b", lora=Lora(dropout=0.1))
    found = only(c.of_objective(sampling(epochs=epochs), model, "rl."))
    assert (found and found.kind) == kind


def test_learning_rate_of_a_whole_model_on_an_adapter() -> None:
    adapter = Model(name="a/b", lora=Lora())
    assert only(c.of_adapter(Model(name="a/b"), Optimizer(), "k")) is None
    assert only(c.of_adapter(adapter, Optimizer(learning_rate=1e-5), "k")) is None
    slow = only(c.of_adapter(adapter, Optimizer(), "k"))
    assert slow is not None
    assert slow.key == "k.learning_rate"


# ---------------------------------------------------------------- the page


def test_docs_list_exactly_the_kinds_that_are_raised() -> None:
    code = "".join(path.read_text("utf-8") for path in (ROOT / "src/keel/preflight").glob("*.py"))
    assert [kind for kind in catalogue() if f'"{kind}"' not in code] == []
    page = (ROOT / "docs/check.md").read_text(encoding="utf-8").splitlines()
    listed = [line.split("`")[1] for line in page if line.startswith("| `")]
    assert sorted(listed) == sorted(catalogue())
