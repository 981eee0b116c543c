"""Rows of the head beyond the tokenizer's last id: never sampled, scored or trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from keel.config.load import load_recipe
from keel.engines import native
from keel.engines.native import NativeEngine
from keel.models.head import Head, readout
from keel.models.packed import pack
from keel.models.policy import Policy, token_count
from keel.models.reference import reference_for
from keel.preflight.check import check
from keel.training.export import export
from keel.training.run import train
from keel.types import Prompt, Sampling
from tests.models.tiny import policy

SAMPLED = Sampling(max_tokens=12, temperature=1.0)


def padded(family: str = "llama", to: int = 128, **keys: Any) -> Policy:
    """A policy whose head has rows without a token, which are likelier than the others."""
    small = policy(family, **keys)
    small.model.resize_token_embeddings(pad_to_multiple_of=to)
    made = Policy(small.model, small.tokenizer)
    rows, n = made.model.get_output_embeddings(), len(made.tokenizer)
    with torch.no_grad():
        noise = torch.randn(rows.weight[n:].shape, generator=torch.Generator().manual_seed(3))
        rows.weight[n:] = 3 * noise * rows.weight[:n].std()
        if rows.bias is not None:
            rows.bias[n:] = 2.0
    assert made.head.weight.shape[0] == to > len(made.tokenizer)
    return made


def prompts(made: Policy, n: int = 6) -> list[Prompt]:
    ids = [made.tokenizer(f"{k}+{k}=", add_special_tokens=False)["input_ids"] for k in range(n)]
    return [Prompt(str(k), "", tokens=tuple(tokens)) for k, tokens in enumerate(ids)]


def packed_of(made: Policy, groups: Any, device: str = "cpu") -> Any:
    rows = [(g.prompt.tokens, c.tokens) for g in groups for c in g.completions]
    sequences = [torch.tensor([*a, *b.tolist()]) for a, b in rows]
    scored = [torch.arange(len(a), len(a) + len(b)) for a, b in rows]
    return pack(sequences, scored, device)


def sampled(made: Policy, engine: NativeEngine, sampling: Sampling = SAMPLED) -> Any:
    groups = engine.sample(prompts(made), 4, sampling, 0)
    tokens = np.concatenate([c.tokens for g in groups for c in g.completions])
    assert tokens.max() < len(made.tokenizer)
    return groups


CASES = [
    ("llama", {}, True),
    ("gpt2", {}, False),
    ("gemma2", {}, False),
    ("phi", {}, False),  # its head has a bias
    ("qwen2", {"rank": 2}, True),
]


@pytest.mark.parametrize(("family", "keys", "steps"), CASES, ids=str)
def test_engine_and_trainer_agree_on_tokens_alone(
    family: str, keys: dict[str, Any], steps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not steps:  # one token at a time, in Python
        monkeypatch.setattr(native, "make_multi_step", lambda *args: None)
    made = padded(family, 320 if family == "qwen2" else 128, **keys)
    groups = sampled(made, NativeEngine(made.model, made.tokenizer, autocast=False))
    found = np.concatenate([c.log_probs for g in groups for c in g.completions])
    scores = made.scores(packed_of(made, groups), entropy=True)
    np.testing.assert_allclose(scores.log_prob_N.detach().numpy(), found, atol=1e-5)
    assert scores.entropy_N is not None
    assert 0 < scores.entropy_N.max() <= np.log(len(made.tokenizer))


def test_entropy_and_gradient_are_those_of_a_head_without_padding() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(40, 8)), nn.Parameter(torch.randn(40))
    hidden, token = torch.randn(9, 8, requires_grad=True), torch.randint(0, 33, (9,))
    other = torch.randn(9, 8), Head(torch.randn(50, 8), tokens=33)
    found = []
    for head, there in (
        (Head(weight, bias, 0.5, 3.0, tokens=33), other[1]),
        (Head(weight[:33], bias[:33], 0.5, 3.0), Head(other[1].weight[:33])),
    ):
        scores = readout(
            hidden, head, token, 0.7, entropy=True, reference=(other[0], there), chunk_tokens=2
        )
        parts = [scores.log_prob_N, scores.entropy_N, scores.full_kl_N]
        total = sum(part.square().sum() for part in parts if part is not None)
        grads = torch.autograd.grad(total, (hidden, weight, bias))
        found.append([*(part.detach() for part in parts if part is not None), *grads])
    assert len(found[0]) == 6
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    weight_grad, bias_grad = found[0][4:]
    assert (weight_grad[33:] == 0).all()
    assert (bias_grad[33:] == 0).all()
    assert (weight_grad[:33] != 0).any()


def test_reference_has_the_policys_tokens() -> None:
    made = padded()
    packed = packed_of(made, sampled(made, NativeEngine(made.model, made.tokenizer)))
    reference = reference_for(made)
    scores = made.scores(packed, reference=reference)
    torch.testing.assert_close(reference.log_probs(packed), scores.log_prob_N.detach())
    assert scores.full_kl_N is not None
    torch.testing.assert_close(
        scores.full_kl_N, torch.zeros_like(scores.full_kl_N), atol=1e-5, rtol=0
    )


def test_tokens_end_with_the_last_id_also_after_a_hole() -> None:
    made = policy()
    assert token_count(made.tokenizer) == len(made.tokenizer)

    class Holes:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "<end>": 7}

    assert token_count(Holes()) == 8


@pytest.mark.slow
def test_run_leaves_rows_without_a_token_as_they_were(tmp_path: Path) -> None:
    """`keel check` has no word about them; engine and trainer agree on every token."""
    made = padded()
    made.model.generation_config.eos_token_id = made.tokenizer.eos_token_id
    made.save(tmp_path / "model")
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{at}=", "answer": "3"} for at in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "threads": 1,
        "model": {"name": str(tmp_path / "model"), "device": "cpu"},
        "steps": 2,
        "optimizer": {"learning_rate": 1e-3},
        "tasks": [{"name": "jsonl", "path": str(path), "answer": "answer"}],
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
        "algorithm": "ppo",
        "minibatches": 2,
        "rewards": {"functions": [{"function": "tests.models.test_padded_vocabulary:odd"}]},
    }
    found = load_recipe(recipe)
    run = train(found, tmp_path / "run")
    export(run.path, tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    n = len(made.tokenizer)
    assert (after["lm_head.weight"][n:] == before["lm_head.weight"][n:]).all()
    assert (after["lm_head.weight"][:n] != before["lm_head.weight"][:n]).any()
    record = json.loads(run.metrics.read_text().splitlines()[0])
    assert record["sampling/sampling_logp_difference/max"] < 1e-4
    assert record["entropy"] <= np.log(n)
    findings = [str(finding) for finding in check(found.model_dump(mode="json")).findings]
    assert not any("vocabulary" in x or "without a token" in x for x in findings)


def odd(*, completion_ids: list[list[int]]) -> list[float]:
    """A reward that differs within a group."""
    return [float(sum(ids) % 2) for ids in completion_ids]
