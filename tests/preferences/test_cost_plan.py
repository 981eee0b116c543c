"""The sums of a plan, by hand and by a calculator that reads what is printed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from keel.preferences.cost_plan import (
    PartCost,
    number,
    plan_costs,
    read_plan,
    shipped_plan,
)
from keel.types import KeelError


def shipped() -> dict[str, Any]:
    return tomllib.loads(shipped_plan().read_text("utf-8"))


def costs_of(data: dict[str, Any], tmp_path: Path) -> list[PartCost]:
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(data), "utf-8")
    return list(plan_costs(read_plan(path)))


def calculator(text: str) -> float:
    """What a pocket calculator shows after these keys."""
    first, *rest = text.replace(",", "").split(" ")
    value = float(first)
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        number = float(term)
        value = {"×": value * number, "/": value / number, "+": value + number}[sign]
    return value


def operands(text: str) -> set[float]:
    """The numbers of a line."""
    return {float(term.replace(",", "")) for term in re.findall(r"[\d.,]+", text)}


def test_the_shipped_plan_by_hand() -> None:
    """The same sums with the numbers of the file in them; cents, since money is rounded to them."""
    synthetic, human, gpu = plan_costs(read_plan(shipped_plan()))
    writer = 200_000 * 1.05 * (200 * 0.15 + 300 * 0.60) / 1e6
    judge = 200_000 * 1.05 * (1_100 * 2.00 + 50 * 8.00) / 1e6
    assert [lines[-1].value for _, lines in synthetic.items] == [44.10, 546.00]
    assert synthetic.total.value == pytest.approx(writer + judge, abs=0.01) == 590.10
    assert human.total.value == pytest.approx(11_000 * 90 / 3600 * 25 * 1.2, abs=0.01) == 8250.00
    seconds = 6 * 1e9 * (110_000 * 1_000) / (989e12 * 0.3)
    # Six digits are kept of hours, and cents of money.
    assert gpu.total.value == pytest.approx(seconds / 3600 * 20 * 1.5 * 3.00, abs=0.01) == 55.61
    assert all(cost.within for cost in (synthetic, human, gpu))
    assert [(cost.part.low, cost.part.high) for cost in (synthetic, human, gpu)] == [
        *((500, 1_000), (5_000, 20_000), (0, 1_000))
    ]


def test_every_line_is_what_a_calculator_shows_and_the_next_uses_it() -> None:
    count = 0
    for cost in plan_costs(read_plan(shipped_plan())):
        for _, lines in cost.items:
            for at, line in enumerate(lines):
                shown = calculator(line.text)
                rounded = round(shown, 2) if line.unit == "dollars" else float(f"{shown:.6g}")
                assert line.value == rounded, line
                later = [*lines[at + 1 :], cost.total]
                assert any(line.value in operands(other.text) for other in later), line
                count += 1
        assert cost.total.value == round(calculator(cost.total.text), 2)
    assert count == 6 + 6 + 4 + 6


def test_prices_and_quantities_count(tmp_path: Path) -> None:
    """Each number of the file changes a total; one that did not would not be in the sum."""
    before = [cost.total.value for cost in costs_of(shipped(), tmp_path)]
    changed = 0
    for name in shipped()["prices"]:
        data = shipped()
        data["prices"][name]["value"] *= 2
        assert [c.total.value for c in costs_of(data, tmp_path)] != before, name
    for part, table in enumerate(shipped()["parts"]):
        for kind in ("api", "human", "gpu"):
            for at, item in enumerate(table.get(kind, [])):
                for key, value in item.items():
                    if isinstance(value, str):
                        continue
                    data = shipped()
                    data["parts"][part][kind][at][key] = value / 2 if value < 1 else value * 2
                    after = [cost.total.value for cost in costs_of(data, tmp_path)]
                    assert [a != b for a, b in zip(after, before, strict=True)] == [
                        n == part for n in range(3)
                    ], key
                    changed += 1
    assert changed == 4 + 4 + 4 + 8


def test_what_is_over_the_limit_is_outside(tmp_path: Path) -> None:
    data = shipped()
    data["parts"][1]["high"] = 8_249.99
    assert [cost.within for cost in costs_of(data, tmp_path)] == [True, False, True]
    data["parts"][1] |= {"low": 8_250.01, "high": 9_000}
    assert [cost.within for cost in costs_of(data, tmp_path)] == [True, False, True]


def test_numbers_are_printed_with_their_digits() -> None:
    found = [number(value) for value in (200_000, 1.05, 0.617908, 1e-12, 0, 1234.5, 0.1 + 0.2)]
    assert found == ["200,000", "1.05", "0.617908", "1e-12", "0", "1,234.5", "0.3"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"prices": {}}, "unknown price 'writer_input'"),
        ({"dates": "2026"}, "dates"),
        ({"parts": []}, "parts"),
        ({"parts": [{"name": "a", "low": 0, "high": 1}]}, "part 'a' is empty"),
        ({"parts": [{"name": "a", "low": -1, "high": 1}]}, "low"),
        ({"date": 2026}, "date"),
    ],
)
def test_a_wrong_plan_is_one_clear_line(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(KeelError) as error:
        costs_of(shipped() | change, tmp_path)
    assert what in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text("a = [")
    for path in (tmp_path / "plan.toml", tmp_path / "none.toml", tmp_path):
        with pytest.raises(KeelError, match="cannot be read"):
            read_plan(path)
