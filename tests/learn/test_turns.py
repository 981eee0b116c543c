"""Turns, their anchor states and roles on the way to advantages; the state between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from keel.algorithms.advantages import CustomAdvantage
from keel.algorithms.presets import PRESETS
from keel.algorithms.spec import Algorithm
from keel.algorithms.turn_advantages import GroupInGroup, RoleRelative
from keel.engines.turns import generate_multi_turn
from keel.learn.advantages import RolloutRewards, estimate, outcome
from keel.learn.batch import from_groups
from keel.models.build import byte_tokenizer
from keel.models.chat import ChatEncoder
from keel.types import Completion, Group, KeelError, Prompt, RewardResult, Sampling, Step
from studies.corridor import Corridor
from tests.engines.scripted import ScriptedEngine
from tests.learn.flat import answer, blank

OF_TURNS = ("gigpo", "mt_grpo", "turn_ppo", "rae")


def algorithm(name: str, **changes: object) -> Algorithm:
    return PRESETS[name].algorithm.model_copy(update={"divergence": None, **changes})


def talk(*turns: tuple[int, Sequence[int]], states: tuple[tuple[int, str], ...] = ()) -> Completion:
    """Turns of so many tokens of the policy's, each after an observation of these tokens."""
    tokens, written = [], []
    for count, observed in turns:
        tokens += [*observed, *[9] * count]
        written += [*[False] * len(observed), *[True] * count]
    return replace(answer(tokens, written), states=states)


def anchors(*groups: Sequence[Completion]) -> list[list[int]]:
    """Those of the tokens of each completion."""
    made = [Group(Prompt("p", "p", tokens=(7,)), tuple(group)) for group in groups]
    batch = from_groups(made)
    assert batch.anchor_N is not None
    return [part.tolist() for part in batch.anchor_N.split(batch.lengths)]


# ---------------------------------------------------------------- anchors


def test_turns_after_the_same_observation_share_an_anchor() -> None:
    first, second = talk((2, ()), (1, (3, 4)), (2, (5,))), talk((1, ()), (1, (5,)), (1, (3, 4)))
    [[start, _, after_34, after_5, _], other] = anchors([first, second])
    assert len({start, after_34, after_5}) == 3
    assert other == [start, after_5, after_34]


def test_groups_and_cut_observations_share_no_anchor() -> None:
    found = anchors([talk((1, ()), (1, (3, 4)))], [talk((1, ()), (1, (3, 4))), talk((1, ()))])
    assert found == [[0, 1], [2, 3], [2]]
    assert anchors([talk((1, ()), (1, (3, 4))), talk((1, ()), (1, (3,)))]) == [[0, 1], [0, 2]]


def test_named_state_counts_before_the_observation() -> None:
    one = talk((1, ()), (1, (3,)), (1, (4,)), states=((2, "room"), (4, "hall")))
    two = talk((1, ()), (1, (5,)), (1, (4,)), states=((2, "room"),))
    assert anchors([one, two]) == [[0, 1, 2], [0, 1, 3]]


def test_empty_completions_and_context_before_the_first_turn_have_anchors() -> None:
    found = anchors([talk((0, (3,))), talk((2, (3,))), talk((1, ())), talk((1, (3,)))])
    assert found == [[], [0, 0], [1], [0]]


def test_reply_names_the_state_of_a_real_environment() -> None:
    """Walks of a corridor, of which several turns begin in the same room."""
    walks = ["++", "+-++", "----", "-+++"]
    tokenizer, task = byte_tokenizer(64), Corridor()

    def script(prompt: Prompt, index: int) -> str:
        *_, walk, turn = prompt.id.split("/")
        return walks[index][0] if prompt.id.count("/") == 2 else walks[int(walk)][int(turn)]

    asked = task.prompt("train", 2)
    assert asked.content == "5"
    asked = replace(asked, tokens=tuple(tokenizer.encode("5")))
    groups = generate_multi_turn(
        ScriptedEngine(script, tokenizer), [asked], 4, Sampling(60), 0,
        tasks={task.name: task}, chat=ChatEncoder(tokenizer), max_turns=4,
    )  # fmt: skip
    completions = groups[0].completions
    assert [[name for _, name in c.states] for c in completions] == [
        ["room 4"], ["room 4", "room 3", "room 4"],
        ["room 2", "room 1", "room 0"], ["room 2", "room 3", "room 4"],
    ]  # fmt: skip
    results = [[RewardResult(task.score(asked, one)) for one in completions]]
    assert [result.reward for result in results[0]] == [1.0, 1.0, 0.0, 1.0]
    batch = from_groups(groups)
    chosen = algorithm("gigpo", advantage=GroupInGroup(gamma=0.5, scale="none", omega=2.0))
    found_N = estimate(chosen, batch, outcome(groups, results, None)).advantage_N
    turns = [  # state and discounted return
        [("", 0.5), ("4", 1.0)],
        [("", 0.125), ("4", 0.25), ("3", 0.5), ("4", 1.0)],
        [("", 0.0), ("2", 0.0), ("1", 0.0), ("0", 0.0)],
        [("", 0.125), ("2", 0.25), ("3", 0.5), ("4", 1.0)],
    ]
    states: dict[str, list[float]] = {}
    for walk in turns:
        for state, value in walk:
            states.setdefault(state, []).append(value)
    for walk, reward, part_N in zip(
        turns, (1.0, 1.0, 0.0, 1.0), found_N.split(batch.lengths), strict=True
    ):
        expected = [reward - 0.75 + 2.0 * (v - np.mean(states[s])) for s, v in walk]
        assert part_N.tolist() == pytest.approx(
            np.repeat(expected, 2).tolist()
        )  # each with its end


# ---------------------------------------------------------------- the whole batch


def talks(seed: int, steps: bool = False) -> tuple[list[Group], list[list[RewardResult]]]:
    """Ragged conversations with few observations, one reward missing; `steps` of some turns."""
    rng = np.random.default_rng(seed)
    groups, results = [], []
    for at in range(3):
        made = []
        for _ in range(4):
            turns = [(int(rng.integers(1, 4)), (int(rng.integers(3, 5)),) * bool(k))
                     for k in range(rng.integers(1, 4))]  # fmt: skip
            made.append(talk(*turns))
        prompt = Prompt(str(at), "p", {}, "game", tokens=(7,))
        groups.append(Group(prompt, tuple(made)))
        own = []
        for one in made:
            value = float(rng.normal())
            step = Step(int(one.written.nonzero()[0][0]), float(rng.normal()))
            whole = RewardResult(value + step.reward, {}, (step,), outcome=value)
            own.append(whole if steps else RewardResult(value))
        results.append(own)
    results[1][2] = RewardResult(None)
    return groups, results


def estimated(chosen: Algorithm, groups: list[Group], results: Any, **more: Any) -> list[Tensor]:
    """The advantages of each completion."""
    batch = from_groups(groups)
    value_N = torch.cat([torch.linspace(0, 1, n).double() for n in batch.lengths])
    batch = replace(batch, value_N=value_N if chosen.needs_value else None)
    judged = outcome(groups, results, None)
    return list(estimate(chosen, batch, judged, **more).advantage_N.split(batch.lengths))


@pytest.mark.parametrize("name", OF_TURNS)
def test_order_of_the_batch_changes_no_advantage(name: str) -> None:
    """Of the groups, and of the completions within them: no number depends on a place."""
    chosen = algorithm(name)
    groups, results = talks(1, steps=chosen.reads_steps)
    plain = estimated(chosen, groups, results)
    order, inner = [2, 0, 1], [3, 1, 0, 2]
    turned = [replace(groups[g], completions=tuple(groups[g].completions[i] for i in inner))
              for g in order]  # fmt: skip
    found = estimated(chosen, turned, [[results[g][i] for i in inner] for g in order])
    expected = [plain[4 * g + i] for g in order for i in inner]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, equal_nan=True)
    assert len({round(float(x), 9) for part in plain for x in part if not x.isnan()}) > 6


def test_select_keeps_anchors_with_their_tokens() -> None:
    batch = from_groups(talks(2)[0])
    assert batch.anchor_N is not None
    parts = batch.anchor_N.split(batch.lengths)
    picked = batch.select([7, 1, 4])
    assert picked.anchor_N is not None
    assert picked.anchor_N.tolist() == torch.cat([parts[i] for i in (7, 1, 4)]).tolist()


# ---------------------------------------------------------------- roles, and a state


def test_role_average_goes_on_from_the_state_before() -> None:
    groups, results = talks(3)
    chosen = algorithm("rae", advantage=RoleRelative(role="player", decay=0.5))
    batch = from_groups(groups)
    judged = outcome(groups, results, None, None, ["a", "b", "a"])
    before = {"a": 0.25, "c": 7.0}
    found = estimate(chosen, batch, judged, state=before)
    of_b = [r.reward for r in results[1] if r.reward is not None]
    of_a = [r.reward for own in (results[0], results[2]) for r in own if r.reward is not None]
    assert found.state == {
        "a": pytest.approx(0.5**8 * 0.25 + (1 - 0.5**8) * np.mean(of_a)),
        "b": pytest.approx((1 - 0.5**3) * np.mean(of_b)),
        "c": 7.0,
    }
    first = float(found.advantage_N[0])
    assert first == pytest.approx(results[0][0].reward - 0.25)  # type: ignore[operator]
    again = estimate(chosen, batch, judged, state=before)
    assert again.state == found.state
    assert before == {"a": 0.25, "c": 7.0}


def test_role_is_the_task_unless_roles_are_given() -> None:
    groups, results = talks(3)
    chosen = algorithm("rae")
    assert set(estimate(chosen, from_groups(groups), outcome(groups, results, None)).state) == {
        "game"
    }
    named = algorithm("rae", advantage=RoleRelative(role="player"))
    batch = blank((2, 1), (0, 0))
    with pytest.raises(ValueError, match="needs roles"):
        estimate(named, batch, [1.0, 0.0])
    assert estimate(chosen, batch, [1.0, 1.0]).state == {"": pytest.approx(1 - 0.95**2)}


def test_advantage_of_turns_needs_anchors() -> None:
    with pytest.raises(ValueError, match="needs anchor_N"):
        estimate(algorithm("gigpo"), blank((2, 1), (0, 0)), [1.0, 0.0])


def above_the_last(reward_S: Tensor, state: dict[str, float]) -> tuple[Tensor, dict[str, float]]:
    return reward_S - state.get("mean", 0.0), {"mean": float(reward_S.mean())}


def forgets(reward_S: Tensor, state: dict[str, float]) -> Tensor:
    return reward_S


def keeps_a_list(reward_S: Tensor, state: dict[str, float]) -> tuple[Tensor, Any]:
    return reward_S, {"seen": ["x"]}


def test_users_advantage_has_a_state() -> None:
    own = CustomAdvantage(function=f"{__name__}:above_the_last")
    chosen, batch = algorithm("grpo", advantage=own), blank((1, 1), (0, 0))
    judged = RolloutRewards(torch.tensor([1.0, 2.0], dtype=torch.float64))
    first = estimate(chosen, batch, judged)
    second = estimate(chosen, batch, judged, state=first.state)
    assert first.advantage_N.tolist() == [1.0, 2.0]
    assert second.advantage_N.tolist() == [-0.5, 0.5]
    assert second.state == {"mean": 1.5}
    for name in ("forgets", "keeps_a_list"):
        wrong = algorithm("grpo", advantage=CustomAdvantage(function=f"{__name__}:{name}"))
        with pytest.raises(KeelError, match=rf"{name} names state: return \(advantage, state"):
            estimate(wrong, batch, judged)
