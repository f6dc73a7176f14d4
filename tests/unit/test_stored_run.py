"""A run is opened again from its folder: everything that was written comes back, and what is missing is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_lib.algo.advantages import assess_group
from grpo_lib.config import config_hash, resolve
from grpo_lib.errors import DataError
from grpo_lib.loop import StepRecord
from grpo_lib.stages import begin
from grpo_lib.stages.recorder import DiskRecorder
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import StoredRun, open_run, write_evaluation, write_parity, write_run
from grpo_lib.storage.rollouts import write_rollouts
from tests.unit.algo_cases import make_group, make_rollout
from tests.unit.fakes import FakeEngine, FakeSync, FakeTrainer

ROOT = Path(__file__).resolve().parents[2]
RUN_ID = "GRPOFlow/17"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run of two steps, written by the code that writes real ones."""
    config = resolve("embedded_addition", ["loop.steps=2", f"storage.root={tmp_path / 'runs'}"])
    paths = RunPaths.of(config, RUN_ID)
    origin = {"model_sha256": "ab", "machine": {"cpus": 2}}
    write_run(paths, run_id=RUN_ID, config=config, config_hash=config_hash(config), lineage=origin)
    group = make_group([make_rollout(0, 1.0), make_rollout(1, 0.0)])
    assessment = assess_group(group, kind="centered", correct_reward=1.0)
    recorder = DiskRecorder(config, paths, trainer=FakeTrainer([]))
    sync = FakeSync([], FakeEngine([]))
    for step in (1, 2):
        recorder.rollouts(step, (group,), (assessment,))
        recorder.certificate(sync.push(step))
        recorder.flush()
        metrics = {"time/step_s": 1.0, "reward/mean": 0.5, "loss/policy": 0.0, "optim/grad_norm": 1.0}
        recorder.step(StepRecord(step=step, policy_version=step, applied=True, metrics=metrics))
    recorder.close()
    probe = write_rollouts(paths.open_store(), step=2, groups=[group], assessments=[assessment])
    write_evaluation(paths, evaluation={"after": 0.5}, probe_rollouts=probe.to_dict(), policy_version=2)
    write_parity(paths, {"verdict": "PASS", "checks": [], "tables": {}})
    return paths


def test_everything_comes_back(paths: RunPaths) -> None:
    run = open_run(str(paths.run))
    assert (run.reference, run.run_id, run.paths) == (str(paths.run), RUN_ID, paths)
    assert run.config.loop.steps == 2
    assert run.config_hash == config_hash(run.config), "no setting was lost on the way"
    assert run.lineage["machine"] == {"cpus": 2}
    assert [row["step"] for row in run.metrics()] == [1, 2]
    assert [certificate.policy_version for certificate in run.certificates()] == [1, 2]
    assert [step for step, _ in run.rollout_refs()] == [1, 2]
    assert run.rollouts(2).step == 2
    assert len(run.rollouts(1).groups[0].rollouts) == 2
    assert run.evaluation() == {"after": 0.5}
    assert run.policy_version == 2
    assert run.probe_rollouts().groups[0].prompt.answer == "7"
    assert run.parity()["verdict"] == "PASS"
    assert (run.model_path / "config.json").is_file()


def test_a_storage_root_moves_as_a_whole(paths: RunPaths, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    Path(paths.store).parent.rename(moved)
    assert open_run(str(moved / RUN_ID)).rollouts(1).step == 1


def test_a_run_that_moved_without_its_store_says_so(paths: RunPaths, tmp_path: Path) -> None:
    moved = tmp_path / "a" / "b" / "alone"
    shutil.copytree(paths.run, moved)
    run = open_run(str(moved))
    assert len(run.metrics()) == 2, "what is in the folder is still there"
    with pytest.raises(DataError, match=rf"the store {tmp_path}/a/store is missing.*move the whole storage\.root"):
        run.rollouts(1)


@pytest.mark.parametrize(
    ("lost", "read", "step"),
    [
        ("metrics", StoredRun.metrics, "fit"),
        ("certificates", StoredRun.certificates, "fit"),
        ("rollout_index", StoredRun.rollout_refs, "fit"),
        ("evaluation", StoredRun.evaluation, "evaluate"),
        ("evaluation", StoredRun.probe_rollouts, "evaluate"),
        ("evaluation", lambda run: run.policy_version, "evaluate"),
        ("parity", StoredRun.parity, "parity_report"),
    ],
)
def test_a_missing_file_is_named_with_the_step_that_writes_it(paths: RunPaths, lost: str, read, step: str) -> None:
    path: Path = getattr(paths, lost)
    path.unlink()
    with pytest.raises(DataError, match=rf"{path} is missing; the step {step} writes it"):
        read(open_run(str(paths.run)))


def test_rollouts_of_a_step_that_was_not_stored(paths: RunPaths) -> None:
    with pytest.raises(DataError, match="stored no rollouts of step 9; stored are: 1 to 2"):
        open_run(str(paths.run)).rollouts(9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(format=99), "has format 99; this version reads 1"),
        (lambda record: record.pop("lineage"), "has no 'lineage'"),
        (lambda record: record["config"].update(novelty=1), "novelty: Extra inputs"),
        (lambda record: record["config"]["loop"].update(steps=0), "loop.steps: "),
    ],
)
def test_a_record_of_another_version_is_refused(paths: RunPaths, change, message: str) -> None:
    record = json.loads(paths.record.read_text())
    change(record)
    paths.record.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message):
        open_run(str(paths.run))


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[]", "holds a JSON list")])
def test_a_damaged_record(paths: RunPaths, text: str, message: str) -> None:
    paths.record.write_text(text)
    with pytest.raises(DataError, match=message):
        open_run(str(paths.run))


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not the folder of a run: run\.json, which the start step writes"):
        open_run(str(tmp_path))
    with pytest.raises(DataError, match="neither the folder of a run nor a Metaflow run id"):
        open_run(str(tmp_path / "nothing"))


def test_an_id_that_metaflow_does_not_know(tmp_path: Path) -> None:
    """In a process of its own, in which Metaflow's client looks at an empty folder."""
    program = "from grpo_lib.stages.stored_run import open_run; open_run('GRPOFlow/123')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "DataError: Metaflow knows no run 'GRPOFlow/123' here; there are no runs at all" in done.stderr


def test_start_makes_the_folder_of_the_run(tmp_path: Path) -> None:
    setup = begin.run(recipe="embedded_addition", overrides=[f"storage.root={tmp_path}"], seed=5)
    run = open_run(str(begin.record(setup, RUN_ID).run))
    assert run.paths == RunPaths.of(setup.config, RUN_ID)
    assert (run.config, run.config_hash, run.lineage) == (setup.config, setup.config_hash, setup.lineage)
