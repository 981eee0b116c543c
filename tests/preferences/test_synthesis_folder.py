"""Completions by the native engine from a model folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keel.config.model import BuildModel
from keel.engines.native import NativeEngine
from keel.models.build import build_model, build_tokenizer
from keel.preferences.records import PromptRecord
from keel.preferences.statistics import cost_items
from keel.preferences.store import PreferenceStore
from keel.preferences.synthesis import synthesize
from keel.preferences.synthesis_options import ModelFolder, SynthesisOptions
from keel.types import KeelError, Sampling
from tests.preferences.synthesis_made import options, prompts, server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A llama of one layer and random weights, saved as any model is."""
    import torch

    path = tmp_path_factory.mktemp("models") / "small"
    spec = BuildModel(
        family="llama", tokenizer="bytes", hidden_size=32, layers=1, heads=2, context=256
    )
    build_model(spec, 0, torch.float32).save_pretrained(path)
    tokenizer = build_tokenizer(spec)
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }}{% endfor %}"
    tokenizer.save_pretrained(path)
    return str(path)


def chosen(folder: str, **changes: Any) -> SynthesisOptions:
    given: dict[str, Any] = {
        "models": (ModelFolder(folder, device="cpu", max_num_seqs=4),),
        "samples": 2,
        "pairs": 1,
        "sampling": Sampling(max_tokens=12),
        **changes,
    }
    return SynthesisOptions(**given)


def texts(store: PreferenceStore) -> dict[tuple[str, int], str]:
    return {(one.prompt, one.columns["sample"]): one.text for one in store.completions()}


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[PreferenceStore]]:
    opened = [PreferenceStore(tmp_path / f"{name}.db", create=True) for name in "ab"]
    yield opened
    for store in opened:
        store.close()


def test_completions_of_a_folder(folder: str, stores: list[PreferenceStore]) -> None:
    lines: list[str] = []
    store = stores[0]
    report = synthesize(store, chosen(folder), prompts(5), note=lines.append)
    assert report.added == {"completions": 10, "pairs": 5, "labels": 0}
    for one in store.completions():
        assert one.model == folder
        assert one.tokens is not None
        assert 1 <= one.tokens <= 12
        assert one.seconds is not None
        assert one.seconds > 0
        assert one.cost is None
        assert one.columns["finish"] in ("length", "eos")
    (cost,) = [item for item in cost_items(store) if not item.forecast]
    assert (cost.kind, cost.items, cost.dollars) == ("gpu", 10, None)
    assert cost.hours == pytest.approx(sum(c.seconds or 0 for c in store.completions()) / 3600)
    assert report.forecast is not None
    assert report.forecast.totals["machine_hours"].mean > 0
    assert any("of this machine" in line for line in lines)
    assert synthesize(store, chosen(folder), prompts(5)).added["completions"] == 0


def test_a_resumed_run_samples_the_same_completions(
    folder: str, stores: list[PreferenceStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was in the same call: an engine that fails on its second call, then one that works;
    more samples keep the first."""
    whole, ended = stores
    synthesize(whole, chosen(folder, samples=3), prompts(5))
    sample, calls = NativeEngine.sample, []

    def failing(self: NativeEngine, *arguments: Any, **keywords: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeelError("enough")
        return sample(self, *arguments, **keywords)

    with monkeypatch.context() as patched:
        patched.setattr(NativeEngine, "sample", failing)
        with pytest.raises(KeelError, match="enough"):
            synthesize(ended, chosen(folder), prompts(5))
    assert 0 < len(texts(ended)) < 10
    synthesize(ended, chosen(folder), prompts(5))
    assert len(texts(ended)) == 10
    assert texts(ended).items() < texts(whole).items()
    report = synthesize(ended, chosen(folder, samples=3), prompts(5))
    assert report.added["completions"] == 5
    assert texts(ended) == texts(whole)


def test_a_judge_compares_a_folders_completions(folder: str, stores: list[PreferenceStore]) -> None:
    with server() as found:
        served = options(found.url)
        both = chosen(folder, models=(*chosen(folder).models, *served.models), judge=served.judge)
        report = synthesize(stores[0], replace(both, pairs=4), prompts(3))
        assert len(found.log) == 3 * 2 + 3 * 4 * 2
    assert {row["model"] for row in report.audit[0]["models"]} == {folder, served.models[0].model}


def test_prompts_that_are_too_long_are_left_out(folder: str, stores: list[PreferenceStore]) -> None:
    given = [PromptRecord("short"), PromptRecord("long " * 60)]
    report = synthesize(stores[0], chosen(folder), given)
    assert (report.added["completions"], report.too_long) == (2, 1)
    assert report.left["completions"] == 2


def test_a_missing_model_is_found_before_anything_is_paid(
    tmp_path: Path, stores: list[PreferenceStore]
) -> None:
    with server() as found:
        served = options(found.url)
        wrong = ModelFolder(str(tmp_path / "none"))
        with pytest.raises(KeelError, match="none"):
            synthesize(stores[0], replace(served, models=(*served.models, wrong)), prompts(2))
        assert found.log == []
