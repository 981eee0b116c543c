"""No pickle is loaded or written: what the source may say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

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
LAST = {name.rpartition(".")[2] for name in CALLS}
NAMES = {"ProcessPoolExecutor", "read_pickle", "to_pickle", "_load_from_state"}
ORDERS_ONLY = {
    "platform/inside.py",
    "platform/sandbox.py",
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
        if isinstance(node, ast.Attribute) and node.attr in LAST and ast.unparse(node) in CALLS:
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
