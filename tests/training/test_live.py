"""`keel.train` and `keel.check` with live objects: one run, resumed exactly."""

from __future__ import annotations

import gc
import inspect
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import tomli_w
import torch
from datasets import Dataset, DatasetDict
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import keel
from keel.algorithms.presets import PRESETS
from keel.cli.main import main
from keel.config.load import load_recipe
from keel.config.model import BuildModel
from keel.models.build import build_tokenizer
from keel.preflight.check import Report
from keel.training.live import collect_inputs
from keel.training.stages.rl import RLStage
from keel.types import KeelError
from tests.soak.killing import differences

TOKENIZER = build_tokenizer(BuildModel(alphabet="0123456789>", context=32))
ROWS = [{"prompt": f"{a}{b}>", "top": max(a, b)} for a in range(10) for b in range(10)]
SPLITS = DatasetDict(train=Dataset.from_list(ROWS), test=Dataset.from_list(ROWS))
SMALL: dict[str, Any] = {
    "algorithm": "grpo",
    "steps": 4,
    "threads": 1,
    "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 4},
    "optimizer": {"learning_rate": 1e-2},
    "evaluation": {"prompts": 4},
    "progress": False,
}


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def first(completions: list[str], top: list[int], **_: Any) -> list[float]:
    """1 where the completion begins with the larger digit."""
    return [float(text[:1] == str(gold)) for text, gold in zip(completions, top, strict=True)]


def length(completions: list[str], **_: Any) -> list[float]:
    return [0.1 * len(text) for text in completions]


def arguments(**others: Any) -> dict[str, Any]:
    live = {"model": tiny(), "tokenizer": TOKENIZER, "data": ROWS, "rewards": [first, length]}
    return {**SMALL, **live, **others}


class Stop:
    """Ends the run after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_step(self, state: keel.RunState) -> None:
        if state.step == self.at:
            state.control.stop("enough")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> keel.python.TrainedRun:
    return keel.train(folder=tmp_path_factory.mktemp("live") / "run", **arguments())


def test_a_run_resumes_and_reruns_from_any_folder(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe of files trains as live objects do."""
    exp, run = tmp_path / "exp", tmp_path / "runs" / "a"
    tiny().save_pretrained(exp / "model")
    TOKENIZER.save_pretrained(exp / "model")
    (exp / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (exp / "own.py").write_text(Path(__file__).read_text())
    recipe = {
        **{key: value for key, value in SMALL.items() if key != "progress"},
        "model": {"name": "model"},
        "tasks": [{"name": "jsonl", "path": "data.jsonl"}],
        "rewards": {"functions": [{"function": f"own.py:{f}"} for f in ("first", "length")]},
    }
    (exp / "recipe.toml").write_text(tomli_w.dumps(recipe))
    for at, (source, folder) in enumerate(
        [(exp / "recipe.toml", run), (run / "recipe.toml", exp / "b")]
    ):
        (tmp_path / str(at)).mkdir()
        monkeypatch.chdir(tmp_path / str(at))
        keel.train(source, folder, callbacks=[Stop(2)], progress=False)
        monkeypatch.chdir(tmp_path)
        again = keel.train(folder=folder, resume=True, progress=False)
        assert again.metrics() == whole.metrics()
    assert again.rollouts(4) == whole.rollouts(4)
    mine, theirs = (run.policy().state_dict() for run in (whole, again))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    start = tiny().state_dict()
    assert any(not torch.equal(mine[name], start[name]) for name in mine), "nothing was learned"


def test_a_run_of_live_objects_reruns_from_its_folder(whole: Any, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match="python:first"):
        keel.train(whole.folder.recipe, tmp_path / "run", progress=False)
    again = keel.train(
        whole.folder.recipe, tmp_path / "run", rewards=[first, length], progress=False
    )
    assert again.metrics() == whole.metrics()


def test_resume_after_stop_by_a_callback_ends_the_same(whole: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = keel.train(folder=folder, callbacks=[Stop(2)], **arguments())
    assert run.info()["finished"] is False
    assert len(run.metrics()) == 2
    assert [entry.place.step for entry in run.checkpoints()] == [2]
    assert run.events()[-1] | {"text": "enough"} == run.events()[-1]
    keel.train(folder=folder, resume=True, callbacks=[Stop(3)], **arguments())
    run = keel.train(folder=folder, resume=True, rewards=[first, length], progress=False)
    assert run.info()["finished"] is True
    assert differences(whole.folder.path, folder) == []


def test_resume_refuses_other_arguments_and_notes_another_function(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keel.train(folder=folder, callbacks=[Stop(2)], **arguments(rewards=[first]))
    with pytest.raises(KeelError, match=r"'python:first' was passed to keel\.train as an object"):
        keel.train(folder=folder, resume=True, progress=False)
    with pytest.raises(KeelError, match=r"seed is 9, but the run in .* has 0"):
        keel.train(folder=folder, resume=True, **arguments(rewards=[first], seed=9))
    weighted = {"function": first, "weight": 0.5}
    with pytest.raises(KeelError, match=r"rl\.rewards\.functions\[0\]\.weight is 0\.5"):
        keel.train(folder=folder, resume=True, progress=False, rewards=[weighted])
    with pytest.raises(KeelError, match=r"data: they differ from .*data\.jsonl"):
        keel.train(folder=folder, resume=True, **arguments(rewards=[first], data=ROWS[1:]))
    with pytest.raises(KeelError, match="pass its folder"):
        keel.train(resume=True, **arguments())
    other = dict(enumerate([length]))[0]
    other.__name__ = "first"
    try:
        run = keel.train(folder=folder, resume=True, rewards=other, progress=False)
    finally:
        other.__name__ = "length"
    assert [e["text"] for e in run.events() if "python:first" in e.get("text", "")]


# ---------------------------------------------------------------- going on


CONSTANT = {"learning_rate": 1e-2, "schedule": "constant"}


def test_going_on_equals_a_longer_run(tmp_path: Path) -> None:
    straight = keel.train(folder=tmp_path / "a", **arguments(optimizer=CONSTANT))
    run = keel.train(folder=tmp_path / "b", **arguments(optimizer=CONSTANT, steps=2))
    assert run.info()["finished"]
    run = keel.train(run, steps=4, progress=False)
    assert run.info()["finished"]
    assert run.recipe()["stages"][0]["steps"] == 4
    assert run.info()["changes"] == [
        {"stage": "rl", "step": 2, "key": "rl.steps", "from": 2, "to": 4}
    ]
    assert [row["reward"] for row in run.metrics()] == [row["reward"] for row in straight.metrics()]
    mine, theirs = (one.policy().state_dict() for one in (straight, run))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_going_on_at_another_rate_survives_a_stop(tmp_path: Path) -> None:
    keys = {"optimizer.learning_rate": 1e-3, "evaluation.every": 2, "steps": 5}
    runs = []
    for name in ("a", "b"):
        folder = tmp_path / name
        keel.train(folder=folder, **arguments(steps=2, optimizer=CONSTANT))
        stops = [Stop(3)] if name == "b" else []
        live = {"folder": folder, "resume": True, "rewards": [first, length], "progress": False}
        keel.train(callbacks=stops, **live, **keys)  # type: ignore[arg-type]
        runs.append(keel.train(**live) if stops else keel.load(folder))  # type: ignore[arg-type]
    changed = [one["key"] for one in runs[0].info()["changes"]]
    assert sorted(changed) == [f"rl.{key}" for key in sorted(keys)]
    assert [row["learning_rate"] for row in runs[0].metrics()] == [1e-2, 1e-2, 1e-3, 1e-3, 1e-3]
    assert differences(runs[0].folder.path, runs[1].folder.path) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seed": 3}, "seed is 3, but the run in .* has 0: it can only go on with other steps"),
        ({"rollout.max_tokens": 3}, r"rl\.rollout\.max_tokens is 3, but .* has 4"),
        ({"algorithm": "ppo"}, r"rl\.epochs is 4"),
        ({"steps": 1}, r"rl\.steps is 1, but the run has taken 4: raise it"),
        ({"stepps": 9}, "unknown key 'stepps': did you mean 'steps'"),
        ({"tasks.system": "x"}, r"rl\.tasks\[0\]\.system is x"),
    ],
)
def test_going_on_with_another_key_is_refused(
    whole: Any, keys: dict[str, Any], message: str
) -> None:
    before = whole.folder.recipe.read_bytes()
    with pytest.raises(KeelError, match=message):
        keel.train(whole, progress=False, **keys)
    assert whole.folder.recipe.read_bytes() == before


# ---------------------------------------------------------------- a run in Python


def test_runs_of_functions_are_evaluated_and_exported(
    whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = keel.evaluate(whole, prompts=8)
    assert known == keel.evaluate(keel.load(whole, functions=[first, length]), prompts=8)
    assert known == keel.evaluate(keel.load(whole), rewards=[first, length], prompts=8)
    assert known == keel.evaluate(str(whole.folder.path), rewards=[first, length], prompts=8)
    tables = [{"function": length, "weight": 10.0}]
    assert keel.evaluate(whole.folder.path, rewards=tables, prompts=8)["measure"] == "reward"
    other = keel.evaluate(whole, rewards=lambda completions: [7.0 for _ in completions], prompts=8)
    assert other["mean"] == 7.0
    with pytest.raises(KeelError, match=r"'first' of the run .* by --reward FILE\.py:first"):
        keel.evaluate(keel.load(whole), prompts=8)
    words = [f"--reward={__file__}:{name}" for name in ("first", "length")]
    assert main(["eval", str(whole.folder.path), "--prompts=8", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(known))
    card = (keel.export(whole, tmp_path / "model") / "README.md").read_text()
    assert "`$RUN/inputs/data.jsonl`" in card
    assert "`python:first`, `python:length`. Put functions into a file" in card
    assert keel.load(whole).metrics() == whole.metrics()


def test_a_run_is_the_model_of_the_next(whole: Any, tmp_path: Path) -> None:
    given = arguments(model=whole, tokenizer=None, steps=1)
    runs = [keel.train(folder=tmp_path / "a", **given)]
    runs.append(keel.train(folder=tmp_path / "b", **{**given, "model": str(whole.folder.path)}))
    weights = [run.folder.inputs / "model" / "model.safetensors" for run in runs]
    exported = keel.export(whole, tmp_path / "model") / "model.safetensors"
    assert [one.read_bytes() for one in weights] == [exported.read_bytes()] * 2
    assert keel.train(runs[0], steps=2, progress=False).info()["finished"]
    with pytest.raises(KeelError, match="has no whole checkpoint"):
        keel.train(**{**given, "model": keel.train(folder=tmp_path / "c", **arguments(steps=0))})


def test_run_is_evaluated_on_rows_or_a_table(whole: Any, tmp_path: Path) -> None:
    parameters = inspect.signature(whole.evaluate).parameters
    assert {"task", "data", "samples", "k"} <= parameters.keys()
    assert not [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    rows = [{"prompt": f"{n}{n}>", "top": n} for n in range(3)]
    found = whole.evaluate(data=rows, samples=2)
    assert (found["n"], found["sampled"]["n"], "trained_on" in found) == (3, 3, True)
    assert found["reward"] == whole.evaluate(prompts=4)["reward"]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"q": f"{n}>", "top": n}) + "\n" for n in range(9)))
    assert whole.evaluate(data=path, task={"prompt": "{q}"}, prompts=5)["n"] == 5
    answered = [{"prompt": "1>", "answer": "1"}]
    model = whole.export(tmp_path / "model")
    assert keel.evaluate(model, data=answered)["measure"] == "pass@1"
    table = {"name": "sort_digits", "options": {"max_digits": 4}}
    assert whole.evaluate(task=table, prompts=6, rewards="exact_match")["n"] == 6
    with pytest.raises(KeelError, match="'sort_digits' is not a file"):
        whole.evaluate(data="sort_digits")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: keel.train(run, steps=9, rewards=print), "has no python:print"),
        (lambda run: keel.train(run, steps=9, rewards="exact_match"), "has no exact_match"),
        (lambda run: keel.train(run, "another", steps=9), "a run goes on in its own"),
        (lambda run: keel.load(3), "a int is not a run"),
        (lambda run: keel.evaluate(None), "a NoneType is not a run"),
        (lambda run: keel.export(tiny(), "x"), "a LlamaForCausalLM is not a run"),
    ],
)
def test_what_is_not_of_the_run_is_refused(whole: Any, call: Any, message: str) -> None:
    before = whole.folder.recipe.read_bytes()
    with pytest.raises(KeelError, match=message):
        call(whole)
    assert whole.folder.recipe.read_bytes() == before


def test_errors_of_functions_name_a_call_that_resumes(tmp_path: Path) -> None:
    def breaks(completions: list[str], trainer_state: Any) -> list[float]:
        if trainer_state.global_step == 2:
            raise ValueError("no")
        return [0.0 for _ in completions]

    with pytest.raises(KeelError, match=r"resume with: keel\.train\(folder=.*with the functions"):
        keel.train(folder=tmp_path / "run", **arguments(rewards=breaks))


@pytest.fixture(scope="module")
def report() -> Report:
    return keel.check(**{key: value for key, value in arguments().items() if key != "progress"})


def test_runs_reports_and_errors_show_in_few_words(whole: Any, report: Any) -> None:
    assert repr(whole) == f"TrainedRun({str(whole.folder.path)!r}, stages=rl)"
    lines = repr(report).splitlines()
    assert lines[0] == f"Report('grpo', {len(report.findings)} findings)"
    assert [line.strip() for line in lines[1:]] == [
        f"{one.severity}: {one.what}" for one in report.findings
    ]
    # IPython shows what this method returns
    assert KeelError("a: b")._render_traceback_() == ["KeelError: a: b"]


def _process_state() -> list[Any]:
    """What a run may not leave behind."""
    gc.collect()
    return [
        sum(issubclass(type(one), LlamaForCausalLM) for one in gc.get_objects()),
        sorted(thread.name for thread in threading.enumerate()),
        [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
        (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()),
        dict(os.environ),
        os.getcwd(),
    ]


@pytest.mark.slow
def test_runs_leave_nothing_in_the_process(whole: Any, tmp_path: Path) -> None:
    """Runs of other models, engines and data, one after the other."""
    torch.set_num_threads(2)
    before = _process_state()
    lora = {"steps": 2, "threads": 1, "progress": False, "model": {"lora": {"rank": 2}}}
    keel.train("tiny", tmp_path / "lora", **lora)
    queue = {"preset": "grpo", "corrections": {"kind": "truncate"}}
    rollout = {**SMALL["rollout"], "async_level": 1, "old_log_probs": "trainer"}
    keel.train(folder=tmp_path / "b", **arguments(algorithm=queue, rollout=rollout))
    sft = {"stage": "sft", "steps": 1, "batch_size": 2, "tasks": [{"name": "sort_digits"}]}
    keel.train({"extends": "tiny", "stages": [sft]}, tmp_path / "c", progress=False, threads=1)
    assert _process_state() == before
    keel.train(folder=tmp_path / "again", **arguments())
    assert differences(whole.folder.path, tmp_path / "again") == []


# ---------------------------------------------------------------- callbacks


def test_callbacks_that_are_never_called_are_refused(tmp_path: Path) -> None:
    class Misspelt(keel.Callback):
        def on_stepp(self, state: keel.RunState) -> None: ...

    for wrong in (lambda state: None, TrainerCallback(), Misspelt(), Meddler, object()):
        with pytest.raises(KeelError, match="would never be called: pass an object with one of"):
            keel.train(folder=tmp_path / "run", callbacks=[wrong], **arguments())
    assert not (tmp_path / "run").exists()
    one = Meddler()
    keel.train(folder=tmp_path / "run", callbacks=one, **arguments(steps=1))
    assert ("step", 1) in one.seen


class Meddler(keel.Callback):
    """Tries to change all that it receives."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_stage(self, state: keel.RunState) -> None:
        self.seen.append(("stage", state.step))

    def on_step(self, state: keel.RunState) -> None:
        self.seen.append(("step", state.step))
        with pytest.raises(TypeError):
            state.metrics["reward"] = 0.0  # type: ignore[index]

    def on_evaluation(self, state: keel.RunState, result: Any) -> None:
        self.seen.append(("evaluation", state.step))
        result.clear()

    def on_checkpoint(self, state: keel.RunState, checkpoint: Path) -> None:
        assert checkpoint.is_dir()
        self.seen.append(("checkpoint", state.step))


def test_callbacks_receive_events_and_cannot_change_the_run(whole: Any, tmp_path: Path) -> None:
    one, two = Meddler(), Meddler()
    keel.train(folder=tmp_path / "run", callbacks=[one, two], **arguments())
    assert one.seen == two.seen
    assert one.seen == [
        ("stage", 0),
        ("evaluation", 0),
        *[("step", step) for step in (1, 2, 3, 4)],
        ("evaluation", 4),
        ("checkpoint", 4),
    ]
    assert differences(whole.folder.path, tmp_path / "run") == []


def test_error_in_a_callback_is_named(tmp_path: Path) -> None:
    class Broken:
        def on_step(self, state: keel.RunState) -> None:
            raise ZeroDivisionError("by 0")

    with pytest.raises(KeelError, match=r"Broken\.on_step raised ZeroDivision"):
        keel.train(folder=tmp_path / "run", callbacks=[Broken()], **arguments())


class Asking:
    """Asks for something after each step."""

    def on_evaluation(self, state: keel.RunState, result: Any) -> None:
        if state.step == 1:
            state.control.scale_learning_rate(2)

    def on_step(self, state: keel.RunState) -> None:
        if state.step == 1:
            state.control.evaluate()
        elif state.step == 2:
            state.control.log({"probe": 0.5})
            state.control.scale_learning_rate(0.25)
        elif state.step == 3:
            state.control.checkpoint()


def test_requests_of_callbacks_are_part_of_the_run(tmp_path: Path) -> None:
    """A resumed run has them without asking again."""
    keys = {"callbacks": [Asking()], "checkpoints": {"every": 9, "keep": 9}}
    run = keel.train(folder=tmp_path / "a", **arguments(**keys))
    one, two, *_ = records = run.metrics()
    assert "eval/reward" in one
    assert two["probe"] == 0.5
    assert "eval/reward" not in two
    assert [record["learning_rate"] for record in records] == [0.01, 0.02, 0.005, 0.005]
    assert 3 in [entry.place.step for entry in run.checkpoints()]
    changed = [event for event in run.events() if event["event"] == "learning_rate"]
    assert [event["factor"] for event in changed] == [2, 0.25]
    keys["callbacks"].append(Stop(2))
    keel.train(folder=tmp_path / "b", **arguments(**keys))
    keys["callbacks"].pop()
    keel.train(folder=tmp_path / "b", resume=True, **arguments(**keys))
    assert differences(tmp_path / "a", tmp_path / "b") == []


def test_requests_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    def ask(method: str, request: Any, folder: str = "run", **others: Any) -> str:
        one = SimpleNamespace(**{method: lambda state, *_: request(state.control)})
        with pytest.raises(KeelError) as caught:
            keel.train(folder=tmp_path / folder, callbacks=[one], **arguments(**others))
        return str(caught.value)

    for name in ("reward", "rewards/mine", "eval/mine", "step", ""):
        assert "not a free name" in ask("on_step", lambda control, n=name: control.log({n: 1}))
    assert "give a number" in ask("on_step", lambda control: control.log({"probe": "high"}))
    assert "give a number" in ask("on_step", lambda control: control.log({"probe": 10**400}))
    assert "finite factor" in ask("on_step", lambda control: control.scale_learning_rate(-1))
    assert "give a number" in ask("on_step", lambda control: control.scale_learning_rate("0.5"))
    assert "evaluates nothing" in ask(
        "on_step", lambda control: control.evaluate(), evaluation={"prompts": 0}
    )
    for method in ("on_stage", "on_evaluation", "on_record", "on_checkpoint"):
        text = ask(method, lambda control: control.log({"probe": 1}), method, steps=1)
        assert "call it in on_step" in text


# ---------------------------------------------------------------- check


def test_check_takes_the_arguments_of_train(report: Any) -> None:
    assert [stage.name for stage in report.stages] == ["rl"]
    assert not [one for one in report.findings if one.severity == "error"]
    given = {key: value for key, value in arguments().items() if key != "progress"}
    with pytest.raises(KeelError, match="unknown key 'stepps'"):
        keel.check(**given, stepps=3)


# ---------------------------------------------------------------- arguments


def stage_of(**others: Any) -> Any:
    given = collect_inputs(**{k: v for k, v in arguments(**others).items() if k != "progress"})
    return load_recipe(given.recipe).stages[-1]


def test_keywords_are_recipe_keys() -> None:
    made = collect_inputs("quickstart", steps=7, **{"rollout.max_tokens": 3, "model.lora.rank": 8})
    recipe = load_recipe(made.recipe)
    rl, shipped = recipe.stages[-1], load_recipe("quickstart")
    assert isinstance(rl, RLStage)
    assert (rl.steps, rl.rollout.max_tokens) == (7, 3)
    assert recipe.model.lora is not None
    assert recipe.stages[0] == shipped.stages[0]
    assert load_recipe(collect_inputs(shipped).recipe) == shipped
    assert load_recipe(collect_inputs(shipped, steps=3).recipe).stages[-1].steps == 3


@pytest.mark.parametrize("prefix", ["", "rl."])
def test_keywords_below_tasks_stay_with_data(prefix: str) -> None:
    keys = {f"{prefix}tasks.system": "Add.", f"{prefix}tasks.prompt": "{prompt}?"}
    (task,) = stage_of(**keys).trained_tasks
    assert (task.system, task.prompt) == ("Add.", "{prompt}?")
    assert task.path == "$RUN/inputs/data.jsonl"
    assert stage_of(tasks={"0": {"bad_rows": "quarantine"}}).tasks[0].bad_rows == "quarantine"
    more = {"rewards.functions.weight": 2, "rewards.timeout": 5}
    assert stage_of(rewards=first, **more).rewards.functions[0].weight == 2
    with pytest.raises(KeelError, match=r"unknown key 'tasks\.0\.sytem': did you mean 'system'"):
        stage_of(**{f"{prefix}tasks.sytem": 1})
    for other in ({"tasks.path": "x.jsonl"}, {"tasks": [{"name": "addition"}]}):
        with pytest.raises(KeelError, match="another keyword sets tasks"):
            stage_of(**other)


def test_data_keeps_how_the_recipe_reads_rows() -> None:
    rows = [{"question": "1+1", "answer": "#### 2"}]
    made = load_recipe(collect_inputs("gsm8k-grpo", data=rows).recipe).stages[-1].trained_tasks
    (shipped,) = load_recipe("gsm8k-grpo").stages[-1].trained_tasks
    assert made == (
        shipped.model_copy(
            update={"name": "jsonl", "path": "$RUN/inputs/data.jsonl", "validation_path": None}
            | {"options": {}}
        ),
    )
    pairs = [{"q": "1", "a": "2", "b": "3"}]
    columns = {"data.columns": {"prompt": "q", "chosen": "a", "rejected": "b"}}
    stage = load_recipe(
        collect_inputs(model="m", stage="dpo", data=pairs, **columns).recipe
    ).stages[-1]
    assert stage.preference_data is not None
    assert stage.preference_data.columns["prompt"] == "q"
    assert stage.preference_data.path == "$RUN/inputs/data.jsonl"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_a_file_is_known_by_its_ending(name: str) -> None:
    made = collect_inputs(model="m", data=f"in/{name}")
    (task,) = load_recipe(made.recipe).stages[0].sampling.tasks
    assert task.name == name.split(".")[1]
    assert str(task.path).endswith(f"in/{name}")


def test_invalid_unicode_in_rows_is_named() -> None:
    with pytest.raises(KeelError, match=r"data\[1\]: .*surrogates not allowed"):
        collect_inputs(model="m", data=[{"prompt": "1"}, {"prompt": "\ud800"}])


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    rows = [{"prompt": "1", "top": np.int64(3), "all": np.arange(2), "x": torch.tensor(0.5)}]
    made = collect_inputs(model="m", data=rows, steps=np.int64(3), seed=torch.tensor(5))
    assert json.loads(made.tables["data.jsonl"]) == {
        "prompt": "1",
        "top": 3,
        "all": [0, 1],
        "x": 0.5,
    }
    recipe = load_recipe(made.recipe, ["optimizer.learning_rate=0.5"])
    assert (recipe.stages[0].steps, recipe.seed) == (3, 5)
    rate = collect_inputs(model="m", data=rows, optimizer={"learning_rate": np.float32(0.25)})
    assert load_recipe(rate.recipe).stages[0].optimizer.learning_rate == 0.25


@pytest.mark.parametrize("preset", ["ppo", "dr_grpo"])
def test_algorithm_as_name_preset_or_object(preset: str) -> None:
    named = stage_of(algorithm=preset)
    assert stage_of(algorithm=PRESETS[preset]) == named
    row = stage_of(algorithm=PRESETS[preset].algorithm).algorithm
    assert row.model_dump() | {"preset": preset} == named.algorithm.model_dump()
    assert stage_of(algorithm=named.algorithm).algorithm == named.algorithm


def test_data_is_written_to_a_file() -> None:
    jsonl = collect_inputs(data=ROWS, eval_data=ROWS[:3])
    assert sorted(jsonl.tables) == ["data.jsonl", "eval_data.jsonl"]
    (task,) = jsonl.recipe["stages"][-1]["tasks"]
    assert task == {
        "name": "jsonl",
        "path": "$RUN/inputs/data.jsonl",
        "validation_path": "$RUN/inputs/eval_data.jsonl",
    }
    again = [json.loads(line) for line in jsonl.tables["data.jsonl"].splitlines()]
    assert again == ROWS
    table = collect_inputs(data=Dataset.from_list(ROWS))
    assert sorted(table.tables) == ["data.parquet"]
    assert collect_inputs(data=Dataset.from_list(ROWS)).tables == table.tables
    answers = [{"prompt": "1", "answer": "2"}]
    for data in (answers, Dataset.from_list(answers)):
        assert collect_inputs(data=data).recipe["stages"][-1]["tasks"][0]["answer"] == "answer"
        assert (
            "answer"
            not in collect_inputs(data=data, rewards=first).recipe["stages"][-1]["tasks"][0]
        )
    pairs = [{"prompt": "1", "chosen": "2", "rejected": "3"}]
    stage = collect_inputs(stage="dpo", data=pairs).recipe["stages"][-1]
    assert stage["data"] == {"name": "jsonl", "path": "$RUN/inputs/data.jsonl"}
    assert collect_inputs(data="rows.parquet").recipe["stages"][-1]["tasks"] == [
        {"name": "parquet", "path": "rows.parquet"}
    ]


def test_functions_get_unique_names() -> None:
    def other(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    other.__name__ = "first"
    rewards = [first, {"function": other, "weight": 0.5}, "exact_match", lambda completions: []]
    made = collect_inputs(rewards=rewards, demonstration=length)
    names = [one["function"] for one in made.recipe["stages"][-1]["rewards"]["functions"]]
    assert names == ["python:first", "python:first_2", "exact_match", "python:lambda"]
    assert made.functions["first"] is first
    assert made.functions["first_2"] is other
    assert made.recipe["stages"][-1]["demonstration"] == "python:length"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": tiny()}, "needs its loaded tokenizer"),
        ({"model": "x", "tokenizer": TOKENIZER}, "leave tokenizer out"),
        ({"tokenizer": TOKENIZER}, "pass model=, too"),
        ({"model": tiny(), "tokenizer": "x"}, "needs its loaded tokenizer"),
        ({"model": tiny().state_dict(), "tokenizer": TOKENIZER}, "cannot be trained"),
        ({"data": "rows.csv"}, "data: 'rows.csv' is not a .jsonl"),
        ({"data": {"prompt": ["1"]}}, "a table of columns: pass rows"),
        ({"model": 3}, "a int cannot be trained"),
        ({"data": 3}, "data: a int cannot be data"),
        ({"data": SPLITS}, 'the splits train, test: pass one, .*data=splits."train"'),
        ({"data": ROWS, "eval_data": SPLITS}, "eval_data: a DatasetDict has the splits"),
        ({"data": ["1"]}, r"data\[0\]: a str: give a dict of columns"),
        ({"data": [{"prompt": {1}}]}, r"data\[0\]: .*set.*: use texts"),
        ({"eval_data": ROWS}, "pass data=, too"),
        ({"data": "x.jsonl", "eval_data": Dataset.from_list(ROWS)}, "of the same type"),
        ({"rewards": tiny()}, "LlamaForCausalLM is not a function"),
        ({"a..b": 1}, "'a..b' is not a valid key"),
    ],
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        collect_inputs(**wrong)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, called by peft
def test_models_with_peft_adapters_are_refused_with_a_fix() -> None:
    lora = peft.LoraConfig(target_modules="all-linear", r=2)
    wrapped, added = peft.get_peft_model(tiny(), lora), tiny()
    added.add_adapter(lora)
    for model in (wrapped, wrapped.base_model.model, added):
        with pytest.raises(KeelError, match=r"adapters of peft: pass what its merge_and_unload"):
            collect_inputs(model=model, tokenizer=TOKENIZER, data=ROWS)
    assert collect_inputs(model=wrapped.merge_and_unload(), tokenizer=TOKENIZER, data=ROWS).model


def test_failed_start_leaves_no_folder(tmp_path: Path) -> None:
    model = tiny()
    model.generation_config.temperature = 0.5  # not without do_sample, when it is saved
    model.generation_config.do_sample = False
    folder = tmp_path / "run"
    with pytest.raises(KeelError, match="model: it cannot be saved"):
        keel.train(folder=folder, **arguments(model=model))
    keel.train(folder=folder, **arguments(steps=1))
