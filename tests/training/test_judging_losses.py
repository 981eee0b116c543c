"""Losses of preferences and labels and their gradients, against plain padded transformers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from keel.algorithms.preferences import PREFERENCE_LOSSES
from keel.data.judged_rows import Labelled, Preference, Stepwise
from keel.data.splits import Splits
from keel.learn.memory import TokenBudget
from keel.models import lora
from keel.models.policy import Policy
from keel.models.reference import reference_for
from keel.models.reward import Answered, Reader, RewardModel, reward_model_from
from keel.training import judged_losses
from keel.training.judged_data import EncodedPair, Marked, encoder, of_step, ready
from keel.training.judged_losses import (
    PolicyLoss,
    first_under,
    labels_backward,
    measure_labels,
    measure_pairs,
    measure_steps,
    pairs_backward,
)
from keel.types import KeelError
from tests.models import tiny

PAIRS = (
    Preference("plain", "12=", "1101", "0010"),
    Preference("soft", "3+4=", "11", "100110", probability=0.7),
    Preference("tie", "5=", "0", "1", probability=0.5),
    Preference("margin", "67=", "11011", "1", margin=0.8),
    Preference("both", "8=", "a1", "b", probability=0.2, margin=1.5),
    Preference("turned", "9=", "0001", "1", probability=0.0),
)
LABELS = (
    Labelled("right", "12=", "1101", 1.0),
    Labelled("wrong", "3+4=", "11", 0.0),
    Labelled("share", "5=", "011010", 0.3),
)
STEPS = (
    Stepwise("error", "12=", ("1", "22", "3"), (1.0, 0.0, None)),
    Stepwise("right", "3=", ("4", "5"), (1.0, 1.0)),
    Stepwise("gap", "6=", ("77", "8", "9", "0"), (None, 0.25, None, 1.0)),
)
EXACT = 1e-10
"""float64; the sums differ in order and nothing else."""


def moved(parameters: Iterable[Tensor], scale: float) -> None:
    """Add seeded noise, so that a head is not zero, or a policy is not its reference."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(scale * noise)


def model_of(kind: Literal["outcome", "process"]) -> RewardModel:
    """A reward model whose head is not zero."""
    made = reward_model_from(tiny.policy(dtype="float64"), kind, 0)
    moved(made.head.parameters(), 0.3)
    return made


def encoded_pairs(model: RewardModel) -> list[EncodedPair]:
    return list(map(encoder("pairs", Reader(model.tokenizer, model.context)), PAIRS))


def marked(model: RewardModel) -> list[Marked]:
    reader = Reader(model.tokenizer, model.context)
    if model.kind == "outcome":
        return list(map(encoder("labels", reader), LABELS))
    return list(map(encoder("steps", reader, " "), STEPS))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """By name, taken away from the model."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = EXACT) -> None:
    assert a.keys() == b.keys()
    assert any(float(value.abs().max()) > 1e-4 for value in a.values())
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- plain transformers, written apart


def stock(model: RewardModel, folder: Path) -> Any:
    """The saved model, as plain transformers loads it."""
    model.save(folder)
    kinds = {
        "outcome": AutoModelForSequenceClassification,
        "process": AutoModelForTokenClassification,
    }
    return kinds[model.kind].from_pretrained(folder, dtype=torch.float64).eval()


def padded(tokenizer: Any, texts: Sequence[str]) -> dict[str, Tensor]:
    """Right padding by hand, an end-of-sequence token after each."""
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    longest = max(map(len, ids))
    tokens = torch.full((len(ids), longest), tokenizer.pad_token_id)
    mask = torch.zeros((len(ids), longest), dtype=torch.long)
    for row, line in enumerate(ids):
        tokens[row, : len(line)] = torch.tensor(line)
        mask[row, : len(line)] = 1
    return {"input_ids": tokens, "attention_mask": mask}


def cross_entropy(z: Tensor, y: float | Tensor) -> Tensor:
    """−y log σ(z) − (1−y) log(1−σ(z)), by the sigmoid itself: the figures are small here."""
    return -y * torch.sigmoid(z).log() - (1 - y) * (1 - torch.sigmoid(z)).log()


def plain_pair_loss(plain: Any, tokenizer: Any, centring: float) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in PAIRS:
        texts = [str(row.prompt) + row.chosen, str(row.prompt) + row.rejected]
        chosen, rejected = plain(**padded(tokenizer, texts)).logits[:, 0]
        for p, gap in (
            (row.probability, chosen - rejected),
            (1 - row.probability, rejected - chosen),
        ):
            total = total - p * torch.sigmoid(gap - row.margin).log()
        total = total + centring * (chosen + rejected) ** 2
    return total / len(PAIRS)


def plain_label_loss(plain: Any, tokenizer: Any) -> Tensor:
    texts = [str(row.prompt) + row.completion for row in LABELS]
    logits = plain(**padded(tokenizer, texts)).logits[:, 0]
    losses = [cross_entropy(z, row.label) for z, row in zip(logits, LABELS, strict=True)]
    return torch.stack(losses).mean()


def plain_step_loss(plain: Any, tokenizer: Any) -> Tensor:
    """Two logits at the token that closes a step; steps without a label do not count."""
    texts = [f"{row.prompt}{' '.join(row.steps)}" for row in STEPS]
    logits = plain(**padded(tokenizer, texts)).logits.log_softmax(-1)
    losses = []
    for row, line in zip(STEPS, logits, strict=True):
        at = len(str(row.prompt)) - 1
        for step, label in zip(row.steps, row.labels, strict=True):
            at += len(step) + 1  # the blank, or the end after the last
            if label is not None:
                losses.append(-label * line[at, 1] - (1 - label) * line[at, 0])
    assert len(losses) == 6
    return torch.stack(losses).mean()


@pytest.mark.parametrize("token_budget", [1, 30, 10_000])
@pytest.mark.parametrize("kind", ["pairs", "centred pairs", "labels", "steps"])
def test_reward_model_gradient_equals_plain_transformers(
    kind: str, token_budget: int, tmp_path: Path
) -> None:
    """Soft labels, ties, margins and centring included; any size of micro-batch, any order."""
    model = model_of("process" if kind == "steps" else "outcome")
    centring = 0.3 if kind == "centred pairs" else 0.0
    rows: list[Any] = encoded_pairs(model) if "pairs" in kind else marked(model)
    if "pairs" in kind:
        learned = pairs_backward(model, centring, rows[::-1], token_budget)
    else:
        learned = labels_backward(model, rows[::-1], token_budget)
    ours = {name.removeprefix("model."): grad for name, grad in gradients(model).items()}
    plain = stock(model, tmp_path / "model")
    if "pairs" in kind:
        loss = plain_pair_loss(plain, model.tokenizer, centring)
    else:
        plain_loss = plain_label_loss if kind == "labels" else plain_step_loss
        loss = plain_loss(plain, model.tokenizer)
    loss.backward()
    assert learned["loss"] == pytest.approx(float(loss.detach()), rel=EXACT)
    same(ours, gradients(plain))


# ---------------------------------------------------------------- DPO, by plain transformers

LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "ipo": {"loss": "ipo"},
    "smoothed": {"smoothing": 0.2},
}
BETA = 0.3
COMPARED = tuple(row for row in PAIRS if row.margin == 0)


def dpo_of(
    policy: Policy, token_budget: int, loss: str = "sigmoid", **keys: float
) -> tuple[PolicyLoss, list[EncodedPair]]:
    """A loss of a policy that has moved from its reference, and pairs for it."""
    chosen = PREFERENCE_LOSSES[loss]
    reference = reference_for(policy) if chosen.reference else None
    read = {**chosen.keys, "beta": BETA, **keys}
    work = PolicyLoss(policy, reference, TokenBudget(token_budget), chosen, read)
    moved(policy.trainable().values(), 0.05)
    encode = encoder("pairs", Reader(policy.tokenizer, policy.context))
    return work, list(map(encode, COMPARED))


def plain_log_probs(model: Any, tokenizer: Any, split: str) -> tuple[Tensor, Tensor]:
    """Σ log π of answer and end after the prompt, and the number of their tokens."""
    inputs = padded(tokenizer, [str(row.prompt) + getattr(row, split) for row in COMPARED])
    log_p = model(**inputs).logits.log_softmax(-1)
    sums, counts = [], []
    for at, row in enumerate(COMPARED):
        begins = len(tokenizer(str(row.prompt))["input_ids"])
        ends = int(inputs["attention_mask"][at].sum())
        places = range(begins, ends)
        sums.append(sum(log_p[at, i - 1, inputs["input_ids"][at, i]] for i in places))
        counts.append(float(len(places)))
    return torch.stack(sums), torch.tensor(counts, dtype=torch.float64)


def plain_dpo(
    policy: Policy, weights: dict[str, Tensor], loss: str = "sigmoid", smoothing: float = 0.0
) -> tuple[Any, Tensor, Tensor]:
    """Plain transformers with these weights, its mean loss, and each pair's log-ratio gap."""
    plain, first = (tiny.stock(dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(weights)
    p = torch.tensor([row.probability for row in COMPARED], dtype=torch.float64)
    gap = torch.zeros(len(COMPARED), dtype=torch.float64)
    for split, sign in (("chosen", 1), ("rejected", -1)):
        now, count = plain_log_probs(plain, policy.tokenizer, split)
        then, _ = plain_log_probs(first, policy.tokenizer, split)
        ratio = now - then.detach()
        gap = gap + sign * (ratio / count if loss == "ipo" else ratio)
    if loss == "ipo":
        target = 0.5 / BETA
        losses = p * (gap - target) ** 2 + (1 - p) * (gap + target) ** 2
    else:
        losses = cross_entropy(BETA * gap, p * (1 - smoothing) + (1 - p) * smoothing)
    losses.mean().backward()
    assert float(gap.detach().abs().max()) > 0.1
    return plain, losses.mean().detach(), gap.detach()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("token_budget", [1, 30, 10_000])
def test_dpo_gradient_equals_plain_transformers(loss: str, token_budget: int) -> None:
    policy = tiny.policy(dtype="float64")
    work, pairs = dpo_of(policy, token_budget, **LOSSES[loss])
    learned = work.backward(pairs[::-1], work.budget.tokens)  # the order does not matter
    plain, wanted, gap = plain_dpo(policy, policy.model.state_dict(), **LOSSES[loss])
    assert learned["loss"] == pytest.approx(float(wanted), rel=EXACT)
    assert learned["rewards/margins"] == pytest.approx(BETA * float(gap.mean()), rel=EXACT)
    assert learned["rewards/accuracies"] == float((gap > 0).double().mean())
    same(gradients(policy.model), gradients(plain))
    held = measure_pairs(pairs, work.implied_rewards).as_dict()
    # How far the better answer lies above, over pairs that are no tie.
    sign = torch.tensor([np.sign(row.probability - 0.5) for row in COMPARED])
    toward = (BETA * gap * sign)[sign != 0].mean()
    assert held["margins"]["mean"] == pytest.approx(float(toward), rel=EXACT)


def test_dpo_gradient_of_lora_has_the_base_as_reference() -> None:
    """The gradient of the adapter, by way of the merged weights W + (α/r) B A."""
    policy = tiny.policy(dtype="float64", rank=4)
    work, pairs = dpo_of(policy, token_budget=30)
    learned = work.backward(pairs, work.budget.tokens)
    plain, wanted, _ = plain_dpo(policy, lora.plain_weights(policy.model))
    # The adapter is kept in float64 with these weights, but merged ones are rounded once more.
    assert learned["loss"] == pytest.approx(float(wanted), rel=1e-9)
    merged = dict(plain.named_parameters())
    for name, layer in lora.lora_layers(policy.model):
        gradient = merged[f"{name}.weight"].grad
        a, b = layer.lora_A[lora.POLICY].weight, layer.lora_B[lora.POLICY].weight
        scale = layer.scaling[lora.POLICY]
        torch.testing.assert_close(b.grad, scale * gradient @ a.T, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(a.grad, scale * b.T @ gradient, rtol=1e-8, atol=1e-9)
    assert all(p.grad is None for n, p in policy.named_parameters() if ".lora_" not in n)


@pytest.mark.parametrize("name", [n for n, x in PREFERENCE_LOSSES.items() if x.records == "pairs"])
def test_exchanged_answers_with_exchanged_labels_change_nothing(name: str) -> None:
    """Soft labels, smoothing, margin and NLL: the gradient is the same both ways round."""
    policy = tiny.policy(dtype="float64")
    keys = {"smoothing": 0.2, "nll": 0.7}
    read = PREFERENCE_LOSSES[name].keys
    work, pairs = dpo_of(policy, 30, name, **{k: v for k, v in keys.items() if k in read})
    first = work.backward(pairs, 30)
    one = gradients(policy.model)
    turned = [
        replace(row, chosen=row.rejected, rejected=row.chosen, probability=1 - row.probability)
        for row in pairs
    ]
    again = work.backward(turned, 30)
    same(one, gradients(policy.model))
    assert again["loss"] == pytest.approx(first["loss"], rel=EXACT)
    assert again["rewards/margins"] == pytest.approx(-first["rewards/margins"], rel=EXACT)


def plain_kto(
    policy: Policy, answers: Sequence[Answered], labels: Sequence[float]
) -> tuple[Any, float]:
    """Plain transformers with a gradient, and the loss: an answer at a time, weights 1.3, 0.8."""
    plain, first = (tiny.stock(dtype=torch.float64) for _ in range(2))
    plain.load_state_dict(policy.model.state_dict())

    def ratio(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Tensor:
        tokens = torch.tensor([*prompt, *answer])
        found = []
        for model in (plain, first):
            log_p = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
            places = range(len(prompt), len(tokens))
            found.append(torch.stack([log_p[i - 1, tokens[i]] for i in places]).sum())
        return found[0] - found[1].detach()

    parts = [(a.tokens[: a.begins], a.tokens[a.begins :]) for a in answers]
    own = torch.stack([ratio(*part) for part in parts])
    mixed = [float(ratio(parts[i][0], parts[i - 1][1]).detach()) for i in range(len(parts))]
    z = max(sum(mixed) / len(mixed), 0.0)
    right, wrong = (1 - torch.sigmoid(BETA * sign * (own - z)) for sign in (1, -1))
    y = torch.tensor(labels, dtype=torch.float64)
    loss = (1.3 * y * right + 0.8 * (1 - y) * wrong).mean()
    loss.backward()
    return plain, float(loss.detach())


@pytest.mark.parametrize("token_budget", [1, 30, 10_000])
def test_kto_equals_plain_transformers(token_budget: int) -> None:
    """A soft label counts as both; the validation rewards are those of the loss."""
    policy = tiny.policy(dtype="float64")
    keys = {"beta": BETA, "desirable_weight": 1.3, "undesirable_weight": 0.8}
    loss, budget = PREFERENCE_LOSSES["kto"], TokenBudget(token_budget)
    work = PolicyLoss(policy, reference_for(policy), budget, loss, keys)
    moved(policy.trainable().values(), 0.05)
    rows = list(map(encoder("labels", Reader(policy.tokenizer, policy.context)), LABELS))
    found = work.backward(rows, token_budget)
    labels = [row.label for row in LABELS]
    plain, wanted = plain_kto(policy, [row.answer for row in rows], labels)
    same(gradients(policy.model), gradients(plain))
    assert found["loss"] == pytest.approx(wanted, rel=EXACT)
    implied = [r for (r,) in work.implied_rewards([row.answer for row in rows])]
    right = np.average(implied, weights=labels)
    wrong = np.average(implied, weights=[1 - y for y in labels])
    assert found["rewards/chosen"] == pytest.approx(right, rel=EXACT)
    assert found["rewards/rejected"] == pytest.approx(wrong, rel=EXACT)
    assert found["rewards/margins"] == pytest.approx(right - wrong, rel=EXACT)
    one = work.backward(rows[:1], token_budget)  # right ones only
    assert not {"rewards/rejected", "rewards/margins"} & one.keys()


@pytest.mark.parametrize("nll", [0.0, 1.0])
def test_prompts_are_scored_for_an_nll_alone(monkeypatch: pytest.MonkeyPatch, nll: float) -> None:
    policy, loss = tiny.policy(), PREFERENCE_LOSSES["orpo"]
    pairs = [encoder("pairs", Reader(policy.tokenizer))(row) for row in PAIRS]
    work = PolicyLoss(policy, None, TokenBudget(10_000), loss, {**loss.keys, "nll": nll})
    scored: list[int] = []
    whole = judged_losses.pack
    monkeypatch.setattr(
        judged_losses, "pack",
        lambda tokens, targets, device: (scored.append(sum(map(len, targets))),
                                         whole(tokens, targets, device))[1],
    )  # fmt: skip
    work.backward(pairs, 10_000)
    work.implied_rewards([answer for row in pairs for answer in (row.chosen, row.rejected)])
    every = [answer for row in pairs for answer in (row.chosen, row.rejected)]
    answers = sum(len(one.tokens) - one.begins for one in every)
    prompts = sum(one.begins - 1 for one in every)
    assert prompts > 0
    assert scored == [answers + prompts * bool(nll), answers]


def test_answers_of_other_prompts_end_at_the_limit() -> None:
    policy = tiny.policy()
    rows = list(map(encoder("labels", Reader(policy.tokenizer)), LABELS))
    keys = PREFERENCE_LOSSES["kto"].keys
    work = PolicyLoss(policy, None, TokenBudget(99), PREFERENCE_LOSSES["kto"], keys, 7)
    answers = [row.answer for row in rows]
    found = work._exchanged(answers)
    whole = [
        a.tokens[: a.begins] + b.tokens[b.begins :]
        for a, b in zip(answers, [answers[-1], *answers[:-1]], strict=True)
    ]
    assert [one.tokens for one in found] == [tokens[:7] for tokens in whole]
    assert max(map(len, whole)) > 7


# ---------------------------------------------------------------- what comes of it


def test_metrics_of_a_step_are_of_its_rows() -> None:
    model = model_of("outcome")
    pairs = encoded_pairs(model)
    scores = [[one[0] for one in model.judge([p.chosen, p.rejected], 10_000)] for p in pairs]
    gaps = [chosen - rejected for chosen, rejected in scores]
    metrics = pairs_backward(model, 0.0, pairs, 30)
    assert metrics["margin"] == pytest.approx(np.mean(gaps), rel=EXACT)
    assert metrics["mean_reward"] == pytest.approx(np.mean(scores), rel=EXACT)
    rows = marked(model)
    logits = [one[0] for one in model.judge([row.answer for row in rows], 10_000)]
    metrics = labels_backward(model, rows, 15)
    assert metrics["mean_reward"] == pytest.approx(np.mean(logits), rel=EXACT)


# ---------------------------------------------------------------- rows in epochs


def test_each_epoch_is_a_permutation() -> None:
    model = model_of("outcome")
    rows = encoded_pairs(model)
    places = {id(row): at for at, row in enumerate(rows)}

    def taken(size: int, steps: int, seed: int) -> list[int]:
        drawn = [row for number in range(1, steps + 1) for row in of_step(rows, size, number, seed)]
        return [places[id(row)] for row in drawn]

    order = taken(4, 9, 3)
    epochs = [order[at : at + 6] for at in range(0, 36, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    # However large the steps, the rows come in one order; more rows than there are is no matter.
    assert taken(9, 4, 3) == taken(18, 2, 3) == order
    assert taken(4, 9, 4) != order


def test_rows_longer_than_the_limit_are_left_out() -> None:
    model = model_of("outcome")
    encode = encoder("pairs", Reader(model.tokenizer, model.context))
    longest = sorted(max(len(f"{r.prompt}{a}") + 1 for a in (r.chosen, r.rejected)) for r in PAIRS)
    limit = longest[2]
    found = ready(Splits(PAIRS, PAIRS), encode, limit, 2, "judging")
    assert sorted(row.longest for row in found.train) == longest[:3]
    assert found.long == 3
    assert (
        len(found.validation) + found.long_validation,
        set(found.validation) <= set(found.train),
    ) == (
        2,
        True,
    )
    assert ready(Splits(PAIRS, PAIRS), encode, None, 99, "judging").long == 0
    with pytest.raises(KeelError, match=r"'judging': each of the 6 .* judging\.max_tokens"):
        ready(Splits(PAIRS, PAIRS), encode, 3, 2, "judging")
    short = [row for row in PAIRS if encode(row).longest <= limit]
    with pytest.raises(KeelError, match=r"each of the 3 validation rows .*evaluation\.rows = 0"):
        ready(Splits(tuple(short), tuple(set(PAIRS) - set(short))), encode, limit, 9, "judging")


def test_validation_examples_are_a_random_sample() -> None:
    """Of a file that is sorted, the first rows are all of one kind."""
    rows = tuple(replace(PAIRS[0], id=str(at), prompt=f"{at}=") for at in range(100))
    encode = encoder("pairs", Reader(tiny.policy().tokenizer))
    held = ready(Splits(rows, rows), encode, None, 20, "judging").validation
    places = [int(row.cluster[:-1]) for row in held]
    assert places == sorted(places)
    assert len(set(places)) == 20
    assert max(places) > 60


def test_length_correlation_uses_answers_only() -> None:
    """A judge of the answer's length is fully explained by it, whatever the prompts are."""
    encode = encoder("pairs", Reader(tiny.policy().tokenizer))
    rows = [
        encode(Preference(str(at), "1" * (1 + 7 * at % 23) + "=", "1" * (2 + at), "0" * (1 + at)))
        for at in range(8)
    ]

    def judge(answers: Sequence[Answered]) -> list[list[float]]:
        return [[float(len(answer.tokens) - answer.begins)] for answer in answers]

    found = measure_pairs(rows, judge).as_dict()["score_and_length"]
    assert found["pearson"] == pytest.approx(1.0)
    marks = [
        Marked(answer, (float(at % 2),), str(at))
        for at, answer in enumerate(row.chosen for row in rows)
    ]
    assert measure_labels(marks, judge).as_dict()["score_and_length"]["pearson"] == pytest.approx(1)


def test_accuracy_in_training_equals_the_evaluation() -> None:
    """No answer is half right; a tie decides nothing."""
    model = model_of("outcome")
    rows = [encoder("pairs", model.reader())(row) for row in PAIRS]
    plain = pairs_backward(model, 0.0, rows, 10_000)
    decided = [row for row in rows if row.probability != 0.5]
    assert 0 < len(decided) < len(rows)
    message = measure_pairs(rows, lambda answers: model.judge(answers, 999)).as_dict()
    assert plain["accuracy"] == pytest.approx(message["accuracy"]["mean"])
    torch.nn.init.zeros_(model.head.weight)
    assert pairs_backward(model, 0.0, rows, 10_000)["accuracy"] == 0.5


def test_rows_of_one_prompt_or_group_are_one_cluster() -> None:
    model = model_of("outcome")
    rows = [*PAIRS, replace(PAIRS[0], id="again", chosen="1")]
    groups = [replace(row, group=str(at % 2)) for at, row in enumerate(rows)]
    for chosen, clusters in ((rows, len(PAIRS)), (groups, 2)):
        encoded = list(map(encoder("pairs", Reader(model.tokenizer, model.context)), chosen))
        found = measure_pairs(encoded, lambda answers: model.judge(answers, 10_000))
        assert found.as_dict()["clusters"] == clusters


# ---------------------------------------------------------------- measuring


def test_measure_pairs() -> None:
    model = model_of("outcome")
    rows = encoded_pairs(model)[:2]

    def judge(answers: Sequence[Any]) -> list[list[float]]:
        assert [len(answer.tokens) for answer in answers] == [8, 8, 7, 11]
        return [[2.0], [1.0], [0.5], [0.0]]

    found = measure_pairs(rows, judge).as_dict()
    assert found["accuracy"]["mean"] == 1.0
    losses = [
        math.log1p(math.exp(-1)),
        0.7 * math.log1p(math.exp(-0.5)) + 0.3 * math.log1p(math.exp(0.5)),
    ]
    assert found["log_loss"] == pytest.approx(np.mean(losses))
    assert found["score"] == pytest.approx({"mean": 0.875, "std": np.std([2, 1, 0.5, 0])})
    assert found["length"]["model_longer"]["mean"] == 0.0
    assert found["score_and_length"]["pearson"] < 0


def test_measure_steps() -> None:
    """Truth: step 1 wrong; none wrong; step 1 wrong. Predicted: step 1; step 0; step 1."""
    rows = marked(model_of("process"))
    message = [[2.0, -1.0, 3.0], [-0.1, 1.0], [1.0, -2.0, 0.0, 1.0]]
    found = measure_steps(rows, lambda answers: message, 0.5).as_dict()
    assert found["accuracy"]["mean"] == pytest.approx(2 / 3)
    assert found["on_wrong"]["mean"] == 1.0
    assert found["on_right"]["mean"] == found["f1"] == 0.0
    assert found["steps"]["n"] == 6
    assert found["log_loss"] == found["steps"]["log_loss"]
    # At 0.4 (log-odds −0.41) the −0.1 is no error any more.
    assert measure_steps(rows, lambda answers: message, 0.4).as_dict()["accuracy"]["mean"] == 1.0


@pytest.mark.parametrize(
    ("logits", "threshold", "first"),
    [
        ([0.0, -0.1], 0.5, 1),
        ([0.0], 0.5, None),
        ([3.0, 2.0], 0.9, 1),
        ([1.0, -1000.0], 0.5, 1),
    ],
)
def test_first_step_under_the_threshold(
    logits: list[float], threshold: float, first: int | None
) -> None:
    assert first_under(logits, threshold) == first


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_non_finite_scores_are_an_error(wrong: float) -> None:
    rows = [encoder("pairs", Reader(tiny.policy().tokenizer))(row) for row in PAIRS]

    def judge(answers: Sequence[Answered]) -> list[list[float]]:
        return [[wrong if at == 3 else 0.0] for at in range(len(answers))]

    with pytest.raises(
        KeelError, match=r"^the scores of 1 of 12 validation answers are not finite"
    ):
        measure_pairs(rows, judge)
