"""The runs that the pages show: by name, their state, and their formulas as MathML."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from keel.algorithms.explain import explain_preset
from keel.algorithms.presets import PRESETS
from keel.algorithms.symbols import quote
from keel.platform.files import locked
from keel.runs.layout import RunFolder
from keel.runs.writer import Recorder, update_run_json
from keel.types import KeelError
from keel.view.formulas import FONT, explanation_html, font_face, mathml
from keel.view.library import Library, OpenRun, pictures_of, status_of

RECIPE = 'name = "x"\n\n[[stages]]\nstage = "rl"\nname = "{}"\nsteps = {}\n'


def write(path: Path, stage: str, steps: int) -> RunFolder:
    folder = RunFolder.create(path, RECIPE.format(stage, steps))
    with Recorder(folder) as recorder:
        recorder.metrics(0, 1, {"reward": 1.0})
    return folder


def where(run: OpenRun) -> tuple[str, int, int]:
    run.update()
    status = status_of(run, run.stage())
    return status.stage, status.step, status.steps


def test_run_in_a_folder_made_again_is_the_new_one(tmp_path: Path) -> None:
    write(tmp_path / "run", "rl", 3)
    library = Library([tmp_path])
    assert where(library.get("run")) == ("rl", 1, 3)
    assert library.get("run") is library.get("run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(KeelError, match="no run 'run' here"):
        library.get("run")
    for stage, steps in (("rl", 50), ("other", 7)):
        write(tmp_path / "run", stage, steps)
        assert where(library.get("run")) == (stage, 1, steps)
        shutil.rmtree(tmp_path / "run")


def test_named_runs_are_shown_or_refused(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, "rl", 3)
    library = Library([tmp_path])
    for wanted, found in ((), "a"), (("b", "nope"), "b"), (("b", "a"), "ba"):
        assert "".join(run.name for run in library.chosen(wanted)) == found
    with pytest.raises(KeelError, match="no run 'nope' here"):
        library.chosen(("nope",))


def test_runs_with_numbers_are_sorted_by_these(tmp_path: Path) -> None:
    for name in ("train-10", "train-2", "b/run", "train-1b", "train-1"):
        write(tmp_path / name, "rl", 3)
    assert Library([tmp_path]).names() == ["b/run", "train-1", "train-1b", "train-2", "train-10"]


@pytest.mark.parametrize(
    ("table", "tasks"),
    [
        ('[[stages.tasks]]\nname = "a"\n[[stages.tasks]]\nname = "b"\npath = "none"\n', "a, b"),
        ('[[stages.tasks]]\nname = "jsonl"\npath = "/data/x/gsm8k.jsonl"\n', "gsm8k.jsonl"),
        ('[stages.environment]\nid = "CartPole-v1"\n', "CartPole-v1"),
        (
            '[[stages.data]]\npath = "a.jsonl"\n[[stages.data]]\npath = "b.jsonl"\n',
            "a.jsonl, b.jsonl",
        ),
        ('[stages.data]\nname = "pairs"\npath = "p.parquet"\n', "p.parquet"),
        ("", ""),
    ],
)
def test_run_names_what_it_trains_on(table: str, tasks: str, tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", RECIPE.format("rl", 3) + table)
    run = Library([tmp_path]).get("run")
    assert run.tasks == tasks
    os.utime(run.folder.recipe, (0, time.mktime((2026, 3, 4, 5, 6, 0, 0, 0, -1))))
    assert run.begun == "2026-03-04 05:06"


def test_pictures_are_those_of_the_stage(tmp_path: Path) -> None:
    stages = (RECIPE.format(name, 3).removeprefix('name = "x"\n') for name in ("rl", "rl2", "rl-b"))
    folder = RunFolder.create(tmp_path / "run", 'name = "x"\n' + "".join(stages))
    folder.pictures.mkdir()
    for name in ("rl-accuracy-by-length.png", "rl2-margins.png", "rl-b-reliability.png"):
        (folder.pictures / name).write_bytes(b"")
    shown = pictures_of(Library([folder.path]).get("run"), "rl")
    assert [title for title, _ in shown] == ["accuracy by length"]


def test_runs_of_one_name_in_two_folders_are_distinct(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    write(second / "x", "rl", 7)
    library = Library([first, second])
    assert library.get("x").folder.path == second / "x"
    write(first / "x", "rl", 9)
    assert library.names() == ["x", "x'"]
    for name, folder in (("x", first), ("x'", second)):
        run = library.get(name)
        assert (run.name, run.folder.path) == (name, folder / "x")


def test_state_is_that_of_the_lock(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", "rl", 3)
    opened = Library([folder.path]).get("run")
    assert opened.run.state() == "interrupted"
    with locked(folder.path):
        assert opened.run.state() == "running", "a slow step is no end"
    code = (
        "import sys, time, pathlib; from keel.platform.files import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert opened.run.state() == "running"
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert opened.run.state() == "interrupted", "a killed run is interrupted at once"
    update_run_json(folder, {"finished": True})
    assert opened.run.state() == "finished"


LINES = [
    (name, line.latex)
    for name in PRESETS
    for equations in (
        explain_preset(name).objective,
        *(term.equations for term in explain_preset(name).terms),
    )
    for line in equations
]


@pytest.mark.parametrize(
    ("latex", "wanted"),
    [
        (r"\mathrm{clip}(x)", "<mi>clip</mi><mo"),
        (r"\min(x)", "<mi>min</mi><mo"),
        (r"A_n \exp(x)", '</msub><mspace width="0.167em" /><mi>exp</mi><mo'),
        (r"\log \rho_t", '<mi>log</mi><mspace width="0.167em" /><msub>'),
        (r"\exp\left(x\right)", "<mi>exp</mi><mrow><mo"),
        (r"V \pm 0.2", "<mo>&#x000B1;</mo>"),
        (r"(a, -0.4)", '<mo form="prefix">&#x02212;</mo>'),
        (r"\hat{R}_n", 'accent="true"><mrow><mi>R</mi></mrow><mo stretchy="false">&#x002C6;'),
        (r"\tilde{R}_i", 'accent="true"><mrow><mi>R</mi></mrow><mo stretchy="false">&#x0007E;'),
        (r"\frac{\sum_{j\in g} L_j}{2}", "<munder><mo>&#x02211;</mo><mrow>"),
        (r"\left(\sum_n x\right)", "<munder><mo>&#x02211;</mo><mi>n</mi></munder>"),
    ],
)
def test_mathml_says_what_each_part_is(latex: str, wanted: str) -> None:
    assert wanted in mathml(latex)


@pytest.mark.parametrize("name", PRESETS)
def test_explanations_are_well_formed_without_dollars(name: str) -> None:
    text = explanation_html(explain_preset(name))
    ElementTree.fromstring(f"<body>{text}</body>")
    assert "$" not in text


def test_explanation_escapes_what_a_recipe_names() -> None:
    found = replace(explain_preset("grpo"), name="<script>", notes=(quote("$<b>$ & $x_n$"),))
    assert "<script>" not in explanation_html(found)
    assert "<b>$" not in explanation_html(found)


@pytest.mark.parametrize(("name", "latex"), LINES)
def test_words_of_presets_are_single_identifiers(name: str, latex: str) -> None:
    found = mathml(latex)
    assert 'normal">' not in found, name
    words = re.findall(r"\\(?:mathrm|min|max|exp|log)(?:\{(\w+)\})?", latex)
    assert all(f"<mi>{word}</mi>" in found for word in words if word), name


def test_font_is_in_the_style_unless_served() -> None:
    assert FONT.read_bytes().startswith(b"wOF2")
    assert len(FONT.read_bytes()) < 100_000
    assert 'url("data:font/woff2;base64,d09GMg' in font_face()
    assert 'url("/math.woff2")' in font_face("/math.woff2")


def test_older_runs_have_a_speed(tmp_path: Path) -> None:
    """From tokens and seconds of a step, if its tokens per second were not recorded."""
    for name, timings in (("old", {}), ("new", {"speed/step": 70.0})):
        with Recorder(RunFolder.create(tmp_path / name, RECIPE.format("rl", 3))) as recorder:
            recorder.metrics(0, 1, {"step/tokens": 10.0})
            recorder.timings(0, 1, {"total": 0.5, **timings})
    library = Library([tmp_path])
    for name, speed in (("old", 20.0), ("new", 70.0)):
        run = library.get(name)
        run.update()
        assert status_of(run, "rl").tokens_per_second == speed
