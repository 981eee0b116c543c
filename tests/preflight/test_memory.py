"""Predicted parts against the tensors of real models, optimizers and engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keel.config.load import load_recipe
from keel.config.schema import Recipe, RLStage
from keel.engines.slots import PagePool
from keel.learn.optimizer import AdamW, trainable
from keel.models.kernels.decode import library
from keel.models.policy import Policy, load_policy
from keel.models.reference import reference_for
from keel.models.reward import reward_model_from
from keel.models.value import critic_from_policy, value_head_for
from keel.preflight.memory.heap import heap
from keel.preflight.memory.ledger import DryRun
from keel.preflight.memory.passes import (
    Extent,
    Row,
    SampledPass,
    Twins,
    learn,
    measure,
    micro_batches,
    packed_of,
    sample,
    tokens_of,
)
from keel.preflight.memory.prediction import (
    LIBRARIES,
    Footprint,
    HeldModels,
    MemoryPart,
    Phase,
    rows_of,
    stage_footprint,
    to_budget,
    updates_of,
    weights_of,
)
from keel.types import Completion, Group, Prompt, Sampling

ROWS: list[Row] = [(Extent(6, 10),)] * 8
TWO_STEPS = ("steps=2", "evaluation.prompts=0")


@pytest.fixture(autouse=True)
def live(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives alone, as where malloc is not glibc's: in models this small its holes are more
    than the tensors."""
    monkeypatch.setattr("keel.preflight.memory.prediction.heap", lambda: None)


def recipe(*overrides: str) -> Recipe:
    return load_recipe("tiny", [*TWO_STEPS, *overrides])


def stage_of(found: Recipe) -> RLStage:
    stage = found.stages[0]
    assert isinstance(stage, RLStage)
    return stage


def held_of(found: Recipe) -> HeldModels:
    stage, policy = stage_of(found), load_policy(found.model, 0)
    row = stage.algorithm
    return HeldModels(
        policy,
        reference=reference_for(policy) if stage.keeps_reference else None,
        value_head=value_head_for(policy) if row.value and stage.value.kind == "head" else None,
        critic=critic_from_policy(policy) if row.value and stage.value.kind == "critic" else None,
    )


def footprint(found: Recipe, held: HeldModels, rows: list[Row] = ROWS, **keys: Any) -> Footprint:
    return stage_footprint(found.model, stage_of(found), held, [rows], **keys)


def bytes_in(phase: Phase, name: str) -> int:
    return sum(part.bytes for part in phase.parts if part.name == name)


def named(found: Footprint, name: str) -> Phase:
    return next(phase for phase in found.phases if phase.name == name)


def stepped(policy: Policy) -> AdamW:
    """An optimizer that has taken a step."""
    optimizer = AdamW(trainable(policy), stage_of(recipe()).optimizer)
    said = learn(Twins(policy), ROWS, temperature=1.0, full=False, pairs=False)
    torch.autograd.backward([value.sum() for value in said])
    optimizer.step(1e-3)
    return optimizer


@pytest.mark.parametrize("overrides", [(), ("model.lora.rank=4",), ("model.dtype=bfloat16",)])
def test_weights_moments_and_gradients_are_those_of_a_real_step(overrides: tuple[str, ...]) -> None:
    found = recipe("algorithm=grpo", *overrides)
    held = held_of(found)
    said = footprint(found, held)
    moments = sum(
        tensor.nbytes
        for name, tensor in stepped(held.policy).state().items()
        if not name.endswith("/step")
    )
    update = named(said, "update")
    assert bytes_in(update, "optimizer moments") == moments
    step = named(said, "optimizer step")
    gradients = sum(p.nbytes for p in held.policy.trainable().values())
    # Beside them no more than some small results of the passes.
    assert bytes_in(step, "gradients") == pytest.approx(gradients, abs=4096)
    assert bytes_in(update, "policy weights") == sum(
        t.nbytes for t in [*held.policy.parameters(), *held.policy.buffers()]
    ) + sum(t.nbytes for t in _plain(held.policy))


def _plain(policy: Policy) -> list[torch.Tensor]:
    """The rotary module's own copy of its frequencies, where it is no view of the buffer."""
    known = {t.data_ptr() for t in [*policy.parameters(), *policy.buffers()]}
    every = [
        value
        for module in policy.modules()
        for value in vars(module).values()
        if isinstance(value, torch.Tensor)
    ]
    return [tensor for tensor in every if tensor.data_ptr() not in known]


def test_the_store_is_as_large_as_the_engine_makes_it() -> None:
    policy = load_policy(recipe().model, 0)
    dry = DryRun()
    twin = dry.twin(policy)
    call = SampledPass(prompts=(6, 8), budget=40, answers=4, max_rows=256)
    with dry.running() as ledger:
        before = ledger.now
        sample(twin, call, Sampling(max_tokens=40))
        passing = ledger.peak - before
        assert ledger.now == before
    config = policy.model.config
    width = config.hidden_size // config.num_attention_heads
    # Two prompts once and eight answers, each in pages of 16 places.
    places = 2 * 16 + 8 * 48
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * places * width * 4
    # On a CPU the engine lays a Llama's linear weights out anew for as long as it samples.
    layers = policy.model.base_model.layers
    laid = sum(m.weight.nbytes for m in layers.modules() if isinstance(m, torch.nn.Linear))
    # A quarter of the pages may be ahead of what is used, and a step's activations are beside.
    assert laid + kept <= passing <= laid + 1.4 * kept


@pytest.mark.parametrize("rows", [256, 3])
def test_what_was_said_stays_for_the_next_turn(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows that are decoded, or in their place as they end."""
    policy, made = load_policy(recipe().model, 0), []
    grow = PagePool._grow

    def seen(pool: PagePool, count: int) -> None:
        grow(pool, count)
        made[-1] = pool._pages

    monkeypatch.setattr(PagePool, "_grow", seen)
    for turns in (1, 2):
        made.append(0)
        dry = DryRun()
        twin = dry.twin(policy)
        call = SampledPass((200, 200), 40, answers=4, max_rows=rows, turns=turns)
        with dry.running() as ledger:
            before = ledger.now
            sample(twin, call, Sampling(max_tokens=40))
            assert ledger.now == before
    once, kept = made
    # In pages of 16 places: a prompt, an answer, and both.
    prompt, own, both = 13, 3, 15
    live = 2 * prompt + 8 * own if rows > 8 else prompt + 3 * own
    # An answer that ends gives its own pages back, and a prompt's last takes over the prompt's.
    # Where not all enter at once, as many as are decoded are kept beside those.
    more = 6 * (both - own) if rows > 8 else 3 * both
    assert live <= once <= 1.25 * live
    assert live + more - own <= kept <= 1.25 * (live + more + own)


def test_turns_count_in_rollouts_and_evaluation() -> None:
    rows: list[Row] = [(Extent(200, 40, number // 4),) for number in range(8)]
    one, two = (
        footprint(found, held_of(found), rows, heldout=[200, 200])
        for found in (
            recipe("algorithm=grpo", f"rollout.max_turns={turns}", "evaluation.samples=4")
            for turns in (1, 2)
        )
    )
    for name in ("rollout", "evaluation"):
        assert named(two, name).bytes > named(one, name).bytes, name


def test_each_phase_has_what_is_there_at_its_time() -> None:
    found = recipe("algorithm=ppo", "epochs=1", "minibatches=1")
    said = footprint(found, held_of(found), heldout=[6, 6])
    names = [phase.name for phase in said.phases]
    first = ["load", "rollout", "measure", "update", "optimizer step"]
    assert names == [*first, "evaluation", "checkpoint"]
    assert not bytes_in(named(said, "load"), "optimizer moments")
    for name in ("rollout", "measure", "update", "evaluation", "checkpoint"):
        assert bytes_in(named(said, name), "optimizer moments") > 0, name
        assert bytes_in(named(said, name), "critic weights") > 0, name
    for name in ("rollout", "measure", "evaluation", "checkpoint"):
        assert not bytes_in(named(said, name), "gradients"), name
    assert said.highest.name == "update"
    assert said.peak == max(phase.bytes for phase in said.phases)


def test_one_optimizer_step_has_no_moments_before_it() -> None:
    one = recipe("algorithm=grpo", "steps=1")
    assert updates_of(stage_of(one)) == 1
    said = footprint(one, held_of(one))
    for name in ("rollout", "measure", "update"):
        assert not bytes_in(named(said, name), "optimizer moments"), name
    assert bytes_in(named(said, "optimizer step"), "optimizer moments") > 0
    # The second rollout finds the gradients gone.
    store = "key-value store and sampling"
    two = recipe("algorithm=grpo", "steps=2")
    again = named(footprint(two, held_of(two)), "rollout")
    assert bytes_in(again, "optimizer moments") > 0
    assert bytes_in(again, store) == pytest.approx(bytes_in(named(said, "rollout"), store), rel=0.1)
    many = recipe("algorithm=grpo", "steps=1", "minibatches=2", "epochs=3")
    assert updates_of(stage_of(many)) == 6
    said = footprint(many, held_of(many))
    assert not bytes_in(named(said, "rollout"), "optimizer moments")
    assert bytes_in(named(said, "update"), "optimizer moments") > 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_rounded_copy_takes_half_of_the_backbone(family: str) -> None:
    """Beside the weights through the modules, and in place of the panels where there is compiled
    code; an evaluation is of the model's own."""
    fixed = ("algorithm=grpo", "model.build.hidden_size=256", f"model.build.family={family}")
    taken: dict[str, list[int]] = {}
    for dtype in ("model", "bfloat16"):
        found = recipe(*fixed, "algorithm.correction.kind=truncate", f"rollout.dtype={dtype}")
        held = held_of(found)
        said = footprint(found, held, heldout=(6, 6))
        for phase in ("rollout", "evaluation"):
            size = bytes_in(named(said, phase), "key-value store and sampling")
            taken.setdefault(phase, []).append(size)
    backbone = sum(p.nbytes for p in held.policy.model.base_model.parameters())
    half = -backbone / 2 if family == "llama" and library(torch.float32) else backbone / 2
    assert taken["rollout"][1] - taken["rollout"][0] == pytest.approx(half, rel=0.1)
    assert taken["evaluation"][1] == taken["evaluation"][0]


def test_a_lora_reference_takes_nothing_and_a_copy_as_much_as_the_policy() -> None:
    whole = {p.name: p.bytes for p in weights_of(held_of(recipe("algorithm=grpo")))}
    assert whole["reference weights"] == whole["policy weights"]
    found = recipe("algorithm=grpo", "model.lora.rank=4")
    held = held_of(found)
    assert held.reference is not None
    assert [part.name for part in weights_of(held)] == ["policy weights"]
    merged = bytes_in(named(footprint(found, held), "checkpoint"), "copies")
    linear = [m for m in held.policy.modules() if hasattr(m, "lora_A")]
    assert merged >= sum(m.get_base_layer().weight.nbytes for m in linear)  # type: ignore[operator]


@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)])
def test_drawing_ahead_takes_the_weights_that_learn_and_its_store(lora: tuple[str, ...]) -> None:
    keys = ("algorithm=grpo", "algorithm.correction.kind=truncate", *lora)
    held = held_of(recipe(*keys))
    alone = footprint(recipe(*keys), held)
    beside = footprint(recipe(*keys, "rollout.ahead=1"), held)
    learns = sum(p.nbytes for p in held.policy.parameters() if p.requires_grad)
    store = "key-value store and sampling"
    for name in ("rollout", "measure", "update", "optimizer step", "checkpoint"):
        assert bytes_in(named(beside, name), "engine weights") == learns
        assert bytes_in(named(alone, name), "engine weights") == 0
    taken = bytes_in(named(alone, "rollout"), store)
    for name in ("measure", "update", "optimizer step"):
        more = named(beside, name).bytes - named(alone, name).bytes
        assert more == learns + taken > learns
    assert named(beside, "rollout").bytes == named(alone, "rollout").bytes + learns


def test_one_step_draws_nothing_ahead() -> None:
    keys = ("algorithm=grpo", "algorithm.correction.kind=truncate", "steps=1")
    held = held_of(recipe(*keys))
    assert footprint(recipe(*keys, "rollout.ahead=1"), held) == footprint(recipe(*keys), held)


def test_activations_grow_with_the_budget_and_with_longer_answers() -> None:
    held = held_of(recipe("algorithm=grpo"))

    def activations(budget: int, scored: int) -> int:
        found = recipe("algorithm=grpo", f"token_budget={budget}")
        said = footprint(found, held, [(Extent(6, scored),)] * 8)
        return bytes_in(named(said, "update"), "activations")

    small = activations(64, 10)
    assert activations(128, 10) == pytest.approx(2 * small, rel=0.05)
    assert activations(64, 26) == pytest.approx(small / 64 * 64, rel=0.05)
    assert activations(1000, 26) > 3.5 * small


def test_the_largest_micro_batch_counts_wherever_it_is() -> None:
    held = held_of(recipe("algorithm=grpo"))
    found = recipe("algorithm=grpo", "token_budget=60", "minibatches=1")

    def activations(rows: list[Row]) -> int:
        return bytes_in(named(footprint(found, held, rows), "update"), "activations")

    short: list[Row] = [(Extent(6, 30),)] * 6
    long: list[Row] = [(Extent(6, 50),)]
    assert activations([*short, *long]) == pytest.approx(activations(long * 2), rel=0.02)
    assert activations(long * 2) > 1.3 * activations(short)


def test_a_second_pass_runs_beside_the_gradients_of_the_first() -> None:
    held = held_of(recipe("algorithm=grpo"))
    one = footprint(recipe("algorithm=grpo", "token_budget=128"), held)
    two = footprint(recipe("algorithm=grpo", "token_budget=64"), held)
    parameters = sum(p.nbytes for p in held.policy.parameters())
    assert bytes_in(named(two, "update"), "gradients") >= parameters
    assert bytes_in(named(one, "update"), "gradients") < parameters


def test_a_reward_model_beside_the_policy() -> None:
    data: dict[str, Any] = {
        "model": recipe().model.model_dump(),
        "stages": [
            {
                "stage": "reward_model",
                "steps": 2,
                "data": {"name": "jsonl", "path": "rows.jsonl"},
            }
        ],
    }
    found = load_recipe(data)
    policy = load_policy(found.model, 0)
    model = reward_model_from(policy, "outcome", 0)
    pairs: list[Row] = [(Extent(6, 10), Extent(6, 12))] * 4
    held = HeldModels(policy, reward_model=model)
    said = stage_footprint(found.model, found.stages[0], held, [pairs])
    trained = sum(p.nbytes for p in model.parameters())
    assert bytes_in(named(said, "update"), "optimizer moments") == 2 * trained
    assert bytes_in(named(said, "update"), "reward model weights") >= trained
    judged = HeldModels(policy, judges=(("outcome", model.requires_grad_(False)),))
    beside = footprint(recipe("algorithm=grpo", "algorithm.divergence=none"), judged)
    assert bytes_in(named(beside, "rewards"), "reward outcome weights") >= trained
    assert bytes_in(named(beside, "rewards"), "activations") > 0


def test_on_a_cpu_the_libraries_are_counted() -> None:
    found = recipe("algorithm=grpo")
    said = footprint(found, held_of(found))
    assert not said.holes_seen
    for phase in said.phases:
        assert bytes_in(phase, "libraries") == LIBRARIES
        assert not bytes_in(phase, "heap")


@pytest.mark.skipif(heap() is None, reason="malloc is not glibc's")
def test_the_heap_is_what_malloc_has_beside_what_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recipe("algorithm=grpo")
    held = held_of(found)
    alone = footprint(found, held)
    monkeypatch.setattr("keel.preflight.memory.prediction.heap", heap)
    here = heap()
    assert here is not None
    holes = here.taken - here.used
    said = footprint(found, held)
    assert said.holes_seen
    assert not bytes_in(named(said, "load"), "heap")
    # Holes that were there before count; what was in use before does not.
    assert 0 < bytes_in(named(said, "update"), "heap") < holes + 16 * 2**20
    # The same is there, once with the holes and once without; of two rounds the larger is kept.
    assert [phase.name for phase in said.phases] == [phase.name for phase in alone.phases]
    for phase in said.phases:
        assert phase.bytes >= named(alone, phase.name).bytes - bytes_in(phase, "heap")
    assert said.peak > alone.peak


def test_parts_are_the_most_of_each_phase() -> None:
    said = Footprint(
        "cpu",
        (
            Phase("rollout", (MemoryPart("weights", 5), MemoryPart("store", 9))),
            Phase(
                "update",
                (MemoryPart("weights", 5), MemoryPart("store", 1), MemoryPart("activations", 7)),
            ),
        ),
    )
    assert said.parts == (
        MemoryPart("weights", 5),
        MemoryPart("store", 9),
        MemoryPart("activations", 7),
    )
    assert (said.peak, said.highest.name) == (14, "rollout")


def test_holes_that_stay_count_to_the_phase_that_made_them() -> None:
    update = Phase(
        "update", (MemoryPart("weights", 50), MemoryPart("activations", 40), MemoryPart("heap", 10))
    )
    after = Phase("evaluation", (MemoryPart("weights", 50), MemoryPart("heap", 52)))
    said = Footprint("cpu", (update, after))
    assert said.peak == 102
    assert said.highest == Phase(
        "update", (MemoryPart("weights", 50), MemoryPart("activations", 40), MemoryPart("heap", 12))
    )
    alone = Footprint(
        "cpu", (Phase("a", (MemoryPart("x", 95),)), Phase("b", (MemoryPart("y", 100),)))
    )
    assert (alone.peak, alone.highest.name) == (100, "b")
    far = Footprint("cpu", (update, Phase("evaluation", (MemoryPart("heap", 200),))))
    assert far.highest.name == "evaluation"


def test_the_dry_run_leaves_the_models_as_they_are() -> None:
    found = recipe("algorithm=ppo")
    held = held_of(found)
    before = {name: tensor.clone() for name, tensor in held.policy.state_dict().items()}
    random, training = torch.get_rng_state(), held.policy.model.training
    footprint(found, held, heldout=[5])
    assert all(p.grad is None for p in held.policy.parameters())
    assert held.policy.model.training == training
    assert torch.equal(torch.get_rng_state(), random)
    now = held.policy.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


def test_answers_are_stretched_to_the_budget_within_the_context() -> None:
    stage = stage_of(recipe("rollout.max_tokens=30"))
    rows: list[Row] = [(Extent(6, 3),), (Extent(40, 3),)]
    assert to_budget(stage, rows, 64) == [(Extent(6, 30),), (Extent(40, 24),)]
    assert to_budget(stage, rows, None) == [(Extent(6, 30),), (Extent(40, 30),)]
    prompt = Prompt("p", "x", tokens=(1, 2, 3))
    completion = _completion(4)
    assert rows_of([Group(prompt, (completion, completion))]) == [(Extent(3, 4, 0),)] * 2


def test_a_prompt_counts_once_for_neighbours_of_its_group() -> None:
    rows: list[Row] = [(Extent(6, 3, 0),), (Extent(6, 2, 0),), (Extent(5, 4, 1),), (Extent(5, 1),)]
    assert tokens_of(rows) == 6 + 3 + 2 + 9 + 6
    assert [tokens_of(part) for part in micro_batches(rows, 11, torch.device("cpu"))] == [11, 9, 6]
    packed = packed_of(rows, torch.device("cpu"))
    assert packed.lengths == (6, 3, 2, 9, 6)
    assert packed.follows == (-1, 0, 0, -1, -1)
    assert packed.target_N.tolist() == [6, 7, 8, 9, 10, 16, 17, 18, 19, 25]


def _completion(tokens: int) -> Completion:
    import numpy as np

    return Completion(
        tokens=np.zeros(tokens, dtype=np.int64),
        log_probs=np.zeros(tokens, dtype=np.float32),
        written=np.ones(tokens, dtype=np.bool_),
        finish="length",
        text="",
    )


def test_measuring_reads_the_critic_and_the_reference_too() -> None:
    found = recipe("algorithm=ppo")
    held = held_of(found)
    assert held.critic is not None
    dry = DryRun()
    alone = Twins(dry.twin(held.policy))
    whole = Twins(alone.policy, critic=dry.twin(held.critic))
    with dry.running() as ledger:
        said = learn(alone, ROWS, temperature=1.0, full=False, pairs=False)
        one = ledger.now
        del said
        start = ledger.now
        said = learn(whole, ROWS, temperature=1.0, full=False, pairs=False)
        two = ledger.now
        assert two - start == pytest.approx(2 * (one - start), rel=0.2)
        del said
        measure(whole, ROWS, 1.0)
        assert ledger.now == start
