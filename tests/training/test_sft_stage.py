"""The sft stage on data: what bears loss, what is too long, epochs, and live objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import keel
from keel.config.load import load_recipe
from keel.data.sft import SFTEncoder, SFTRow
from keel.models.build import byte_tokenizer
from keel.models.conversations import ConversationEncoder
from keel.platform.files import write_jsonl
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.run import train
from keel.types import KeelError
from keel.view.library import Library, status_of
from keel.view.summary import summarise
from tests.soak.cases import TURNS, imitated
from tests.training import judged
from tests.training.small import info, metrics, notes

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
TALK: list[Any] = [
    {"role": role, "content": text}
    for role, text in (("user", "u"), ("assistant", "one"), ("user", "v"), ("assistant", "two"))
]


def bearing(row: SFTRow, **keys: Any) -> str | None:
    """The tokens of a row that bear loss, as text."""
    tokenizer = byte_tokenizer(256)
    tokenizer.chat_template = TEMPLATE
    settings = {"loss_on": "assistant", "limit": None, "drop": False, **keys}
    made = SFTEncoder(ConversationEncoder(tokenizer), **settings)(row)
    return None if made is None else tokenizer.decode(made.tokens[made.written])


EOS = byte_tokenizer(256).eos_token
HALF = SFTRow("x", tuple(TALK[:2]), tuple(TALK[2:]))
WHOLE = SFTRow("x", None, tuple(TALK))


@pytest.mark.parametrize(
    ("row", "keys", "text"),
    [
        (WHOLE, {}, f"one{EOS}two{EOS}"),
        (HALF, {}, f"two{EOS}"),
        (SFTRow("x", "u", "one"), {}, f"one{EOS}"),
        (SFTRow("x", "u", "one"), {"raw": True}, f"one{EOS}"),
        (SFTRow("x", None, "text"), {}, f"ext{EOS}"),
        (SFTRow("x", "u", "one"), {"loss_on": "all", "raw": True}, f"one{EOS}"),
        (SFTRow("x", "u", "on"), {"loss_on": "all"}, f"user>u{EOS}\n<assistant>on{EOS}\n"),
        (WHOLE, {"limit": 26}, f"one{EOS}"),
        (WHOLE, {"limit": 26, "drop": True}, None),
        (WHOLE, {"limit": 10}, None),
    ],
)
def test_loss_is_on_what_the_model_writes(row: SFTRow, keys: Any, text: str | None) -> None:
    assert bearing(row, **keys) == text


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (SFTRow("x", None, tuple(TALK[:1])), r"no message is the assistant's \(roles: user\)"),
        (SFTRow("x", None, EOS), "it has 1 token, and nothing predicts the first"),
    ],
)
def test_an_example_without_loss_says_why(row: SFTRow, why: str) -> None:
    with pytest.raises(KeelError, match=why):
        bearing(row)


def small(folder: Path, **keys: Any) -> RunFolder:
    """A run of two steps on conversations and texts."""
    stage = imitated(folder, **{"steps": 2, **keys})
    return train(judged.recipe(stage, chat_template=TURNS), folder / "run")


def test_long_examples_are_cut_and_counted(tmp_path: Path) -> None:
    said = notes(small(tmp_path, max_tokens=7))
    assert any("jsonl:train: 14 examples cut to 7 tokens" in note for note in said)


def test_a_stream_counts_what_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    rows = [{"text": "1" * (at % 3 * 4)} for at in range(40)]
    write_jsonl(tmp_path / "set" / "train.jsonl", rows)
    source: dict[str, Any] = {"name": "datasets", "path": str(tmp_path / "set")}
    source |= {"bad_rows": "quarantine", "options": {"streaming": True}}
    stage = {"stage": "sft", "steps": 3, "batch_size": 4, "max_tokens": 6, "data": [source]}
    run = train(judged.recipe(stage), tmp_path / "run")
    counts = [(one["examples/left_out"], one["examples/cut"]) for one in metrics(run)]
    assert counts == [(2, 2), (4, 4), (6, 6)]
    assert len((run.quarantine / "sft-data-0.jsonl").read_text().splitlines()) == 6
    assert "sft: datasets:set: 6 examples cut to 6 tokens" in notes(run)


def test_evaluation_selects_the_step_of_least_loss(tmp_path: Path) -> None:
    run = small(tmp_path, steps=6, evaluation={"every": 1}, optimizer={"learning_rate": 1.0})
    losses = [one["eval/loss"] for one in metrics(run)]
    assert info(run)["best"] == {"sft": 1 + losses.index(min(losses))}


def test_weights_set_the_sets_shares(tmp_path: Path) -> None:
    run = small(tmp_path, steps=30, batch_size=4, packing=False)
    state = load(run.path).checkpoints()[-1].path / "state.json"
    taken = json.loads(state.read_text())["stream"]["taken"]
    assert sum(taken.values()) == 120
    assert 65 <= taken["jsonl:train"] <= 95  # two of three: 80 ± 3 · 5.2


@pytest.mark.parametrize("stage", ["sft", "dpo", "rl"])
def test_epochs_become_steps(stage: str, tmp_path: Path) -> None:
    """run.json has the number; the last step is filled up."""
    if stage == "dpo":
        source = judged.data(tmp_path, judged.ones(10, 1), judged.ones(4, 2))
        table: dict[str, Any] = {"data": source, "batch_size": 4}
        size = 10
    else:
        rows = [{"prompt": f"{at} >", "answer": str(at)} for at in range(12)]
        write_jsonl(tmp_path / "rows.jsonl", rows)
        write_jsonl(tmp_path / "held.jsonl", [{"prompt": "99 >", "answer": "9"}])
        path = {"path": str(tmp_path / "rows.jsonl"), "answer": "answer"}
        table = {"tasks": [{**path, "validation_path": str(tmp_path / "held.jsonl")}]}
        rollout = {"prompts_per_step": 4, "group_size": 2, "max_tokens": 4}
        more = {"algorithm": "grpo", "rollout": rollout, "evaluation": {"prompts": 1}}
        table |= more if stage == "rl" else {"batch_size": 4}
        size = 12
    recipe = judged.recipe({"stage": stage, "num_train_epochs": 0.5, **table})
    run = train(recipe, tmp_path / "run")
    steps = -(-size // 2 // 4)
    assert (info(run)["steps"], len(metrics(run))) == ({stage: steps}, steps)
    opened = Library([tmp_path]).get("run")
    assert status_of(opened, stage).steps == steps
    assert summarise(load(run.path)).stages[0].steps == steps
    assert info(run)["finished"]


def test_steps_and_epochs_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="steps = 4 and num_train_epochs = 2 are two lengths"):
        load_recipe("tiny", ["steps=4", "num_train_epochs=2"])
    with pytest.raises(
        KeelError, match=r"warmup_steps = 4 and warmup_ratio = 0\.5 are two lengths"
    ):
        load_recipe("tiny", ["optimizer.warmup_steps=4", "optimizer.warmup_ratio=0.5"])
    with pytest.raises(KeelError, match=r"steps = 0 trains nothing: set it greater than 0"):
        load_recipe("quickstart", ["sft.steps=0"])
    with pytest.raises(KeelError, match=r"no known end: set steps"):
        train(load_recipe("tiny", ["num_train_epochs=2", "steps=0"]), tmp_path / "run")


def test_conversations_are_passed_as_objects(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"{a} "}, {"role": "assistant", "content": "7"}]}
        for a in range(40)
    ]
    keys: dict[str, Any] = {
        "model": {**judged.MODEL, "chat_template": TURNS},
        "stage": "sft",
        "num_train_epochs": 4,
        "batch_size": 8,
        "optimizer": {"learning_rate": 1e-2},
        "progress": False,
    }
    held = Dataset.from_list([{"messages": one["messages"]} for one in rows[:4]])
    keel.train(None, tmp_path / "a", data=rows[4:], eval_data=rows[:4], **keys)
    keel.train(None, tmp_path / "b", data=Dataset.from_list(rows[4:]), eval_data=held, **keys)
    found = [load(tmp_path / name).metrics("sft") for name in "ab"]
    assert found[0] == found[1]
    assert found[0][-1]["eval/mean_token_accuracy"] == 1.0
