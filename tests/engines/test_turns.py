"""Conversations in which a task answers the policy."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pytest

from keel.engines.native import NativeEngine
from keel.models.build import byte_tokenizer
from keel.platform.time_limit import Cancelled, cancelled_by
from keel.types import KeelError, Observation, Prompt, Sampling
from tests.engines import scripted
from tests.engines.scripted import ReplyTask, ScriptedEngine
from tests.engines.tiny import TOKENIZER, ragged_prompts, stock_log_probs, tiny

EOS = 1
ASKED = Prompt("p", "3+4", tokens=(5,))


@dataclass
class Calculator(ReplyTask):
    """Answers the first calls of a completion with a fixed text."""

    answer: str = "=7;"
    times: int = 1
    asked: list[str] = field(default_factory=list)

    def reply(self, prompt: Prompt, text: str) -> str | None:
        self.asked.append(text)
        return self.answer if text.count(self.answer) < self.times else None


talk = partial(scripted.talk, tokenizer=TOKENIZER)
GO = ScriptedEngine(lambda prompt, index: "go", TOKENIZER)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def test_a_scripted_tool_call() -> None:
    def script(prompt: Prompt, index: int) -> str:
        return "done: 7" if len(prompt.tokens) > 1 else "<3+4>"

    engine = ScriptedEngine(script, TOKENIZER, log_prob=-0.5)
    task = Calculator()
    groups = talk(engine, [ASKED], 2, Sampling(50), task, max_turns=2)
    completion = groups[0].completions[1]
    assert completion.tokens.tolist() == [*ids("<3+4>"), EOS, *ids("=7;"), *ids("done: 7"), EOS]
    assert completion.written.tolist() == [True] * 6 + [False] * 3 + [True] * 8
    assert completion.log_probs.tolist() == [-0.5] * 6 + [0.0] * 3 + [-0.5] * 8
    assert completion.text == "<3+4>done: 7"
    assert completion.transcript == "<3+4>⟨=7;⟩done: 7"
    assert [(turn["role"], turn["content"]) for turn in completion.turns] == [
        ("assistant", "<3+4>"),
        ("environment", "=7;"),
        ("assistant", "done: 7"),
    ]
    assert completion.finish == "eos"
    assert groups[0].prompt.id == "p"
    assert groups[0].prompt.tokens == (5,)
    assert task.asked == ["<3+4>"] * 2


def test_a_conversation_goes_on_until_the_task_is_silent() -> None:
    task = Calculator(times=2)
    group = talk(GO, [ASKED], 1, Sampling(90), task, max_turns=9)[0]
    assert group.completions[0].transcript == "go⟨=7;⟩go⟨=7;⟩go"
    assert group.completions[0].text == "gogogo"
    assert len(task.asked) == 3
    group = talk(GO, [ASKED], 1, Sampling(90), Calculator(times=9), max_turns=4)[0]
    assert group.completions[0].transcript == "go" + "⟨=7;⟩go" * 3


def test_replies_name_the_states_of_turns() -> None:
    """By the place of the token that the turn begins with; a reply without a name has none."""

    class Rooms(ReplyTask):
        def reply(self, prompt: Prompt, text: str) -> str | None:
            return Observation("=7;", "hall") if text.count("go") == 1 else "=8;"

    completion = talk(GO, [ASKED], 1, Sampling(90), Rooms(), max_turns=3)[0].completions[0]
    assert completion.states == ((6, "hall"),)
    assert completion.written[5:7].tolist() == [False, True]
    assert completion.transcript == "go⟨=7;⟩go⟨=8;⟩go"


@pytest.mark.parametrize(
    ("budget", "text", "finish", "written"),
    [
        (2, "go", "length", 2),
        (3, "go", "eos", 3),
        (5, "go⟨=7⟩", "length", 3),
        (6, "go⟨=7;⟩", "length", 3),
        (8, "go⟨=7;⟩go", "length", 5),
        (9, "go⟨=7;⟩go", "eos", 6),
    ],
)
def test_the_budget_covers_policy_and_task(
    budget: int, text: str, finish: str, written: int
) -> None:
    completion = talk(GO, [ASKED], 1, Sampling(budget), Calculator(), 2)[0].completions[0]
    assert (completion.transcript, completion.finish) == (text, finish)
    assert completion.written.sum() == written
    assert len(completion) <= budget


def test_the_native_engine_goes_on_from_the_reply() -> None:
    """Each token that the policy wrote has the probability of prompt, words and replies so far."""
    model = tiny("llama")
    engine = NativeEngine(copy.deepcopy(model), TOKENIZER, max_num_seqs=9)
    prompts = ragged_prompts(6)
    sampling = Sampling(40)
    task = Calculator(times=2)
    groups = talk(engine, prompts, 3, sampling, task, max_turns=3)
    first = engine.sample(prompts, 3, sampling, seed=0)
    reply, replies = ids(task.answer), 0
    for group, start in zip(groups, first, strict=True):
        for completion, before in zip(group.completions, start.completions, strict=True):
            tokens, written = completion.tokens.tolist(), completion.written
            assert tokens[: len(before)] == before.tokens.tolist()
            foreign = completion.tokens[~written].tolist()
            cut = len(foreign) % len(reply)
            assert foreign == (reply * 2)[: len(foreign)]
            assert not cut or len(completion) == 40
            replies += len(foreign) // len(reply)
            assert (completion.log_probs[~written] == 0).all()
            expected = stock_log_probs(model, group.prompt, completion)
            # Norms and rotary embeddings work in float32 even where the weights are float64.
            np.testing.assert_allclose(completion.log_probs[written], expected[written], atol=1e-5)
            assert len(completion) <= 40
            ended = tokens[-1] == EOS and written[-1]
            assert completion.finish == ("eos" if ended else "length")
    assert replies > 6


def test_every_turn_of_every_conversation_has_its_own_stream() -> None:
    names: list[str] = []

    def script(prompt: Prompt, index: int) -> str:
        names.append(f"{prompt.id} {index}")
        return "go"

    engine = ScriptedEngine(script, TOKENIZER)
    talk(engine, [ASKED, replace(ASKED, id="q")], 3, Sampling(50), Calculator(times=2), 3)
    assert len(names) == 2 * 3 * 3
    assert len(set(names)) == len(names)


def test_the_context_covers_policy_and_task() -> None:
    model = tiny("llama", max_position_embeddings=24)
    prompts = ragged_prompts(6)
    task = Calculator(times=99)
    groups = talk(NativeEngine(model, TOKENIZER), prompts, 2, Sampling(90), task, max_turns=99)
    full = [len(g.prompt.tokens) + len(c) for g in groups for c in g.completions]
    assert full == [24] * 12
    assert {c.finish for g in groups for c in g.completions} == {"length"}


def test_a_cancelled_conversation_ends_at_the_next_reply() -> None:
    printed = threading.Event()

    class Tells(Calculator):
        def reply(self, prompt: Prompt, text: str) -> str | None:
            printed.set()
            return super().reply(prompt, text)

    task = Tells()
    with pytest.raises(Cancelled), cancelled_by(printed):
        talk(GO, [ASKED], 3, Sampling(90), task, max_turns=2)
    assert len(task.asked) == 1


def test_a_special_token_in_a_reply_is_ordinary_characters() -> None:
    tokenizer = byte_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    reply = "ok<|im_end|>more"
    engine, task = ScriptedEngine(lambda prompt, index: "go", tokenizer), Calculator(answer=reply)
    [group] = scripted.talk(engine, [ASKED], 1, Sampling(90), task, 2, tokenizer=tokenizer)
    completion = group.completions[0]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in completion.tokens.tolist()
    assert completion.turns[1]["content"] == reply
    assert (~completion.written).sum() == len(reply)


def test_one_turn_asks_no_task() -> None:
    task = Calculator()
    talk(GO, [ASKED], 1, Sampling(50), task, max_turns=1)
    assert task.asked == []
    with pytest.raises(KeelError, match="holds 'É', which the tokenizer does not know"):
        talk(GO, [ASKED], 1, Sampling(50), Calculator(answer="É"), max_turns=2)
    with pytest.raises(KeelError, match="max_turns = 0"):
        talk(GO, [ASKED], 1, Sampling(50), task, max_turns=0)
