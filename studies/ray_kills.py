"""Processes of a run by Ray, killed at random instants: what differs from a run without.

    python -m studies.ray_kills                    # 30 kills, each kind of process in turn
    python -m studies.ray_kills --kills 9 --seed 1 --level 0

Two trainers, two rollout workers and a reward worker train the recipe `tiny` for some hundred
steps. A process of the next kind is killed every few seconds, at an instant drawn at random, until
there were as many kills as asked for; the last kind is the process that runs the loop, which is
then resumed. In the end every file of the run is compared with that of an undisturbed one, and
each prompt is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from tests.cluster.commands import AHEAD, WORDS, finished, keel, kill, steps, until_step
from tests.soak.killing import differences

KINDS = ("RolloutHost", "RewardHost", "TrainerHost", "loop")
"""As the system shows their processes, and the process that runs the loop."""


def prompts(folder: Path) -> Counter[str]:
    """How often each prompt was trained on."""
    found: Counter[str] = Counter()
    for file in (folder / "rollouts").glob("*.parquet"):
        table = pq.read_table(file, columns=["group", "prompt_id"]).to_pylist()
        found.update(prompt for _, prompt in {(row["group"], row["prompt_id"]) for row in table})
    return found


def disturbed(words: list[str], folder: Path, kills: int, chance: random.Random) -> list[str]:
    """A run whose processes are killed; what was killed, and after which step."""
    killed: list[str] = []
    run = keel(*words, "--run", folder, "--quiet")
    until_step(run, folder, 1)
    while len(killed) < kills:
        kind = KINDS[len(killed) % len(KINDS)]
        time.sleep(chance.uniform(0.0, 3.0))
        assert run.poll() is None, (run.communicate(), killed)
        if kind == "loop":
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
            run = keel("train", "--resume", "--run", folder, "--quiet")
        else:
            kill(run, kind, chance.randrange(1 if kind == "RewardHost" else 2))
        killed.append(f"{kind} after step {steps(folder)}")
        print(killed[-1], flush=True)
        _until_it_goes_on(run, folder)
    finished(run, 3600)
    return killed


def _until_it_goes_on(run: subprocess.Popen[str], folder: Path) -> None:
    """Until the run has taken another step, also where it went back to a checkpoint."""
    end = time.monotonic() + 300
    lowest = steps(folder)
    while steps(folder) <= lowest:
        lowest = min(lowest, steps(folder))
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", type=int, default=2, help="rollout.async_level")
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    keys = (*WORDS, *AHEAD, f"rollout.async_level={arguments.level}", "cluster.processes=2")
    own = (f"steps={arguments.steps}", f"seed={arguments.seed}", "cluster.restarts=1000")
    words = ["train", "tiny", *keys, *own]
    with tempfile.TemporaryDirectory() as place:
        whole, killed = Path(place) / "whole", Path(place) / "killed"
        finished(keel(*words, "--run", whole, "--quiet"), 3600)
        start = time.perf_counter()
        done = disturbed(words, killed, arguments.kills, random.Random(arguments.seed))
        counts = prompts(killed)
        result = {
            "kills": len(done),
            "seconds": round(time.perf_counter() - start, 1),
            "steps": steps(killed),
            "differences": differences(whole, killed),
            "prompts": sum(counts.values()),
            "prompts as often as undisturbed": counts == prompts(whole),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
