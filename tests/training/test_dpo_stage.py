"""DPO: the policy moves towards what is preferred, against its own beginning."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from keel.data.judged_rows import Preference
from keel.learn.batch import TokenBudget
from keel.models import lora
from keel.models.policy import Policy, load_policy
from keel.models.reference import reference_for
from keel.models.reward import Reader
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.judged_data import EncodedPair, encoder
from keel.training.judged_losses import DPO, measure_pairs
from keel.training.run import train
from tests.models import tiny
from tests.training.judged import data, exchanged, headline, ones, recipe
from tests.training.small import info
from tests.training.test_reward_model_loss import padded

LEARNS: dict[str, Any] = {
    "steps": 30,
    "batch_size": 32,
    "optimizer": {"learning_rate": 2e-3, "schedule": "linear"},
}
BRIEF: dict[str, Any] = {"steps": 3, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}}
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo": {"loss": "ipo"},
    "smoothed": {"smoothing": 0.2},
}
EXACT = 1e-9
"""float64; sums in another order."""


def rows(folder: RunFolder, stage: str = "dpo") -> list[dict[str, Any]]:
    return load(folder.path).metrics(stage)


def after(folder: RunFolder, stage: str = "dpo") -> dict[str, Any]:
    found: dict[str, Any] = info(folder)["measured"][stage]["after"]
    return found


def brief(folder: Path, **keys: Any) -> dict[str, Any]:
    return {"stage": "dpo", "data": data(folder, ones(48, 1), ones(24, 2)), **BRIEF, **keys}


# ---------------------------------------------------------------- learning


@pytest.mark.quick("sigmoid")
@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_policy_learns_to_prefer_chosen_answers(loss: str, tmp_path: Path) -> None:
    """Over three seeds validation accuracy came to 86 % and more."""
    source = data(tmp_path, ones(400, 1), ones(150, 7))
    folder = train(
        recipe({"stage": "dpo", "data": source, **LEARNS, **LOSSES[loss]}), tmp_path / "r"
    )
    before = info(folder)["measured"]["dpo"]["before"]
    assert headline(before, "accuracy") == 0.5
    assert before["margins"]["mean"] == before["score"]["mean"] == 0.0
    assert headline(after(folder), "accuracy") > 0.75
    assert after(folder)["margins"]["mean"] > 0.02
    every = rows(folder)
    assert every[-1]["rewards/margins"] > every[5]["rewards/margins"] > 0
    assert every[-1]["loss"] < every[0]["loss"]
    assert every[-1]["rewards/accuracies"] > 0.75


def test_exchanged_answers_are_learned(tmp_path: Path) -> None:
    source = data(tmp_path, exchanged(ones(400, 1)), ones(150, 7))
    folder = train(recipe({"stage": "dpo", "data": source, **LEARNS}), tmp_path / "r")
    assert headline(after(folder), "accuracy") < 0.25
    assert after(folder)["margins"]["mean"] < -0.02


def test_ties_do_not_change_the_policy(tmp_path: Path) -> None:
    """½ asks for no margin: the gradient of −½ log σ(h) − ½ log σ(−h) is 0 at h = 0."""
    source = data(tmp_path, [{**row, "probability": 0.5} for row in ones(48, 1)], ones(24, 2))
    folder = train(recipe({"stage": "dpo", "data": source, **BRIEF}), tmp_path / "run")
    assert all(row["grad_norm"] == 0.0 for row in rows(folder))
    assert after(folder)["margins"]["mean"] == 0.0


@pytest.mark.parametrize(
    ("keys", "loss", "adapter"),
    [({}, math.log(2), {"rank": 4}), ({"loss": "ipo", "beta": 0.25}, 4.0, None)],
    ids=["lora", "ipo"],
)
def test_first_step_starts_at_the_reference(
    keys: dict[str, Any], loss: float, adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    """h is exactly 0: log 2 (rounded to float32), and (1/(2β))² for IPO."""
    model = {} if adapter is None else {"lora": adapter}
    stage = brief(tmp_path, token_budget=50, steps=2, **keys)
    folder = train(recipe(stage, **model), tmp_path / "run")
    first, second = rows(folder)
    assert first["loss"] == pytest.approx(loss, rel=1e-7)
    assert first["rewards/chosen"] == first["rewards/rejected"] == first["rewards/margins"] == 0.0
    assert first["grad_norm"] > 0
    assert second["rewards/margins"] != 0.0


@pytest.mark.parametrize("adapter", [None, {"rank": 4}], ids=["full", "lora"])
def test_second_stage_starts_from_the_first_and_has_it_as_reference(
    adapter: dict[str, Any] | None, tmp_path: Path
) -> None:
    model = {} if adapter is None else {"lora": adapter}
    stages = [brief(tmp_path, name=name, optimizer={"learning_rate": 1e-2}) for name in "ab"]
    folder = train(recipe(*stages, **model), tmp_path / "run")
    assert rows(folder, "b")[0]["rewards/margins"] == 0.0
    assert rows(folder, "b")[0]["loss"] == pytest.approx(math.log(2), rel=1e-7)
    assert after(folder, "a")["margins"]["mean"] != 0.0
    ends = [load_file(e.path / "trainable.safetensors") for e in load(folder.path).checkpoints()]
    assert any(not torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_saved_policy_is_the_trained_one(tmp_path: Path) -> None:
    made = recipe(brief(tmp_path))
    before = dict(load_policy(made.model, 0).model.named_parameters())
    folder = train(made, tmp_path / "run")
    end = load(folder.path).checkpoints()[-1].path
    left = load_file(end / "policy" / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert not torch.equal(left[name], before[name])
    # The reference is next to it, and is where the policy began.
    reference = load_file(end / "reference.safetensors")
    assert torch.equal(reference[name], before[name])
    assert not folder.model("dpo").exists()
    pictures = sorted(path.name for path in folder.pictures.iterdir())
    kinds = ("accuracy-by-length", "margins", "reliability")
    assert pictures == [f"dpo-{kind}.png" for kind in kinds]


# ---------------------------------------------------------------- against plain transformers


PAIRS = (
    Preference("plain", "12=", "1101", "0"),
    Preference("soft", "3+4=", "11", "100110", probability=0.7),
    Preference("tie", "5=", "0", "1", probability=0.5),
    Preference("turned", "9=", "00011", "1", probability=0.0),
)


def dpo_of(policy: Policy, reference: Any, token_budget: int = 10_000, **keys: Any) -> DPO:
    return DPO(policy, reference, TokenBudget(token_budget), **keys)


def pairs_of(policy: Policy) -> list[EncodedPair]:
    return list(map(encoder("pairs", Reader(policy.tokenizer, policy.context)), PAIRS))


def moved(policy: Policy) -> None:
    """Take the policy away from its reference, by a seeded change of what learns."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in policy.trainable().values():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.05 * noise)


def plain_log_probs(model: Any, tokenizer: Any, split: str) -> tuple[Tensor, Tensor]:
    """Σ log π of answer and end after the prompt, and how many tokens; padded by hand."""
    inputs = padded(tokenizer, [str(row.prompt) + getattr(row, split) for row in PAIRS])
    log_p = model(**inputs).logits.log_softmax(-1)
    sums, counts = [], []
    for at, row in enumerate(PAIRS):
        begins = len(tokenizer(str(row.prompt))["input_ids"])
        ends = int(inputs["attention_mask"][at].sum())
        places = range(begins, ends)
        sums.append(sum(log_p[at, i - 1, inputs["input_ids"][at, i]] for i in places))
        counts.append(float(len(places)))
    return torch.stack(sums), torch.tensor(counts, dtype=torch.float64)


def plain_loss(
    policy: Any, reference: Any, tokenizer: Any, keys: dict[str, Any], beta: float
) -> tuple[Tensor, Tensor]:
    """The mean loss, and each pair's log-ratio gap."""
    p = torch.tensor([row.probability for row in PAIRS], dtype=torch.float64)
    gap = torch.zeros(len(PAIRS), dtype=torch.float64)
    for split, sign in (("chosen", 1), ("rejected", -1)):
        now, count = plain_log_probs(policy, tokenizer, split)
        then, _ = plain_log_probs(reference, tokenizer, split)
        ratio = now - then.detach()
        gap = gap + sign * (ratio / count if keys.get("loss") == "ipo" else ratio)
    if keys.get("loss") == "ipo":
        target = 0.5 / beta
        losses = p * (gap - target) ** 2 + (1 - p) * (gap + target) ** 2
    else:
        e = keys.get("smoothing", 0.0)
        q = p * (1 - e) + (1 - p) * e
        losses = -q * torch.sigmoid(beta * gap).log() - (1 - q) * torch.sigmoid(-beta * gap).log()
    return losses.mean(), gap.detach()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("token_budget", [1, 30, 10_000])
def test_loss_and_gradient_equal_plain_transformers(loss: str, token_budget: int) -> None:
    policy = tiny.policy(dtype="float64")
    work = dpo_of(
        policy, reference_for(policy), beta=0.3, token_budget=token_budget, **LOSSES[loss]
    )
    moved(policy)
    pairs = pairs_of(policy)[::-1]  # the order does not matter
    learned = work.backward(pairs, work.budget.tokens)
    plain = tiny.stock(dtype=torch.float64)
    first = tiny.stock(dtype=torch.float64)
    plain.load_state_dict(policy.model.state_dict())
    wanted, gap = plain_loss(plain, first, policy.tokenizer, LOSSES[loss], 0.3)
    wanted.backward()
    assert float(gap.abs().max()) > 0.1
    assert learned["loss"] == pytest.approx(float(wanted.detach()), rel=EXACT)
    assert learned["rewards/margins"] == pytest.approx(0.3 * float(gap.mean()), rel=EXACT)
    assert learned["rewards/accuracies"] == float((gap > 0).double().mean())
    ours = dict(policy.model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=EXACT, atol=EXACT)
    held = measure_pairs(pairs_of(policy), work.implied_rewards).as_dict()
    assert held["margins"]["mean"] == pytest.approx(_toward(0.3 * gap), rel=EXACT)


def test_lora_gradient_with_the_base_as_reference() -> None:
    """The gradient of the adapter, by way of the merged weights W + (α/r) B A."""
    policy = tiny.policy(dtype="float64", rank=4)
    work = dpo_of(policy, reference_for(policy), beta=0.3, token_budget=30)
    moved(policy)
    learned = work.backward(pairs_of(policy), work.budget.tokens)
    plain = tiny.stock(dtype=torch.float64)
    first = tiny.stock(dtype=torch.float64)
    plain.load_state_dict(lora.plain_weights(policy.model))
    wanted, gap = plain_loss(plain, first, policy.tokenizer, {}, 0.3)
    wanted.backward()
    assert float(gap.abs().max()) > 0.1
    # The adapter is kept in float64 with these weights, but merged ones are rounded once more.
    assert learned["loss"] == pytest.approx(float(wanted.detach()), rel=EXACT)
    merged = dict(plain.named_parameters())
    for name, layer in lora.lora_layers(policy.model):
        gradient = merged[f"{name}.weight"].grad
        assert gradient is not None
        a, b = layer.lora_A[lora.POLICY].weight, layer.lora_B[lora.POLICY].weight
        scale = layer.scaling[lora.POLICY]
        torch.testing.assert_close(b.grad, scale * gradient @ a.T, rtol=1e-8, atol=EXACT)
        torch.testing.assert_close(a.grad, scale * b.T @ gradient, rtol=1e-8, atol=EXACT)
    assert all(p.grad is None for n, p in policy.named_parameters() if ".lora_" not in n)


def _toward(gap: Tensor) -> float:
    """By how much the better answer lies above, over pairs that are no tie."""
    sign = {0.5: np.nan, 1.0: 1.0, 0.7: 1.0, 0.0: -1.0}
    found = [float(g) * sign[row.probability] for g, row in zip(gap, PAIRS, strict=True)]
    return float(np.nanmean(found))
