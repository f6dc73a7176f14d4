"""Every mistake in the gate's options ends in `start`, with the names in question."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.config import resolve
from grpo_lib.errors import ConfigError, DataError, PreflightError
from grpo_lib.stages import begin, parity_begin
from grpo_lib.stages.frozen_rollouts import FrozenRollouts, check_digests
from grpo_lib.stages.parity_begin import ParitySetup
from grpo_lib.stages.run_paths import RunPaths

BOTH = ("olmo_core", "hf_deepspeed")


def start(root: Path, *overrides: str, **changes: Any) -> ParitySetup:
    arguments: dict[str, Any] = {"recipe": None, "trainers": BOTH, "seed": None, "rollouts": None}
    return parity_begin.run(overrides=[f"storage.root={root}", *overrides], **arguments | changes)


@pytest.fixture
def stored(tmp_path: Path) -> RunPaths:
    """The folder of a run that wrote down three steps and no more."""
    config = resolve("embedded_addition", [f"storage.root={tmp_path}", "loop.steps=3", "seed=7"])
    paths = begin.record(begin.check(config), "GRPOFlow/1")
    lines = ({"step": step, "key": "0" * 64, "size_bytes": 1, "kind": "table"} for step in (1, 2, 3))
    Path(paths.store).mkdir(exist_ok=True)
    paths.rollout_index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return paths


def test_fresh_rollouts_are_those_that_are_replayed(tmp_path: Path) -> None:
    setup = start(tmp_path, "parity.replay_steps=7", seed=3)
    assert setup.run.config.loop.steps == setup.run.config.parity.replay_steps == 7
    assert setup.run.config.trainer.backend == "olmo_core", "the first one leads"
    assert (setup.run.config.seed, setup.trainers, setup.rollouts) == (3, BOTH, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainers": ("olmo_core", "megatron")}, r"trainer\.backend \(megatron\)"),
        ({"trainers": ("olmo_core", "olmo_core")}, r"--trainers \(olmo_core,olmo_core\): name two different trainers"),
        ({"trainers": ("olmo_core",)}, r"--trainers \(olmo_core\): name two different trainers"),
        ({"trainers": ()}, r"--trainers \(\): name two different trainers"),
        ({"recipe": "embeded_addition"}, "did you mean embedded_addition"),
        ({"runs_a": ["1"]}, "--runs-a and --runs-b come together"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(tmp_path, **changes)


def test_steps_are_set_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loop\.steps is parity\.replay_steps here"):
        start(tmp_path, "loop.steps=5")


@pytest.mark.parametrize("changes", [{"rollouts": "no/such/run"}, {"runs_a": ["no/such/run"], "runs_b": ["x"]}])
def test_a_run_that_does_not_exist_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="'no/such/run' is neither the folder of a run nor a Metaflow run id"):
        start(tmp_path, **changes)


def test_a_stored_run_brings_its_configuration(tmp_path: Path, stored: RunPaths) -> None:
    with pytest.raises(DataError, match=r"evaluation\.json is missing"):
        start(tmp_path / "other", "parity.replay_steps=3", rollouts=str(stored.run))
    with pytest.raises(DataError, match=r"stored 3 steps and parity\.replay_steps is 20; name a longer run, or --set"):
        start(tmp_path / "other", rollouts=str(stored.run))


@pytest.mark.parametrize("override", ["trainer.learning_rate=1e-4", "rollout.group_size=8", "loop.steps=3", "seed=7"])
def test_what_was_sampled_cannot_be_changed(tmp_path: Path, stored: RunPaths, override: str) -> None:
    with pytest.raises(ConfigError, match=f"--set {override}: the rollouts of GRPOFlow/1 were sampled as they were"):
        start(tmp_path, override, rollouts=str(stored.run))


@pytest.mark.parametrize(("changes", "message"), [({"seed": 8}, r"--seed \(8\)"), ({"recipe": "x"}, r"--recipe \(x\)")])
def test_what_contradicts_a_stored_run_is_named(
    tmp_path: Path, stored: RunPaths, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"{message} is not that of the rollouts: GRPOFlow/1 has"):
        start(tmp_path, rollouts=str(stored.run), **changes)


def test_two_live_trainers_must_fit(tmp_path: Path) -> None:
    pool = {"cpu": 3, "memory": 65536, "disk": 65536, "persistent_volume_claims": {"runs": "/runs"}}
    assert start(tmp_path, "runtime.cpus_per_rank=0.75", pool=pool)
    with pytest.raises(PreflightError, match=r"lockstep replay keeps two trainers live: 4 ranks x 1 = 4 CPUs of 3"):
        start(tmp_path, "runtime.cpus_per_rank=1.0", pool=pool)


def test_trainers_that_read_other_rollouts_are_refused_by_name() -> None:
    frozen = FrozenRollouts(
        run="runs/1", run_id="GRPOFlow/1", steps=3, policy_version=3, probe_tokens=9, engine_score=None, digest="a",
        seconds=1.0,
    )  # fmt: skip
    check_digests(frozen, {"olmo_core": "a", "hf_deepspeed": "a"})
    with pytest.raises(DataError, match="GRPOFlow/1 has a, but read were hf_deepspeed b"):
        check_digests(frozen, {"olmo_core": "a", "hf_deepspeed": "b"})
