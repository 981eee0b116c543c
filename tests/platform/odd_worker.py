"""A worker that does what it is asked, bad things too."""

from __future__ import annotations

import os
import time
from typing import Any

from keel.platform.worker import serve


def answer(item: Any) -> Any:
    what, value = item
    if what == "sleep":
        time.sleep(value)
    elif what == "wait":
        while not os.path.exists(value):
            time.sleep(0.01)
    elif what == "hold":
        return (3**value) % 7  # in C, with Python's lock held
    elif what == "exit":
        os._exit(value)
    elif what == "raise":
        raise ValueError(value)
    elif what == "take":
        return len(bytearray(value))
    elif what == "print":
        print(value)
        return os.getpid()
    return value


if __name__ == "__main__":
    serve(answer)
