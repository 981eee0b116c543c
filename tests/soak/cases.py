"""Short runs of every kind that a run can be, for killing: two to five steps on tiny models.

Checkpoints come every step, every second or every third, and one or two of them are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from keel.algorithms.presets import PRESETS
from keel.config.load import load_recipe
from keel.config.schema import Recipe
from keel.data.splits import split_of
from keel.data.tasks import BaseTask
from keel.runs.reader import Run
from keel.types import Completion, Prompt, Split
from tests.training import judged
from tests.training.small import SHOWN, needs, small

Make = Callable[[Path], Recipe]
"""The recipe, with the data it needs put into a folder."""
Shows = Callable[[Run], bool]

DENSE = "rewards.functions=[{function='place_match'}]"
STEPWISE = "rewards.functions=[{function='tests.training.rewards:digits_in_order'}]"
UNEVEN = "rewards.functions=[{function='tests.training.rewards:records_now_and_then'}]"
COMPOSED = (
    "rewards.functions=[{function='place_match', weight=2.0, normalise='group'},"
    "{function='tests.soak.cases:brevity', clip=[0.2, 0.9]},"
    "{function='tests.soak.cases:is_not_empty', gate_below=0.5, gated_reward=-1.0},"
    "{function='task', name='whole', weight=0.0}]"
)
SPOILED = "algorithm.surrogate={kind='custom', function='tests.soak.cases:spoiled'}"
FAST_RATE = "optimizer.learning_rate=1e-2"
LORA = "model.lora.rank=4"
FEW = (
    "tasks=[{name='tests.soak.cases:few'}]",
    "rewards.functions=[{function='tests.training.rewards:records_now_and_then'}]",
    "rollout.curriculum={low=0.3, high=0.6, revisit=2}",
    "evaluation.prompts=0",
    "steps=5",
)
AHEAD = ("rollout.async_level=1", "algorithm.corrections.kind=truncate")


@dataclass(frozen=True)
class Case:
    """A run to kill; `shows`: whether the uninterrupted run did what the case is for."""

    name: str
    make: Make
    shows: Shows = lambda run: True


def _rl(*overrides: str, shows: Shows = lambda run: True) -> tuple[Make, Shows]:
    return (lambda folder: small(DENSE, "evaluation.prompts=4", *overrides)), shows


def _column(run: Run, name: str) -> list[float]:
    return [row[name] for row in run.metrics() if name in row]


def _varies(name: str) -> Shows:
    return lambda run: len(set(_column(run, name))) > 1


# ---------------------------------------------------------------- reinforcement learning


def _preset(name: str) -> tuple[Make, Shows]:
    algorithm = PRESETS[name].algorithm
    reward = STEPWISE if algorithm.needs_steps else DENSE
    own = (f"algorithm.preset={name}", reward, "evaluation.prompts=4", "steps=3")
    return (lambda folder: small(*own, *needs(name, folder / "teacher"))), lambda run: True


def _kept(run: Run) -> bool:
    """The best of the steps is not the last, so that it is kept for itself."""
    return int(run.info()["best"]["rl"]) < 5 and len(run.checkpoints()) == 2


LOOPS: dict[str, tuple[Make, Shows]] = {
    "ppo-head": _rl("algorithm=ppo", "value.kind=head", "minibatches=2"),
    "ppo-critic-rate": _rl(
        "algorithm=ppo", "value.optimizer={learning_rate=1e-2}", "minibatches=2", "epochs=2"
    ),
    "ppo-lora": _rl("algorithm=ppo", LORA, FAST_RATE),
    "adaptive-ppo": _rl(
        "algorithm=ppo_kl_penalty",
        "algorithm.divergence.adaptive.target=1e-6",
        shows=_varies("beta"),
    ),
    "adaptive-entropy": _rl(
        *("minibatches=2", "algorithm.entropy={target=2.0, delta=0.01, coefficient=0.005}"),
        *("steps=4", FAST_RATE),
        shows=_varies("entropy/coefficient"),
    ),
    "curriculum": _rl(*FEW, shows=lambda run: max(_column(run, "prompts/passed_over")) > 0),
    "curriculum-ahead": _rl(
        *FEW, *AHEAD, shows=lambda run: max(_column(run, "prompts/passed_over")) > 0
    ),
    "dynamic": _rl(
        "algorithm=dapo",
        "rollout.max_refills=2",
        UNEVEN,
        shows=lambda run: max(_column(run, "rollout/refills")) > 0,
    ),
    "reset": _rl("reference.reset_every=2", FAST_RATE, "steps=5"),
    "lora-reset": _rl(LORA, "reference.reset_every=2", "minibatches=2", FAST_RATE, "steps=5"),
    "lora-ppo-reset": _rl(
        "algorithm=ppo", "value.kind=head", LORA, "reference.reset_every=1", FAST_RATE
    ),
    "measured": _rl("algorithm=dr_grpo", "reference={measured=true, reset_every=2}"),
    "recompute": _rl(
        *("model.activation_checkpointing=true", "token_budget=40", "optimizer.warmup_steps=2"),
        *("minibatches=3", "epochs=2", "optimizer.schedule=cosine"),
    ),
    "engine-log-probs": _rl("rollout.old_log_probs=engine", "rollout.mask_truncated=true"),
    "log-linear": _rl(*AHEAD, "rollout.old_log_probs=log_linear", "minibatches=2", FAST_RATE),
    "best": _rl(
        "evaluation={every=1, samples=2, threshold=0.3}",
        "evaluation.prompts=32",
        "optimizer.learning_rate=1e-1",
        "steps=5",
        shows=_kept,
    ),
    "mixed": _rl(
        "tasks=[{name='sort_digits', weight=2.0}, {name='addition', options={digits=1}}]",
        "model.build.alphabet='0123456789>+='",
        "rewards.functions=[{function='tests.soak.cases:brevity'}]",
    ),
    "composed": _rl(COMPOSED, "evaluation.component=whole"),
    "turns": _rl(
        "tasks=[{name='tests.soak.cases:echo'}]",
        "rewards.functions=[{function='tests.soak.cases:brevity'}]",
        "rollout.max_turns=3",
        "rollout.max_tokens=14",
        shows=lambda run: any(not all(row["written"]) for row in run.rollouts(1)),
    ),
    "auxiliary": _rl(
        "tasks=[{name='tests.soak.cases:echo'}]",
        "rewards.functions=[{function='tests.soak.cases:brevity'}]",
        *("rollout.max_turns=3", "rollout.max_tokens=14", "minibatches=2", "epochs=2", SHOWN, LORA),
        "algorithm.auxiliary=[{kind='positive_nll'}, {kind='replies'}, {kind='demonstrations', "
        "final=0.02, decay_steps=3}]",
        shows=_varies("demonstrations/share"),
    ),
    "ahead": _rl(*AHEAD, "minibatches=2", FAST_RATE, "steps=5"),
    "ahead-lora-reset": _rl(
        *AHEAD, COMPOSED, LORA, "reference.reset_every=2", "evaluation.every=1", FAST_RATE
    ),
    "ahead-overlap-refills": _rl(
        *AHEAD,
        "rewards.functions=[{function='tests.soak.cases:mostly_flat'}]",
        "rollout.overlap_rewards=true",
        "rollout.dynamic_sampling=true",
        "rollout.max_refills=2",
        FAST_RATE,
        "steps=5",
        shows=lambda run: max(_column(run, "rollout/refills")) > 0,
    ),
    "tensorboard": _rl("trackers.tensorboard=true"),
    "skip": _rl(
        SPOILED,
        'on_nonfinite="skip"',
        "minibatches=2",
        shows=lambda run: any(run.folder.faults.iterdir()),
    ),
}


MORE: dict[str, tuple[Make, Shows]] = {
    "ziegler": _rl(
        "algorithm=ppo",
        "algorithm.divergence.adaptive={rule='ziegler', target=0.001, horizon=10}",
        shows=_varies("beta"),
    ),
    "value-warm-up": _rl("algorithm=ppo", "value.kind=head", "value.warmup_steps=2"),
    "value-baseline": _rl(
        "algorithm={preset='gspo', advantage={kind='value_baseline'}, value={coefficient=0.1}}"
    ),
    "roles-ahead": _rl(
        "algorithm.preset=rae",
        *AHEAD,
        "algorithm.advantage={role='side', decay=0.9}",
        "tasks=[{name='tests.soak.cases:echo'}]",
        "rewards.functions=[{function='tests.soak.cases:brevity'}]",
        FAST_RATE,
        "steps=5",
    ),
    "states-ahead": _rl(
        "algorithm.preset=gigpo",
        *AHEAD,
        "tasks=[{name='studies.corridor:Corridor'}]",
        "model.build.alphabet='+-0123456'",
        "rewards.functions=[{function='tests.soak.cases:brevity'}]",
        *("rollout.max_turns=4", "rollout.max_tokens=14", "rollout.stop_ids=[2, 3]"),
        FAST_RATE,
    ),
    "bfloat16": _rl(
        "rollout.dtype=bfloat16", "algorithm.corrections.kind=truncate", "minibatches=2"
    ),
}


def _stored(folder: Path) -> Recipe:
    """Epochs over ten rows, of which two are no prompts."""
    digits = ["310", "42", "9157", "63", "820", "15", "77", "604", "98", "21", "345", "60"]
    rows: judged.Rows = [{"prompt": f"{d}>", "answer": "".join(sorted(d))} for d in digits]
    rows[3] = {"answer": "none"}
    rows[7] = {"prompt": "letters", "answer": "none"}
    path = judged.write(folder / "rows.jsonl", rows)
    keys = f"path='{path}', validation_fraction=0.2, answer='answer', bad_rows='quarantine'"
    return small(DENSE, f"tasks=[{{name='jsonl', {keys}}}]", "evaluation.prompts=2", "steps=5")


# ---------------------------------------------------------------- learning from rows

TASK = judged.TASK
ROWS: dict[str, Any] = {
    "steps": 4,
    "batch_size": 7,
    "optimizer": {"learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 1},
    "evaluation": {"every": 3},
}
"""Seven rows of the 24 a step: the last one runs over the end of an epoch."""
ADAPTER: dict[str, Any] = {"base": {"lora": {"rank": 4}}}
SAMPLED = judged.sampled(24, 8, group_size=4, noise=0.1)
IMITATE: dict[str, Any] = {
    "stage": "sft",
    "steps": 3,
    "batch_size": 8,
    "tasks": [TASK],
    "optimizer": {"learning_rate": 5e-3},
}
REINFORCE: dict[str, Any] = {
    "stage": "rl",
    "steps": 3,
    "algorithm": "ppo",
    "tasks": [TASK],
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 5},
    "optimizer": {"learning_rate": 1e-3},
    "evaluation": {"every": 2, "prompts": 8, "component": "hidden_rule"},
    "rewards": {
        "functions": [
            {"function": "outcome", "options": {"stage": "reward_model"}},
            {"function": "task", "name": "hidden_rule", "weight": 0.0},
        ]
    },
}
JUDGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reward-model": ({"stage": "reward_model", "centering": 0.01}, {}),
    "reward-model-lora": ({"stage": "reward_model", **ADAPTER}, {}),
    "reward-model-of-lora-policy": ({"stage": "reward_model"}, {"lora": {"rank": 4}}),
    "labels": ({"stage": "reward_model", "objective": "labels"}, {}),
    "process": ({"stage": "process_reward_model", "separator": " "}, {}),
    "process-lora": ({"stage": "process_reward_model", "separator": " ", **ADAPTER}, {}),
    "dpo": ({"stage": "dpo"}, {}),
    "dpo-ipo-lora": ({"stage": "dpo", "loss": "ipo"}, {"lora": {"rank": 4}}),
    "dpo-kto": ({"stage": "dpo", "loss": "kto"}, {}),
    "dpo-orpo": ({"stage": "dpo", "loss": "orpo"}, {}),
}


def _rows(name: str) -> tuple[Make, Shows]:
    keys, model = JUDGED[name]
    made = judged.traces if keys["stage"] == "process_reward_model" else judged.ones
    of_labels = keys.get("objective") == "labels" or keys.get("loss") == "kto"
    made = judged.labelled if of_labels else made

    def make(folder: Path) -> Recipe:
        source = judged.data(folder, made(24, 1), made(12, 2))
        return judged.recipe({**keys, **ROWS, "data": source}, **model)

    return make, lambda run: True


def _stages(*stages: Mapping[str, Any], **model: Any) -> tuple[Make, Shows]:
    return (lambda folder: judged.recipe(*stages, **model)), lambda run: True


def _twice_judged(folder: Path) -> Recipe:
    """A reward model that a later stage learns on."""
    source = judged.data(folder, judged.ones(24, 1), judged.ones(12, 2))
    first = {"stage": "reward_model", **ROWS, "steps": 2, "data": source}
    second = {**first, "name": "more", "base": {"stage": "reward_model", "lora": {"rank": 4}}}
    return judged.recipe(first, second)


JUDGE: dict[str, Any] = {"stage": "reward_model", **ROWS, "steps": 3, "sampled": SAMPLED}


def _rounds(folder: Path) -> Recipe:
    """Two rounds of labels by people, a reward model that learns on, and PPO from it."""
    people = {"labels": 8, "by": "d_optimal", "noise": 0.1, "price": 0.5}
    judge = {
        **JUDGE,
        "base": {"stage": "reward_model", "replay": 0.5, "lora": {"rank": 4}},
        "sampled": {**SAMPLED, "price": 0.01, "people": people},
    }
    whole = judged.recipe(IMITATE).model_dump(exclude={"stages"}, exclude_none=True)
    repeat = {"stages": ["reward_model", "rl"], "times": 2}
    return load_recipe({**whole, "stages": [IMITATE, judge, REINFORCE], "repeat": repeat})


PIPELINES: dict[str, tuple[Make, Shows]] = {
    "sft": _stages(IMITATE),
    "sft-lora": _stages({**IMITATE, "optimizer": {"learning_rate": 1e-2}}, lora={"rank": 4}),
    "two-stages": (
        lambda folder: small(
            DENSE,
            "steps=3",
            "sft.steps=3",
            "sft.batch_size=8",
            "model.build.hidden_size=32",
            "model.build.layers=2",
            "evaluation={prompts=8, samples=2, every=2}",
            recipe="quickstart",
        ),
        lambda run: True,
    ),
    "judged-again": (_twice_judged, lambda run: True),
    "sampled": _stages(JUDGE),
    "sampled-dpo": _stages(IMITATE, {"stage": "dpo", **ROWS, "sampled": SAMPLED}),
    "three-stages": _stages(IMITATE, JUDGE, REINFORCE),
    "rounds": (_rounds, lambda run: list(run.info()["forgetting"]) == ["reward_model-2"]),
}


def spaced(case: Case, every: int, keep: int) -> Case:
    """The case with checkpoints every so many steps, so many of them kept."""

    def make(folder: Path) -> Recipe:
        recipe = case.make(folder)
        stages = []
        for stage in recipe.stages:
            kept = stage.checkpoints.model_copy(update={"every": every, "keep": keep})
            stages.append(stage.model_copy(update={"checkpoints": kept}))
        return recipe.model_copy(update={"stages": tuple(stages)})

    return Case(case.name, make, case.shows)


TURNS = (
    "{% for m in messages %}{{ '>' if m.role == 'assistant' }}{{ m.content }}{{ eos_token }}"
    "{% endfor %}{{ '>' if add_generation_prompt }}"
)


def imitated(folder: Path, **keys: Any) -> dict[str, Any]:
    """A stage that imitates conversations and texts, in blocks; `options` are of the first set."""
    talks = [
        [("user", f"{at} {7 * at}"), ("assistant", f"{8 * at}"), ("user", "0"), ("assistant", "0")]
        for at in range(30)
    ]
    rows = [
        {"messages": [{"role": r, "content": c} for r, c in talk[: 2 + at % 2 * 2]]}
        for at, talk in enumerate(talks)
    ]
    (folder / "talks").mkdir()
    judged.write(folder / "talks" / "train.jsonl", rows)
    texts = judged.write(folder / "texts.jsonl", [{"text": f"{at} > {at}"} for at in range(12)])
    return {
        "stage": "sft",
        "batch_size": 3,
        "packing": True,
        "optimizer": {"learning_rate": 5e-3, "warmup_ratio": 0.5},
        "evaluation": {"every": 2},
        "data": [{"path": str(folder / "talks" / "train.jsonl"), "weight": 2.0}, {"path": texts}],
        **keys,
    }


def _imitated(folder: Path) -> Recipe:
    stage = imitated(folder, num_train_epochs=0.8)
    return judged.recipe(stage, chat_template=TURNS)


def _streamed(folder: Path) -> Recipe:
    """Two passes and more over a streamed set, of which one window is packed at a time, and with
    rows that cannot be read."""
    options = {"streaming": True, "split": "train[:17]"}
    source = {"name": "datasets", "path": str(folder / "talks"), "options": options}
    source |= {"bad_rows": "quarantine"}
    stage = imitated(folder, steps=4, data=[source], batch_size=2)
    rows = (folder / "talks" / "train.jsonl").read_text().splitlines()
    rows[5:5] = ['{"messages": []}'] * 2
    (folder / "talks" / "train.jsonl").write_text("\n".join(rows) + "\n")
    return judged.recipe(stage, chat_template=TURNS)


def _every() -> dict[str, Case]:
    parts = {
        **{name: _preset(name) for name in PRESETS},
        **LOOPS,
        "stored": (_stored, lambda run: any(run.folder.quarantine.iterdir())),
        **{name: _rows(name) for name in JUDGED},
        **PIPELINES,
        **MORE,
        "sft-data": (_imitated, lambda run: run.info()["steps"]["sft"] == len(run.metrics())),
        "sft-streamed": (_streamed, lambda run: any(run.folder.quarantine.iterdir())),
    }
    spacing = itertools.cycle(itertools.product((2, 1, 3), (1, 2)))
    every = {name: spaced(Case(name, *part), *next(spacing)) for name, part in parts.items()}
    every["best"] = spaced(Case("best", *LOOPS["best"]), 2, 1)
    return every


CASES: dict[str, Case] = _every()


# ---------------------------------------------------------------- what the recipes name


def brevity(completions: list[str]) -> list[float]:
    """More for fewer characters."""
    return [1.0 / (1 + len(text)) for text in completions]


def is_not_empty(completions: list[str]) -> list[float]:
    """1 for an answer that is not empty."""
    return [float(bool(text)) for text in completions]


def mostly_flat(completion_ids: list[list[int]], log_extra: Any) -> list[float]:
    """Leaves most groups without variance; records a whole array."""
    log_extra("halves", [np.array([len(ids), 0.5]) for ids in completion_ids])
    return [float(len(ids) < 3) for ids in completion_ids]


def spoiled(log_ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """NaN in the mini-batches whose tokens are a multiple of three."""
    out = log_ratio_N.exp() * advantage_N
    return out * math.nan if len(log_ratio_N) % 3 == 0 else out


class Echo(BaseTask):
    """Replies `9>` to the policy, so long as there are turns left."""

    name = "echo"

    def prompt(self, split: Split, index: int) -> Prompt:
        n = next(n for n in itertools.count(7 * index) if split_of(f"{n}>") == split)
        return Prompt(f"echo/{split}/{index}", f"{n}>", {"side": "ab"[index % 2]}, self.name)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float("9" in completion.text)

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return "9>"


def few() -> list[dict[str, str]]:
    """Prompts that come again soon."""
    return [{"prompt": f"{9 - i}{i}>", "answer": f"{i}{9 - i}"} for i in range(10)]


def echo() -> Echo:
    return Echo()
