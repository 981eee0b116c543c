"""No pickle is loaded or written: what the source may say, and what whole runs do."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.data.tables import read_table
from tests.source_tree import ROOT, Source, sources

PICKLERS = {
    *("pickle", "_pickle", "cPickle", "pickletools", "copyreg", "cloudpickle", "dill", "joblib"),
    *("marshal", "shelve", "dbm", "multiprocessing"),
    *("concurrent.futures.process", "torch.multiprocessing", "torch.distributed.checkpoint"),
}
"""Modules that pickle, or whose pipes do."""
CALLS = {
    *("torch.load", "torch.save", "torch.package", "np.load", "np.save", "np.savez"),
    *("np.savez_compressed", "numpy.load", "numpy.save", "pd.read_pickle", "torch.jit.load"),
}
NAMES = {"ProcessPoolExecutor", "read_pickle", "to_pickle", "_load_from_state"}
ORDERS_ONLY = {
    *(
        "platform/sandbox/inside.py",
        "platform/sandbox/bubblewrap.py",
        "platform/sandbox/subprocesses.py",
    ),
    "workflows/processes.py",
    "engines/vllm/transfer.py",  # handles of this GPU's memory, in the form that vLLM reads
}
"""They serialize what this process tells a child to run; what comes back is text."""
KEYWORDS = {"allow_pickle", "weights_only", "pickle_module"}


def offences(source: Source) -> Iterator[str]:
    """What in a module pickles."""
    for node in ast.walk(source.tree):
        message: list[str] = []
        if isinstance(node, ast.Import):
            message = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            message = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            message += [alias.name for alias in node.names if alias.name in NAMES]
        wrong = [name for name in message if name in NAMES or _within(name, PICKLERS | CALLS)]
        if isinstance(node, ast.Attribute) and ast.unparse(node) in CALLS:
            wrong.append(ast.unparse(node))
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            wrong += [name] if name in NAMES else []
        if isinstance(node, ast.keyword):
            wrong += [node.arg] if node.arg in KEYWORDS else []
            safe = node.arg != "safe_serialization" or ast.unparse(node.value) == "True"
            wrong += [] if safe else ["safe_serialization"]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "import_module"):
            wrong += [a.value for a in node.args if isinstance(a, ast.Constant) and _in(a.value)]
        yield from (f"{source.name}:{getattr(node, 'lineno', 0)} {name}" for name in wrong)


def _within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _in(value: Any) -> bool:
    return isinstance(value, str) and _within(value, PICKLERS)


def test_the_source_pickles_nothing() -> None:
    found = [line for source in sources() for line in offences(source)]
    assert [line for line in found if line.partition(":")[0] not in ORDERS_ONLY] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "from multiprocessing import Pool",
        "import torch.multiprocessing as mp",
        "from concurrent.futures import ProcessPoolExecutor",
        "model.save_pretrained(folder, safe_serialization=False)",
        "__import__('dill')",
    ],
)
def test_the_law_sees_what_it_forbids(text: str) -> None:
    path = ROOT / "src" / "keel" / "made_up.py"
    assert list(offences(Source(path, text, ast.parse(text))))


# ---------------------------------------------------------------- whole runs

ALLOWED = ("jinja2/bccache.py",)
"""jinja2 pickles two constants when it is imported, to compare its cache files with; it loads none,
and Keel has it keep none."""
RECIPE = """
threads = 1
[model.build]
family = "llama"
alphabet = "0123456789>"
hidden_size = 32
layers = 1
heads = 2
context = 64
[model.lora]
rank = 2
[[stages]]
stage = "sft"
steps = 1
batch_size = 2
tasks = [{{ name = "sort_digits" }}]
[[stages]]
stage = "reward_model"
steps = 1
batch_size = 2
data = {{ name = "jsonl", path = {rows!r}, validation_path = {validation!r} }}
[[stages]]
stage = "dpo"
steps = 1
batch_size = 2
data = {{ name = "parquet", path = {table!r}, validation_path = {validation_table!r} }}
[[stages]]
stage = "rl"
algorithm = "ppo"
steps = 2
tasks = [{{ name = "sort_digits" }}]
rollout = {{ prompts_per_step = 2, group_size = 2, max_tokens = 6 }}
evaluation = {{ prompts = 2 }}
checkpoints = {{ every = 1 }}
[stages.rewards]
timeout = 600.0
[[stages.rewards.functions]]
function = "outcome"
options = {{ stage = "reward_model", process = true }}
"""
RUN = """
import shutil, sys
from pathlib import Path
from keel.cli.main import main
recipe, run, out = sys.argv[1:]
def verb(*words):
    assert main([*words]) == 0, words
verb("train", recipe, "--run", run, "--quiet")
newest = sorted(Path(run, "checkpoints").iterdir())[-1]
assert newest.name == "rl-step-000002"
shutil.rmtree(newest)
verb("train", "--resume", "--run", run, "--quiet")
assert newest.is_dir()
verb("export", run, out)
task = ("--task", "sort_digits", "--prompts", "2", "--max-tokens", "6")
verb("eval", run, *task)
verb("eval", out, *task)
"""
ENVIRONMENTS = """
import sys
from keel.cli.main import main
small = ["steps=64", "rollout_steps=16", "environment.count=2"]
command = ["control", "ppo", "--env", "CartPole-v1", "--run", sys.argv[1], "--quiet"]
assert main([*command, *small, "evaluation.episodes=2", "watching.film=false"]) == 0
"""


def watched(folder: Path, code: str, *arguments: str) -> list[dict[str, Any]]:
    """Run code; each use of pickle in it, and in the Pythons that it starts, but the allowed."""
    place = folder / "watching"
    place.mkdir()
    shutil.copy(Path(__file__).with_name("pickle_watch.py"), place / "sitecustomize.py")
    path = os.pathsep.join([str(place), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    log = folder / "pickles.jsonl"
    log.touch()
    environment = {**os.environ, "PYTHONPATH": path, "KEEL_PICKLE_LOG": str(log)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    used = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(used) >= 0
    return [one for one in used if not any(name in one["stack"][0] for name in ALLOWED)]


def test_what_is_watched_for_is_seen(tmp_path: Path) -> None:
    """In the process and in one that it starts; by pickle's own names, numpy's and torch's."""
    code = (
        "import pickle, subprocess, sys\n"
        "import numpy as np\n"
        "np.load(sys.argv[1], allow_pickle=True)\n"
        "pickle.loads(pickle.dumps(print))\n"
        "pickle.Pickler(open(sys.argv[1] + '.out', 'wb')).dump(1)\n"
        "subprocess.run([sys.executable, '-P', '-c', 'import copyreg, pickle; pickle.dumps(1)'])\n"
    )
    path = tmp_path / "array.npy"
    with path.open("wb") as file:
        import numpy as np

        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    seen = [one["what"] for one in watched(tmp_path, code, str(path))]
    assert f"open {path}" in seen
    assert {"load", "loads", "dumps", "Pickler"} <= set(seen)
    assert seen.count("dumps") == 2  # the other one of the child
    assert any(what.startswith("find_class builtins.print") for what in seen)


def pairs(path: Path, first: int) -> str:
    rows = [{"prompt": f"{first + n}>", "chosen": "12", "rejected": "3"} for n in range(4)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.slow
def test_a_run_and_what_comes_of_it(tmp_path: Path) -> None:
    """LoRA; SFT, a reward model, DPO and PPO with that model as a reward in its own process; a
    resume, an export, and evaluations of the run and of the exported folder."""
    text = RECIPE.format(
        rows=pairs(tmp_path / "rows.jsonl", 0),
        validation=pairs(tmp_path / "validation.jsonl", 50),
        table=pairs(tmp_path / "rows.parquet", 0),
        validation_table=pairs(tmp_path / "validation.parquet", 50),
    )
    (tmp_path / "recipe.toml").write_text(text)
    run, out = tmp_path / "run", tmp_path / "out"
    assert watched(tmp_path, RUN, str(tmp_path / "recipe.toml"), str(run), str(out)) == []
    endings = {path.suffix for folder in (run, out) for path in folder.rglob("*") if path.is_file()}
    assert ".safetensors" in endings
    assert not endings & {".bin", ".pt", ".pth", ".pkl", ".pickle", ".npy", ".npz", ".ckpt"}


@pytest.mark.slow
def test_environments_in_processes_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    assert watched(tmp_path, ENVIRONMENTS, str(tmp_path / "run")) == []


# ---------------------------------------------------------------- data


def test_types_that_a_parquet_file_names_are_not_made(tmp_path: Path) -> None:
    """pyarrow once unpickled what a column's metadata held."""
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    evil = pickle.dumps(Evil())
    extension = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": evil,
    }
    field = pa.field("prompt", pa.string(), metadata=extension)
    table = pa.table([pa.array(["a", "b"])], schema=pa.schema([field], metadata={b"x": evil}))
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    assert pq.read_schema(path).field("prompt").metadata  # the file does name it
    rows = read_table("parquet", str(path), {}, "train").rows
    assert [row["prompt"] for row in rows] == ["a", "b"]
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists()  # it would have
