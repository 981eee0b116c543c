"""pass@k and maj@k of samples, benchmarks by name, and further evaluation sets of a stage."""

from __future__ import annotations

import io
import itertools
import json
import re
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import keel
from keel.analysis.statistics import majority, pass_at_k
from keel.cli.main import main
from keel.cli.train import show
from keel.config.evaluation import Evaluation
from keel.config.load import load_recipe
from keel.config.model import BuildModel, Model
from keel.config.sources import RewardSource
from keel.models.policy import load_policy
from keel.platform.sandbox import bubblewrap
from keel.platform.signals import Interrupted
from keel.rewards.registry import load_reward
from keel.rewards.scorer import Scorer
from keel.runs.layout import RunFolder
from keel.runs.reader import load
from keel.training import evaluator
from keel.training.evaluation import evaluate
from keel.training.evaluator import Evaluator, majority_at_k
from keel.training.export import export
from keel.training.run import train
from keel.types import Group, KeelError, Prompt
from keel.view.summary import summarise
from tests.data.made import completion
from tests.soak.killing import differences
from tests.training.small import Stop, info, metrics, notes, run, small


@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_mean_over_subsets(right: int, k: int) -> None:
    subsets = list(itertools.combinations([True] * right + [False] * (5 - right), k))
    assert pass_at_k(right, 5, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


@pytest.mark.parametrize(
    ("votes", "right"),
    [
        ("7 7 8", True),  # of ten cases, 7 is right
        ("8 8 7", False),
        ("7 8", True),  # a tie: the first given
        ("8 7", False),
        ("8 7 9 7 8", False),
        ("9 7 8 7 8", True),
        ("- - 7", True),  # no answer has no vote
        ("- - 8", False),
        ("- -", False),
        ("7 7.0 8 8", True),  # forms of the right answer are one
    ],
)
def test_majority_of_answers(votes: str, right: bool) -> None:
    given = [(None if v == "-" else v, v.startswith("7")) for v in votes.split()]
    assert majority(given) is right


def test_interval_of_a_share_is_one() -> None:
    found = evaluator._share_interval([1.0, 0.25, 1.0])
    assert 0 <= found["low"] < found["mean"] < found["high"] == 1


MATHS = [r"\boxed{\frac12}", r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{3}", r"\boxed{3}"]


@pytest.mark.parametrize(
    ("function", "options", "texts", "share"),
    [
        ("math", {}, MATHS, 0.0),  # three spellings of one wrong number outvote 3
        (
            "exact_match",
            {"tag": "a"},
            [f"It{' ' * n} is: <a>{'5' if n < 3 else 3}</a>" for n in range(5)],
            0.0,
        ),
        (
            "exact_match",
            {"tag": "a"},
            [f"It{' ' * n} is: <a>{'5' if n < 2 else 3}</a>" for n in range(5)],
            1.0,
        ),
    ],
)
def test_votes_are_counted_in_the_rewards_form(
    function: str, options: dict[str, Any], texts: list[str], share: float
) -> None:
    source = RewardSource(function=function, options=options)
    scorer = Scorer([load_reward(source)])
    prompt = Prompt("t/0", "What?", {"answer": "3"}, "t")
    group = Group(prompt, tuple(completion(text) for text in texts))
    with closing(scorer):
        scored = scorer([group], 1)
        made = Evaluator(SimpleNamespace(), scorer, [prompt], Evaluation())  # type: ignore[arg-type]
        answers = made._answers([group], scored)
    assert answers is not None
    votes = list(zip(answers[0], [one.reward == 1 for one in scored.results[0]], strict=True))
    assert majority_at_k(votes, 5) == share


def test_majority_of_k_is_over_disjoint_blocks() -> None:
    votes = [("7", True), ("8", False), ("8", False), ("8", False), ("7", True)]
    found = [majority_at_k(votes, k) for k in (1, 2, 5, 9)]
    assert found == [0.4, 0.5, 0.0, 0.0]


# ---------------------------------------------------------------- keel eval


ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [{"question": f"{n} + 1?", "answer": f"easy\n#### {n + 1}"} for n in range(3)],
    "math500": [{"problem": f"${n} + 1$", "answer": f"{n + 1}"} for n in range(3)],
    "aime24": [{"problem": f"${n} + 1$", "answer": f"{n + 1}"} for n in range(3)],
    "mmlu": [{"question": f"{n}", "subject": "law", "choices": list("wxyz"), "answer": n}
             for n in range(3)],
    "ifeval": [{"prompt": f"Write {n}.", "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{}]} for n in range(3)],
    "humaneval": [{"prompt": f"def f{n}():\n", "entry_point": f"f{n}",
                   "test": "def check(f):\n    assert f() == 1\n"} for n in range(3)],
    "mbpp": [{"text": f"Write {n}.", "test_list": ["assert f() == 1"] * 3, "test_setup_code": "",
              "code": "def f(): return 1"} for n in range(3)],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "policy"
    build = BuildModel(tokenizer="bytes", hidden_size=16, layers=1, heads=2, context=512)
    load_policy(Model(build=build), 0).save(folder)
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_eval_by_name_on_a_local_file(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in ("math500", "aime24", "humaneval", "mbpp"):
        try:
            bubblewrap()
        except KeelError as error:
            pytest.skip(str(error))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    words = ["--task", name, "--set", f"path={path}", "--max-tokens", "4", "--k", "1,2"]
    assert main(["eval", str(model), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["measure"], found["n"], found["sampled"]["n"]) == ("pass@1", 3, 3)
    asked, sampled = found["protocol"].split("; ")
    assert asked.startswith("a text to go on from, no worked examples, at most 4 tokens")
    assert ("stop strings" in asked) == (name != "ifeval")
    assert sampled.startswith("greedy, and 2 samples at temperature 0.")
    assert found["as_published"]
    assert ("maj@2" in found) == (name not in ("ifeval", "humaneval", "mbpp"))
    assert ("figures" in found) == (name == "ifeval")


def test_eval_of_more_k_than_samples_is_refused(model: Path) -> None:
    with pytest.raises(KeelError, match="needs at least 3 samples"):
        evaluate(model, task="addition", samples=2, k=(1, 3))


# ---------------------------------------------------------------- sets of a stage


SETS = (
    "steps=4", "optimizer.learning_rate=3e-2",  # so that the later one is worse
    "evaluation={every=0, samples=2, best='eval/sums/reward'}",
    "evaluation.sets=[{name='sums', task='sort_digits', prompts=3, every=2, samples=2,"
    " max_tokens=3, rewards={functions=[{function='place_match', correctness=false}]}},"
    " {name='digits', task={name='sort_digits', options={max_digits=4}}, prompts=2, every=0}]",
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return run(tmp_path_factory.mktemp("sets") / "run", *SETS)


def test_sets_are_evaluated_at_their_own_steps(whole: RunFolder) -> None:
    found = {
        part: [one["step"] for one in metrics(whole) if f"eval/{part}" in one]
        for part in ("pass@1", "sums/reward", "sums/sampled", "digits/pass@1", "digits/mean_length")
    }
    assert found == {
        "pass@1": [4], "sums/reward": [2, 4], "sums/sampled": [2, 4], "digits/pass@1": [4],
        "digits/mean_length": [4],
    }  # fmt: skip
    sets = info(whole)["evaluation"]["rl"]["after"]["sets"]
    assert (sets["sums"]["n"], sets["digits"]["n"]) == (3, 2)
    assert metrics(whole)[-1]["eval/sums/reward"] == sets["sums"]["mean"]


def test_completions_of_sets_are_recorded(whole: RunFolder) -> None:
    rows = load(whole.path).evaluation(4)
    counts = dict.fromkeys((None, "sums", "digits"), 0)
    for row in rows:
        counts[row["extra/evaluation_set"]] += 1
        assert len(row["tokens"]) <= 3 or row["extra/evaluation_set"] != "sums"
    assert counts == {None: 8 + 16, "sums": 3 + 6, "digits": 2}
    assert len({row["group"] for row in rows}) == 8 + 3 + 2
    assert len(load(whole.path).evaluation(2)) == 9


def test_named_metric_selects_the_best_checkpoint(whole: RunFolder) -> None:
    values = {one["step"]: one.get("eval/sums/reward", -1) for one in metrics(whole)}
    assert values[2] > values[4]
    assert info(whole)["best"] == {"rl": 2}
    assert info(whole)["best_metric"] == {"rl": "eval/sums/reward"}
    assert "selected" not in evaluate(whole.path, checkpoint="best")  # by prompts of a set


def test_summary_has_the_figures_of_all_sets(whole: RunFolder) -> None:
    lines = [line.split() for line in repr(summarise(load(whole.path))).splitlines()[2:]]
    assert lines[0][-4:] == ["checkpoint", "step-000002", "by", "eval/sums/reward"]
    heads = ["before validation", "digits 0.0%", "sums reward"]
    assert [" ".join(line[:2]) for line in lines[1:4]] == heads
    assert lines[3][-2] == "sampled"
    printed = io.StringIO()
    show(Console(file=printed, width=999), whole)
    heads = re.findall(r"^\w+: validation .*; digits .*; sums ", printed.getvalue(), re.MULTILINE)
    assert len(heads) == 2


def test_benchmark_as_a_set_keeps_its_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And sets of the same rewards call the same functions."""
    loaded: list[str] = []

    def loading(source: RewardSource, context: Any) -> Any:
        loaded.append(source.function)
        return load_reward(source, context)

    monkeypatch.setattr("keel.training.setup.load_reward", loading)
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS["gsm8k"]))
    task = f"task={{name='gsm8k', path='{path}'}}"
    folder = run(
        tmp_path / "run", "steps=1", "evaluation.every=0", "rollout.stop=['7']",
        "model.build.alphabet=none", "model.build.tokenizer=bytes", "prompts.max_tokens=30",
        f"evaluation.sets=[{{name='a', {task}, samples=2, max_tokens=9}}, {{name='b', {task}}},"
        " {name='c', task='sort_digits', prompts=2}]",
    )  # fmt: skip
    sets = info(folder)["evaluation"]["rl"]["after"]["sets"]
    asked = "a text to go on from, no worked examples, at most {} tokens, stop strings {}; greedy"
    stop = ["\nQuestion:"]
    assert sets["a"]["protocol"] == f"{asked.format(9, stop)}, and 2 samples at temperature 0.7"
    assert sets["b"]["protocol"] == asked.format(32, stop)  # half of the context
    assert "protocol" not in sets["c"]
    assert (sets["b"]["n"], sets["c"]["n"]) == (3, 2)
    assert loaded == ["place_match", "numeric_match"]


def test_card_says_which_set_a_figure_is_of(whole: RunFolder, tmp_path: Path) -> None:
    card = (export(whole.path, tmp_path / "model") / "README.md").read_text()
    ends = {
        line.split(" | ")[0].strip("| "): line.split(" | ")[-1].strip("| ")
        for line in card.splitlines()
        if line.startswith("| ")
    }
    assert (ends["pass@1"], ends["digits/pass@1"], ends["sums/reward"]) == ("8", "2", "3")
    head = card.split("---")[1]
    for where in ("(validation split)", "(set digits)", "(set sums)"):
        assert f"name: sort_digits {where}" in head
    assert "type: digits/" not in head


def test_rows_for_a_run_of_a_benchmark_are_asked_as_it_says(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS["gsm8k"]))
    folder = run(
        tmp_path / "run", "steps=1", "rewards.functions=[]",
        f"tasks=[{{name='gsm8k', path='{path}', validation_path='none'}}]",
        "evaluation.prompts=1", "model.build.alphabet=none",
        "model.build.tokenizer=bytes", "prompts.max_tokens=30",
    )  # fmt: skip
    found = keel.evaluate(folder.path, data=ROWS["gsm8k"][:2])
    assert found["n"] == 2
    assert found["protocol"].startswith("a text to go on from, no worked examples")
    # A base model, so that the benchmark's stop strings hold in training, too.
    stop = ["\nQuestion:"]
    assert f"stop strings {stop}" in found["protocol"]
    assert f"stop strings {stop}" in info(folder)["evaluation"]["rl"]["after"]["protocol"]
    assert f"stop strings of gsm8k: {stop}" in notes(folder)


def test_killed_run_with_sets_ends_the_same(whole: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(small(*SETS), tmp_path / "run", callbacks=[Stop(2)])
    again = train(None, tmp_path / "run", resume=True)
    assert differences(whole.path, again.path) == []


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (("evaluation.best=eval/hard/pass@1",), "unknown metric 'eval/hard/pass@1'"),
        (("evaluation.sets=[{name='a/b', task='addition'}]",), "sets.0.name"),
        (
            ("evaluation.sets=[{name='a', task='addition'}, {name='a', task='reverse'}]",),
            "one name",
        ),
        (("evaluation.sets=[{name='a', task='addition'}]", "evaluation.prompts=0"), "set it to 1"),
    ],
)
def test_wrong_sets_are_refused(keys: tuple[str, ...], match: str) -> None:
    with pytest.raises(KeelError, match=match):
        load_recipe("tiny", keys)
