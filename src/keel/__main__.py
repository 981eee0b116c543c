"""`keel` and `python -m keel`."""

from __future__ import annotations

import sys

from keel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
