"""Environments of the package verifiers, made here, whose agent is the policy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from keel.cli.main import main
from keel.engines.endpoint.programs import ProgramConfig, sample_with_program
from keel.engines.endpoint.verifiers import run, tasks
from keel.models.chat import ChatEncoder
from keel.platform.calls import LoopThread
from keel.runs import reader
from keel.types import Group, KeelError, Prompt, Sampling
from tests.engines.spelling import TOKENIZER, SpellingEngine, check_written

pytest.importorskip("verifiers")
pytestmark = [pytest.mark.verifiers, pytest.mark.slow]

SUMS = """
import json
from openai import AsyncOpenAI
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: str = ""

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def rounds(self, trace) -> float:
        return float(trace.num_turns)

class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(8):
            yield SumTask(SumData(prompt=f"{n}+20+3?", answer=str(n + 23)), self.config.task)
"""
HARNESS = '''
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

class AddingHarness(vf.Harness[vf.HarnessConfig]):
    """Executes the tool until the policy calls it no more."""

    EXECUTES_CODE = NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        if isinstance(prompt, str):
            prompt = [vf.UserMessage(content=prompt)]
        messages = [message.model_dump(exclude_none=True) for message in prompt]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            while True:
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, tools=TOOLS
                )
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for call in message.tool_calls or []:
                    total = sum(json.loads(call.function.arguments).values())
                    messages.append(
                        {"role": "tool", "tool_call_id": call.id, "content": str(total)}
                    )
                if not message.tool_calls:
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")

__all__ = ["Sums", "AddingHarness"]
'''
USER = '''
class Asking(vf.Env[vf.SingleAgentEnvConfig]):
    """The environment is the user, who asks again."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            first = await interaction.turn()
            await interaction.turn(f"are you sure of {first.last_reply}?")

__all__ += ["Asking"]
'''
TOOLSET = '''
class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

SumTask.toolsets = classmethod(lambda cls, config: [Calculator(vf.ToolsetConfig())])
__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
'''
CALL = '<tool_call>{"name": "%s", "arguments": {"a": %d, "b": %d}}</tool_call>'


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Writes a module, and returns the settings of an environment that names it."""

    def write(name: str, *parts: str, **agent: Any) -> dict[str, Any]:
        (tmp_path / f"{name}.py").write_text("".join(parts), encoding="utf-8")
        return {"taskset": {"id": name}, "agent": {"runtime": {"type": "subprocess"}, **agent}}

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for servers of tools
    monkeypatch.setenv("HOME", str(tmp_path))  # what verifiers keeps
    return write


def sample(engine: Any, settings: Mapping[str, Any], n: int = 2, tokens: int = 900) -> list[Group]:
    rows = tasks(environment=settings, select={"limit": 2})
    columns = [{key: value for key, value in row.items() if key != "prompt"} for row in rows]
    prompts = [Prompt(f"p{at}", row["prompt"], columns[at]) for at, row in enumerate(rows)]
    config = ProgramConfig(name="verifiers:run", function=run, limit=4, timeout=300.0)
    parts = {"program": config, "chat": ChatEncoder(TOKENIZER), "loop": LoopThread()}
    return sample_with_program(engine, prompts, n, Sampling(tokens), 3, **parts)


def adds(tool: str) -> Callable[[str, int], str]:
    """Two calls of the tool, then the sum: wrong for the second prompt's second completion."""

    def line(name: str, turn: int) -> str:
        number = int(name[1])
        wrong = name.endswith("1/0/1")
        calls = [CALL % (tool, 20, 3), CALL % (tool, 23, number)]
        return [*calls, f"It is {0 if wrong else 23 + number}."][turn]

    return line


def check_sums(engine: SpellingEngine, groups: list[Group]) -> None:
    check_written(engine, groups, turns=3)
    for number, group in enumerate(groups):
        for index, completion in enumerate(group.completions):
            results = [turn["content"] for turn in completion.turns if turn["role"] != "assistant"]
            assert results == ["23", str(23 + number)]
            value = 0.0 if (number, index) == (1, 1) else 2.0
            assert completion.columns["reward"] == completion.columns["right"] == value


def test_tool_turns_of_an_environment(made: Callable[..., dict[str, Any]]) -> None:
    engine = SpellingEngine(adds("add"))
    groups = sample(engine, made("vf_sums", SUMS, HARNESS))
    check_sums(engine, groups)
    assert {c.columns["rounds"] for group in groups for c in group.completions} == {3.0}


def test_turns_of_an_environment_that_is_the_user(made: Callable[..., dict[str, Any]]) -> None:
    engine = SpellingEngine(lambda name, turn: ["no", f"name it {23 + int(name[1])}"][turn])
    groups = sample(engine, made("vf_asking", SUMS, HARNESS, USER))
    check_written(engine, groups, turns=2)
    for group in groups:
        for completion in group.completions:
            assert completion.turns[1]["content"] == "are you sure of no?"
            assert completion.columns == {"right": 2.0, "rounds": 2.0, "reward": 2.0}


@pytest.mark.skipif(shutil.which("uv") is None, reason="the harness starts its program with uv")
def test_the_harness_of_verifiers_with_a_server_of_tools(
    made: Callable[..., dict[str, Any]],
) -> None:
    """Its program is a process of its own and reads streams; the tool is a server of its own."""
    engine = SpellingEngine(adds("calculator_add"))
    check_sums(engine, sample(engine, made("vf_tools", SUMS, TOOLSET, harness={"id": "null"})))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda s: s.replace("float(self.data", "1 / 0 and (self.data"), "division by zero"),
        (lambda s: s.replace("exit_code=0", "exit_code=3"), "HarnessError"),
    ],
    ids=["reward", "harness"],
)
def test_an_episode_that_fails_names_the_reason(
    change: Callable[[str], str], line: str, made: Callable[..., dict[str, Any]]
) -> None:
    settings = made(f"vf_failing_{len(line)}", change(SUMS + HARNESS))
    with pytest.raises(KeelError, match=line) as caught:
        sample(SpellingEngine(lambda name, turn: "no"), settings, n=1)
    assert "'verifiers:run' (prompt 'p" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_episode_without_budget_ends_with_length(made: Callable[..., dict[str, Any]]) -> None:
    """The error that verifiers reports has the text of the refusal."""
    settings = made("vf_short", SUMS, HARNESS)
    for group in sample(SpellingEngine(adds("add")), settings, tokens=75):
        for completion in group.completions:
            assert (completion.finish, len(completion.turns)) == ("length", 1)


def test_settings_that_do_not_load_are_named(made: Callable[..., dict[str, Any]]) -> None:
    settings = made(
        "vf_endless", SUMS.replace("def load", "INFINITE = True\n    def load"), HARNESS
    )
    with pytest.raises(KeelError, match=r"infinite: set select\.limit"):
        tasks(environment=settings)
    with pytest.raises(KeelError, match="nowhere"):
        tasks(environment={"taskset": {"id": "nowhere"}})
    with pytest.raises(KeelError, match="agnet"):
        tasks(environment={**settings, "agnet": {}})
    with pytest.raises(KeelError, match="limt"):
        tasks(environment=settings, select={"limt": 1})


def test_a_recipe_trains_on_an_environment(
    made: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    settings = json.dumps(made("vf_recipe", SUMS, HARNESS, harness={"id": "vf_recipe"}))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f"""
steps = 2
algorithm = "grpo"
[model]
chat_template = "{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
[model.build]
tokenizer = "bytes"
hidden_size = 32
layers = 1
heads = 2
context = 64
[[tasks]]
name = "keel.engines.endpoint.verifiers:tasks"
[tasks.options]
environment = {_toml(json.loads(settings))}
[rollout]
program = "keel.engines.endpoint.verifiers:run"
prompts_per_step = 2
group_size = 2
max_tokens = 8
[evaluation]
prompts = 1
[[rewards.functions]]
function = "returned"
[[rewards.functions]]
function = "returned"
name = "rounds"
weight = 0
options = {{ column = "rounds" }}
""",
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    assert main(["train", str(recipe), "threads=1", "--run", str(folder), "--quiet"]) == 0
    records = reader.load(folder).metrics()
    assert [record["rewards/rounds/mean"] for record in records] == [1.0, 1.0]
    assert [record["reward"] for record in records] == [0.0, 0.0]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)
