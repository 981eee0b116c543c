"""Each condition fires on a run that is in it, and not on one that nearly is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.analysis.diagnosis.history import StageHistory, summarise
from keel.analysis.diagnosis.table import conditions, conditions_of, diagnose, markdown
from keel.runs.rows import RolloutRow
from tests.analysis.test_plots import columns as by_name
from tests.analysis.written_runs import completion, ids, written_run

STEPS = 40
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "diagnosis.md"
RNG = np.random.default_rng(0)
WOBBLE = RNG.normal(0, 0.01, STEPS)
FREE: dict[str, Any] = {"algorithm": {"preset": "grpo", "divergence": None}}
GRPO: dict[str, Any] = {"algorithm": "grpo"}
SEVERAL: dict[str, Any] = {**FREE, "minibatches": 4}
TWO = {
    "rewards": {
        "functions": [
            {"function": "length", "name": "form", "options": {"target": 4}},
            {"function": "exact_match"},
        ]
    }
}
GOLD = {
    "rewards": {
        "functions": [
            {"function": "length", "name": "proxy", "options": {"target": 4}},
            {"function": "exact_match", "weight": 0.0},
        ]
    }
}


def ramp(first: float, last: float) -> np.ndarray[Any, Any]:
    return np.linspace(first, last, STEPS) + WOBBLE


def fours(one: Callable[[int, int], RolloutRow], prompts: int = 10) -> list[RolloutRow]:
    """Four completions to each prompt, by their numbers."""
    return [one(g, i) for g in range(prompts) for i in range(4)]


def mixed(reward: Callable[[int, int], float] = lambda g, i: float(i % 2)) -> list[RolloutRow]:
    return fours(lambda g, i: completion(g, reward(g, i), (5, 6, 7, i)))


def every(
    rows: Callable[[int], list[RolloutRow]], spacing: int = 4
) -> Mapping[int, list[RolloutRow]]:
    return {step: rows(step) for step in range(spacing, STEPS + 1, spacing)}


def usual(**columns: Any) -> dict[str, Any]:
    """The metrics of a run that learns."""
    return {
        "reward": ramp(0.2, 0.7),
        "reward_std": 0.4,
        "frac_reward_zero_std": 0.2,
        "rewards/task/std": 0.4,
        "entropy": ramp(1.0, 0.6),
        "kl": np.linspace(0.01, 0.1, STEPS),
        "kl/old": 1e-3,
        "ratio/mean": 1.0,
        "clip_ratio/region_mean": 0.01,
        "grad_norm": 1.0,
        "completions/mean_length": 10.0,
        "completions/clipped_ratio": 0.0,
        **columns,
    }


def evaluated(*accuracies: float, width: float = 0.14) -> dict[str, Any]:
    """Evaluations at equal distances, the last at the last step, with 95 % intervals."""
    columns: dict[str, Any] = {}
    for end, shift in (("", 0.0), ("/low", -width / 2), ("/high", width / 2)):
        column: list[float | None] = [None] * STEPS
        for number, value in enumerate(accuracies, start=1):
            column[number * STEPS // len(accuracies) - 1] = value + shift
        columns[f"eval/pass@1{end}"] = column
    return columns


@dataclass(frozen=True)
class Twin:
    """A run in a condition, and the changes that take it out of it."""

    condition: str
    columns: dict[str, Any]
    near: dict[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=lambda: GRPO)
    rollouts: Callable[[int], list[RolloutRow]] = lambda step: mixed()
    near_recipe: Mapping[str, Any] | None = None
    near_rollouts: Callable[[int], list[RolloutRow]] | None = None


def _wrong_grow(step: int) -> list[RolloutRow]:
    """Right answers of 4 tokens, wrong ones of ever more."""

    def one(g: int, i: int) -> RolloutRow:
        end = 14 + (0 if i % 2 else step // 4)
        return completion(g, i % 2, tuple(range(10, end)), advantage=2.0 * (i % 2) - 1)

    return fours(one)


def _both_grow(step: int) -> list[RolloutRow]:
    tokens = tuple(range(10, 14 + step // 4))
    return fours(lambda g, i: completion(g, i % 2, tokens, advantage=2.0 * (i % 2) - 1))


def _wrong_spread(step: int, shared: bool = True, spread: int = 2) -> list[RolloutRow]:
    """Right answers of 4 and 8 tokens, wrong ones of ever more, half of them `spread` times as
    long; the weight of a completion is shared among its tokens, or each token has the same."""

    def one(g: int, i: int) -> RolloutRow:
        right, long = i % 2 == 0, i > 1
        count = (8 if long else 4) if right else (4 + step // 4) * (spread if long else 1)
        weight = 1 / (32 * count) if shared else 1 / 200
        tokens = tuple(range(10, 10 + count))
        return completion(g, right, tokens, advantage=0.5 if right else -1.5, weight=weight)

    return fours(one, prompts=8)


def _paid_by_length(step: int, paid: bool = True) -> list[RolloutRow]:
    """Lengths grow and spread within groups; the reward is length, or rises more than that."""

    def one(g: int, i: int) -> RolloutRow:
        length = 6 + step // 4 + 2 * i
        reward = length / 30 + (0.0 if paid else step / STEPS)
        return completion(g, reward, tuple(range(10, 10 + length)))

    return fours(one)


def _cut(step: int, reward: float = 0.0) -> list[RolloutRow]:
    """Every other completion is cut."""

    def one(g: int, i: int) -> RolloutRow:
        ended = i % 2 == 0
        return completion(g, 1.0 - (g % 2) if ended else reward, finish=("length", "eos")[ended])

    return fours(one)


def _repeats(step: int, full: bool = True) -> list[RolloutRow]:
    """Completions of 24 tokens, of which ever more are one and the same, or a few more."""
    same = min(24, step // 2 + 2) if full else 16 + step // 20
    tokens = (*range(100, 124 - same), *[7] * same)
    return fours(lambda g, i: completion(g, i % 2, tokens))


def _turns(step: int, same: bool = True) -> list[RolloutRow]:
    """Right answers after words of the environment, by one sequence of tokens or by many."""

    def one(g: int, i: int) -> RolloutRow:
        return completion(g, i > 0, (5, 6 if same and i else 10 + g), context=3)

    return fours(one)


def _few_without(step: int, few: int = 1) -> list[RolloutRow]:
    """Right answers after words of the environment, one of ten wrong, and `few` without that are
    all right."""

    def one(g: int, i: int) -> RolloutRow:
        return completion(g, i + g > 0, (5, 6), context=0 if i == 3 and g < few else 3)

    return fours(one)


def _components(step: int) -> list[RolloutRow]:
    return [
        completion(g, 1.0, components={"form": 1.0, "exact_match": float(g == 0)})
        for g in range(10)
    ]


def _silent(step: int, most: float) -> list[RolloutRow]:
    """Completions of which up to a share hold no text."""
    share = most * step / STEPS

    def one(g: int, i: int) -> RolloutRow:
        return completion(g, i % 2, completion="42" if (4 * g + i) % 20 >= 20 * share else "")

    return fours(one)


def _marked(text: str) -> list[RolloutRow]:
    """Completions of which every other one is rewarded, for this text."""
    return fours(lambda g, i: completion(g, i % 2, completion=text if i % 2 else "42"))


def _corrected(level: str) -> dict[str, Any]:
    """A recipe that weighs tokens, or completions as a whole."""
    corrections = [{"kind": "truncate", "level": level}]
    return {**SEVERAL, "algorithm": {**SEVERAL.get("algorithm", {}), "corrections": corrections}}


TWINS = (
    Twin(
        "no-reward",
        usual(),
        rollouts=lambda step: mixed(lambda g, i: float("nan")),
        near_rollouts=lambda step: mixed(lambda g, i: float("nan") if g > 1 else i % 2),
    ),
    Twin(
        "no-signal",
        usual(frac_reward_zero_std=0.95, reward=ramp(0.1, 0.1)),
        {"frac_reward_zero_std": np.where(np.arange(STEPS) < 25, 0.95, 0.8)},
    ),
    Twin(
        "saturated-reward",
        usual(reward=np.minimum(ramp(0.2, 3.0), 1.0), frac_reward_zero_std=0.95),
        {"reward": np.minimum(ramp(0.2, 3.0), 0.93)},
    ),
    Twin(
        "entropy-collapse",
        usual(
            entropy=np.geomspace(1.0, 0.01, STEPS),
            reward=np.minimum(ramp(0.2, 1.2), 0.5),
            frac_reward_zero_std=0.7,
        ),
        {"reward": np.minimum(ramp(0.2, 1.5), 0.95)},  # it is right, so it is certain
    ),
    Twin(
        "learning-rate-high",
        usual(reward=np.r_[ramp(0.2, 1.4)[:20], ramp(1.4, 0.2)[20:]]),
        {"reward": np.r_[ramp(0.2, 1.4)[:20], ramp(1.1, 0.48)[20:]]},
    ),
    Twin(
        "learning-rate-high",
        usual(**{"kl/old": 0.15}),
        {"kl/old": np.where(np.arange(STEPS) % 5, 0.01, 0.9)},  # single jumps
    ),
    Twin(
        "learning-rate-high",
        usual(grad_norm=np.where(np.arange(STEPS) < 25, 1.0, 12.0)),
        {"grad_norm": np.where(np.arange(STEPS) % 3, 1.0, 12.0)},
    ),
    Twin(
        "learning-rate-low",
        usual(reward=0.3 + WOBBLE, kl=1e-6, entropy=1.0),
        {"kl": np.linspace(0.0, 0.01, STEPS)},
    ),
    Twin(
        "kl-runaway",
        usual(kl=ramp(0.1, 3.0)),
        {"kl": ramp(0.1, 1.3)},
    ),
    Twin(
        "clip-idle",
        usual(**{"clip_ratio/region_mean": 0.0, "kl/old": 1e-9}),
        {"kl/old": 1e-3},
        recipe=SEVERAL,
    ),
    Twin(
        "clip-saturated",
        usual(**{"clip_ratio/region_mean": 0.2}),
        {"clip_ratio/region_mean": 0.05},
        recipe=SEVERAL,
    ),
    Twin(
        "length-explosion",
        usual(reward=0.3 + WOBBLE, **{"completions/mean_length": ramp(10, 30)}),
        {"reward": ramp(0.2, 0.8)},  # it pays
    ),
    Twin(
        "length-bias",
        usual(),
        rollouts=_wrong_grow,
        near_rollouts=_both_grow,
    ),
    Twin(
        "length-bias",
        usual(),
        rollouts=_wrong_spread,
        near_rollouts=lambda step: _wrong_spread(step, shared=False),
    ),
    Twin(
        "length-bias",
        usual(),
        rollouts=_wrong_spread,
        near_rollouts=lambda step: _wrong_spread(step, spread=1),  # none is longer than another
    ),
    Twin(
        "length-reward",
        usual(),
        rollouts=_paid_by_length,
        near_rollouts=lambda step: _paid_by_length(step, paid=False),
    ),
    Twin(
        "length-reward",
        usual(**evaluated(0.4, 0.5)),  # within the noise
        evaluated(0.4, 0.6),
        rollouts=_paid_by_length,
    ),
    Twin(
        "truncation",
        usual(**{"completions/clipped_ratio": 0.5}),
        rollouts=_cut,
        near_rollouts=lambda step: _cut(step, reward=0.5),
    ),
    Twin(
        "truncation",
        usual(**{"completions/clipped_ratio": 0.5}),
        {"completions/clipped_ratio": 0.1},
        recipe={**GRPO, "rollout": {"mask_truncated": True}},
    ),
    Twin(
        "gold-falls",
        usual(**{"rewards/exact_match/mean": ramp(0.5, 0.1)}),
        {"rewards/exact_match/mean": ramp(0.5, 0.47)},
        recipe={**GRPO, **GOLD},
    ),
    Twin(
        "gold-still",
        usual(**evaluated(0.46, 0.47)),
        evaluated(0.46, 0.53),
        recipe={**GRPO, **GOLD},
    ),
    Twin(
        "format-hacking",
        usual(**{"rewards/form/mean": ramp(0.2, 1.0), "rewards/exact_match/mean": 0.1}),
        {"rewards/exact_match/mean": ramp(0.1, 0.3)},  # the content follows
        recipe={**GRPO, **TWO},
        rollouts=_components,
    ),
    Twin(
        "format-hacking",
        usual(),
        rollouts=lambda step: _marked("<answer></answer>"),
        near_rollouts=lambda step: _marked("<answer>42</answer>"),
    ),
    Twin(
        "empty-answers",
        usual(),
        rollouts=lambda step: _silent(step, 0.5),
        near_rollouts=lambda step: _silent(step, 0.2),
    ),
    Twin(
        "repetition",
        usual(),
        rollouts=_repeats,
        near_rollouts=lambda step: _repeats(step, full=False),
    ),
    Twin(
        "environment-words",
        usual(),
        rollouts=_turns,
        near_rollouts=lambda step: _turns(step, same=False),
    ),
    Twin(
        "environment-words",
        usual(),
        rollouts=_few_without,  # three of 120
        near_rollouts=lambda step: _few_without(step, few=8),  # 24 are enough to compare with
    ),
    Twin(
        "value-model",
        usual(**{"value/explained_variance": WOBBLE}),
        {"value/explained_variance": 0.2 + WOBBLE},
        recipe={"algorithm": "ppo", "rollout": {"group_size": 4}},
    ),
    Twin(
        "engine-mismatch",
        usual(**{"sampling/sampling_logp_difference/mean": 0.02}),
        {"sampling/sampling_logp_difference/mean": 1e-5},
        recipe=SEVERAL,
    ),
    Twin(
        "engine-mismatch",
        usual(**{"sampling/sampling_logp_difference/mean": 0.2}),
        {"sampling/sampling_logp_difference/mean": 0.02},
        recipe={**SEVERAL, "model": {"build": {}, "dtype": "bfloat16"}},
    ),
    Twin(
        "engine-mismatch",
        usual(**{"sampling/kl/k1": -2e-4 + 1e-5 * WOBBLE}),
        {"sampling/kl/k1": 1e-3 * np.where(np.arange(STEPS) % 2, 1, -1)},  # as much on either side
        recipe=SEVERAL,
    ),
    Twin(
        "engine-mismatch",
        usual(**{"sampling/effective_sample_size": 0.8}),
        {"sampling/effective_sample_size": 0.95},
        recipe={**_corrected("token"), "rollout": {"async_level": 1}},
    ),
    Twin(
        "engine-mismatch",
        usual(**{"sampling/chi_squared/sequence": 2.0}),
        {},
        recipe=_corrected("sequence"),
        near_recipe=_corrected("token"),
    ),
)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.condition)
def test_condition_is_found_and_its_near_miss_is_not(twin: Twin, tmp_path: Path) -> None:
    run = written_run(tmp_path / "in", twin.columns, every(twin.rollouts), twin.recipe)
    found = {one.condition: one for one in diagnose(run)}
    assert twin.condition in found
    one = found[twin.condition]
    assert 1 <= one.first_step <= one.last_step <= STEPS
    assert one.stage == "rl"
    assert one.evidence
    assert one.causes
    assert one.changes
    assert all(np.isfinite(value) for value in one.figures.values())
    near = written_run(
        tmp_path / "near",
        {**twin.columns, **twin.near},
        every(twin.near_rollouts or twin.rollouts),
        twin.near_recipe or twin.recipe,
    )
    assert twin.condition not in ids(diagnose(near))


def test_length_bias_states_gradient_weights_by_correctness(
    tmp_path: Path,
) -> None:
    def rows(step: int) -> list[RolloutRow]:
        return _wrong_spread(step, spread=3)

    (found,) = diagnose(written_run(tmp_path / "run", usual(), every(rows)))
    # 3 of 4 tokens and half of the weight: 1/3 for each; of right ones 2 of 3 tokens: 1/2.
    assert found.figures["weight_of_long_wrong"] == pytest.approx(1 / 3)
    assert found.figures["weight_of_long_right"] == pytest.approx(1 / 2)
    assert [line for line in found.evidence if line.startswith("wrong answers: ")] == [
        "wrong answers: the long ones have 75% of the tokens and 50% of the weight "
        "in the gradient, 0.33 times that of the others for each token"
    ]
    # REINFORCE's term holds log π, so it is not a weight: the rule goes by lengths alone.
    by_log_prob = {"preset": "reinforce", "weights": {"kind": "sequence_mean"}}
    recipe = {"algorithm": by_log_prob, "rollout": {"group_size": 4}}
    (other,) = diagnose(written_run(tmp_path / "other", usual(), every(rows), recipe))
    assert "weight_of_long_right" not in other.figures
    assert len(other.evidence) == 1


def test_the_weight_of_completions_most_of_which_are_cut(tmp_path: Path) -> None:
    """Three of four wrong answers have the largest length: none is above the median."""

    def rows(step: int) -> list[RolloutRow]:
        wrong = [
            completion(g, 0.0, tuple(range(10, 10 + count)), advantage=-1.0, weight=1 / count)
            for g in range(8)
            for count in [4 + step // 4] + 3 * [2 * (4 + step // 4)]
        ]
        right = [completion(g, 1.0, (1, 2, 3), advantage=1.0, weight=1 / 3) for g in range(8)]
        return wrong + right  # fmt: skip

    (found,) = diagnose(written_run(tmp_path / "run", usual(), every(rows)))
    assert found.figures["weight_of_long_wrong"] == pytest.approx(1 / 2)
    assert "weight_of_long_right" not in found.figures  # these are all of one length


def test_a_run_that_learns_has_no_diagnosis(tmp_path: Path) -> None:
    assert diagnose(written_run(tmp_path / "run", usual(), every(lambda step: mixed()))) == ()


@pytest.mark.parametrize("steps", [1, 4, 9, 15])
def test_a_short_run_has_no_diagnosis(tmp_path: Path, steps: int) -> None:
    broken = usual(frac_reward_zero_std=1.0, reward=0.0, entropy=ramp(1.0, 0.0))
    columns = {n: v[:steps] if np.ndim(v) else np.full(steps, v) for n, v in broken.items()}
    assert diagnose(written_run(tmp_path / "run", columns)) == ()


def test_metrics_that_are_missing_or_null_are_passed_over(tmp_path: Path) -> None:
    gaps = [None if at % 3 else float("nan") for at in range(STEPS)]
    assert diagnose(written_run(tmp_path / "run", {"reward": gaps, "entropy": gaps})) == ()


@pytest.mark.parametrize("seed", range(40))
def test_any_history_is_judged_without_an_error(seed: int) -> None:
    """Metrics missing, constant, not finite or of one value; no rollouts, or of few completions."""
    rng = np.random.default_rng(seed)
    names = [*usual(), "value/explained_variance", "eval/pass@1", "kl/reference", "rewards/x/std"]
    chosen = rng.choice(names, size=int(rng.integers(1, len(names))), replace=False)
    levels = (0.0, 1.0, -3.0, float("nan"), float("inf"))
    records = []
    for step in range(1, int(rng.integers(2, 90))):
        values = {
            str(name): float(rng.choice(levels)) if rng.random() < 0.3 else float(rng.normal())
            for name in chosen
            if rng.random() < 0.9
        }
        records.append({"step": step, **values})
    rows = [
        asdict(completion(int(rng.integers(3)), float(rng.choice(levels[:4])), (1,) * int(n)))
        for n in rng.integers(0, 30, size=int(rng.integers(1, 30)))
    ]
    rollouts = [summarise(step, rows) for step in range(1, int(rng.integers(2, 12)))]
    algorithm = {"weights": {"kind": "sequence_mean"}, "advantage": {"kind": "group_relative"}}
    recipe = {"rollout": {"group_size": 4}, "minibatches": 2, "algorithm": algorithm}
    history = StageHistory("rl", recipe, {}, by_name(*records), rollouts if seed % 2 else ())
    for one in conditions_of(history):
        assert one.first_step <= one.last_step


def test_evaluation_below_that_before_the_stage_falls(tmp_path: Path) -> None:
    columns = usual(**evaluated(0.1))
    before = {"mean": 0.5, "low": 0.4, "high": 0.6, "n": 100, "measure": "pass@1"}
    found = diagnose(written_run(tmp_path / "fell", columns, before=before))
    assert ids(found) == ["gold-falls"]
    assert found[0].first_step == 0
    overlapping = {**before, "low": 0.15}
    assert diagnose(written_run(tmp_path / "noise", columns, before=overlapping)) == ()


@pytest.mark.parametrize(
    ("accuracies", "width", "reward", "functions", "still"),
    [
        ((0.46, 0.47, 0.46), 0.14, ramp(0.2, 0.29), "proxy", True),
        ((0.46, 0.44), 0.14, ramp(2.0, 2.9), "proxy", True),
        ((0.46, 0.46), 0.14, ramp(-0.05, 0.1), "proxy", True),  # a third of its spread
        ((0.46, 0.46), 0.14, ramp(2.0, 2.03), "proxy", False),  # too little
        ((0.46, 0.63, 0.54), 0.14, ramp(0.2, 0.7), "proxy", False),  # it rose
        ((0.46, 0.47, 0.46), 0.4, ramp(0.2, 0.7), "proxy", False),  # nothing is known of it
        ((0.46, 0.47, 0.46), 0.14, 0.2 + WOBBLE, "proxy", False),  # the reward did not rise
        ((0.97, 0.97, 0.96), 0.06, ramp(0.2, 0.7), "proxy", False),  # nothing is left to gain
        ((0.46, 0.47, 0.46), 0.14, ramp(0.2, 0.7), "exact_match", False),  # learned by heart
        ((0.46,), 0.14, ramp(0.2, 0.7), "proxy", False),
    ],
)
def test_accuracy_that_stands_still_under_a_proxy_is_named(
    accuracies: tuple[float, ...],
    width: float,
    reward: Any,
    functions: str,
    still: bool,
    tmp_path: Path,
) -> None:
    before, *rest = accuracies
    columns = {"reward": reward, **evaluated(*rest, width=width)}
    given = [{"function": "length", "name": "proxy", "options": {"target": 4}}]
    watched = [{"function": "exact_match", "weight": 0.0}]
    sources = given + watched if functions == "proxy" else [{"function": "exact_match"}]
    recipe = {**GRPO, "rewards": {"functions": sources}}
    first = {"mean": before, "low": before - width / 2, "high": before + width / 2, "n": 200}
    run = written_run(tmp_path / "run", usual(**columns), recipe=recipe, before=first)
    found = [one for one in diagnose(run) if one.condition == "gold-still"]
    assert bool(found) == still
    if still:
        assert f"eval/pass@1 went from {before:.3g} (step 0)" in found[0].evidence[1]


def test_recovery_from_a_collapse_is_not_over_optimisation(tmp_path: Path) -> None:
    """The evaluation is below that before the stage, and the reward rises, but from 0."""
    columns = usual(reward=np.r_[0.6, ramp(0.02, 0.4)[1:]], **evaluated(0.4, width=0.1))
    before = {"mean": 0.6, "low": 0.55, "high": 0.65, "n": 100, "measure": "pass@1"}
    found = ids(diagnose(written_run(tmp_path / "recovers", columns, before=before)))
    assert "gold-falls" not in found
    columns["reward"][0] = 0.3  # then it is higher than when the score was best
    found = ids(diagnose(written_run(tmp_path / "games", columns, before=before)))
    assert "gold-falls" in found


@pytest.mark.parametrize(("last", "fell"), [(0.05, True), (0.4, False)])
def test_immediate_fall_is_found_in_five_steps(tmp_path: Path, last: float, fell: bool) -> None:
    columns = {"reward": np.array([0.6, 0.5, last, last + 0.02, last])}
    found = ids(diagnose(written_run(tmp_path / "run", columns)))
    assert found == (["learning-rate-high"] if fell else [])


def test_a_suggested_value_is_computed_from_the_recipe(tmp_path: Path) -> None:
    recipe = {**SEVERAL, "optimizer": {"learning_rate": 1e-7}}
    columns = usual(**{"clip_ratio/region_mean": 0.0, "kl/old": 1e-9})
    (found,) = diagnose(written_run(tmp_path / "run", columns, recipe=recipe))
    changes = {one.key: (one.now, one.to) for one in found.changes}
    assert changes["rl.optimizer.learning_rate"] == (1e-7, 1e-6)
    assert changes["rl.minibatches"] == (4, 1)
    assert "rl.epochs" not in changes  # it is 1 already


def test_errors_come_before_warnings_then_by_first_step(tmp_path: Path) -> None:
    columns = usual(
        frac_reward_zero_std=np.where(np.arange(STEPS) < 15, 0.2, 1.0),
        kl=ramp(0.0, 3.0),
        reward=0.3 + WOBBLE,
        **{"completions/mean_length": ramp(10, 40)},
    )
    rows = every(lambda step: mixed())
    found = diagnose(written_run(tmp_path / "run", columns, rows, GRPO))
    assert ids(found) == ["no-signal", "length-explosion", "kl-runaway"]
    assert [one.severity for one in found] == ["error", "warning", "warning"]
    error, first, second = (one.first_step for one in found)
    assert first < second
    assert first < error


def test_groups_of_one_are_judged_by_the_batch(tmp_path: Path) -> None:
    recipe = {"algorithm": "ppo", "rollout": {"group_size": 1}}
    columns = usual(frac_reward_zero_std=1.0)
    assert diagnose(written_run(tmp_path / "varied", columns, recipe=recipe)) == ()
    flat = {**columns, "rewards/task/std": 0.0, "reward": 0.0}
    found = diagnose(written_run(tmp_path / "flat", flat | {"entropy": ramp(1, 1)}, recipe=recipe))
    assert "no-signal" in ids(found)


def test_condition_ids_are_unique_and_documented() -> None:
    names = [one.id for one in conditions()]
    assert len(names) == len(set(names))
    assert {twin.condition for twin in TWINS} == set(names)
    for one in conditions():
        assert len((one.rule.__doc__ or "").split()) > 20, one.id


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m keel.analysis.diagnosis.table > docs/howto/diagnosis.md"
    )
