"""Keys reach the servers that they are for, and neither the run folder, nor logs, nor errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.config.secrets import without_secrets, wrong_secret
from tests.rewards.judge_server import Asked, Fault, JudgeServer

KEY = "sk-SESAME0123-OPEN4567-89abcdefghij"
PARTS = tuple(KEY[at : at + 12] for at in range(len(KEY) - 11))
TINY = """
extends = "tiny"
threads = 1
steps = 2
evaluation.prompts = 0
checkpoints.every = 1
rollout.prompts_per_step = 2
rollout.group_size = 2
rollout.max_tokens = 4
rewards.timeout = 30.0
"""
RECIPE = f"""{TINY}
[[rewards.functions]]
function = "judge"
[rewards.functions.options]
model = "judge-model"
url = {{url!r}}
api_key_env = "KEEL_TEST_KEY"
retries = 0
timeout = 20.0
attempts = 1
rubric = "one to ten"
"""
CARELESS = f'{TINY}rewards.functions = [{{ function = "tests.safety.test_secrets:careless" }}]'


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer(tell) as made:
        yield made


def tell(asked: Asked) -> str:
    """A judge whose scores differ."""
    return json.dumps({"reason": "counted", "score": 3 + len(asked.material["answer"]) % 3})


def leaks(text: bytes) -> set[str]:
    """The parts of the key that stand in a text, in its own letters or as hexadecimal digits."""
    return {p for p in PARTS if p.encode() in text or p.encode().hex().encode() in text}


def run(folder: Path, url: str) -> list[str]:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(url=url))
    return ["train", str(recipe), "--run", str(folder / "run")]


def check(folder: Path, message: str) -> None:
    """Nothing of the key stands in any file, or in the output."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path): leaks(path.read_bytes()) for path in files if leaks(path.read_bytes())} == {}
    assert leaks(message.encode()) == set()
    assert {path for path in folder.rglob("*") if leaks(str(path).encode())} == set()


@pytest.mark.slow
def test_a_run_that_goes_well(
    server: JudgeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its rollouts hold the judge's reasons, its folder the paid answers, checkpoints and rows."""
    caplog.set_level("DEBUG")
    monkeypatch.setenv("KEEL_TEST_KEY", KEY)
    assert main(run(tmp_path, server.url)) == 0
    assert server.log[0].headers["authorization"] == f"Bearer {KEY}"  # it did get there
    kinds = {path.suffix for path in (tmp_path / "run").rglob("*")}
    assert {".sqlite", ".parquet", ".jsonl", ".json", ".toml", ".safetensors"} <= kinds
    out, err = capfd.readouterr()
    check(tmp_path, out + err + caplog.text)
    assert main(["eval", str(tmp_path / "run"), "--prompts", "2"]) == 0
    out, err = capfd.readouterr()
    check(tmp_path, out + err + caplog.text)


def test_a_run_that_fails(
    server: JudgeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KEEL_TEST_KEY", KEY)
    error = {"message": f"Incorrect API key provided: {KEY}.", "code": KEY}
    # The second step's, so that the folder stays.
    refused = Fault(status=401, error=error)
    server.fault_of = lambda asked: refused if len(server.log) > 4 else None
    assert main(run(tmp_path, server.url)) == 2
    out, err = capfd.readouterr()
    assert err.rstrip().rpartition("\n")[2].startswith("keel: error: ")
    assert "$KEEL_TEST_KEY" in err
    assert "check the key in KEEL_TEST_KEY" in err
    check(tmp_path, out + err)
    assert (tmp_path / "run" / "recipe.toml").is_file()


def careless(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that says its key where it fails, which is in the second step."""
    CALLS["careless"] += 1
    if CALLS["careless"] > 1:
        raise ValueError(f"401 for {KEY}\n(Bearer {KEY})")
    return [float(len(text)) for text in completions]


CALLS = {"careless": 0}


def test_a_reward_of_the_users_that_says_its_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SOME_PASSWORD", KEY)
    CALLS["careless"] = 0
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(CARELESS)
    assert main(["train", str(recipe), "--run", str(tmp_path / "run")]) == 2
    out, err = capfd.readouterr()
    assert "ValueError: 401 for $SOME_PASSWORD (Bearer $SOME_PASSWORD)" in err
    assert (tmp_path / "run" / "events.jsonl").is_file()
    check(tmp_path, out + err)


def test_errors_of_other_code_hide_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The last door: a path, here, that holds it."""
    monkeypatch.setenv("ANY_SECRET", "SESAME-open-1")
    assert main(["train", str(tmp_path / "SESAME-open-1.toml")]) == 2
    err = capfd.readouterr().err
    assert "SESAME" not in err
    assert "$ANY_SECRET" in err


def test_secrets_are_cut_out_of_whatever_holds_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "SESAME-01234")
    monkeypatch.setenv("B_KEY", "SESAME-01234-and-more")
    monkeypatch.setenv("C_KEY", "short")
    printed = {
        "x": ["SESAME-01234-and-more", ("of SESAME-01234", 3)],
        "SESAME-01234": {"y": "short SESAME-0"},
    }
    assert without_secrets(printed) == {
        "x": ["$B_KEY", ["of $A_KEY", 3]],
        "$A_KEY": {"y": "short SESAME-0"},
    }


# ---------------------------------------------------------------- recipes

HELD: list[dict[str, Any]] = [
    {"rewards": {"functions": [{"function": "judge", "options": {"api_key": KEY}}]}},
    {"options": {"extra": {"api-key": "SESAME"}}},
    {"options": {"extra_headers": {"Authorization": "Bearer SESAME"}}},
    {"tasks": [{"name": "datasets", "options": {"token": "SESAME"}}]},
    {"tasks": [{"options": {"use_auth_token": "SESAME"}}]},
    {"options": {"password": "SESAME"}},
    {"options": {"db_passwd": ["SESAME"]}},
    {"client_secret": "SESAME"},
    {"aws_secret_access_key": "SESAME"},
    {"private-key": "SESAME"},
    {"name": "the word is xyzzy-SESAME-plugh"},
]


@pytest.mark.parametrize("recipe", HELD)
def test_what_looks_like_a_secret_is_found_and_not_repeated(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANY_TOKEN", "xyzzy-SESAME-plugh")
    message = wrong_secret(recipe)
    assert message is not None
    assert "SESAME" not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "recipe",
    [
        {"max_tokens": 4, "token_budget": 9, "eos_token": "<eos>", "tokens": "a"},
        {"options": {"api_key_env": "OPENAI_API_KEY", "token": "none", "api_key": ""}},
        {"url": "http://localhost:8000/v1", "system": "mail me@example.com, or ask: //a@b"},
        {"rubric": "the password is no secret"},
        {"keys": "a", "key": "b", "keyboard": "c", "secretary": "d"},
        {"name": "short"},
        {"options": {"secret": "blue", "api_key": 12, "start": "sk-learn-style-estimator-names"}},
    ],
)
def test_other_texts_are_not_secrets(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANY_TOKEN", "short")
    monkeypatch.setenv("ANYTHING", "http://localhost:8000/v1")
    assert wrong_secret(recipe) is None


@pytest.mark.parametrize("way", ["recipe", "name", "override"])
def test_a_recipe_that_holds_one_is_refused_before_anything_is_written(
    way: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = RECIPE.format(url="http://127.0.0.1:9/v1")
    if way == "recipe":
        text += f'extra = {{ api_key = "{KEY}" }}\n'
    elif way == "name":
        text = text.replace("KEEL_TEST_KEY", KEY)
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    more = [f"model.api_key={KEY}"] if way == "override" else []
    assert main(["train", str(path), *more, "--run", str(tmp_path / "run")]) == 2
    out, err = capfd.readouterr()
    assert ("api_key_env" if way == "name" else "would hold a secret") in err
    assert leaks((out + err).encode()) == set()
    assert not (tmp_path / "run").exists()
