"""How long threads stay awake: set before torch is there, unless the user has."""

import os
import subprocess
import sys

import pytest

SHOWN = """
import os, sys
from keel.cli.main import main
main(["recipes"])
assert "torch" not in sys.modules, "what torch's OpenMP reads as it is loaded would come too late"
print("set:", os.environ.get("GOMP_SPINCOUNT"))
"""


def shown(**settings: str) -> str:
    around = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN],
        capture_output=True,
        text=True,
        check=True,
        env={**around, **settings},
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.quick("settings2-set: None")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set: 20000"),
        ({"GOMP_SPINCOUNT": "7"}, "set: 7"),
        ({"OMP_WAIT_POLICY": "passive"}, "set: None"),
    ],
)
def test_a_wait_is_short_unless_the_user_wishes_otherwise(
    settings: dict[str, str], message: str
) -> None:
    assert shown(**settings) == message
