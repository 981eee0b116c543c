"""Reward models: a backbone with a linear head that scores an answer or each of its steps."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from keel.config.model import Autocast, Lora, Model
from keel.models import lora
from keel.models.adapter_files import save_adapter
from keel.models.chat import ChatEncoder, as_turns, encode_answer, encode_prompt
from keel.models.families import context_length, prepare, states_at
from keel.models.loading import (
    choose_device,
    load_pretrained,
    load_tokenizer,
    silence_dropout,
)
from keel.models.packed import Packed, pack, sizes_on
from keel.models.policy import Policy
from keel.models.text import encode_text, split_steps
from keel.models.tokenizer_round_trip import quiet
from keel.types import Content, KeelError, Prompt, Tools


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt and its answer in tokens.

    The answer begins at `begins`; `ends` are the indices of the tokens at which it is scored.
    """

    tokens: tuple[int, ...]
    begins: int
    ends: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedAnswers:
    """Answers end to end; `at_K` are the indices among the T of the tokens that are scored."""

    packed: Packed
    at_K: Int[Tensor, " K"]


class Reader:
    """Encodes prompts and answers with the reward model's own tokenizer.

    The answer follows the prompt as a policy would have written it, and then an end-of-sequence
    token, even if the policy did not write one. With `closing` an answer in a conversation is
    rendered and closed by the tokenizer's chat template, as other trainers' reward models read it.
    What closes an answer is cut where it does not fit the `context`. `template` are keywords for
    the chat template, and with `raw` plain prompts go without it. An outcome is scored at the last
    token that is not `pad` (the tokenizer's padding token unless given; -1 for none).
    """

    def __init__(
        self,
        tokenizer: Any,
        context: int | None = None,
        template: Mapping[str, Any] | None = None,
        pad: int | None = None,
        *,
        raw: bool = False,
        closing: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.context = context
        self.chat = ChatEncoder(tokenizer, template)
        self._pad = tokenizer.pad_token_id if pad is None else pad
        self._raw, self._closing = raw, closing

    def answer(self, prompt: Content, completion: str, name: str, tools: Tools = ()) -> Answered:
        """An answer with one score, at the last token that is not the padding token.

        The stock classes read it there, also if padding and end of sequence are one token.
        `name` is the example's in an error.
        """
        turns = as_turns(prompt, self.tokenizer, self._raw)
        whole = None
        if self._closing and not isinstance(turns, str):
            whole = self.chat.whole(turns, completion, name, tools)
        found = whole or encode_answer(prompt, completion, name, self.chat, tools, raw=self._raw)
        tokens = found.fit(self.context)
        last = len(tokens) - 1
        while last > 0 and tokens[last] == self._pad:
            last -= 1
        return Answered(tuple(tokens), min(len(found.prompt), len(tokens) - 1), (last,))

    def prompt(self, content: Content, name: str, tools: Tools = ()) -> Prompt:
        """An example's prompt with its tokens."""
        return encode_prompt(Prompt(name, content, tools=tools), self.chat, raw=self._raw)

    def steps(
        self, prompt: Content, steps: Sequence[str], name: str, tools: Tools = ()
    ) -> Answered:
        """An answer with a score at the last token of each step; steps include their separators.

        The tokens of each step are its own, so that none is of two.
        """
        whole = encode_answer(prompt, "".join(steps), name, self.chat, tools, raw=self._raw)
        lead, steps = _as_written(steps, whole.text)
        what = f"the answer of {name}"
        encode = partial(encode_text, name=what, tokenizer=self.tokenizer, continues=True)
        tokens = [*whole.prompt, *encode(lead)]
        begins, ends = len(tokens), list[int]()
        for step in steps:
            tokens += encode(step, literal=True)
            ends.append(len(tokens) - 1)
        closing = whole.answer[len(whole.answer) - whole.closing :]
        room = len(closing) if self.context is None else max(self.context - len(tokens), 0)
        if ends:
            tokens += closing[:room]
            ends[-1] = len(tokens) - 1
        if len(set(ends)) < len(ends) or (ends and ends[0] < 1):
            raise KeelError(f"{name}: a step without tokens: leave the empty step out")
        return Answered(tuple(tokens), begins, tuple(ends))

    def split(
        self, prompt: Content, completion: str, separator: str, name: str, tools: Tools = ()
    ) -> Answered:
        """`steps` of a text that is cut after each separator."""
        spans = split_steps(completion, separator)
        return self.steps(prompt, [completion[a:b] for a, b in spans], name, tools)


def _as_written(steps: Sequence[str], body: str) -> tuple[str, list[str]]:
    """What an answer begins with before its steps, and the steps as the template wrote them: it may
    trim the answer, and the prompt may have opened the thought that the first step opens."""
    text = "".join(steps)
    kept = next((one for one in (text, text.strip(), body) if one in body and one in text), text)
    start = text.index(kept)
    ends = accumulate(map(len, steps))
    cuts = [min(max(at, start), start + len(kept)) for at in (0, *ends)]
    return body[: max(body.find(kept), 0)], [text[a:b] for a, b in pairwise(cuts)]


def joined(steps: Sequence[str], separator: str) -> list[str]:
    """Steps with the separator after each but the last."""
    return [*(step + separator for step in steps[:-1]), *steps[-1:]]


def pack_answers(answers: Sequence[Answered], device: torch.device | str = "cpu") -> PackedAnswers:
    """Pack answers end to end."""
    starts = accumulate((len(answer.tokens) for answer in answers), initial=0)
    at = [
        start + end for answer, start in zip(answers, starts, strict=False) for end in answer.ends
    ]
    none = torch.zeros(0, dtype=torch.long)
    packed = pack([torch.tensor(a.tokens) for a in answers], [none] * len(answers), device)
    return PackedAnswers(packed, torch.tensor(at, dtype=torch.long, device=device))


Kind = Literal["outcome", "process"]
STOCK: dict[Kind, Any] = {
    "outcome": AutoModelForSequenceClassification,
    "process": AutoModelForTokenClassification,
}
WHAT: dict[Kind, str] = {
    "outcome": "an outcome reward model (sequence classification with one label)",
    "process": "a process reward model (token classification with two labels, wrong and right)",
}
LABELS: dict[Kind, int] = {"outcome": 1, "process": 2}


class RewardModel(nn.Module):
    """transformers' own classification model with packed attention, and its tokenizer.

    An outcome model has one score for each answer; a process model two logits for each step, whose
    difference, right minus wrong, is the log-odds that the step is right.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        kind: Kind,
        *,
        autocast: Autocast = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.kind: Kind = kind
        self.autocast = autocast

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def head(self) -> nn.Linear:
        """The linear layer from hidden states to scores."""
        return head_of_classifier(self.model)

    @property
    def context(self) -> int | None:
        """The model's context length in tokens; None where it has no limit."""
        return context_length(self.model)

    def reader(self, raw: bool = False) -> Reader:
        """Encodes answers as the stock classes read them.

        With `raw` plain prompts go without the tokenizer's chat template.
        """
        pad = self.model.config.get_text_config().pad_token_id
        return Reader(
            self.tokenizer,
            self.context,
            pad=-1 if pad is None else pad,
            raw=raw,
            closing=self.kind == "outcome",
        )

    def states(self, answers: PackedAnswers) -> Float[Tensor, "K H"]:
        """The last hidden state at each scored token, which the head reads."""
        return states_at(self.model, answers.packed, answers.at_K, self.autocast)

    def logits(self, answers: PackedAnswers) -> Float[Tensor, " K"]:
        """The score, or the log-odds of right, at each scored token; float32 at least."""
        return self.read_out(self.states(answers))

    def read_out(self, states_KH: Float[Tensor, "K H"]) -> Float[Tensor, " K"]:
        """What the head makes of hidden states; float32 at least."""
        head = self.head
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        with torch.autocast(states_KH.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(dtype)
            out_KL = F.linear(states_KH.to(dtype), head.weight.to(dtype), bias)
        return out_KL[:, 0] if self.kind == "outcome" else out_KL[:, 1] - out_KL[:, 0]

    @torch.no_grad()
    def judge(self, answers: Sequence[Answered], token_budget: int) -> list[list[float]]:
        """The scores of each answer at its ends; at most `token_budget` tokens in a pass."""
        found: list[list[float]] = []
        sizes = sizes_on(self.device, [len(answer.tokens) for answer in answers])
        for span in sizes.spans(token_budget):
            part = answers[span]
            logits = self.logits(pack_answers(part, self.device)).tolist()
            for answer in part:
                found.append(logits[: len(answer.ends)])
                logits = logits[len(answer.ends) :]
        return found

    def save(self, folder: Path) -> None:
        """Write model (with LoRA merged) and tokenizer, for `AutoModelForSequenceClassification`
        (outcome) or `AutoModelForTokenClassification` (process)."""
        with quiet():
            self.model.save_pretrained(folder, state_dict=lora.plain_weights(self.model))
        self.tokenizer.save_pretrained(folder)
        if lora.lora_layers(self.model):
            save_adapter(self.model, folder / "adapter", self.head)


def reward_model_from(
    policy: Policy, kind: Kind, seed: int, adapter: Lora | None = None
) -> RewardModel:
    """A reward model whose backbone starts as the policy's is now; the head starts at zero.

    With `adapter` the backbone is frozen under LoRA; the head always learns. Raises KeelError for a
    family that has no classification class in transformers.
    """
    config = _classifier_config(policy, kind)
    check_classifier(config, kind)
    tokenizer = _with_padding(config, policy.tokenizer)
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = STOCK[kind].from_config(config, dtype=policy.model.dtype)
    silence_dropout(model)
    # Not a copy of the policy, which may be the larger part of the memory.
    prefix = f"{policy.model.base_model_prefix}."
    weights = lora.plain_weights(policy.model)
    model.base_model.load_state_dict(
        {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    )
    head = head_of_classifier(model)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    model = model.to(policy.device)
    prepare(model, policy.autocast, "hidden states")
    _add_adapter(model, adapter, seed, policy.revision)
    policy.set_checkpointing(model)
    return RewardModel(model, tokenizer, kind, autocast=policy.autocast)


def continued_reward_model(
    spec: Model, kind: Kind, policy: Policy, seed: int, adapter: Lora | None = None
) -> RewardModel:
    """A saved reward model with its head, to train further. Raises as `load_reward_model`."""
    found = load_reward_model(spec, kind)
    # The adapter's config would name the run folder, whose path is no part of the run.
    found.model.config.name_or_path = ""
    found.tokenizer = _with_padding(found.model.config, found.tokenizer)
    found.model.requires_grad_(True).to(policy.device)
    _add_adapter(found.model, adapter, seed)
    policy.set_checkpointing(found.model)
    return found


def load_reward_model(spec: Model, kind: Kind) -> RewardModel:
    """A frozen reward model from a folder or the hub.

    Raises KeelError where it does not load, or is not of this kind.
    """
    model = load_pretrained(spec, STOCK[kind], WHAT[kind])
    labels = int(model.config.num_labels)
    if labels != LABELS[kind]:
        raise KeelError(
            f"model {spec.name!r} has {labels} labels, so it is not {WHAT[kind]}: "
            "name another model"
        )
    silence_dropout(model)
    model = model.to(choose_device(spec.device)).requires_grad_(False)
    prepare(model, spec.autocast, "hidden states")
    return RewardModel(model.eval(), load_tokenizer(spec), kind, autocast=spec.autocast)


def has_classifier(config: type[PreTrainedConfig], kind: Kind) -> bool:
    """Whether transformers has a classification class for a family."""
    return config in STOCK[kind]._model_mapping


def check_classifier(config: PreTrainedConfig, kind: Kind) -> None:
    """Raise KeelError for a family that has no classification class in transformers."""
    if not has_classifier(type(config), kind):
        name = "sequence" if kind == "outcome" else "token"
        raise KeelError(
            f"model family {config.model_type!r} has no {name} classification class in "
            "transformers, so no reward model can be made of it: start the reward model from "
            "another family (llama, qwen2, qwen3, gpt2, …) by base.name"
        )


def head_of_classifier(model: PreTrainedModel) -> nn.Linear:
    """The classification layer of a model, next to its backbone."""
    backbone = model.base_model
    for module in model.children():
        if isinstance(module, nn.Linear) and module is not backbone:
            return module
    raise KeelError(f"{type(model).__name__} has no linear classification layer: choose another")


def _add_adapter(
    model: PreTrainedModel, adapter: Lora | None, seed: int, revision: str | None = None
) -> None:
    if adapter is not None:
        head = head_of_classifier(model)
        lora.add_lora(model, adapter, seed, output=head, revision=revision)
        head.requires_grad_(True)


def _with_padding(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase:
    """The tokenizer with a padding token, which the config gets too: that of one of them, else the
    end of sequence. The stock classes score no batch without one, and read the last token that is
    not it."""
    eos = config.eos_token_id
    ids = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    named = [*ids, *(eos if isinstance(eos, list) else [eos])]
    inside = (id for id in named if id is not None and 0 <= id < len(tokenizer))
    config.pad_token_id = next(inside, None)
    if tokenizer.pad_token_id is None and config.pad_token_id is not None:
        tokenizer = copy.deepcopy(tokenizer)  # the policy keeps its own
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(config.pad_token_id)
    return tokenizer


def _classifier_config(policy: Policy, kind: Kind) -> PreTrainedConfig:
    config: PreTrainedConfig = copy.deepcopy(policy.model.config)
    names = ("score",) if kind == "outcome" else ("wrong", "right")
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.pad_token_id = policy.tokenizer.pad_token_id
    config.architectures = None
    # transformers' own attention first, so that the probe can compare ours with it.
    config._attn_implementation = None
    return config
