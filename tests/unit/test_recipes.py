"""Recipes resolve, carry their own name, and say what they are for."""

import pytest

from grpo_lib.config import RunConfig, resolve
from grpo_lib.recipes import RECIPES, default_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_recipe(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.__doc__
    assert recipe().recipe == name
    assert resolve(name) == recipe()  # no rule is broken, and no override is hidden in `resolve`


def test_the_embedded_recipe_is_the_default() -> None:
    assert default_recipe() == RunConfig(recipe="embedded_addition")
    assert default_recipe.__name__ in RECIPES


def test_overrides_go_on_top_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe's own value survives an invalid override: what is judged along is the recipe, not the default."""
    from grpo_lib.config import LoopConfig
    from grpo_lib.errors import ConfigError

    def longer() -> RunConfig:
        return RunConfig(recipe="longer", loop=LoopConfig(steps=9, prompts_per_step=2))

    monkeypatch.setattr("grpo_lib.recipes.RECIPES", {"longer": longer})
    config = resolve("longer", ["loop.prompts_per_step=3"])
    assert (config.loop.steps, config.loop.prompts_per_step, config.recipe) == (9, 3, "longer")
    with pytest.raises(ConfigError) as caught:
        resolve("longer", ["loop.prompts_per_step=none", "trainer.warmup_steps=9"])
    assert "loop.steps (9)" in caught.value.problems[1]
