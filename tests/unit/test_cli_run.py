"""`grpo run resume` and `prove-resume`, as far as they go without starting a rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from grpo_lib.cli import main
from grpo_lib.parity.verdicts import check
from grpo_lib.stages import prove_resume
from grpo_lib.stages.attempts import attempt
from grpo_lib.stages.stored_run import open_run
from grpo_lib.types import ParityReport
from tests.unit.stored_runs import finished_run


def test_a_run_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "resume", str(tmp_path / "nothing")]) == 2
    assert "is neither the folder of a run nor a Metaflow run id" in capsys.readouterr().err


def test_a_setting_that_decides_what_is_learned_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, "GRPOFlow/1")
    assert main(["run", "resume", str(run.paths.run), "--set", "seed=5", "--set", "rollout.group_size=4"]) == 2
    error = capsys.readouterr().err
    assert "2 problems" in error
    assert "seed was 1 and would be 5: it decides what the run learns" in error
    assert "rollout.group_size was 16 and would be 4" in error
    assert open_run(str(run.paths.run)).config == run.config


def test_a_run_that_is_worked_on_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = finished_run(tmp_path, "GRPOFlow/1")
    with attempt(run.paths, stage="fit") as current:
        current.at_step(7)
        page = json.loads(run.paths.running.read_text())
        page["process"] |= {"pid": 1, "started": 0}
        for started in Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19:20]:
            page["process"]["started"] = int(started)
        own = run.paths.running.read_text()
        run.paths.running.write_text(json.dumps(page))
        assert main(["run", "resume", str(run.paths.run)]) == 1
        run.paths.running.write_text(own)
    error = capsys.readouterr().err
    assert "is being worked on: attempt 1, process 1 on " in error
    assert "in fit step 7" in error
    assert os.getpid() != 1


def test_a_proof_goes_into_a_new_folder_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "prove-resume", "--keep", str(tmp_path)]) == 2
    assert "exists; name a folder that does not" in capsys.readouterr().err


def test_a_proof_of_a_wrong_configuration_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "prove-resume", "--set", "loop.stepps=3"]) == 2
    assert "loop.stepps is not a setting" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "code"), [(0, 0), (1, 1)])
def test_runs_and_logs_of_a_proof_stay_unless_it_passes(
    value: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove(config: object, *, folder: Path, **_: object) -> ParityReport:
        (folder / "a.log").write_text("what happened")
        outcome = check("samples", value, 0, num_observations=1, needed=1, evidence="of this test")
        return ParityReport(checks=(outcome,), tables={})

    monkeypatch.setattr(prove_resume, "run", prove)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["run", "prove-resume", "--trainer", "olmo_core"]) == code
    kept = list(tmp_path.glob("resume-proof-*"))
    assert len(kept) == code
    told = capsys.readouterr().err
    for folder in kept:
        assert f"grpo: runs and logs are in {folder}" in told
        assert (folder / "a.log").is_file()
