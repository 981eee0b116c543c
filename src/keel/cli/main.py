"""The command line: its commands and arguments, and what runs one and prints its result or error.

Imports nothing heavy, so that help is instant.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from keel.platform.signals import sleep_soon
from keel.version import VERSION

USAGE = 2
FAILURE = 1
UNWRITTEN = (errno.EPIPE, errno.EIO, errno.ENOSPC)
"""Errors of an output without a reader, a closed terminal and a full disk."""
LONGEST = 2_000
"""Characters of an error's line; a value of the user's in it may be a whole file."""
ROLLOUTS = ("show", "score", "-h", "--help")
"""What may follow `keel rollouts`; anything else is of `show`."""
PREFERENCE_KINDS = (
    *("trl", "steps", "hh", "ultrafeedback"),
    *("helpsteer", "helpsteer-preference"),
)
LABEL_SOURCES = ("human", "judge", "rule", "reward_model")
_SOURCES, _SERVER = "|".join(LABEL_SOURCES), "NAME@http://HOST:PORT/v1 or NAME@openai"
COMMANDS: Final = f"""
train -- Run a recipe: fine-tuning, reinforcement learning, evaluation.
  [recipe]
  [overrides...] key=value
  --run DIR
  --resume
  --quiet
  --json
check -- Report what will go wrong with a recipe before it runs.
  recipe
  [overrides...] key=value
  --price PER_HOUR -- of this machine; predicts the cost
  --device NAME -- count the memory of a card that need not be here, and nothing else: h100, h200,
      a100, a100-40, l40s, l4, 4090, … or a size, as in 24GB
  --json
eval -- Evaluate a run or a model: greedy, sampled, pass@k, maj@k, intervals.
  model RUN|MODEL -- a run folder, a model folder or hub name
  --task NAME -- a benchmark (gsm8k, math500, aime24, mmlu, ifeval, humaneval, mbpp) or another task
      by name (keel tasks); a run's own unless given
  --set KEY=VALUE ... -- a key of the task, as in path=test.jsonl (scored wholly) or answer=answer
  --reward FUNCTION ... -- reward, as module:function; also in place of one of the same name that
      was passed in Python
  --checkpoint NAME -- of a run: last (default), best (selected on the validation prompts), or a
      name
  --prompts N -- how many (default 200; of a file that is named, all)
  --samples INT -- completions sampled of each prompt (default 0: greedy only)
  --k K -- values of k of pass@k and maj@k, as in 1,4,16 (default: the number of samples)
  --temperature FLOAT -- of the samples
  --top-k INT -- of the samples
  --top-p FLOAT -- of the samples
  --min-p FLOAT -- of the samples
  --max-tokens N -- of a completion
  --seed INT -- of the samples
  --json
  a reward model, on judged rows (JSONL or Parquet):
  --pairs FILE -- rows of prompt/chosen/rejected
  --labels FILE -- rows of prompt/completion/label
  --steps FILE -- rows of prompt/completions/labels
  --stage NAME -- the run's stage that made the model
  --separator TEXT -- the text between two steps (default: the stage's, or a newline)
  --threshold P -- a step less probably right is a mistake (default: the stage's, or 0.5)
  --pictures DIR -- plot reliability and margins there
chat -- Talk to a run's policy or a model in the terminal, or answer lines from a pipe.
  model RUN|MODEL -- a run folder, a model folder or hub name
  --system TEXT -- the system message
  --temperature T -- 0 is greedy (default: the model's generation config, else 1)
  --top-p P -- default: the model's generation config, else 1
  --max-tokens N -- of an answer (default: what the context leaves)
  --template KEY=VALUE ... -- a keyword of the chat template, as in enable_thinking=false
  --checkpoint NAME -- of a run: last (default), best, or a name
serve -- Serve a run's policy or a model as an OpenAI-compatible endpoint.
  model RUN|MODEL -- a run folder, a model folder or hub name
  --checkpoint NAME -- of a run: last (default), best, or a name
  --host ADDRESS = 127.0.0.1
  --port PORT
  --max-num-seqs N = 32 -- sequences that are decoded together
  --max-tokens N -- of an answer, at most (default: what the context leaves)
  --template KEY=VALUE ... -- a keyword of the chat template, as in enable_thinking=false
  --device auto|cpu|cuda -- default: the recipe's, or a GPU if there is one
explain -- Print the objective that a recipe or preset optimises.
  recipe RECIPE|ALGORITHM -- a recipe or a preset's name
  [overrides...] key=value
  one of:
  --latex -- as LaTeX
  --json
export -- Write a run's policy or reward model as a plain model folder, LoRA merged, with a card.
  run RUN
  [folder] FOLDER -- where to; must not exist (default with --hub: NAME)
  --hub OWNER/NAME -- upload it as a new model of the Hugging Face hub
  --private -- only its owner sees it there
  --checkpoint NAME = last -- last, best (selected on the validation prompts), or a name
  --stage NAME -- the reward model that this stage made
  --adapter -- only the LoRA adapter, for peft
  --json
control -- Q-learning and policy gradients on a Gymnasium environment.
  [algorithm] ALGORITHM|RECIPE -- dqn, a preset (ppo, grpo, reinforce, ...) or a TOML file
  [overrides...] key=value -- override a key, as in steps=20000
  --env ID -- Gymnasium id, as in CartPole-v1
  --run DIR
  --resume
  --quiet
  --json
prefs -- Preference data: import, label, select, export, count costs.
prefs import -- Add preference data to a store.
  kind {"|".join(PREFERENCE_KINDS)}
  path FILE -- its file (JSONL, Parquet)
  --store FILE -- the store; made if there is none (required)
  --keep-empty -- keep the rows in which an answer is empty
  --source {_SOURCES} -- who made the labels (default: the kind's, human)
  --annotator NAME -- the person or model of the labels
  --round INDEX
  --json
prefs export -- Write a store's labels as rows of prompt/chosen/rejected, or of labelled steps.
  store STORE
  --out FILE -- JSONL, or .parquet; must not exist (required)
  --steps -- rows of prompt/completions/labels instead
  --source {_SOURCES} ... -- only labels of it
  --annotator NAME ... -- only labels of it
  --round INDEX ... -- only labels of it
  --json
prefs stats -- Counts, lengths, duplicates, how far the judges agree.
  files... FILE -- stores, or rows (JSONL, Parquet)
  --json
prefs synthesize -- Have models write completions of prompts, and a judge compare them in both
      orders.
  store STORE -- the store; made if there is none
  --prompts FILE -- JSONL or Parquet (default: the store's prompts)
  --model MODEL ... -- writes completions: {_SERVER}, or a model
      folder
  --judge MODEL -- compares pairs: {_SERVER}
  --samples N -- of each model (default 4)
  --pairs COUNT -- at most, a prompt (default 6)
  --reference COLUMN -- an answer with full marks
  --temperature T -- default 1
  --top-p P -- default 1
  --max-tokens N -- default 512
  --max-num-seqs N -- of a folder, at once
  --device auto|cpu|cuda -- of a model folder
  --round INDEX
  --seed INDEX -- of what is random (default 0)
  --price MODEL=IN,OUT ... -- dollars for a million input and output tokens
  --api-key-env MODEL=VARIABLE ... -- the environment variable of its API key
  --model-set KEY=VALUE ... -- an option of the models' servers, as in timeout=300
  --judge-set KEY=VALUE ... -- an option of the judge, as in max_tokens=1024
  --budget DOLLARS -- the most that the store may cost in all
  --forecast-prompts N -- that it is made from (default 4)
  --only-forecast -- pay for its prompts, then stop
  --json
  one of:
  --rubric TEXT -- what counts, for the judge
  --rubric-file FILE -- a text file of it
prefs audit -- How a judge compared pairs: order, position, length, its own completions, people.
  store STORE
  --json
prefs annotate -- Serve local web pages on which people label the pairs of a store.
  store STORE
  --rubric FILE -- instructions: Markdown or text
  --overlap N = 1 -- people a pair
  --round INDEX -- only pairs of this round
  --gold FILE -- rows of prompt/chosen/rejected with the known answer
  --gold-rate P = 0.1 -- their share
  --wage PER_HOUR -- dollars; a label's cost is its time's
  --seed INT = 0 -- of the sides and of gold
  --host ADDRESS = 127.0.0.1
  --port PORT
  --no-browser
prefs select -- Choose which pairs of a store people label next.
  store STORE
  --model RUN|FOLDER -- an outcome reward model, whose hidden states are the features
  --stage NAME -- the run's stage that made the model
  --by d_optimal|bald|margin|random -- default: d_optimal, without a model random
  --count N = 100 -- how many pairs
  --round INDEX -- choose among the pairs of this round
  --source {_SOURCES} ... -- only these labels teach
  --pool N -- choose among N pairs, and learn from N, at random (default: all)
  --seed INDEX = 0 -- of what is random
  --out FILE -- the chosen pairs as JSONL; must not exist
  --json
prefs costs -- What labels and completions cost, by round.
  store STORE -- a preference store, or a run folder: its store and its steps
  --gpu-price DOLLARS -- of an hour of a run's steps
  --json
  add an entry to the ledger:
  --add ID -- its id, so that it is counted once
  --kind api|human|gpu -- what it went to
  --amount X -- how much
  --unit dollars|hours -- default dollars
  --purpose TEXT -- what for
  --round INDEX
  --forecast -- expected, and not spent yet
runs -- Run folders: list, tag, delete, compare.
runs list -- The runs in a folder: state, steps, newest figures, time, disk use, tags.
  [folder] FOLDER = runs -- a folder of runs
  --json
runs tag -- Mark a run with words.
  run RUN
  tags... TAG -- letters, digits and . _ : + -
  --json
runs untag -- Take tags of a run away.
  run RUN
  tags... TAG -- which
  --json
runs delete -- Delete runs, or only their checkpoints.
  runs... RUN -- run folders that no process writes
  --yes -- do not ask
  --json
  one of:
  --keep-last-checkpoint -- only checkpoints, all but the newest whole one
  --checkpoints-only -- only checkpoints, all
runs diff -- The first step, sequence and token at which two runs differ, and in what.
  a RUN
  b RUN
  --json
rollouts -- What a run sampled: shown, or scored by another reward.
rollouts show -- Print prompts, completions, rewards (keel rollouts RUN is short for it).
  run RUN
  --step INDEX -- which step (required)
  --stage NAME -- if several stages sample
  -n N -- how many (default 5; as JSON all)
  --json
rollouts score -- Score stored rollouts by other rewards, next to the stored values.
  run RUN
  --reward FUNCTION ... -- a built-in, module:function or file.py:function (required)
  --set KEY=VALUE ... -- an option of the reward, as in target=3
  --step INDEX -- of which step (default: all that are stored)
  --stage NAME -- if several stages sample
  -n N = 5 -- how many of the rows that differ most
  --json
diagnose -- Report what went wrong in a run: evidence, causes, keys to change.
  run RUN -- a run folder, also of a run that goes on
  --json
compare -- Compare algorithms or recipes over seeds, with intervals and costs.
  recipes... RECIPE -- TOML files or names of shipped recipes; key=value sets a key in all of them
  --algorithms A,B -- presets, as in grpo,gspo,ppo
  --vary KEY=A,B ... -- values of a key, each with each algorithm
  --seeds N = 10 -- how many
  --first-seed INT = 0 -- the first of them
  --baseline ARM -- compare every other with this one (default: all pairs)
  --out DIR -- default: comparisons/NAME; goes on there
  --jobs N -- runs at a time (default: one a core)
  --no-shared-start -- train the stages before reinforcement learning in every run, not once a seed
  --json
view -- Show runs as local web pages, live while they train.
  folders... FOLDER -- run folders, or folders of them
  --host ADDRESS = 127.0.0.1
  --port PORT
  --price PER_HOUR -- of the machine; shows the cost so far
  --no-browser
report -- Write a run's report: one HTML file, and a PNG.
  run RUN
  --out FILE -- default: RUN/report.html
  --price PER_HOUR -- of the machine
  --json
doctor -- Show what this machine has, what that enables, and the command that adds what is missing.
  --json
recipes -- List the shipped recipes.
  --json
recipes convert -- Turn a configuration of TRL, verl or OpenRLHF into a recipe.
  config CONFIG -- a YAML or JSON file, a shell script with the command line, or a Python script
  --from trl|verl|openrlhf -- whose it is (default: by its keys)
  --vllm -- keep vLLM as the engine if it is there
  --out FILE -- the recipe; must not exist (default: printed)
  --json
rewards -- List the built-in rewards.
  --json
models -- List the model families that work.
  --json
tasks -- List the tasks there are.
  --show TASK -- print a few prompts of a task
  --json
"""
"""Each command with its help, and its arguments: `[x]` may be left out, `x...` may be
several words; an option without a placeholder is a flag; ` ...` after it: it may be given several
times.

A placeholder may be the choices, or have a default; its name gives the type (`TYPES`). A line that
ends with a colon is the title of the options after it.
"""
HELP: Final = {
    "recipe": "a TOML file or the name of a shipped recipe (keel recipes)",
    "overrides": "override a key, as in rl.steps=50",
    "run": "a run folder",
    "a": "a run folder",
    "b": "a run folder",
    "store": "a preference store",
    "kind": "what the file holds: %(choices)s",
    "--run": "run folder (default: the next free in runs/)",
    "--resume": "go on from the run folder's newest checkpoint",
    "--quiet": "print nothing but errors",
    "--json": "print the result as JSON",
    "--round": "the round (default 0)",
    "--host": "where to listen, by default this machine only",
    "--port": "default: 8765, or a free one",
    "--no-browser": "only print the address",
}
"""Of arguments whose line has none."""
MODULES: Final = {
    **dict.fromkeys(("explain", "recipes", "tasks", "rewards", "models"), "lists"),
    **dict.fromkeys(("diagnose", "report", "view"), "runs"),
    **dict.fromkeys(("runs list", "runs tag", "runs untag", "runs delete"), "folders"),
    **{"export": "eval", "control": "train", "recipes convert": "lists"},
    "prefs synthesize": "prefs_synthesize",
}
"""The file of a command or action; of others it has the command's name. It has `run_COMMAND`, or
`run` for all its commands."""


def _number(kind: Callable[[str], float], least: float, most: float, wanted: str) -> Any:
    """A type for argparse: the numbers from `least` to `most`."""

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} is not {wanted}")
        return value

    read.__name__ = kind.__name__
    return read


_POSITIVE = _number(int, 1, 2**63, "1 or more")
_PRICE = _number(float, 0, 1e300, "a number from 0 on")


def _numbers(text: str) -> list[int]:
    """Whole numbers from 1, with commas between them."""
    return [_POSITIVE(part) for part in text.split(",")]


TYPES: Final[dict[str, Any]] = {
    "INT": int,
    "K": _numbers,
    "FLOAT": float,
    "N": _POSITIVE,
    "PORT": _number(int, 1, 65_535, "a port, 1 to 65535"),
    **dict.fromkeys(("INDEX", "COUNT"), _number(int, 0, 2**63, "0 or more")),
    "P": _number(float, 0, 1, "between 0 and 1"),
    **dict.fromkeys(("PER_HOUR", "DOLLARS", "X", "T"), _PRICE),
}


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake is one line."""

    def error(self, message: str) -> NoReturn:
        line = " ".join(message.split())[:1_000]
        self.exit(2, f"keel: error: {line} (see {self.prog} --help)\n")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command; overrides may be before, between or after its options."""
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["rollouts"] and words[1:] and words[1] not in ROLLOUTS:
        words.insert(1, "show")
    arguments, rest = parser.parse_known_args(words)
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
    subparsers: dict[str, Any] = {
        "": parser.add_subparsers(
            title="commands", metavar="COMMAND", required=True, parser_class=Parser
        )
    }
    made: dict[str, Parser] = {}
    command: Any = parser
    place: Any = parser
    for line in COMMANDS.strip().replace("\n      ", " ").splitlines():
        text, _, help = line.strip().partition(" -- ")
        if not line.startswith(" "):
            above, _, name = text.rpartition(" ")
            if above not in subparsers:
                alone = len(made[above]._actions) > 1  # more than --help: a command by itself
                subparsers[above] = made[above].add_subparsers(
                    dest="action", metavar="ACTION", required=not alone, parser_class=Parser
                )
            command = subparsers[above].add_parser(name, help=help, description=help)
            module = f"keel.cli.{MODULES.get(text, above or name)}"
            command.set_defaults(module=module, command=text)
            place = made[text] = command
        elif text == "one of:":
            place = command.add_mutually_exclusive_group()
        elif text.endswith(":"):
            place = command.add_argument_group(text.removesuffix(":"))
        else:
            _add_argument(place, text, help)
    made["compare"].set_defaults(overrides=[])
    return parser


def _add_argument(place: Any, text: str, help: str) -> None:
    """Add the argument that a line of `COMMANDS` describes."""
    word, _, placeholder = text.partition(" ")
    name = word.strip("[].")
    placeholder, _, default = placeholder.partition(" = ")
    placeholder, several, _ = placeholder.partition(" ...")
    help = help or HELP[name]
    options: dict[str, Any] = {}
    if word != name:
        options["nargs"] = "?" if "..." not in word else "*" if word.startswith("[") else "+"
    if help.endswith(" (required)"):
        options["required"] = True
    if default:
        options["default"] = TYPES.get(placeholder, str)(default)
        help += " (default %(default)s)"
    if several:
        options |= {"action": "append", "default": []}
        help += "; may be given several times"
    if "|" in placeholder and placeholder.islower():
        options["choices"] = placeholder.split("|")
    elif placeholder:
        options |= {"metavar": placeholder, "type": TYPES.get(placeholder, str)}
    elif name.startswith("-"):
        options["action"] = "store_true"
    place.add_argument(name, help=help, **options)


# ---------------------------------------------------------------- running one


def main(argv: Sequence[str] | None = None) -> int:
    """0 on success, 2 on a usage or input error (one line on stderr), 128+n on signal n."""
    # No command may reach a hub unless a recipe names one; telemetry of libraries stays off.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sleep_soon()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    arguments = parse(argv)
    try:
        module = importlib.import_module(arguments.module)
        name = f"run_{arguments.command.replace(' ', '_')}"
        code = (getattr(module, name, None) or module.run)(arguments)
        sys.stdout.flush()
        return int(code or 0)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """One line for a user's mistake; whatever else it is goes on as the bug that it is."""
    from keel.config.secrets import without_secrets
    from keel.types import KeelError

    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        error = KeelError(
            f"the path {str(error.filename)[:60]}… is too long for a path: shorten it"
        )
    if isinstance(error, OSError) and error.filename is None and error.errno in UNWRITTEN:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python reports it again as it ends
        if error.errno == errno.EPIPE:  # as in keel tasks | head
            return FAILURE
        error = KeelError(f"cannot write the output: {error.strerror}: write it elsewhere")
    if not isinstance(error, KeelError):
        raise error
    print(f"keel: error: {one_line(without_secrets(str(error)))}", file=sys.stderr)
    return USAGE


def one_line(text: str) -> str:
    """A text on one line, of bounded length, that no terminal takes for commands.

    Characters that do not print, halves of characters too, are shown by their number.
    """
    words = " ".join(text.split())
    if len(words) > LONGEST:
        words = f"{words[: LONGEST // 2]} … {words[-LONGEST // 2 :]}"
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in words
    )


def print_result(arguments: argparse.Namespace, result: Any, lines: Iterable[str]) -> None:
    """Print a result as JSON if that is asked for, else its lines.

    JSON is in ASCII: texts in it may come from a policy, or another's run folder.
    """
    from keel.runs.values import plain

    print(json.dumps(plain(result)) if arguments.json else "\n".join(lines))


def columns(entries: Mapping[str, str]) -> Iterator[str]:
    """Names and descriptions in two columns."""
    width = max(map(len, entries))
    return (f"{name:<{width}}  {description}" for name, description in entries.items())
