"""`keel chat`: a conversation in the terminal; lines from a pipe are answered one by one."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from keel.analysis.text import visible
from keel.config.load import read_overrides
from keel.platform.signals import noticing_interrupt
from keel.types import KeelError

if TYPE_CHECKING:
    from keel.engines.chat import Chat, Reply

COMMANDS = "/reset begins again, /system TEXT sets the system message, /exit or Ctrl-D ends"
THOUGHT, END = "<think>", "</think>"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def run(arguments: argparse.Namespace) -> None:
    """Talk until the input ends."""
    from keel.workflows.serving import conversation

    with conversation(
        arguments.model,
        system=arguments.system or "",
        checkpoint=arguments.checkpoint,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        max_tokens=arguments.max_tokens,
        template=read_overrides(arguments.template),
    ) as (model, chat):
        if not model.has_template:
            print(
                f"keel chat: {model.name} has no chat template: it goes on from what you write, "
                "each time from that alone",
                file=sys.stderr,
            )
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            for line in sys.stdin:
                if line.strip():
                    _note(_answer(chat, line.rstrip("\n")))
            return
        used = model.sampling
        how = f"temperature {used.temperature:g}" if used.temperature else "greedy"
        print(f"{model.name}, {how}. {COMMANDS}; Ctrl-C stops an answer.")
        with suppress(ImportError):
            import readline  # noqa: F401  # input() then has a history
        with suppress(EOFError, KeyboardInterrupt):
            while (line := input("\n> ").strip()) != "/exit":
                _turn(chat, line, model.has_template)
        print()


def _turn(chat: Chat, line: str, has_template: bool) -> None:
    """Do what a line says, or answer it."""
    command, _, rest = line.partition(" ")
    if command == "/reset":
        chat.reset()
        print("The conversation begins again.")
    elif command == "/system" and has_template:
        chat.reset(rest.strip())
        print("The conversation begins again, with this system message.")
    elif command.startswith("/") and command[1:].isalpha():
        print(f"There is no {command}: {COMMANDS}.")
    elif line:
        try:
            _note(_answer(chat, line))
        except KeelError as error:
            print(f"keel chat: {error}", file=sys.stderr)


def _answer(chat: Chat, line: str) -> Reply:
    """Print the answer while it is decoded."""
    terminal = sys.stdout.isatty()
    shown = _Shown(thinks=THOUGHT in chat.opening) if terminal else None

    def show(text: str, last: bool = False) -> None:
        if text or last:
            print(text if shown is None else shown.add(text, last), end="", flush=True)

    if not terminal:
        reply = chat.ask(line, show)
    else:
        with noticing_interrupt() as stopped:
            reply = chat.ask(line, show, stopped)
        show("", last=True)
    print(flush=True)
    return reply


def _note(reply: Reply) -> None:
    """What the answer does not say."""
    if reply.dropped:
        print(
            f"keel chat: the context is full: the oldest {reply.dropped} messages are dropped",
            file=sys.stderr,
        )
    if reply.finish == "length":
        print("keel chat: the answer ends here: no token is left for it", file=sys.stderr)


class _Shown:
    """An answer as a terminal gets it: thoughts dim, characters that act on it as escapes."""

    def __init__(self, thinks: bool) -> None:
        self._thinks, self._text = thinks, DIM if thinks else ""
        self._held = ""

    def add(self, text: str, last: bool = False) -> str:
        """What can be shown now."""
        from keel.models.text import unsettled

        out, self._text = self._text, ""
        text = self._held + text
        while True:
            mark = END if self._thinks else THOUGHT
            before, found, after = text.partition(mark)
            if not found:
                break
            out += visible(before, lines=True, prose=True)
            out += f"{END}{PLAIN}" if self._thinks else f"{DIM}{THOUGHT}"
            self._thinks, text = not self._thinks, after
        held = 0 if last else unsettled(text, [mark])
        self._held = text[len(text) - held :]
        out += visible(text[: len(text) - held], lines=True, prose=True)
        return out + PLAIN * (last and self._thinks)
