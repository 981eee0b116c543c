"""Standard output and error that a run outlives: closed, broken or in another encoding."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

NAMES = ("stdout", "stderr")
GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)
"""Errors of a pipe whose reader has ended, and of a terminal that has closed."""
_ESCAPE = "keel.escape"
_lost: dict[str, str] = {}


def lost() -> dict[str, str]:
    """The streams whose reader has gone since the last call, each with the error it ended with."""
    found = dict(_lost)
    _lost.clear()
    return found


@contextmanager
def outlasting() -> Iterator[None]:
    r"""Lets the process go on when the reader of its standard output or error goes.

    Within the block, what is written to such a stream is dropped, by child processes too. A
    descriptor (0 to 2) that was closed from the start leads to the null device, so that no file of
    a run gets its number. A character that the stream's encoding does not have is written as
    `\uXXXX`, which is also how JSON spells it. A stream that a caller put in the place of the
    process's own is left as it is.
    """
    _open_closed()
    before = {name: getattr(sys, name) for name in NAMES}
    for name, stream in before.items():
        if stream is None:
            setattr(sys, name, os.fdopen(os.dup(1 + NAMES.index(name)), "w", encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _outlasting(stream, name))
    try:
        yield
    finally:
        for name, stream in before.items():
            with suppress(OSError, ValueError):
                getattr(sys, name).flush()
            setattr(sys, name, stream)


class _Raw(io.FileIO):
    """A descriptor that leads to the null device once its reader has gone."""

    def __init__(self, descriptor: int, stream: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._stream = stream

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                error.filename = self._stream
                raise
            _lost[self._stream] = os.strerror(error.errno)
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            return super().write(data)


def _outlasting(stream: io.TextIOWrapper, name: str) -> TextIO:
    with suppress(OSError):
        stream.flush()
    raw = _Raw(stream.fileno(), name)
    unbuffered = isinstance(stream.buffer, io.RawIOBase)  # python -u
    return io.TextIOWrapper(
        raw if unbuffered else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=_ESCAPE,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _open_closed() -> None:
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(null, True)


def _escape(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


codecs.register_error(_ESCAPE, _escape)
