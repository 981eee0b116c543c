"""Training on the rollouts that a run stored, in place of sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.config.sources import PreferenceData
from keel.platform.signals import Interrupted
from keel.preflight.check import check
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.run import train
from keel.types import KeelError
from tests.training.small import FAST, Stop, info, metrics, small

KEYS = ("rollouts_every=1", "evaluation.every=2")
LEARNED = ("optimizer.safetensors", "trainable.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(small(*KEYS), tmp_path_factory.mktemp("stored") / "run")


def _from(run: RunFolder, *keys: str) -> tuple[str, ...]:
    return (*KEYS, "rollout.engine=stored", f"rollout.stored={run.path}", *keys)


def _same(one: RunFolder, other: RunFolder) -> None:
    assert one.metrics.read_bytes() == other.metrics.read_bytes()
    ends = [load(run.path).checkpoints()[-1].path for run in (one, other)]
    for name in LEARNED:
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()


def test_a_runs_own_rollouts_give_the_same_run(run: RunFolder, tmp_path: Path) -> None:
    again = train(small(*_from(run)), tmp_path / "again")
    _same(run, again)
    assert evaluate(again.path, prompts=4)["n"] == 4
    for step in (1, 4):
        assert load(again.path).rollouts(step) == load(run.path).rollouts(step)


def test_replay_is_resumed_to_the_same_bytes(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(small(*_from(run)), tmp_path / "cut", callbacks=[Stop(2)])
    _same(run, train(None, tmp_path / "cut", resume=True))


def test_kept_groups_of_dynamic_sampling_are_replayed(tmp_path: Path) -> None:
    keys = ("algorithm=dapo", "rollout.max_refills=3")
    whole = train(small(*KEYS, *keys), tmp_path / "whole")
    replay = small(*_from(whole, *keys, "rollout.dynamic_sampling=false"))
    again = train(replay, tmp_path / "again")
    assert load(whole.path).column("rollout/refills")[1].max() > 0
    ends = [load(run.path).checkpoints()[-1].path for run in (whole, again)]
    for name in LEARNED:
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()


def test_no_steps_sample_what_the_first_would(run: RunFolder, tmp_path: Path) -> None:
    sampled = train(small(*KEYS, "steps=0"), tmp_path / "sampled")
    assert info(sampled)["finished"]
    assert not load(sampled.path).checkpoints()
    assert [one["step"] for one in metrics(sampled)] == [0]
    assert metrics(sampled)[0]["reward"] == metrics(run)[0]["reward"]
    names = ("prompt", "tokens", "log_probs", "reward", "finish")
    batch = [[one[name] for name in names] for one in load(sampled.path).rollouts(0)]
    assert batch == [[one[name] for name in names] for one in load(run.path).rollouts(1)]
    keys = _from(sampled, "rollout.prompts_per_step=2")
    spread = load(train(small(*keys, "steps=2"), tmp_path / "spread").path)
    records = [one for step in (1, 2) for one in spread.rollouts(step)]
    assert [[one[name] for name in names] for one in records] == batch
    with pytest.raises(KeelError, match=r"sampled 4 prompts: set steps and"):
        train(small(*keys, "steps=3"), tmp_path / "more")


def test_no_steps_load_no_model_to_train(tmp_path: Path) -> None:
    keys = ("algorithm=ppo", "value.name=/no/where", "optimizer.offload=cpu", "rollouts_every=0")
    sampled = train(small(*keys, "steps=0"), tmp_path / "sampled")
    assert len(load(sampled.path).rollouts(0)) == 16


def test_another_policy_learns_off_policy(run: RunFolder, tmp_path: Path) -> None:
    """A different model and reward on the same rollouts, the engine's log-probs as behaviour."""
    keys = ("model.build.layers=1", "rollout.old_log_probs=engine", "rollout.group_size=2")
    reward = "rewards.functions=[{function='length', options={target=3}}]"
    other = train(small(*_from(run, *keys, reward)), tmp_path / "other")
    stored, replayed = load(run.path).rollouts(2), load(other.path).rollouts(2)
    assert len(replayed) == len(stored) / 2
    texts = {(one["prompt_id"], one["completion"]) for one in stored}
    assert all((one["prompt_id"], one["completion"]) in texts for one in replayed)
    ratio = load(other.path).column("ratio/mean")[1]
    assert abs(ratio - 1).max() > 1e-3


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (("steps=5",), r"rollout.stored: no rollouts of step 5 in .* steps 1 to 4"),
        (("rollout.group_size=8",), "has groups of 4: lower rollout.group_size"),
        (("rollout.max_tokens=1",), "raise rollout.max_tokens"),
        (("algorithm=remax",), "holds no greedy completions"),
        (("seed=9",), "prompt '.*' has another text there than in the recipe's tasks"),
        (
            ("tasks=[{name='addition'}]", "model.build.alphabet='0123456789>+='"),
            r"prompt '.*' is not among the next 20000",
        ),
        (
            ("model.build.alphabet='9876543210> '",),
            r"another tokenizer: token \d+ is '.' there and '.' to this policy",
        ),
        (("rollout.async_level=1", "algorithm.corrections.kind=truncate"), "async_level = 0"),
        (("rollout.dynamic_sampling=true",), "set rollout.dynamic_sampling = false"),
        (("rollout.stored=none",), "needs rollout.stored: name a run folder"),
        (("rollout.stored=/no/where",), "no/where"),
        (("rollout.stored_stage=sft",), "has rollouts of rl: name one"),
        (("cluster.processes=2",), "does not go with cluster.processes > 1"),
    ],
)
def test_what_stored_rollouts_cannot_give(
    keys: tuple[str, ...], reason: str, run: RunFolder, tmp_path: Path
) -> None:
    with pytest.raises(KeelError, match=reason):
        train(small(*_from(run, *keys)), tmp_path / "run")


def test_check_of_a_replay(run: RunFolder) -> None:
    found = check("tiny", [*FAST, "steps=4", *_from(run)], runs=False)
    assert not [one for one in found.findings if one.severity == "error"]
    (stage,) = small(*_from(run)).stages
    rewards, data = stage.rewards, PreferenceData(name="jsonl", path="x")
    trial = stage.on_examples(tasks=stage.tasks, data=data, rewards=rewards, prompts=2)
    assert trial.rollout.engine == "native"


def test_check_finds_steps_that_were_not_stored(run: RunFolder) -> None:
    found = check("tiny", [*FAST, *_from(run), "steps=5"], runs=False)
    assert "set steps = 4" in str([one.evidence for one in found.findings])
