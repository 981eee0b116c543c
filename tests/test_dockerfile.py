"""The Dockerfile: its instructions, and the image where Docker runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from keel.platform.extras import EXTRAS
from keel.version import VERSION
from tests.shared import ROOT

KNOWN = ("FROM", "ARG", "RUN", "COPY", "WORKDIR", "USER", "EXPOSE", "ENTRYPOINT", "CMD")
"""Those that this file needs: no ADD, which may fetch, and no ENV, which stays in the image."""


def instructions() -> list[tuple[str, str]]:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [
        (word, rest) for word, _, rest in (li.partition(" ") for li in joined.splitlines() if li)
    ]


def all_of(name: str) -> list[str]:
    return [rest for word, rest in instructions() if word == name]


def test_dockerfile_has_known_instructions() -> None:
    assert {word for word, _ in instructions()} == set(KNOWN)
    assert all(re.fullmatch(r"python:3\.\d+-slim-\w+( AS \w+)?", image) for image in all_of("FROM"))
    for command in all_of("RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
    assert json.loads(all_of("ENTRYPOINT")[0]) == ["keel"]
    assert json.loads(all_of("CMD")[0]) == ["--help"]


def test_image_is_small_and_without_rights() -> None:
    last = [word for word, _ in instructions()]
    assert all_of("USER") == ["keel"]
    assert "RUN" not in last[last.index("USER") :]
    installs = [command for command in all_of("RUN") if "pip " in command]
    assert len(installs) == 2
    assert all("--no-cache-dir" in command for command in installs)
    (system,) = (command for command in all_of("RUN") if "apt-get" in command)
    assert "--no-install-recommends" in system
    assert "rm -rf /var/lib/apt/lists" in system
    assert not re.search(r"token|secret|password|_key", str(instructions()), re.IGNORECASE)


def test_image_is_made_of_files_that_exist() -> None:
    shown = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    copied = [text.split()[:-1] for text in all_of("COPY") if not text.startswith("--from=wheel ")]
    named = {name for names in copied for name in names}
    assert named == shown
    assert [name for name in named if not (ROOT / name).exists()] == []
    arguments = dict(text.split("=") for text in all_of("ARG"))
    assert arguments["TORCH"] == "cpu"
    assert set(arguments["EXTRAS"].split(",")) <= EXTRAS.keys()


@pytest.mark.slow
def test_image_runs_a_recipe() -> None:
    if shutil.which("docker") is None or subprocess.run(["docker", "info"]).returncode != 0:
        pytest.skip("no Docker daemon: start one to build the image")
    subprocess.run(["docker", "build", "-q", "-t", "keel-test", str(ROOT)], check=True)
    for words, wanted in ((["--version"], VERSION), (["train", "tiny", "steps=2"], "run folder")):
        command = ["docker", "run", "--rm", "keel-test", *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert wanted in done.stdout
