"""What pages show when the files of a run change under them. Without a browser."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from nicegui import ui

from keel.runs.layout import RunFolder
from keel.runs.writer import Recorder, truncate_after
from keel.types import KeelError
from keel.view import curves, rollouts, runs
from keel.view.address import Address
from keel.view.library import Library
from keel.view.rollout_rows import Hits, RolloutIndex
from keel.view.rollouts import RolloutsPage
from tests.view import hostile
from tests.view.hostile import TWO_STAGES, add_step
from tests.view.simulated import SECONDS, marked, simulate, trigger, until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files often."""
    for module in (curves, rollouts, runs):
        monkeypatch.setattr(module, "EVERY", 0.02)


def problems(user: Any) -> list[str]:
    return [one.text for one in marked(user, "problem")]


def begin(path: Path) -> RunFolder:
    """A run of two stages, with the first step of the first."""
    folder = RunFolder.create(path, TWO_STAGES)
    add_step(folder, 0, 1)
    return folder


def status(user: Any) -> str:
    return str(marked(user, "status")[0].text)


def test_list_without_runs_is_empty_and_says_so(tmp_path: Path) -> None:
    for name in ("a", "b"):
        hostile.write(tmp_path / name)
    library = Library([tmp_path])

    async def use(user: Any) -> None:
        (table,) = marked(user, "runs")
        assert [row["id"] for row in table.rows] == ["a", "b"]
        shutil.move(tmp_path / "a", tmp_path / ".a")
        await until(lambda: [row["id"] for row in table.rows] == ["b"])
        shutil.move(tmp_path / "b", tmp_path / ".b")
        await until(lambda: table.rows == [])
        with pytest.raises(KeelError) as error:
            library.names()
        assert problems(user) == [str(error.value)]
        shutil.move(tmp_path / ".b", tmp_path / "b")
        await until(lambda: [row["id"] for row in table.rows] == ["b"])
        assert problems(user) == []

    simulate(lambda: runs.runs_page(library, Address()), use)


def test_curves_go_on_with_the_next_stage_unless_the_address_names_one(tmp_path: Path) -> None:
    folder = begin(tmp_path / "a")
    library, address = Library([tmp_path]), Address()

    async def use(user: Any) -> None:
        assert "one: step 1 of 9" in status(user)
        add_step(folder, 1, 1)
        if address.stage is None:
            await until(lambda: "two: step 1 of 9" in status(user))
        else:
            add_step(folder, 0, 2)
            await until(lambda: "one: step 2 of 9" in status(user))

    simulate(lambda: curves.curves_page(library, address, None), use)
    shutil.rmtree(folder.path)
    folder, address = begin(tmp_path / "a"), Address(stage="one")
    simulate(lambda: curves.curves_page(library, address, None), use)


def test_histograms_follow_the_newest_rollouts(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a", TWO_STAGES)

    def add(step: int, rewards: list[float], lengths: list[int]) -> None:
        rows = [
            hostile.row("x " * n, reward=reward) for reward, n in zip(rewards, lengths, strict=True)
        ]
        with Recorder(folder) as recorder:
            recorder.rollouts(0, step, rows)
            recorder.metrics(0, step, {"reward": 0.5})

    def shown(user: Any, name: str) -> list[tuple[str, int]]:
        (panel,) = marked(user, f"histogram-{name}")
        (chart,) = [one for one in panel.descendants() if isinstance(one, ui.echart)]
        data = chart.options["xAxis"]["data"], chart.options["series"][0]["data"]
        return list(zip(*data, strict=True))

    async def use(user: Any) -> None:
        assert shown(user, "reward") == [("0", 1), ("1", 2)]
        assert shown(user, "length") == [("3", 2), ("4", 0), ("5", 1)]
        add(2, [0.01 * at for at in range(40)], [1, 2, 3, 4, 5, 7, *[8] * 34])
        await until(lambda: len(shown(user, "reward")) == 20)
        assert [n for _, n in shown(user, "reward")] == [2] * 20
        counts = [1, 1, 1, 1, 1, 0, 1, 34]  # no completion has 6 tokens
        assert shown(user, "length") == [(str(at), n) for at, n in enumerate(counts, 1)]

    add(1, [1.0, 0.0, 1.0], [3, 3, 5])
    simulate(lambda: curves.curves_page(Library([tmp_path]), Address(), None), use)


def test_curves_of_a_folder_made_again_are_the_new_ones(tmp_path: Path) -> None:
    folder = begin(tmp_path / "a")
    hostile.write(tmp_path / "b")
    library = Library([tmp_path])

    async def use(user: Any) -> None:
        shutil.rmtree(folder.path)
        await until(lambda: problems(user) == ["no run 'a' here"])
        hostile.write(folder.path)
        await until(lambda: "rl: step 4 of 4" in status(user))

    simulate(lambda: curves.curves_page(library, Address(run=("a",)), None), use)


def test_curves_follow_runs_while_one_of_them_is_damaged(tmp_path: Path) -> None:
    good, torn = begin(tmp_path / "good"), begin(tmp_path / "torn")
    whole = torn.metrics.read_bytes()
    library = Library([tmp_path])

    async def use(user: Any) -> None:
        torn.metrics.write_bytes(whole + b"{torn\n")
        await until(lambda: problems(user))
        (first,) = marked(user, "problem")
        assert "metrics.jsonl:2 is damaged" in first.text
        add_step(good, 0, 2)
        await until(lambda: "step 2 of 9" in status(user))
        assert marked(user, "problem") == [first]
        torn.metrics.write_bytes(whole)
        await until(lambda: not problems(user))

    simulate(lambda: curves.curves_page(library, Address(run=("good", "torn")), None), use)


STAGE = """name = "{name}"
seed = {seed}

[[stages]]
stage = "rl"
steps = {steps}
algorithm = {{preset = "{preset}"}}
[stages.optimizer]
learning_rate = {rate}
"""


@pytest.mark.parametrize(
    ("recipes", "names"),
    [
        ([{"seed": 1}, {"seed": 2}], ["grpo seed 1", "grpo seed 2"]),
        ([{}, {"preset": "gspo"}], ["grpo seed 0", "gspo seed 0"]),
        (
            [{"name": "x"}, {"rate": 0.1, "name": "y"}],
            ["grpo seed 0 learning_rate=0.01", "grpo seed 0 learning_rate=0.1"],
        ),
        (
            [{"rate": 0.1}, {"steps": 8}, {}],
            [
                "grpo seed 0 steps=9 learning_rate=0.1",
                "grpo seed 0 steps=8 learning_rate=0.01",
                "grpo seed 0 steps=9 learning_rate=0.01",
            ],
        ),
        ([{}, {}], ["grpo seed 0 (run-0)", "grpo seed 0 (run-1)"]),
        ([{}], ["run-0"]),
    ],
)
def test_overlaid_runs_are_named_by_what_differs(
    recipes: list[dict[str, Any]], names: list[str], tmp_path: Path
) -> None:
    plain = {"name": "a", "seed": 0, "steps": 9, "preset": "grpo", "rate": 0.01}
    for number, recipe in enumerate(recipes):
        RunFolder.create(tmp_path / f"run-{number}", STAGE.format(**{**plain, **recipe}))
    library = Library([tmp_path])
    assert curves.names_of([library.get(name) for name in library.names()]) == names


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("finish", "EOS", "eos"),
        ("finish", "crashed", None),
        ("overlay", "everything", None),
        ("step", "-3", -3),
        ("min_reward", "nan", None),
    ],
)
def test_values_of_an_address_are_read_or_left_out(
    key: str, value: str, read: str | int | None
) -> None:
    address = Address.read([("run", "a"), ("run", "b"), (key, value), ("other", "x")])
    assert getattr(address, key) == read
    assert address.run == ("a", "b")


def opened(library: Library, address: Address | None = None) -> RolloutsPage:
    """The page of rollouts, built."""
    page = RolloutsPage(library, address or Address())
    page.build()
    return page


def test_controls_of_deleted_rollouts_do_nothing(tmp_path: Path) -> None:
    folder = begin(tmp_path / "a")
    library, pages = Library([tmp_path]), []

    async def use(user: Any) -> None:
        (page,) = pages
        await until(lambda: marked(user, "group"))
        assert marked(user, "newest")[0].text == "newest: step 1"
        truncate_after(folder, 0, -1)  # as a resume without a checkpoint does
        await until(lambda: not page.steps)
        trigger(user, "click", "aria-label", "newest step")
        trigger(user, "click", "aria-label", "later step")
        trigger(user, "keydown.enter", "data-testid", "step")
        assert marked(user, "newest")[0].text == ""
        add_step(folder, 0, 2)
        await until(lambda: marked(user, "newest")[0].text == "newest: step 2")
        trigger(user, "click", "aria-label", "newest step")
        await until(lambda: page.address.step == 2)

    simulate(lambda: pages.append(opened(library)), use)


def test_an_earlier_search_does_not_replace_the_hits_of_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path / "a")
    library, pages = Library([tmp_path]), []
    began, goes_on = threading.Event(), threading.Event()
    search = RolloutIndex.search

    def slow(index: RolloutIndex, query: Address) -> Hits:
        if query.text == "some":
            began.set()
            assert goes_on.wait(SECONDS)
        return search(index, query)

    monkeypatch.setattr(RolloutIndex, "search", slow)

    async def use(user: Any) -> None:
        async def find(text: str) -> None:
            with user:
                pages[0].box.value = text
                await pages[0].search()

        earlier = asyncio.create_task(find("some"))
        await until(began.is_set)
        await find("other")
        goes_on.set()
        await earlier
        assert marked(user, "hits")[0].text.startswith("0 of 1")

    simulate(lambda: pages.append(opened(library)), use)
