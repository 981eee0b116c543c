from __future__ import annotations

from pathlib import Path

import pytest

from keel.analysis.metrics import look_up, markdown, sections, unknown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m keel.analysis.metrics > docs/metrics.md"
    )


def test_every_entry_is_there_once_and_says_something() -> None:
    metrics = [metric for section in sections().values() for metric in section]
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names))
    for metric in metrics:
        assert metric.meaning.endswith((".", "].")), metric.name
        assert metric.unit, metric.name
        assert f"\n- `{metric.name}`" in markdown()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward", "reward"),
        ("rewards/exact_match/mean", "rewards/*/mean"),
        ("rewards/module:function/std", "rewards/*/std"),
        ("eval/pass@1", "eval/pass@1"),
        ("eval/pass@8", "eval/pass@*"),
        ("eval/pass@1/low", "eval/*/low"),
        ("eval/pass@8/high", "eval/*/high"),
        ("eval/mean_length", "eval/mean_length"),
        ("rewards/f/failures", "rewards/*/failures"),
    ],
)
def test_names_and_patterns_are_found(name: str, entry: str) -> None:
    metric = look_up(name)
    assert metric is not None
    assert metric.name == entry


def test_unknown_names_are_told() -> None:
    names = ["reward", "rewards/x/median", "Reward", "eval", "kl", "grad_norm/max"]
    assert unknown(names) == ["rewards/x/median", "Reward", "eval", "grad_norm/max"]


def test_the_names_that_trl_logs_are_kept() -> None:
    # GRPOTrainer of TRL 1.16; step_time lives in timings.jsonl, being no function of the seed.
    trl = """
        loss learning_rate grad_norm num_tokens reward reward_std frac_reward_zero_std
        rewards/f/mean rewards/f/std completions/mean_length completions/min_length
        completions/max_length completions/clipped_ratio completions/mean_terminated_length
        completions/min_terminated_length completions/max_terminated_length entropy kl
        clip_ratio/low_mean clip_ratio/high_mean clip_ratio/region_mean
        sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max
        sampling/importance_sampling_ratio/min sampling/importance_sampling_ratio/mean
        sampling/importance_sampling_ratio/max
    """
    assert unknown(trl.split()) == []
