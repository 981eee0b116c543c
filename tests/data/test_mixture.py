from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from keel.config.sources import TaskSource
from keel.data.mixture import PromptStream, build_tasks, stored, validation_prompts
from keel.platform.files import write_jsonl
from keel.types import KeelError, Prompt
from tests.data.made import Listed, source


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def stream(seed: int = 0, prepare: object = None) -> PromptStream:
    tasks = [Listed("few", 7), Listed("many", 100), Listed("endless", None)]
    return PromptStream(tasks, [1.0, 2.0, 5.0], seed, prepare)  # type: ignore[arg-type]


def test_a_stream_is_a_function_of_its_seed() -> None:
    assert ids(stream(1).take(300)) == ids(stream(1).take(300))
    assert ids(stream(1).take(300)) != ids(stream(2).take(300))
    # However it is cut.
    cut = stream(1)
    assert ids(cut.take(1) + cut.take(0) + cut.take(299)) == ids(stream(1).take(300))


@pytest.mark.parametrize("at", [0, 1, 7, 8, 123])
def test_a_stream_resumes_from_its_state(at: int) -> None:
    prepare = only_even
    whole = stream(3, prepare)
    expected = ids(whole.take(at + 200))[at:]
    first = stream(3, prepare)
    first.take(at)
    state = json.loads(json.dumps(first.state()))
    second = stream(3, prepare)
    second.take(13)  # whatever it did before
    second.restore(state)
    assert ids(second.take(200)) == expected
    assert second.left_out == whole.left_out
    assert second.state() == whole.state()


def only_even(prompt: Prompt) -> Prompt | None:
    return prompt if int(prompt.id.rsplit("/", 1)[1]) % 2 == 0 else None


def test_each_prompt_comes_once_an_epoch_in_an_order_of_its_own() -> None:
    one = PromptStream([Listed("few", 20)], [1.0], 0)
    epochs = [ids(one.take(20)) for _ in range(3)]
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_an_endless_task_goes_by_index() -> None:
    one = PromptStream([Listed("endless", None)], [1.0], 0)
    assert ids(one.take(3)) == ["endless/train/0", "endless/train/1", "endless/train/2"]


def test_shares_are_the_weights() -> None:
    counts = Counter(prompt.task for prompt in stream(0).take(4_000))
    # Binomial standard deviation at most 32; five of them.
    for name, share in (("few", 1 / 8), ("many", 2 / 8), ("endless", 5 / 8)):
        assert abs(counts[name] - 4_000 * share) < 160


def test_what_is_left_out_is_counted() -> None:
    some = stream(0, only_even)
    prompts = some.take(200)
    assert all(only_even(prompt) for prompt in prompts)
    state = some.state()
    taken, left_out = state["taken"], state["left_out"]
    assert sum(taken.values()) == 200 + sum(left_out.values())
    assert left_out["endless"] == pytest.approx(taken["endless"] / 2, abs=1)


@pytest.mark.parametrize("size", [3, None])
def test_a_task_without_a_fitting_prompt_stops(size: int | None) -> None:
    task = Listed("long", size, size)
    with pytest.raises(KeelError, match="'long': every train prompt is left out"):
        PromptStream([task], [1.0], 0, lambda prompt: None).take(1)
    with pytest.raises(KeelError, match="'long': every validation prompt is left out"):
        validation_prompts([task], [1.0], 2, lambda prompt: None)


def test_a_task_without_prompts_stops() -> None:
    with pytest.raises(KeelError, match="has no train prompt"):
        PromptStream([Listed("none", 0)], [1.0], 0).take(1)
    with pytest.raises(KeelError, match="no validation prompt"):
        validation_prompts([Listed("none", 3, 0)], [1.0], 1)
    assert validation_prompts([Listed("none", 3, 0)], [1.0], 0) == []


def test_a_state_of_another_mixture_is_refused() -> None:
    other = PromptStream([Listed("x", 3)], [1.0], 0)
    with pytest.raises(KeelError, match="resume with the recipe of the run"):
        stream().restore(other.state())


def test_validation_takes_the_first_of_each_task_by_weight() -> None:
    tasks = [Listed("a", 5, 100), Listed("b", 5, 100)]
    found = validation_prompts(tasks, [1.0, 3.0], 40)
    assert Counter(p.task for p in found) == {"a": 10, "b": 30}
    assert [p.id for p in found if p.task == "a"] == [f"a/validation/{i}" for i in range(10)]
    assert ids(validation_prompts(tasks, [1.0, 3.0], 8)) == ids(found)[:8]
    # A split that has no more leaves its place to the others.
    short = [Listed("a", 5, 3), Listed("b", 5, 100)]
    assert Counter(p.task for p in validation_prompts(short, [1.0, 1.0], 40)) == {"a": 3, "b": 37}
    assert len(validation_prompts(short, [1.0, 1.0], 500)) == 103


def test_validation_prompts_differ_and_are_never_trained_on() -> None:
    # Two-digit sums: some 10,000 prompts, so that draws do come twice.
    tasks = build_tasks([source("addition"), source("sort_digits")], seed=5)
    held = validation_prompts(tasks, [1.0, 1.0], 200)
    assert len({p.content for p in held}) == 200
    assert ids(held) == ids(validation_prompts(tasks, [1.0, 1.0], 200))
    trained = PromptStream(tasks, [1.0, 1.0], 5).take(3_000)
    assert not {p.content for p in trained} & {p.content for p in held}


def test_every_row_of_an_evaluation_set_is_asked(tmp_path: Path) -> None:
    """Rows of equal prompts count in a published figure."""
    asked = ["a", "b", "a", "a"]
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": one, "answer": "1"} for one in asked])
    table = TaskSource(path=str(tmp_path / "rows.jsonl"), answer="answer")
    tasks = build_tasks([table], seed=0, whole=True)
    assert [prompt.content for prompt in validation_prompts(tasks, [1.0], 9)] == asked


@pytest.mark.parametrize("keys", [{}, {"prompt": "messages"}, {"prompt": "{messages}"}])
def test_the_last_turn_of_a_conversation_is_the_answer(
    keys: dict[str, str], tmp_path: Path
) -> None:
    turns = [{"role": role, "content": text}
             for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]  # fmt: skip
    rows = [{"messages": [*turns, {"role": "assistant", "content": one}]} for one in "xy"]
    rows.append({"messages": turns})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    table = TaskSource(path=str(tmp_path / "rows.jsonl"), bad_rows="quarantine", **keys)
    (task,) = build_tasks([table], seed=0, whole=True)
    prompts = validation_prompts([task], [1.0], 9)
    assert [(list(p.content), task.gold(p)) for p in prompts] == [(turns, "x"), (turns, "y")]
    (left,) = stored(task).left_out  # type: ignore[union-attr]
    assert left.reason.endswith("column 'messages' does not end with the assistant's turn")


def test_validation_ends_where_an_endless_task_has_no_more() -> None:
    tasks = build_tasks([source("addition", options={"digits": 1})], seed=0)
    held = validation_prompts(tasks, [1.0], 500)
    assert 1 <= len(held) < 40
