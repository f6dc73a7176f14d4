"""Named runs: each is a function that returns a whole configuration, to which overrides are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grpo_lib.config import RunConfig


def embedded_addition() -> RunConfig:
    """Sums x + y with the shipped 276 k-parameter Qwen3: two CPU ranks and one CPU engine, minutes on two cores.

    The section defaults are this recipe.
    """
    return RunConfig(recipe="embedded_addition")


RECIPES: Mapping[str, Callable[[], RunConfig]] = {recipe.__name__: recipe for recipe in (embedded_addition,)}
default_recipe = embedded_addition
