"""Where an attempt starts: at its own checkpoint, under its own configuration, in its own folder; and it says so."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from grpo_lib.config import config_hash, with_overrides
from grpo_lib.errors import ConfigError, DataError
from grpo_lib.stages.adopt import adopt
from grpo_lib.stages.attempts import attempt, attempts_of
from grpo_lib.stages.checkpoints import CheckpointState, CheckpointWriter, ResumePoint
from grpo_lib.stages.continuation import starting_point
from grpo_lib.stages.lost_steps import truncate_to
from grpo_lib.stages.resume_run import changed_config
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import StoredRun, open_run, write_run
from tests.unit.fakes import FakeTrainer
from tests.unit.stored_runs import finished_run

REWARDS = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
SPREAD = (1.0, 0.0)


def stopped_run(root: Path, run_id: str = "GRPOFlow/1", *, steps: int = 3, at: int = 2) -> StoredRun:
    """A run that did some steps and has a checkpoint of step `at`."""
    run = finished_run(root, run_id, rewards=[SPREAD] * steps)
    save(run.paths, at, run_id)
    return run


def save(paths: RunPaths, step: int, run_id: str) -> None:
    writer = CheckpointWriter(paths, FakeTrainer([], version=step), loop=open_run(str(paths.run)).config.loop)
    prompts = {"position": 16 * step, "num_prompts": 800}
    writer.begin(CheckpointState(run_id=run_id, steps_done=step, empty_steps=0, policy_version=step, prompts=prompts))
    writer.recorded(step)
    writer.finish()
    writer.close()


def start(run: StoredRun, *overrides: str) -> ResumePoint | None:
    with attempt(run.paths, stage="fit") as current:
        return starting_point(with_overrides(run.config, overrides), run.paths, current)


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def resume(run: StoredRun, run_id: str, *origins: str, step: str = "fit") -> RunPaths:
    return adopt(
        run.paths,
        run_id=run_id,
        origins=origins or [run.run_id],
        step=step,
        config=run.config,
        config_hash=run.config_hash,
        lineage=run.lineage,
    )


def test_it_continues_from_the_checkpoint_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = stopped_run(tmp_path)
    with caplog.at_level(logging.INFO):
        point = start(run)
    assert point is not None
    assert point.state.steps_done == 2
    assert "continues after step 2 of 3 with policy version 2" in caplog.text
    (noted,) = (line for line in attempts_of(run.paths) if line["event"] == "continues")
    assert (noted["from_step"], noted["policy_version"]) == (2, 2)


def test_a_run_whose_steps_are_done_says_that_nothing_is_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert start(stopped_run(tmp_path, at=3)) is not None
    assert "all 3 steps are done: nothing is trained, the model is exported" in caplog.text


def test_without_a_checkpoint_it_starts_again_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = finished_run(tmp_path, "GRPOFlow/1", rewards=REWARDS)
    with caplog.at_level(logging.INFO):
        assert start(run) is None
        assert "no checkpoint" not in caplog.text, "a first attempt has nothing to say"
        assert start(run) is None
    assert "no checkpoint" in caplog.text


def test_damaged_checkpoints_do_not_make_it_start_again(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    save(run.paths, 3, "GRPOFlow/1")
    for step in (2, 3):
        (run.paths.checkpoints / f"step-{step:06d}" / "loop.json").write_text("{}")
    with pytest.raises(DataError, match=r"none can be used: .*step-000003 .*step-000002 .*move \S+checkpoints else"):
        start(run)
    with pytest.raises(DataError, match="none can be used"):
        resume(run, "GRPOFlow/2")


def test_a_fresh_run_never_sees_what_other_runs_left(tmp_path: Path) -> None:
    """Metaflow's eager policy gives a fresh run the finished checkpoint of another, and nothing is trained."""
    stopped_run(tmp_path, "GRPOFlow/1")
    assert start(finished_run(tmp_path, "GRPOFlow/2", rewards=REWARDS)) is None


def test_a_strangers_checkpoint_is_refused(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "GRPOFlow/2", rewards=REWARDS)
    save(run.paths, 2, "GRPOFlow/1")
    with pytest.raises(DataError, match=r"was written by run GRPOFlow/1, which is neither GRPOFlow/2 nor a run that"):
        start(run)


def test_another_configuration_is_refused_with_the_difference(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.learning_rate is 0\.001 in run GRPOFlow/1 and 0\.01 now"):
        start(run, "trainer.learning_rate=0.01")


def test_changed_code_and_packages_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = stopped_run(tmp_path)
    packages = {**run.lineage["packages"], "torch": "1.0"}
    lineage = {**run.lineage, "packages": packages, "git": {"commit": "abc", "diff_sha256": ""}}
    write_run(run.paths, run_id=run.run_id, config=run.config, config_hash=run.config_hash, lineage=lineage)
    with caplog.at_level(logging.WARNING):
        start(run)
    assert "not as when the run began: packages.torch was 1.0 and is " in caplog.text
    assert "git.commit was abc and is " in caplog.text
    assert any("packages.torch" in change for change in attempts_of(run.paths)[1]["changed"])


@pytest.mark.parametrize(
    ("override", "refusal"),
    [
        ("loop.steps=300", None),
        ("trainer.num_ranks=1", None),
        ("trainer.micro_batch_packs=4", None),
        ("loop.checkpoint_every=7", None),
        ("deadlines.train_s=999", None),
        ("evaluation.samples_per_prompt=8", None),
        ("loop.steps=2", "steps can be added to a run, not taken from it"),
        ("trainer.learning_rate=0.1", "it decides what the run learns"),
        ("trainer.backend=hf_deepspeed", "it decides what the run learns"),
        ("loop.prompts_per_step=8", "it decides what the run learns"),
        ("seed=7", "it decides what the run learns"),
        ("storage.root=/elsewhere", "it decides what the run learns"),
    ],
)
def test_what_a_run_may_change_on_its_way(tmp_path: Path, override: str, refusal: str | None) -> None:
    run = stopped_run(tmp_path)
    if refusal is None:
        assert changed_config(run, [override]) != run.config
        return
    with pytest.raises(ConfigError, match=rf"{override.partition('=')[0]} was .*{refusal}"):
        changed_config(run, [override])


def test_steps_are_not_added_where_the_learning_rate_depends_on_them(tmp_path: Path) -> None:
    run = finished_run(tmp_path, "GRPOFlow/1", rewards=REWARDS, overrides=["trainer.lr_scheduler=cosine"])
    with pytest.raises(
        ConfigError, match=r"with trainer\.lr_scheduler=cosine the learning rate of the steps that were"
    ):
        changed_config(run, ["loop.steps=300"])


def test_a_resumed_run_works_on_copies(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    before = contents(run.paths.run)
    own = resume(run, "GRPOFlow/2")
    assert own.run == run.paths.run.with_name("2")
    assert open_run(str(own.run)).origins == ("GRPOFlow/1",)
    with attempt(own, stage="fit") as current:
        point = starting_point(run.config, own, current)
        assert point is not None
        truncate_to(own, point.state)
    for file in (path for path in own.run.rglob("*") if path.is_file()):
        assert not file.is_symlink()
        assert os.stat(file).st_nlink == 1, f"{file} shares its bytes with the origin"
        file.chmod(0o644)
        file.write_bytes(b"overwritten")
    assert contents(run.paths.run) == before


def test_a_second_attempt_of_a_resumed_step_keeps_what_the_first_did(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    own = resume(run, "GRPOFlow/2")
    save(own, 3, "GRPOFlow/2")
    assert resume(run, "GRPOFlow/2") == own
    point = start(open_run(str(own.run)))
    assert point is not None
    assert point.state.steps_done == 3


def test_a_copy_that_was_cut_off_is_made_anew(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    partial = run.paths.run.with_name("2")
    (partial / "checkpoints" / "step-000009").mkdir(parents=True)
    (partial / "metrics.jsonl").write_text('{"step": 1')
    own = resume(run, "GRPOFlow/2")
    assert sorted(path.name for path in own.checkpoints.iterdir()) == ["step-000002"]
    assert own.metrics.read_bytes() == run.paths.metrics.read_bytes()


def test_the_nearest_origin_that_got_anywhere_is_continued(tmp_path: Path) -> None:
    """2 resumed 1 and got further; 3 resumed 2 and died before it had a folder; 4 resumes 3."""
    first = stopped_run(tmp_path)
    second = resume(first, "GRPOFlow/2")
    save(second, 3, "GRPOFlow/2")
    fourth = resume(first, "GRPOFlow/4", "GRPOFlow/3", "GRPOFlow/2", "GRPOFlow/1")
    point = start(open_run(str(fourth.run)))
    assert point is not None
    assert (point.state.steps_done, point.state.run_id) == (3, "GRPOFlow/2")


def test_a_damaged_checkpoint_of_the_origin_is_not_copied(tmp_path: Path) -> None:
    run = stopped_run(tmp_path)
    save(run.paths, 3, "GRPOFlow/1")
    (run.paths.checkpoints / "step-000003" / "loop.json").write_text("{}")
    own = resume(run, "GRPOFlow/2")
    assert [path.name for path in own.checkpoints.iterdir()] == ["step-000002"]


def test_a_step_before_fit_takes_no_checkpoint_along(tmp_path: Path) -> None:
    own = resume(stopped_run(tmp_path), "GRPOFlow/2", step="sync_weights")
    assert not own.checkpoints.exists()
    assert (own.data / "manifest.json").is_file()
    assert config_hash(open_run(str(own.run)).config) == open_run(str(own.run)).config_hash
