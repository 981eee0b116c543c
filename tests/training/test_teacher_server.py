"""A teacher on a server, against a real one: its numbers are those of the same model loaded."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from keel.config.model import TeacherModel
from keel.learn.teacher_server import TeacherServer, served_teacher
from keel.models.policy import Policy, load_policy
from keel.preflight.check import check
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.types import KeelError
from tests.training.small import metrics, run, save_teacher, small

pytestmark = pytest.mark.slow

OPD = ("algorithm=opd", "steps=2", "evaluation.prompts=4", "optimizer.learning_rate=0.01",
       "rewards.functions=[{function='place_match'}]", "checkpoints.every=1")  # fmt: skip


class Server(ThreadingHTTPServer):
    """Answers as vLLM does, with the log-probabilities of a model; `spoil` changes an answer."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, teacher: Policy) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.replace(teacher)
        self.lock = threading.Lock()
        self.requests: list[tuple[dict[str, Any], str | None]] = []
        self.spoil: Callable[[list[Any]], Any] = lambda entries: entries
        self.statuses: list[int] = []

    def replace(self, teacher: Policy) -> None:
        config = teacher.model.config
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        self.model.load_state_dict(teacher.model.state_dict())
        self.teacher = teacher

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def entries(self, tokens: list[int]) -> list[Any]:
        teacher = self.teacher
        with self.lock, torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :, : teacher.tokens]
        log_TV = logits.log_softmax(-1)
        texts = teacher.tokenizer
        return [None] + [
            {str(t): {"logprob": float(log_TV[at, t]), "rank": 1, "decoded_token": texts.decode(t)}}
            for at, t in enumerate(tokens[1:])
        ]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((body, self.headers.get("Authorization")))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if self.path != "/v1/completions" or body["model"] not in ("big", "other"):
            status = 404
        found = self.server.spoil(self.server.entries(body["prompt"])) if status == 200 else None
        whole = {"choices": [{"prompt_logprobs": found}]} if found else {"error": "no such model"}
        sent = json.dumps(whole).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(load_policy(small().model, 5)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def served(server: Server, more: str = "") -> str:
    return f"teacher={{name='big', url='{server.url}'{more}}}"


def ends(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(load(folder.path).checkpoints()[-1].path / "trainable.safetensors")


def teachers(folder: RunFolder, step: int) -> np.ndarray[Any, Any]:
    return np.concatenate([r["teacher_log_probs"] for r in load(folder.path).rollouts(step)])


def start() -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in load_policy(small().model, small().seed).trainable().items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return sum(float((one[name] - other[name]).pow(2).sum()) for name in one)  # squared


# ---------------------------------------------------------------- it equals the loaded model


@pytest.mark.parametrize("shown", [False, True])
def test_served_teacher_equals_the_loaded_one(
    shown: bool, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own prompt too, to the rounding of float32, which Adam enlarges where a gradient is
    nearly 0."""
    monkeypatch.setenv("BIG_KEY", "a-secret-of-mine")
    prompt = "teacher.prompt=9{prompt}{prompt}" if shown else "teacher.retries=3"
    with_key = served(server, ", api_key_env='BIG_KEY'")
    far = run(tmp_path / "far", *OPD, with_key, prompt)
    own = (save_teacher(tmp_path / "teacher"), *([prompt] if shown else []))
    near = run(tmp_path / "near", *OPD, *own)
    for step in (1, 2):
        np.testing.assert_allclose(teachers(far, step), teachers(near, step), rtol=0, atol=2e-5)
    assert distance(ends(near), ends(far)) < 1e-4 * distance(ends(near), start())
    for a, b in zip(metrics(far), metrics(near), strict=True):
        assert a["teacher/kl"] == pytest.approx(b["teacher/kl"], abs=2e-5)
    assert {key for _, key in server.requests} == {"Bearer a-secret-of-mine"}
    written = [p for p in far.path.rglob("*") if p.is_file()]
    assert not [p for p in written if b"a-secret-of-mine" in p.read_bytes()]


def test_server_is_asked_for_the_model_of_each_task(server: Server, tmp_path: Path) -> None:
    tasks = "tasks=[{name='sort_digits'}, {name='addition', options={digits=1}}]"
    more = ", by_task=[{task='addition', name='other'}]"
    keys = (tasks, "model.build.alphabet='0123456789>+='", "steps=1")
    server.replace(load_policy(small(*keys).model, 5))
    run(tmp_path / "run", *OPD, *keys, served(server, more))
    plus = small(*keys).model
    added = load_policy(plus, 5).tokenizer.convert_tokens_to_ids("+")
    probes, asked = 2 * 2, [body for body, _ in server.requests]
    seen = {(body["model"], added in body["prompt"][:3]) for body in asked[probes:]}
    assert seen == {("big", False), ("other", True)}


def test_served_scores_do_not_depend_on_micro_batches(server: Server, tmp_path: Path) -> None:
    few, many = (
        run(tmp_path / f"{tokens}", *OPD, "steps=1", served(server), f"token_budget={tokens}")
        for tokens in (32, 4096)
    )
    assert (teachers(few, 1) == teachers(many, 1)).all()
    assert distance(ends(few), ends(many)) < 1e-4 * distance(ends(few), start())


def test_busy_server_is_asked_again(server: Server) -> None:
    server.statuses = [503, 429]
    server_of(server).check(load_policy(small().model, 0))
    assert len(server.requests) == 3


# ---------------------------------------------------------------- refused


def server_of(server: Server, **changed: Any) -> TeacherServer:
    return TeacherServer(TeacherModel(**{"name": "big", "url": server.url, **changed}))


def emptied(entries: list[Any]) -> Any:
    return None


def cut(entries: list[Any]) -> Any:
    return entries[:-1]


def other_ids(entries: list[Any]) -> Any:
    return [e and {str(int(t) + 100): v for t, v in e.items()} for e in entries]


def other_texts(entries: list[Any]) -> Any:
    return [e and {t: v | {"decoded_token": "odd"} for t, v in e.items()} for e in entries]


def infinite(entries: list[Any]) -> Any:
    return [e and {t: v | {"logprob": float("nan")} for t, v in e.items()} for e in entries]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (emptied, "did not answer with finite prompt_logprobs, but with .*: serve the teacher"),
        (infinite, "did not answer with finite prompt_logprobs"),
        (cut, r"returned \d+ log-probabilities for \d+ tokens: serve the teacher with vLLM, which"),
        (other_ids, r"was asked for token 0 and returned token 100: serve a model with the policy"),
        (other_texts, r"has token \d+ as 'odd', which the policy has as '.+': serve a model"),
    ],
)
def test_wrong_answers_are_refused(
    spoil: Callable[[list[Any]], Any], words: str, server: Server
) -> None:
    server.spoil = spoil
    with pytest.raises(KeelError, match=f"^teacher.url = '{server.url}' {words}") as raised:
        server_of(server).check(load_policy(small().model, 0))
    assert "\n" not in str(raised.value)


def test_unknown_names_and_addresses_are_refused(server: Server) -> None:
    policy = load_policy(small().model, 0)
    with pytest.raises(KeelError, match=r"status 404: .*no such model.*: start the server, or"):
        server_of(server, name="small").check(policy)
    with pytest.raises(KeelError, match=r"cannot be reached \(ConnectError\) \(1 requests\)"):
        server_of(server, url="http://127.0.0.1:9/v1", retries=0).check(policy)
    with pytest.raises(KeelError, match="is not a valid address: it is not http"):
        server_of(server, url="ftp://a")
    with pytest.raises(KeelError, match=r"teacher\.api_key_env: .* 'NONE_SUCH' is not set"):
        server_of(server, api_key_env="NONE_SUCH")
    assert served_teacher(TeacherModel(name="a"), policy) is None


def test_run_stops_with_the_error_of_its_server(server: Server, tmp_path: Path) -> None:
    """The vocabulary was the same; later the server answers with too few numbers."""
    asked: list[int] = []

    def later(entries: list[Any]) -> Any:
        asked.append(len(entries))
        return entries if len(asked) < 5 else entries[:-1]

    server.spoil = later
    with pytest.raises(KeelError, match=r"returned \d+ log-probabilities for \d+ tokens"):
        run(tmp_path / "run", *OPD, served(server, ", requests=2"))


def test_check_asks_the_server(server: Server) -> None:
    words = [*OPD, served(server)]
    assert [f.kind for f in check("tiny", words, runs=False).findings] == []
    server.spoil = other_texts
    (found,) = check("tiny", words, runs=False).findings
    assert (found.kind, found.key) == ("would-stop", "teacher.url")


def test_served_teacher_takes_no_memory(server: Server) -> None:
    stage = small(*OPD, served(server)).stages[0]
    explained = stage.explain(lora=False)
    assert explained is not None
    uses = explained.models
    assert [(use.role, use.loaded) for use in uses if use.role in ("policy", "teacher")] == [
        ("policy", True),
        ("teacher", False),
    ]
