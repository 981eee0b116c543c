"""Ends of completions: where the ids come from, and stop strings on awkward tokens."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from keel.engines.sampler import EOS, GOING, LENGTH, STOP, Stops, eos_ids
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
