"""Where a stage computes: in this process, in ranks on this machine, or where Ray puts it."""

from __future__ import annotations

from dataclasses import replace

from keel.config.cluster import Cluster
from keel.types import Capabilities


def offers(cluster: Cluster, engine: Capabilities) -> Capabilities:
    """What the processes of a stage can do together, each with an engine of these capabilities."""
    if cluster.ray is not None:
        return replace(engine, streams=True, pins=True, concurrent=True)
    if cluster.processes > 1 and engine.in_process:
        return replace(engine, pins=False, concurrent=False)
    return engine
