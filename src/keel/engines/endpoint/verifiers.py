"""Environments of the package `verifiers`: their tasks as prompts, and the program that runs them.

A prompt holds its environment and its task as columns, so a stage can mix environments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from keel.types import KeelError, ProgramInput, one_line

ENVIRONMENT, TASK = "verifiers_environment", "verifiers_task"
"""Columns: the settings of an environment and the data of a task, as JSON."""


def tasks(
    *, environment: Mapping[str, Any], select: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """The tasks of an environment as examples.

    `environment` has the settings that verifiers reads from `[env]`, `select` those of `[select]`.
    Raises KeelError for an environment that does not load.
    """
    import verifiers.v1 as vf

    with _errors("options.environment or options.select"):
        loaded = vf.load_environment(vf.resolve_env_config(json.loads(json.dumps(environment))))
        chosen = loaded.taskset.select(vf.SelectConfig.model_validate(select or {}))
        if not chosen.bounded:
            raise ValueError("the taskset is infinite: set select.limit")
        settings = json.dumps(environment, sort_keys=True)
        return [
            {
                "prompt": task.data.prompt_text or task.data.name or f"task {task.data.idx}",
                ENVIRONMENT: settings,
                TASK: task.data.model_dump_json(exclude_unset=True),
            }
            for task in chosen
        ]


async def run(given: ProgramInput) -> dict[str, float]:
    """One episode of the prompt's environment with the policy as its agent.

    Returns the environment's total reward as `reward`, and each reward and metric by its name.
    Raises KeelError for an episode that fails.
    """
    import verifiers.v1 as vf

    if ENVIRONMENT not in given.columns:
        raise KeelError(f"the prompt has no environment: name {__name__}:tasks in [[tasks]]")
    with _errors("the environment"):
        config = vf.resolve_env_config(json.loads(given.columns[ENVIRONMENT]))
        environment = vf.load_environment(config)
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate_json(given.columns[TASK])
    # In a header: verifiers reads keys from the process's environment variables alone, which all
    # programs share.
    client = vf.EvalClientConfig(
        base_url=given.base_url, api_key_var="", headers={"X-Api-Key": given.api_key}
    )
    async with environment.serving():
        (slot,) = environment.slots(kind(data, config.taskset.task))
        episode = await environment.run_slot(slot, vf.ModelContext(given.model, client))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        raise KeelError(f"the episode failed: {reasons or 'without an error'}")
    own = [trace for trace in episode.traces if trace.agent.config.client == client]
    columns: dict[str, float] = {}
    for trace in own:
        columns |= {name: value for name, value in trace.metrics.items() if value is not None}
        columns |= {name: one.value for name, one in trace.rewards.items() if one is not None}
    return {**columns, "reward": sum(trace.reward for trace in own)}


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """What verifiers or an environment raises, on one line."""
    try:
        yield
    except Exception as error:
        raise KeelError(f"verifiers cannot use {what}: {one_line(error, named=True)}") from error
