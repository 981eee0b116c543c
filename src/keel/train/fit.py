"""The loop of every stage that learns from rows: draw, learn, record, evaluate, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from keel.config.optimisation import Checkpoints, Optimizer
from keel.learn.learner import stop_unless_finite
from keel.learn.optimizer import AdamW, learning_rate
from keel.runs.session import Session, due
from keel.train.measuring import Measured
from keel.train.state import Progress

B = TypeVar("B")


@dataclass(frozen=True, eq=False)
class Learned:
    """What the backward passes of a step said; `tokens` are those that entered the model."""

    metrics: dict[str, float]
    tokens: int


@dataclass(frozen=True, eq=False)
class Fit(Generic[B]):
    """A stage that learns from rows.

    `draw` gives the rows of a step (counted from 1), `learn` leaves their gradient in the
    parameters, `fill` writes a checkpoint's files, `stream` is what decides which rows come next
    beside the step. `evaluate` measures the held-out rows every so many steps, and before and
    after; `show` makes pictures of the last.
    """

    steps: int
    optimizer: AdamW
    choice: Optimizer
    checkpoints: Checkpoints
    session: Session
    draw: Callable[[int], B]
    learn: Callable[[B], Learned]
    fill: Callable[[Path, Progress], None]
    stream: Callable[[], Mapping[str, Any]] = dict
    evaluate: Callable[[], Measured] | None = None
    evaluate_every: int = 0
    show: Callable[[Measured], None] | None = None


def run(fit: Fit[Any], progress: Progress) -> Progress:
    """From `progress` to the last step of the stage, or until the run is asked to stop."""
    session = fit.session
    if session.interrupted:
        save(fit, progress)
    if progress.before is None and fit.evaluate is not None and not session.interrupted:
        before = fit.evaluate()
        session.measured(progress, before.as_dict(), "before")
        progress = replace(progress, before=before.headline())
    while progress.step < fit.steps and not session.interrupted:
        start = time.perf_counter()
        number = progress.step + 1
        metrics, tokens = take_step(fit, number)
        progress = replace(
            progress, step=number, stream=fit.stream(), tokens=progress.tokens + tokens
        )
        metrics["num_tokens"] = float(progress.tokens)
        last = number == fit.steps
        result: Measured | None = None
        if fit.evaluate is not None and (last or due(fit.evaluate_every, number)):
            with session.clock("evaluate"):
                result = fit.evaluate()
            metrics |= {f"eval/{name}": value for name, value in result.headline().items()}
            session.measured(progress, result.as_dict(), "after" if last else "during")
        session.recorded(progress, metrics, [], time.perf_counter() - start)
        if session.checkpoint_due(progress, fit.steps, fit.checkpoints):
            save(fit, progress)
        if last and result is not None and fit.show is not None:
            fit.show(result)
    return progress


def take_step(fit: Fit[Any], number: int) -> tuple[dict[str, float], int]:
    """One optimizer step on the rows of a step; its metrics, and how many tokens were read."""
    with fit.session.clock("data"):
        rows = fit.draw(number)
    with fit.session.clock("update"):
        learned = fit.learn(rows)
        metrics = dict(learned.metrics)
        stop_unless_finite(metrics)
        rate = learning_rate(fit.choice, number - 1, fit.steps)
        metrics["grad_norm"] = fit.optimizer.step(rate)
        stop_unless_finite(metrics)
    return {**metrics, "learning_rate": rate}, learned.tokens


def save(fit: Fit[Any], progress: Progress) -> None:
    """Leave a checkpoint."""

    def fill(folder: Path) -> None:
        fit.fill(folder, progress)

    fit.session.checkpoint(progress, fill, fit.checkpoints)
