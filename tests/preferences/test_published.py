"""PandaLM's and LLMBar's files: what they hold, what becomes of it, what is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keel.data.preferences.schema import Preference
from keel.preferences.agreement import cohen_kappa, count_votes, fleiss_kappa
from keel.preferences.published import (
    FIRST,
    SECOND,
    SETS,
    TEST_SET,
    TIE,
    Annotated,
    PandaLMJudge,
    compare,
    is_llmbar,
    read_judges,
    read_llmbar,
    read_pandalm,
)
from keel.types import KeelError
from tests.shared import shared_path

ROW = {
    "idx": 4,
    "instruction": "Say",
    "input": "it",
    "response1": "one",
    "response2": "two",
    "annotator1": 2,
    "annotator2": 2,
    "annotator3": 0,
}
BAR = {"input": "Say it", "output_1": "one", "output_2": "two", "label": 2}


def written(path: Path, rows: Any) -> Path:
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def shown(votes: tuple[int, ...], answers: tuple[str, str] = ("one", "two")) -> Annotated:
    return Annotated("x", "p", answers, votes)


# ---------------------------------------------------------------- votes


@pytest.mark.parametrize(
    ("votes", "chosen", "probability", "majority"),
    [
        ((FIRST, FIRST, FIRST), "one", 1.0, FIRST),
        ((SECOND, SECOND, SECOND), "two", 1.0, SECOND),
        ((FIRST, FIRST, SECOND), "one", 2 / 3, FIRST),
        ((SECOND, FIRST, SECOND), "two", 2 / 3, SECOND),
        ((SECOND, SECOND, TIE), "two", 5 / 6, SECOND),
        ((TIE, TIE, SECOND), "two", 2 / 3, TIE),
        ((TIE, TIE, TIE), "one", 0.5, TIE),
        ((FIRST, SECOND, TIE), "one", 0.5, None),
        ((FIRST, SECOND), "one", 0.5, None),
        ((SECOND,), "two", 1.0, SECOND),
    ],
)
def test_votes_become_a_preference(
    votes: tuple[int, ...], chosen: str, probability: float, majority: int | None
) -> None:
    row = shown(votes)
    rejected = "two" if chosen == "one" else "one"
    found = row.preference()
    assert (found.id, found.prompt) == ("x", "p")
    assert (found.chosen, found.rejected) == (chosen, rejected)
    assert found.probability == pytest.approx(probability, abs=1e-15)
    assert row.majority == majority
    line = row.row()
    # Which answer stood first is not lost: the votes speak of it.
    assert line[line["first"]] == "one"
    assert line["votes"] == list(votes)
    assert Preference(**{k: v for k, v in line.items() if k not in ("first", "votes")}) == found


def test_empty_answers_are_known() -> None:
    assert not shown((1,)).is_empty
    assert shown((1,), ("a", " ")).is_empty
    assert shown((1,), ("", "b")).is_empty


# ---------------------------------------------------------------- PandaLM


def test_a_row_of_pandalm(tmp_path: Path) -> None:
    path = written(tmp_path / TEST_SET, [ROW, {**ROW, "idx": 5, "input": "", "response2": True}])
    found = read_pandalm(path)
    assert found.rows[0] == Annotated("pandalm/4", "Say\n\nit", ("one", "two"), (2, 2, 0))
    assert found.rows[1] == Annotated("pandalm/5", "Say", ("one", "True"), (2, 2, 0))
    assert found.read_as_text == 1
    assert read_pandalm(tmp_path) == found


def test_the_verdicts_of_models(tmp_path: Path) -> None:
    given: list[Any] = ["1", " tie ", "garbage", 2, None, True, 7, "0", 1.0]
    rows = [{**ROW, "idx": n} for n in range(len(given))]
    written(tmp_path / TEST_SET, rows)
    # In another order than the rows, and with one more.
    verdicts = [{"idx": n, "any_result": value} for n, value in enumerate(given)]
    written(tmp_path / f"judge-{TEST_SET}", [{"idx": 99, "any_result": 1}, *verdicts[::-1]])
    (judge,) = read_judges(tmp_path, read_pandalm(tmp_path).rows)
    assert judge.name == "judge"
    assert judge.verdicts == (FIRST, TIE, None, SECOND, None, None, None, TIE, None)
    assert judge.unusable == 5


def test_a_judge_beside_the_majority() -> None:
    votes = [(1, 1, 2), (2, 2, 2), (0, 0, 1), (0, 1, 2), (1, 1, 1)]
    rows = [Annotated(str(n), f"p{n}", ("a", "b"), vote) for n, vote in enumerate(votes)]
    found = compare(PandaLMJudge("j", (1, 1, 0, 2, None)), rows)
    assert found.split == 1
    assert found.unusable == 1
    assert (found.accuracy.value, found.accuracy.n) == (2 / 3, 3)
    assert (found.accuracy_of_all.value, found.accuracy_of_all.n) == (2 / 4, 4)
    # Of (1,1), (2,1), (0,0): p_o = 2/3, p_e = (1·2 + 1·0 + 1·1)/9 = 1/3.
    assert found.kappa.value == pytest.approx(0.5, abs=1e-12)
    assert found.kappa.n == 3
    # Intervals are drawn over prompts: one prompt alone tells nothing.
    rows = [Annotated(row.id, "p", row.answers, row.votes) for row in rows]
    found = compare(PandaLMJudge("j", (1, 1, 0, 2, None)), rows)
    for one in (found.accuracy, found.accuracy_of_all):
        assert (one.low, one.high) == (0, 1)
    assert found.kappa.value == pytest.approx(0.5, abs=1e-12)
    assert math.isnan(found.kappa.low)
    assert math.isnan(found.kappa.high)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([{**ROW, "annotator2": 3}], "row 1: annotator2 = 3 is none of 0, 1, 2: fix the file"),
        ([{**ROW, "annotator2": True}], "annotator2 = True is none of 0, 1, 2"),
        ([{**ROW, "response1": None}], "row 1: response1 = None is not a text"),
        ([ROW, {**ROW, "idx": "5"}], "row 2: idx = '5' is no whole number"),
        ([ROW, ROW], "two rows have the same idx"),
        ([{**ROW, "instruction": "", "input": " "}], "instruction = '' is empty"),
        ([{k: v for k, v in ROW.items() if k != "input"}], "row 1: unknown column 'input'"),
        ([[1]], "row 1: a JSON list, not an object: give PandaLM's testset-v1.json"),
        ([], "an empty list, not a list of rows"),
        ({"rows": []}, "a JSON dict, not a list of rows"),
    ],
)
def test_bad_files_of_pandalm_are_refused(tmp_path: Path, rows: Any, line: str) -> None:
    path = written(tmp_path / TEST_SET, rows)
    with pytest.raises(KeelError) as error:
        read_pandalm(path)
    assert str(error.value).startswith(f"{path}: ")
    assert line in str(error.value)


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(KeelError, match=r"x\.json: there is no such file: give a file of LLMBar"):
        read_llmbar(path)
    path.write_text('[{"a": 1},\n oops]')
    with pytest.raises(KeelError, match=r"not JSON: Expecting value at line 2, column 2: give"):
        read_llmbar(path)
    path.write_bytes(b'["\xff"]')
    with pytest.raises(KeelError, match="not UTF-8 text"):
        read_llmbar(path)


def test_missing_verdicts_are_refused(tmp_path: Path) -> None:
    written(tmp_path / TEST_SET, [ROW, {**ROW, "idx": 5}])
    written(tmp_path / f"judge-{TEST_SET}", [{"idx": 4, "x_result": 1}])
    rows = read_pandalm(tmp_path).rows
    with pytest.raises(KeelError, match="1 rows have no verdict, pandalm/5 the first"):
        read_judges(tmp_path, rows)
    written(tmp_path / f"judge-{TEST_SET}", [{"idx": 4, "verdict": 1}])
    with pytest.raises(KeelError, match="unknown column 'gpt_result'"):
        read_judges(tmp_path, rows)


def test_pandalms_people_agree_as_published() -> None:
    rows = read_pandalm(shared_path(f"data/pandalm/{TEST_SET}")).rows
    found = fleiss_kappa(count_votes([row.votes for row in rows]))
    assert found.n == len(rows) == 999
    assert found.value == pytest.approx(0.864, abs=5e-4)
    # Cohen's κ of each two of them, and the majority's verdicts: as the authors print them.
    pairs = {(0, 1): 0.85, (0, 2): 0.88, (1, 2): 0.86}
    for (one, other), printed in pairs.items():
        kappa = cohen_kappa([r.votes[one] for r in rows], [r.votes[other] for r in rows])
        assert kappa.value == pytest.approx(printed, abs=5e-3)
    assert Counter(row.majority for row in rows) == {TIE: 105, FIRST: 422, SECOND: 472}


def test_pandalms_models_beside_its_people() -> None:
    folder = shared_path("data/pandalm")
    found = read_pandalm(folder)
    assert found.read_as_text == 6
    assert sum(row.is_empty for row in found.rows) == 54
    assert sum(len(set(row.votes)) > 1 for row in found.rows) == 120
    judges = {judge.name: judge for judge in read_judges(folder, found.rows)}
    gpt, panda = judges["gpt-3.5-turbo"], judges["pandalm-7b"]
    assert (gpt.unusable, panda.unusable) == (25, 0)
    # Counted by a loop over the raw files, apart from the code.
    raw = json.loads((folder / TEST_SET).read_text(encoding="utf-8"))
    message = json.loads((folder / f"gpt-3.5-turbo-{TEST_SET}").read_text(encoding="utf-8"))
    right = usable = 0
    for row, verdict in zip(raw, message, strict=True):
        votes = [row[f"annotator{n}"] for n in (1, 2, 3)]
        usable += verdict["gpt_result"] != "garbage"
        meant = {"1": 1, "2": 2, "Tie": 0, "garbage": -1}[verdict["gpt_result"]]
        right += votes.count(meant) >= 2
    others = compare(gpt, found.rows)
    assert (others.accuracy.n, others.accuracy.value) == (usable, right / usable)
    assert others.accuracy_of_all.value == right / 999
    assert others.kappa.value == pytest.approx(0.493, abs=5e-4)
    others = compare(panda, found.rows)
    assert others.accuracy.value == pytest.approx(0.668, abs=5e-4)
    assert others.kappa.value == pytest.approx(0.435, abs=5e-4)
    assert others.split == 0


# ---------------------------------------------------------------- LLMBar


def test_rows_of_llmbar(tmp_path: Path) -> None:
    (tmp_path / "Adversarial").mkdir()
    written(tmp_path / "Natural.json", [BAR])
    written(tmp_path / "Adversarial" / "Manual.json", [{**BAR, "label": 1}, BAR])
    rows = read_llmbar(tmp_path).rows
    assert [row.id for row in rows] == [
        "llmbar/Manual/0",
        "llmbar/Manual/1",
        "llmbar/Natural/0",
    ]
    assert [row.preference().chosen for row in rows] == ["one", "two", "two"]
    assert read_llmbar(tmp_path / "Natural.json").rows == rows[2:]
    for wrong in (0, 3, "1", True):
        path = written(tmp_path / "Natural.json", [{**BAR, "label": wrong}])
        with pytest.raises(KeelError, match=f"row 1: label = {wrong!r} is none of 1, 2"):
            read_llmbar(path)
    with pytest.raises(KeelError, match="row 1: input = ' ' is empty"):
        read_llmbar(written(tmp_path / "Natural.json", [{**BAR, "input": " "}]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(KeelError, match=r"empty: holds no \*\.json: give LLMBar's folder"):
        read_llmbar(tmp_path / "empty")


def published(root: Path) -> Path:
    """LLMBar's folder as its repository has it: one name for all, verdicts next to it."""
    for name in SETS:
        folder = root / "LLMBar" / ("" if name == "Natural" else "Adversarial") / name
        (folder / "evaluators" / "GPT-4" / "CoT").mkdir(parents=True)
        written(folder / "dataset.json", [{**BAR, "input": name}, BAR])
        written(folder / "evaluators" / "GPT-4" / "CoT" / "result.json", [{"winner": 1}])
    other = root / "CaseStudy" / "Negation"
    other.mkdir(parents=True)
    written(other / "dataset.json", [BAR])
    return root


def test_llmbar_as_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = published(tmp_path)
    for folder in (root, root / "LLMBar"):
        assert is_llmbar(folder)
        rows = read_llmbar(folder).rows
        assert sorted(row.id for row in rows) == sorted(
            f"llmbar/{name}/{n}" for name in SETS for n in (0, 1)
        )
        assert all(row.prompt == row.id.split("/")[1] for row in rows if row.id.endswith("/0"))
    natural = root / "LLMBar" / "Natural"
    assert is_llmbar(natural)
    assert [row.id for row in read_llmbar(natural / "dataset.json").rows][1] == "llmbar/Natural/1"
    monkeypatch.chdir(natural)
    for path in (Path("dataset.json"), Path()):
        assert [row.id for row in read_llmbar(path).rows][1] == "llmbar/Natural/1"
    assert is_llmbar(Path())
    # Its other benchmarks are read where one asks for them.
    assert [row.id for row in read_llmbar(root / "CaseStudy").rows] == ["llmbar/Negation/0"]
    assert not is_llmbar(root / "CaseStudy")
    assert not is_llmbar(natural / "evaluators")


def test_one_set_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "Natural.json", [BAR])
    with pytest.raises(KeelError) as error:
        read_llmbar(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/b/Natural.json: the set 'Natural' is in {tmp_path}/a/Natural.json as well: "
        "move one away"
    )
    assert is_llmbar(tmp_path)


def test_llmbars_files() -> None:
    rows = read_llmbar(shared_path("data/llmbar")).rows
    sets = Counter(row.id.split("/")[1] for row in rows)
    assert sets == {"GPTInst": 92, "GPTOut": 47, "Manual": 46, "Neighbor": 134, "Natural": 100}
    assert len({row.id for row in rows}) == 419
    # In the adversarial sets the wrong answer was made to look better, by length among others.
    longer = [row for row in rows if len(row.preference().chosen) > len(row.preference().rejected)]
    assert Counter("Natural" in row.id for row in longer) == {True: 56, False: 57}
