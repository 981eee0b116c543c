"""On-policy distillation in the loop: what is scored, recorded, saved, refused, and learned."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from keel.analysis.diagnosis.table import diagnose
from keel.models.chat import ChatEncoder, encode_prompt, teacher_groups
from keel.models.policy import Policy, load_policy
from keel.platform.signals import Interrupted
from keel.preflight.check import check
from keel.runs.reader import load
from keel.training.run import train
from keel.types import Group, KeelError, Message, Prompt
from keel.workflows.compare import plan
from tests.learn.flat import answer
from tests.training.small import FAST, Stop, info, metrics, run, save_teacher, small

pytestmark = pytest.mark.slow

OPD = ("algorithm=opd", "steps=2", "evaluation.prompts=4")
DENSE = "rewards.functions=[{function='place_match'}]"
UNSCORED = "tasks=[{name='jsonl', path='%s', validation_fraction=0.3}]"


def unscored(folder: Path) -> str:
    """A task of prompts without answers, which gives no reward."""
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"{number}>"} for number in range(100, 120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return UNSCORED % path


@pytest.mark.parametrize(
    "more", [(), ("rollout.temperature=0.7",), ("rollout.old_log_probs=engine",)]
)
def test_recorded_advantages_are_the_log_ratio_to_the_teacher(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    folder = run(tmp_path / "run", *OPD, DENSE, save_teacher(tmp_path / "teacher"), *more)
    for step, record in enumerate(metrics(folder), 1):
        rows = load(folder.path).rollouts(step)
        old, teacher, found = (
            np.concatenate([row[name] for row in rows])
            for name in ("old_log_probs", "teacher_log_probs", "advantages")
        )
        np.testing.assert_allclose(found, teacher - old, rtol=0, atol=1e-6)  # of float32 records
        assert np.abs(found).max() > 0.01
        assert record["teacher/kl"] == pytest.approx(-float(found.mean()), abs=1e-6)
        assert record["ratio/mean"] == pytest.approx(1, abs=1e-6)
        assert "reward" in record


def test_teacher_scores_at_the_temperature_of_the_samples(tmp_path: Path) -> None:
    """A teacher that is the policy itself gives advantages of exactly 0, and nothing moves."""
    start = load_policy(small().model, small().seed)
    start.save(tmp_path / "teacher")
    more = (f"teacher.name={tmp_path / 'teacher'}", "rollout.temperature=0.7")
    folder = run(tmp_path / "run", *OPD, DENSE, *more)
    for record in metrics(folder):
        assert (record["teacher/kl"], record["loss"], record["grad_norm"]) == (0.0, 0.0, 0.0)
    end = load_file(load(folder.path).checkpoints()[-1].path / "trainable.safetensors")
    assert all((end[name] == weight).all() for name, weight in start.trainable().items())


def log_probs(
    policy: Policy, weights: dict[str, Tensor], begin: list[int], row: dict[str, Any]
) -> list[float]:
    """log π of a recorded completion after a beginning, by transformers alone."""
    model = AutoModelForCausalLM.from_config(policy.model.config, attn_implementation="eager")
    model.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()})
    tokens = torch.tensor([begin + list(row["tokens"])])
    with torch.no_grad():
        log_TV = model(tokens).logits[0, :, : policy.tokens].log_softmax(-1)
    places = range(len(begin) - 1, tokens.shape[1] - 1)
    return [float(log_TV[at, tokens[0, at + 1]]) for at in places]


def test_each_task_has_its_own_teacher(tmp_path: Path) -> None:
    """Scored by transformers alone, whichever teachers a micro-batch has."""
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(40)))
    tasks = f"tasks=[{{name='sort_digits'}}, {{name='jsonl', path='{path}'}}]"
    keys = (*OPD, tasks, "rewards.functions=[]", "model.build.alphabet='0123456789>+='", "steps=1")
    recipe = small(*keys, save_teacher(tmp_path))
    seeds = {"sort_digits": 5, "jsonl:sums": 6}
    first, other = (tmp_path / str(seed) for seed in seeds.values())
    for folder, seed in zip((first, other), seeds.values(), strict=True):
        load_policy(recipe.model, seed).save(folder)
    chosen = f"teacher={{name='{first}', by_task={{task='%s', name='{other}'}}}}"
    folder = run(tmp_path / "run", *keys, chosen % "jsonl:sums", "token_budget=64").path
    rows = load(folder).rollouts(1)
    assert {row["task"] for row in rows} == set(seeds)
    wrong = [*FAST, *keys, chosen % "jsonl:sum"]
    (finding,) = (one for one in check("tiny", wrong).findings if "by_task" in one.key)
    assert "did you mean 'jsonl:sums'?" in finding.what + finding.evidence + finding.fix
    with pytest.raises(KeelError, match="unknown task 'jsonl:sum'"):
        run(tmp_path / "wrong", *keys, chosen % "jsonl:sum")
    for row in rows:
        policy = load_policy(recipe.model, seeds[row["task"]])
        begin = policy.tokenizer(row["prompt"])["input_ids"]
        expected = log_probs(policy, policy.trainable(), begin, row)
        np.testing.assert_allclose(row["teacher_log_probs"], expected, rtol=0, atol=1e-5)


def test_reward_is_not_needed(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher")
    rows = ("rewards.functions=[]", unscored(tmp_path), teacher, "steps=24")
    folder = run(tmp_path / "run", *OPD, *rows)
    records = metrics(folder)
    assert all(record["grad_norm"] > 0 and record["groups/dropped"] == 0 for record in records)
    assert all(record["reward"] is None for record in records)
    assert info(folder)["evaluation"]["rl"]["after"]["mean"] is None
    assert diagnose(load(folder.path)) == ()
    with pytest.raises(KeelError, match="cannot tell what an answer is worth"):
        run(tmp_path / "grpo", "steps=2", *rows[:2])


def test_reward_of_weight_0_is_logged_and_changes_nothing(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher")
    watched = run(
        tmp_path / "a", *OPD, teacher, "rewards.functions=[{function='place_match', weight=0.0}]"
    )
    other = run(tmp_path / "b", *OPD, teacher, "rewards.functions=[]")
    ends = [
        load_file(load(one.path).checkpoints()[-1].path / "trainable.safetensors")
        for one in (watched, other)
    ]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    assert all("rewards/place_match/mean" in record for record in metrics(watched))
    saved = {path.name for path in load(watched.path).checkpoints()[-1].path.glob("*.safetensors")}
    assert saved == {"trainable.safetensors", "optimizer.safetensors"}  # no teacher


def test_prefix_gain_of_zero_is_opd_bitwise(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher")
    names = ("algorithm=opd", "algorithm={preset='iw_opd', distillation={prefix_gain=0.0}}")
    ends = [
        load_file(load(folder.path).checkpoints()[-1].path / "trainable.safetensors")
        for name in (*names, "algorithm=iw_opd")
        for folder in (run(tmp_path / name[-9:-2], *OPD, name, DENSE, teacher),)
    ]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])
    assert any((ends[0][name] != ends[2][name]).any() for name in ends[0])


def test_reward_and_teacher_add_up(tmp_path: Path) -> None:
    """GRPO's advantage, and half the log-ratio to the teacher."""
    both = "algorithm={preset='grpo', distillation={coefficient=0.5}}"
    folder = run(tmp_path / "run", both, "steps=1", DENSE, save_teacher(tmp_path / "teacher"))
    rows = load(folder.path).rollouts(1)
    rewards = np.array([row["reward"] for row in rows]).reshape(4, 4)
    mean, spread = rewards.mean(1, keepdims=True), rewards.std(1, ddof=1, keepdims=True)
    plain = np.where(spread > 0, (rewards - mean) / (spread + 1e-4), 0.0).reshape(-1)
    for row, advantage in zip(rows, plain, strict=True):
        gain = np.array(row["teacher_log_probs"]) - np.array(row["old_log_probs"])
        written = np.array(row["advantages"])
        np.testing.assert_allclose(written, advantage + 0.5 * gain, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- the policy as its own teacher

SHOWN = "{answer}>{prompt}"
"""Within the alphabet of the recipe."""


def answered(folder: Path) -> tuple[str, ...]:
    """A task whose rows have a column `answer`, steps that are all kept, and the policy's own
    teacher, by the start of an override."""
    path = folder / "answered.jsonl"
    rows = [{"prompt": f"{number}>", "answer": str(number)[::-1]} for number in range(100, 120)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (UNSCORED % path, "rewards.functions=[]", "checkpoints.every=1", "evaluation.prompts=0")


def scored(weights: dict[str, Tensor], row: dict[str, Any]) -> list[float]:
    """log π of a recorded completion after the teacher's prompt."""
    policy = load_policy(small().model, small().seed)
    prompt = row["prompt"]
    begin = policy.tokenizer(SHOWN.format(answer=prompt[:-1][::-1], prompt=prompt))["input_ids"]
    return log_probs(policy, weights, begin, row)


@pytest.mark.parametrize("weights", ["live", "base", "averaged"])
def test_own_teacher_reads_its_prompt_with_its_weights(weights: str, tmp_path: Path) -> None:
    """At the second step the three differ: the policy after a step, before it, and between."""
    teacher = f"teacher={{weights='{weights}', rate=0.25, prompt='{SHOWN}'}}"
    if weights != "averaged":
        teacher = teacher.replace("rate=0.25, ", "")
    rows = ("steps=2", "optimizer.learning_rate=0.1", *answered(tmp_path))
    folder = run(tmp_path / "run", "algorithm=opd", teacher, *rows)
    run_read = load(folder.path)
    start = {k: v.detach() for k, v in load_policy(small().model, small().seed).trainable().items()}
    after = load_file(run_read.checkpoints()[0].path / "trainable.safetensors")
    rate = {"live": 1.0, "base": 0.0, "averaged": 0.25}[weights]
    second = {name: torch.lerp(start[name], after[name], rate) for name in start}
    for step, own in ((1, start), (2, second)):
        for row in run_read.rollouts(step):
            found = [float(x) for x in row["teacher_log_probs"]]
            assert found == pytest.approx(scored(own, row), abs=2e-5)
    saved = (run_read.checkpoints()[0].path / "reference.safetensors").exists()
    assert saved == (weights != "live")


def test_averaged_adapter_is_kept_and_resumed(tmp_path: Path) -> None:
    own = (
        *("algorithm=sdft", "model.lora={rank=2}", "optimizer.learning_rate=0.1", "steps=3"),
        *answered(tmp_path), f"teacher={{weights='averaged', rate=0.25, prompt='{SHOWN}'}}",
    )  # fmt: skip
    whole = run(tmp_path / "whole", *own)
    kept = [load_file(one.path / "reference.safetensors") for one in load(whole.path).checkpoints()]
    learned = load_file(load(whole.path).checkpoints()[1].path / "trainable.safetensors")
    for name, weight in kept[1].items():
        policy = learned["model." + name.replace(".reference.", ".policy.")]
        torch.testing.assert_close(weight, torch.lerp(kept[0][name], policy, 0.25))
    with pytest.raises(Interrupted):
        train(small(*own), tmp_path / "cut", callbacks=[Stop(1)])
    again = train(small(*own), tmp_path / "cut", resume=True)
    for name in ("reference", "trainable"):
        ends = [
            load_file(load(one.path).checkpoints()[-1].path / f"{name}.safetensors")
            for one in (whole, again)
        ]
        assert all((ends[0][key] == ends[1][key]).all() for key in ends[0])


@pytest.mark.parametrize("term", ["sdft", "opd"])
@pytest.mark.parametrize("weights", ["live", "base"])
def test_own_teacher_is_followed(weights: str, term: str, tmp_path: Path) -> None:
    """A policy that is certain enough for its prompt to matter comes to answer as with the rest of
    the prompt: the divergence falls below 60 %."""
    certain_teacher(tmp_path / "start")
    folder = run(
        tmp_path / "run",
        *(*answered(tmp_path), f"algorithm={term}", f"model.name={tmp_path / 'start'}"),
        *("steps=40", "rollout.prompts_per_step=16", "checkpoints.every=50", "rollouts_every=0"),
        f"teacher={{weights='{weights}', prompt='{SHOWN}'}}", "optimizer.learning_rate=3e-3",
    )  # fmt: skip
    name = "teacher/divergence" if term == "sdft" else "teacher/kl"
    found = [record[name] for record in metrics(folder)]
    assert np.mean(found[-3:]) < 0.6 * np.mean(found[:3])


def test_prompts_of_a_teacher_keep_the_conversation() -> None:
    """Of messages the last one's text is filled in; completions with columns have their own."""
    tokenizer = load_policy(small().model, 0).tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}>{% endfor %}"
    chat = ChatEncoder(tokenizer)
    turns = (Message(role="system", content="1"), Message(role="user", content="2"))
    prompt = encode_prompt(Prompt("a", turns, columns={"answer": "34"}), chat)
    one = answer([3, 4])
    groups = [Group(prompt, (one, one)), Group(prompt, (replace(one, columns={"answer": 5}), one))]
    found = [*teacher_groups(groups, "{answer}{prompt}", chat, None)]
    texts = [tokenizer.decode(group.prompt.tokens) for group in found]
    assert texts == ["1>342>", "1>52>", "1>342>"]
    assert [len(group.completions) for group in found] == [2, 1, 1]
    with pytest.raises(KeelError, match=r"teacher\.prompt: prompt 'a' has no 'gold'"):
        [*teacher_groups(groups, "{gold}", chat, None)]
    with pytest.raises(KeelError, match="its completion are 8 tokens, more than the model's 7"):
        [*teacher_groups(groups, "{answer}{prompt}", chat, 7)]
    failed = [Group(prompt, (replace(one, columns={"said": "6"}), one))]
    found = [*teacher_groups(failed, "{said}{prompt}", chat, None)]
    assert [tokenizer.decode(group.prompt.tokens) for group in found] == ["1>62>", "1>2>"]
    with pytest.raises(KeelError, match="not by the task"):
        [*teacher_groups([Group(replace(prompt, tokens=(4,)), (one,))], "{prompt}", chat, None)]


# ---------------------------------------------------------------- refused, checked


def test_check_loads_the_teacher_and_expects_no_reward(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher")
    overrides = ("algorithm=opd", "rewards.functions=[]", unscored(tmp_path))
    assert check("tiny", [*overrides, teacher], runs=False).findings == ()
    buffer = ("rollout.overlong_buffer=2", teacher)
    (unused,) = check("tiny", [*overrides, *buffer], runs=False).findings
    assert (unused.kind, unused.key) == ("no-effect", "rollout.overlong_buffer")
    (found,) = check("tiny", [*overrides, "teacher.name=./none"], runs=False).findings
    assert (found.kind, found.key, found.severity) == ("would-stop", "teacher.name", "error")


def test_compare_counts_the_teacher(tmp_path: Path) -> None:
    teacher = save_teacher(tmp_path / "teacher").removeprefix("teacher.name=")
    recipe = tmp_path / "taught.toml"
    recipe.write_text(f'extends = "tiny"\nalgorithm = "opd"\nteacher = {{ name = "{teacher}" }}\n')
    arms = {arm.name: arm.models for arm in plan(["tiny", str(recipe)]).arms}
    assert arms == {"tiny": ("policy", "reference"), "taught": ("policy", "teacher")}


# ---------------------------------------------------------------- it learns

LEARNING = (
    *("steps=40", "rollout.prompts_per_step=16", "rollout.group_size=4"),
    *("optimizer.learning_rate=3e-3", "rollouts_every=0", "evaluation.prompts=0", DENSE),
)


def certain_teacher(folder: Path) -> str:
    """A random teacher, made certain by larger weights; the override that names it."""
    teacher = load_policy(small().model, 5)
    for weight in teacher.model.parameters():
        weight.data *= 2.0
    teacher.save(folder)
    return f"teacher.name={folder}"


@pytest.mark.parametrize("term", ["", ", distillation={mix=1.0}", ", distillation={top_k=8}"])
def test_divergence_in_the_loss_falls(term: str, tmp_path: Path) -> None:
    """The mean over the last of 40 steps is less than half of the first ones'."""
    folder = run(
        tmp_path / "run",
        f"algorithm={{preset='gkd'{term}}}",
        certain_teacher(tmp_path / "teacher"),
        *LEARNING,
    )
    found = [record["teacher/divergence"] for record in metrics(folder)]
    assert np.mean(found[-3:]) < 0.5 * np.mean(found[:3])


@pytest.mark.parametrize(("sign", "nearer"), [(1.0, True), (-1.0, False)])
def test_policy_comes_nearer_to_the_teacher_and_its_twin_does_not(
    sign: float, nearer: bool, tmp_path: Path
) -> None:
    """A random teacher, made certain by larger weights; the twin learns from minus the advantage.
    Over three seeds the divergence fell to 24, 45 and 54 %, and the twin's grew eightfold or more.
    """
    teacher = certain_teacher(tmp_path / "teacher")
    function = "tests.training.test_distillation:signed"
    advantage = f"{{kind='custom', function='{function}', needs_teacher=true, per_token=true, "
    folder = run(
        tmp_path / "run",
        f"algorithm={{preset='opd', distillation='none', "
        f"advantage={advantage}options={{sign={sign}}}}}}}",
        teacher,
        *LEARNING,
    )
    kl = [record["teacher/kl"] for record in metrics(folder)]
    first, last = np.mean(kl[:3]), np.mean(kl[-3:])
    assert (last < 0.75 * first) if nearer else (last > 3 * first)


def signed(old_log_prob_N, teacher_log_prob_N, *, sign):  # type: ignore[no-untyped-def]
    return sign * (teacher_log_prob_N - old_log_prob_N)
