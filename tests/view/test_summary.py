"""A run in a few lines, and what a notebook shows of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

import keel
from keel.cli.train import show
from keel.runs.reader import load
from keel.runs.writer import Recorder
from keel.types import KeelError
from keel.view.report import write_report
from keel.view.summary import figure_of, html, summarise
from tests.training import test_sft_stage as sft
from tests.training.test_live import arguments
from tests.view.hostile import ANSI, MARKUP, write
from tests.view.test_report import Elements


def test_hostile_texts_are_inert_in_a_notebook(tmp_path: Path) -> None:
    shown = html(load(write(tmp_path / "run").path))
    found = Elements()
    found.feed(shown)
    assert not found.names & {"script", "img", "iframe"}
    assert (found.handlers, found.links) == ([], [])
    assert {"svg", "table"} <= found.names
    assert "&lt;script&gt;" in shown
    assert MARKUP not in shown
    assert ANSI not in shown


def test_state_says_what_ended_a_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "run")
    run = load(folder.path)
    for event, state in (("stopped", "failed"), ("interrupted", "interrupted")):
        with Recorder(folder) as recorder:
            recorder.event(event)
        assert run.state() == state
    assert summarise(run).stages[0].step == 4


def test_imitation_shows_its_validation_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load(sft.small(tmp_path).path)
    show(Console(file=sys.stdout, width=300), run.folder)
    shown = capsys.readouterr().out
    for when, result in run.info()["measured"]["sft"].items():
        assert f"{when}: validation loss {result['loss']:.4f}" in shown
    assert write_report(run.folder.path).read_text("utf-8").count("loss (nats)") == 2
    legend = figure_of(run, ()).axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["loss", "validation", "gradient norm"]


def test_unknown_metrics_are_refused_with_a_guess(tmp_path: Path) -> None:
    run = load(write(tmp_path / "run").path)
    with pytest.raises(KeelError, match="unknown metric of rl 'rewart': did you mean 'reward'"):
        figure_of(run, ("rewart",))
    axes = figure_of(run, ("reward", "entropy")).axes
    assert [list(one.lines[0].get_ydata()) for one in axes] == [[0.25, 0.5, 0.75, 1], [1] * 4]


@pytest.mark.slow
def test_a_run_has_what_one_does_with_it(tmp_path: Path) -> None:
    run = keel.train(folder=tmp_path / "run", **arguments())
    records = run.metrics()
    summary = run.summary()
    (stage,) = summary.stages
    assert (summary.state, stage.step, stage.best) == ("finished", 4, "step-000004")
    assert stage.after == run.info()["evaluation"]["rl"]["after"]
    assert summary.tokens == run.metrics()[-1]["num_tokens"]
    assert summary.bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.*"))
    assert "step 4 of 4" in repr(summary)
    assert run.report() == tmp_path / "run" / "report.html"
    assert run.report(tmp_path / "r.html").is_file()
    assert run.evaluate(prompts=4)["mean"] == keel.evaluate(run, prompts=4)["mean"]
    assert (run.export(tmp_path / "model") / "config.json").is_file()
    longer = run.continue_(steps=5, progress=False)
    assert [record["step"] for record in longer.metrics()] == [1, 2, 3, 4, 5]
    assert longer.metrics()[:4] == records
    assert longer.functions == run.functions
