"""An exported model in plain transformers against the run's own."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from keel.config.load import load_recipe
from keel.models.packed import pack
from keel.models.reward import load_reward_model
from keel.runs.reader import load
from keel.training.export import pick_checkpoint
from keel.training.state import checkpoint_policy
from tests.real.model import QUESTIONS, spec, stock_log_probs


def furthest_log_prob(run: Path, exported: Path) -> float:
    """The largest difference of a log-probability, the policy from the run's last checkpoint."""
    recipe = load_recipe(run / "recipe.toml")
    policy = checkpoint_policy(recipe.model, recipe.seed, pick_checkpoint(load(run).folder))
    tokens = torch.tensor(policy.tokenizer(" ".join(QUESTIONS)).input_ids)
    with torch.no_grad():
        ours = policy.scores(pack([tokens], [torch.arange(1, len(tokens))])).log_prob_N
    plain = AutoModelForCausalLM.from_pretrained(exported).eval()
    return float((stock_log_probs(plain, tokens, 1) - ours).abs().max())


@torch.no_grad()
def furthest_score(run: Path, exported: Path) -> float:
    """The largest difference of a reward model's score, or of a process model's log-odds."""
    stage = load_recipe(run / "recipe.toml").stages[-1].name
    kind = "process" if stage == "process_reward_model" else "outcome"
    ours = load_reward_model(spec().model_copy(update={"name": str(run / "models" / stage)}), kind)
    reader = ours.reader()
    if kind == "outcome":
        answers = [reader.answer(question, "It is 4.", question) for question in QUESTIONS]
        plain = AutoModelForSequenceClassification.from_pretrained(exported).eval()
    else:
        answers = [reader.steps(question, ["2 + 2 = 4.\n", "So 4."], "") for question in QUESTIONS]
        plain = AutoModelForTokenClassification.from_pretrained(exported).eval()
    gaps = []
    for answer, scores in zip(answers, ours.judge(answers, 4096), strict=True):
        logits = plain(input_ids=torch.tensor([answer.tokens])).logits[0]
        at = logits if kind == "outcome" else logits[list(answer.ends)] @ torch.tensor([-1.0, 1.0])
        gaps.append(float((at - torch.tensor(scores)).abs().max()))
    return max(gaps)
