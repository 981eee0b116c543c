"""A run waits for people, who label its pairs on the pages; then it goes on with their labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.runs.layout import RunFolder
from keel.types import KeelError
from tests.preferences.test_labeller import recipe, stage, train
from tests.shared import needs_chromium
from tests.view.annotating import Annotator, Server
from tests.view.chromium import tab

pytestmark = [needs_chromium, pytest.mark.slow]
KEYS = ("1", "2", "t", "s", "1", "2")


def test_people_label_a_runs_pairs_on_the_pages(browser: Any, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="waits for people: 6 of 6 pairs"):
        train(recipe(stage(labels=6, price=0.5)), tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    # Of what is shown at the left and at the right: how much better the left one is.
    said: dict[frozenset[str], tuple[str, float | None]] = {}
    with Server(folder.preferences) as server, tab(browser, server.url) as page:
        ann = Annotator(page, server.url, "ann")
        assert ann.part("progress").inner_text().startswith("0 of 6")
        for key in KEYS:
            left, right = (ann.part(side).inner_text() for side in ("left", "right"))
            value = {"1": 1.0, "2": 0.0, "t": 0.5, "s": None}[key]
            said[frozenset((ann.question, left, right))] = left, value
            ann.press(key)
        assert ann.question == ""  # only the chosen pairs are shown
    assert len(said) == 6
    train(None, folder.path, resume=True)
    lines = folder.rows("reward_model", "train").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        shown = frozenset((row["prompt"], row["chosen"], row["rejected"]))
        left, value = said.get(shown, ("", None))
        assert row["source"] == ("rewards" if value is None else "people")
        if value == 0.5:
            assert row["probability"] == 0.5
        elif value is not None:
            assert (row["chosen"] == left) == (value == 1.0)
    assert sum(row["source"] == "people" for row in rows) >= 5
