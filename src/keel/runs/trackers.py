"""Adapters to TensorBoard and Weights & Biases. Each gets the records of metrics.jsonl."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

from keel.config.stage import Trackers
from keel.platform import files
from keel.platform.extras import install_command
from keel.runs.layout import RunFolder
from keel.runs.rows import prompt_text
from keel.runs.values import clean_text
from keel.runs.writer import Rows, Tracker
from keel.types import KeelError

_LOGIN = "run wandb login, set WANDB_MODE=offline, or set trackers.wandb = false"


class TensorBoard:
    """Writes event files to RUN/trackers/tensorboard/STAGE, so each stage has its own steps."""

    def __init__(self, folder: RunFolder) -> None:
        try:
            import tensorboard  # noqa: F401  (torch's own writer needs it, with a less clear error)
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer_class: Any = SummaryWriter
        self._folder = folder.trackers / "tensorboard"
        self._writers: dict[str, Any] = {}

    def log(self, stage: str, step: int, metrics: Mapping[str, Any], rollouts: Rows = ()) -> None:
        with files.os_errors(self._folder):
            if stage not in self._writers:
                # Hides what a killed run logged past its checkpoint.
                self._writers[stage] = self._writer_class(
                    log_dir=str(self._folder / stage), purge_step=step
                )
            for name, value in _numbers(metrics).items():
                self._writers[stage].add_scalar(name, value, step)

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class WeightsAndBiases:
    """Logs `STAGE/NAME` against `STAGE/step`. A resumed run goes on in the same W&B run.

    W&B's own environment variables set where it logs to (online, offline, disabled; key; host).
    """

    def __init__(
        self, folder: RunFolder, wanted: Trackers, *, name: str, recipe: Mapping[str, Any]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        place = folder.trackers / "wandb"
        with files.os_errors(place, "make"):
            place.mkdir(parents=True, exist_ok=True)
            known = place / "run-id"
            identity = known.read_text("utf-8").strip() if known.exists() else ""
        try:
            self._run = wandb.init(
                project=wanted.project,
                name=wanted.run_name or name,
                group=wanted.group,
                id=identity or None,
                resume="allow" if identity else None,
                dir=str(place),
                config=dict(recipe),
            )
        except wandb.errors.Error as error:
            raise KeelError(f"trackers.wandb: {' '.join(str(error).split())}: {_LOGIN}") from error
        self._table, self._completions = wandb.Table, wanted.completions
        files.write_text(known, f"{self._run.id}\n")
        for stage in folder.stages:
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, stage: str, step: int, metrics: Mapping[str, Any], rollouts: Rows = ()) -> None:
        named: dict[str, Any] = {f"{stage}/{k}": v for k, v in _numbers(metrics).items()}
        shown = rollouts[: self._completions]
        if shown:
            rows = [
                [step, prompt_text(row.prompt), clean_text(row.completion), row.reward]
                for row in shown
            ]
            columns = ["step", "prompt", "completion", "reward"]
            named[f"{stage}/completions"] = self._table(columns=columns, data=rows)
        self._run.log({f"{stage}/step": step, **named})

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    wanted: Trackers, folder: RunFolder, *, name: str, recipe: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers of a stage. Raises KeelError if one is missing or does not start."""
    trackers: list[Tracker] = []
    if wanted.tensorboard:
        trackers.append(TensorBoard(folder))
    if wanted.wandb:
        trackers.append(WeightsAndBiases(folder, wanted, name=name, recipe=recipe))
    return trackers


def check_trackers(wanted: Trackers) -> None:
    """Raises KeelError for a tracker that is not installed, and for W&B online without credentials.

    Nothing is sent.
    """
    for name in ("tensorboard", "wandb"):
        if getattr(wanted, name) and importlib.util.find_spec(name) is None:
            raise _missing(name)
    if not wanted.wandb:
        return
    import wandb

    offline = wandb.setup().settings.mode in ("offline", "dryrun", "disabled")
    if not offline and not wandb.login(prompt=False):
        raise KeelError(f"trackers.wandb: not logged in: {_LOGIN}", key="trackers.wandb")


def _missing(tracker: str) -> KeelError:
    return KeelError(
        f"trackers.{tracker} = true needs the package {tracker}: "
        f"{install_command(tracker)}, or set trackers.{tracker} = false",
        key=f"trackers.{tracker}",
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    out = {}
    for name in sorted(metrics):
        value = metrics[name]
        number = float(value) if isinstance(value, int | float) else math.nan
        if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            number = float(value.item())
        if math.isfinite(number):
            out[name] = number
    return out
