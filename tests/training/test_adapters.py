"""LoRA runs: checkpoints hold the adapter alone, exports the merged model or the adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from keel.cli.main import main
from keel.config.load import load_recipe
from keel.config.model import Model
from keel.models.policy import load_policy
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training.evaluation import evaluate
from keel.training.export import _texts, export
from keel.training.run import train
from keel.types import KeelError
from tests.training.judged import MODEL
from tests.training.small import small

SAME = 1e-5
"""W + BA in one matrix against W and BA apart, in float32."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    load_policy(Model.model_validate(MODEL), 0).save(folder)
    return folder


def _stage(**keys: Any) -> dict[str, Any]:
    return {
        "steps": 4,
        "tasks": [{"name": "sort_digits", "options": {"min_digits": 1, "max_digits": 2}}],
        "optimizer": {"learning_rate": 5e-3},
        "checkpoints": {"every": 2},
        **keys,
    }


def _run(base: Path, folder: Path) -> RunFolder:
    imitate = _stage(stage="sft", steps=60, batch_size=32)
    learn = _stage(
        stage="rl",
        rollout={"prompts_per_step": 4, "group_size": 4, "max_tokens": 6},
        evaluation={"prompts": 20},
        optimizer={"learning_rate": 1e-3},
    )
    model = {"name": str(base), "lora": {"rank": 4}}
    made = {"seed": 3, "threads": 1, "model": model, "stages": [imitate, learn]}
    return train(load_recipe(made), folder)


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return _run(base, tmp_path_factory.mktemp("lora") / "run")


def _end(run: RunFolder) -> Path:
    return load(run.path).checkpoints()[-1].path


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([[2, 5, 11, 7, 3]])).logits
    return found


def test_checkpoint_holds_only_the_adapter(base: Path, run: RunFolder) -> None:
    policy = _end(run) / "policy"
    assert (policy / "adapter_model.safetensors").is_file()
    assert not list(policy.glob("model*.safetensors"))
    recorded = json.loads((policy / "base.json").read_text())
    assert recorded["base"] == str(base)
    assert len(recorded["fingerprint"]) == 64


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft's own
def test_peft_with_the_adapter_equals_the_merged_export(
    base: Path, run: RunFolder, tmp_path: Path
) -> None:
    assert main(["export", str(run.path), str(tmp_path / "merged")]) == 0
    assert main(["export", str(run.path), str(tmp_path / "adapter"), "--adapter"]) == 0
    merged = _logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    bare = AutoModelForCausalLM.from_pretrained(base)
    without = _logits(bare)
    assert (merged - without).abs().max() > 1e-2
    for folder in (tmp_path / "adapter", _end(run) / "policy"):
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder))
        torch.testing.assert_close(_logits(loaded.eval()), merged, rtol=0, atol=SAME)
    text = "1 2>21"
    ids = [AutoTokenizer.from_pretrained(f)(text)["input_ids"] for f in (base, tmp_path / "merged")]
    assert ids[0] == ids[1]


def test_eval_of_run_and_export_equals_the_evaluation_of_the_run(
    run: RunFolder, tmp_path: Path
) -> None:
    after = load(run.path).info()["evaluation"]["rl"]["after"]
    found = evaluate(run.path)
    assert {k: found[k] for k in after if k in found} == {k: after[k] for k in after if k in found}
    assert after.keys() >= {"mean", "n", "mean_length"}
    assert any(example["completion"] for example in found["examples"])
    exported = export(run.path, tmp_path / "merged")
    keys = ("options.min_digits=1", "options.max_digits=2")
    again = evaluate(exported, task="sort_digits", task_keys=keys, max_tokens=6, prompts=20, seed=3)
    assert again["examples"] == found["examples"]


def test_missing_or_changed_base_is_refused(base: Path, tmp_path: Path) -> None:
    own = tmp_path / "base"
    shutil.copytree(base, own)
    run = _run_brief(own, tmp_path / "run")
    file = own / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] += 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    for action in (
        lambda: evaluate(run.path),
        lambda: export(run.path, tmp_path / "out"),
        lambda: train(None, run.path, resume=True),
    ):
        with pytest.raises(KeelError, match="has other weights than those that the adapter"):
            action()
    assert not (tmp_path / "out").exists()
    shutil.rmtree(own)
    with pytest.raises(KeelError, match=r"holds an adapter, and its base .* does not load"):
        evaluate(run.path)
    # The adapter alone needs no base.
    export(run.path, tmp_path / "adapter", adapter=True)


def _run_brief(base: Path, folder: Path) -> RunFolder:
    stage = _stage(stage="sft", steps=2, batch_size=2)
    model = {"name": str(base), "lora": {"rank": 2}}
    return train(load_recipe({"threads": 1, "model": model, "stages": [stage]}), folder)


@pytest.mark.parametrize("adapter", [False, True])
def test_export_keeps_other_files(adapter: bool, run: RunFolder, tmp_path: Path) -> None:
    """It works in a temporary folder of its own, and removes that one alone."""
    mine = tmp_path / ".out.tmp" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("not an export's")
    export(run.path, tmp_path / "out", adapter=adapter)
    assert mine.read_text() == "not an export's"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp", "out"]
    with pytest.raises(KeelError, match="has no checkpoint 'none'"):
        export(run.path, tmp_path / "other", checkpoint="none", adapter=adapter)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.tmp", "out"]


def test_export_with_damaged_rollouts(run: RunFolder, tmp_path: Path) -> None:
    copy = shutil.copytree(run.path, tmp_path / "run")
    for path in sorted((copy / "rollouts").iterdir())[-1:]:
        path.write_bytes(b"")
    assert _texts(RunFolder.open(copy))  # of the step before
    assert (export(copy, tmp_path / "out") / "config.json").is_file()


def test_adapter_export_of_a_run_without_lora_is_refused(tmp_path: Path) -> None:
    stage = _stage(stage="sft", steps=1, batch_size=2)
    run = train(load_recipe({"threads": 1, "model": MODEL, "stages": [stage]}), tmp_path / "run")
    with pytest.raises(KeelError, match="has no adapter: drop --adapter"):
        export(run.path, tmp_path / "out", adapter=True)


def test_export_that_autotokenizer_reads_differently_is_refused(tmp_path: Path) -> None:
    """As of a run whose Qwen2 folder was read by its own tokenizer.json."""
    from tests.models.test_loading import BYTES

    stage = _stage(stage="sft", steps=1, batch_size=2)
    build = {**MODEL["build"], "family": "qwen2", "tokenizer": "bytes"}
    made = {"threads": 1, "model": {"build": build}, "stages": [stage]}
    run = train(load_recipe(made), tmp_path / "run")
    export(run.path, tmp_path / "fine")
    policy = _end(run) / "policy"
    BYTES.save_pretrained(policy)
    manifest = policy.parent / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": {}}))
    with pytest.raises(KeelError, match="makes other tokens once it is saved and loaded by Auto"):
        export(run.path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_dropout_leaves_the_ratio_of_single_updates_at_one(tmp_path: Path) -> None:
    ratios = {}
    for epochs in (1, 2):
        keys = ("model.lora.rank=4", "model.lora.dropout=0.5", "optimizer.learning_rate=1e-2")
        recipe = small(*keys, f"epochs={epochs}", "model.lora.alpha=64.0")
        run = load(train(recipe, tmp_path / str(epochs)).path)
        ratios[epochs] = run.column("ratio/mean", stage="rl")[1]
        gap = run.column("sampling/sampling_logp_difference/max", stage="rl")[1]
        assert gap.max() < 1e-4, "the old log-probs are computed without dropout"
    assert abs(ratios[1] - 1).max() < 1e-6, "but for the rounding of the mean"
    assert abs(ratios[2] - 1).max() > 1e-3


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (("cluster.processes=2",), r"model.lora.dora does not go with cluster.processes > 1"),
        (("cluster.ray=local",), r"model.lora.dora does not go with .* cluster.ray"),
        (("rollout.engine=vllm",), r"model.lora.dora does not go with rl.rollout.engine"),
        (("model.compile=true",), r"model.lora.dora does not go with model.compile = true"),
    ],
)
def test_untested_pairs_are_refused(keys: tuple[str, ...], reason: str) -> None:
    with pytest.raises(KeelError, match=reason):
        small("model.lora.dora=true", *keys)
