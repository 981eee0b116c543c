"""Where completions end, and the random streams that they are drawn from."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from keel.engines.sampler import (
    AHEAD,
    EOS,
    GOING,
    LENGTH,
    STOP,
    Stops,
    Uniforms,
    eos_ids,
    occurrences,
    philox,
)
from keel.models.build import byte_tokenizer
from keel.types import KeelError, Sampling
from tests.engines.tiny import TOKENIZER, tiny

BYTES = byte_tokenizer(64)
END = BYTES.eos_token_id


def codes(stops: Stops, tokens: list[int], budget: int = 1000) -> list[int]:
    """What each token of one sequence does."""
    return [
        int(stops.check(np.array([0]), np.array([token]), np.array([place + 1 >= budget]))[0])
        for place, token in enumerate(tokens)
    ]


def stops_for(*strings: str, ids: tuple[int, ...] = ()) -> Stops:
    return Stops((END,), Sampling(9, stop=strings, stop_ids=ids), BYTES, len(BYTES))


def test_eos_ids_come_from_generation_config_config_and_tokenizer() -> None:
    model = tiny("llama")
    assert eos_ids(model, TOKENIZER) == (1,)
    model.generation_config.eos_token_id = [7, 3]
    assert eos_ids(model, TOKENIZER) == (1, 3, 7)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 5
    assert eos_ids(model, TOKENIZER) == (1, 5)
    bare = copy.deepcopy(TOKENIZER)
    bare.eos_token = None
    assert eos_ids(model, bare) == (5,)
    model.config.eos_token_id = [5, 50_000]  # an id that the vocabulary does not have
    assert eos_ids(model, bare) == (5,)


def test_a_character_of_several_tokens_is_a_stop_string() -> None:
    tokens = BYTES.encode("aé€z", add_special_tokens=False)
    assert len(tokens) == 7
    assert codes(stops_for("€"), tokens)[:6] == [GOING] * 5 + [STOP]
    assert codes(stops_for("é€"), tokens)[:6] == [GOING] * 5 + [STOP]
    assert codes(stops_for("é"), tokens)[:3] == [GOING, GOING, STOP]


def test_special_tokens_do_not_part_the_text() -> None:
    a, b = BYTES.encode("ab", add_special_tokens=False)
    pad = BYTES.pad_token_id
    assert codes(stops_for("ab"), [a, *[pad] * 20, b]) == [GOING] * 21 + [STOP]


def test_a_special_token_as_stop_is_its_id() -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    alone = Stops((END,), Sampling(9, stop=("<|im_end|>",)), tokenizer, len(tokenizer))
    assert alone.by_token is not None
    assert codes(alone, [a, end, b]) == [GOING, STOP, GOING]
    both = Stops((END,), Sampling(9, stop=("<|im_end|>", "b")), tokenizer, len(tokenizer))
    assert codes(both, [a, end]) == [GOING, STOP]
    assert codes(both, [a, b]) == [GOING, STOP]


def test_a_stop_that_cannot_match_is_refused() -> None:
    """One with a control token in it, which is not text; other special tokens are."""
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</sol>"]})
    end, stop = tokenizer.eos_token_id, f"{tokenizer.eos_token}\n"
    with pytest.raises(KeelError, match=rf"never matches.*its id {end} in stop_ids"):
        Stops((END,), Sampling(9, stop=(stop,)), tokenizer, len(tokenizer))
    with pytest.raises(KeelError, match="stop = 'É' holds 'É', which the tokenizer does not know"):
        Stops((1,), Sampling(9, stop=("É",)), TOKENIZER, len(TOKENIZER))
    ids = tokenizer.encode("</sol>\n", add_special_tokens=False)
    content = Stops((END,), Sampling(9, stop=("</sol>\n",)), tokenizer, len(tokenizer))
    assert codes(content, ids) == [GOING, STOP]


def test_a_long_string_is_found_after_much_text() -> None:
    text = "x" * 200 + "the end of it"
    tokens = BYTES.encode(text, add_special_tokens=False)
    assert codes(stops_for("the end of it"), tokens) == [GOING] * 212 + [STOP]


def test_the_reasons_have_an_order() -> None:
    a, b = BYTES.encode("ab", add_special_tokens=False)
    assert codes(stops_for(ids=(END,)), [END], budget=1) == [EOS]
    assert codes(stops_for("ab"), [a, b], budget=2) == [GOING, STOP]
    assert codes(stops_for(ids=(b,)), [a, b], budget=2) == [GOING, STOP]
    assert codes(stops_for("z"), [a, b], budget=2) == [GOING, LENGTH]


def test_sequences_keep_their_own_text() -> None:
    a, b = BYTES.encode("ab", add_special_tokens=False)
    stops = stops_for("ab")
    no = np.zeros(2, dtype=bool)
    assert stops.check(np.array([0, 1]), np.array([a, b]), no).tolist() == [GOING, GOING]
    # The rows have changed places.
    assert stops.check(np.array([1, 0]), np.array([b, b]), no).tolist() == [GOING, STOP]


@pytest.mark.parametrize("number", [-1, len(BYTES)])
def test_stop_ids_outside_the_vocabulary_are_refused(number: int) -> None:
    with pytest.raises(Exception, match="is not a token"):
        stops_for(ids=(number,))


# ---------------------------------------------------------------- random streams


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000" * 4, "00000000" * 2, "6627e8d5e169c58dbc57ac4c9b00dbd8"),
        ("ffffffff" * 4, "ffffffff" * 2, "408f276d41c83b0ea20bc7c66d5451fd"),
        (
            "243f6a8885a308d313198a2e03707344",
            "a4093822299f31d0",
            "d16cfe0994fdcceb5001e42024126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    """Test vectors of the authors' Random123 library for philox4x32-10."""

    def words(text: str) -> np.ndarray:
        return np.array([int(text[i : i + 8], 16) for i in range(0, len(text), 8)], np.uint64)

    assert philox(words(counter), words(key)).tolist() == words(expected).tolist()


def numbers(ids: list[str], n: int, seed: int, sequence: int, count: int = 80) -> list[float]:
    uniforms = Uniforms(ids, n, seed)
    each = (uniforms.take(np.array([sequence]), np.array([place])) for place in range(count))
    return [float(number[0, 0]) for number in each]


def test_numbers_depend_on_their_stream_and_place_only() -> None:
    base = numbers(["a"], 1, 0, 0)
    assert base == numbers(["b", "a"], 3, 0, 3)  # other company, same name
    others = [
        numbers(["a"], 1, 1, 0),
        numbers(["b"], 1, 0, 0),
        numbers(["a", "a"], 1, 0, 1),
        numbers(["a"], 2, 0, 1),
    ]
    assert len({number for one in [base, *others] for number in one}) == 5 * 80


def test_numbers_do_not_depend_on_who_asks_when() -> None:
    """Rows that entered at different times are at different places of their blocks, and some are
    asked for ahead: all that are taken, or a part of them."""
    uniforms = Uniforms(["a", "b"], 2, 7)
    places = np.zeros(4, dtype=np.int64)
    taken: list[list[float]] = [[] for _ in range(4)]
    rng = np.random.default_rng(0)
    while (places < 200).any():
        rows = np.flatnonzero((rng.random(4) < 0.6) & (places < 200))
        asked = int(rng.integers(1, AHEAD + 1))
        used = int(rng.integers(1, asked + 1))
        for row, drawn in zip(rows, uniforms.take(rows, places[rows], asked).T, strict=True):
            taken[row].extend(drawn[:used].tolist())
        places[rows] += used
    expected = [numbers(["a", "b"], 2, 7, row, len(taken[row])) for row in range(4)]
    assert taken == expected


def test_numbers_are_uniform() -> None:
    uniforms = Uniforms([str(i) for i in range(500)], 4, 3)
    sequences = np.arange(2000)
    drawn = np.concatenate([uniforms.take(sequences, np.full(2000, t))[0] for t in range(20)])
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # 40,000 numbers: the mean has a standard error of 0.0014, a tenth's share of 0.0015.
    assert drawn.mean() == pytest.approx(0.5, abs=0.006)
    shares = np.histogram(drawn, bins=10, range=(0, 1))[0] / len(drawn)
    np.testing.assert_allclose(shares, 0.1, atol=0.006)
    neighbours = drawn.reshape(20, 2000)
    # Correlation of 38,000 pairs has a standard error of 0.005.
    assert abs(np.corrcoef(neighbours[:-1].ravel(), neighbours[1:].ravel())[0, 1]) < 0.02


def test_occurrences_count_what_came_before() -> None:
    assert occurrences(["a", "b", "a", "a", "b"]) == [0, 0, 1, 2, 1]
