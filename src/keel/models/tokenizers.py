"""Small tokenizers made on the spot: one token per character, or one per byte.

Both decode to exactly the text they encoded, and save and load as any fast tokenizer does. (For
Qwen2, AutoTokenizer puts rules of its own in their place: see `build.build_tokenizer`.)
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import PreTrainedTokenizerFast

from keel.types import KeelError

PAD, EOS = "<pad>", "<eos>"


def character_tokenizer(alphabet: str, context: int) -> PreTrainedTokenizerFast:
    """One token per character of the alphabet, after `<pad>` (0) and `<eos>` (1).

    Encoding a character outside the alphabet raises. Raises KeelError for an alphabet that is
    empty or names a character twice.
    """
    if not alphabet:
        raise KeelError("model.build.alphabet is empty: give the characters of the tokenizer")
    twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
    if twice:
        raise KeelError(f"model.build.alphabet holds {twice[0]!r} twice: give each character once")
    vocabulary = {token: number for number, token in enumerate((PAD, EOS, *alphabet))}
    tokenizer = Tokenizer(token_models.WordLevel(vocabulary))
    # Any character, the newline among them, which "." leaves out.
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

    Printable Latin-1 characters stand for themselves, the rest are moved to 256 and up in order
    (GPT-2, Radford et al. 2019).
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
