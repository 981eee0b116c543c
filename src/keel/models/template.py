"""Rendering a tokenizer's chat template, within a time limit and with errors of one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from keel.platform.time_limit import Hung, time_limit
from keel.types import KeelError, one_line

TEMPLATE_SECONDS = 30.0
"""Limit for one conversation, which usually takes less than a thousandth of a second.

A chat template comes with a model. transformers renders it in a sandbox without files and
attributes, but nested loops could still run for hours."""


def limited_template(what: str) -> AbstractContextManager[None]:
    """Raise `Hung`, which names `what`, if the block exceeds `TEMPLATE_SECONDS`."""
    hint = "does it loop? Set model.chat_template to another"
    return time_limit(f"the chat template of {what}", TEMPLATE_SECONDS, hint)


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    name: str,
    *,
    generate: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The conversation as the chat template writes it.

    With `generate` the header of the assistant's next turn follows. `tools` are described to the
    model; `template_kwargs` are the template's own keywords. Raises KeelError, with the example's
    `name`, if there is no template, or it fails.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise KeelError(
            f"{name} is a conversation, but the tokenizer has no chat template: set "
            "model.chat_template, or write the prompt as text"
        )
    try:
        with limited_template(name):
            text = tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=generate,
                **(template_kwargs or {}),
            )
        return str(text)
    except Hung:
        raise
    except Exception as error:  # a template raises what it likes
        raise KeelError(f"{name}: the chat template fails: {one_line(error, named=True)}") from None
