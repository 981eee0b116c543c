"""The trained model of these tests, and texts for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.real_model import FOLDER
from keel.config.model import Model

QUESTIONS = (
    "What is the capital of France?",
    "What is 17 + 25? Answer with the number only.",
    "Write one sentence about the sea.",
    "Name three colours.",
    "A box holds 12 eggs. How many eggs are in 4 boxes?",
    "Translate to French: good morning.",
    "Is a whale a fish?",
    "Give a synonym of 'quick'.",
    "What comes after Monday?",
    "Complete the sentence: The cat sat on the",
)
STORY = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in "
    "May. In May she sold 48 / 2 = 24 clips. In both months she sold 48 + 24 = 72 clips."
)


def model_name() -> str:
    """The folder of the model. Skips without it."""
    if not FOLDER.is_dir():
        pytest.skip("the trained model is not there: make real-model")
    return str(FOLDER)


def spec(**keys: object) -> Model:
    """A recipe's model."""
    return Model(name=model_name(), device="cpu", **keys)  # type: ignore[arg-type]


def stock(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers loads it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model_name(), dtype=dtype)
    return model.eval()


@torch.no_grad()
def stock_log_probs(model: PreTrainedModel, tokens: Tensor, prompt: int) -> Tensor:
    """log π of each token after the first `prompt`, from all logits at once."""
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    log_p = logits.log_softmax(-1)[prompt - 1 : -1]
    return log_p.gather(1, tokens[prompt:, None])[:, 0]
