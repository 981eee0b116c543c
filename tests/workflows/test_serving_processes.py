"""`keel serve` and `keel chat` as processes: in a terminal, behind a pipe, and by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pexpect
import pytest
import torch

from tests.engines.spelling import EOS, TOKENIZER
from tests.engines.tiny import tiny

KEEL = [sys.executable, "-m", "keel"]
QUESTIONS = [f"{n} + {n * n}?" for n in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers greedily with thousands of tokens."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    size = {"vocab_size": len(TOKENIZER), "max_position_embeddings": 50_000, "eos_token_id": EOS}
    tiny("llama", dtype=torch.float32, **size).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@contextmanager
def served(model: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    """A server of the model, and a client of it."""
    command = [*KEEL, "serve", str(model), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line, curl = process.stdout.readline(), process.stdout.readline()
        url = line.split()[4]
        assert curl.startswith(f"curl {url}/chat/completions")
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            try:
                yield process, client
            finally:
                process.kill()


def asked(text: str) -> Any:
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "temperature": 0}


@pytest.mark.slow
def test_served_and_piped_answers_are_the_evaluation_s(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": q, "answer": "1"}) for q in QUESTIONS))
    task = ["--task", "jsonl", "--set", f"path={rows}", "--set", "answer=answer"]
    words = [*KEEL, "eval", str(model), *task, "--max-tokens", "40", "--json"]
    found = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)
    expected = {one["prompt"][0]["content"]: one["completion"] for one in found["examples"]}
    assert len(expected) == len(QUESTIONS)
    with served(model, "--max-num-seqs", "3") as (process, client):
        create = client.chat.completions.create

        def ask(question: str) -> str:
            return create(**asked(question), max_tokens=40).choices[0].message.content or ""

        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(ask, QUESTIONS * 4))
        assert answers == [expected[question] for question in QUESTIONS] * 4
        chunks = create(**asked("Go on") | {"max_tokens": 10**9}, stream=True)
        assert next(chunks).choices
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130  # most of it Python's own end
    words = [*KEEL, "chat", str(model), "--temperature", "0", "--max-tokens", "40"]
    piped = subprocess.run(words, input=f"{QUESTIONS[2]}\n", capture_output=True, text=True)
    assert piped.stdout == f"{expected[QUESTIONS[2]]}\n"
    assert piped.returncode == 0


@pytest.mark.slow
def test_chat_stops_an_answer_and_ends_by_ctrl_c(model: Path) -> None:
    words = [*KEEL[1:], "chat", str(model), "--temperature", "0", "--checkpoint", "best"]
    refused = pexpect.spawn(sys.executable, words, encoding="utf-8", timeout=60)
    refused.expect("drop --checkpoint")
    refused.close()
    environment = {**os.environ, "TERM": "dumb"}
    with pexpect.spawn(
        sys.executable, words[:-2], encoding="utf-8", timeout=60, env=environment
    ) as chat:
        chat.expect("tiny, greedy")
        chat.expect("\n> ")
        for _ in range(2):
            chat.sendline("Count.")
            chat.expect(r"Count.\r\n(?s:.{300})")  # what was typed, and some of the answer
            start = time.monotonic()
            chat.sendintr()
            chat.expect("\n> ")
            assert time.monotonic() - start < 3
        chat.sendline("/system Be brief.")
        chat.expect("begins again, with this system message")
        chat.expect("\n> ")
        chat.sendintr()
        chat.expect(pexpect.EOF)
    assert chat.exitstatus == 0
