"""The optional packages: what each extra is for, what of it is installed, and how it is had."""

from __future__ import annotations

import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).resolve().parents[3]
"""The folder of Keel's source, if it runs from one."""
EXTRAS: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "control": (("gymnasium", "pygame-ce"), "keel control: Gymnasium environments"),
    "data": (("datasets",), "data sets by their name on the hub"),
    "judge": (("openai",), "a language model on a server as the judge"),
    "language": (("lingua-language-detector",), "the reward language"),
    "lora": (("peft",), "model.lora"),
    "math": (("math-verify",), "the reward math"),
    "mlflow": (("mlflow-skinny", "sqlalchemy", "alembic"), "trackers.mlflow"),
    "preferences": (("openai", "nicegui"), "keel prefs with models and pages"),
    "quantisation": (("bitsandbytes",), "model.quantisation, 8-bit optimizers"),
    "ray": (("ray",), "cluster.ray"),
    "tasks": (("reasoning-gym",), "tasks of reasoning-gym"),
    "tensorboard": (("tensorboard",), "trackers.tensorboard"),
    "trackio": (("trackio",), "trackers.trackio"),
    "verifiers": (("verifiers",), "environments of the package verifiers"),
    "view": (("nicegui", "markdown-it-py"), "keel view, keel prefs annotate"),
    "wandb": (("wandb",), "trackers.wandb"),
}
"""The extras that users install: their packages, and what needs them."""


def from_source() -> bool:
    """Whether Keel runs from its source tree, installed as editable or not at all."""
    return (SOURCE / "pyproject.toml").is_file() and (SOURCE / "src" / "keel").is_dir()


def install_command(*extras: str) -> str:
    """The command that adds these extras to the Keel that runs.

    From a source tree it names that folder. An installed wheel satisfies `keel-rl` itself, so pip
    adds the packages of the extra and looks for no other Keel.
    """
    wanted = f"[{','.join(extras)}]"
    if from_source():
        return f"pip install -e {_quoted(f'{SOURCE}{wanted}')}"
    return f"pip install {_quoted(f'keel-rl{wanted}')}"


def _quoted(text: str) -> str:
    return shlex.quote(text) if "'" in text else f"'{text}'"


def versions(extra: str) -> dict[str, str | None]:
    """The versions of an extra's packages; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package in EXTRAS[extra][0]:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
