"""Sequences decoded over several calls, which others join and leave, are those of one call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keel.engines.native import NativeEngine
from keel.engines.sampler import GOING, Answers
from keel.engines.scheduler import PrefixCache
from keel.types import Sampling
from tests.engines.test_compiled import model_of, prompts
from tests.engines.test_static import static
from tests.engines.tiny import TOKENIZER, tiny

STOPS = tuple(f"{letter}{sign}" for letter in "0123456789abcdefghijklmnop" for sign in "+-")
"""Of two tokens each, so that a call may end within one."""
SAMPLING = Sampling(max_tokens=60, temperature=1.3, stop=STOPS)
LENGTHS = (3, 7, 40, 1, 12, 5, 33, 20)
ENGINES: dict[str, Callable[[], NativeEngine]] = {
    "compiled": lambda: NativeEngine(model_of("llama", max_position_embeddings=128), TOKENIZER),
    "modules": lambda: NativeEngine(tiny("gemma2", max_position_embeddings=128), TOKENIZER),
    "static": lambda: static(tiny("llama", max_position_embeddings=128), steps=2),
}


@pytest.mark.parametrize("kind", ENGINES)
def test_interrupted_sequences_are_the_uninterrupted_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rows: some sequences of a call have not entered when it ends."""
    engine = ENGINES[kind]()
    engine.max_num_seqs = 3
    computed: list[int] = []
    take = PrefixCache.take

    def counted(cache: PrefixCache, prompts: Any) -> Any:
        known, pages = take(cache, prompts)
        left = zip(now, prompts, known.tolist(), strict=True)
        computed.extend(len(prompt) - count for s, prompt, count in left if tokens[s])
        return known, pages

    asked, budgets = prompts(*LENGTHS), [60, 9, 60, 33, 60, 1, 60, 60]
    expected = [
        engine.sample([one], 1, replace(SAMPLING, max_tokens=budget), 5)[0].completions[0]
        for one, budget in zip(asked, budgets, strict=True)
    ]
    assert {one.finish for one in expected} >= {"stop", "length"}
    chance = random.Random(0)
    tokens: list[list[int]] = [[] for _ in asked]
    scores: list[list[float]] = [[] for _ in asked]
    finish = [""] * len(asked)
    waiting, live, calls = list(range(len(asked))), list[int](), 0
    monkeypatch.setattr(PrefixCache, "take", counted)
    with engine.conversation() as source:
        while waiting or live:
            live, waiting, calls = [*live, *waiting[:2]], waiting[2:], calls + 1
            chance.shuffle(live)
            now, left = live[: chance.randint(1, 5)], chance.randint(1, 6)
            so_far = {s: replace(asked[s], tokens=(*asked[s].tokens, *tokens[s])) for s in live}

            def on_step(answers: Answers) -> bool:
                nonlocal left
                left -= 1
                return left == 0 or bool((answers.codes != GOING).any())

            found = source.decode(
                [so_far[s] for s in now],
                SAMPLING,
                5,
                budgets=[budgets[s] - len(tokens[s]) for s in now],
                made=[len(tokens[s]) for s in now],
                on_step=on_step,
                waiting=[so_far[s] for s in live if s not in now],
            )
            for s, group in zip(now, found, strict=True):
                tokens[s] += group.completions[0].tokens.tolist()
                scores[s] += group.completions[0].log_probs.tolist()
                finish[s] = group.completions[0].finish
            ended = [s for s in now if finish[s] != "length" or len(tokens[s]) == budgets[s]]
            live = [s for s in live if s not in ended]
    assert calls > len(asked) / 2  # it takes half as many to join
    for s, whole in enumerate(expected):
        assert tokens[s] == whole.tokens.tolist()
        # A prompt's keys come from another kernel than those of a decoded token.
        np.testing.assert_allclose(scores[s], whole.log_probs, atol=1e-4)
        assert finish[s] == whole.finish
    if kind != "modules":  # which keep nothing
        assert computed.count(1) > 0.6 * len(computed)
    if engine._decoder is not None:
        assert not engine._decoder.allocator.used
