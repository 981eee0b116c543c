"""A run whose texts try to get out of the page, the report and the terminal."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from keel.runs.layout import RunFolder
from keel.runs.rows import RolloutRow
from keel.runs.writer import Recorder, update_run_json

MARKUP = "<script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
ANSI = "\x1b[31mred\x1b]0;title\x07 \x9b2J"
BIDI = "abc\u202e\u2066\u200b\u200d\ufeffdef \u05d0\u05d1\u05d2"
TEXTS = (MARKUP, ANSI, BIDI, "{{ 7 * 7 }} ${7*7} :options", '"><svg onload=window.broken=1>')
RECIPE = """name = "{name}"
seed = 3

[[stages]]
stage = "rl"
name = "rl"
steps = 4
"""
TWO_STAGES = """name = "two"

[[stages]]
stage = "rl"
name = "one"
steps = 9

[[stages]]
stage = "rl"
name = "two"
steps = 9
"""


def row(text: str, **changes: object) -> RolloutRow:
    """A completion of the text, one token a word."""
    pieces = tuple(f" {word}" for word in text.split()) or ("",)
    count = len(pieces)
    values: dict[str, object] = {
        "group": 0,
        "prompt_id": f"task/{text[:20]}",
        "task": "task",
        "prompt": text,
        "expected": text,
        "completion": text,
        "tokens": np.arange(count),
        "pieces": pieces,
        "log_probs": np.full(count, -0.5, np.float32),
        "written": np.ones(count, bool),
        "finish": "eos",
        "reward": 1.0,
        "components": {"correct": 1.0, MARKUP: 0.0},
        "extras": {"judge_reason": text, MARKUP: text},
        "values": {
            "advantages": np.full(count, 1.0, np.float32),
            "loss/policy": np.full(count, -0.25, np.float32),
        },
    }
    return RolloutRow(**{**values, **changes})  # type: ignore[arg-type]


def write(path: Path, texts: tuple[str, ...] = TEXTS) -> RunFolder:
    """The run, of four steps."""
    folder = RunFolder.create(path, RECIPE.format(name="hostile"))
    with Recorder(folder) as recorder:
        for step in range(1, 5):
            metrics = {"reward": step / 4, "reward_std": 0.1, "entropy": 1.0, MARKUP: 1.0}
            recorder.metrics(0, step, {**metrics, "step/tokens": 10.0})
            recorder.timings(0, step, {"total": 0.5})
            rows = [row(text, group=at, reward=step / 4) for at, text in enumerate(texts)]
            recorder.rollouts(0, step, rows)
    update_run_json(folder, {"name": MARKUP, "objective": MARKUP, "versions": {MARKUP: ANSI}})
    return folder


def add_step(folder: RunFolder, stage: int, step: int, reward: float = 0.5) -> None:
    """Go on with a run by one step of one completion."""
    with Recorder(folder) as recorder:
        recorder.metrics(stage, step, {"reward": reward})
        recorder.rollouts(stage, step, [row("some words")])
