"""`keel recipes`, `tasks`, `rewards` and `models`: what there is; `keel explain`: its objective."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import TYPE_CHECKING

from keel.cli.main import columns, print_result

if TYPE_CHECKING:
    from keel.algorithms.render import Explanation

SHOWN = 5
"""Prompts of a task that are printed."""


def run_recipes(arguments: argparse.Namespace) -> None:
    """The recipes of `keel train`, and what `keel control` has tuned settings for."""
    from keel.config.control import tuned
    from keel.config.load import expectations, shipped

    recipes, expected = shipped(), expectations()
    lines: list[str] = []
    for name, line in zip(recipes, columns(recipes), strict=True):
        lines.append(line)
        indent = " " * (max(map(len, recipes)) + 2)
        lines += [indent + said for said in expected[name].lines()] if name in expected else []
    lines += ["", "tuned, for keel control:"]
    lines += [f"  keel control {name} --env {environment}" for name, environment in tuned()]
    found = {
        name: {
            "description": text,
            "expected": expected[name].model_dump() if name in expected else None,
        }
        for name, text in recipes.items()
    }
    print_result(arguments, found, lines)


def run_recipes_convert(arguments: argparse.Namespace) -> None:
    """A recipe of another framework's configuration; what became of each key goes to stderr."""
    from keel.config.conversion.convert import convert
    from keel.types import KeelError

    found = convert(arguments.config, getattr(arguments, "from"), vllm=arguments.vllm)
    if arguments.out is not None:
        try:
            with open(arguments.out, "x", encoding="utf-8") as file:
                file.write(found.toml())
        except OSError as error:
            raise KeelError(f"--out {arguments.out}: {error.strerror}: name a new file") from None
    if not arguments.json:
        print("\n".join(found.lines()), file=sys.stderr)
    if arguments.json or arguments.out is None:
        print_result(arguments, found.as_dict(), [found.toml().rstrip()])


def run_tasks(arguments: argparse.Namespace) -> None:
    """The tasks there are, or a few prompts of one."""
    from keel.config.sources import TaskSource
    from keel.data.mixture import build_task, catalogue

    if arguments.show is None:
        found = dict(catalogue())
        print_result(arguments, found, columns(found))
        return
    task = build_task(TaskSource(name=arguments.show), seed=0, whole=True)
    prompts = [task.prompt("train", index) for index in range(SHOWN)]
    pairs = [{"prompt": p.content, "gold": task.gold(p)} for p in prompts]
    lines = [f"prompt  {one['prompt']!r}\ngold    {one['gold']!r}\n" for one in pairs]
    print_result(arguments, pairs, lines)


def run_rewards(arguments: argparse.Namespace) -> None:
    """The built-in rewards, a line each."""
    from keel.rewards.registry import catalogue

    found = dict(catalogue())
    own = "\nfunctions of your own: module:function, or path/to/file.py:function"
    print_result(arguments, found, [*columns(found), own])


def run_models(arguments: argparse.Namespace) -> None:
    """The model families, and which reward models can be made of each."""
    from transformers import CONFIG_MAPPING

    from keel.models.families import FAMILIES
    from keel.models.reward import STOCK, has_classifier

    kinds = {
        family: {kind: has_classifier(CONFIG_MAPPING[family], kind) for kind in STOCK}
        for family in sorted(FAMILIES)
    }
    width = max(map(len, kinds))
    lines = [f"{'family':<{width}}  policy  LoRA  value model  reward model  process reward model"]
    for family, has in kinds.items():
        outcome, process = ("yes" if has[kind] else "no" for kind in ("outcome", "process"))
        lines.append(f"{family:<{width}}  yes     yes   yes          {outcome:<12}  {process}")
    lines.append(
        "\nThe family is model_type in the model's config.json. Tests on a CPU, with a small model"
        "\nof each: packed log-probabilities equal those of transformers; with LoRA the reference"
        "\nis the base; a value model has gradients. A loaded model is compared with transformers"
        "\nagain, and refused if it differs. A family that is not listed is refused."
    )
    print_result(arguments, kinds, lines)


# ---------------------------------------------------------------- explain


def run_explain(arguments: argparse.Namespace) -> None:
    """The objective of a preset, or of each reinforcement-learning stage of a recipe."""
    explanations = _explanations(arguments.recipe, arguments.overrides)
    if arguments.json:
        found = [explanation.json() for explanation in explanations]
        print(json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False, indent=2))
    elif arguments.latex:
        print("\n\n".join(explanation.latex() for explanation in explanations))
    else:
        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 100
        print("\n\n".join(explanation.unicode(width=width) for explanation in explanations))


def _explanations(name: str, overrides: list[str]) -> list[Explanation]:
    from keel.algorithms.explain import explain_preset
    from keel.algorithms.presets import PRESETS
    from keel.config.fields import unknown
    from keel.config.load import load_recipe, shipped
    from keel.config.schema import explain_recipe
    from keel.types import KeelError

    if name in PRESETS and not overrides:
        return [explain_preset(name)]
    if name in PRESETS:
        raise KeelError(
            f"{name!r} is a preset, which takes no overrides: explain a recipe with "
            f"algorithm.preset={name}"
        )
    if not name.endswith(".toml") and "/" not in name and name not in shipped():
        raise KeelError(unknown("recipe or preset", name, [*shipped(), *PRESETS]))
    found = explain_recipe(load_recipe(name, overrides))
    if not found:
        raise KeelError(f"recipe {name!r} has no reinforcement-learning stage to explain")
    return found
