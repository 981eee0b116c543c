"""What saves memory, in whole runs: resumed to the same bytes, evaluated, exported, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.config.load import load_recipe
from keel.engines.compiled import is_llama_like
from keel.models import lora
from keel.platform.signals import Interrupted
from keel.preflight.check import check
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.export import export
from keel.training.run import train
from keel.training.state import checkpoint_policy
from keel.types import KeelError
from tests.training.small import Stop, notes, small

NF4 = ("model.lora.rank=4", "model.quantisation=nf4", "optimizer.learning_rate=1e-2")
DORA = ("model.lora.rank=4", "model.lora.dora=true", "model.lora.dropout=0.2", "epochs=2")
WAYS = {
    "adamw_8bit": ("optimizer.kind=adamw_8bit",),
    "muon": ("optimizer.kind=muon",),
    "offload": ("optimizer.offload=cpu",),
    "nf4": (*NF4, "model.activation_checkpointing=1"),
    "adapter": (*DORA, "model.lora.modules_to_save=['embed_tokens', 'lm_head']"),
    "nf4-dora": (*NF4, *DORA, "model.activation_checkpointing=1"),
}
LEARNED = ("optimizer.safetensors", "trainable.safetensors")


def _last(run: RunFolder) -> Path:
    return load(run.path).checkpoints()[-1].path


@pytest.mark.parametrize("way", list(WAYS))
def test_resumed_run_ends_with_the_same_bytes(way: str, tmp_path: Path) -> None:
    recipe = small(*WAYS[way])
    whole = train(recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(recipe, tmp_path / "cut", callbacks=[Stop(2)])
    torch.rand(1)  # torch's random state is no part of a run
    cut = train(None, tmp_path / "cut", resume=True)
    for name in LEARNED:
        assert (_last(whole) / name).read_bytes() == (_last(cut) / name).read_bytes()
    assert whole.metrics.read_bytes() == cut.metrics.read_bytes()


def test_offloaded_run_equals_a_plain_one(tmp_path: Path) -> None:
    plain = train(small(), tmp_path / "plain")
    moved = train(small("optimizer.offload=cpu"), tmp_path / "moved")
    assert plain.metrics.read_bytes() == moved.metrics.read_bytes()
    for name in LEARNED:
        assert (_last(plain) / name).read_bytes() == (_last(moved) / name).read_bytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return train(small(*NF4), tmp_path_factory.mktemp("nf4") / "run")


def test_run_on_four_bits_reports_what_they_change(run: RunFolder) -> None:
    (line,) = (text for text in notes(run) if "in 4 bits" in text)
    assert "log-probabilities differ from the original weights' by 0.0" in line
    checkpoint = _last(run)
    assert not list((checkpoint / "policy").glob("model*.safetensors"))
    figures = check("tiny", list(NF4), runs=False).stages[0].figures
    assert figures["quantisation"] == line


def test_engine_samples_from_the_weights_in_four_bits(run: RunFolder) -> None:
    """The compiled runner dequantises and adds the adapter; the trainer computes both apart."""
    rows = load(run.path).metrics()
    assert len(rows) == 4
    # In float32 the two differ by rounding; the original weights differ by a hundredth.
    assert all(abs(row["sampling/sampling_logp_difference/max"]) < 1e-5 for row in rows)
    assert any(abs(row["grad_norm"]) > 0 for row in rows)
    policy = checkpoint_policy(
        load_recipe(run.recipe).model, load_recipe(run.recipe).seed, _last(run)
    )
    assert is_llama_like(policy.model.base_model)


def test_export_adds_the_adapter_to_the_original_weights(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = export(run.path, tmp_path / "out")
    assert "added to the original weights" in capsys.readouterr().err
    plain = AutoModelForCausalLM.from_pretrained(folder)
    recipe = load_recipe(run.recipe)
    original = recipe.model.model_copy(update={"quantisation": None})
    policy = checkpoint_policy(original, recipe.seed, _last(run))
    wanted = lora.plain_weights(policy.model)
    own = plain.state_dict()
    assert all(torch.equal(wanted[name], own[name]) for name in wanted)
    adapted = checkpoint_policy(recipe.model, recipe.seed, _last(run))
    names = [n for n, t in lora.plain_weights(adapted.model).items() if not torch.equal(t, own[n])]
    assert names
    assert all("_proj" in name for name in names)
    assert evaluate(run.path, prompts=4)["n"] == 4


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("optimizer.kind=muon",), "optimizer.kind = 'muon' does not go with cluster.processes"),
        (("optimizer.offload=cpu",), "set cluster.offload instead"),
        (NF4, r"model\.quantisation does not go with cluster\.processes"),
    ],
)
def test_several_processes_are_refused(keys: tuple[str, ...], why: str) -> None:
    with pytest.raises(KeelError, match=why):
        small(*keys, "cluster.processes=2")


def test_another_optimizer_keeps_its_learning_rate() -> None:
    """Another `kind` replaces the tables of terms, whose kinds have other keys."""
    for key in ("optimizer", "stages.0.optimizer"):
        (stage,) = load_recipe("tiny", [f"{key}.kind=muon"]).stages
        assert (stage.optimizer.kind, stage.optimizer.learning_rate) == ("muon", 3e-4)
