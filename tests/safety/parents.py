"""`python -m tests.safety.parents KIND [MODEL]`: starts what Keel starts, and sets it to work.

Each kind has done a first, quick piece of work when it says that it is at work; the second does not
end.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from keel.platform.signals import catching

ENDLESS = 600.0
LOOP = "import subprocess\nsubprocess.Popen(['sleep', '600'])\nwhile True: pass\n"
Work = Callable[[], Any]


def mathematics(*_: str) -> Work:
    """math-verify, deep in the arithmetic of large numbers."""
    from keel.graders.mathematics import Mathematics

    compare = Mathematics(timeout=ENDLESS).compare
    compare([("x", "x y")] * 2)
    return lambda: compare([("x", rf"$x + {n}^{{9^{{9^{{9}}}}}}$") for n in (8, 9)])


def model(folder: str) -> Work:
    """A reward model in a process of its own, with far too much to judge."""
    from keel.rewards.learned import OutcomeOptions, RemoteModel

    judge = RemoteModel(OutcomeOptions(model=folder, device="cpu", timeout=ENDLESS)).score
    judge(["1+1="], ["2"])
    return lambda: judge(["1+1="] * 20_000, [str(10**9 + n) for n in range(20_000)])


def code(trusted: bool) -> Work:
    """Code that loops, and has started a process; called as a reward is, in passing threads."""
    from keel.config.sources import RewardSource
    from keel.platform.calls import call_with_time_limit
    from keel.rewards.registry import load_reward

    options = {"timeout": ENDLESS, "trusted": trusted, "prepend": "before", "memory_mb": 2048}
    function: Any = load_reward(RewardSource(function="code", options=options)).function

    def score(before: str) -> Any:
        columns = {"completions": ["b = 1"], "tests": ["assert 1"], "before": [before]}
        ignored = dict.fromkeys(("log_extra", "log_summary"), lambda *_: None)
        return call_with_time_limit(lambda: function(**columns, **ignored), ENDLESS)

    assert score("pass\n").value == [1.0]
    return lambda: score(LOOP)


def arithmetic(*_: str) -> Work:
    """A scorer of reasoning-gym that computes, in the sandbox."""
    from keel.data import gym
    from keel.data.tasks import Presentation
    from tests.data.made import completion

    gym.SCORE_PATIENCE = gym.SCORE_SECONDS = ENDLESS
    task = gym.GymTask(gym.PREFIX + "rubiks_cube", 0, Presentation(), {}, gym.GymProcess())
    prompt = task.prompt("train", 0)
    task.score(prompt, completion("F2"))
    return lambda: task.score(prompt, completion("F20000000"))


def environments(*_: str) -> Work:
    """Copies of an environment that loop, and copies that wait."""
    import numpy as np

    from keel.config.control import Environment
    from keel.control.environments import Environments
    from tests.safety.stuck import NAME

    choice = Environment(id=NAME, count=2, vectorization="async")
    idle, busy = Environments(choice, 2, 0), Environments(choice, 2, 1)
    for one in (idle, busy):
        one.begin([0, 1])
        one.step(np.zeros(2, dtype=np.int64))
    busy.idle = idle  # type: ignore[attr-defined]
    return lambda: busy.step(np.ones(2, dtype=np.int64))


KINDS: dict[str, Callable[..., Work]] = {
    "mathematics": mathematics,
    "model": model,
    "sandboxed code": lambda *_: code(False),
    "trusted code": lambda *_: code(True),
    "arithmetic": arithmetic,
    "environments": environments,
}

if __name__ == "__main__":
    work = KINDS[sys.argv[1]](*sys.argv[2:])
    with catching():
        threading.Thread(target=work, daemon=True).start()
        print("at work", flush=True)
        while True:
            time.sleep(0.01)
