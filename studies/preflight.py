"""The figures of docs/check.md: thirteen recipes with one fault each, and three without.

    python -m studies.preflight

A small policy is trained half-way first: it ends its answers, and a third of them are right. Most
recipes start from it. A consequence of a fault (a budget too small for completions is too small for
gold answers) is not a false alarm.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.config.load import load_recipe
from keel.config.model import BuildModel
from keel.models.build import build_model, character_tokenizer
from keel.models.loading import DTYPES, quiet
from keel.preflight.check import Report, check
from keel.training.export import export
from keel.training.run import train
from studies.common import markdown

DIGITS: dict[str, Any] = {"name": "sort_digits", "options": {"min_digits": 2, "max_digits": 4}}
ALPHABET = "0123456789># "
REWARD = '''"""Right where what stands after the last #### is the answer column, as it stands."""


def correct(*, completions, answer):
    stated = [text.rpartition("####")[2].strip() for text in completions]
    return [float(one == gold) for one, gold in zip(stated, answer, strict=True)]
'''
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


@dataclass(frozen=True)
class Case:
    """A recipe, the fault planted in it (None: sound), and what may follow from that fault."""

    name: str
    fault: str | None
    recipe: str | Mapping[str, Any]
    overrides: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A case with the kinds that were found."""

    case: Case
    kinds: tuple[str, ...]
    report: Report

    @property
    def found(self) -> bool:
        return self.case.fault is None or self.case.fault in self.kinds

    @property
    def false_alarms(self) -> tuple[str, ...]:
        return tuple(k for k in self.kinds if k not in (self.case.fault, *self.case.follows))


def cases(folder: Path, policy: str) -> list[Case]:
    """The sixteen; files are made in `folder`, `policy` is the half-trained model's folder."""
    reward, chat = folder / "strict.py", str(folder / "chat")
    reward.write_text(REWARD, encoding="utf-8")
    _chat_model(Path(chat))
    rows = [(digits, "".join(sorted(digits))) for digits in _digits(400)]
    hashes = _file(folder / "hashes.jsonl", [(f"{q}>", f"#### {a}") for q, a in rows])
    long = [(f"{q if at % 3 else q * 12}>", a) for at, (q, a) in enumerate(rows)]
    long_rows = _file(folder / "long.jsonl", long)
    every = _file(folder / "all.jsonl", [(f"{q}>", a) for q, a in rows])
    tail = _file(folder / "validation.jsonl", [(f"{q}>", a) for q, a in rows[:60]])
    leaking = {**every, "validation_path": tail["path"]}
    pairs = [(f"{q}>", a, "#" if at % 3 else "#000000") for at, (q, a) in enumerate(rows)]
    spelled = [([{"role": "user", "content": f"{q}<|im_end|>"}], a, "#") for q, a in rows]
    sft: dict[str, Any] = {"stage": "sft", "steps": 40, "tasks": [every]}
    system = {**DIGITS, "system": "Sort"}
    header = {"name": chat, "chat_template": TEMPLATE.partition("{% if")[0]}
    turns = [{**sft, "tasks": [system]}, _rl_stage(system)]
    return [
        Case("gold-format", "gold-refused",
             _rl(policy, hashes, rewards=_reward(f"{reward}:correct")), (), ("reward-constant",)),
        Case("budget", "truncated", _rl(policy), ("rollout.max_tokens=4",), ("gold-over-budget",)),
        Case("end-of-turn", "end-of-turn-not-stop", {"model": {"name": chat}, "stages": turns}),
        Case("idle-keys", "no-effect", _rl(policy, reference={"reset_every": 5}),
             ("algorithm.preset=dr_grpo", "algorithm.surrogate.high=0.4")),
        Case("long-prompts", "prompts-over-length", _rl(policy, long_rows)),
        Case("cold", "zero-variance", _rl(policy), ("rollout.temperature=0.02",)),
        Case("always-fine", "reward-constant", _rl(policy, rewards=_reward("length", target=40))),
        Case("never-in-tags", "reward-zero", _rl(policy, rewards=_reward("exact_match", tag="b"))),
        Case("leak", "trained-on-validation",
             {"model": {"name": policy}, "stages": [sft, _rl_stage(leaking)]}),
        Case("bfloat16", "frozen-weights", _rl(policy),
             ("model.dtype=bfloat16", "optimizer.learning_rate=1e-6")),
        Case("sft-header", "template-not-prefix", {"model": header, **sft, "tasks": [system]}),
        Case("dpo-special", "special-token-in-message",
             _judged("dpo", chat, folder / "spelled.jsonl", spelled)),
        Case("reward-long", "rows-over-length",
             _judged("reward_model", policy, folder / "pairs.jsonl", pairs), ("max_tokens=10",)),
        Case("quickstart", None, "quickstart"),
        Case("reward-model", None, "reward-model-quickstart"),
        Case("half-trained", None, _rl(policy)),
    ]  # fmt: skip


def half_trained(folder: Path, steps: int = 100) -> str:
    """A small policy that ends its answers and is right now and then; the folder of its model."""
    recipe = {
        "threads": 1,
        "model": {"build": _build()},
        "stage": "sft",
        "steps": steps,
        "batch_size": 64,
        "tasks": [DIGITS],
        "demonstration": "keel.data.tasks:careless",
        "optimizer": {"learning_rate": 5e-3, "schedule": "cosine", "warmup_steps": 10},
    }
    export(train(load_recipe(recipe), folder / "half").path, folder / "policy")
    return str(folder / "policy")


def look(case: Case, runs: bool = True) -> Row:
    """The case's report."""
    report = check(case.recipe, case.overrides, runs=runs)
    return Row(case, tuple(dict.fromkeys(one.kind for one in report.findings)), report)


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    lines = []
    for row in rows:
        kinds, alarms = ", ".join(row.kinds) or "nothing", ", ".join(row.false_alarms) or "none"
        seconds = f"{row.report.seconds:.1f}"
        lines.append((row.case.name, row.case.fault or "nothing", kinds, alarms, seconds))
    return markdown(("recipe", "planted", "found", "false alarms", "seconds"), lines)


# ---------------------------------------------------------------- details


def _rl(policy: str, task: Mapping[str, Any] = DIGITS, **keys: Any) -> dict[str, Any]:
    return {"threads": 1, "model": {"name": policy}, **_rl_stage(task), **keys}


def _rl_stage(task: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "stage": "rl",
        "steps": 50,
        "tasks": [task],
        "rollout": {"prompts_per_step": 32, "group_size": 8, "max_tokens": 10},
        "optimizer": {"learning_rate": 3e-4},
        "evaluation": {"every": 10, "prompts": 50},
    }


def _reward(function: str, **options: Any) -> dict[str, Any]:
    return {"functions": [{"function": function, "options": options}]}


def _jsonl(path: Path, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """The table of a recipe that names the file with these rows."""
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {"name": "jsonl", "path": str(path)}


def _file(path: Path, rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    return {**_jsonl(path, ("prompt", "answer"), rows), "answer": "answer"}


def _judged(
    stage: str, model: str, path: Path, rows: Sequence[tuple[Any, str, str]]
) -> dict[str, Any]:
    data = _jsonl(path, ("prompt", "chosen", "rejected"), rows)
    return {"threads": 1, "model": {"name": model}, "stage": stage, "steps": 20, "data": data}


def _digits(n: int) -> list[str]:
    """Different digit strings of two to four."""
    return [str(10 + (at * 2477) % 9990) for at in range(n)]


def _build() -> dict[str, Any]:
    sizes = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 40}
    return {"family": "llama", "alphabet": ALPHABET, **sizes}


def _chat_model(folder: Path) -> None:
    """A model whose template closes turns with a token that its tokenizer does not end at."""
    letters = "".join(sorted(set("Sortsystemuserassistant")))
    spec = BuildModel(**{**_build(), "alphabet": ALPHABET + letters, "context": 96})
    tokenizer = character_tokenizer(spec.alphabet, spec.context)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    model = build_model(spec, 0, DTYPES["float32"])
    with quiet():
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = [look(case) for case in cases(folder, half_trained(folder))]
        print(table(rows))
        found = sum(row.found for row in rows if row.case.fault)
        alarms = sum(len(row.false_alarms) for row in rows)
        broken = sum(row.case.fault is not None for row in rows)
        print(f"\n{found} of {broken} faults found, {alarms} false alarms in {len(rows)} recipes")


if __name__ == "__main__":
    main()
