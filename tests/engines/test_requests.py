"""What a recipe asks of its engine, against what engine and processes can do together."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.cluster.placement import placement_of
from keel.config.load import load_recipe
from keel.engines.registry import capabilities_of, unmet_requests
from keel.preflight.check import check
from keel.training.run import train
from keel.types import KeelError

CORRECTED = "algorithm.correction.kind=truncate"
RAY = ("cluster.ray=local", CORRECTED)
SEVERAL = "cluster.processes=2"
CASES = [
    ((), ()),
    (("rollout.overlap_rewards=true",), ()),
    (("rollout.overlap_rewards=true", SEVERAL), ()),
    (("rollout.async_level=1", CORRECTED), ()),
    (("rollout.async_level=1", CORRECTED, SEVERAL), ("rollout.async_level",)),
    (("rollout.async_level=1", CORRECTED, SEVERAL, "rollout.engine=vllm"), ()),
    (("rollout.async_level=2", CORRECTED), ("rollout.async_level",)),
    (("rollout.async_level=2", CORRECTED, "rollout.engine=vllm"), ("rollout.async_level",)),
    (("rollout.async_level=2", *RAY), ()),
    (("rollout.engine=vllm",), ("rollout.engine",)),
    (("rollout.engine=vllm", CORRECTED), ()),
]


@pytest.mark.parametrize(("keys", "unmet"), CASES)
def test_requests_that_engine_and_processes_cannot_serve(
    keys: tuple[str, ...], unmet: tuple[str, ...]
) -> None:
    recipe = load_recipe("tiny", keys)
    sampling = recipe.stages[0].sampling
    assert sampling is not None
    offered = placement_of(recipe.cluster).offers(capabilities_of(sampling.rollout.engine))
    assert tuple(one.key for one in unmet_requests(sampling, offered)) == unmet


def test_unmet_request_is_a_finding_and_stops_the_run(tmp_path: Path) -> None:
    keys = ["rollout.async_level=2", CORRECTED]
    found = [one for one in check("tiny", keys, runs=False).findings if one.severity == "error"]
    assert [(one.kind, one.key) for one in found] == [("engine-cannot", "rollout.async_level")]
    with pytest.raises(KeelError, match=r"stage 'rl': rollout\.async_level = 2 needs an engine"):
        train(load_recipe("tiny", keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()
