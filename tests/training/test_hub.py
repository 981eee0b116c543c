"""`keel export` with a card, and to a local server that speaks the hub's routes for an upload."""

from __future__ import annotations

import base64
import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from keel.__main__ import main
from keel.config.load import load_recipe, to_toml
from keel.config.model import Model
from keel.config.sources import TaskSource
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.export import export
from keel.training.run import train

TOKEN = "hf_a_token_that_may_write"
REFUSED = {"hf_reader": 403, "hf_unknown": 401}


class Hub(ThreadingHTTPServer):
    """Keeps what is uploaded: weights by the LFS protocol, the rest in the commit."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Route)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.broken = False


class Route(BaseHTTPRequestHandler):
    server: Hub

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self._body()
        self._reply(200, {})

    def do_POST(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        body = self._body()
        if (status := REFUSED.get(token, 200)) != 200 or token == "":
            self._reply(status if token else 401, {"error": f"not with {token}"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            self.server.created.append(asked)
            taken = asked["name"] == "taken"
            url = f"{self.server.url}/{asked['organization']}/{asked['name']}"
            self._reply(409 if taken else 200, {"url": url})
        elif self.path == "/api/validate-yaml":
            self._reply(200, {"errors": [], "warnings": []})
        elif self.path.endswith("/preupload/main"):
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = ("lfs" if name.endswith(".safetensors") else "regular" for name in names)
            found = [
                {"path": name, "uploadMode": mode, "shouldIgnore": False}
                for name, mode in zip(names, modes, strict=True)
            ]
            broken = {"error": f"lost: {token}"}
            self._reply(*((500, broken) if self.server.broken else (200, {"files": found})))
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._reply(200, {"transfer": "basic", "objects": objects})
        else:
            assert self.path == "/api/models/ours/sorter/commit/main"
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.blobs[value["oid"]]
            self._reply(
                200, {"commitUrl": f"{self.server.url}/ours/sorter/commit/0", "commitOid": "0" * 40}
            )

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, status: int, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        # What HF_ENDPOINT and the others set as the library is imported.
        for name, value in (
            ("ENDPOINT", server.url),
            ("HF_HUB_OFFLINE", False),
            ("HF_HUB_DISABLE_XET", True),
            ("HF_TOKEN_PATH", str(tmp_path / "token")),
        ):
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.chdir(tmp_path)
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    keys = ["steps=4", "checkpoints.every=2", "evaluation.every=2", "optimizer.learning_rate=3e-2"]
    keys += ["evaluation.threshold=0.1"]  # of the places: something is right, now more, now less
    return train(load_recipe("tiny", keys), tmp_path_factory.mktemp("runs") / "run")


def test_hub_gets_the_exported_folder(
    hub: Hub, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run.path), "--hub", "ours/sorter", "--private"]) == 0
    out = capsys.readouterr()
    assert f"uploaded to {hub.url}/ours/sorter: load it with AutoModelForCausalLM" in out.out
    assert hub.created == [{"name": "sorter", "organization": "ours", "visibility": "private"}]
    local = {path.name: path.read_bytes() for path in Path("sorter").iterdir()}
    assert hub.files == local
    assert {"model.safetensors", "config.json", "README.md", "curve.png"} <= local.keys()
    everything = [*local.values(), out.out.encode(), out.err.encode()]
    everything += [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in everything)


@pytest.mark.parametrize(
    ("name", "token", "why"),
    [
        ("ours/sorter", "", "there is no token of the Hugging Face hub: run hf auth login"),
        ("ours/sorter", "hf_unknown", "the hub does not accept the token: run hf auth login"),
        ("ours/sorter", "hf_reader", "the token may not write to ours: run hf auth login"),
        ("ours/taken", TOKEN, "there is a model of that name: choose another"),
        ("ours/so:rter", TOKEN, "Repo id must use alphanumeric chars"),
        ("sorter", TOKEN, "write OWNER/sorter"),
        ("ours/broken", TOKEN, "the hub answers 500: lost: …"),
        ("ours/away", TOKEN, "cannot be reached (ConnectError"),
    ],
)
def test_hub_errors_are_one_line(
    hub: Hub,
    run: RunFolder,
    name: str,
    token: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    if name == "ours/away":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub.broken = name == "ours/broken"
    monkeypatch.setattr("time.sleep", lambda _: None)  # before the library tries again
    assert main(["export", str(run.path), "model", "--hub", name]) == 2
    error = capsys.readouterr().err
    assert "keel: error: --hub" in error
    assert why in error
    assert error.splitlines()[-1].startswith("keel: error")
    assert not token or token not in error
    assert hub.files == {}
    sent = token != "" and ":" not in name and "/" in name
    assert Path("model").exists() == sent
    assert ("hf upload" in error) == sent


def test_card_states_model_objective_and_evaluation(run: RunFolder, tmp_path: Path) -> None:
    folder = export(run.path, tmp_path / "sorter", checkpoint="step-000002")
    card = ModelCard.load(folder / "README.md")
    data = card.data
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert {"keel", "rl", "grpo"} <= set(data.tags)
    (result,) = [one for one in data.eval_results if one.metric_type == "pass@1"]
    assert result.dataset_name == "sort_digits (validation split)"
    columns = load(run.path).columns("rl")
    figures = [columns[f"eval/pass@1{end}"] for end in ("", "/low", "/high")]
    now = [float(one.values[list(one.steps).index(2)]) for one in figures]
    assert result.metric_value == round(now[0], 6)
    before = load(run.path).info()["evaluation"]["rl"]["before"]
    then = [before[name] for name in ("mean", "low", "high")]
    shown = ["{:.3f} [{:.3f}, {:.3f}]".format(*figure) for figure in (then, now)]
    assert f"| pass@1 | {shown[0]} | {shown[1]} |" in card.text
    assert r"$$ J(\theta) = \sum_n w_n" in card.text
    assert "weights of `step-000002`" in card.text
    assert "![The course" in card.text
    assert (folder / "curve.png").is_file()
    (recipe,) = re.findall(r"~~~~toml\n(.*?)\n~~~~", card.text, re.DOTALL)
    (tmp_path / "again.toml").write_text(recipe)
    assert load_recipe(str(tmp_path / "again.toml")) == load_recipe(run.recipe)


def test_card_names_base_license_and_data(tmp_path: Path, run: RunFolder) -> None:
    place = shutil.copytree(run.path, tmp_path / "run")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text("---\nlicense: mit\n---\n")
    recipe = load_recipe(run.recipe)
    task = TaskSource(name="datasets", path="a/b")
    stages = (recipe.stages[0].model_copy(update={"tasks": (task,)}),)
    for name, license in ((str(tmp_path / "base"), "mit"), ("some/base", None)):
        named = recipe.model_copy(update={"model": Model(name=name), "stages": stages})
        (place / "recipe.toml").write_text(to_toml(named))
        data = ModelCard.load(export(place, tmp_path / str(license)) / "README.md").data
        assert data.datasets == ["a/b"]
        assert (data.license, data.base_model) == (license, None if license else name)


def test_damaged_metrics_leave_the_model_without_card(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.path, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("{\n")
    folder = export(tmp_path / "run", tmp_path / "out")
    assert (folder / "config.json").is_file()
    assert not (folder / "README.md").exists()
    assert "the exported model has no card: " in capsys.readouterr().err
