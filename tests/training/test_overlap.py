"""Rewards computed while completions are still sampled give the same results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.engines.native import NativeEngine
from keel.runs.reader import load
from keel.training.run import train
from keel.types import Group, KeelError, Sampling
from tests.engines.scripted import ScriptedEngine, replace_native
from tests.engines.tiny import TOKENIZER, ragged_prompts, tiny
from tests.soak.cases import COMPOSED, DENSE
from tests.soak.killing import differences
from tests.training.small import small

HERE = "tests.training.test_overlap"
ON = "rollout.overlap_rewards=true"
WAIT = 60.0

STATE: dict[str, threading.Event] = {}


async def waits(completions: list[str]) -> list[float]:
    """Answers once the last group has been sampled."""
    STATE["began"].set()
    while not STATE["sampled"].is_set():
        await asyncio.sleep(0.002)
    return [1.0 / (1 + len(text)) for text in completions]


def recorded(completions: list[str], answer: list[str], log_extra: Any) -> list[float]:
    log_extra("length", [len(text) for text in completions])
    log_extra("right", [text == gold for text, gold in zip(completions, answer, strict=True)])
    return [1.0 / (1 + len(text)) for text in completions]


def alternates(completion_ids: list[list[int]]) -> list[float]:
    """Leaves most groups without variance."""
    return [float(len(ids) < 3) for ids in completion_ids]


CASES: dict[str, Sequence[str]] = {
    "composed": [COMPOSED, "evaluation.component=whole", "rollout.overlong_buffer=3"],
    "remax": [DENSE, "algorithm=remax"],
    "refills": [
        f"rewards.functions=[{{function='{HERE}:alternates'}}]",
        "rollout.dynamic_sampling=true",
        "rollout.max_refills=2",
    ],
    "recorded": [
        f"rewards.functions=[{{function='{HERE}:recorded'}}]",
        "rollout.prompts_per_step=9",
        "rollout.max_num_seqs=7",
        "evaluation.samples=2",
    ],
    "turns": [
        "tasks=[{name='tests.soak.cases:echo'}]",
        "rewards.functions=[{function='tests.soak.cases:brevity'}]",
        "rollout.max_turns=3",
        "rollout.max_tokens=14",
    ],
}


@pytest.mark.quick("composed", "refills")
@pytest.mark.parametrize("case", CASES)
def test_run_with_overlap_writes_the_same_bytes(case: str, tmp_path: Path) -> None:
    keys = [*CASES[case], "steps=3"]
    off = train(small(*keys), tmp_path / "off")
    on = train(small(*keys, ON), tmp_path / "on")
    found = differences(off.path, on.path)
    # Checkpoints hold the recipe (record.json), and its hash (manifest.json).
    of_recipe = ("recipe.toml", "record.json", "manifest.json")
    assert all(line.endswith(of_recipe) for line in found), found
    if case == "refills":
        assert max(row["rollout/refills"] for row in load(off.path).metrics()) > 0


def test_rewards_are_asked_during_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of four enter four at a time, so one is done before the next begins."""

    class Watched(NativeEngine):
        """Goes on after its first group once a reward is asked."""

        def sample(self, *given: Any, on_group: Any) -> list[Group]:
            def passed(place: int, group: Group) -> None:
                on_group(place, group)
                assert STATE["began"].wait(WAIT), "no reward was asked while groups were sampled"

            groups = super().sample(*given, on_group=passed)
            STATE["sampled"].set()
            return groups

    STATE.update(began=threading.Event(), sampled=threading.Event())
    replace_native(monkeypatch, Watched)
    reward = f"rewards.functions=[{{function='{HERE}:waits'}}]"
    keys = (
        reward,
        "steps=1",
        "evaluation.prompts=0",
        "rollout.max_num_seqs=4",
        "rewards.timeout=120",
    )
    folder = train(small(*keys, ON), tmp_path / "on")
    assert STATE["sampled"].is_set()
    assert len(load(folder.path).rollouts(1)) == 16


def plain(**parts: Any) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, index: "1", parts["tokenizer"])


def test_overlap_needs_an_engine_that_streams(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=r"rollout\.overlap_rewards = true scores groups while"):
        train(small(DENSE, f"rollout.engine={HERE}:plain", ON), tmp_path / "run")


# ---------------------------------------------------------------- what goes wrong


def end(folder: Path, *keys: str) -> str:
    with pytest.raises(KeelError) as caught:
        train(small(*keys, "steps=2", "evaluation.prompts=0"), folder)
    assert [t.name for t in threading.enumerate() if t.name.startswith("keel-overlap")] == []
    return str(caught.value)


def test_engine_failure_cancels_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Falls(NativeEngine):
        def sample(self, *given: Any, **keys: Any) -> list[Group]:
            super().sample(*given, **keys)
            raise KeelError("the engine fell over")

    replace_native(monkeypatch, Falls)
    hangs = "rewards.functions=[{function='tests.training.rewards:hangs'}]"
    assert end(tmp_path / "on", hangs, "rewards.timeout=500", ON) == "the engine fell over"


def test_engine_timeout_does_not_apply_to_rewards(tmp_path: Path) -> None:
    """Rewards that take longer than the engine may be silent."""
    slow = f"rewards.functions=[{{function='{HERE}:dawdles'}}]"
    keys = (slow, "steps=1", "evaluation.prompts=0", "rollout.timeout=1", ON)
    assert len(load(train(small(*keys), tmp_path / "on").path).metrics()) == 1


async def dawdles(completions: list[str]) -> list[float]:
    await asyncio.sleep(1.5)
    return [1.0 / (1 + len(text)) for text in completions]


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize(("rows", "temperature"), [(3, 1.0), (8, 0.0), (64, 1.0)])
def test_streamed_groups_are_those_of_sample(rows: int, temperature: float) -> None:
    engine = NativeEngine(tiny("llama", seed=5), TOKENIZER, max_num_seqs=rows)
    stops = tuple(range(2, 9))  # so that lengths differ
    prompts, sampling = ragged_prompts(12), Sampling(20, temperature=temperature, stop_ids=stops)
    passed: dict[int, Group] = {}
    order: list[int] = []

    def take(place: int, group: Group) -> None:
        order.append(place)
        passed[place] = group

    plain = engine.sample(prompts, 3, sampling, seed=1)
    streamed = engine.sample(prompts, 3, sampling, 1, on_group=take)
    assert sorted(order) == list(range(12))
    for at, (one, other) in enumerate(zip(plain, streamed, strict=True)):
        assert passed[at] is other
        assert one.prompt is other.prompt is prompts[at]
        for a, b in zip(one.completions, other.completions, strict=True):
            assert (a.text, a.finish) == (b.text, b.finish)
            for name in ("tokens", "log_probs", "written"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert rows < 64 or order != sorted(order)


def test_non_finite_logits_name_the_first_prompt() -> None:
    """Such a group is never passed on; the message is that of `sample`."""
    model = tiny("llama", seed=5)
    with torch.no_grad():
        model.get_input_embeddings().weight[30:] = float("nan")
    engine = NativeEngine(model, TOKENIZER, max_num_seqs=4)
    prompts = ragged_prompts(12)
    passed: list[int] = []
    with pytest.raises(KeelError) as plain:
        engine.sample(prompts, 2, Sampling(6), 0)
    with pytest.raises(KeelError) as streamed:
        engine.sample(prompts, 2, Sampling(6), 0, on_group=lambda place, _: passed.append(place))
    assert str(streamed.value) == str(plain.value)
    first = next(at for at, p in enumerate(prompts) if f"'{p.id}'" in str(plain.value))
    assert first not in passed
