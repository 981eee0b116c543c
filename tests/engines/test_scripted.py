"""The scripted engine says its lines."""

from __future__ import annotations

import pytest

from keel.types import Engine, KeelError, Prompt, Sampling
from tests.engines.scripted import ScriptedEngine
from tests.engines.tiny import TOKENIZER

PROMPTS = [Prompt("p", "1+1=", tokens=(3,)), Prompt("q", "2+2=", tokens=(4,))]


def test_lines_by_id_or_text_are_taken_in_turn() -> None:
    engine = ScriptedEngine({"p": ["2", "3"], "2+2=": ["4"]}, TOKENIZER)
    assert isinstance(engine, Engine)
    groups = engine.sample(PROMPTS, 3, Sampling(9), seed=0)
    assert [[c.text for c in g.completions] for g in groups] == [["2", "3", "2"], ["4", "4", "4"]]
    completion = groups[0].completions[0]
    assert completion.tokens.tolist() == [*TOKENIZER.encode("2", add_special_tokens=False), 1]
    assert completion.log_probs.tolist() == [-1.0, -1.0]
    assert completion.finish == "eos"
    assert completion.written.all()


def test_a_function_may_give_log_probabilities() -> None:
    engine = ScriptedEngine(lambda prompt, index: ("ab", [-0.5, -2.0, float(-index)]), TOKENIZER)
    group = engine.sample(PROMPTS[:1], 2, Sampling(9), seed=0)[0]
    assert group.completions[1].log_probs.tolist() == [-0.5, -2.0, -1.0]
    short = engine.sample(PROMPTS[:1], 1, Sampling(2), seed=0)[0].completions[0]
    assert (short.text, short.finish, len(short.log_probs)) == ("ab", "length", 2)
    engine.sync({})
    assert engine.syncs == 1


def test_a_prompt_without_a_line_and_wrong_log_probabilities_are_refused() -> None:
    with pytest.raises(KeelError, match="no line for prompt 'q'"):
        ScriptedEngine({"p": ["2"]}, TOKENIZER).sample(PROMPTS, 1, Sampling(9), seed=0)
    with pytest.raises(KeelError, match="gives 1 log-probabilities for the 3 tokens"):
        ScriptedEngine({"p": [("ab", [-1.0])]}, TOKENIZER).sample(PROMPTS[:1], 1, Sampling(9), 0)
