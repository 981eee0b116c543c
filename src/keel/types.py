"""The types that packages exchange, and the protocols between them.

Values are frozen and hold numpy arrays at most, so that no package imports torch for a prompt, a
completion or a result.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Required, TypedDict, runtime_checkable

import numpy as np
import numpy.typing as npt

Split = Literal["train", "validation"]
"""The two splits of a task. No prompt is in both."""

FinishReason = Literal["eos", "stop", "length"]
"""Why a completion ended: end-of-sequence token, a stop string or id (or a limit that a program set
for the last answer), or the token budget."""


def one_line(error: BaseException, *, named: bool = False) -> str:
    """What an error says, on one line; `named`: after the name of its class."""
    return " ".join((f"{type(error).__name__}: {error}" if named else str(error)).split())


def shorten(text: str, width: int = 80) -> str:
    """The text, cut to a width."""
    return text if len(text) <= width else text[: width - 1] + "…"


class KeelError(Exception):
    """A user's mistake or a refused input: one line that says what, where, and how to fix it.

    `key` is the recipe key to change, within its stage; empty if it is not known.
    """

    key: str = ""

    def __init__(self, message: object = "", *, key: str = "") -> None:
        super().__init__(message)
        self.key = key

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class Message(TypedDict, total=False):
    """One turn of a conversation, whole: other keys than these also go to the chat template.

    `content` may be missing or None next to `tool_calls`; `text_of` reads it as text.
    """

    role: Required[str]
    content: str | None
    name: str
    tool_calls: Sequence[Mapping[str, Any]]
    tool_call_id: str
    reasoning_content: str


Content = str | Sequence[Message]
"""A prompt as its author wrote it: plain text, or messages for the chat template."""

Tools = tuple[Mapping[str, Any], ...]
"""Descriptions of tools (JSON schema) for the chat template."""


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message; empty if it has none."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def shown_text(message: Mapping[str, Any]) -> str:
    """The text of a message for people to read, with its tool calls as JSON."""
    calls = (json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ())
    return "\n".join(filter(None, (text_of(message), *calls)))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One thing to answer.

    `id` names the prompt within the run and never changes; it seeds the prompt's random streams.
    `columns` are the data columns that rewards may ask for by name. `tokens` is empty until the
    prompt has been encoded with a tokenizer. `tools` are described to the policy by the chat
    template. `opening` is what the template puts at the beginning of the policy's answer, or a
    plain prompt ends on, such as `<think>`.
    """

    id: str
    content: Content
    columns: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""
    tokens: tuple[int, ...] = ()
    tools: Tools = ()
    opening: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. Temperature 0 is greedy decoding.

    `top_k = 0`, `top_p = 1` and `min_p = 0` switch the respective truncation off. `max_tokens` is
    the budget of one completion, tool output included. `ignore_eos`: an end-of-sequence token does
    not end it.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One answer, token by token. All arrays have the completion's length in tokens.

    `written` is true where the policy wrote the token; false marks context that arrived in between
    (tool output), which is never trained on. `log_probs` are those of the distribution that was
    sampled from (temperature and truncation applied), and 0 where `written` is false.

    `text` is what the policy wrote, without what arrived in between. `turns` holds both where
    anything arrived: messages in order, of role "assistant" (the policy's) or "environment".

    `weight_version` is the number of the weights that the completion was begun with: the steps that
    the stage had taken.

    `columns` are what the program that led the conversation returned; rewards may ask for them by
    name, as for those of the prompt. `failed` is the error that it raised: such a completion has no
    reward. `states` are those that the environment named: the place of a turn's first token, and
    the name of the state that the turn begins at.
    """

    tokens: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    written: npt.NDArray[np.bool_]
    finish: FinishReason
    text: str
    turns: tuple[Message, ...] = ()
    weight_version: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""
    states: tuple[tuple[int, str], ...] = ()

    @classmethod
    def given(cls, ids: Sequence[int], text: str) -> Completion:
        """A text that ends, as if the policy had written it."""
        tokens = np.array(ids, dtype=np.int64)
        zeros, ones = np.zeros(len(tokens), np.float32), np.ones(len(tokens), np.bool_)
        return cls(tokens, zeros, ones, finish="eos", text=text)

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def conversation(self) -> tuple[Message, ...]:
        """The turns; one of the policy's where nothing arrived in between."""
        return self.turns or (Message(role="assistant", content=self.text),)

    @property
    def transcript(self) -> str:
        """The text of all turns; what arrived between the policy's stands in ⟨ ⟩."""
        own = "assistant"
        return "".join(
            text_of(m) if m["role"] == own else f"⟨{text_of(m)}⟩" for m in self.conversation
        )


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A prompt and the completions sampled for it."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The reward of one reasoning step: `end` is the index of its last token in the completion."""

    end: int
    reward: float


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The rewards of one completion.

    `reward` is the weighted sum of the components with a value; None when there is none. `steps`
    is filled by process rewards only, in order of their ends. `outcome` is the part of the reward
    that is of the whole answer; None if the steps are all of it. `unshaped` is the reward before
    the length penalty.
    """

    reward: float | None
    components: Mapping[str, float | None] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()
    outcome: float | None = None
    unshaped: float | None = None


OnGroup = Callable[[int, Group], None]
"""Takes over a group, with the place of its prompt in the call."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, which decides what a recipe may ask of it.

    `streams`: `sample` takes `on_group`. `pins`: there is `pinned`. `concurrent`: it samples while
    the policy is trained. `in_process`: it samples with the trainer's own model, so that each
    process of a group can have one. `exact`: its log-probabilities are the trainer's but for
    rounding, and a resumed run samples the same tokens. `replays`: it returns what was sampled
    before, so that another one evaluates. `context`: the most tokens of a prompt with its
    completion; None: no limit.
    """

    streams: bool = False
    pins: bool = False
    concurrent: bool = True
    in_process: bool = False
    exact: bool = True
    replays: bool = False
    context: int | None = None


class PromptSupply(Protocol):
    """Encoded train prompts, one after the other."""

    def take(self, k: int) -> list[Prompt]: ...
    @property
    def left_out(self) -> Mapping[str, int]: ...
    def state(self) -> dict[str, Any]:
        """All that decides what comes next, as JSON can hold it."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Draws completions. The seam at which a test double, or a server, stands in.

    An engine is a subclass: it has `sample` and `sync`, and states what else it can do in
    `capabilities`. `weight_version` is the number of the weights that it samples with, which the
    loop sets.
    """

    capabilities: Capabilities = Capabilities()
    weight_version: int = 0

    @abstractmethod
    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        seed: int,
        *,
        on_group: OnGroup | None = None,
    ) -> list[Group]:
        """`n` completions for each encoded prompt, in the order of the prompts.

        A completion depends on the weights, its prompt (id and tokens), its index in the group,
        `sampling` and `seed`; not on what else is in the call. An engine that streams hands each
        group to `on_group` once its last completion is done: in the caller's thread, in no
        particular order of groups; what it raises ends the call. Others are not given it.
        """
        ...

    @abstractmethod
    def sync(self, weights: Mapping[str, Any]) -> None:
        """Take over the policy's weights (name to tensor)."""
        ...

    def prompts_of(self, stream: PromptSupply) -> PromptSupply:
        """The prompts of a stream that it can complete."""
        return stream

    def sleep(self) -> None:
        """Give back what memory of the device it can, until the next `sync` or `sample`."""
        return

    def conversation(self) -> AbstractContextManager[Engine]:
        """The engine for calls that continue the sequences of earlier ones, under one set of
        weights: it may keep their keys and values until the block ends."""
        return nullcontext(self)

    def pinned(self) -> Engine:
        """What samples with the weights of now, also after a later `sync`."""
        raise KeelError(f"{type(self).__name__} cannot pin weights")


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """What a program (`rollout.program`) gets for one completion.

    `messages` and `columns` are the prompt's, `index` is the completion's place in its group. An
    OpenAI client with `base_url` and `api_key` reaches the policy under the name `model`. The key
    is of this completion alone: what is requested with it is the completion.
    """

    messages: list[dict[str, Any]]
    columns: Mapping[str, Any]
    base_url: str
    api_key: str = field(repr=False)
    model: str
    prompt_id: str
    index: int


Program = Callable[[ProgramInput], Any]
"""Leads the conversation of one completion; may be a coroutine function. It returns None, a number
(the column `reward`), or a mapping of columns for rewards."""


class Observation(str):
    """A reply with the name of the state that the policy's next turn begins at."""

    state: str | None

    def __new__(cls, text: str, state: str | None = None) -> Observation:
        made = super().__new__(cls, text)
        made.state = state
        return made


@runtime_checkable
class Task(Protocol):
    """Where prompts come from and, where the task can tell, what an answer is worth.

    Prompts are addressed by index, so that a stream over a task resumes from a number.
    """

    name: str

    def size(self, split: Split) -> int | None:
        """How many prompts a split has; None when it never ends."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """The prompt at an index (below `size` where there is one); a function of its arguments."""
        ...

    def score(self, prompt: Prompt, completion: Completion) -> float | None:
        """What the answer is worth; None where the task cannot tell."""
        ...

    def gold(self, prompt: Prompt) -> str | None:
        """An answer that deserves full marks, where the task knows one."""
        ...

    def reply(self, prompt: Prompt, text: str) -> str | None:
        """What the environment answers, an `Observation` if it names the state; None ends the
        conversation.

        `text` is the completion so far, earlier replies included.
        """
        ...
