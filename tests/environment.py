"""An environment that has all that Keel needs, but not Keel itself."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

OWN = ("keel", "__editable__")
"""What the names of an installation of Keel begin with."""


def make_environment(folder: Path) -> Path:
    """The interpreter of a new environment with links to the packages of this one.

    No process that starts in it, whoever starts it, finds this one's Keel, its metadata or an
    editable installation.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    inside = folder / "lib" / version / "site-packages"
    for path in {sysconfig.get_path(name) for name in ("purelib", "platlib")}:
        for entry in Path(path).iterdir():
            if not entry.name.startswith(OWN) and not (inside / entry.name).exists():
                (inside / entry.name).symlink_to(entry)
    return folder / "bin" / "python"
