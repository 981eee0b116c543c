"""The processes that a recipe runs on. Torch-free."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from keel.algorithms.spec import FrozenModel, UnusedIf
from keel.config.sources import Seconds

_ONE_PROCESS = UnusedIf(
    lambda key: key.table.processes == 1, "with one process no weights are sharded"
)
_NOTHING_TO_OFFLOAD = UnusedIf(
    lambda key: key.facts.cpu, "the models are on a CPU, in the machine's memory already"
)
_NO_RAY = UnusedIf(lambda key: key.table.ray is None, "cluster.ray is not set")
_ALONE = UnusedIf(
    lambda key: key.table.ray is None and key.table.processes == 1, "there is one process"
)


class Cluster(FrozenModel):
    """The processes that a recipe runs on."""

    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that share the stages of kind rl: each trains on some of the sequences, with a part
    of the weights (FSDP2). Without Ray they are on this machine, and the native engine samples in
    all of them."""
    offload: Annotated[Literal["none", "cpu"], _ONE_PROCESS, _NOTHING_TO_OFFLOAD] = "none"
    """`cpu`: between computations each GPU's share of weights, gradients and moments is in the
    machine's memory, where the optimizer steps."""
    ray: str | None = None
    """Have Ray place and watch the processes of stages of kind rl: the address of a Ray cluster
    (`auto`, or HOST:PORT), or `local` to start Ray on this machine
    ([how to](howto/ray.md))."""
    rollout_workers: Annotated[int, Field(ge=1, le=1024), _NO_RAY] = 1
    """Processes that sample, each with the whole model and an engine of its own."""
    reward_workers: Annotated[int, Field(ge=0, le=1024), _NO_RAY] = 0
    """Processes that rewards run in: the first reward in the first, and so on; 0: in the process
    that runs the loop, where judges and tasks' own verdicts always are."""
    cpus: Annotated[float, Field(gt=0, le=1024), _NO_RAY] = 1.0
    """CPUs that Ray reserves for each process; it has as many threads."""
    gpus: Annotated[float, Field(ge=0, le=16), _NO_RAY] = 0.0
    """GPUs that Ray reserves for each process that trains or samples."""
    reward_gpus: Annotated[float, Field(ge=0, le=16), _NO_RAY] = 0.0
    """GPUs that Ray reserves for each reward worker."""
    deadline: Annotated[Seconds, _ALONE] = 1800.0
    """Seconds in which a process has to answer a call. A rollout or reward worker that does not is
    replaced and its work done again; a trainer or rank that does not is lost."""
    restarts: Annotated[int, Field(ge=0, le=1000), _NO_RAY] = 3
    """How often in a row the run goes on from one checkpoint after a trainer was lost."""
