"""A limit on how long a chat template may take: it comes with a model, and may loop.

transformers renders templates in a sandbox that keeps them from files and attributes, not from
nested loops that run for hours.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from transformers import PreTrainedTokenizerBase

from keel.runs.watchdog import limited
from keel.types import KeelError

SECONDS = 30.0
"""For one conversation, which usually takes less than a thousandth of one."""


def limited_template(what: str) -> AbstractContextManager[None]:
    """Raise `Hung`, which names `what`, where the block takes longer than `SECONDS`."""
    return limited(
        f"the chat template of {what}", SECONDS, "does it loop? Set model.chat_template to another"
    )


def check_template_names(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse named chat templates that could not be saved as files. Raises KeelError."""
    templates = tokenizer.chat_template
    for template in templates if isinstance(templates, dict) else ():
        if not str(template).replace("-", "_").isidentifier():
            raise KeelError(
                f"model {name!r} has a chat template named {template!r}, which is no file name: "
                "rename it in tokenizer_config.json to letters, digits, - and _"
            )
