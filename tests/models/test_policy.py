"""The policy, its value models, reference and teacher: scores, state, folders, and bfloat16."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from keel.config.model import Autocast, Model, TeacherModel
from keel.learn.ranks import ONE
from keel.models import policy as policies
from keel.models.attention import Attending, PackedLayout
from keel.models.families import uses_autocast
from keel.models.loading import quiet
from keel.models.packed import pack
from keel.models.policy import (
    Policy,
    ProductTimes,
    load_policy,
    needs_resolution,
    resolve_autocast,
    rounding_effect,
    time_products,
)
from keel.models.reference import (
    check_teachers,
    critic_from_policy,
    load_critic,
    load_teachers,
    reference_for,
    value_head_for,
)
from keel.types import KeelError
from tests.cluster.updates import built, step
from tests.models import tiny
from tests.models.tiny import batch, build, learn, policy, separate_log_probs, spec, stir


def test_scores_hold_what_was_asked_for() -> None:
    ours = policy("llama", dtype="float64")
    _, packed = batch(len(ours.tokenizer))
    bare = ours.scores(packed, 0.7)
    assert bare.entropy_N is bare.value_N is bare.full_kl_N is None
    full = ours.scores(
        packed, 0.7, entropy=True, value_head=value_head_for(ours), reference=reference_for(ours)
    )
    assert torch.equal(full.log_prob_N, bare.log_prob_N)
    assert full.entropy_N is not None
    assert full.full_kl_N is not None
    assert full.value_N is not None
    tokens = len(ours.tokenizer)
    assert 0 < full.entropy_N.min() <= full.entropy_N.max() < torch.log(torch.tensor(tokens))
    assert full.full_kl_N.abs().max() < 1e-12
    assert torch.equal(full.value_N, torch.zeros_like(full.value_N))
    assert full.value_N.dtype == torch.float64


def test_activation_checkpointing_changes_no_gradient() -> None:
    grads = []
    for checkpointing in (False, True):
        ours = policy("llama", activation_checkpointing=checkpointing)
        runs = []
        ours.model.model.layers[0].self_attn.register_forward_hook(
            lambda *_, into=runs: into.append(1)
        )
        _, packed = batch(len(ours.tokenizer))
        ours.scores(packed).log_prob_N.sum().backward()
        assert len(runs) == (2 if checkpointing else 1), "recomputed in the backward pass"
        grads.append({name: p.grad for name, p in ours.named_parameters()})
    for name, grad in grads[0].items():
        assert grad is not None, name
        assert torch.equal(grad, grads[1][name]), name


def test_first_layers_alone_are_recomputed_as_asked() -> None:
    grads = []
    for checkpointing in (False, 1, 3):  # of two layers
        ours = policy("llama", activation_checkpointing=checkpointing)
        runs: list[int] = []
        for at, layer in enumerate(ours.model.model.layers):
            layer.self_attn.register_forward_hook(lambda *_, at=at, into=runs: into.append(at))
        _, packed = batch(len(ours.tokenizer))
        ours.scores(packed).log_prob_N.sum().backward()
        assert sorted(runs) == {False: [0, 1], 1: [0, 0, 1], 3: [0, 0, 1, 1]}[checkpointing]
        grads.append([p.grad for p in ours.parameters()])
    for one in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], one, strict=True))


def test_two_forwards_agree_and_dropout_is_off_everywhere() -> None:
    ours = policy("gpt2")  # whose config has dropout 0.1 in four places
    _, packed = batch(len(ours.tokenizer))
    assert ours.training
    a, b = ours.scores(packed).log_prob_N, ours.scores(packed).log_prob_N
    assert torch.equal(a, b)
    rates = [m.p for m in ours.modules() if isinstance(m, torch.nn.Dropout)]
    assert rates
    assert not any(rates)
    config = ours.model.config.to_dict()
    assert {config[key] for key in config if "drop" in key} == {0.0}


@pytest.mark.parametrize(
    ("family", "rank"),
    [("llama", 0), ("llama", 4), ("gpt2", 4), ("gemma2", 0), ("qwen3_moe", 4), ("opt", 0)],
)
def test_a_saved_policy_loads_with_plain_transformers(
    family: str, rank: int, tmp_path: Path
) -> None:
    ours = policy(family, rank=rank, chat_template="{{ messages[0].content }}")
    if rank:
        learn(ours, 4)
    ours.save(tmp_path)
    with quiet():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, use_safetensors=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens, packed = batch(len(tokenizer))
    with torch.no_grad():
        expected = separate_log_probs(plain.eval(), tokens, 0.7)
        found = ours.scores(packed, 0.7).log_prob_N
    # float32; a merged weight rounds once more.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if rank else 1e-5)
    assert tokenizer("1+2 =b")["input_ids"] == ours.tokenizer("1+2 =b")["input_ids"]
    assert tokenizer.chat_template == ours.tokenizer.chat_template
    assert plain.generation_config.eos_token_id == tokenizer.eos_token_id
    assert "keel" not in (tmp_path / "config.json").read_text()
    assert not list(tmp_path.glob("**/*.bin"))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert not [name for name in names if "lora" in name or "base_layer" in name]
    again = load_policy(Model(name=str(tmp_path), device="cpu"), 5)
    assert (again.context, again.hidden_size) == (64, 32)
    if not rank:
        assert torch.equal(again.scores(packed, 0.7).log_prob_N, found)


@pytest.mark.parametrize("rank", [0, 4])
def test_state_goes_into_a_fresh_policy_bit_for_bit(rank: int) -> None:
    first, second = policy("gpt2", rank=rank), load_policy(spec("gpt2", rank=rank), 1)
    if rank:
        learn(first, 4)
        reference_for(first)  # a second adapter, which is no part of the policy's state
    state = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    pointers = [tensor.data_ptr() for tensor in first.state_dict().values()]
    assert len(set(pointers)) == len(pointers), "tied tensors must appear once"
    second.load_state_dict(state)
    _, packed = batch(len(first.tokenizer))
    assert torch.equal(second.scores(packed).log_prob_N, first.scores(packed).log_prob_N)
    assert second.state_dict().keys() == state.keys()
    state.popitem()
    with pytest.raises(ValueError, match="1 differ"):
        second.load_state_dict(state)


# ---------------------------------------------------------------- value models


def test_a_critic_starts_from_the_policys_backbone_and_learns_alone() -> None:
    ours = policy("llama", rank=4, activation_checkpointing=True)
    learn(ours, 4)
    critic = critic_from_policy(ours)
    _, packed = batch(len(ours.tokenizer))
    torch.testing.assert_close(
        critic.backbone(
            input_ids=packed.tokens_T[None],
            position_ids=packed.positions()[None],
            use_cache=False,
            layout=Attending(PackedLayout(packed.lengths)),
        ).last_hidden_state[0][packed.target_N - 1],
        ours.hidden(packed),
        rtol=0,
        atol=1e-4,  # merged weights round once more
    )
    assert not [name for name, _ in critic.named_parameters() if "lora" in name]
    assert all(p.requires_grad for p in critic.parameters())
    assert torch.equal(critic.values(packed), torch.zeros(len(packed.target_N)))
    with torch.no_grad():
        critic.head.linear.weight.fill_(0.1)
    (critic.values(packed) - 1).square().mean().backward()
    assert all(p.grad is not None for p in critic.parameters())
    assert all(p.grad is None for p in ours.parameters())


def test_values_are_of_the_state_before_each_token() -> None:
    ours = policy("llama", dtype="float64")
    critic = critic_from_policy(ours)
    with torch.no_grad():
        critic.head.linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    tokens, packed = batch(len(ours.tokenizer))
    values = critic.values(packed)
    changed = [t.clone() for t in tokens]
    for t in changed:
        t[3] = (t[3] + 1) % len(ours.tokenizer)
    again = critic.values(pack(changed, [torch.arange(2, len(t)) for t in changed]))
    place = torch.cat([torch.arange(2, len(t)) for t in tokens])
    # A token is not seen by its own value, but by all after it.
    assert torch.equal(values[place <= 3], again[place <= 3])
    assert (values[place > 3] != again[place > 3]).all()
    assert (place > 3).any()
    assert values.std() > 0.1


def test_the_gradient_of_a_value_head_reaches_the_backbone() -> None:
    ours = policy("olmoe")
    head = value_head_for(ours)
    _, packed = batch(len(ours.tokenizer))
    with torch.no_grad():
        head.linear.weight.fill_(0.1)
    out = ours.scores(packed, value_head=head)
    assert out.value_N is not None
    out.value_N.sum().backward()
    embedding = ours.model.get_input_embeddings().weight
    assert embedding.grad is not None
    assert embedding.grad.abs().max() > 0
    assert head.linear.bias.grad is not None
    assert head.linear.bias.grad.item() == len(packed.target_N)


def test_a_critic_from_a_folder(tmp_path: Path) -> None:
    ours = policy("llama")
    other = policy("qwen2", seed=3)
    other.save(tmp_path)
    critic = load_critic(str(tmp_path), ours, spec("llama", rank=4), 0)
    _, packed = batch(len(ours.tokenizer))
    assert torch.equal(critic.values(packed), torch.zeros(len(packed.target_N)))
    assert critic.backbone.config.model_type == "qwen2"
    small = build("llama", alphabet="ab")
    load_policy(spec().model_copy(update={"build": small}), 0).save(tmp_path / "small")
    with pytest.raises(KeelError, match="embeddings for 4 tokens but the policy's tokenizer"):
        load_critic(str(tmp_path / "small"), ours, spec(), 0)


# ---------------------------------------------------------------- frozen reference


def test_a_frozen_copy_refreshes_saves_and_restores() -> None:
    ours = policy("gpt2")
    _, packed = batch(len(ours.tokenizer))
    reference = reference_for(ours)
    assert not any(p.requires_grad for p in reference.model.parameters())  # type: ignore[attr-defined]
    first = reference.log_probs(packed)
    saved = {name: tensor.clone() for name, tensor in reference.state().items()}
    assert len({t.data_ptr() for t in reference.state().values()}) == len(saved)
    stir(ours.model)
    out = ours.scores(packed, reference=reference)
    assert out.full_kl_N is not None
    assert (out.full_kl_N > 1e-3).all()
    assert torch.equal(reference.log_probs(packed), first)
    reference.refresh(ours)
    assert torch.equal(reference.log_probs(packed), ours.scores(packed).log_prob_N.detach())
    assert not torch.equal(reference.log_probs(packed), first)
    reference.restore(saved)
    assert torch.equal(reference.log_probs(packed), first)
    with pytest.raises(ValueError, match="another model"):
        reference.restore({})


# ---------------------------------------------------------------- bfloat16 autocast on a CPU


WORDS = 15
LOG_PROB = 0.04
"""Nats. bfloat16 keeps 8 bits, so that a product rounds at 4e-3; the largest found is 0.014."""
GRADIENT = 0.03
"""Of the gradient's norm; the largest found is 0.013."""


@pytest.mark.parametrize(
    ("autocast", "dtype", "expected"),
    [
        (True, "float32", False),
        (False, "float32", False),
        ("auto", "float32", False),
        ("bfloat16", "float32", True),
        ("bfloat16", "float64", False),
    ],
)
def test_only_bfloat16_rounds_on_a_cpu(autocast: Autocast, dtype: str, expected: bool) -> None:
    made = policy(dtype=dtype, autocast=autocast)
    assert uses_autocast(made.model, made.autocast) is expected
    _, packed = batch(WORDS)
    exact = policy(dtype=dtype, autocast=False)
    same = torch.equal(made.scores(packed).log_prob_N, exact.scores(packed).log_prob_N)
    assert same is not expected


ROUNDED: list[tuple[str, dict[str, object]]] = [
    ("llama", {}),
    ("llama", {"rank": 4}),
    ("llama", {"activation_checkpointing": True}),
    ("gpt2", {}),
    ("gemma2", {}),  # soft caps
    ("gpt_oss", {}),  # sinks
]


@pytest.mark.parametrize(("family", "keys"), ROUNDED, ids=str)
def test_rounding_moves_log_probs_and_gradient_within_a_bound(
    family: str, keys: dict[str, object]
) -> None:
    made = policy(family, autocast="bfloat16", **keys)
    _, packed = batch(WORDS)
    weight_N = torch.linspace(-1, 1, len(packed.target_N))
    scores = made.scores(packed, entropy=True)
    assert scores.log_prob_N.dtype == torch.float32
    assert scores.entropy_N is not None
    assert scores.entropy_N.dtype == torch.float32
    effect = rounding_effect(made, packed, weight_N)
    assert effect.tokens == len(packed.target_N)
    assert 1e-4 < effect.mean <= effect.largest < LOG_PROB
    assert 1e-4 < effect.gradient < GRADIENT
    assert made.autocast == "bfloat16"
    assert all(p.grad is None for p in made.parameters())


def test_a_policy_in_float32_is_not_moved() -> None:
    _, packed = batch(WORDS)
    effect = rounding_effect(policy(), packed, torch.ones(len(packed.target_N)))
    assert (effect.mean, effect.largest, effect.gradient) == (0, 0, 0)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_updates_in_bfloat16_follow_those_in_float32(name: str) -> None:
    """Losses and norms of gradients of four updates on two ragged batches.

    Old and new log-probabilities are rounded alike, so ratios and losses hardly move: the largest
    differences found are 3e-5 of losses up to 0.3, and 6e-4 of the norms.
    """
    found = []
    for autocast in (False, "bfloat16"):
        learner = built(name, False, ONE, autocast=autocast)
        found.append([metrics for at in range(2) for metrics in step(learner, name, at)])
        weights = [*learner.policy.parameters()]
        assert all(weight.dtype == torch.float32 for weight in weights)
        moments = [m for o in learner.optimizers.values() for m in o.state().values()]
        assert all(m.dtype == torch.float32 for m in moments if m.is_floating_point())
    for exact, rounded in zip(*found, strict=True):
        assert rounded["loss"] == pytest.approx(exact["loss"], abs=2e-4)
        assert rounded["grad_norm"] == pytest.approx(exact["grad_norm"], rel=3e-3)
    assert found[0] != found[1]


def test_products_are_timed_in_the_sizes_of_the_model() -> None:
    made = policy()
    sizes = policies._product_sizes(made.model.base_model)
    hidden, mlp = 32, made.model.config.intermediate_size
    # Of two layers: q and o; k and v, of half as many heads; gate and up; down.
    assert sizes == {(hidden, hidden): 4, (16, hidden): 4, (mlp, hidden): 4, (hidden, mlp): 2}
    times = time_products(made.model)
    assert min(times.float32, times.bfloat16) > 0
    assert "640 tokens take" in str(times)


def test_bfloat16_pays_where_it_takes_much_less_time() -> None:
    assert ProductTimes(float32=1.0, bfloat16=0.5).bfloat16_pays
    assert not ProductTimes(float32=1.0, bfloat16=0.9).bfloat16_pays


def test_only_auto_in_float32_is_left_to_a_timing() -> None:
    for autocast, dtype, expected in (
        ("auto", "float32", True),
        ("auto", "float64", False),
        ("bfloat16", "float32", False),
        (True, "float32", False),
    ):
        model = spec(dtype=dtype, autocast=autocast)
        assert needs_resolution(model, policy(dtype=dtype)) is expected
    made, asked = policy(autocast="auto"), spec(autocast="auto")
    assert resolve_autocast(asked, made, True).autocast == made.autocast == "bfloat16"
    assert resolve_autocast(asked, made, False).autocast is made.autocast is False


# ---------------------------------------------------------------- the teacher


ROWS = [[3, 1, 4, 1, 5, 9], [2, 6, 5]]
CONTEXT = 64


def saved(folder: Path, **changes: object) -> TeacherModel:
    """A stirred model of another width in a folder."""
    build = tiny.build(**{"hidden_size": 48, **changes})
    policy = load_policy(Model(build=build, device="cpu"), 3)
    tiny.stir(policy.model)
    policy.save(folder)
    return TeacherModel(name=str(folder))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_plain_transformers(tmp_path: Path, temperature: float) -> None:
    policy = tiny.policy()
    [teacher] = load_teachers(saved(tmp_path), policy, tiny.spec(), CONTEXT)
    rows = [torch.tensor(row) for row in ROWS]
    packed = pack(rows, [torch.arange(1, len(row)) for row in rows])
    found = teacher.log_probs(packed, temperature)
    assert not found.requires_grad
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    wanted = []
    with torch.no_grad():
        for row in ROWS:
            logits = plain(input_ids=torch.tensor([row])).logits[0, :-1] / temperature
            log_probs = logits.log_softmax(-1)
            wanted.append(log_probs[torch.arange(len(row) - 1), torch.tensor(row[1:])])
    # float32 through another attention: sums of 48 terms.
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=1e-5)
    assert not any(weight.requires_grad for weight in teacher.model.parameters())


def test_dtype_is_the_teachers_own(tmp_path: Path) -> None:
    choice = saved(tmp_path)
    half = choice.model_copy(update={"dtype": "bfloat16"})
    dtypes = [
        load_teachers(one, tiny.policy(), tiny.spec(), CONTEXT)[0].model.dtype
        for one in (choice, half)
    ]
    assert dtypes == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alphabet": "0123456789+= cb"}, "another tokenizer than the policy: 1 of the policy's"),
        ({"alphabet": "1023456789+= ab"}, "another tokenizer than the policy: 2 of the policy's"),
        ({"alphabet": "0123456789"}, "'+' (12) among them, which it does not have"),
        ({"context": 63}, "reads 63 tokens at the most, and a prompt with its completion may have"),
    ],
    ids=["other-token", "other-order", "fewer-tokens", "context"],
)
def test_unfit_teacher_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    choice, policy = saved(tmp_path, **changes), tiny.policy()
    for refuse in (check_teachers, load_teachers):
        with pytest.raises(KeelError, match=re.escape(f"teacher.name = '{tmp_path}'")) as caught:
            refuse(choice, policy, tiny.spec(), CONTEXT)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_teacher_may_know_more_tokens_and_read_longer_texts(tmp_path: Path) -> None:
    policy: Policy = tiny.policy()
    choice = saved(tmp_path, alphabet=f"{tiny.build().alphabet}cdef", context=128)
    tokens = policy.tokenizer.get_vocab().items()
    theirs = load_policy(Model(name=choice.name, device="cpu"), 0).tokenizer.get_vocab()
    assert all(theirs[token] == at for token, at in tokens)
    load_teachers(choice, policy, tiny.spec(), CONTEXT)


@pytest.mark.parametrize("name", ["./missing", "config-only"])
def test_teacher_that_does_not_load_is_named_by_its_key(tmp_path: Path, name: str) -> None:
    if name == "config-only":
        saved(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
        name = str(tmp_path)
    with pytest.raises(KeelError, match=r"teacher\.name = ") as caught:
        check_teachers(TeacherModel(name=name), tiny.policy(), tiny.spec(), CONTEXT)
    assert "model.name" not in str(caught.value)
