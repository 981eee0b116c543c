"""Rollouts: refills, what rewards record, what stands in no batch, and what a tool wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from keel.algorithms.advantages import GAE
from keel.algorithms.group_advantages import GroupRelative
from keel.algorithms.losses import ValueLoss
from keel.algorithms.ratios import Weights
from keel.algorithms.spec import Algorithm
from keel.algorithms.surrogates import Clip
from keel.algorithms.turn_advantages import RoleRelative
from keel.config.model import BuildModel, Model
from keel.config.sources import Rollout
from keel.data.mixture import PromptStream
from keel.data.tasks import BaseTask
from keel.learn.advantages import estimate, outcome
from keel.learn.batch import from_groups
from keel.learn.loss import loss, prepare
from keel.models.chat import Encoder
from keel.models.policy import Policy, load_policy
from keel.rewards.scorer import Scorer
from keel.runs.reader import load
from keel.training.rollout import Sampler, collect
from keel.types import Completion, KeelError, Prompt, Split
from tests.engines.scripted import ScriptedEngine
from tests.training import rewards
from tests.training.small import metrics, run

HERE = "tests.training.rewards"


def function(name: str) -> str:
    return f"rewards.functions=[{{function='{HERE}:{name}'}}]"


def test_refills_keep_variance_and_extras_of_their_completions(tmp_path: Path) -> None:
    """The reward records each completion's length, but not in every round of sampling."""
    words = (function("records_now_and_then"), "rollout.dynamic_sampling=true", "steps=3")
    folder = run(tmp_path / "run", *words)
    printed = []
    for step in (1, 2, 3):
        by_group: dict[int, set[float]] = {}
        for row in load(folder.path).rollouts(step):
            by_group.setdefault(row["group"], set()).add(row["reward"])
            printed += [row] if row.get("extra/tokens") is not None else []
        assert all(len(rewards) > 1 for rewards in by_group.values())
    assert printed
    assert all(row["extra/tokens"] == len(row["tokens"]) for row in printed)
    assert any(row["rollout/refills"] > 0 for row in metrics(folder))


def test_step_without_rewards_is_skipped_with_a_note(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", function("never"), "steps=2")
    assert [row["step/tokens"] for row in metrics(folder)] == [0.0, 0.0]
    notes = [e["text"] for e in load(folder.path).events() if e["event"] == "note"]
    assert len(notes) == 2
    assert "nothing" not in notes[0]
    assert "no group had anything to learn from" in notes[0]


def test_reference_is_reset_after_a_step_without_groups(tmp_path: Path) -> None:
    reward = "rewards.functions=[{function='tests.training.rewards:only_at_first'}]"
    keys = (
        "algorithm.divergence.beta=0.1",
        "reference.reset_every=2",
        "optimizer.learning_rate=0.01",
    )
    folder = run(tmp_path / "run", "steps=3", "evaluation.prompts=0", reward, *keys)
    first, second, third = metrics(folder)
    assert "kl" not in second  # nothing was trained on
    assert (first["kl"], third["kl"]) == (0.0, 0.0)


def test_evaluation_and_rollouts_call_async_rewards_in_one_event_loop(tmp_path: Path) -> None:
    rewards.LOOPS.clear()
    reward = "rewards.functions=[{function='tests.training.rewards:in_a_loop'}]"
    run(tmp_path / "run", "steps=2", "evaluation.prompts=4", reward)
    assert len(rewards.LOOPS) == 4  # two steps, two evaluations
    assert len(set(map(id, rewards.LOOPS))) == 1


def test_rewards_of_a_run_get_texts_before_the_stop_string(tmp_path: Path) -> None:
    rewards.TEXTS.clear()
    words = (function("remembers"), 'rollout.stop=["1", "2", "3"]', "rollout.max_tokens=8")
    folder = run(tmp_path / "run", "steps=2", "evaluation.prompts=4", *words)
    assert len(rewards.TEXTS) == 2 * 4 * 4 + 2 * 4
    assert not [text for text in rewards.TEXTS if set(text) & set("123")]
    rows = load(folder.path).rollouts(1)
    ended = [row for row in rows if row["finish"] == "stop"]
    assert ended
    assert all(row["completion"][-1] in "123" for row in ended)


def test_mask_truncated_gives_zero_advantages(tmp_path: Path) -> None:
    words = ("rewards.functions=[{function='place_match'}]", "rollout.mask_truncated=true")
    folder = run(tmp_path / "run", *words, "steps=1")
    rows = load(folder.path).rollouts(1)
    cut = [row for row in rows if row["finish"] == "length"]
    assert 0 < len(cut) < len(rows)
    assert all(set(row["advantages"]) == {0.0} for row in cut)
    assert any(set(row["advantages"]) != {0.0} for row in rows if row["finish"] != "length")


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
    judged = outcome(rollouts.groups, rollouts.results, None)
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


def test_role_needs_its_column(policy: Policy) -> None:
    chosen = Algorithm(
        advantage=RoleRelative(role="answer"), ratio="token", surrogate=Clip(), weights=Weights()
    )
    assert collect(sampler(policy, turns=1), chosen, step=1).roles == ("12",)
    other = chosen.model_copy(update={"advantage": RoleRelative(role="side")})
    with pytest.raises(KeelError, match=r"algorithm\.advantage\.role: .* no column 'side'"):
        collect(sampler(policy, turns=1), other, step=1)
