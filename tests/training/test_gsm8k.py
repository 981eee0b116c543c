"""The recipes for a real instruct model, end to end for two steps, on real questions.

The model is a tiny random Qwen2 with a byte-level tokenizer, made here; the data are real.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from keel.config.load import load_recipe
from keel.config.model import BuildModel, Model
from keel.models.policy import load_policy
from keel.runs.reader import load
from keel.training.run import train
from tests.shared import shared_path

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = BuildModel(
        family="qwen2",
        tokenizer="bytes",
        hidden_size=32,
        layers=2,
        heads=4,
        kv_heads=2,
        context=1024,
    )
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    load_policy(Model(build=build, chat_template=TEMPLATE), seed=0).save(folder)
    return folder


def overrides(qwen: Path) -> list[str]:
    """Of the questions the first 300 of each split: what all rows take is the same per row."""
    train_file, test_file = (qwen.parent / f"{split}.jsonl" for split in ("train", "test"))
    for file in (train_file, test_file):
        rows = shared_path(f"data/gsm8k/{file.name}").read_text("utf-8").splitlines(keepends=True)
        file.write_text("".join(rows[:300]), "utf-8")
    task = f"name='jsonl', path='{train_file}', validation_path='{test_file}'"
    words = "prompt='{question}', answer='answer', system='Answer.'"
    return [
        f"tasks=[{{{task}, {words}}}]",
        f"model.name={qwen}",
        "steps=2",
        "threads=1",
        "prompts.max_tokens=300",
        "rollout.prompts_per_step=4",
        "rollout.max_tokens=24",
        "evaluation.prompts=6",
        "token_budget=2048",
        "rewards.functions=[{function='numeric_match', name='correct'},"
        "{function='length', name='format', weight=0.1, options={target=6}}]",
    ]


@pytest.mark.parametrize("name", ["gsm8k-grpo", "gsm8k-ppo", "gsm8k-gspo"])
def test_a_recipe_runs_from_end_to_end(name: str, qwen: Path, tmp_path: Path) -> None:
    folder = train(load_recipe(name, overrides(qwen)), tmp_path / "run")
    run = load(folder.path)
    rows = run.metrics()
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["rewards/correct/mean"] is not None
    assert rows[-1]["prompts/left_out"] > 0  # some questions are longer than 300 bytes
    assert run.info()["evaluation"]["rl"]["after"]["n"] == 6
    rollout = run.rollouts(1)[0]
    assert "reward/correct" in rollout
    assert "reward/format" in rollout
    assert rollout["prompt"][0] == {"role": "system", "content": "Answer."}
    policy = load(folder.path).checkpoints()[-1].path / "policy"
    AutoModelForCausalLM.from_pretrained(policy)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert tokenizer.chat_template == TEMPLATE
