"""Whole runs of one step, on odd tokenizers and rows of which some are bad."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from keel.models.loading import quiet
from keel.runs.reader import load
from tests.fuzz import held, strategies, tokenizers
from tests.fuzz.held import OK, QUARANTINED, Fault, Outcome

RECIPE = """
threads = 1
[model]
name = "model"
[[stages]]
stage = "{stage}"
steps = 1
{more}
[stages.optimizer]
learning_rate = 1e-3
"""
OF_TASK = """
[[stages.tasks]]
name = "jsonl"
path = "rows.jsonl"
answer = "answer"
bad_rows = "{bad_rows}"
"""
OF_DATA = """
batch_size = 2
[stages.data]
name = "jsonl"
path = "rows.jsonl"
bad_rows = "{bad_rows}"
"""
MORE = {
    "rl": OF_TASK
    + "[stages.rollout]\nprompts_per_step = 2\ngroup_size = 2\nmax_tokens = 4\n"
    + "[stages.evaluation]\nprompts = 2\n",
    "sft": "batch_size = 2\n" + OF_TASK,
    "reward_model": OF_DATA,
    "dpo": OF_DATA,
    "process_reward_model": OF_DATA,
}
KIND = {"reward_model": "pairs", "dpo": "pairs", "process_reward_model": "steps"}


@cache
def _model(name: str, chat: str, end: bool) -> Path:
    """A folder with a model of one layer; `end`: it knows an end of sequence of its own."""
    tokenizer = tokenizers.made(name, chat)
    folder = Path(tempfile.mkdtemp(prefix="keel-fuzz-"))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=tokenizers.CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1 if end else tokenizer.eos_token_id)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _rows(stage: str) -> st.SearchStrategy[bytes]:
    kind = KIND.get(stage)
    if kind is None:
        return strategies.jsonl(strategies.good_tasks, strategies.task_rows)
    return strategies.jsonl(strategies.good_rows(kind), strategies.judged_rows(kind))


inputs = st.sampled_from(sorted(MORE)).flatmap(
    lambda stage: st.tuples(
        st.just(stage),
        st.sampled_from(sorted(tokenizers.MADE)),
        st.sampled_from(sorted(tokenizers.CHATS)),
        st.booleans(),
        st.sampled_from(["stop", "quarantine", "quarantine"]),
        _rows(stage),
    )
)


def hold(value: tuple[str, str, str, bool, str, bytes], folder: Path) -> Outcome:
    """The run ends with 0 or with one line; what it left out is in its folder."""
    stage, name, chat, end, bad_rows, content = value
    shutil.copytree(_model(name, chat, end), folder / "model")
    # Rows that every tokenizer here knows go first, so that most runs come to their step.
    (folder / "rows.jsonl").write_bytes(_known(stage) + content)
    more = MORE[stage].replace("{bad_rows}", bad_rows)
    (folder / "recipe.toml").write_text(RECIPE.format(stage=stage, more=more))
    outcome = held.command(["train", "recipe.toml", "--run", "run", "--quiet"], folder, leaves=True)
    if outcome.how != OK:
        return outcome
    if len(load(folder / "run").metrics()) != 1:
        raise Fault("no step on record")
    kept = [
        json.loads(line)
        for path in (folder / "run" / "quarantine").glob("*.jsonl")
        for line in path.read_text(encoding="utf-8").split("\n")[:-1]
    ]
    lines = held.lines_of((folder / "rows.jsonl").read_bytes())
    if not {row["line"] for row in kept} <= set(lines):
        raise Fault(f"left out lines that are not there: {kept!r}")
    rows = len(lines)
    return Outcome(QUARANTINED if kept else OK, rows, rows - len(kept), len(kept))


def _known(stage: str) -> bytes:
    rows: list[Any] = {
        "pairs": [{"prompt": p, "chosen": "a b", "rejected": "b"} for p in ("a", "b", "a a")],
        "steps": [
            {"prompt": p, "completions": ["a", "b"], "labels": [True, False]}
            for p in ("a", "b", "a a")
        ],
    }.get(KIND.get(stage, ""), [{"prompt": p, "answer": "a"} for p in ("a", "b", "a a", "b b")])
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
