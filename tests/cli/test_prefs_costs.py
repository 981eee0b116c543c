"""`keel prefs costs`: the ledger by round, each amount once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.preferences.records import (
    CompletionRecord,
    CostRecord,
    LabelRecord,
    StepsRecord,
)
from keel.preferences.store import PreferenceStore
from tests.cli.test_prefs import printed
from tests.cli.test_wrong_inputs import tried
from tests.preferences.made import made

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spent(path: Path) -> None:
    """Two rounds: labels of four sources, completions, steps, and entries of the ledger."""
    with made(path, 4) as store:
        human: dict[str, Any] = {"source": "human", "seconds": 90.0, "cost": 0.5}
        store.add([LabelRecord(f"p{n}", 1.0, annotator="ann", **human) for n in range(3)])
        store.add([LabelRecord("p3", None, "human", "ann", seconds=30.0)])  # a skip
        store.add([LabelRecord("p0", 1.0, "judge", "m", round=1, cost=0.02, seconds=3.0)])
        store.add([LabelRecord("p1", 0.0, "judge", "m", round=1, cost=0.03)])
        store.add([LabelRecord("p2", 1.0, "reward_model", "r", round=1, seconds=7200.0)])
        store.add([CompletionRecord("q0", "c", "m", round=1, cost=0.25, seconds=9.0)])
        store.add([StepsRecord("q0", ("a",), (1.0,), "judge", round=1, cost=0.05)])
        store.add(
            [
                CostRecord("f1", "api", 2.0, "dollars", "judging", 1, forecast=True),
                CostRecord("f2", "human", 3.0, "hours", "labels", 0, forecast=True),
                CostRecord("a1", "gpu", 1.5, "hours", "reward model", 1),
                CostRecord("a2", "gpu", 4.5, "dollars", "reward model", 1),
            ]
        )


def test_each_amount_is_in_one_cell(here: Path, capsys: Capture) -> None:
    spent(here / "a.db")
    found = printed(["prefs", "costs", "a.db"], capsys)
    table = {(row.pop("round"), row.pop("kind")): row for row in found["table"]}
    # Round 0: three labels at $0.50 of 90 s each, and 30 s of a skip.
    assert table[0, "human"] == {
        **{"forecast_dollars": None, "actual_dollars": pytest.approx(1.5)},
        **{"forecast_hours": 3.0, "actual_hours": pytest.approx(300 / 3600)},
    }
    # Round 1: judge 0.02 + 0.03, completion 0.25, steps 0.05. Seconds of an API are no hours.
    assert table[1, "api"] == {
        **{"forecast_dollars": 2.0, "actual_dollars": pytest.approx(0.35)},
        **{"forecast_hours": None, "actual_hours": None},
    }
    # The reward model's own two hours of labelling and an entry of 1.5 hours.
    assert table[1, "gpu"]["actual_hours"] == pytest.approx(3.5)
    assert table[1, "gpu"]["actual_dollars"] == 4.5
    assert set(table) == {
        *((0, "api"), (0, "human"), (1, "api"), (1, "gpu")),
        *((None, "api"), (None, "human"), (None, "gpu"), (None, None)),
    }
    every = table[None, None]
    assert every["actual_dollars"] == pytest.approx(1.5 + 0.35 + 4.5)
    assert (every["forecast_dollars"], every["actual_hours"]) == (2.0, None)
    for name in ("forecast_dollars", "actual_dollars"):
        kinds = [table[None, kind][name] or 0 for kind in ("api", "human", "gpu")]
        assert sum(kinds) == pytest.approx(every[name])
        rounds = [row[name] or 0 for (round, _), row in table.items() if round is not None]
        assert sum(rounds) == pytest.approx(every[name])


def test_the_table_for_people(here: Path, capsys: Capture) -> None:
    spent(here / "a.db")
    assert main(["prefs", "costs", "a.db"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "round  kind     forecast $     actual $   forecast h     actual h"
    assert "    1  api            2.00         0.35            –            –" in lines
    assert "    0  human             –         1.50        3.000        0.083" in lines
    assert "  round 1, api, actual: $0.05, 2 labels by judge" in lines
    assert "  round 1, gpu, actual: $4.50, 1.500 h, 2 entries for reward model" in lines


def test_entries_by_hand_are_counted_once(here: Path, capsys: Capture) -> None:
    made(here / "a.db", 1).close()
    words = ["prefs", "costs", "a.db", "--add", "fee", "--kind", "human", "--amount", "12.5"]
    more = ["--purpose", "platform", "--round", "2"]
    for added in (1, 0):
        found = printed([*words, *more], capsys)
        assert found["added"] == added
        assert found["table"][-1]["actual_dollars"] == 12.5
    with PreferenceStore(here / "a.db") as store:
        (entry,) = store.costs()
    assert entry == CostRecord("fee", "human", 12.5, "dollars", "platform", 2)
    assert "another cost has the id 'fee'" in tried([*words[:-1], "13", *more], capsys)
    hours = ["prefs", "costs", "a.db", "--add", "g", "--kind", "gpu", "--amount", "2"]
    assert main([*hours, "--unit", "hours", "--forecast"]) == 0
    assert "added 1 entry" in capsys.readouterr().out
    row = printed(["prefs", "costs", "a.db"], capsys)["table"][-2]
    assert (row["kind"], row["forecast_hours"], row["actual_hours"]) == ("gpu", 2.0, None)


def test_an_empty_store_has_nothing_recorded(here: Path, capsys: Capture) -> None:
    made(here / "a.db").close()
    assert main(["prefs", "costs", "a.db"]) == 0
    assert "nothing is recorded" in capsys.readouterr().out


def test_what_costs_refuses(here: Path, capsys: Capture) -> None:
    made(here / "a.db").close()
    costs = ["prefs", "costs"]
    for words, what in (
        (costs, "STORE"),
        ([*costs, "none.db"], "there is no such file"),
        ([*costs, "a.db", "--kind", "api"], "--kind is of an entry that is added: give --add ID"),
        ([*costs, "a.db", "--forecast"], "--forecast is of an entry"),
        ([*costs, "a.db", "--add", "x", "--kind", "api"], "--add x: give --amount too"),
        ([*costs, "a.db", "--add", "x", "--amount", "1"], "--add x: give --kind too"),
        ([*costs, "a.db", "--add", "", "--kind", "api", "--amount", "1"], "id is empty"),
        ([*costs, "a.db", "--add", "x", "--kind", "api", "--amount", "-1"], "--amount"),
        ([*costs, "a.db", "--add", "x", "--kind", "api", "--amount", "inf"], "--amount"),
    ):
        assert what in tried(words, capsys), words
    with PreferenceStore(here / "a.db") as store:
        assert store.counts()["costs"] == 0
