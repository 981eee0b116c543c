"""Each preset has a page, and the formula on it is the current one."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from keel.algorithms.explain import explain_preset
from keel.algorithms.preferences import PREFERENCE_LOSSES
from keel.algorithms.presets import PRESETS
from keel.training.stages.dpo import DPOStage
from studies.evidence import pages
from tests.shared import ROOT

FOLDER = ROOT / "docs" / "algorithms"
PAGES = sorted({*PRESETS} & {path.stem for path in FOLDER.glob("*.md")})
SECTIONS = ["Objective", "What is easy to get wrong", "Metrics", "Learning curve"]


def sections(name: str) -> dict[str, str]:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


def test_pages_are_of_presets() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {
        *PAGES,
        "README",
        "dqn",
        "control",
        "dpo",
    }
    assert len(PAGES) >= 18


@pytest.mark.parametrize("name", PAGES)
def test_page_states_the_current_formula(name: str) -> None:
    wanted = explain_preset(name).page_equation()
    found = sections(name)["Objective"]
    assert found == wanted, f"docs/algorithms/{name}.md, Objective: paste this\n\n{wanted}\n"


@pytest.mark.parametrize("name", PAGES)
def test_page_has_its_sections_and_size(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n\n{PRESETS[name].title} (")
    assert 25 <= len(text.splitlines()) <= 58
    found = sections(name)
    assert list(found) == SECTIONS
    assert found["What is easy to get wrong"].count("\n- ") >= 3


@pytest.mark.parametrize("name", PAGES)
def test_page_shows_the_measured_curve(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert text.endswith(pages.section(name)), "python -m studies.evidence pages"
    assert (FOLDER / "curves" / f"{name}.png").is_file()


def test_page_of_dpo_has_each_loss() -> None:
    """With its source, its keys and whether it has a reference; the stage takes just these."""
    text = (FOLDER / "dpo.md").read_text(encoding="utf-8")
    assert get_args(DPOStage.model_fields["loss"].annotation) == tuple(PREFERENCE_LOSSES)
    for name, loss in PREFERENCE_LOSSES.items():
        assert loss.source.split()[-1] in text
        line = next(line for line in text.splitlines() if f"`{name}`" in line)
        if loss.records == "pairs":
            assert ("| no |" in line) == (not loss.reference)
            assert all(f"`{key}`" in line for key in loss.keys if key != "nll")
            assert f"`beta` {loss.keys['beta']:g}" in line
            assert ("NLL" in line) == bool(loss.keys["nll"])


def test_index_names_each_preset() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for name, preset in PRESETS.items():
        algorithm, paper = preset.algorithm, preset.paper
        kinds = (
            algorithm.advantage.kind,
            algorithm.ratio,
            " × ".join((algorithm.surrogate.kind, *(mask.kind for mask in algorithm.masks))),
            algorithm.weights.kind,
        )
        if name not in PAGES:
            line = next(x for x in index.splitlines() if x.startswith(f"| `{name}` |"))
            assert f"| {', '.join(kinds)} |" in line
            assert f"| {paper} |" in line
            continue
        line = next(x for x in index.splitlines() if x.startswith(f"| [{name}]({name}.md) |"))
        assert all(f"| {kind} |" in line for kind in kinds)
        assert line.endswith(f"| {paper} |")
        assert ("| none | " + paper in line) == (algorithm.divergence is None)
