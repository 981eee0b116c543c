"""Judges against a local server, and steps for them; run as a module, one such step."""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.config.sources import RewardSource
from keel.rewards import Scored, Scorer, load_reward
from keel.rewards.judge import Judge, judge
from keel.rewards.judge_questions import JudgeOptions
from keel.rewards.judge_requests import Account, JudgeStore
from keel.rewards.registry import RewardContext
from keel.types import Group, Prompt
from tests.data.made import completion
from tests.rewards.made import flat

REPLIES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("judge.toml").read_text("utf-8"))
"""What judges and their servers write."""


def made(url: str | None, folder: Path | None = None, **options: Any) -> Judge:
    """A judge."""
    keys = {"model": "judge-1", "url": url, "timeout": 30.0, **options}
    return judge(RewardContext(folder=folder), JudgeOptions.model_validate(keys))


def group(answers: Sequence[str], at: int = 0, **columns: Any) -> Group:
    """Answers to the prompt of a number."""
    prompt = Prompt(f"t/train/{at}", f"question {at}", columns, "t")
    return Group(prompt, tuple(completion(text) for text in answers))


def scored(url: str, folder: Path | None, groups: Sequence[Group], **options: Any) -> Scored:
    """A step's verdicts through the whole scorer, by a judge made from a recipe's table."""
    limits = {"timeout": options.pop("call_timeout", 60.0)}
    limits["on_error"] = options.pop("on_error", "stop")
    keys = {"model": "judge-1", "url": url, "timeout": 30.0, **options}
    source = RewardSource(function="judge", options=keys)
    reward = load_reward(source, RewardContext(folder=folder))
    scorer = Scorer([reward], **limits)
    try:
        return scorer(groups, 1)
    finally:
        assert isinstance(reward.function, Judge)
        reward.function.close()


def call(reward: Judge, answers: Sequence[str], **columns: Any) -> list[float | None]:
    """Rewards of answers to one prompt, in an event loop of their own."""

    return asyncio.run(reward(prompts=["q"] * len(answers), completions=answers, **columns))


def account_of(folder: Path) -> Account:
    """What the cache of a run's judge holds."""
    store = JudgeStore(folder / "judge.sqlite")
    found = store.account()
    store.close()
    return found


def forty() -> list[Group]:
    """Ten prompts with four answers each, all different; scores 0 to 9 by length."""
    return [group([chr(97 + at) * n for n in range(4)], at) for at in range(10)]


def main(url: str, folder: str, options: str) -> None:
    """Score forty answers and print what they get; from the last prompt on if asked."""
    keys = json.loads(options)
    groups = forty()[::-1] if keys.pop("backwards", False) else forty()
    found = scored(url, Path(folder), groups, **keys)
    print(json.dumps({"rewards": flat(found), "metrics": dict(found.metrics)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
