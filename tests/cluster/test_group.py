"""What ranks do at once, called directly: this process is rank 0."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from keel.algorithms.presets import PRESETS
from keel.cluster.parts import Member
from keel.cluster.placement import SharedEngine
from keel.cluster.ranks import RankGroup, start
from keel.config.model import BuildModel, Model
from keel.config.sources import Rollout
from keel.engines.registry import build_engine
from keel.learn.learner import Learner
from keel.learn.optimizer import Cause, NotFinite
from keel.learn.ranks import ONE, Ranks
from keel.models.policy import Policy, load_policy
from keel.models.sharded import mesh_of, shard, whole, wholes, within
from keel.platform.signals import ProcessLost
from keel.training.state import read_reference, restore_modules, restore_optimizers
from keel.types import Capabilities, Engine, Group, KeelError, Prompt, Sampling
from tests.cluster import hanging
from tests.cluster.updates import built, parts_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def _functions_of_tests() -> Iterator[None]:
    """The ranks call functions of these modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield


def itself(ranks: Ranks) -> Ranks:
    return ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup[Any]]:
    """Two ranks, whose members the tests build; groups of others come before it in this module."""
    with start(2, itself, itself, 1) as group:
        yield group


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1, as in /proc/net/tcp and tcp6."""


def listening(ranks: Ranks) -> list[set[str]]:
    """The addresses that each rank's process listens on."""
    links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                found.add(words[1].partition(":")[0])
    return ranks.gather(found)


def test_ranks_listen_on_loopback_only_and_leave_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = dict(os.environ)
    with start(2, itself, itself, 1) as group:
        assert list(tmp_path.iterdir()) == []
        found = group.call(listening)
    assert len(found) == 2
    for addresses in found:
        assert addresses
        assert addresses <= LOOPBACK
    assert dict(os.environ) == before


@pytest.mark.parametrize("wait", [False, True])
def test_a_rank_that_hangs_is_named_after_the_deadline(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the third, which ends since it waits for the second too."""
    monkeypatch.setattr("keel.cluster.ranks.PATIENCE", 3.0)
    with (
        pytest.raises(ProcessLost, match=r"no answer within 8 s from rank 1 \(process \d+\):"),
        start(3, hanging.itself, hanging.itself, 1, deadline=8) as group,
    ):
        group.call(hanging.stopped, wait)


def written(learner: Learner, folder: Path) -> dict[str, torch.Tensor]:
    """What each rank's part is written of, after an update, whole."""
    algorithm, batch = PRESETS["ppo"].algorithm, parts_of(learner, "ppo", 0)[0].batch
    learner.update(algorithm, batch, 0.05, (1e-3, 1e-3))
    for place in ("one", "two"):
        path = folder / place
        path.mkdir(exist_ok=True)
        learner.save(path)
    assert learner.reference is not None
    assert learner.critic is not None
    assert learner.value_optimizer is not None
    every = {
        "optimizer": learner.optimizer.state(),
        "value_optimizer": learner.value_optimizer.state(),
        "critic": learner.critic.state_dict(),
        "reference": learner.reference.state(),
    }
    return {
        f"{name}/{key}": value for name, tensors in every.items() for key, value in wholes(tensors)
    }


def moments_read(learner: Learner, folder: Path) -> dict[str, torch.Tensor]:
    """The moments that sharded parameters take from a checkpoint, whole; each rank reads a part."""
    restore_optimizers(folder, learner.optimizers)
    return {
        f"{name}/{key}": value
        for name, optimizer in learner.optimizers.items()
        for key, value in wholes(optimizer.state())
    }


def test_sharded_checkpoint_is_read_by_any_number_of_ranks(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    build = partial(built, "ppo", False)
    with start(3, build, build, 1) as group:
        wanted = group.call(written, tmp_path)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) == 12
    assert names[0] == "critic-00001-of-00003.safetensors"
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    sizes = [(tmp_path / "one" / name).stat().st_size for name in names if "reference" in name]
    assert max(sizes) < 0.5 * sum(sizes)  # no one writes it all

    alone = built("ppo", False, ONE)
    assert alone.critic is not None
    found = moments_read(alone, tmp_path / "one")
    restore_modules(tmp_path / "one", {"critic": alone.critic})
    found |= {f"critic/{key}": value for key, value in alone.critic.state_dict().items()}
    found |= {f"reference/{k}": v for k, v in read_reference(tmp_path / "one").items()}
    assert_same(found, wanted)

    pair: RankGroup[Any] = request.getfixturevalue("pair")  # after the three have ended
    pair.build(build, build)
    shared = pair.call(moments_read, tmp_path / "one")
    assert_same(shared, {name: value for name, value in wanted.items() if "optimizer/" in name})


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert wanted
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


WEIGHT = "model.layers.1.mlp.up_proj.weight"


def shard_of(learner: Learner, name: str) -> torch.Tensor:
    """This rank's part of a weight."""
    weight = dict(learner.policy.model.named_parameters())[name]
    assert isinstance(weight, DTensor)
    return weight.to_local()


def with_bad_weight(learner: Learner) -> list[tuple[tuple[str, ...], str | None, Cause]]:
    """One NaN in the last rank's part of a weight: the metrics that refuse the step, the weight
    that is named, and the cause, on every rank."""
    algorithm, batch = PRESETS["grpo"].algorithm, parts_of(learner, "grpo", 0)[0].batch
    if learner.ranks.number == learner.ranks.count - 1:
        shard_of(learner, WEIGHT).data[-1, 0] = math.nan
    names: tuple[str, ...] = ()
    try:
        learner.update(algorithm, batch, 0.05, (1e-3, 1e-3))
    except NotFinite as error:
        names = error.names
    return learner.ranks.gather(
        (names, learner.bad_weight(), learner.cause_of(algorithm, batch, 0.05))
    )


def with_bad_moment(learner: Learner) -> list[str]:
    """One NaN in the last rank's part of a moment, so that a step makes its weight NaN: the errors
    of every rank."""
    algorithm = PRESETS["grpo"].algorithm
    first, second = parts_of(learner, "grpo", 0)
    learner.update(algorithm, first.batch, 0.05, (1e-3, 1e-3))
    if learner.ranks.number == learner.ranks.count - 1:
        (name,) = (n for n in learner.optimizer.state() if n.endswith(f"{WEIGHT}/exp_avg"))
        moment = learner.optimizer.state()[name]
        assert isinstance(moment, DTensor)
        moment.to_local()[-1, 0] = math.nan
    error = ""
    try:
        learner.update(algorithm, second.batch, 0.05, (1e-3, 1e-3))
    except KeelError as raised:
        error = str(raised)
    return learner.ranks.gather(error)


def test_nan_in_one_shard_of_the_weights_is_named_on_every_rank(pair: RankGroup[Any]) -> None:
    build = partial(built, "grpo", False)
    pair.build(build, build)
    found = pair.call(with_bad_weight)
    assert found[0] == found[1]
    names, weight, cause = found[0]
    assert "loss" in names
    assert weight is not None
    assert weight.endswith(WEIGHT)
    assert cause.weights
    assert WEIGHT in cause.term


def test_nan_in_one_shard_of_a_moment_is_named_on_every_rank(pair: RankGroup[Any]) -> None:
    build = partial(built, "grpo", False)
    pair.build(build, build)
    found = pair.call(with_bad_moment)
    assert found[0] == found[1]
    assert "the optimizer step made the weights" in found[0]
    assert WEIGHT in found[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_the_shards(tmp_path: Path, pair: RankGroup[Any]) -> None:
    """By the reader of torch.distributed.checkpoint for safetensors, written apart from ours."""
    build = partial(built, "ppo", False)
    pair.build(build, build)
    wanted = pair.call(written, tmp_path)
    place = tmp_path / "reference"
    place.mkdir()
    for path in (tmp_path / "one").glob("reference-*"):
        path.rename(place / path.name)
    known = HuggingFaceStorageReader(str(place)).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(one.size)
        for name, one in known.items()
        if isinstance(one, TensorStorageMetadata)
    }
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(place)), no_dist=True)
    assert_same(
        {f"reference/{name}": value for name, value in found.items()},
        {name: value for name, value in wanted.items() if name.startswith("reference/")},
    )


def in_bfloat16(ranks: Ranks) -> list[tuple[bool, float, float]]:
    """Layers gathered in bfloat16, against the same model whole under autocast.

    On each rank: whether gradients are float32, and how far logits and gradients are from those,
    relative to the largest.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    alone = LlamaForCausalLM(config)
    model = copy.deepcopy(alone)
    shard(model, mesh_of(torch.device("cpu"), ranks.count), torch.bfloat16)
    tokens = torch.arange(12)[None]
    with torch.autocast("cpu", torch.bfloat16):
        wanted = alone(tokens, use_cache=False).logits
        logits = within(model, lambda: model(tokens, use_cache=False).logits)
    wanted.square().sum().backward()
    logits.square().sum().backward()
    off = float((logits - wanted).detach().abs().max() / wanted.detach().abs().max())
    exact, gap, largest = True, 0.0, 0.0
    for one, other in zip(alone.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        exact = exact and other.dtype == other.grad.dtype == torch.float32
        found = (
            whole(other.grad).detach() / ranks.count
        )  # a sum over the ranks, whose inputs are equal
        gap = max(gap, float((found - one.grad).abs().max()))
        largest = max(largest, float(one.grad.abs().max()))
    return ranks.gather((exact, off, gap / largest))


def test_layers_in_bfloat16_compute_as_under_autocast(pair: RankGroup[Any]) -> None:
    """Within two units of bfloat16's last place (2⁻⁸): sums are rounded at other places."""
    pair.build(itself, itself)
    found = pair.call(in_bfloat16)
    assert len(found) == 2
    for exact, logits, gradients in found:
        assert exact
        assert logits < 2 / 256
        assert gradients < 2 / 256


def sampled_by(ranks: Ranks) -> Member:
    """A member that only samples."""
    policy, engine = sampler()
    return Member(replace(built("grpo", False, ranks), ranks=ranks), policy, engine)


def sampler() -> tuple[Policy, Engine]:
    build = BuildModel(hidden_size=32, layers=2, heads=4, kv_heads=2, context=64)
    policy = load_policy(Model(build=build), seed=3)
    return policy, build_engine(Rollout(), model=policy.model, tokenizer=policy.tokenizer)


def test_prompt_twice_in_a_step_is_sampled_as_by_one_process(pair: RankGroup[Any]) -> None:
    """Its occurrences differ, and are those of one process, wherever they are in the step."""
    ids = ["a", "b", "a", "c", "d", "a"]
    columns = {"score": lambda: 1}  # rewards may have what no pickle holds
    prompts = [Prompt(name, "", columns, tokens=(ord(name) - 90, 5, 6)) for name in ids]
    sampling = Sampling(max_tokens=12)
    alone = sampler()[1].sample(prompts, 2, sampling, 7)
    pair.build(sampled_by, sampled_by)
    engine = SharedEngine(pair, Capabilities(streams=True))
    taken: dict[int, Group] = {}
    shared = engine.sample(prompts, 2, sampling, 7, on_group=taken.__setitem__)
    texts = [[c.text for c in found.completions] for found in shared]
    assert texts == [[c.text for c in found.completions] for found in alone]
    assert all(found.prompt is prompt for found, prompt in zip(shared, prompts, strict=True))
    handed = [[c.text for c in taken[at].completions] for at in range(len(ids))]
    assert handed == texts
    assert texts[0] != texts[2] != texts[5]
