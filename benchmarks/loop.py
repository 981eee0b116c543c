"""The whole GRPO loop of Keel and of TRL: tokens generated, scored and trained per second.

    python -m venv ../trl && ../trl/bin/pip install torch==2.13.0 trl==1.16 transformers==5.23.0
    python benchmarks/loop.py --trl-python ../trl/bin/python        # prints a Markdown table
    python benchmarks/loop.py --rows ragged-8-short --repeats 5 --json loop.json
    python benchmarks/loop.py --keel-only --keel token_budget=4096  # another setting of Keel's

A case (--rows) is LENGTHS-GROUP-PROMPTS: 64 completions per step, in groups of GROUP, of a fp32
Llama with 4.8 M random weights (256 wide, 6 layers, one token per character). `ragged` lengths are
geometric with mean 60 and at most 200: the logit of the end is the same at every position, and the
learning rate (1e-7) changes nothing. `equal` ones are 60 tokens each. `short` prompts have 16 to 24
tokens, `long` ones 450 to 550. With the suffix -bf16, Keel samples in bfloat16, with the truncated
correction; TRL stays in fp32.

With --bf16 each row is measured in bfloat16 too, in the same alternating run: Keel's updates
(model.autocast = "bfloat16") and TRL's own (bf16 = True). It can pay only where the processor has
products of bfloat16, which the first line of the output says.

Both load one folder and use the same prompts, reward, seed, AdamW and GRPO: β 0 (TRL's default; no
reference model), ε 0.2, group-relative rewards, one pass, gradient norm 1. Other settings are each
library's defaults, except TRL's micro-batches (--trl-micro): 16 completions, which is faster than
64 and takes less than half the memory. Transformers' continuous batching (--trl-continuous) runs on
a CPU, slower than plain `generate`; --tune measures each combination.

Every measurement is a separate process, alternating between the two. A step's seconds run from the
end of the previous step; the first step of a process does not count. Reported are medians over the
steps of all measurements, and of the processes' peak resident memory (VmHWM, Linux). The two sample
different completions of one distribution, so mean lengths are reported as well.
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
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

KEEL, TRL = (Path(__file__).with_name(f"loop_{side}.py") for side in ("keel", "trl"))
MAIN = ("ragged-8-short", "equal-8-short")
"""The rows that the two ratios are of."""
MORE = (
    "ragged-8-short-bf16",
    "ragged-4-short",
    "ragged-16-short",
    "ragged-64-short",
    "ragged-8-long",
    "equal-8-long",
)
SEED = 0
LEARNING_RATE = 1e-7
ENVIRONMENT = (
    "name a Python that has TRL, by --trl-python or KEEL_TRL_PYTHON; one is made by: "
    "python -m venv X; X/bin/pip install torch==2.13.0 trl==1.16 transformers==5.23.0"
)
BF16 = "-bf16"
"""Ends the name of a side that updates in bfloat16."""
MIB = 2**20


@dataclass(frozen=True)
class Size:
    """How large the model, the step and the texts are; lengths of prompts from … to …"""

    hidden: int = 256
    layers: int = 6
    completions: int = 64
    mean: int = 60
    most: int = 200
    short: tuple[int, int] = (16, 24)
    long: tuple[int, int] = (450, 550)


SMOKE = Size(32, 1, 8, 6, 20, (16, 24), (40, 50))


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    lengths: str
    group: int
    prompts: str
    rollouts: str = "fp32"

    @property
    def name(self) -> str:
        name = f"{self.lengths}-{self.group}-{self.prompts}"
        return name if self.rollouts == "fp32" else f"{name}-{self.rollouts}"

    def keel(self, bf16: bool) -> tuple[str, ...]:
        """Keys of the recipe that the row sets; `bf16`: its updates are in bfloat16."""
        rollouts = ("rollout.dtype=bfloat16",) if self.rollouts == "bf16" else ()
        updates = ("model.autocast=bfloat16",) if bf16 else ()
        keys = rollouts + updates
        return (*keys, "algorithm.correction.kind=truncate") if keys else ()


def case_of(name: str) -> Case:
    """The row of a name; raises argparse's error for one that is none."""
    plain, _, rollouts = name.partition("-bf16")
    lengths, group, prompts = (*plain.split("-"), "", "")[:3]
    known = lengths in ("ragged", "equal") and prompts in ("short", "long") and not rollouts
    if not known or not group.isdigit() or int(group) < 2 or plain.count("-") != 2:
        raise argparse.ArgumentTypeError(
            f"'{name}' is not a case: give ragged-8-short, equal-64-long-bf16 or the like"
        )
    return Case(lengths, int(group), prompts, "fp32" if name == plain else "bf16")


@dataclass(frozen=True)
class Bench:
    """What the measurements of one run of this script share."""

    folder: Path
    size: Size
    steps: int
    threads: int
    trl_python: str | None
    micro: int
    continuous: bool
    keel: tuple[str, ...] = ()
    bf16: bool = False

    @property
    def sides(self) -> tuple[str, ...]:
        """What is measured of each row, in this order and back."""
        plain = ("keel",) if self.trl_python is None else ("keel", "trl")
        return (*plain, *(f"{side}{BF16}" for side in plain)) if self.bf16 else plain

    def job(self, case: Case, bf16: bool = False) -> dict[str, Any]:
        """The settings of a process."""
        size = self.size
        return {
            "model": str(self.folder / case.lengths),
            "prompts": str(self.folder / f"{case.prompts}.jsonl"),
            "validation": str(self.folder / "validation.jsonl"),
            "folder": str(self.folder / "written"),
            "seed": SEED,
            "learning_rate": LEARNING_RATE,
            "group": case.group,
            "completions": size.completions,
            "max_tokens": size.most if case.lengths == "ragged" else size.mean,
            "steps": self.steps,
            "threads": self.threads,
            "micro": min(self.micro, size.completions),
            "continuous": self.continuous,
            "bf16": bf16,
            "keel": [*case.keel(bf16), *self.keel],
        }

    def measure(self, side: str, case: Case) -> dict[str, Any]:
        """One measurement of a side, in a fresh process."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            job, result = Path(place) / "job.json", Path(place) / "result.json"
            settings = {**self.job(case, side.endswith(BF16)), "folder": place + "/run"}
            job.write_text(json.dumps(settings), "utf-8")
            if side.startswith("trl"):
                assert self.trl_python is not None
                command = [self.trl_python, str(TRL), str(job), str(result)]
            else:
                command = [sys.executable, str(KEEL), "train", str(job), str(result)]
            call(command, self.threads)
            found: dict[str, Any] = json.loads(result.read_text("utf-8"))
        return found


def call(command: list[str], threads: int) -> None:
    """Run a child; its last words where it fails."""
    around = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    around["TOKENIZERS_PARALLELISM"] = "false"
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **around}
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{(done.stderr or done.stdout)[-3000:]}")


# ---------------------------------------------------------------- figures


def summed(runs: list[dict[str, Any]], completions: int) -> dict[str, Any]:
    """Medians of a side over its measurements; the first step of each is left out."""
    steps = [
        (tokens, seconds, phases)
        for one in runs
        for tokens, seconds, phases in list(
            zip(one["tokens"], one["seconds"], one["phases"], strict=True)
        )[1:]
    ]
    rates = [tokens / seconds for tokens, seconds, _ in steps]
    return {
        "tokens_per_second": statistics.median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "seconds": statistics.median(seconds for _, seconds, _ in steps),
        "cpu_seconds": statistics.median(second for one in runs for second in one["cpu"][1:]),
        "tokens_per_cpu_second": statistics.median(
            tokens / seconds
            for one in runs
            for tokens, seconds in list(zip(one["tokens"], one["cpu"], strict=True))[1:]
        ),
        "phases": {
            key: statistics.median(phases[key] for _, _, phases in steps) for key in steps[0][2]
        },
        "mean_length": statistics.mean(tokens / completions for tokens, _, _ in steps),
        "peak": statistics.median(one["peak"] for one in runs),
        "peak_above_import": statistics.median(one["peak"] - one["imported"] for one in runs),
        "steps": len(steps),
        "runs": runs,
    }


def compare(bench: Bench, case: Case, repeats: int) -> dict[str, Any]:
    """A case's figures, from alternating measurements."""
    sides = bench.sides
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for repeat in range(repeats):
        for side in sides[:: 1 if repeat % 2 == 0 else -1]:
            runs[side].append(bench.measure(side, case))
    found: dict[str, Any] = {"row": case.name, **asdict(case), "repeats": repeats}
    found |= {side: summed(some, bench.size.completions) for side, some in runs.items()}
    if "trl" in found:
        keel, trl = found["keel"], found["trl"]
        found["ratio"] = keel["tokens_per_second"] / trl["tokens_per_second"]
        found["memory_ratio"] = keel["peak"] / trl["peak"]
        if bench.bf16:
            fast = found[f"keel{BF16}"]["tokens_per_second"]
            found["bf16_ratio"] = fast / found[f"trl{BF16}"]["tokens_per_second"]
            found["bf16_to_fp32_ratio"] = fast / trl["tokens_per_second"]
    return found


HEAD = (
    "| lengths | group | prompts | side | tokens/s | ratio | s a step | of which | mean length "
    "| tokens per CPU s | peak, MiB | above imports | memory ratio |\n" + "|---" * 13 + "|"
)


def lines(row: dict[str, Any]) -> str:
    """A row for each side."""
    out = []
    for side in ("keel", "trl", f"keel{BF16}", f"trl{BF16}"):
        if side not in row:
            continue
        found = row[side]
        ours = side == "keel" and "ratio" in row
        ratio = f"{row['ratio']:.2f}" if ours else ""
        if side == f"keel{BF16}" and "bf16_ratio" in row:
            ratio = f"{row['bf16_ratio']:.2f} (to fp32 {row['bf16_to_fp32_ratio']:.2f})"
        memory = f"{row['memory_ratio']:.2f}" if ours else ""
        name = "TRL" if side.startswith("trl") else "Keel"
        name += ", bf16 rollouts" * (row["rollouts"] == "bf16" and name == "Keel")
        name += ", bf16 updates" * side.endswith(BF16)
        phases = ", ".join(f"{k} {v:.2f}" for k, v in found["phases"].items() if v >= 0.005)
        out.append(
            f"| {row['lengths']} | {row['group']} | {row['prompts']} | {name} "
            f"| {found['tokens_per_second']:,.0f} | {ratio} | {found['seconds']:.2f} | {phases} "
            f"| {found['mean_length']:.1f} | {found['tokens_per_cpu_second']:,.0f} "
            f"| {found['peak'] / MIB:,.0f} | {found['peak_above_import'] / MIB:,.0f} | {memory} |"
        )
    return "\n".join(out)


def tune(bench: Bench) -> list[dict[str, Any]]:
    """TRL on the first case with each of its settings, one measurement each."""
    rows = []
    case, completions = case_of(MAIN[0]), bench.size.completions
    print("| micro-batch | continuous batching | tokens/s | s a step | generate | peak, MiB |")
    print("|---" * 6 + "|")
    for continuous, micro in product((False, True), (64, 32, 16, 8)):
        tried = replace(bench, micro=micro, continuous=continuous)
        found = summed([tried.measure("trl", case)], completions)
        rows.append({"micro": micro, "continuous": continuous, **found})
        print(
            f"| {micro} | {continuous} | {found['tokens_per_second']:,.0f} "
            f"| {found['seconds']:.2f} | {found['phases']['generate']:.2f} "
            f"| {found['peak'] / MIB:,.0f} |",
            flush=True,
        )
    return rows


def bf16_products() -> list[str]:
    """The processor's instructions that multiply bfloat16 (Linux on x86-64); none in most."""
    words = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    return sorted(words & {"avx512_bf16", "amx_bf16"})


def versions(python: str) -> dict[str, str]:
    """What an environment has installed, of what matters here."""
    code = (
        "import importlib.metadata as m, json, platform\n"
        "names = {d.metadata['Name'].lower() for d in m.distributions() if d.metadata['Name']}\n"
        "wanted = ('keel-rl', 'trl', 'torch', 'transformers', 'accelerate')\n"
        "print(json.dumps({'python': platform.python_version(), "
        "**{n: m.version(n) for n in wanted if n in names}}))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"{python} does not run ({error}): {ENVIRONMENT}") from None
    if done.returncode:
        raise SystemExit(f"{python} does not run: {ENVIRONMENT}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- the command


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", nargs="+", metavar="ROW", type=case_of, help="as ragged-8-short")
    parser.add_argument("--repeats", type=int, default=3, help="of the first two rows; others 1")
    parser.add_argument(
        "--steps", type=int, default=4, help="of a measurement, the first uncounted"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-python", default=os.environ.get("KEEL_TRL_PYTHON"), metavar="PATH")
    parser.add_argument("--trl-micro", type=int, default=16, metavar="N")
    parser.add_argument("--trl-continuous", action="store_true")
    parser.add_argument("--tune", action="store_true", help="try TRL's settings, and no more")
    parser.add_argument("--keel", nargs="+", default=[], metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--bf16", action="store_true", help="each row also with bf16 updates")
    parser.add_argument("--keel-only", action="store_true", help="leave TRL out")
    parser.add_argument("--smoke", action="store_true", help="two tiny rows, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.repeats < 1:
        parser.error("--steps has to be 2 or more, --repeats 1 or more")
    completions = SMOKE.completions if arguments.smoke else Size.completions
    if any(completions % case.group for case in arguments.rows or ()):
        parser.error(f"--rows: a step has {completions} completions, whole groups of them")
    if arguments.trl_micro < 1 or completions % min(arguments.trl_micro, completions):
        parser.error(f"--trl-micro {arguments.trl_micro}: give a divisor of {completions}")
    if not arguments.keel_only and arguments.trl_python is None:
        parser.error(ENVIRONMENT + "; or leave TRL out: --keel-only")
    return arguments


def report(bench: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What goes into the file."""
    named = {row["row"]: row for row in rows}
    ragged, equal = (named.get(name, {}) for name in MAIN)
    job = bench.job(case_of(MAIN[0]))
    kept = ("seed", "learning_rate", "steps", "threads", "micro", "continuous", "keel")
    return {
        "ragged_ratio": ragged.get("ratio"),
        "ragged_bf16_ratio": ragged.get("bf16_ratio"),
        "ragged_bf16_to_fp32_ratio": ragged.get("bf16_to_fp32_ratio"),
        "equal_ratio": equal.get("ratio"),
        "memory_ratio": ragged.get("memory_ratio"),
        "rows": rows,
        "settings": {**asdict(bench.size), **{key: job[key] for key in kept}},
        "versions": {
            "keel": versions(sys.executable),
            "trl": None if bench.trl_python is None else versions(bench.trl_python),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "bf16_products": bf16_products(),
        },
    }


def main() -> None:
    arguments = parsed()
    python = None if arguments.keel_only else arguments.trl_python
    heading = "TRL left out" if python is None else f"TRL {versions(python).get('trl')}"
    if heading.endswith("None"):
        raise SystemExit(f"{python} has no TRL: {ENVIRONMENT}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(
            folder=Path(place),
            size=SMOKE if arguments.smoke else Size(),
            steps=min(arguments.steps, 2) if arguments.smoke else arguments.steps,
            threads=arguments.threads,
            trl_python=python,
            micro=arguments.trl_micro,
            continuous=arguments.trl_continuous,
            keel=tuple(arguments.keel),
            bf16=arguments.bf16,
        )
        size = bench.folder / "size.json"
        size.write_text(json.dumps(asdict(bench.size)), "utf-8")
        call([sys.executable, str(KEEL), "prepare", str(size), place], bench.threads)
        products = " and ".join(bf16_products()) or "none"
        print(f"{os.cpu_count()} cores, {bench.threads} threads, {heading}")
        print(f"bf16 products of the processor: {products}\n", flush=True)
        if arguments.tune:
            tune(bench)
            return
        print(HEAD, flush=True)
        names = MAIN if arguments.smoke else (*MAIN, *MORE)
        for case in arguments.rows or [case_of(name) for name in names]:
            chosen = arguments.rows is not None or case.name in MAIN
            repeats = 1 if arguments.smoke or not chosen else arguments.repeats
            rows.append(compare(bench, case, repeats))
            print(lines(rows[-1]), flush=True)
        written = report(bench, rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
