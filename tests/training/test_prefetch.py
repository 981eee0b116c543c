"""Rollouts sampled one step ahead: with which weights, resume, and errors in the thread."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.engines import native
from keel.engines.native import NativeEngine
from keel.platform.signals import Interrupted
from keel.platform.time_limit import raise_if_cancelled
from keel.runs.reader import load
from keel.training import rl
from keel.training.rollout import RolloutPrefetcher, Rollouts, Sample, Ticket, as_kept
from keel.training.run import train
from keel.training.state import PENDING, read_pending, save_pending
from keel.types import Completion, Group, KeelError, Message, Prompt, RewardResult, Sampling
from tests.engines.scripted import replace_native
from tests.rewards.judge_server import JudgeServer
from tests.soak.cases import AHEAD, DENSE, FAST_RATE
from tests.training.small import Stop, small
from tests.training.test_resume import damage

WAIT = 60.0
KEYS = (*AHEAD, DENSE, FAST_RATE, "evaluation.prompts=4")


def threads() -> list[str]:
    return [
        t.name for t in threading.enumerate() if t.name.startswith(("keel-ahead", "keel-overlap"))
    ]


# ---------------------------------------------------------------- which weights


def size(model: torch.nn.Module) -> float:
    return sum(float(p.detach().double().abs().sum()) for p in model.parameters())


class Weighed(NativeEngine):
    """Records with which weights and in which thread each call samples."""

    calls: list[tuple[float, str, int]]

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, **keys: Any
    ) -> list[Group]:
        total = size(self.model)
        thread = threading.current_thread().name
        self.calls.append((total, thread, torch.get_num_threads()))
        return super().sample(prompts, n, sampling, seed, **keys)


def test_rollouts_ahead_use_the_weights_of_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Weighed.calls = []
    replace_native(monkeypatch, Weighed)
    left: list[float] = []
    real = rl.sync

    def sync(loop: rl.RLLoop, number: int) -> None:
        model = loop.learner.policy.model
        assert all(
            a.data_ptr() != b.data_ptr()
            for a, b in zip(model.parameters(), loop.sampler.engine.model.parameters(), strict=True)
        )
        left.append(size(model))
        real(loop, number)

    monkeypatch.setattr(rl, "sync", sync)
    train(small(*KEYS, "evaluation.prompts=0", "steps=5", "threads=2"), tmp_path / "run")
    first, *others = Weighed.calls
    assert len(others) == 4  # the last step samples nothing ahead
    assert len({first[0], *left}) == 6
    assert [total for total, _, _ in others] == [first[0], *left[:3]]
    assert first[1] == "MainThread"
    assert {thread for _, thread, _ in others} == {"keel-ahead"}
    assert {count for _, _, count in Weighed.calls} == {2}
    assert threads() == []


def test_sampling_overlaps_with_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each update but the last waits until the next sampling has begun, and vice versa."""
    sampling, learning = threading.Semaphore(0), threading.Semaphore(0)
    real, sample = rl.update_models, NativeEngine.sample

    def update(*given: Any) -> Any:
        loop, number = given[0], given[-1]
        if number < loop.schedule.steps:
            learning.release()
            assert sampling.acquire(timeout=WAIT)
        return real(*given)

    def sampled(self: Any, *given: Any, **keys: Any) -> Any:
        if threading.current_thread().name == "keel-ahead":
            sampling.release()
            assert learning.acquire(timeout=WAIT)
        return sample(self, *given, **keys)

    monkeypatch.setattr(rl, "update_models", update)
    monkeypatch.setattr(NativeEngine, "sample", sampled)
    assert len(load(train(small(*KEYS, "steps=3"), tmp_path / "run").path).metrics()) == 3


def test_log_linear_old_log_probs_need_no_pass(tmp_path: Path) -> None:
    keys = (*KEYS, "rollout.old_log_probs=log_linear", "algorithm.divergence=none", "steps=3")
    folder = load(train(small(*keys), tmp_path / "run").path)
    first, *later = folder.metrics()
    assert first["rollout/staleness/max"] == 0
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-6)
    for row in later:
        assert row["rollout/staleness/max"] == 1
        assert abs(row["ratio/mean"] - 1) > 1e-4
        # The engine's own, one update behind.
        assert row["kl/old"] == pytest.approx(row["sampling/kl/k3"], rel=1e-5)
        assert row["sampling/importance_sampling_ratio/mean"] == 1
    assert all(row.get("old_log_probs") is None for row in folder.rollouts(2))


# ---------------------------------------------------------------- killed and resumed


def test_resume_asks_a_judge_nothing_twice(tmp_path: Path) -> None:
    """Not even without a memory of its own on the disk."""
    with JudgeServer() as server:
        judge = f"{{function='judge', options={{model='m', url='{server.url}'}}}}"
        keys = (*AHEAD, FAST_RATE, f"rewards.functions=[{judge}]", "evaluation.prompts=0")
        recipe = small(*keys, "checkpoints.every=1", "steps=3")
        with pytest.raises(Interrupted):
            train(recipe, tmp_path / "run", callbacks=[Stop(1)])
        for path in (tmp_path / "run").glob("rewards/*"):
            path.unlink()
        asked = len(server.log)
        train(None, tmp_path / "run", resume=True)
        bodies = [json.dumps(one.body, sort_keys=True) for one in server.log]
    assert asked > 16  # the second step's too
    assert bodies[asked:]
    assert not set(bodies[:asked]) & set(bodies[asked:])


def test_resume_without_async_level_uses_saved_rollouts(tmp_path: Path) -> None:
    folder = train(small(*KEYS, "checkpoints.every=1", "steps=4"), tmp_path / "run")
    rows = load(folder.path).rollouts(3)
    for step in (3, 4):
        damage(folder, 0, step)
    text = folder.recipe.read_text()
    assert "async_level = 1" in text
    folder.recipe.write_text(text.replace("async_level = 1", "async_level = 0"))
    train(None, folder.path, resume=True)
    again = load(folder.path).rollouts(3)
    assert [row["completion"] for row in again] == [row["completion"] for row in rows]
    assert not (folder.checkpoint(0, 3) / PENDING).exists()


def test_saved_rollouts_are_read_as_they_were(tmp_path: Path) -> None:
    """With keys that a user chose, tools, the order of keys, and what was said in each turn."""
    keys = {"$type": "tuple", "items": [1]}
    call = {"function": {"name": "f", "arguments": {"z": 1, "a": None}}}
    messages: tuple[Message, ...] = (
        {"role": "user", "content": "x", **keys},  # type: ignore[typeddict-unknown-key]
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
    )
    words = (("assistant", "go"), ("environment", "no, 12"), ("assistant", ""))
    completion = Completion(
        tokens=np.array([5, 6]),
        log_probs=np.zeros(2, dtype=np.float32),
        written=np.array([True, False]),
        finish="eos",
        text="go",
        turns=tuple(Message(role=role, content=text) for role, text in words),
        states=((2, "room 4"),),
    )
    tools = ({"name": "f", "description": "d"},)
    columns = {"answers": ["a", "b"], "hint": "left out"}
    prompt = Prompt("p", messages, columns, "t", (5,), tools=tools)
    made = Rollouts(
        (Group(prompt, (completion,)),),
        ((RewardResult(0.0),),),
        roles=("side",),
        extras={"seen": [keys]},
    )
    kept = {step: as_kept(made, ["answers"]) for step in (1, 2)}
    save_pending(tmp_path, kept)
    again = read_pending(tmp_path)
    assert list(again) == [1, 2]
    for rollouts in (kept[1], again[1]):
        (group,) = rollouts.groups
        assert json.dumps(group.prompt.content) == json.dumps(messages)
        assert json.dumps(group.prompt.tools) == json.dumps(tools)
        assert group.completions[0].turns == completion.turns
        assert group.completions[0].states == completion.states
        assert group.completions[0].transcript == "go⟨no, 12⟩"
        assert rollouts.extras == {"seen": [keys]}
        assert rollouts.roles == ("side",)
        assert group.prompt.columns == {"answers": ["a", "b"]}
    path = tmp_path / PENDING
    path.write_text(path.read_text().replace('"columns"', '"surplus"'))
    with pytest.raises(KeelError, match=r"another version of Keel .*surplus.*resume with that"):
        read_pending(tmp_path)


# ---------------------------------------------------------------- what goes wrong


def falls_later(completions: list[str], trainer_state: Any) -> list[float]:
    if trainer_state.global_step == 3:
        raise RuntimeError("the grader fell over")
    return [1.0 / (1 + len(text)) for text in completions]


def test_failure_ahead_stops_the_run_before_the_step_is_saved(tmp_path: Path) -> None:
    keys = (*AHEAD, "rewards.functions=[{function='tests.training.test_prefetch:falls_later'}]")
    recipe = small(*keys, "checkpoints.every=1", "evaluation.prompts=0")
    with pytest.raises(KeelError, match=r"'falls_later' at step 3 .*the grader fell over"):
        train(recipe, tmp_path / "run")
    assert threads() == []
    run = load(tmp_path / "run")
    assert [row["step"] for row in run.metrics()] == [1]
    assert run.checkpoints()[-1].place.step == 1


@pytest.mark.parametrize(("awaited", "overlap"), [(False, "true"), (True, "false")])
def test_failure_of_the_update_cancels_rewards_ahead(
    awaited: bool, overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take ten minutes."""
    began, over = threading.Event(), threading.Event()

    async def awaits(completions: list[str], trainer_state: Any) -> list[float]:
        if trainer_state.global_step > 1:
            began.set()
            await asyncio.sleep(600)
        return [1.0 / (1 + len(text)) for text in completions]

    def waits(completions: list[str], trainer_state: Any) -> list[float]:
        if trainer_state.global_step > 1:
            began.set()
            over.wait(600)
        return [1.0 / (1 + len(text)) for text in completions]

    def update(*given: Any) -> Any:
        assert began.wait(WAIT)
        raise KeelError("the update fell over")

    left: list[bool] = []
    real = RolloutPrefetcher.close

    def close(prefetcher: RolloutPrefetcher) -> None:
        real(prefetcher)
        left.extend(name == "keel-ahead" for name in threads())

    monkeypatch.setattr(RolloutPrefetcher, "close", close)
    monkeypatch.setattr(rl, "update_models", update)
    monkeypatch.setattr("tests.training.test_prefetch.falls_later", awaits if awaited else waits)
    keys = (*AHEAD, "rewards.functions=[{function='tests.training.test_prefetch:falls_later'}]")
    keys += (f"rollout.overlap_rewards={overlap}", "rewards.timeout=500", "evaluation.prompts=0")
    with pytest.raises(KeelError, match="the update fell over"):
        train(small(*keys), tmp_path / "run")
    assert left == []
    assert threads() == []
    over.set()


def test_failure_of_the_update_cancels_generation_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that gets no token at all, a minute long."""
    began = threading.Event()
    steps: list[int] = []
    real = native._Run.step

    def step(run: Any) -> Any:
        if threading.current_thread().name != "keel-ahead":
            return real(run)
        began.set()
        steps.append(len(steps))
        if len(steps) > 100 * WAIT:
            raise AssertionError
        time.sleep(0.01)
        return np.empty(0, dtype=np.int64)

    def update(*given: Any) -> Any:
        assert began.wait(WAIT)
        raise KeelError("the update fell over")

    monkeypatch.setattr(rl, "update_models", update)
    monkeypatch.setattr(native._Run, "step", step)
    with pytest.raises(KeelError, match="the update fell over"):
        train(small(*KEYS, "steps=3"), tmp_path / "run")
    assert threads() == []
    assert len(steps) <= 100 * WAIT


def test_prefetch_thread_that_never_checks_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    began, over = threading.Event(), threading.Event()

    def draw() -> Rollouts:
        began.set()
        over.wait(WAIT)
        raise AssertionError

    def learn() -> None:
        with RolloutPrefetcher(lambda step, turn: draw, 1).prefetch(1, 9):
            assert began.wait(WAIT)
            raise KeelError("the update fell over")

    monkeypatch.setattr("keel.training.rollout.PATIENCE", 0.1)
    with pytest.raises(KeelError, match="the update fell over"):
        learn()
    assert threads() == ["keel-ahead"]
    over.set()
    for thread in threading.enumerate():
        if thread.name == "keel-ahead":
            thread.join(WAIT)
    assert threads() == []


# ---------------------------------------------------------------- several steps ahead


def rollouts_of(step: int) -> Rollouts:
    return Rollouts((), (), metrics={"step": float(step)})


def test_steps_ahead_begin_in_order_with_the_weights_of_their_time() -> None:
    """At level 2 the steps 1 to 3 begin with the first weights, each later one an update later."""
    begun: list[tuple[int, int]] = []
    version = 0

    def begin(step: int, turn: Ticket) -> Sample:
        begun.append((step, version))
        return lambda: rollouts_of(step)

    sampling = RolloutPrefetcher(begin, 2, at_once=True)
    for step in range(1, 7):
        assert sampling(step, 6).metrics == {"step": step}
        with sampling.prefetch(step, 6):
            version += 1
    assert begun == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 2), (6, 3)]
    assert sampling.pending == {}
    assert threads() == []


def test_rewards_of_steps_at_once_are_called_in_order() -> None:
    scored: list[int] = []
    slow = threading.Event()

    def begin(step: int, turn: Ticket) -> Sample:
        def sample() -> Rollouts:
            if step == 1:
                assert slow.wait(WAIT)
            turn.wait()
            scored.append(step)
            return rollouts_of(step)

        if step == 3:
            slow.set()
        return sample

    sampling = RolloutPrefetcher(begin, 3, at_once=True)
    sampling(1, 9)
    assert list(sampling.pending) == [2, 3]
    assert scored == [1, 2, 3]


def test_what_a_checkpoint_held_is_not_sampled_again() -> None:
    begun: list[int] = []

    def begin(step: int, turn: Ticket) -> Sample:
        begun.append(step)
        return lambda: rollouts_of(step)

    held = {step: rollouts_of(-step) for step in (4, 5)}
    sampling = RolloutPrefetcher(begin, 2, at_once=True, pending=held)
    assert sampling(4, 9).metrics == {"step": -4.0}
    with sampling.prefetch(4, 9):
        pass
    assert begun == [6]
    assert list(sampling.pending) == [5, 6]


def test_an_error_of_one_step_cancels_the_others() -> None:
    def begin(step: int, turn: Ticket) -> Sample:
        def sample() -> Rollouts:
            if step == 1:
                raise KeelError("step 1 fell over")
            while True:
                time.sleep(0.01)
                raise_if_cancelled()

        return sample

    sampling = RolloutPrefetcher(begin, 3, at_once=True)
    with pytest.raises(KeelError, match="step 1 fell over"):
        sampling(1, 9)
    assert threads() == []
