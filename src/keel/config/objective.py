"""What a recipe's reinforcement-learning stages optimise, explained with the recipe's numbers."""

from __future__ import annotations

from keel.algorithms.explain import Explanation
from keel.config.schema import Recipe


def explain_recipe(recipe: Recipe) -> list[Explanation]:
    """One explanation for each reinforcement-learning stage, in order."""
    lora = recipe.model.lora is not None
    found = [stage.explain(lora) for stage in recipe.stages]
    return [one for one in found if one is not None]
