"""A child that does what it is asked, bad things too."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from keel.platform.process import serve
from keel.types import KeelError


def answer(item: Any) -> Any:
    what, value = item
    if what == "sleep":
        time.sleep(value)
    elif what == "hold":
        return (3**value) % 7  # in C, with Python's lock held
    elif what == "exit":
        print("last words", file=sys.stderr)
        os._exit(value)
    elif what == "raise":
        raise ValueError(value)
    elif what == "refuse":
        raise KeelError(value)
    elif what == "take":
        return len(bytearray(value))
    elif what == "print":
        print(value)
    return value


if __name__ == "__main__":
    serve(answer, memory_mb=512)
