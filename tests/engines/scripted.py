"""An engine that replays given completions: the double of a real one, for trials of a loop; and one
that samples at a temperature of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from keel.config.sources import Rollout
from keel.engines.native import NativeEngine
from keel.engines.registry import ENGINES
from keel.engines.sampler import check
from keel.engines.turns import generate_multi_turn
from keel.models.chat import ChatEncoder
from keel.models.loading import DTYPES
from keel.models.text import decode
from keel.types import Completion, Engine, Group, OnGroup, Prompt, Sampling, Split

Line = str | tuple[str, Sequence[float]]
"""A completion's text, or text and the log-probability of each token (its end among them)."""

Script = Callable[[Prompt, int], Line] | Mapping[str, Sequence[Line]]
"""The line for a prompt and an index in its group; or lines by the prompt's id or text, which are
taken in turn."""


def replace_native(monkeypatch: pytest.MonkeyPatch, engine: Callable[..., Engine]) -> None:
    """Let recipes sample with this instead of `NativeEngine`, which takes the same arguments."""

    def build(
        model: Any, tokenizer: Any, *, rollout: Rollout, autocast: Any, dtype: str, **_: Any
    ) -> Engine:
        options = {"autocast": autocast, "dtype": DTYPES.get(dtype)}
        return engine(model, tokenizer, max_num_seqs=rollout.max_num_seqs, **options)

    monkeypatch.setitem(ENGINES, "native", replace(ENGINES["native"], build=build))


class ScriptedEngine(Engine):
    """Completions from a script (see `keel.types.Engine`).

    A text is encoded, ended with the end-of-sequence token, and cut at `sampling.max_tokens`
    (finish "length"). Tokens without a log-probability of their own get `log_prob`. The seed and
    the other settings of sampling change nothing. `syncs` counts the weights that came.
    """

    def __init__(self, script: Script, tokenizer: Any, *, log_prob: float = -1.0) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.log_prob = log_prob
        self.syncs = 0

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """The script's lines as groups."""
        check(sampling, n)
        return [
            Group(
                prompt,
                tuple(
                    self._completion(prompt, self._line(prompt, index), sampling)
                    for index in range(n)
                ),
            )
            for prompt in prompts
        ]

    def sync(self, weights: Mapping[str, Any]) -> None:
        """Count; a script has no weights."""
        self.syncs += 1

    def _line(self, prompt: Prompt, index: int) -> Line:
        if callable(self.script):
            return self.script(prompt, index)
        text = prompt.content if isinstance(prompt.content, str) else None
        lines = self.script.get(prompt.id) or self.script[text or ""]
        return lines[index % len(lines)]

    def _completion(self, prompt: Prompt, line: Line, sampling: Sampling) -> Completion:
        text, given = (line, None) if isinstance(line, str) else line
        ids = [
            *self.tokenizer.encode(text, add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]
        log_probs = [self.log_prob] * len(ids) if given is None else list(given)
        assert len(log_probs) == len(ids), "one for each token, the end-of-sequence token's too"
        kept = min(len(ids), sampling.max_tokens)
        return Completion(
            tokens=np.array(ids[:kept], dtype=np.int64),
            log_probs=np.array(log_probs[:kept], dtype=np.float32),
            written=np.ones(kept, dtype=np.bool_),
            finish="eos" if kept == len(ids) else "length",
            text=decode(self.tokenizer, [ids[:kept]])[0],
        )


class ColderEngine(Engine):
    """The native engine at the temperature 0.6, whatever it is asked for."""

    def __init__(self, *, model: Any, tokenizer: Any, max_num_seqs: int, **_: Any) -> None:
        self.inner = NativeEngine(model, tokenizer, max_num_seqs=max_num_seqs)

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, **_: Any
    ) -> list[Group]:
        if sampling.temperature > 0:
            sampling = replace(sampling, temperature=0.6)
        return self.inner.sample(prompts, n, sampling, seed)

    def sync(self, weights: Mapping[str, Any]) -> None:
        self.inner.sync(weights)


@dataclass
class ReplyTask:
    """A task that only replies: its prompts are a test's own."""

    name: str = "replies"

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(str(index), "", task=self.name)

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        return None

    def gold(self, prompt: Prompt) -> str | None:
        return None

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return None


def talk(
    engine: Engine,
    prompts: Sequence[Prompt],
    n: int,
    sampling: Sampling,
    task: ReplyTask,
    max_turns: int,
    *,
    tokenizer: Any,
) -> list[Group]:
    """Conversations with the task."""
    return generate_multi_turn(
        engine,
        [replace(prompt, task=task.name) for prompt in prompts],
        n,
        sampling,
        0,
        tasks={task.name: task},
        chat=ChatEncoder(tokenizer),
        max_turns=max_turns,
    )
