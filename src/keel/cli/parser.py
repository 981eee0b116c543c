"""The commands and their arguments; imports nothing heavy, so that help is instant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn, TypeAlias

from keel.version import VERSION


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())[:1_000]
        self.exit(2, f"keel: error: {line} (see {self.prog} --help)\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command; overrides may be before, between or after its options."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange or (rest and not hasattr(arguments, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(strange or rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="keel",
        description="Train language models by reinforcement learning: PPO, GRPO, GSPO and their "
        "relatives, from a laptop's CPU up.",
    )
    parser.add_argument("--version", action="version", version=f"keel {VERSION}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=Parser
    )
    _train(commands)
    _check(commands)
    _eval(commands)
    _explain(commands)
    _export(commands)
    _control(commands)
    _prefs(commands)
    _runs(commands)
    _rollouts(commands)
    _diagnose(commands)
    _compare(commands)
    _view(commands)
    _report(commands)
    _lists(commands)
    return parser


Verbs: TypeAlias = "argparse._SubParsersAction[Parser]"
"""What `add_subparsers` returns; it has no public name."""


def _command(commands: Verbs, name: str, help: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help, description=help)
    command.set_defaults(module=f"keel.cli.{name}")
    return command


def _recipe(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    command.add_argument(
        "recipe", nargs=nargs, help="a TOML file or the name of a shipped recipe (keel recipes)"
    )
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a key, as in rl.steps=50"
    )


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the result as JSON")


def _train(commands: Verbs) -> None:
    command = _command(
        commands, "train", "Run a recipe: fine-tuning, reinforcement learning, evaluation."
    )
    _recipe(command, nargs="?")
    command.add_argument(
        "--run", metavar="DIR", help="run folder (default: the next free in runs/)"
    )
    command.add_argument(
        "--resume", action="store_true", help="go on from the run folder's newest checkpoint"
    )
    command.add_argument("--quiet", action="store_true", help="print nothing but errors")
    _json(command)


def _check(commands: Verbs) -> None:
    command = _command(commands, "check", "Report what will go wrong with a recipe before it runs.")
    _recipe(command)
    command.add_argument(
        "--price",
        type=_price,
        metavar="PER_HOUR",
        help="of this machine; predicts the cost",
    )
    _json(command)


def _eval(commands: Verbs) -> None:
    command = _command(
        commands, "eval", "Evaluate a run or a model: greedy, sampled, pass@k, intervals."
    )
    command.add_argument(
        "model", metavar="RUN|MODEL", help="a run folder, a model folder or hub name"
    )
    command.add_argument("--task", help="a task by name (keel tasks); a run's own unless given")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="key=value",
        help="a key of the task, as in path=test.jsonl (scored wholly) or answer=answer",
    )
    command.add_argument("--reward", action="append", default=[], help="reward, as module:function")
    command.add_argument(
        "--checkpoint",
        help="of a run: last (default), best (selected on the validation prompts), or a name",
    )
    command.add_argument(
        "--prompts", type=_positive, help="how many (default 200; of a file that is named, all)"
    )
    command.add_argument("--samples", type=int, default=None, help="k of pass@k (default 0: none)")
    command.add_argument("--temperature", type=float, default=None)
    command.add_argument("--top-k", type=int, default=None)
    command.add_argument("--top-p", type=float, default=None)
    command.add_argument("--min-p", type=float, default=None)
    command.add_argument("--max-tokens", type=_positive, default=None)
    command.add_argument("--seed", type=int, default=None)
    judged = command.add_argument_group("a reward model, on judged rows (JSONL or Parquet)")
    judged.add_argument("--pairs", metavar="FILE", help="rows of prompt/chosen/rejected")
    judged.add_argument("--labels", metavar="FILE", help="rows of prompt/completion/label")
    judged.add_argument("--steps", metavar="FILE", help="rows of prompt/completions/labels")
    judged.add_argument("--stage", metavar="NAME", help="the run's stage that made the model")
    judged.add_argument(
        "--separator", help="the text between two steps (default: the stage's, or a newline)"
    )
    judged.add_argument(
        "--threshold",
        type=_probability,
        metavar="P",
        help="a step less probably right is a mistake (default: the stage's, or 0.5)",
    )
    judged.add_argument("--pictures", metavar="DIR", help="plot reliability and margins there")
    _json(command)


def _explain(commands: Verbs) -> None:
    command = _command(
        commands, "explain", "Print the objective that a recipe or preset optimises."
    )
    command.add_argument("recipe", metavar="RECIPE|ALGORITHM", help="a recipe or a preset's name")
    command.add_argument("overrides", nargs="*", metavar="key=value")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--latex", action="store_true", help="as LaTeX")
    form.add_argument("--json", action="store_true", help="as JSON")


def _export(commands: Verbs) -> None:
    command = _command(
        commands,
        "export",
        "Write a run's policy or reward model as a plain model folder, LoRA merged.",
    )
    command.add_argument("run", metavar="RUN", help="a run folder")
    command.add_argument("folder", metavar="FOLDER", help="where to; must not exist")
    command.add_argument(
        "--checkpoint",
        default="last",
        help="last (default), best (selected on the validation prompts), or a name",
    )
    command.add_argument("--stage", metavar="NAME", help="the reward model that this stage made")
    command.add_argument("--adapter", action="store_true", help="only the LoRA adapter, for peft")
    _json(command)


def _control(commands: Verbs) -> None:
    command = _command(
        commands, "control", "Q-learning and policy gradients on a Gymnasium environment."
    )
    command.add_argument(
        "algorithm",
        nargs="?",
        metavar="ALGORITHM|RECIPE",
        help="dqn, a preset (ppo, grpo, reinforce, ...) or a TOML file",
    )
    command.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a key, as in steps=20000"
    )
    command.add_argument("--env", metavar="ID", help="Gymnasium id, as in CartPole-v1")
    command.add_argument(
        "--run", metavar="DIR", help="run folder (default: the next free in runs/)"
    )
    command.add_argument(
        "--resume", action="store_true", help="go on from the run folder's newest checkpoint"
    )
    command.add_argument("--quiet", action="store_true", help="print nothing but errors")
    _json(command)


PREFERENCE_KINDS = (
    *("trl", "steps", "hh", "ultrafeedback"),
    *("helpsteer", "helpsteer-preference"),
)
LABEL_SOURCES = ("human", "judge", "rule", "reward_model")


def _prefs(commands: Verbs) -> None:
    command = _command(
        commands, "prefs", "Preference data: import, label, select, export, count costs."
    )
    actions = command.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    help = "Add preference data to a store."
    importing = actions.add_parser("import", help=help, description=help)
    importing.add_argument(
        "kind", choices=PREFERENCE_KINDS, metavar="KIND", help=", ".join(PREFERENCE_KINDS)
    )
    importing.add_argument("path", metavar="FILE", help="its file (JSONL, Parquet)")
    help = "the store; made if there is none"
    importing.add_argument("--store", metavar="FILE", required=True, help=help)
    importing.add_argument(
        "--keep-empty", action="store_true", help="keep the rows in which an answer is empty"
    )
    importing.add_argument(
        "--source", choices=LABEL_SOURCES, help="who made the labels (default: the kind's, human)"
    )
    importing.add_argument("--annotator", metavar="NAME", help="the person or model of the labels")
    importing.add_argument("--round", type=_index, metavar="N", help="the round (default 0)")
    _json(importing)
    help = "Write a store's labels as rows of prompt/chosen/rejected, or of labelled steps."
    export = actions.add_parser("export", help=help, description=help)
    export.add_argument("store", metavar="STORE", help="a preference store")
    export.add_argument(
        "--out", metavar="FILE", required=True, help="JSONL, or .parquet; must not exist"
    )
    export.add_argument(
        "--steps", action="store_true", help="rows of prompt/completions/labels instead"
    )
    help = "only labels of it; may be given several times"
    export.add_argument("--source", action="append", choices=LABEL_SOURCES, help=help)
    export.add_argument("--annotator", action="append", metavar="NAME", help=help)
    export.add_argument("--round", action="append", type=_index, metavar="N", help=help)
    _json(export)
    help = "Counts, lengths, duplicates, how far the judges agree."
    stats = actions.add_parser("stats", help=help, description=help)
    stats.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="stores, or rows (JSONL, Parquet)",
    )
    _json(stats)
    _synthesize(actions)
    _annotate(actions)
    _prefs_select(actions)
    _prefs_costs(actions)


def _synthesize(actions: Verbs) -> None:
    """The options of `keel prefs synthesize` and `keel prefs audit`."""
    module = "keel.cli.prefs_synthesize"
    help = "Have models write completions of prompts, and a judge compare them in both orders."
    command = actions.add_parser("synthesize", help=help, description=help)
    command.set_defaults(module=module)
    command.add_argument("store", metavar="STORE", help="the store; made if there is none")
    command.add_argument(
        "--prompts", metavar="FILE", help="JSONL or Parquet (default: the store's prompts)"
    )
    form = "NAME@http://HOST:PORT/v1 or NAME@openai"
    command.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="MODEL",
        help=f"writes completions: {form}, or a model folder; may be given several times",
    )
    command.add_argument("--judge", metavar="MODEL", help=f"compares pairs: {form}")
    command.add_argument("--samples", type=_positive, metavar="N", help="of each model (default 4)")
    command.add_argument("--pairs", type=_index, metavar="K", help="at most, a prompt (default 6)")
    rubric = command.add_mutually_exclusive_group()
    rubric.add_argument("--rubric", metavar="TEXT", help="what counts, for the judge")
    rubric.add_argument("--rubric-file", metavar="FILE", help="a text file of it")
    command.add_argument("--reference", metavar="COLUMN", help="an answer with full marks")
    command.add_argument("--temperature", type=_price, metavar="T", help="default 1")
    command.add_argument("--top-p", type=_probability, metavar="P", help="default 1")
    command.add_argument("--max-tokens", type=_positive, metavar="N", help="default 512")
    command.add_argument("--max-num-seqs", type=_positive, metavar="N", help="of a folder, at once")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), help="of a model folder")
    command.add_argument("--round", type=_index, metavar="N", help="the round (default 0)")
    command.add_argument("--seed", type=_index, metavar="N", help="default 0")
    for option, value, help in (
        ("--price", "MODEL=IN,OUT", "dollars for a million input and output tokens"),
        ("--api-key-env", "MODEL=VARIABLE", "the environment variable of its API key"),
        ("--model-set", "key=value", "an option of the models' servers, as in timeout=300"),
        ("--judge-set", "key=value", "an option of the judge, as in max_tokens=1024"),
    ):
        command.add_argument(option, action="append", default=[], metavar=value, help=help)
    command.add_argument(
        "--budget", type=_price, metavar="DOLLARS", help="the most that the store may cost in all"
    )
    command.add_argument(
        "--forecast-prompts", type=_positive, metavar="N", help="that it is made from (default 4)"
    )
    help = "pay for its prompts, then stop"
    command.add_argument("--only-forecast", action="store_true", help=help)
    _json(command)
    help = "How a judge compared pairs: order, position, length, its own completions, people."
    audit = actions.add_parser("audit", help=help, description=help)
    audit.set_defaults(module=module)
    audit.add_argument("store", metavar="STORE", help="a preference store")
    _json(audit)


def _annotate(actions: Verbs) -> None:
    help = "Serve local web pages on which people label the pairs of a store."
    annotate = actions.add_parser("annotate", help=help, description=help)
    annotate.set_defaults(module="keel.cli.annotate")
    annotate.add_argument("store", metavar="STORE", help="a preference store")
    annotate.add_argument("--rubric", metavar="FILE", help="instructions: Markdown or text")
    annotate.add_argument(
        "--overlap", type=_positive, default=1, metavar="N", help="people a pair (default 1)"
    )
    annotate.add_argument("--round", type=_index, metavar="N", help="only pairs of this round")
    annotate.add_argument(
        "--gold", metavar="FILE", help="rows of prompt/chosen/rejected with the known answer"
    )
    annotate.add_argument(
        "--gold-rate", type=_probability, default=0.1, metavar="P", help="their share (default 0.1)"
    )
    annotate.add_argument(
        "--wage", type=_price, metavar="PER_HOUR", help="dollars; a label's cost is its time's"
    )
    annotate.add_argument(
        "--seed", type=int, default=0, help="of the sides and of gold (default 0)"
    )
    annotate.add_argument(
        "--host", default="127.0.0.1", help="where to listen (default: this machine only)"
    )
    annotate.add_argument("--port", type=_positive, help="default: 8765, or a free one")
    annotate.add_argument("--no-browser", action="store_true", help="only print the address")


def _prefs_select(actions: Verbs) -> None:
    help = "Choose which pairs of a store people label next."
    select = actions.add_parser("select", help=help, description=help)
    select.set_defaults(module="keel.cli.prefs_select")
    select.add_argument("store", metavar="STORE", help="a preference store")
    select.add_argument(
        "--model",
        metavar="RUN|FOLDER",
        help="an outcome reward model, whose hidden states are the features",
    )
    select.add_argument("--stage", metavar="NAME", help="the run's stage that made the model")
    select.add_argument(
        "--by",
        choices=("d_optimal", "bald", "margin", "random"),
        help="default: d_optimal if half of the pairs or more have near-copies, else random; "
        "without a model random",
    )
    help = "how many pairs (default 100)"
    select.add_argument("--count", type=_positive, default=100, metavar="N", help=help)
    help = "choose among the pairs of this round"
    select.add_argument("--round", type=_index, metavar="N", help=help)
    help = "only these labels teach; may be given several times"
    select.add_argument("--source", action="append", choices=LABEL_SOURCES, help=help)
    help = "choose among N pairs, and learn from N, at random (default: all)"
    select.add_argument("--pool", type=_positive, metavar="N", help=help)
    select.add_argument("--seed", type=_index, default=0, metavar="N", help="default 0")
    select.add_argument("--out", metavar="FILE", help="the chosen pairs as JSONL; must not exist")
    _json(select)


def _prefs_costs(actions: Verbs) -> None:
    help = "What labels and completions cost, by round."
    costs = actions.add_parser("costs", help=help, description=help)
    costs.set_defaults(module="keel.cli.prefs_costs")
    help = "a preference store, or a run folder: its store and its steps"
    costs.add_argument("store", metavar="STORE", help=help)
    help = "of an hour of a run's steps"
    costs.add_argument("--gpu-price", type=_price, metavar="DOLLARS", help=help)
    _json(costs)
    entry = costs.add_argument_group("add an entry to the ledger")
    help = "its id, so that it is counted once"
    entry.add_argument("--add", metavar="ID", help=help)
    entry.add_argument("--kind", choices=("api", "human", "gpu"), help="what it went to")
    entry.add_argument("--amount", type=_price, metavar="X", help="how much")
    entry.add_argument("--unit", choices=("dollars", "hours"), help="default dollars")
    entry.add_argument("--purpose", metavar="TEXT", help="what for")
    entry.add_argument("--round", type=_index, metavar="N", help="the round (default 0)")
    entry.add_argument("--forecast", action="store_true", help="expected, and not spent yet")


def _runs(commands: Verbs) -> None:
    command = _command(commands, "runs", "What run folders hold.")
    actions = command.add_subparsers(
        dest="action", metavar="ACTION", required=True, parser_class=Parser
    )
    help = "The first step, sequence and token at which two runs differ, and in what."
    diff = actions.add_parser("diff", help=help, description=help)
    diff.add_argument("a", metavar="A", help="a run folder")
    diff.add_argument("b", metavar="B", help="a run folder")
    _json(diff)


def _rollouts(commands: Verbs) -> None:
    command = _command(
        commands, "rollouts", "Print what a run sampled: prompts, completions, rewards."
    )
    command.add_argument("run", metavar="RUN", help="a run folder")
    command.add_argument("--step", type=_positive, required=True, help="which step")
    command.add_argument("--stage", metavar="NAME", help="where several stages sample")
    command.add_argument(
        "-n", type=_positive, metavar="N", help="how many (default 5; as JSON all)"
    )
    _json(command)


def _compare(commands: Verbs) -> None:
    command = _command(
        commands, "compare", "Compare algorithms or recipes over seeds, with intervals and costs."
    )
    command.add_argument(
        "recipes",
        nargs="+",
        metavar="RECIPE",
        help="TOML files or names of shipped recipes; key=value sets a key in all of them",
    )
    command.add_argument("--algorithms", metavar="A,B", help="presets, as in grpo,gspo,ppo")
    command.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="values of a key, each with each algorithm; may be given several times",
    )
    command.add_argument("--seeds", type=_positive, default=10, help="how many (default 10)")
    command.add_argument("--first-seed", type=int, default=0, help="the first of them (default 0)")
    command.add_argument(
        "--baseline", metavar="ARM", help="compare every other with this one (default: all pairs)"
    )
    command.add_argument("--out", metavar="DIR", help="default: comparisons/NAME; goes on there")
    command.add_argument("--jobs", type=_positive, help="runs at a time (default: one a core)")
    command.add_argument(
        "--no-shared-start",
        action="store_true",
        help="train the stages before reinforcement learning in every run, not once a seed",
    )
    command.set_defaults(overrides=[])
    _json(command)


def _view(commands: Verbs) -> None:
    command = _command(commands, "view", "Show runs as local web pages, live while they train.")
    command.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="run folders, or folders of them"
    )
    command.add_argument(
        "--host", default="127.0.0.1", help="where to listen (default: this machine only)"
    )
    command.add_argument("--port", type=_positive, help="default: 8765, or a free one")
    command.add_argument(
        "--price", type=_price, metavar="PER_HOUR", help="of the machine; shows the cost so far"
    )
    command.add_argument("--no-browser", action="store_true", help="only print the address")


def _report(commands: Verbs) -> None:
    command = _command(commands, "report", "Write a run's report: one HTML file, and a PNG.")
    command.add_argument("run", metavar="RUN", help="a run folder")
    command.add_argument("--out", metavar="FILE", help="default: RUN/report.html")
    command.add_argument("--price", type=_price, metavar="PER_HOUR", help="of the machine")
    _json(command)


def _diagnose(commands: Verbs) -> None:
    command = _command(
        commands, "diagnose", "Report what went wrong in a run: evidence, causes, keys to change."
    )
    command.add_argument("run", metavar="RUN", help="a run folder, also of a run that goes on")
    _json(command)


def _lists(commands: Verbs) -> None:
    _json(_command(commands, "recipes", "List the shipped recipes."))
    _json(_command(commands, "rewards", "List the built-in rewards."))
    _json(_command(commands, "models", "List the model families that work."))
    tasks = _command(commands, "tasks", "List the tasks there are.")
    tasks.add_argument("--show", metavar="TASK", help="print a few prompts of a task")
    _json(tasks)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _index(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is not 0 or more")
    return value


def _price(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no price")
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
