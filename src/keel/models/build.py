"""A small random model of any supported family from a seed, and its tokenizer.

A tokenizer has one token per character or one per byte. Both decode to exactly the text that they
encoded, and save and load as any fast tokenizer does, except with the families whose own rules
AutoTokenizer puts in their place (see `build_tokenizer`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from keel.config.fields import unknown
from keel.config.model import BuildModel
from keel.models.families import FAMILIES, check_family
from keel.models.tokenizer_round_trip import reloaded, same_rules
from keel.types import KeelError

PAD, EOS = "<pad>", "<eos>"
EXPERTS = 4
"""Experts of a small sparse model, two of them active for each token."""


def build_tokenizer(spec: BuildModel) -> PreTrainedTokenizerBase:
    """The tokenizer that the recipe describes, as AutoTokenizer loads it with such a model.

    Raises KeelError where the family's own rules would lose characters of the alphabet.
    """
    if spec.tokenizer == "bytes":
        made = byte_tokenizer(spec.context)
    else:
        made = character_tokenizer(spec.alphabet, spec.context)
    if spec.family not in CONFIG_MAPPING:
        return made
    found = reloaded(made, CONFIG_MAPPING[spec.family]())
    if same_rules(made, found):
        return made
    if spec.tokenizer == "characters":
        raise KeelError(
            f"model.build.family = {spec.family!r} with a tokenizer of characters cannot be "
            f"served: AutoTokenizer loads {type(found).__name__} there, with rules of its own; "
            'set model.build.tokenizer = "bytes", or another family (llama, qwen3, …)'
        )
    return found


def build_config(spec: BuildModel) -> PreTrainedConfig:
    """The family's transformers config at the recipe's size; raises KeelError."""
    if spec.family not in FAMILIES:
        raise KeelError(unknown("model.build.family", spec.family, FAMILIES))
    if spec.hidden_size % spec.heads:
        raise KeelError(
            f"model.build.hidden_size = {spec.hidden_size} is not a multiple of "
            f"model.build.heads = {spec.heads}: change one of them"
        )
    if spec.kv_heads is not None and spec.heads % spec.kv_heads:
        raise KeelError(
            f"model.build.heads = {spec.heads} is not a multiple of "
            f"model.build.kv_heads = {spec.kv_heads}: change one of them"
        )
    kind = CONFIG_MAPPING[spec.family]
    known = {*kind.__dataclass_fields__, *kind.attribute_map, "rope_theta", "rope_scaling"}
    for key in spec.options:
        if key not in known:
            raise KeelError(unknown("key of model.build.options", key, known))
    keys = {**_common_keys(spec), **_family_keys(spec, known)}
    try:
        config = kind(**keys | spec.options)
    except Exception as error:  # transformers validates with several kinds of exception
        reason = str(error).strip().splitlines()[-1].strip()
        raise KeelError(
            f"model.build does not make a {spec.family} config: {reason}; "
            "change model.build.options or its sizes"
        ) from error
    check_family(config)
    return config


def _common_keys(spec: BuildModel) -> dict[str, Any]:
    tokenizer = build_tokenizer(spec)
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "max_position_embeddings": spec.context,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }


def _family_keys(spec: BuildModel, known: Collection[str]) -> dict[str, Any]:
    """Keys without which a family's config would keep the size of the published model."""
    family = FAMILIES[spec.family]
    width = spec.intermediate_size
    if width is None:
        width = 4 * spec.hidden_size
        if family.gated:
            width = -(-width * 2 // 3 // 8) * 8
    keys: dict[str, Any] = {family.width: width}
    per_head = spec.hidden_size // spec.heads
    options = {
        "num_key_value_heads": spec.kv_heads or spec.heads,
        "head_dim": per_head,
        "query_pre_attn_scalar": per_head,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width,
    }
    keys |= {key: value for key, value in options.items() if key in known}
    if family.experts:
        keys |= {"num_experts_per_tok": 2}
        keys["num_experts" if "num_experts" in known else "num_local_experts"] = EXPERTS
    return keys


def build_model(spec: BuildModel, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """The model with random weights from `seed`; the global random state does not change.

    Weights are made on the CPU in float32 and then cast, so they do not depend on the device and
    agree between dtypes.
    """
    config = build_config(spec)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator: torch.manual_seed would also seed the GPU's.
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.to(dtype)


def character_tokenizer(alphabet: str, context: int) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet, after `<pad>` (0) and `<eos>` (1).

    Encoding a character outside the alphabet raises. Raises KeelError for an alphabet that is
    empty or has a character twice.
    """
    if not alphabet:
        raise KeelError("model.build.alphabet is empty: give the characters of the tokenizer")
    twice = sorted(letter for letter, count in Counter(alphabet).items() if count > 1)
    if twice:
        raise KeelError(f"model.build.alphabet holds {twice[0]!r} twice: give each character once")
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, *alphabet))}
    tokenizer = Tokenizer(token_models.WordLevel(vocabulary))
    # Any character, also the newline, which "." does not match.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer, context)


def byte_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """One token per byte of UTF-8, with the byte's value as its id; `<pad>` 256, `<eos>` 257."""
    vocabulary = {character: number for number, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(token_models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _fast(tokenizer, context)


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in byte-level tokenizers.

    Printable Latin-1 characters represent themselves, the other bytes 256 and up in order (GPT-2,
    Radford et al. 2019).
    """
    itself = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(0xAE, 0x100)}
    characters, moved = [], 0
    for value in range(256):
        characters.append(chr(value if value in itself else 256 + moved))
        moved += value not in itself
    return characters


def _fast(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
