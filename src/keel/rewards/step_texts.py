"""Where the steps of a completion end among the tokens that the policy wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keel.graders.steps import split_steps
from keel.models.chat import token_ends
from keel.types import KeelError

Judged = list[tuple[int, float]]
"""What a process reward says: (index of the step's last token, reward) of each step."""


def on_tokens(
    tokenizer: Any, ids: Sequence[int], text: str, separator: str, rewards: Sequence[float]
) -> Judged:
    """The steps' rewards at the tokens that close them; the last step closes with the answer.

    An answer without any step is one step, with reward 0; one without any token has none.
    """
    if not ids:
        return []
    last = len(ids) - 1
    spans = split_steps(text, separator)
    if not spans:
        return [(last, 0.0)]
    ends = [*token_ends(tokenizer, ids, [end for _, end in spans[:-1]]), last]
    if len(set(ends)) < len(ends):
        raise KeelError(
            f"two steps of {text[:40]!r} end in one token, so they cannot be distinguished: "
            f"choose another separator than {separator!r}"
        )
    return list(zip(ends, rewards, strict=True))


def needs_tokenizer(tokenizer: Any) -> Any:
    """The policy's tokenizer. Raises KeelError where there is none to place steps with."""
    if tokenizer is None:
        raise KeelError("steps end at tokens, and here is no policy whose tokens these would be")
    return tokenizer
