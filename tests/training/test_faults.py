"""A step whose loss or gradient is not finite is not taken; its batch is kept, its cause named."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from keel.engines.native import NativeEngine
from keel.platform.time_limit import time_limit
from keel.runs.checkpoint import damage
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.run import train
from keel.types import KeelError
from tests.soak.killing import differences
from tests.training.judged import data, ones, recipe, sampled
from tests.training.small import small
from tests.training.test_resume import damage as tear

CALLS = {"surrogate": 0}
COUNTED = "algorithm.surrogate={kind='custom', function='tests.training.test_faults:counted'}"
SPOILED = "algorithm.surrogate={kind='custom', function='tests.training.test_faults:spoiled'}"
DENSE = "rewards.functions=[{function='place_match'}]"
EVERY = ("checkpoints.every=1", "optimizer.learning_rate=1e-3", DENSE)


def spoiled(log_ratio_N: Tensor, advantage_N: Tensor, lengths_S: Tensor) -> Tensor:
    """NaN in the third sequence of the batches that `SPOIL` selects, or in one learned alone."""
    out = log_ratio_N.exp() * advantage_N
    if len(lengths_S) == 16 and SPOIL["when"](advantage_N):
        start = int(lengths_S[:2].sum())
        out = out.clone()
        out[start] = math.nan
    elif len(lengths_S) == 1 and SPOIL["alone"](lengths_S):
        out = out * math.nan
    return out


SPOIL: dict[str, Any] = {"when": lambda _: False, "alone": lambda _: False, "call": None}


def counted(log_ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """NaN in the calls that `SPOIL` selects by their number."""
    CALLS["surrogate"] += 1
    out = log_ratio_N.exp() * advantage_N
    return out * math.nan if SPOIL["call"](CALLS["surrogate"]) else out


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    return load(folder.path).metrics()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run without errors."""
    return train(small(*EVERY, SPOILED), tmp_path_factory.mktemp("faults") / "sound")


@pytest.fixture(scope="module")
def sizes(sound: RunFolder) -> list[int]:
    """The tokens of each step's batch."""
    found = [sum(len(r["tokens"]) for r in load(sound.path).rollouts(n)) for n in (1, 2, 3, 4)]
    assert len(set(found)) == 4, "steps must differ for the test to tell them apart"
    return found


def spoil(monkeypatch: pytest.MonkeyPatch, *tokens: int) -> None:
    """Spoil the steps whose batches have so many tokens."""
    monkeypatch.setitem(SPOIL, "when", lambda advantage_N: advantage_N.numel() in tokens)


def test_non_finite_step_stops_the_run_which_resumes_exactly(
    sound: RunFolder, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, sizes[2])
    monkeypatch.setitem(SPOIL, "alone", lambda lengths_S: True)
    with pytest.raises(KeelError) as caught:
        train(small(*EVERY, SPOILED), tmp_path / "run")
    message = str(caught.value)
    assert message.count("\n") == 0
    for part in ("rl step 3", "loss", "sequence 0 (prompt 'sort_digits/train/", "on_nonfinite"):
        assert part in message, message
    folder = RunFolder.open(tmp_path / "run")
    kept = folder.faults / "rl-step-000003-0"
    assert damage(kept) is None
    batch = load_file(kept / "batch.safetensors")
    assert batch["advantage_N"].shape == (sizes[2],)
    lengths = json.loads((kept / "batch.json").read_text())
    assert len(lengths["lengths"]["items"]) == 16
    assert json.loads((kept / "cause.json").read_text())["step"] == 3
    assert [row["step"] for row in rows(folder)] == [1, 2]
    assert load(folder.path).checkpoints()[-1].place.step == 2
    spoil(monkeypatch)
    train(None, folder.path, resume=True)
    found = differences(sound.path, folder.path)
    assert all("only in run: faults" in line for line in found), found


def test_skipped_steps_are_counted_and_resume_exactly(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, sizes[1])
    keys = (*EVERY, SPOILED, 'on_nonfinite="skip"')
    folder = train(small(*keys), tmp_path / "run")
    printed = rows(folder)
    assert [row["steps_skipped"] for row in printed] == [0, 1, 1, 1]
    assert "loss" not in printed[1]
    assert "loss" in printed[2]
    before, after = (load_file(folder.checkpoint(0, n) / "trainable.safetensors") for n in (1, 2))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load(folder.path).rollouts(2)
    kinds = [event["event"] for event in load(folder.path).events()]
    assert kinds.count("not_finite") == 1
    copy = tmp_path / "copy"
    shutil.copytree(folder.path, copy)
    again = RunFolder.open(copy)
    for step in (2, 3, 4):
        tear(again, 0, step)
    train(None, copy, resume=True)
    assert differences(folder.path, again.path) == []
    names = [sorted(p.name for p in f.faults.iterdir()) for f in (folder, again)]
    assert names[0] == names[1] == ["rl-step-000002-0"]


def test_only_the_non_finite_minibatch_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = (*EVERY, COUNTED, 'on_nonfinite="skip"', "minibatches=2", "steps=1")
    monkeypatch.setitem(SPOIL, "call", lambda number: number == 1)
    CALLS["surrogate"] = 0
    folder = train(small(*keys), tmp_path / "run")
    (row,) = rows(folder)
    assert row["steps_skipped"] == 1
    assert math.isfinite(row["loss"])
    assert [p.name for p in folder.faults.iterdir()] == ["rl-step-000001-0"]


def stage_of(folder: Path, **keys: Any) -> Mapping[str, Any]:
    source = data(folder, ones(24, 1), ones(8, 2))
    return {
        "data": source,
        "steps": 4,
        "batch_size": 7,
        "optimizer": {"learning_rate": 1e-3},
        "checkpoints": {"every": 1, "keep": 9},
        **keys,
    }


@pytest.mark.parametrize("kind", ["reward_model", "dpo"])
def test_skipped_step_of_reward_model_and_dpo_stages(
    kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A margin that is infinite in the file's last row makes the loss of its step so."""
    from keel.objective import preference

    function = "bradley_terry" if kind == "reward_model" else "dpo"
    real = getattr(preference, function)
    calls = {"n": 0}

    def bad(*given: Any, **keys: Any) -> Tensor:
        out = real(*given, **keys)
        calls["n"] += 1
        whole = len(out) == 7 and calls["n"] == 2
        alone = len(out) == 1 and calls["n"] == 5  # the third row of those looked at alone
        return out * math.nan if whole or alone else out

    monkeypatch.setattr(preference, function, bad)
    stage = stage_of(tmp_path, stage=kind, on_nonfinite="skip", evaluation={"rows": 0})
    folder = train(recipe(stage), tmp_path / "run")
    printed = rows(folder)
    assert [row["steps_skipped"] for row in printed] == [0, 1, 1, 1]
    kept = folder.faults / f"{kind}-step-000002-0"
    assert damage(kept) is None
    assert len(json.loads((kept / "rows.json").read_text())["rows"]) == 7
    cause = json.loads((kept / "cause.json").read_text())
    assert cause["sequence"] == "row 2 of the step"
    tokens = [0, *(row["num_tokens"] for row in printed)]
    assert all(a < b for a, b in itertools.pairwise(tokens)), "they entered the model all the same"
    weights = [
        {
            (file.stem, name): tensor
            for file in folder.checkpoint(0, n).glob("*.safetensors")
            if "optimizer" not in file.stem
            for name, tensor in load_file(file).items()
        }
        for n in (1, 2, 3)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])


HOPELESS = (
    COUNTED,
    'on_nonfinite="skip"',
    "epochs=10",
    "steps=3",
    "evaluation.prompts=0",
    *EVERY,
)


def test_too_many_skipped_steps_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPOIL, "call", lambda number: True)
    names = [f"rl-step-000001-{n}" for n in range(8)]
    for resume in (False, True):
        with pytest.raises(
            KeelError, match=r"rl step 2: .* all 20 optimizer steps of rl"
        ) as caught:
            train(None if resume else small(*HOPELESS), tmp_path / "run", resume=resume)
        assert "newest checkpoint: step 1" in str(caught.value)
        folder = RunFolder.open(tmp_path / "run")
        assert sorted(p.name for p in folder.faults.iterdir()) == names
        assert [row["steps_skipped"] for row in rows(folder)] == [10]
    events = load(folder.path).events()
    notes = [event["text"] for event in events if "first 8 are diagnosed" in event.get("text", "")]
    assert len(notes) == 2 + 9 + 9  # the second step's were noted again
    assert notes[0].startswith("rl step 1: ")
    assert notes[-1].startswith("rl step 2: ")


def test_run_goes_on_if_a_step_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPOIL, "call", lambda number: number > 1)
    CALLS["surrogate"] = 0
    folder = train(small(*HOPELESS), tmp_path / "run")
    assert [row["steps_skipped"] for row in rows(folder)] == [9, 19, 29]
    assert len(list(folder.faults.iterdir())) == 8


@pytest.mark.parametrize("kind", ["rl", "dpo"])
def test_non_finite_weights_stop_the_run_despite_skip(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keel.training import rl
    from keel.training import supervised as fit

    module, name = (rl, "update_models") if kind == "rl" else (fit, "update")
    real, calls = getattr(module, name), {"n": 0}

    def broken(work: Any, *given: Any) -> Any:
        calls["n"] += 1
        if calls["n"] == 2:
            optimizer = work.learner.optimizer if kind == "rl" else work.optimizer
            with torch.no_grad():
                optimizer.parameters[0][1].fill_(math.nan)
        return real(work, *given)

    monkeypatch.setattr(module, name, broken)
    monkeypatch.setattr("keel.training.loop.MAX_DIAGNOSED", 0)
    keys = {"on_nonfinite": "skip", "evaluation": {"rows": 0}}
    chosen = (
        small(*EVERY, 'on_nonfinite="skip"', "evaluation.prompts=0")
        if kind == "rl"
        else recipe(stage_of(tmp_path, stage=kind, **keys))
    )
    with pytest.raises(KeelError, match=r"step 2: .* from the weights .* earlier checkpoint"):
        train(chosen, tmp_path / "run")
    assert len(list((tmp_path / "run" / "faults").iterdir())) == 1


NARROW = "algorithm.surrogate={kind='custom', function='tests.training.test_faults:narrow'}"


def narrow(log_ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """A surrogate that has no memory for more than 40 tokens."""
    if len(log_ratio_N) > 40:
        torch.empty(1 << 60, dtype=torch.uint8)
    return log_ratio_N.exp() * advantage_N


@pytest.mark.slow
def test_resume_keeps_a_halved_token_budget(tmp_path: Path) -> None:
    folder = train(small(*EVERY, NARROW), tmp_path / "run")

    def lacking(of: RunFolder) -> int:
        texts = [event.get("text", "") for event in load(of.path).events()]
        return sum(text.startswith("out of memory") for text in texts)

    def budget(of: RunFolder) -> int:
        state = json.loads((of.checkpoint(0, 4) / "state.json").read_text())
        return int(state["token_budget"])

    assert lacking(folder) > 0
    copy = tmp_path / "copy"
    shutil.copytree(folder.path, copy)
    again = RunFolder.open(copy)
    for step in (2, 3, 4):
        tear(again, 0, step)
    before = lacking(again)
    train(None, copy, resume=True)
    assert differences(folder.path, again.path) == []
    assert budget(again) == budget(folder)
    assert lacking(again) == before, "the budget was looked for again"


@pytest.mark.slow
def test_halved_budget_equals_one_that_was_set(tmp_path: Path) -> None:
    """No divergence: scores from before memory runs out are of larger passes, rounded otherwise."""
    keys = (*EVERY, "algorithm.preset=dr_grpo", "algorithm.divergence.beta=0", "steps=2", NARROW)
    met = train(small(*keys), tmp_path / "met")
    found = json.loads((met.checkpoint(0, 2) / "state.json").read_text())["token_budget"]
    asked = train(small(*keys, f"token_budget={found}"), tmp_path / "asked")
    assert met.metrics.read_bytes() == asked.metrics.read_bytes()
    name = "trainable.safetensors"
    left, right = (folder.checkpoint(0, 2) / name for folder in (met, asked))
    assert left.read_bytes() == right.read_bytes()


def sleepy(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that answers in the first step only."""
    CALLS["sleepy"] = CALLS.get("sleepy", 0) + 1
    if CALLS["sleepy"] > 1:
        time.sleep(600)
    return [float(len(text)) for text in completions]


def test_hanging_reward_saves_its_stack_and_the_run_resumes(tmp_path: Path) -> None:
    function = "rewards.functions=[{function='tests.training.test_faults:sleepy'}]"
    keys = ("evaluation.prompts=0", "rewards.timeout=0.5", "checkpoints.every=1", function)
    CALLS["sleepy"] = 0
    with pytest.raises(KeelError) as caught:
        train(small(*keys), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    stack = folder.faults / "hang-1.txt"
    assert "reward 'sleepy' at step 2" in str(caught.value)
    assert "in sleepy (test_faults.py:" in str(caught.value)
    assert str(stack) in str(caught.value)
    assert "time.sleep(600)" in stack.read_text()
    events = load(folder.path).events()
    assert [event["stack"] for event in events if event["event"] == "hung"] == ["hang-1.txt"]
    CALLS["sleepy"] = -100
    assert [row["step"] for row in rows(train(None, folder.path, resume=True))] == [1, 2, 3, 4]


def no_memory(*_: object) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def stuck(*_: object) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (stuck, r"the engine gives no answer within 0.5 s .*in stuck \("),
        (no_memory, r"lower rollout\.max_num_seqs"),
    ],
)
def test_engine_failure_is_reported(
    sample: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeEngine, "sample", sample)
    with pytest.raises(KeelError, match=message):
        train(small("evaluation.prompts=0", "rollout.timeout=0.5"), tmp_path / "run")


@pytest.mark.parametrize("lack", ["memory", "time"])
def test_engine_failure_in_sampled_data_names_its_keys(
    lack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativeEngine, "sample", no_memory if lack == "memory" else stuck)
    monkeypatch.setattr(
        "keel.training.rollout.time_limit",
        lambda name, seconds, hint, **keys: time_limit(name, 0.5, hint, **keys),
    )
    with pytest.raises(KeelError) as caught:
        train(recipe({"stage": "reward_model", "sampled": sampled(8, 4)}), tmp_path / "run")
    assert "lower reward_model.sampled.max_tokens" in str(caught.value)
    assert "rollout." not in str(caught.value)
