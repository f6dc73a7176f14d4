"""A run of the flow that is killed twice: Metaflow tries the step again, then the user resumes the run."""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_lib.stages.attempts import Holder, attempts_of, holder_of
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import open_run
from tests.flow.conftest import ROOT, environment

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 12
_SETTINGS = (
    f"loop.steps={STEPS}", "loop.checkpoint_every=2", "loop.prompts_per_step=4", "rollout.group_size=4",
    "data.num_train=16", "data.num_heldout=8", "trainer.num_ranks=1", "evaluation.samples_per_prompt=8",
    "tracking.wandb=true",
)  # fmt: skip
_DEADLINE_S = 400.0


@dataclass(kw_only=True)
class Story:
    """What happened, in order."""

    origin: RunPaths
    resumed: RunPaths
    origin_before: dict[str, str]  # content hash by file of the origin's folder, when `resume` was called
    output: str  # of the run that failed


def contents(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def start(folder: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "flows/grpo_flow.py", *arguments],
            cwd=ROOT,
            env=environment(folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def await_report(
    runs: Path, process: subprocess.Popen[bytes], log: Path, is_it: Callable[[Path, Holder], bool]
) -> tuple[RunPaths, Holder]:
    """The first report of any run of the flow that `is_it` accepts."""
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        for page in runs.glob("GRPOFlow/*/running.json"):
            paths = RunPaths(run_id=f"GRPOFlow/{page.parent.name}", run=page.parent, store=str(runs / "store"))
            report = holder_of(paths)
            if report is not None and is_it(page.parent, report):
                return paths, report
        time.sleep(0.002)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("resume")
    runs, log = folder / "runs", folder / "run.log"
    settings = [part for one in (f"storage.root={runs}", *_SETTINGS) for part in ("--set", one)]
    retry = ("--with", "retry:times=1,minutes_between_retries=0")
    process = start(folder, log, "run", *retry, *settings)
    origin, first = await_report(runs, process, log, lambda _, report: report.step == 5)
    os.kill(first.process.pid, signal.SIGKILL)
    _, second = await_report(runs, process, log, lambda _, report: report.process != first.process and report.step == 9)
    assert second.parts
    os.kill(second.parts["engine 0"], signal.SIGKILL)
    assert process.wait(timeout=_DEADLINE_S) != 0
    before = contents(origin.run)
    again = start(folder, folder / "resume.log", "resume", "--origin-run-id", origin.run.name)
    resumed, _ = await_report(
        runs, again, folder / "resume.log", lambda run, report: run != origin.run and report.stage == "evaluate"
    )
    family = psutil.Process(again.pid).children(recursive=True)
    os.killpg(again.pid, signal.SIGKILL)  # what follows is asked elsewhere
    again.wait()
    for left in (process for process in family if process.is_running()):
        left.kill()
    return Story(origin=origin, resumed=resumed, origin_before=before, output=log.read_text())


def events(paths: RunPaths, event: str) -> list[dict[str, Any]]:
    return [line for line in attempts_of(paths) if line["event"] == event and line["stage"] == "fit"]


def test_the_retried_step_goes_on_in_the_same_folder(story: Story) -> None:
    (begun,) = events(story.origin, "continues")
    assert 2 <= begun["from_step"] <= 4
    assert [line["attempt"] for line in events(story.origin, "begin")] == [1, 2]
    assert f"continues after step {begun['from_step']} of {STEPS}" in story.output


def test_a_dead_engine_ends_the_step_with_its_name(story: Story) -> None:
    (failed,) = events(story.origin, "failed")
    assert "engine 0" in failed["error"]
    assert "the process died" in failed["error"]
    assert "RankFailure" in story.output


def test_the_resumed_run_goes_on_and_trains_the_remaining_steps(story: Story) -> None:
    (begun,) = events(story.resumed, "continues")
    assert 6 <= begun["from_step"] <= 8
    run = open_run(str(story.resumed.run))
    assert run.origins == (story.origin.run_id,)
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    assert [row["policy_version"] for row in run.metrics()] == list(range(1, STEPS + 1))
    versions = [certificate.policy_version for certificate in run.certificates()]
    assert versions.count(begun["from_step"]) >= 2, "pushed by the step, and again, restored, before the first rollout"
    assert (story.resumed.export / "config.json").is_file()


def test_every_prompt_was_visited_once_an_epoch(story: Story) -> None:
    run = open_run(str(story.resumed.run))
    visits = [group.group_id for step, _ in run.rollout_refs() for group in run.rollouts(step).groups]
    assert len(visits) == len(set(visits)) == 4 * STEPS
    assert {visit.partition(".")[0] for visit in visits} == {"e0", "e1", "e2"}


def test_the_origin_is_as_it_was(story: Story) -> None:
    assert contents(story.origin.run) == story.origin_before
    assert not [path for path in story.resumed.run.rglob("*") if path.is_symlink() and "wandb" not in path.parts]


def test_the_wandb_run_is_the_origins(story: Story) -> None:
    """Offline runs name their file after the id."""
    for paths in (story.origin, story.resumed):
        files = list(paths.tracking.rglob("run-*.wandb"))
        assert files
        assert {file.stem for file in files} == {f"run-{story.origin.run.name}"}
    record = json.loads((sorted(story.resumed.checkpoints.glob("step-*"))[-1] / "loop.json").read_text())
    assert record["tracker_run_id"] == story.origin.run.name
