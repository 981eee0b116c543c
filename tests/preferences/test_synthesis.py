"""Synthetic preferences by a real server: what is asked, paired, stored, paid and resumed."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.preferences.files import preference_rows
from keel.preferences.records import CompletionRecord, PairRecord
from keel.preferences.statistics import describe_costs
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis import SynthesisReport, synthesize
from keel.preferences.synthesis_options import (
    CompletionModel,
    ModelFolder,
    ModelServer,
    SynthesisOptions,
    Usage,
    forecast_costs,
    parse_model,
    requests_path,
)
from keel.preferences.synthesis_work import chat, different_texts, in_parallel, new_pairs
from keel.types import KeelError, Sampling
from tests.preferences.synthesis_made import (
    JUDGE,
    QUICK,
    WRITER,
    both,
    judges,
    options,
    prompts,
    server,
)
from tests.rewards.judge_server import Asked, Fault, JudgeServer, always


@pytest.fixture
def found() -> Iterator[JudgeServer]:
    with server() as opened:
        yield opened


def done(path: Path, chosen: SynthesisOptions, count: int = 8, **more: Any) -> SynthesisReport:
    with PreferenceStore(path, create=True) as store:
        return synthesize(store, chosen, prompts(count), **more)


def owed(log: list[Asked]) -> float:
    """Dollars, by what the server says was used and the prices in `options`."""
    total = 0.0
    for asked in log:
        price_in, price_out = (1.0, 4.0) if judges(asked) else (2.0, 8.0)
        total += (asked.billed[0] * price_in + asked.billed[1] * price_out) / 1e6
    return total


# ---------------------------------------------------------------- what is asked and stored


def test_every_prompt_gets_completions_pairs_and_labels(tmp_path: Path, found: JudgeServer) -> None:
    report = done(tmp_path / "a.db", options(found.url))
    assert report.added == {"completions": 24, "pairs": 24, "labels": 48}
    assert report.left == {"completions": 0, "labels": 0}
    assert sum(map(judges, found.log)) == 48
    writing = [asked for asked in found.log if not judges(asked)]
    assert len(writing) == 24
    bodies = {json.dumps(asked.body["messages"]) for asked in writing}
    assert len(bodies) == 8
    for body in bodies:
        seeds = {a.body["seed"] for a in writing if json.dumps(a.body["messages"]) == body}
        assert seeds == {0, 1, 2}
    assert {a.body["temperature"] for a in writing} == {1.0}
    assert "response_format" not in writing[0].body
    assert found.peak <= 4
    with PreferenceStore(tmp_path / "a.db") as store:
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 60, "seed": 0}
        for one in store.completions():
            assert (one.model, one.sampling) == (WRITER, sampling)
            assert one.tokens == len(one.text)
            assert one.seconds is not None
            assert one.seconds > 0
            assert one.columns["finish"] == "stop"
        for pair in store.judged_pairs():
            first, second = pair.labels
            longer = (len(pair.first.text) > len(pair.second.text)) + 0.5 * (
                len(pair.first.text) == len(pair.second.text)
            )
            assert first.value == second.value == longer
            assert [first.shown_first, second.shown_first] == ["first", "second"]
            assert {label.annotator for label in pair.labels} == {JUDGE}
            assert first.note == "length"
            assert first.seconds is not None
            assert first.at is not None
            assert first.cost is not None


def test_a_judge_of_places_ties_everywhere(tmp_path: Path) -> None:
    with server(always("first")) as found:
        report = done(tmp_path / "a.db", options(found.url))
        shown = Counter((a.material["first"], a.material["second"]) for a in found.log if judges(a))
    assert all(shown[other, one] == 1 for one, other in shown)
    with PreferenceStore(tmp_path / "a.db") as store:
        rows = list(preference_rows(store))
        assert [[label.value for label in pair.labels] for pair in store.judged_pairs()] == [
            [1.0, 0.0]
        ] * 24
    assert {row["probability"] for row in rows} == {0.5}
    (audit,) = report.audit
    assert (audit["ties"], audit["order_consistency"]["mean"]) == (24, 0.0)
    assert audit["position_bias"]["mean"] == 1.0


def test_a_pair_with_one_order_without_verdict_is_skipped(tmp_path: Path) -> None:
    def verdict(asked: Asked) -> str:
        """No verdict on one of the two orders of each pair."""
        first, second = asked.material["first"], asked.material["second"]
        word = "first" if first < second else "neither"
        return json.dumps({"reason": "so", "verdict": word})

    with server(verdict) as found:
        report = done(tmp_path / "a.db", options(found.url), 4)
        # The order without a verdict is asked twice (attempts = 2).
        assert sum(map(judges, found.log)) == 12 * 3
        again = done(tmp_path / "a.db", options(found.url), 4)
        assert sum(map(judges, found.log)) == 12 * 3
    assert again.added["labels"] == 0
    assert (report.audit[0]["pairs"], report.audit[0]["no_verdict"]) == (0, 12)
    with PreferenceStore(tmp_path / "a.db") as store:
        labels = list(store.labels())
        assert {label.value for label in labels} == {None}
        assert sum("the other order has no verdict: so" in label.note for label in labels) == 12
        assert sum("is none of the choices" in label.note for label in labels) == 12
        assert list(preference_rows(store)) == []


def test_a_longer_run_adds_to_the_store(tmp_path: Path, found: JudgeServer) -> None:
    path = tmp_path / "a.db"
    prompt = prompts(1)[0]
    with PreferenceStore(path, create=True) as store:
        store.add([prompt, *(CompletionRecord(prompt.id, text, "old") for text in ("x", "yy"))])
    chosen = options(found.url)
    without = replace(chosen, models=())
    report = done(path, without, 1)
    assert report.added == {"completions": 0, "pairs": 1, "labels": 2}
    asked = len(found.log)
    report = done(path, replace(chosen, samples=1), 1)
    assert report.added == {"completions": 1, "pairs": 2, "labels": 4}
    more = done(path, replace(chosen, samples=2, pairs=6), 1)
    assert more.added == {"completions": 1, "pairs": 3, "labels": 6}
    assert len(found.log) - asked == 2 + 4 + 6
    names = [a.name for a in found.log]
    assert len(set(names)) == len(names)


def test_the_store_alone_keeps_from_paying_again(tmp_path: Path, found: JudgeServer) -> None:
    done(tmp_path / "a.db", options(found.url), 4)
    requests_path(tmp_path / "a.db").unlink()
    asked = len(found.log)
    report = done(tmp_path / "a.db", options(found.url), 4)
    assert len(found.log) == asked
    assert not any(report.added.values())


def test_another_judge_or_rubric_labels_the_pairs_again(tmp_path: Path, found: JudgeServer) -> None:
    path = tmp_path / "a.db"
    chosen = options(found.url)
    done(path, chosen, 4)
    report = done(path, replace(chosen, rubric="is it long"), 4)
    assert report.added == {"completions": 0, "pairs": 0, "labels": 24}
    other = ModelServer("judge-2", found.url, price=(1.0, 4.0), options=QUICK)
    report = done(path, replace(chosen, judge=other), 4)
    assert report.added == {"completions": 0, "pairs": 0, "labels": 24}
    assert {(audit["judge"], audit["rubric"][:7]) for audit in report.audit} == {
        *((JUDGE, "how cor"), (JUDGE, "is it l"), ("judge-2", "how cor"))
    }


def test_the_reference_and_the_rubric_reach_the_judge(tmp_path: Path) -> None:
    with server() as found:
        done(tmp_path / "a.db", options(found.url, reference="answer", rubric="is it long"), 2)
        asked = next(a for a in found.log if judges(a))
        assert asked.material["reference"] in ("0", "1")
        assert "is it long" in asked.body["messages"][0]["content"]
    with server() as found:
        with pytest.raises(KeelError, match="reference = 'missing': no prompt has such a column"):
            done(tmp_path / "b.db", options(found.url, reference="missing"), 2)
        assert found.log == []


def test_a_refused_prompt_is_stored_blank(tmp_path: Path, found: JudgeServer) -> None:
    found.fault_of = lambda asked: (
        Fault(status=400, error={"message": "no", "code": "content_filter"})
        if not judges(asked) and "question 1" in json.dumps(asked.body)
        else None
    )
    report = done(tmp_path / "a.db", options(found.url), 3)
    assert report.added == {"completions": 9, "pairs": 6, "labels": 12}
    asked = len(found.log)
    assert done(tmp_path / "a.db", options(found.url), 3).added["completions"] == 0
    assert len(found.log) == asked
    with PreferenceStore(tmp_path / "a.db") as store:
        refused = [one for one in store.completions() if one.columns.get("refusal")]
    assert [one.text for one in refused] == ["", "", ""]


# ---------------------------------------------------------------- forecast, ledger, budget


@pytest.mark.slow
def test_the_forecast_comes_first_and_holds_what_it_takes(
    tmp_path: Path, found: JudgeServer
) -> None:
    """10 of 40 prompts are the sample; what is spent lies in the forecast's interval."""
    lines: list[tuple[str, int]] = []
    report = done(
        tmp_path / "a.db",
        options(found.url, forecast_prompts=10),
        40,
        note=lambda line: lines.append((line, len(found.log))),
    )
    (at,) = [count for line, count in lines if line.startswith("forecast, from a sample of 10")]
    assert at == 10 * (3 + 6)
    assert len(found.log) == 40 * 9
    assert len(set(found.names)) == len(found.names)
    actual = {"dollars": owed(found.log)}
    actual |= dict(zip(("input_tokens", "output_tokens"), found.billed, strict=True))
    forecast = report.forecast
    assert forecast is not None
    assert (forecast.sample, forecast.prompts) == (10, 40)
    for unit, amount in actual.items():
        total = forecast.totals[unit]  # type: ignore[index]
        assert total.low < amount < total.high
        assert total.low < total.mean < total.high < 1.5 * amount
        of_models = sum(amounts[unit] for amounts in forecast.models.values())  # type: ignore[index]
        assert of_models == pytest.approx(total.mean)
    assert forecast.totals["hours"].mean > 0


def test_a_forecast_is_a_scaled_mean_with_interval() -> None:
    usage = Usage()
    for prompt, dollars in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        usage.add("labels", "m", prompt, {"dollars": dollars})
    found = forecast_costs(usage, True, {*"abc"}, 12)
    total = found.totals["dollars"]
    # Student's t of two degrees, 4.303, times a standard error of 1/√3, for each of nine prompts.
    half = 9 * 4.302653 / 3**0.5
    assert (total.mean, total.high) == (24, pytest.approx(24 + half, rel=1e-6))
    assert total.low == 6  # what is spent already is the least
    alone = forecast_costs(usage, False, {"a"}, 4)
    assert alone.totals == {}


def test_every_request_is_counted_once_as_dollars(tmp_path: Path, found: JudgeServer) -> None:
    path = tmp_path / "a.db"
    first = done(path, options(found.url, round=2))
    again = done(path, options(found.url, round=2))
    assert again.forecast is None
    spent = owed(found.log)
    for report in (first, again):
        assert report.account is not None
        assert report.account.spent.dollars == pytest.approx(spent, rel=1e-9)
    assert first.account is not None
    used = first.account.spent
    assert (used.tokens_in, used.tokens_out) == found.billed
    with PreferenceStore(path) as store:
        counted = describe_costs(store)["table"]
        forecasts = [(cost.kind, cost.unit, cost.round) for cost in store.costs(forecast=True)]
    every = [row["actual_dollars"] for row in counted if row["kind"] == "api"]
    assert every == [pytest.approx(spent, rel=1e-9)] * 2  # of the round, and of all
    assert forecasts == [("api", "dollars", 2), ("api", "hours", 2)]


def test_only_forecast_pays_for_the_sample_alone(tmp_path: Path, found: JudgeServer) -> None:
    chosen = options(found.url, forecast_prompts=2)
    report = done(tmp_path / "a.db", chosen, only_forecast=True)
    assert report.added["completions"] == 6
    assert len(found.log) == 2 * 9
    assert report.left["completions"] == 18
    whole = done(tmp_path / "a.db", chosen)
    assert len(found.log) == len(set(found.names)) == 8 * 9
    assert whole.forecast is not None
    assert report.forecast is not None
    assert (report.forecast.prompts, whole.forecast.prompts) == (8, 6)
    with PreferenceStore(tmp_path / "a.db") as store:  # the first one
        (entered, _) = store.costs(forecast=True)
    assert entered.amount == pytest.approx(report.forecast.totals["dollars"].mean)


def test_a_budget_is_hard(tmp_path: Path, found: JudgeServer) -> None:
    """Below the server's bill at any time, with four requests at a time; and it is used up."""
    path = tmp_path / "a.db"
    report = done(path, options(found.url, budget=0.01), 12)
    assert report.stopped is not None
    assert "budget = 0.01 dollars is used up" in report.stopped
    assert 0.008 < owed(found.log) <= 0.01
    assert report.account is not None
    assert report.account.spent.dollars == pytest.approx(owed(found.log), rel=1e-9)
    assert sum(report.left.values()) > 0
    assert done(path, options(found.url, budget=0.01), 12).stopped is not None
    assert owed(found.log) <= 0.01
    report = done(path, options(found.url, budget=1.0), 12)
    assert (report.stopped, report.left) == (None, {"completions": 0, "labels": 0})
    assert len(found.log) == len(set(found.names)) == 12 * 9


def test_without_prices_dollars_are_unknown(tmp_path: Path, found: JudgeServer) -> None:
    lines: list[str] = []
    chosen = options(found.url)
    judge = ModelServer(JUDGE, found.url, options=QUICK)
    report = done(tmp_path / "a.db", replace(chosen, judge=judge), note=lines.append)
    assert report.forecast is not None
    assert "dollars" not in report.forecast.totals
    assert any("total: dollars unknown (no price)" in line for line in lines)
    with PreferenceStore(tmp_path / "a.db") as store:
        assert {label.cost for label in store.labels()} == {None}
        assert not any(cost.unit == "dollars" for cost in store.costs())
    with pytest.raises(KeelError, match=f"budget = 1: the price of '{JUDGE}' is unknown"):
        replace(chosen, judge=judge, budget=1.0)


# ---------------------------------------------------------------- models, failures


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("w@openai", ModelServer("w")),
        ("a/b:7@https://host/v1", ModelServer("a/b:7", "https://host/v1")),
        ("@cf/a@http://host:1/v1", ModelServer("@cf/a", "http://host:1/v1")),
        ("org/name", ModelFolder("org/name")),
        ("./folder", ModelFolder("./folder")),
    ],
)
def test_how_a_model_is_named(text: str, model: CompletionModel) -> None:
    assert parse_model(text) == model


def test_an_address_without_a_model_is_not_repeated() -> None:
    with pytest.raises(KeelError, match="write NAME@http://HOST:PORT/v1") as error:
        parse_model("@http://user:sesame@host/v1")
    assert "sesame" not in str(error.value)


def test_a_failing_server_ends_in_one_line(tmp_path: Path, found: JudgeServer) -> None:
    path = tmp_path / "a.db"
    found.fault_of = lambda asked: Fault(status=500) if judges(asked) else None
    chosen = options(found.url)
    stubborn = replace(chosen.judge, options={**QUICK, "retries": 1})  # type: ignore[type-var]
    with pytest.raises(KeelError, match=r"model 'judge' at .*Error code: 500"):
        done(path, replace(chosen, judge=stubborn))
    with PreferenceStore(path) as store:
        completions = store.counts()["completions"]
    assert completions > 0
    found.fault_of = lambda asked: None
    report = done(path, chosen)
    assert report.left == {"completions": 0, "labels": 0}
    writing = [a.name for a in found.log if not judges(a)]
    assert len(writing) == len(set(writing)) == 24


def test_a_missing_key_is_found_before_anything_is_paid(
    tmp_path: Path, found: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SYNTHESIS_KEY", raising=False)
    chosen = options(found.url)
    judge = replace(chosen.judge, api_key_env="SYNTHESIS_KEY")  # type: ignore[type-var]
    with pytest.raises(KeelError, match="SYNTHESIS_KEY holds no API key"):
        done(tmp_path / "a.db", replace(chosen, judge=judge))
    assert found.log == []


def test_a_key_goes_to_its_server_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNTHESIS_KEY", "sesame-open-1234567890")
    lines: list[str] = []

    with JudgeServer(lambda asked: "an answer") as writer, server() as judging:
        chosen = options(judging.url)
        model = ModelServer(
            WRITER, writer.url, (2.0, 8.0), api_key_env="SYNTHESIS_KEY", options=QUICK
        )
        done(tmp_path / "a.db", replace(chosen, models=(model,)), 2, note=lines.append)
        assert writer.log[0].headers["authorization"] == "Bearer sesame-open-1234567890"
        assert all("authorization" not in asked.headers for asked in judging.log)
    held = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"sesame-open" not in held
    assert "sesame" not in "".join(lines)


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    chosen = options("http://127.0.0.1:9/v1")
    with pytest.raises(KeelError, match="is given twice: raise samples"):
        replace(chosen, models=chosen.models * 2)
    with pytest.raises(KeelError, match="temperature = 0 makes the 3 completions of a model equal"):
        replace(chosen, sampling=Sampling(max_tokens=9, temperature=0.0))
    with (
        PreferenceStore(tmp_path / "c.db", create=True) as store,
        pytest.raises(KeelError, match="it has no prompts: give a file"),
    ):
        synthesize(store, chosen)


def test_half_a_character_in_a_reason_is_no_error(tmp_path: Path) -> None:
    reply = '{"reason": "\\ud800 so", "verdict": "first"}'
    with JudgeServer(both(lambda asked: reply)) as found:
        report = done(tmp_path / "a.db", options(found.url), 2)
    assert report.left == {"completions": 0, "labels": 0}
    with PreferenceStore(tmp_path / "a.db") as store:
        assert {label.note for label in store.labels()} == {"? so"}


def test_tool_arguments_are_sent_as_json_text() -> None:
    arguments = {"town": "Bergen", "tags": []}
    call = {"id": "c", "function": {"name": "weather", "arguments": arguments}}
    turns: list[Any] = [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": '{"celsius": 9}'},
        {"role": "user", "content": "So?", "note": 1},
    ]
    sent = chat(turns).messages
    function = {"name": "weather", "arguments": json.dumps(arguments)}
    calls = [{"id": "c", "type": "function", "function": function}]
    assert sent[1] == {"role": "assistant", "content": None, "tool_calls": calls}
    assert sent[2:] == (turns[2], {"role": "user", "content": "So?"})


def completions(*texts: str, model: str = "m") -> list[CompletionRecord]:
    return [
        CompletionRecord("p", text, model, id=f"{at}-{text}-{model}")
        for at, text in enumerate(texts)
    ]


def texts(pairs: list[PairRecord], every: list[CompletionRecord]) -> list[frozenset[str]]:
    text = {one.id: one.text for one in every}
    return [frozenset((text[pair.first], text[pair.second])) for pair in pairs]


@given(
    st.lists(st.sampled_from(["a", "b", "c", "d", "e", " "]), max_size=9),
    st.integers(0, 12),
    st.integers(0, 3),
)
def test_pairs_of_any_completions(words: list[str], most: int, seed: int) -> None:
    every = completions(*words)
    found = new_pairs(every, [], most, seed=seed)
    different = len({word for word in words if word.strip()})
    pairs = texts(found, every)
    assert len(found) == min(most, different * (different - 1) // 2)
    assert len(set(pairs)) == len(pairs)
    assert all(len(pair) == 2 and " " not in pair for pair in pairs)
    # No completion is compared much more often than another.
    used = Counter(text for pair in pairs for text in pair)
    if pairs:
        counts = [used[text] for text in {w for w in words if w.strip()}]
        assert max(counts) - min(counts) <= 2
    # A larger number keeps these, and going on from these gives the same.
    assert new_pairs(every, [], most + 2, seed=seed)[: len(found)] == found
    assert found + new_pairs(every, found, most + 2, seed=seed) == new_pairs(
        every, [], most + 2, seed=seed
    )


def test_order_of_completions_does_not_matter() -> None:
    every = completions("a", "b", "c", "d")
    assert new_pairs(every, [], 4) == new_pairs(every[::-1], [], 4)
    for pair in new_pairs(every, [], 6):
        assert pair.first < pair.second


def test_texts_are_a_pair_once() -> None:
    one, other = completions("a", "b"), completions("a", "b", "c", model="n")
    there = [PairRecord("p", other[0].id, other[1].id)]
    found = new_pairs([*one, *other], there, 9)
    assert set(texts(found, [*one, *other])) == {frozenset("ac"), frozenset("bc")}


def test_a_text_of_two_models_is_the_first_ones() -> None:
    one, other = completions("a"), completions("a", "b", model="n")
    assert different_texts([*one, *other]) == [one[0], other[1]]


def test_seed_changes_which_pairs() -> None:
    every = completions(*"abcdefgh")
    found = {frozenset(texts(new_pairs(every, [], 4, seed=seed), every)) for seed in range(5)}
    assert len(found) > 1


def test_items_are_drawn_as_workers_become_free() -> None:
    """Also within an event loop, as a notebook's."""
    drawn: list[int] = []

    async def work(item: int) -> None:
        await asyncio.sleep(0)
        assert len(drawn) - item <= 3, "items wait in memory"

    async def notebook() -> None:
        in_parallel((drawn.append(item) or item for item in range(50)), work, workers=3)

    asyncio.run(notebook())
    assert drawn == list(range(50))
