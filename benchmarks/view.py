"""How fast `keel view` is on a long run: 10,000 steps and 200,000 rollouts.

    python -m benchmarks.view [--steps 10000] [--rollouts 20] [--folder DIR]

Writes such a run with Keel's own writer, serves it, opens it in headless Chromium and prints: first
contentful paint and curves plotted (median of five loads), time to index, search over all rollouts
(median and worst of ten texts, through the page), and the server's peak memory. Needs Playwright
and a Chromium (CHROMIUM, default /usr/bin/chromium).
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from playwright.sync_api import Page, sync_playwright

from keel.runs.layout import RunFolder
from keel.runs.rollouts import RolloutRow
from keel.runs.writer import Recorder

WORDS = [f"{a}{b}{c}" for a in "bdfglmnprst" for b in "aeiou" for c in ("n", "r", "lt", "sk")]
RECIPE = 'name = "long"\nseed = 0\n\n[[stages]]\nstage = "rl"\nname = "rl"\nsteps = {}\n'
TOKENS = 40


def write_run(path: Path, steps: int, rollouts: int) -> None:
    """A run with random figures and random words."""
    folder = RunFolder.create(path, RECIPE.format(steps))
    rng = np.random.default_rng(0)
    names = ["reward", "reward_std", "frac_reward_zero_std", "kl", "kl/old", "entropy", "grad_norm"]
    names += ["completions/mean_length", "completions/clipped_ratio", "clip_ratio/region_mean"]
    names += [f"rewards/part{i}/{end}" for i in range(3) for end in ("mean", "std")]
    names += [f"more/metric{i}" for i in range(24)]
    with Recorder(folder) as recorder:
        for step in range(1, steps + 1):
            values = dict(zip(names, rng.random(len(names)).tolist(), strict=True))
            recorder.metrics(0, step, values)
            recorder.timings(0, step, {"total": 1.0})
            recorder.rollouts(0, step, [_row(rng, step, at) for at in range(rollouts)])


def _row(rng: np.random.Generator, step: int, at: int) -> RolloutRow:
    words = rng.choice(WORDS, TOKENS)
    values = rng.random((4, TOKENS)).astype(np.float32)
    return RolloutRow(
        group=at // 4,
        prompt_id=f"task/train/{(step * 7 + at // 4) % 5000}",
        task="task",
        prompt="What is " + " ".join(rng.choice(WORDS, 8)) + "?",
        completion=" ".join(words),
        tokens=np.arange(TOKENS),
        pieces=tuple(f" {word}" for word in words),
        log_probs=-values[0],
        written=np.ones(TOKENS, bool),
        finish="eos",
        reward=float(rng.integers(0, 2)),
        values={"advantages": values[1], "entropies": values[2], "loss/policy": values[3]},
        components={"correct": 1.0},
    )


def measure(folder: Path) -> dict[str, float]:
    """Serve the run, and ask it through a browser."""
    command = [sys.executable, "-m", "keel", "view", str(folder), "--no-browser"]
    start = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    found = re.search(r"(http://\S+?)/curves", server.stdout.readline())
    assert found is not None
    out = {"server ready (s)": time.perf_counter() - start}
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"),
                args=["--no-sandbox"],
            )
            page = browser.new_page()
            out |= _loads(page, found[1])
            out |= _searches(page, found[1])
            browser.close()
        status = Path(f"/proc/{server.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+)", status)
        assert peak is not None
        out["peak memory of the server (MiB)"] = int(peak[1]) / 1024
    finally:
        server.terminate()
        server.wait()
    return out


def _loads(page: Page, url: str) -> dict[str, float]:
    paints, plotted = [], []
    for _ in range(5):
        start = time.perf_counter()
        page.goto(f"{url}/curves")
        page.wait_for_selector("canvas")
        plotted.append(time.perf_counter() - start)
        entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        paints.append(page.evaluate(entry) / 1000)
    return {
        "first paint, first load (s)": paints[0],
        "first paint, median (s)": statistics.median(paints),
        "curves plotted, median (s)": statistics.median(plotted),
    }


def _searches(page: Page, url: str) -> dict[str, float]:
    page.goto(f"{url}/rollouts")
    page.wait_for_selector("[data-testid=search]")
    times = []
    for text in [f"{a} {b}" for a, b in zip(WORDS[:11], WORDS[40:51], strict=True)]:
        page.fill("[data-testid=search]", text)
        before = page.locator("[data-testid=hits]").all_inner_texts()
        start = time.perf_counter()
        page.click("[data-testid=go]")
        page.wait_for_function(
            "old => { const e = document.querySelector('[data-testid=hits]');"
            " return e && e.innerText !== old }",
            arg=before[0] if before else "",
            timeout=600_000,
            polling=5,
        )
        times.append(time.perf_counter() - start)
    return {
        "first search, index made (s)": times[0],
        "search, median (s)": statistics.median(times[1:]),
        "search, worst (s)": max(times[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rollouts", type=int, default=20, help="a step")
    parser.add_argument(
        "--folder", type=Path, help="kept, and used again; default: a temporary one"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "long"
        if not folder.exists():
            write_run(folder, arguments.steps, arguments.rollouts)
        for again in ("index made", "index on disk"):
            print(f"{again}:")
            for name, value in measure(folder).items():
                print(f"  {name:35} {value:8.2f}")


if __name__ == "__main__":
    main()
