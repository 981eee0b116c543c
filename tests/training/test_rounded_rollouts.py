"""A stage that samples in bfloat16 and learns in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keel.engines.native import NativeEngine
from keel.runs.reader import load
from keel.types import Group
from tests.training.small import info, metrics, run

BF16 = ("rollout.dtype=bfloat16", "algorithm.corrections.kind=truncate")
GAP = "sampling/sampling_logp_difference"
DENSE = "rewards.functions=[{function='place_match'}]"
COLDER = "tests.engines.scripted:ColderEngine"
"""An engine that samples at another temperature than it is asked for."""


@pytest.mark.parametrize("model", [(), ("model.lora.rank=4",)], ids=["full", "lora"])
def test_bfloat16_rollouts_with_float32_evaluation(
    model: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`minibatches=2`, so that the trainer's own log-probabilities are there before the update."""
    common = ("minibatches=2", "steps=2", "evaluation.samples=2", *model)
    exact = run(tmp_path / "exact", "algorithm.corrections.kind=truncate", *common)
    sampled, asked = NativeEngine.sample, []

    def noted(self: NativeEngine, *arguments: Any) -> list[Group]:
        asked.append(self.dtype)
        return sampled(self, *arguments)

    monkeypatch.setattr(NativeEngine, "sample", noted)
    rounded = run(tmp_path / "rounded", *BF16, *common)
    # Greedy and sampled, before the first step and after the last.
    assert asked == [None] * 2 + [torch.bfloat16] * 2 + [None] * 2
    assert info(exact)["evaluation"]["rl"]["before"] == info(rounded)["evaluation"]["rl"]["before"]
    gaps = [metrics(folder)[0][f"{GAP}/mean"] for folder in (exact, rounded)]
    assert gaps[0] < 2e-6
    assert 1e-5 < gaps[1] < 1e-2
    files = [*load(rounded.path).checkpoints()[-1].path.rglob("*.safetensors")]
    assert {t.dtype for file in files for t in load_file(file).values()} == {torch.float32}


@pytest.mark.parametrize(
    "scored",
    [("algorithm.divergence=none", "reference.measured=true"), ("minibatches=2",)],
    ids=["one-update", "engine"],
)
def test_the_first_update_measures_the_difference_where_nothing_else_does(
    scored: tuple[str, ...], tmp_path: Path
) -> None:
    """The same figures as where the trainer scores the policy before the update: with one update a
    batch, and where the engine's log-probabilities stand in for it, of the first mini-batch."""
    common = (f"rollout.engine={COLDER}", "steps=1", "evaluation.prompts=0", DENSE)
    one_update = scored[-1] == "reference.measured=true"
    plain = scored[:1] if one_update else ("rollout.old_log_probs=engine", *scored)
    first = metrics(run(tmp_path / "first", *plain, *common))[0]
    separate = metrics(run(tmp_path / "separate", *scored, *common))[0]
    assert 0.05 < separate[f"{GAP}/mean"] < separate[f"{GAP}/max"]
    for name in ("mean", "max"):
        # Of one mini-batch, the figures are those of half of the tokens.
        near = 1e-5 if one_update else 0.5
        assert first[f"{GAP}/{name}"] == pytest.approx(separate[f"{GAP}/{name}"], rel=near)
    # For small d, k3 is about d²/2, and the effective sample size about 1 − the variance of d.
    mean, largest = separate[f"{GAP}/mean"], separate[f"{GAP}/max"]
    k1, k3 = (separate[f"sampling/kl/{name}"] for name in ("k1", "k3"))
    assert 0.4 * mean**2 < k3 < 0.6 * largest**2
    assert 0 < abs(k1) < mean
    worth = separate["sampling/effective_sample_size"]
    assert 1 - worth == pytest.approx(2 * k3 - k1**2, rel=0.2)
    # E[ρ] = 1 in expectation alone: χ² = mean²/ESS − 1.
    chi2 = separate["sampling/chi_squared/token"]
    assert chi2 == pytest.approx((1 - k1 + k3) ** 2 / worth - 1, abs=0.1 * k3 + 1e-6)
    assert abs(separate["sampling/chi_squared/sequence"]) > abs(chi2)
    assert separate["sampling/perplexity_ratio"] == pytest.approx(1 + k1, abs=0.2)
    if one_update:
        distances = ("chi_squared/token", "chi_squared/sequence", "perplexity_ratio")
        for name in ("kl/k1", "kl/k3", "effective_sample_size", *distances):
            assert first[f"sampling/{name}"] == pytest.approx(
                separate[f"sampling/{name}"], rel=1e-4
            )
        assert set(separate) - set(first) == {"kl", "kl/reference", "kl/sequence"}
        assert first["loss"] == pytest.approx(separate["loss"], abs=1e-6)


@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_share_of_clipped_weights_follows_the_bounds(kind: str, tmp_path: Path) -> None:
    """None without a correction, few outside wide bounds, more outside narrow ones."""
    common = (f"rollout.engine={COLDER}", "steps=1", "evaluation.prompts=0", DENSE)
    share = "sampling/importance_sampling_ratio/clipped"
    assert share not in metrics(run(tmp_path / "none", *common))[0]
    shares = []
    for cap in (1e6, 1.15, 1.02):
        keys = [f"algorithm.corrections.{k}" for k in (f"kind={kind}", f"cap={cap}")]
        floor = ["algorithm.corrections.floor=0"] if kind == "mask" else []
        row = metrics(run(tmp_path / f"{cap}", *common, *keys, *floor))[0]
        shares.append(row[share])
    assert shares[0] == 0
    assert 0 < shares[1] < shares[2] < 1
