"""The structure of the package: sizes, names, imports."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

from keel.algorithms.presets import PRESETS
from keel.engines.registry import ENGINES
from tests.source_tree import ROOT, functions, sources

FILE, OBJECTIVE_FILE, FUNCTION = 600, 250, 80
TORCH_FREE = (
    *("keel", "keel.types", "keel.graders.numbers", "keel.algorithms.explain", "keel.config.load"),
    *("keel.analysis.statistics", "keel.analysis.progress", "keel.runs.reader", "keel.cli.main"),
    *("keel.runs.diff", "keel.cli.runs", "keel.python", "keel.cli.prefs"),
)
HELP_SECONDS = 0.3


def test_files_and_functions_are_small() -> None:
    long: list[str] = []
    for source in sources():
        limit = OBJECTIVE_FILE if source.package == "objective" else FILE
        count = source.text.count("\n")
        long += [f"{source.name}: {count} lines"] * (count > limit)
        long += [f"{source.name}:{f} {n} lines" for f, n in functions(source.tree) if n > FUNCTION]
    assert long == []


def test_class_names_are_unique() -> None:
    places = Counter(
        node.name
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in places.items() if count > 1] == []


def test_every_file_has_a_docstring() -> None:
    assert [s.name for s in sources() if not s.line or "TODO" in s.line] == []


def test_banned_words() -> None:
    words = re.compile(r"\b(mend(s|ed|ing)?|anew|told|nobody|beside|spoke)\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("src", "tests", "docs", "benchmarks", "studies", "examples", ".")
        for pattern in ("*.py", "*.md", "*.c", "*.toml")
        for path in (
            (ROOT / folder).glob(pattern) if folder == "." else (ROOT / folder).rglob(pattern)
        )
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if words.search(line)
    ]
    assert found == []


KINDS = {
    "cispo": {"algorithms", "learn", "analysis"},
    "sapo": {"algorithms", "learn"},
    **{kind: {"algorithms"} for kind in ("ppo", "fipo", "topr", "real", "kl_cov", "online_dpo")},
    **{kind: {"algorithms", "config"} for kind in ("vespo", "clip_cov")},
}
"""Kinds of choices that share a word with a preset, and where they are looked up."""


def test_presets_are_named_in_one_place() -> None:
    """Code never asks an algorithm its name: no string in it is a preset's."""
    named: list[str] = []
    allowed = {"presets.py", "variants.py"}
    allowed = {f"algorithms/{name}" for name in allowed} | {"config/layers.py", "config/schema.py"}
    for source in sources():
        if source.name in allowed:
            continue
        docstrings = {
            id(node.body[0].value)  # type: ignore[attr-defined]
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.Constant) or id(node) in docstrings:
                continue
            if node.value in set(PRESETS) - set(KINDS):
                named.append(f"{source.name}:{node.lineno} {node.value!r}")
    assert named == []


def test_presets_named_as_kinds_are_used_as_kinds() -> None:
    """The exceptions above stand only where a kind is looked up."""
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and node.value in KINDS:
                assert source.package in KINDS[node.value], f"{source.name}:{node.lineno}"


def test_code_asks_an_engine_only_its_capabilities() -> None:
    """No string of `ENGINES` and no `rollout.engine` is compared; no attribute or class is looked
    for. The registry looks names up, and refuses what a user's function returns."""
    kinds = {*ENGINES, "Engine", "NativeEngine", "VllmEngine", "SharedEngine", "RemoteEngine"}
    asked: list[str] = []
    for source in sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Compare) and not isinstance(node.ops[0], ast.Is | ast.IsNot):
                parts = [node.left, *node.comparators]
                wrong = {p.value for p in parts if isinstance(p, ast.Constant)} & {*ENGINES}
                wrong |= {p.attr for p in parts if isinstance(p, ast.Attribute)} & {"engine"}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id not in ("isinstance", "getattr", "hasattr"):
                    continue
                words = {w.id for w in ast.walk(node) if isinstance(w, ast.Name)}
                words |= {w.attr for w in ast.walk(node) if isinstance(w, ast.Attribute)}
                wrong = words & {*kinds, "engine"}
            else:
                continue
            if wrong and source.name != "engines/registry.py":
                asked.append(f"{source.name}:{node.lineno} {sorted(wrong)}")
    assert asked == []


def test_torch_free_packages_import_no_torch() -> None:
    """One after the other in one process: the first that imports torch or transformers is named."""
    code = (
        "import importlib, sys\n"
        f"for module in {TORCH_FREE!r}:\n"
        "    importlib.import_module(module)\n"
        "    found = {'torch', 'transformers'} & set(sys.modules)\n"
        "    if found: sys.exit(f'{module} imports {found}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_is_instant() -> None:
    """Processor time of the whole process, the best of five: a busy machine does not count."""

    def spent() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "keel", "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "train" in done.stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert any(spent() < HELP_SECONDS for _ in range(5))
