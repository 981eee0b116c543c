"""A vLLM server that fails: restarts, their limits, and what the user sees of them.

The server is a program with vLLM's routes (`fake_vllm`); one of vLLM itself is killed and stopped
in `test_vllm.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from keel.config.load import load_recipe
from keel.config.sources import VllmServer
from keel.engines.vllm.engine import MAX_RESTARTS, VllmEngine
from keel.platform.time_limit import time_limit
from keel.training.run import train
from keel.types import KeelError, Sampling
from tests.engines import fake_vllm
from tests.engines.fake_vllm import HANGS, USUAL, Replies
from tests.engines.tiny import TOKENIZER, ragged_prompts, tiny

COMPLETIONS, BROKEN = "/v1/completions", (500, "broken", 0.0)
AGAIN = "the vLLM server failed and is started again: "


class Case:
    """An engine, its log and its notes; the program is its server, which answers as `starts` say"""

    def __init__(self, program: Path, timeout: float, *starts: Replies):
        os.environ["VLLM_FAKE"] = json.dumps(starts)
        self.log, self.notes = program.with_name("log"), list[str]()
        self.engine = VllmEngine(
            tiny("llama", dtype=torch.float32),
            TOKENIZER,
            server=VllmServer(python=str(program), start_timeout=60.0),
            timeout=timeout,
            log=self.log,
            note=self.notes.append,
        )

    def sample(self) -> int:
        groups = self.engine.sample(ragged_prompts(2), 2, Sampling(max_tokens=4), 0)
        return sum(len(group.completions) for group in groups)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", "/tmp")  # of the socket, whose path must not be long
    monkeypatch.setenv("VLLM_FAKE", "")  # put back at the end
    return fake_vllm.write(tmp_path)


def test_a_server_that_hangs_is_started_again(program: Path) -> None:
    """Although what watches the engine has the same time limit as a request."""
    case = Case(program, 2.0, {COMPLETIONS: HANGS}, {})
    with time_limit("the engine", 2.0, "raise rollout.timeout"):
        assert case.sample() == 4
    case.engine.close()
    assert (case.engine.restarts, fake_vllm.starts(program)) == (1, 2)
    (note,) = case.notes
    assert note.startswith(f"{AGAIN}/v1/completions of unix:")
    assert note.endswith(f"gives no answer within 2 s (rollout.timeout): see {case.log}")
    assert f"keel: {AGAIN}/v1/completions" in case.log.read_text()


def test_engine_is_not_hung_during_slow_requests(program: Path) -> None:
    case = Case(program, 60.0, {COMPLETIONS: (*USUAL[COMPLETIONS][:2], 2.5)})
    with time_limit("the engine", 1.5, "raise rollout.timeout"):
        assert case.sample() == 4
    case.engine.close()
    assert case.notes == []


def test_a_server_that_always_fails_ends_the_call(program: Path) -> None:
    case = Case(program, 60.0, {COMPLETIONS: BROKEN})
    with pytest.raises(KeelError, match=rf"restarted {MAX_RESTARTS} times\): .*500.*: see .*log"):
        case.sample()
    assert len(case.notes) == MAX_RESTARTS
    assert fake_vllm.starts(program) == MAX_RESTARTS + 1


def test_weights_that_are_refused_twice_end_the_sync(program: Path) -> None:
    """By a server and by the one after it; a failure that goes away is a restart."""
    case = Case(program, 60.0, {"/update_weights": BROKEN})
    weights = dict(case.engine.model.named_parameters())
    case.sample()
    with pytest.raises(KeelError, match=r"restarted once\): /update_weights .*500.*: see .*log"):
        case.engine.sync(weights)
    assert (len(case.notes), fake_vllm.starts(program)) == (1, 2)

    case = Case(program, 60.0, {})
    case.sample()
    assert case.engine.process is not None
    case.engine.process.stop()
    case.engine.sync(weights)
    case.engine.close()
    assert case.engine.restarts == 1


@pytest.mark.parametrize(
    "cluster",
    [(), pytest.param(("cluster.ray=local",), marks=pytest.mark.slow)],
    ids=["here", "ray"],
)
def test_a_restart_is_a_note_of_the_run(
    cluster: tuple[str, ...], program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_FAKE", json.dumps([{COMPLETIONS: BROKEN}, {}]))
    keys = ["steps=1", "evaluation.prompts=0", "algorithm.corrections.kind=truncate"]
    keys += ["rollout.engine=vllm", f"rollout.vllm.python={program}", *cluster]
    keys += ["rollout.vllm.start_timeout=60.0"]
    run = train(load_recipe("tiny", keys), tmp_path / "run")
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    (note,) = [event["text"] for event in events if AGAIN in event.get("text", "")]
    log = note.rsplit("see ", 1)[1]
    assert Path(log).parent == run.logs
    assert f"keel: {AGAIN}" in Path(log).read_text()
