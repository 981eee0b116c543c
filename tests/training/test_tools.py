"""A two-turn tool task through rollout, advantage and loss: tool output is never among the N."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from keel.algorithms.advantages import GAE, GroupRelative
from keel.algorithms.losses import ValueLoss
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip
from keel.config.model import BuildModel, Model
from keel.config.sampling import Rollout
from keel.data.tasks import PromptStream
from keel.data.tasks.base import BaseTask
from keel.learn.advantages import estimate, outcome
from keel.learn.batch import from_groups
from keel.learn.loss import loss, prepare
from keel.models.chat import Encoder
from keel.models.policy import Policy, load_policy
from keel.rewards.scorer import Scorer
from keel.training.rollout import Sampler, collect
from keel.types import Completion, Prompt, Split
from tests.engines.scripted import ScriptedEngine

TOOL = " is 12;"


class Calculator(BaseTask):
    """Asks for a product; when the policy writes a call, the tool answers."""

    name = "calculator"

    def size(self, split: Split) -> int | None:
        return 4

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(f"calculator/{split}/{index}", f"{index}*3?", {"answer": "12"}, self.name)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(completion.text.endswith("so 12"))

    def reply(self, prompt: Prompt, text: str) -> str | None:
        return TOOL if text.endswith("=") else None


@pytest.fixture(scope="module")
def policy() -> Policy:
    build = BuildModel(hidden_size=32, layers=2, heads=2, context=64)
    return load_policy(Model(build=build, dtype="float64"), seed=0)


def sampler(policy: Policy, turns: int) -> Sampler:
    task = Calculator()
    first, second = ["4*3=", "dunno", "4*3=", "4*3="], ["so 12", "so 13", "so 12"]

    def script(prompt: Prompt, index: int) -> str:
        """The second turn sees the tool's words in its prompt."""
        answered = TOOL in policy.tokenizer.decode(list(prompt.tokens))
        return second.pop(0) if answered else first[index]

    engine = ScriptedEngine(script, policy.tokenizer)
    encoder = Encoder(policy.tokenizer)
    stream = PromptStream([task], [1.0], 0, encoder)
    tasks = {task.name: task}
    return Sampler(
        engine=engine,
        chat=encoder.chat,
        tasks=tasks,
        stream=stream,
        scorer=Scorer((), tasks),
        config=Rollout(prompts_per_step=1, group_size=4, max_tokens=40, max_turns=turns),
        seed=0,
    )


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_tool_output_is_context_and_not_trained_on(policy: Policy, advantage: str) -> None:
    if advantage == "group":
        row = Algorithm(
            advantage=GroupRelative(), ratio="token", surrogate=Clip(), weights=Weights()
        )
    else:
        row = Algorithm(
            advantage=GAE(), ratio="token", surrogate=Clip(), weights=Weights(), value=ValueLoss()
        )
    rollouts = collect(sampler(policy, turns=2), row, step=1)
    [group] = rollouts.groups
    texts = [c.text for c in group.completions]
    right, wrong = "4*3=so 12", "4*3=so 13"
    assert texts == [right, "dunno", wrong, right]
    assert [v.reward for v in rollouts.results[0]] == [1.0, 0.0, 0.0, 1.0]
    for completion in (group.completions[0], group.completions[2]):
        tool = completion.tokens[~completion.written]
        assert policy.tokenizer.decode(tool.tolist()) == TOOL
        assert (completion.log_probs[~completion.written] == 0).all()

    batch = from_groups(rollouts.groups)
    written = [int(c.written.sum()) for c in group.completions]
    assert batch.lengths == tuple(written)
    assert batch.target_N.numel() == sum(written) < sum(len(c) for c in group.completions)
    whole = [c.tokens[c.written] for c in group.completions]
    assert batch.tokens_T[batch.target_N].tolist() == np.concatenate(whole).tolist()
    if row.needs_value:
        batch = replace(batch, value_N=torch.linspace(0, 1, batch.target_N.numel()).double())
    judged = outcome(rollouts.groups, rollouts.results, None, torch.float64)
    ready = prepare(row, batch, estimate(row, batch, judged, 0.0), 40)
    assert ready.advantage_N.shape == batch.target_N.shape

    scores = policy.scores(batch.packed)
    if row.needs_value:
        scores = replace(scores, value_N=batch.value_N)
    out = loss(row, ready, scores, 0.0)
    assert out.total.isfinite()
    # The tool's words condition what follows them: with others, the later log-probs change.
    other = batch.tokens_T.clone()
    starts = np.cumsum([0, *batch.input_lengths])
    first = group.completions[0]
    place = int(starts[0]) + len(group.prompt.tokens) + int(np.flatnonzero(~first.written)[1])
    other[place] = (other[place] + 1) % 40
    changed = policy.scores(replace(batch, tokens_T=other).packed).log_prob_N
    after = batch.target_N > place
    own = after & (batch.target_N < int(starts[1]))
    assert (changed[own] != scores.log_prob_N[own]).any()
    assert torch.equal(changed[~own], scores.log_prob_N[~own])


def test_one_turn_calls_no_tool(policy: Policy) -> None:
    row = Algorithm(advantage=GroupRelative(), ratio="token", surrogate=Clip(), weights=Weights())
    rollouts = collect(sampler(policy, turns=1), row, step=1)
    assert all(c.written.all() for c in rollouts.groups[0].completions)
