"""A conversation with a model, whose answers are shown while they are decoded."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from keel.engines.native import NativeEngine
from keel.engines.sampler import EOS, GOING, Answers
from keel.models.chat import ChatEncoder, encode_prompt
from keel.models.text import GrowingText
from keel.types import FinishReason, KeelError, Message, Prompt, Sampling

ROOM = 8
"""The part of the context (1 / ROOM) that is kept for an answer: older turns are dropped for it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. `dropped` are the messages that no longer fitted into the context; of an answer
    that was stopped `finish` is None."""

    text: str
    finish: FinishReason | None
    dropped: int


class Chat:
    """The turns so far, with a system message if there is one; `sampling` holds the budget of an
    answer. A tokenizer without a chat template completes each text by itself."""

    def __init__(
        self, engine: NativeEngine, chat: ChatEncoder, sampling: Sampling, *, system: str = ""
    ) -> None:
        self._engine, self._chat, self._sampling = engine, chat, sampling
        self.reset(system)

    def reset(self, system: str | None = None) -> None:
        """Begin again; with another system message if it is given."""
        if system is not None:
            self._system = [Message(role="system", content=system)] if system else []
        self._turns: list[Message] = []

    def ask(
        self,
        text: str,
        show: Callable[[str], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """The model's answer, which joins the turns; `show` gets it piece by piece, and it ends
        once `stopped` is true. Raises KeelError for a text that does not fit into the context."""
        prompt, dropped = self._prompt(text)
        context = self._engine.capabilities.context
        budget = self._sampling.max_tokens
        if context is not None:
            budget = min(budget, context - len(prompt.tokens))
        growing, pieces = GrowingText(self._chat.tokenizer), list[str]()
        seen, over = 0, False

        def on_step(answers: Answers) -> bool:
            nonlocal seen, over
            ended = answers.codes[0] == EOS  # by a token that is not text
            tokens = answers.tokens[0][seen:]
            seen += len(tokens)
            pieces.append(growing.add(tokens[:-1] if ended else tokens))
            show(pieces[-1])
            over = answers.codes[0] == GOING and stopped()
            return over

        ((group),) = self._engine.decode(
            [prompt], self._sampling, 0, budgets=[budget], made=[0], on_step=on_step
        )
        made = group.completions[0]
        rest = made.tokens[seen:].tolist()
        pieces.append(growing.add(rest[:-1] if made.finish == "eos" else rest) + growing.end())
        show(pieces[-1])
        answer = "".join(pieces)
        if self._has_template:
            self._turns = [
                *self._turns[dropped:],
                Message(role="user", content=text),
                Message(role="assistant", content=answer),
            ]
        return Reply(answer, None if over else made.finish, dropped)

    @property
    def opening(self) -> str:
        """What the template begins an answer with, such as `<think>`."""
        return self._chat.opening if self._has_template else ""

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self._chat.tokenizer, "chat_template", None))

    def _prompt(self, text: str) -> tuple[Prompt, int]:
        """The turns with a new one, and how many of the oldest had to go."""
        context = self._engine.capabilities.context
        name = secrets.token_hex(16)  # names the random numbers
        if not self._has_template:
            prompt = encode_prompt(Prompt(name, text), self._chat, raw=True)
            self._check(len(prompt.tokens), context)
            return prompt, 0
        room = None if context is None else context - max(1, context // ROOM)
        for dropped in range(0, len(self._turns) + 1, 2):
            messages = [
                *self._system,
                *self._turns[dropped:],
                Message(role="user", content=text),
            ]
            tokens = self._chat.prompt(messages, "the conversation", mask=True)
            if room is None or len(tokens) <= room:
                break
        self._check(len(tokens), context)
        return replace(Prompt(name, messages), tokens=tuple(tokens)), dropped

    def _check(self, tokens: int, context: int | None) -> None:
        if context is not None and tokens >= context:
            raise KeelError(
                f"this alone has {tokens} tokens, and the model's context is {context}: shorten it"
            )
