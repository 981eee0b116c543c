"""The dry run against the same passes on real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keel.config.model import Model
from keel.models.policy import Policy, load_policy
from keel.models.reward import reward_model_from
from keel.preflight.memory.ledger import DryRun, Ledger, bytes_of
from keel.preflight.memory.passes import Extent, Row, Twins, judge, learn, measure

ROWS: list[Row] = [(Extent(5, 20),), (Extent(9, 31),), (Extent(5, 20),)]


def policy(family: str = "llama", **keys: Any) -> Policy:
    build = {"family": family, "hidden_size": 32, "layers": 2, "heads": 4, "context": 64}
    return load_policy(Model.model_validate({"build": build, **keys}), 0)


def step(twins: Twins) -> None:
    said = learn(twins, ROWS, temperature=1.0, full=False, pairs=False)
    torch.autograd.backward([value.sum() for value in said])


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {}),
        ("gpt2", {"dtype": "bfloat16"}),
        ("gemma2", {}),
        ("qwen3_moe", {}),
        ("llama", {"lora": {"rank": 4}}),
        ("qwen3", {"activation_checkpointing": True}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_the_dry_run_takes_what_the_real_pass_takes(family: str, keys: dict[str, Any]) -> None:
    real = policy(family, **keys)
    dry = DryRun()
    twins = Twins(dry.twin(real))
    base = dry.ledger.now
    with dry.running() as ledger:
        step(twins)
    counted = Ledger()
    for tensor in [*real.parameters(), *real.buffers()]:
        counted.note(tensor)
    held = counted.now
    with counted:
        step(Twins(real))
    # Kernels differ in the order in which they let small buffers go.
    assert ledger.peak - base == pytest.approx(counted.peak - held, rel=0.02)
    gradients = sum(p.grad.nbytes for p in real.parameters() if p.grad is not None)
    assert gradients > 0
    assert ledger.now - base == pytest.approx(gradients, abs=4096)


def test_what_is_kept_for_the_backward_pass_is_what_autograd_saves() -> None:
    real = policy()
    dry = DryRun()
    twins = Twins(dry.twin(real))
    with dry.running() as ledger:
        before = ledger.now
        said = learn(twins, ROWS, temperature=1.0, full=False, pairs=False)
        kept = ledger.now - before
        del said
    assert ledger.now == before
    known = {p.untyped_storage().data_ptr() for p in real.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learn(Twins(real), ROWS, temperature=1.0, full=False, pairs=False)
    # Beside them live the results, and what only a node of the graph knows.
    assert kept == pytest.approx(sum(saved.values()), rel=0.05)


def test_a_twin_shares_no_tensor_and_changes_none() -> None:
    real = policy()
    before = {name: tensor.clone() for name, tensor in real.state_dict().items()}
    dry = DryRun()
    twin = dry.twin(real)
    assert dry.ledger.now == bytes_of(real)
    assert twin.tokenizer is real.tokenizer
    with dry.running():
        step(Twins(twin))
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
    assert all(parameter.grad is None for parameter in real.parameters())
    assert all(torch.equal(real.state_dict()[name], tensor) for name, tensor in before.items())


def test_tied_weights_count_once() -> None:
    real = policy("gpt2")
    assert real.head.weight is real.model.get_input_embeddings().weight
    parameters = sum(p.nbytes for p in real.parameters())
    buffers = sum(b.nbytes for b in real.buffers())
    assert bytes_of(real) == parameters + buffers
    dry = DryRun()
    twin = dry.twin(real)
    assert dry.ledger.now == bytes_of(real)
    assert twin.head.weight is twin.model.get_input_embeddings().weight


def test_only_adapters_take_gradients() -> None:
    real = policy(lora={"rank": 4})
    assert bytes_of(real, trainable=True) == sum(p.nbytes for p in real.trainable().values())
    assert bytes_of(real, trainable=True) < bytes_of(real) / 2


def test_passes_without_gradients_keep_nothing() -> None:
    real = policy()
    model = reward_model_from(real, "outcome", 0)
    dry = DryRun()
    twins = Twins(dry.twin(real), reward_model=dry.twin(model))
    with dry.running() as ledger:
        before = ledger.now
        measure(twins, ROWS, 1.0)
        judge(twins.reward_model or model, ROWS, 64)
        assert ledger.now == before
        small = ledger.peak
        ledger.peak = ledger.now
        judge(twins.reward_model or model, ROWS, 40)
        assert ledger.now < ledger.peak <= small


def test_what_an_operator_makes_out_of_sight_is_counted() -> None:
    x = torch.zeros(64, 1000)
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        x.logsumexp(1)
    made = sum(max(event.self_cpu_memory_usage, 0) for event in seen.key_averages())
    dry = DryRun()
    with dry.running() as ledger:
        logits = torch.zeros(64, 1000)
        before = ledger.now
        said = logits.logsumexp(1)
        assert ledger.now - before == said.nbytes
    # Beside numbers of a row each: its maximum, whether that is finite.
    assert ledger.peak - before == pytest.approx(made, abs=8 * said.nbytes)
    assert ledger.peak - before >= x.nbytes
