"""The teacher of on-policy distillation: a frozen model that scores the policy's own tokens."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from keel.config.model import Model, TeacherModel
from keel.models.loading import load_model, load_tokenizer, read_config
from keel.models.policy import Policy
from keel.models.probe import prepare
from keel.models.reference import FrozenPolicy
from keel.types import KeelError


def load_teacher(
    choice: TeacherModel, policy: Policy, spec: Model, longest: int | None
) -> FrozenPolicy:
    """The recipe's teacher; `spec` is the policy's, `longest` the most tokens of a sequence.

    Raises KeelError where `check_teacher` does, or its weights do not load.
    """
    check_teacher(choice, policy, spec, longest)
    own = teacher_spec(choice, spec)
    try:
        model = load_model(own, seed=0)
    except KeelError as error:
        raise _renamed(error) from error
    prepare(model, own.autocast)
    return FrozenPolicy(model.requires_grad_(False).eval(), own.autocast, policy.tokens)


def check_teacher(choice: TeacherModel, policy: Policy, spec: Model, longest: int | None) -> None:
    """Check a teacher by its config and its tokenizer, without its weights.

    Raises KeelError where they do not load, where a token of the policy has another id or none in
    its tokenizer, or where its vocabulary or its context is too small.
    """
    own, where = teacher_spec(choice, spec), f"teacher.name = {choice.name!r}"
    try:
        config, tokenizer = read_config(own).get_text_config(), load_tokenizer(own)
    except KeelError as error:
        raise _renamed(error) from error
    _check_tokens(where, tokenizer, policy.tokenizer)
    if config.vocab_size < policy.tokens:
        raise KeelError(
            f"{where} has a vocabulary of {config.vocab_size} tokens and the policy one of "
            f"{policy.tokens}: choose a teacher with the policy's vocabulary"
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and (longest is None or longest > context):
        most = "any number" if longest is None else longest
        raise KeelError(
            f"{where} reads {context} tokens at the most, and a prompt with its completion may "
            f"have {most}: lower prompts.max_tokens or rollout.max_tokens"
        )


def teacher_spec(choice: TeacherModel, policy: Model) -> Model:
    """The teacher as a model to load: on the policy's device, in its dtype unless it has one."""
    own = {"name": choice.name, "revision": choice.revision, "build": None, "lora": None}
    dtype = {} if choice.dtype == "model" else {"dtype": choice.dtype}
    return policy.model_copy(update={**own, **dtype})


def _check_tokens(
    where: str, teacher: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase
) -> None:
    """Raise KeelError where a token of the policy means another one to the teacher, or none."""
    known, own = teacher.get_vocab(), policy.get_vocab()
    odd = sorted((at, token) for token, at in own.items() if known.get(token) != at)
    if odd:
        at, token = odd[0]
        there = "does not have" if token not in known else f"has as {known[token]}"
        raise KeelError(
            f"{where} has another tokenizer than the policy: {len(odd)} of the policy's {len(own)} "
            f"tokens differ, {token!r} ({at}) among them, which it {there}: choose a teacher of "
            "the policy's own family"
        )


def _renamed(error: KeelError) -> KeelError:
    return KeelError(str(error).replace("model.name", "teacher.name"))
