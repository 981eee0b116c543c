"""A policy that spells given lines, and the openai client with which programs talk to it.

The tokenizer merges characters that the engine writes one by one, so text that went through it
again would come back as other tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import openai
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from keel.engines.endpoint.programs import ProgramConfig, sample_with_program
from keel.learn.batch import from_groups
from keel.models.chat import ChatEncoder
from keel.platform.calls import LoopThread
from keel.types import Completion, Engine, Group, ProgramInput, Prompt, Sampling

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
MERGES = ["to", "oo", "l_", "ad", "add", "na", "me", "name", "12", "23", "it", "ll", "on", '":']
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and merges of two tokens each."""
    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs: list[tuple[str, str]] = []
    for merged in MERGES:
        pairs.append(next((merged[:at], merged[at:]) for at in range(1, len(merged))))
        if pairs[-1][1] not in names:
            pairs[-1] = (merged[:2], merged[2:])
        names.append(merged)
    vocabulary = {name: at for at, name in enumerate(names)}
    tokenizer = Tokenizer(token_models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", model_max_length=2048
    )
    fast.chat_template = TEMPLATE
    return fast


TOKENIZER = merging_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
USER = {"role": "user", "content": "more"}
PROMPTS = [Prompt(f"p{at}", [{"role": "user", "content": f"{at}+20+3?"}]) for at in range(2)]


class SpellingEngine(Engine):
    """Writes given lines one character a token, and keeps every call by the id of its prompt."""

    def __init__(self, line: Callable[[str, int], str]) -> None:
        self.line = line
        self.seen: dict[str, tuple[tuple[int, ...], Completion]] = {}

    def sample(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, seed: int, **_: Any
    ) -> list[Group]:
        assert n == 1
        groups = []
        for prompt in prompts:
            name, _, turn = prompt.id.rpartition("/")
            text = self.line(name, int(turn))
            ids = [TOKENIZER.convert_tokens_to_ids("Ġ" if c == " " else c) for c in text]
            ids = [*ids, EOS][: sampling.max_tokens]
            made = Completion(
                tokens=np.array(ids),
                log_probs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 64 - int(turn),
                written=np.ones(len(ids), dtype=np.bool_),
                finish="eos" if ids[-1] == EOS else "length",
                text=text,
            )
            self.seen[prompt.id] = (prompt.tokens, made)
            groups.append(Group(prompt, (made,)))
        return groups

    def sync(self, weights: Mapping[str, Any]) -> None:
        pass


def run(engine: Any, program: Any, n: int = 1, tokens: int = 900, **keys: Any) -> list[Group]:
    keys = {"limit": 4, "timeout": 60.0, **keys}
    config = ProgramConfig(name="mine:run", function=program, **keys)
    parts = {"program": config, "chat": ChatEncoder(TOKENIZER), "loop": LoopThread()}
    return sample_with_program(engine, PROMPTS, n, Sampling(tokens), 3, **parts)


class Talk:
    """A program's conversation over the openai client: `messages` with all that it got."""

    def __init__(self, client: openai.OpenAI, given: ProgramInput) -> None:
        self.client, self.given = client, given
        self.messages: Any = list(given.messages)

    def request(self, messages: Any, **keys: Any) -> dict[str, Any]:
        """The answer to these messages, which is not recorded."""
        create = self.client.chat.completions.create
        if not keys.pop("stream", False):
            answer = create(model=self.given.model, messages=messages, **keys)
            return answer.choices[0].message.model_dump(exclude_none=True)
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for chunk in create(model=self.given.model, messages=messages, stream=True, **keys):
            for choice in chunk.choices:
                message["content"] += choice.delta.content or ""
                calls = [one.model_dump(exclude_none=True) for one in choice.delta.tool_calls or []]
                message |= {"tool_calls": calls} if calls else {}
        return message

    def ask(self, *new: Any, **keys: Any) -> dict[str, Any]:
        """Append messages, and the answer to all of them."""
        self.messages += new
        self.messages.append(self.request(self.messages, **keys))
        return dict(self.messages[-1])


def talking(program: Callable[[Talk], Any], **keys: Any) -> Callable[[ProgramInput], Any]:
    """A program that has its conversation as argument; `keys` are the client's."""

    def run(given: ProgramInput) -> Any:
        with client_of(given, **keys) as client:
            return program(Talk(client, given))

    return run


def client_of(given: ProgramInput, key: str | None = None, **keys: Any) -> openai.OpenAI:
    """The client of a program, with its own key or another."""
    own = {"base_url": given.base_url, "api_key": key or given.api_key, "max_retries": 0}
    return openai.OpenAI(**own, **keys)


def check_written(engine: SpellingEngine, groups: list[Group], turns: int) -> None:
    """What is trained is what the engine returned, and each turn begins with those before it."""
    trained: list[int] = []
    for group in groups:
        for index, completion in enumerate(group.completions):
            calls = [engine.seen[f"{group.prompt.id}/0/{index}/{turn}"] for turn in range(turns)]
            own = [token for _, made in calls for token in made.tokens.tolist()]
            trained += own
            written = completion.written
            assert completion.tokens[written].tolist() == own
            scores = np.concatenate([made.log_probs for _, made in calls])
            np.testing.assert_array_equal(completion.log_probs[written], scores)
            assert not completion.log_probs[~written].any()
            assert group.prompt.tokens == calls[0][0][: len(group.prompt.tokens)]
            for (before, made), (after, _) in itertools.pairwise(calls):
                recorded = (*before, *made.tokens.tolist())
                assert after[: len(recorded)] == recorded
            whole = [*group.prompt.tokens, *completion.tokens.tolist()]
            assert whole == [*calls[-1][0], *calls[-1][1].tokens.tolist()]
            assert TOKENIZER.encode(TOKENIZER.decode(whole)) != whole  # it would drift
    assert len(engine.seen) == turns * sum(len(group.completions) for group in groups)
    batch = from_groups(groups, torch.device("cpu"))
    assert batch.tokens_T[batch.target_N].tolist() == trained
