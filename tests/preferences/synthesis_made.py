"""A server that writes completions and judges them, and small inputs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from keel.preferences.records import PromptRecord
from keel.preferences.synthesis_options import ModelServer, SynthesisOptions
from keel.types import Sampling
from tests.data.made import jsonl
from tests.rewards.judge_server import Asked, JudgeServer, Verdict, longer

WRITER, JUDGE = "writer", "judge"
QUICK = {"concurrency": 4}


def judges(asked: Asked) -> bool:
    """Whether a request is a judge's."""
    return bool(asked.body["messages"][0]["role"] == "system")


def written(asked: Asked) -> str:
    """10 to 49 characters that depend on the messages, the model and the seed."""
    body = asked.body
    text = json.dumps([body["messages"], body["model"], body["seed"]])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (digest * 2)[: 10 + int(digest[:6], 16) % 40]


def both(verdict: Verdict = longer) -> Verdict:
    """Writes completions, and judges by `verdict`."""
    return lambda asked: verdict(asked) if judges(asked) else written(asked)


def server(verdict: Verdict = longer) -> JudgeServer:
    """Such a server, on loopback."""
    return JudgeServer(both(verdict))


def prompt_rows(count: int) -> list[dict[str, Any]]:
    """Prompts of different lengths, every third as messages."""
    rows: list[dict[str, Any]] = []
    for at in range(count):
        text = f"question {at} " + "about numbers " * (at % 7)
        messages = [{"role": "user", "content": text}]
        rows.append({"prompt": messages if at % 3 == 2 else text, "answer": str(at)})
    return rows


def prompts(count: int) -> list[PromptRecord]:
    """Their records."""
    return [PromptRecord(row["prompt"], {"answer": row["answer"]}) for row in prompt_rows(count)]


def prompts_file(folder: Path, count: int) -> str:
    """Their file."""
    return jsonl(folder / "prompts.jsonl", prompt_rows(count))


def options(url: str, **changes: Any) -> SynthesisOptions:
    """Three completions and three pairs a prompt, by one server, whose prices are known."""
    writer = ModelServer(WRITER, url, price=(2.0, 8.0), options=QUICK)
    judge = ModelServer(JUDGE, url, price=(1.0, 4.0), options={**QUICK, "max_tokens": 100})
    chosen: dict[str, Any] = {
        "models": (writer,),
        "judge": judge,
        "samples": 3,
        "pairs": 3,
        "sampling": Sampling(max_tokens=60),
        "forecast_prompts": 5,
        **changes,
    }
    return SynthesisOptions(**chosen)
