"""Whether a tokenizer makes the same tokens after it is saved and loaded by AutoTokenizer.

AutoTokenizer chooses the class by the model's family as well as by the folder's files, and may
replace the rules in tokenizer.json by the family's (for example Qwen2's).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from keel.types import KeelError

PROBES = (
    "What is 12 + 34567? The answer is -3.1415e10.",
    " leading,  doubled   and trailing blanks \n\n\ttabs\r\nlines \n",
    "naïve café, cafe\u0301 in two code points, \u212b, \ufb01, ½, ①",
    "中文和日本語のテキスト、한국어, ไทย, हिन्दी",
    "שלום עולם, مرحبا بالعالم ١٢٣",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 and \u200b zero\u00a0width",
    "def f(x):\n    return {'a': [x**2, \"b\"]}  # it's we'll don't\n",
    "<|im_start|>user\n</s><s>[INST] <eos><pad> <|endoftext|><think>",
    "CamelCaseAndSNAKE_CASE1234567890abc https://example.org/?q=1&r=%20",
)
"""Texts that tokenizers with different rules encode differently."""


@dataclass(frozen=True, eq=False)
class Served:
    """The tokenizers that must agree with the one in use; None where the rules are equal.

    `saved` is what AutoTokenizer loads from a folder that the tokenizer is saved to; `written` is
    the source's tokenizer.json.
    """

    saved: PreTrainedTokenizerBase | None = None
    written: PreTrainedTokenizerBase | None = None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and reports."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def served(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str, source: str | None
) -> Served:
    """The tokenizers to compare on the data. Raises KeelError where fixed texts already differ.

    `name` is the model's in an error, `source` the folder that the tokenizer was loaded from.
    """
    saved: PreTrainedTokenizerBase | None = reloaded(tokenizer, config)
    assert saved is not None
    if same_rules(tokenizer, saved):
        saved = None
    elif (where := difference(tokenizer, saved, PROBES)) is not None:
        raise KeelError(differing(name, where))
    written = None if source is None else written_in(Path(source).expanduser())
    if written is not None and same_rules(tokenizer, written):
        written = None
    if written is not None:
        # tokenizer.json lacks the chat template and the names of special tokens in templates.
        written.chat_template = tokenizer.chat_template
        known = written.get_vocab()
        names = tokenizer._special_tokens_map.items()
        written._special_tokens_map.update({n: t for n, t in names if str(t) in known})
    return Served(saved, written)


def reloaded(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> PreTrainedTokenizerBase:
    """What AutoTokenizer loads from a folder with this tokenizer and this config."""
    with TemporaryDirectory() as folder, quiet():
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


def written_in(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a folder's tokenizer.json; None where there is none."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    return PreTrainedTokenizerFast(tokenizer_file=str(file))


def same_rules(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same rules, and so encode every text alike."""
    rules = [_rules(tokenizer) for tokenizer in (a, b)]
    return rules[0] is not None and rules[0] == rules[1]


def difference(
    a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase, texts: Iterable[str]
) -> str | None:
    """How two tokenizers differ on the first text that they encode differently; None if on none."""
    for text in texts:
        one, other = _ids(a, text), _ids(b, text)
        if one != other:
            return apart(text, one, other)
    return None


def apart(text: str, one: list[int] | None, other: list[int] | None) -> str:
    """How two encodings of a text differ."""
    if one is None or other is None:
        return f"{text[:60]!r} can be read by only one of them"
    at = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
    where = "" if at is None else f", token {at} differs first"
    return f"{text[:60]!r} is {len(one)} tokens against {len(other)}{where}"


def differing(name: str, where: str) -> str:
    """The error for a tokenizer that changes when saved; `name` is a model or a prompt."""
    return (
        f"{name!r}: the tokenizer makes other tokens once it is saved and loaded by "
        f"AutoTokenizer: {where}; the trained model would be served on tokens that it has not "
        "learned: use the tokenizer of the model's own family, or a model of another family"
    )


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int] | None:
    try:
        return list(tokenizer(text, verbose=False)["input_ids"])
    except Exception:  # a character outside its vocabulary; tokenizers raises bare Exception
        return None


def _rules(tokenizer: Any) -> dict[str, Any] | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    rules: dict[str, Any] = json.loads(backend.to_str())
    return {key: rule for key, rule in rules.items() if key not in ("padding", "truncation")}
