"""`keel` and `python -m keel`."""

from __future__ import annotations

import atexit
import gc
import sys

from keel.cli.main import main

atexit.register(gc.freeze)  # the collection at the end would take a second over torch's modules

if __name__ == "__main__":
    sys.exit(main())
