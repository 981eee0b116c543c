"""The pictures of docs/howto/view.md, taken of `keel view` in headless Chromium.

    python -m studies.view_pictures RUNS --run ppo/seed-0 --other grpo/seed-0 --step 20

RUNS is a folder of runs, as of `keel compare`; `--run` and `--other` are two of them.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH = 1180


def pages(run: str, other: str, step: int, text: str, **_: Any) -> dict[str, tuple[str, int]]:
    """By picture: the address and the height in pixels. `text` is in many completions."""
    one = [("run", run)]
    shown = [("colour", "advantages"), ("token", 2)]  # of the group that differs most
    tokens = urlencode([("run", other), ("step", step), *shown])
    overlay = urlencode([*one, ("run", other), ("overlay", "algorithms"), ("smooth", 9)])
    return {
        "view-curves": (f"/curves?{urlencode([*one, ('smooth', 9)])}", 980),
        "view-tokens": (f"/rollouts?{tokens}", 760),
        "view-search": (f"/rollouts?{urlencode([*one, ('max_reward', 0), ('text', text)])}", 620),
        "view-overlay": (f"/curves?{overlay}", 820),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--run", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--text", default="9", help="to search for")
    parser.add_argument("--out", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "keel", "view", str(arguments.runs), "--no-browser"]
    with (
        subprocess.Popen([*command, "--port", "8799"], stdout=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        assert server.stdout is not None
        found = re.search(r"http://[\d.]+:\d+", server.stdout.readline())
        assert found is not None
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (address, height) in pages(**vars(arguments)).items():
            page = browser.new_page(viewport={"width": WIDTH, "height": height})
            page.goto(found[0] + address, wait_until="networkidle", timeout=120_000)
            ready = "canvas" if "/curves" in address else "text=full colour"
            page.wait_for_selector(ready, timeout=120_000)
            page.wait_for_timeout(5_000)  # charts are animated
            page.screenshot(path=arguments.out / f"{name}.png")
            page.close()
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main()
