"""Adapters to TensorBoard, W&B, trackio and MLflow. Each gets the records of metrics.jsonl."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from keel.config.stage import Trackers
from keel.platform import files
from keel.platform.extras import install_command
from keel.runs.layout import RunFolder
from keel.runs.rows import prompt_text
from keel.runs.values import clean_text
from keel.runs.writer import Rows, Tracker
from keel.types import KeelError, one_line

EXTRAS = ("tensorboard", "wandb", "trackio", "mlflow")
"""The trackers, by the key, the package and the extra of that name."""
_LOGIN = "run wandb login, set WANDB_MODE=offline, or set trackers.wandb = false"
_REFUSED = re.compile(r"[^\w\-. :/]")
"""Characters that a name in MLflow may not have."""


class TensorBoard:
    """Writes event files to RUN/trackers/tensorboard/STAGE, so each stage has its own steps."""

    def __init__(self, folder: RunFolder, wanted: Trackers) -> None:
        try:
            import tensorboard  # noqa: F401  (torch's own writer needs it, with a less clear error)
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        self._writer_class: Any = SummaryWriter
        self._folder = folder.trackers / "tensorboard"
        self._writers: dict[str, Any] = {}
        self._wanted = wanted

    def log(self, stage: str, step: int, metrics: Mapping[str, Any], rollouts: Rows = ()) -> None:
        with files.os_errors(self._folder):
            if stage not in self._writers:
                # Hides what a killed run logged past its checkpoint.
                self._writers[stage] = self._writer_class(
                    log_dir=str(self._folder / stage), purge_step=step
                )
            for name, value in _numbers(metrics).items():
                self._writers[stage].add_scalar(name, value, step)
            for name, values in _distributions(self._wanted, rollouts).items():
                self._writers[stage].add_histogram(name, values, step)

    def close(self, failed: bool = False) -> None:
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
        place, identity = _place(folder, "wandb")
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
        self._wandb, self._wanted = wandb, wanted
        _keep_identity(place, self._run.id)
        for stage in folder.stages:
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, stage: str, step: int, metrics: Mapping[str, Any], rollouts: Rows = ()) -> None:
        named = _with_objects(self._wandb, self._wanted, stage, step, metrics, rollouts)
        self._run.log({f"{stage}/step": step, **named})

    def close(self, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))


class Trackio:
    """Logs `STAGE/NAME` at the stage's steps. A resumed run goes on in the same trackio run.

    Runs are in trackio's own database, which its dashboard shows side by side: on this machine
    (TRACKIO_DIR), in a Space (TRACKIO_SPACE_ID) or on a server (TRACKIO_SERVER_URL).
    """

    def __init__(
        self, folder: RunFolder, wanted: Trackers, *, name: str, recipe: Mapping[str, Any]
    ) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _missing("trackio") from error
        place, identity = _place(folder, "trackio")
        # It prints, also what is not asked for; standard output is for the command's result.
        with contextlib.redirect_stdout(sys.stderr), _naming("trackio"):
            self._run = trackio.init(
                project=wanted.project,
                # A run is found again by its name alone.
                name=identity or wanted.run_name or f"{name}-{secrets.token_hex(3)}",
                group=wanted.group,
                config=dict(recipe),
                resume="allow" if identity else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._trackio, self._wanted = trackio, wanted
        _keep_identity(place, self._run.name)

    def log(self, stage: str, step: int, metrics: Mapping[str, Any], rollouts: Rows = ()) -> None:
        named = _with_objects(self._trackio, self._wanted, stage, step, metrics, rollouts)
        self._run.log(named, step=step)

    def close(self, failed: bool = False) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._trackio.finish()


class MLflow:
    """Logs `STAGE/NAME` at the stage's steps. A resumed run goes on in the same MLflow run.

    To the server or database of MLFLOW_TRACKING_URI, else to SQLite in RUN/trackers/mlflow. The
    parameters are the keys of the resolved recipe. Characters that MLflow does not accept in a
    name (`pass@1`) become `_`.
    """

    def __init__(
        self, folder: RunFolder, wanted: Trackers, *, name: str, recipe: Mapping[str, Any]
    ) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        place, identity = _place(folder, "mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (place / "artifacts").absolute().as_uri()
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param

            with _naming("mlflow"):
                self._client = MlflowClient(
                    uri or f"sqlite:///{quote(str(place.absolute()))}/mlflow.db"
                )
        except ImportError as error:
            raise _missing("mlflow") from error
        self._metric = Metric
        with _naming("mlflow"):
            if identity:
                self._client.update_run(identity, status="RUNNING")
            else:
                known = self._client.get_experiment_by_name(wanted.project)
                number = (
                    self._client.create_experiment(wanted.project, artifacts)
                    if known is None
                    else known.experiment_id
                )
                tags = {} if wanted.group is None else {"group": wanted.group}
                made = self._client.create_run(number, tags=tags, run_name=wanted.run_name or name)
                identity = made.info.run_id
                keys = [Param(key, value) for key, value in _leaves(recipe)]
                for first in range(0, len(keys), 100):  # as many as a request may hold
                    self._client.log_batch(identity, params=keys[first : first + 100])
                _keep_identity(place, identity)
        self._identity = identity

    def log(self, stage: str, step: int, metrics: Mapping[str, Any], rollouts: Rows = ()) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._identity,
            metrics=[
                self._metric(_REFUSED.sub("_", f"{stage}/{name}"), value, now, step)
                for name, value in _numbers(metrics).items()
            ],
        )

    def close(self, failed: bool = False) -> None:
        self._client.set_terminated(self._identity, "FAILED" if failed else "FINISHED")


def open_trackers(
    wanted: Trackers, folder: RunFolder, *, name: str, recipe: Mapping[str, Any]
) -> list[Tracker]:
    """The trackers of a stage. Raises KeelError if one is missing or does not start."""
    trackers: list[Tracker] = []
    if wanted.tensorboard:
        trackers.append(TensorBoard(folder, wanted))
    for key, kind in (("wandb", WeightsAndBiases), ("trackio", Trackio), ("mlflow", MLflow)):
        if getattr(wanted, key):
            trackers.append(kind(folder, wanted, name=name, recipe=recipe))
    return trackers


def check_trackers(wanted: Trackers) -> None:
    """Raises KeelError for a tracker that is not installed, and for W&B online without credentials.

    Nothing is sent.
    """
    for name in EXTRAS:
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


@contextlib.contextmanager
def _naming(tracker: str) -> Iterator[None]:
    """What goes wrong as a tracker starts, in one line with its key."""
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        raise KeelError(
            f"trackers.{tracker}: {one_line(error, named=True)}: fix it, or set "
            f"trackers.{tracker} = false",
            key=f"trackers.{tracker}",
        ) from error


def _place(folder: RunFolder, tracker: str) -> tuple[Path, str]:
    """The tracker's folder in the run, and the id of the run there; empty if it has none yet."""
    place = folder.trackers / tracker
    with files.os_errors(place, "make"):
        place.mkdir(parents=True, exist_ok=True)
        known = place / "run-id"
        return place, known.read_text("utf-8").strip() if known.exists() else ""


def _keep_identity(place: Path, identity: str) -> None:
    files.write_text(place / "run-id", f"{identity}\n")


def _with_objects(
    tracker: Any,
    wanted: Trackers,
    stage: str,
    step: int,
    metrics: Mapping[str, Any],
    rollouts: Rows,
) -> dict[str, Any]:
    """Metrics, histograms and the table of completions as W&B and trackio, which has its classes,
    log them."""
    named: dict[str, Any] = dict(_numbers(metrics))
    for name, values in _distributions(wanted, rollouts).items():
        named[name] = tracker.Histogram(values)
    if shown := rollouts[: wanted.completions]:
        rows = [
            [step, prompt_text(row.prompt), clean_text(row.completion), row.reward] for row in shown
        ]
        columns = ["step", "prompt", "completion", "reward"]
        named["completions"] = tracker.Table(columns=columns, data=rows)
    return {f"{stage}/{name}": value for name, value in named.items()}


def _distributions(wanted: Trackers, rollouts: Rows) -> dict[str, npt.NDArray[np.float64]]:
    """The rewards of a step's completions, and their lengths in tokens of the policy."""
    if not wanted.histograms or not rollouts:
        return {}
    rewards = [row.reward for row in rollouts if row.reward is not None]
    lengths = [int(np.sum(row.written)) for row in rollouts]
    found = {"histograms/reward": rewards, "histograms/length": lengths}
    return {name: np.array(values, np.float64) for name, values in found.items() if values}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a recipe and their values, as texts."""
    if isinstance(value, Mapping | list | tuple) and value:
        named = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inside in named:
            yield from _leaves(inside, f"{key}.{name}" if key else str(name))
    else:
        yield _REFUSED.sub("_", key), str(value)[:500]


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
