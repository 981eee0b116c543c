"""What `keel serve` and `keel chat` load: the run's chat template keywords, no memory to train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keel.runs.layout import RunFolder
from keel.training.export import export
from keel.training.run import train
from keel.types import KeelError
from keel.workflows.serving import served_model
from tests.soak.cases import TURNS, imitated
from tests.training import judged


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Of supervised fine-tuning, with a keyword of the template."""
    folder = tmp_path_factory.mktemp("serving")
    stage = imitated(folder, steps=1, prompts={"chat_template": {"marked": True}})
    template = "{% if marked %}9{% endif %}" + TURNS
    return train(judged.recipe(stage, chat_template=template), folder / "run")


def test_keywords_are_those_of_the_last_stage(run: RunFolder) -> None:
    said = [{"role": "user", "content": "1"}]
    with served_model(run.path) as own, served_model(run.path, template={"marked": False}) as other:
        texts = [
            one.chat.tokenizer.decode(one.chat.prompt(said, "a prompt")) for one in (own, other)
        ]
    assert texts[0] == "9" + texts[1]
    with pytest.raises(KeelError, match="tokenize: not a keyword of the chat template"):
        served_model(run.path, template={"tokenize": True}).__enter__()


def test_a_model_to_talk_to_keeps_no_room_for_an_update(run: RunFolder) -> None:
    with served_model(run.path) as served:
        assert not any(p.requires_grad for p in served.engine.model.parameters())


def test_sampling_is_the_generation_config_s(run: RunFolder, tmp_path: Path) -> None:
    folder = export(run.path, tmp_path / "model")
    config = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(config))
    with served_model(folder, top_p=0.8) as served:
        one = served.sampling
        assert (one.temperature, one.top_p, one.top_k, one.min_p) == (0.7, 0.8, 5, 0.1)
