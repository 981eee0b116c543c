"""One side of `rollout.py`: some passes of generation, timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sides import answer

Pass = Callable[[list[list[int]], int], Sequence[int]]
"""From the token ids of prompts and a seed to the lengths of the completions."""


def keel(job: dict[str, Any]) -> Pass:
    """The native engine, as a run has it."""
    import torch

    from keel.config.model import Model
    from keel.engines.native import NativeEngine
    from keel.models.policy import load_policy
    from keel.types import Prompt, Sampling

    policy = load_policy(Model(name=job["model"], device="cpu"), 0)
    dtype = torch.bfloat16 if job["side"] == "keel-bf16" else None
    engine = NativeEngine(policy.model, policy.tokenizer, dtype=dtype)
    sampling = Sampling(max_tokens=job["max_tokens"])

    def once(ids: list[list[int]], seed: int) -> Sequence[int]:
        prompts = [Prompt(f"{seed}-{n}", "", tokens=tuple(one)) for n, one in enumerate(ids)]
        groups = engine.sample(prompts, job["group"], sampling, seed)
        return [len(one.tokens) for group in groups for one in group.completions]

    return once


def generate(job: dict[str, Any]) -> Pass:
    """transformers' `generate`, prompts padded left."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(job["model"]).eval()
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    settings = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "num_return_sequences": job["group"],
        "max_new_tokens": job["max_tokens"],
    }

    def once(ids: list[list[int]], seed: int) -> Sequence[int]:
        torch.manual_seed(seed)
        width = max(map(len, ids))
        filled = torch.tensor([[pad] * (width - len(one)) + one for one in ids])
        seen = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in ids])
        new = model.generate(filled, attention_mask=seen, **settings)[:, width:]
        ended = new == eos
        # A pad may be drawn as any token, so that the end alone tells where a completion ends.
        ends = torch.where(ended.any(1), ended.int().argmax(1) + 1, new.shape[1])
        lengths: list[int] = ends.tolist()
        return lengths

    return once


def vllm(job: dict[str, Any]) -> Pass:
    """vLLM, asked for tokens alone: neither text nor log-probabilities."""
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
    sampling = SamplingParams(
        n=job["group"], temperature=1.0, max_tokens=job["max_tokens"], detokenize=False
    )

    def once(ids: list[list[int]], seed: int) -> Sequence[int]:
        # No seed of its own for each request: vLLM would draw row by row, which is slower.
        prompts = [TokensPrompt(prompt_token_ids=one) for one in ids]
        out = engine.generate(prompts, sampling, use_tqdm=False)
        return [len(one.token_ids) for request in out for one in request.outputs]

    return once


SIDES = {"keel": keel, "keel-bf16": keel, "generate": generate, "vllm": vllm}


def passes(job: dict[str, Any]) -> dict[str, Any]:
    """Tokens, completions and seconds of each pass that counts; each has other prompts."""
    import torch
    from transformers import AutoTokenizer

    torch.set_num_threads(job["threads"])
    once = SIDES[job["side"]](job)
    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    rows = Path(job["prompts"]).read_text("utf-8").splitlines()
    every = [tokenizer(json.loads(row)["prompt"])["input_ids"] for row in rows]
    count = job["completions"] // job["group"]
    found = []
    for number in range(job["first"], job["first"] + job["warm"] + 1):
        ids = [every[(number * count + at) % len(every)] for at in range(count)]
        start = time.perf_counter()
        lengths = once(ids, number)
        found.append({"lengths": list(lengths), "seconds": time.perf_counter() - start})
    return found[-1]


# vLLM may start its engine in a process that imports this file again.
if __name__ == "__main__":
    answer(passes)
