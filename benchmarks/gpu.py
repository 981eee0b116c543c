"""One GPU measured in at most 8 minutes, on a machine that need not have Keel installed.

    python -m benchmarks.gpu                                  # from the repository: all parts
    python -m benchmarks.gpu --parts c d --json gpu.json      # some of them
    python -m benchmarks.gpu --wheels ../wheels               # packages that the machine lacks
    python -m benchmarks.gpu --trl-python ../trl/bin/python   # and TRL, part e
    python -m benchmarks.gpu --dry-run                        # every part at toy sizes, on a CPU

Parts: a the tests of tests/gpu; b kernels against references; c a decoded step and its floor; d the
loop; e TRL's loop; f QLoRA at 7B; g profiles of decoding and of a micro-batch; h the quickstart.

Each part is a process of its own (`gpu_parts.py`, which says what is measured and how) with its own
limit: a part that fails or takes too long ends alone. Its rows are in the JSON file as soon as they
are measured. `python -m benchmarks.expected` prints what is expected.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sides import ROOT, row

KILL_AFTER = 5.0
"""Seconds from SIGTERM, on which Keel finishes its step, to SIGKILL."""
POLL = 0.25
LOG = 60
"""Lines of a part's output that are kept, in a file next to the JSON file."""
HEAD = ("part", "what", "asked", "expected", "measured", "measured / expected", "")


class Part(NamedTuple):
    """A process: the letter that chooses it, its function in `gpu_parts.py` with what it is given,
    and its seconds at the most."""

    letter: str
    function: str
    limit: float
    given: Mapping[str, Any] = {}


PARTS = (
    Part("c", "decode", 100),
    Part("d", "loop", 80, {"size": "0.5B"}),
    Part("h", "quickstart", 60),
    Part("g", "profiles", 60),
    Part("d", "loop", 100, {"size": "1.5B"}),
    Part("a", "tests", 120),
    Part("f", "qlora", 90, {"size": "7B"}),
    Part("d", "loop", 70, {"size": "1.5B", "saving": True}),
    Part("b", "kernels", 60),
    Part("e", "trl", 150, {"size": "0.5B"}),
    Part("d", "loop", 150, {"size": "0.5B", "compiled": True}),
)
"""In the order in which they run: if time runs out, the last are cut."""


def main(words: Sequence[str] | None = None) -> int:
    chosen = parsed(words)
    end = time.monotonic() + chosen.seconds
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        environment = around(Path(place), chosen)
        row(*HEAD)
        row(*["---"] * len(HEAD))
        try:
            for number, part in enumerate(PARTS):
                if part.letter not in chosen.parts:
                    continue
                job = {
                    **part.given,
                    "dry": chosen.dry_run,
                    "trl_python": chosen.trl_python,
                    "folder": f"{place}/{number}",
                }
                limit = min(part.limit, end - time.monotonic())
                found = Found(part, rows, chosen.json)
                found.end = run(part, job, limit, environment, found)
                found.close()
        except KeyboardInterrupt:
            rows.append({"part": "", "what": "stopped", "failed": True, "note": "by a signal"})
    failed = [one for one in rows if one.get("failed") or one.get("met") is False]
    print(f"\n{len(rows)} rows, {len(failed)} failed or not as asked: {chosen.json}")
    for one in failed:
        print(f"  {one['part']} {one['what']}: {one.get('note') or one.get('asked')}")
    return 1 if any(one.get("failed") for one in rows) else 0


class Found:
    """The rows of a part, which are in the JSON file, with those before, as soon as they are read.

    A later row of the same name replaces the earlier one.
    """

    def __init__(self, part: Part, rows: list[dict[str, Any]], file: Path) -> None:
        self.part, self.rows, self.file = part, rows, file
        self.end = ""
        """Why the process ended too early."""
        self._before = len(rows)
        self._size = -1
        self._start = time.monotonic()

    def read(self, source: Path) -> None:
        """Take what the process has written so far."""
        text = source.read_bytes() if source.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) == self._size:
            return
        self._size = len(whole)
        own = {one["what"]: one for one in map(json.loads, whole.splitlines())}
        self.rows[self._before :] = [{"part": self.part.letter, **one} for one in own.values()]
        self.save()

    def close(self) -> None:
        """Note how the part ended, and print its rows."""
        given = self.part.given
        name = " ".join([self.part.function, *map(str, given.values())])
        if self.end or len(self.rows) == self._before:
            why = {"what": f"{name}: ended early", "failed": True, "note": self.end or "no rows"}
            self.rows.append({"part": self.part.letter, **why})
        self.save()
        for one in self.rows[self._before :]:
            row(*cells(one))
        print(f"  {name}: {time.monotonic() - self._start:.0f} s", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Replace the file as a whole."""
        new = self.file.with_name(f"{self.file.name}.new")
        new.write_text(json.dumps({"rows": self.rows}, indent=2) + "\n", "utf-8")
        new.replace(self.file)


def cells(one: Mapping[str, Any]) -> list[str]:
    """A row of the table."""

    def number(value: Any) -> str:
        return f"{value:,.4g}" if isinstance(value, float | int) else str(value or "")

    measured, expected = one.get("measured"), one.get("expected")
    both = isinstance(measured, float | int) and isinstance(expected, float | int) and expected
    ratio = f"{measured / expected:.2f}" if both else ""
    met = {True: "as asked", False: "NOT as asked"}.get(one.get("met"), "")  # type: ignore[arg-type]
    note = "; ".join(filter(None, [met, str(one.get("note") or "").replace("|", "/")]))
    asked = str(one.get("asked") or "")
    return [one["part"], one["what"], asked, number(expected), number(measured), ratio, note]


# ---------------------------------------------------------------- processes


def command(part: Part, job: Path, rows: Path) -> list[str]:
    module = "gpu_tests" if part.function == "tests" else "gpu_parts"
    return [sys.executable, "-m", f"benchmarks.{module}", part.function, str(job), str(rows)]


def run(
    part: Part, job: Mapping[str, Any], limit: float, environment: dict[str, str], found: Found
) -> str:
    """Measure a part; why it ended too early, or nothing."""
    if limit <= KILL_AFTER:
        return "not begun: the time was used up"
    folder = Path(job["folder"])
    folder.mkdir()
    given, rows, log = folder / "job.json", folder / "rows.jsonl", folder / "log"
    given.write_text(json.dumps(job), "utf-8")
    with log.open("wb") as output:
        child = subprocess.Popen(
            command(part, given, rows),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stop = time.monotonic() + limit - KILL_AFTER
        late = False
        try:
            while child.poll() is None:
                if not late and time.monotonic() > stop:
                    late = True
                    send(child, signal.SIGTERM)
                if time.monotonic() > stop + KILL_AFTER:
                    break
                found.read(rows)
                time.sleep(POLL)
        finally:
            send(child, signal.SIGKILL)  # what it started, too
            child.wait()
            found.read(rows)
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    with found.file.with_suffix(".log").open("a", encoding="utf-8") as kept:
        kept.write("\n".join([f"---- {part.function} {dict(part.given)}", *lines[-LOG:], ""]))
    if late:
        return f"cut after {limit:.0f} s"
    return "" if child.returncode == 0 else f"status {child.returncode}: {lines[-1:]}"[:300]


def send(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def around(place: Path, chosen: argparse.Namespace) -> dict[str, str]:
    """The environment of a part: Keel from the source tree, with the wheels."""
    found = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if chosen.wheels is not None:
        install(sorted(chosen.wheels.glob("*.whl")), place / "wheels")
        found.insert(0, str(place / "wheels"))
    own = {"PYTHONPATH": os.pathsep.join(found), "HF_HUB_OFFLINE": "1"}
    own |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    own["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR", f"{place}/triton")
    if chosen.dry_run:
        own |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own}


def install(wheels: Sequence[Path], target: Path) -> None:
    """Install wheels into a folder, without what they need; those that do not fit are named."""
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet"]
    pip += ["--upgrade", "--target", str(target)]
    together = [*pip, *map(str, wheels)]
    if not wheels or subprocess.run(together, capture_output=True, check=False).returncode == 0:
        return
    for wheel in wheels:
        done = subprocess.run([*pip, str(wheel)], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{wheel.name} is not installed: {done.stderr.strip().splitlines()[-1:]}")


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    letters = sorted({part.letter for part in PARTS})
    asked.add_argument("--parts", nargs="+", choices=letters, default=letters, metavar="LETTER")
    asked.add_argument("--dry-run", action="store_true", help="toy sizes, on a CPU")
    asked.add_argument("--seconds", type=float, default=480.0, help="of all parts together")
    asked.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE")
    asked.add_argument("--wheels", type=Path, metavar="FOLDER")
    asked.add_argument("--trl-python", default=os.environ.get("KEEL_TRL_PYTHON"), metavar="PATH")
    chosen = asked.parse_args(words)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    if chosen.wheels is not None and not chosen.wheels.is_dir():
        asked.error(f"--wheels {chosen.wheels}: there is no such folder")
    return chosen


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
