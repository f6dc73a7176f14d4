"""Settings: frozen, closed, hashed; and what `resolve` makes of a recipe and overrides."""

import hashlib
import json

import pytest
from pydantic import ValidationError

from grpo_lib.config import LoopConfig, RunConfig, config_hash, flat, resolve, settings
from grpo_lib.errors import ConfigError

RECIPE = "embedded_addition"


def problems_of(*overrides: str, recipe: str = RECIPE, **flags) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve(recipe, overrides, **flags)
    return caught.value.problems


def only_problem(*overrides: str, **flags) -> str:
    (problem,) = problems_of(*overrides, **flags)
    return problem


def test_sections_are_frozen_and_closed() -> None:
    config = RunConfig(recipe=RECIPE)
    with pytest.raises(ValidationError, match="frozen"):
        config.loop.steps = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="extra"):
        LoopConfig(step=3)  # pyright: ignore[reportCallIssue]


def test_every_setting_says_what_it_means() -> None:
    fields = settings()
    assert {"seed", "trainer.learning_rate", "loop.steps", "recipe"} <= fields.keys()
    assert "trainer" not in fields
    assert [key for key, field in fields.items() if not field.description] == []


def test_flat_is_the_tree_under_dotted_keys() -> None:
    config = RunConfig(recipe=RECIPE)
    assert flat(config).keys() == settings().keys()
    assert flat(config)["evaluation.pass_at"] == [1, 4, 8]
    assert flat(config)["rollout.group_size"] == config.rollout.group_size


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("loop.steps=7", "loop.steps", 7),
        ("trainer.learning_rate=1e-3", "trainer.learning_rate", 1e-3),
        ("trainer.learning_rate=.5", "trainer.learning_rate", 0.5),
        ("trainer.learning_rate=1", "trainer.learning_rate", 1.0),
        ("parity.min_tokens=30_000", "parity.min_tokens", 30_000),
        ("tracking.wandb=true", "tracking.wandb", True),
        ("tracking.wandb=True", "tracking.wandb", True),
        ("algorithm.loss=gspo", "algorithm.loss", "gspo"),
        ('algorithm.loss="gspo"', "algorithm.loss", "gspo"),
        ("evaluation.pass_at=[1, 2]", "evaluation.pass_at", (1, 2)),
        ("evaluation.pass_at=(1, 2)", "evaluation.pass_at", (1, 2)),
        ("storage.root=123", "storage.root", "123"),  # a folder may have a number for a name
        ("storage.root=a=b", "storage.root", "a=b"),
        (" storage.root = runs2 ", "storage.root", "runs2"),
        ("data.train_path=null", "data.train_path", None),
        ("seed=5", "seed", 5),
    ],
)
def test_values_are_read_as_meant(override: str, key: str, value: object) -> None:
    section, _, leaf = key.rpartition(".")
    config = resolve(RECIPE, [override])
    assert getattr(getattr(config, section) if section else config, leaf) == value


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("loop.steps=true", ["loop.steps (true)", "valid integer", "GRPO steps"]),
        ("loop.steps=1.5", ["loop.steps (1.5)", "valid integer"]),
        ('loop.steps="5"', ["loop.steps (5)", "valid integer"]),
        ("loop.steps=", ['loop.steps ("")', "valid integer"]),
        ("loop.steps=0", ["loop.steps (0)", "greater than or equal to 1"]),
        ("trainer.learning_rate=fast", ["trainer.learning_rate (fast)", "valid number", "Peak learning rate"]),
        ("trainer.learning_rate=NaN", ["trainer.learning_rate (NaN)", "finite"]),
        ("deadlines.train_s=Infinity", ["deadlines.train_s (Infinity)", "finite"]),
        ("trainer.learning_rate=1e999", ["trainer.learning_rate (Infinity)", "finite"]),
        ("tracking.wandb=1", ["tracking.wandb (1)", "valid boolean"]),
        ("trainer.backend=olmo", ["trainer.backend (olmo)", "'olmo_core' or 'hf_deepspeed'"]),
        ("rollout.temperature=0", ["rollout.temperature (0)", "greater than 0"]),
        ("evaluation.pass_at=[1, null]", ["evaluation.pass_at ([1, null])", "valid integer"]),
        ("loop.steps={1}", ["loop.steps ({1})", "valid integer"]),  # a Python set is no value
        ("seed=" + "9" * 5000, ["seed (999", "...", "integer"]),
        ("seed=" + "[" * 5000, ["seed ([[[", "...", "integer"]),
        ("seed=4294967296", ["seed (4294967296)", "less than 4294967296"]),
        ("loop.steps", ["'loop.steps'", "key.path=value"]),
        ("=3", ["'=3'", "key.path=value"]),
        ("recipe=other", ["--recipe"]),
        ("trainer=olmo_core", ["trainer is a section", "trainer.backend", "trainer.num_ranks"]),
        ("model.path=\udcff", ["\\udcff", "UTF-8"]),
    ],
)
def test_a_wrong_value_is_named_with_its_rule(override: str, parts: list[str]) -> None:
    message = only_problem(override)
    assert [part for part in parts if part not in message] == []
    assert len(message) < 700


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.lerning_rate", "trainer.learning_rate"),
        ("learning_rate", "trainer.learning_rate"),
        ("rollout.learning_rate", "trainer.learning_rate"),
        ("rolout.max_tokens", "rollout.max_tokens"),
        ("step", "loop.steps"),
    ],
)
def test_a_misspelt_key_gets_a_suggestion(key: str, meant: str) -> None:
    assert only_problem(f"{key}=1") == f"{key} is not a setting; did you mean {meant}?"


def test_a_hopeless_key_gets_a_place_to_look() -> None:
    assert only_problem("qqq=1") == "qqq is not a setting; docs/configuration.md lists all of them"


def test_an_unknown_recipe_gets_a_suggestion() -> None:
    assert only_problem(recipe="embeded_addition").endswith("did you mean embedded_addition?")
    assert only_problem(recipe="zzz") == "recipe 'zzz' does not exist; there are embedded_addition, smollm2_addition"


def test_all_problems_come_at_once() -> None:
    problems = problems_of(
        "trainer.lerning_rate=1", "loop.steps=-1", "rollout.group_size=1", "trainer.pack_length=8", recipe="embedded"
    )
    assert [problem.split(" ")[0] for problem in problems] == [
        "recipe",
        "trainer.lerning_rate",
        "loop.steps",
        "data.max_prompt_tokens",
        "rollout.group_size",
    ]


def test_a_rule_is_not_judged_on_a_stand_in_for_an_invalid_value() -> None:
    """2000 prompt tokens break the pack rule, but with max_tokens unreadable nobody knows by how much."""
    assert len(problems_of("data.max_prompt_tokens=2000")) == 1
    (message,) = problems_of("data.max_prompt_tokens=2000", "rollout.max_tokens=many")
    assert message.startswith("rollout.max_tokens (many)")


def test_rules_of_others_are_reported_along() -> None:
    def too_big(config: RunConfig) -> list[str]:
        return [f"model.path ({config.model.path}) is too big", f"loop.steps ({config.loop.steps}) is odd"]

    problems = problems_of("loop.steps=x", "rollout.group_size=1", more_rules=too_big)
    assert [problem.split(" ")[0] for problem in problems] == ["loop.steps", "rollout.group_size", "model.path"]


def test_contradicting_overrides_are_refused_and_repeated_ones_are_not() -> None:
    assert resolve(RECIPE, ["loop.steps=3", "loop.steps=3"], seed=4).seed == 4
    message = only_problem("loop.steps=3", "loop.steps=4")
    assert message == "loop.steps is 3 by an earlier --set and 4 by --set; keep one of them"
    assert only_problem("seed=3", seed=4) == "seed is 4 by --seed and 3 by --set; keep one of them"
    assert resolve(RECIPE, ["trainer.backend=olmo_core"], trainer="olmo_core").trainer.backend == "olmo_core"
    assert "--trainer" in only_problem("trainer.backend=hf_deepspeed", trainer="olmo_core")


def test_an_unknown_trainer_flag_lists_the_trainers() -> None:
    message = only_problem(trainer="megatron")
    assert "trainer.backend (megatron)" in message
    assert "'olmo_core' or 'hf_deepspeed'" in message


def test_the_hash_names_the_values_and_nothing_else() -> None:
    base = resolve(RECIPE)
    assert config_hash(base) == config_hash(RunConfig.model_validate_json(base.model_dump_json()))
    assert config_hash(base) == config_hash(resolve(RECIPE, ["algorithm.correction_cap=2"]))  # 2 is 2.0
    changed = {config_hash(resolve(RECIPE, [key])) for key in ("seed=2", "loop.steps=151", "storage.root=x")}
    assert len(changed | {config_hash(base)}) == 4


def test_the_hash_is_over_canonical_json() -> None:
    """Worked independently of `config_hash`: sorted keys, no spaces."""
    config = resolve(RECIPE)
    canonical = json.dumps(json.loads(config.model_dump_json()), sort_keys=True, separators=(",", ":"))
    assert config_hash(config) == hashlib.sha256(canonical.encode()).hexdigest()
