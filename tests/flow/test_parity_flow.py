"""The nightly gate, end to end on the real parts: one night, many questions."""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import metaflow
import pytest

from grpo_lib.stages import frozen_rollouts, parity_gate
from grpo_lib.stages.frozen_rollouts import rollouts_digest
from grpo_lib.stages.parity_history import history_path, read_history
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import open_run
from grpo_lib.types import ParityVerdict
from tests.flow.conftest import FlowRun, flow_command, run_flow

pytestmark = pytest.mark.timeout(600)

STEPS = 4
OVERRIDES = (f"parity.replay_steps={STEPS}", "evaluation.samples_per_prompt=8", "parity.min_tokens=3000")
TRAINERS = ("olmo_core", "hf_deepspeed")


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """A small night with every part in it."""
    return run_flow(tmp_path_factory.mktemp("parity"), flow="parity_flow", overrides=OVERRIDES)


@pytest.fixture(scope="module")
def data(night: FlowRun) -> Any:
    assert night.code == 0, night.output[-6000:]
    return night.data


def artifact(run: Any, step: str, name: str) -> Any:
    return run[step].task[name].data


def test_it_ends_with_the_verdict_the_drift_and_the_way_to_the_card(night: FlowRun, data: Any) -> None:
    assert f"PASS: {len(data.parity['checks'])} PASS, 0 FAIL, 0 INCONCLUSIVE" in night.output
    assert "drift: not enough nights for a band (0 of 5)" in night.output
    assert f"card view {night.run.id}/gate --id gate" in night.output


def test_every_kind_of_check_is_there(data: Any) -> None:
    names = [check["name"] for check in data.parity["checks"]]
    for part in (
        "lockstep: max |dlogprob|", "lockstep: relative gradient distance", "lockstep: relative weight distance",
        "free-running: relative weight distance over noise floor", "hf_deepspeed vs olmo_core: max |dlogprob|",
        "engine decode vs engine score", "hf vs hf_deepspeed", "samples were drawn with the run's seed",
    ):  # fmt: skip
        assert any(part in name for name in names), part
    assert {row["step"] for row in data.parity["tables"]["lockstep"]} == set(range(1, STEPS + 1))


def test_steps_and_branches_are_as_drawn(night: FlowRun, data: Any) -> None:
    assert [step.id for step in night.run][::-1] == [
        "start", "rollouts", "measure", "join", "lockstep", "gate", "compare", "end",
    ]  # fmt: skip
    assert {task["measured"].data.trainer for task in night.run["measure"]} == set(TRAINERS)


def test_one_trainer_follows_the_other_on_this_machine(night: FlowRun, data: Any) -> None:
    first, second = sorted(night.run["measure"], key=lambda task: task.created_at)
    assert first.finished_at <= second.created_at


def test_nights_are_found_by_tag(night: FlowRun, data: Any) -> None:
    tags = {"parity", "trainer:olmo_core", "trainer:hf_deepspeed", "verdict:PASS"}
    assert tags <= night.run.user_tags
    assert [run.id for run in metaflow.Flow("ParityFlow").runs("parity", "verdict:PASS")] == [night.run.id]


def test_all_read_the_same_rollouts(data: Any) -> None:
    assert {one.digest for one in data.measurements} == {data.frozen.digest}
    run = open_run(data.frozen.run)
    assert rollouts_digest(run, steps=STEPS) == data.frozen.digest
    assert rollouts_digest(run, steps=STEPS - 1) != data.frozen.digest
    assert all(step.inputs_a == step.inputs_b for step in data.replayed.steps)
    assert len({step.inputs_a for step in data.replayed.steps}) == STEPS


def test_the_night_is_a_run_like_any_other(night: FlowRun, data: Any) -> None:
    run = open_run(str(data.paths.run))
    assert run.run_id == f"ParityFlow/{night.run.id}"
    assert [step for step, _ in run.rollout_refs()] == list(range(1, STEPS + 1))
    assert run.policy_version == data.frozen.policy_version
    assert {row["optim/applied"] for row in run.metrics()} == {1.0}
    assert len(run.certificates()) == STEPS + 1
    assert run.parity() == data.parity
    assert run.probe_rollouts().groups[0].group_id.startswith(f"eval.v{run.policy_version}.")
    assert not data.paths.replay.exists(), "dumps of weights go when they are compared"


def test_the_card_holds_the_verdict_the_steps_and_the_drift_table(night: FlowRun, data: Any) -> None:
    target = night.folder / "gate.html"
    done = flow_command(
        night.folder, "card", "get", f"{night.run.id}/gate", str(target), "--id", "gate", flow="parity_flow"
    )
    assert done.returncode == 0, done.stderr
    encoded = re.search(r'__MF_DATA__\["[^"]*"\] = "([^"]+)"', target.read_text())
    assert encoded
    page = json.dumps(json.loads(base64.b64decode(encoded.group(1))))
    assert "# Parity gate: PASS" in page
    assert "hf_deepspeed vs olmo_core: gradient" in page
    assert "not enough nights" in page


def test_the_history_has_the_night(night: FlowRun, data: Any) -> None:
    line = read_history(history_path(data.config)).nights[0]
    assert line.run_id == f"ParityFlow/{night.run.id}"
    assert (line.verdict, line.trainers) == (ParityVerdict.PASS, TRAINERS)
    assert [check.name for check in line.checks] == [check["name"] for check in data.parity["checks"]]
    assert set(line.seconds) == {"rollouts", "measure olmo_core", "measure hf_deepspeed", "join", "lockstep", "judge"}
    assert line.packages["deepspeed"]
    assert sum(line.seconds.values()) > 1


def judged_again(night: FlowRun, data: Any, root: Path, index: int, **tolerances: float) -> parity_gate.GateReport:
    """What the gate step would say of the same night, under other tolerances, into a history of its own."""
    config = data.config.model_copy(
        update={
            "storage": data.config.storage.model_copy(update={"root": str(root)}),
            "parity": data.config.parity.model_copy(update=tolerances),
        }
    )
    return parity_gate.report(
        config,
        RunPaths.of(config, f"ParityFlow/{index}"),
        data.frozen,
        run_id=f"ParityFlow/{index}",
        lineage=data.lineage,
        measurements=data.measurements,
        joined=data.joined,
        lockstep=data.replayed,
    )


def test_a_value_that_leaves_the_band_of_five_nights_is_flagged_and_still_passes(
    night: FlowRun, data: Any, tmp_path: Path
) -> None:
    for index in range(5):
        assert judged_again(night, data, tmp_path, index).drift_lines == [
            f"drift: not enough nights for a band ({index} of 5)"
        ]
    worse = tuple(
        replace(step, gradient=replace(step.gradient, whole=replace(step.gradient.whole, relative=9e-6)))
        for step in data.replayed.steps
    )
    tonight = judged_again(night, _Changed(data, replayed=replace(data.replayed, steps=worse)), tmp_path, 5)
    assert tonight.parity["verdict"] == "PASS"
    assert "1 of " in tonight.drift_lines[0]
    assert "relative gradient distance" in tonight.drift_lines[1]
    assert tonight.parity["tables"]["drift"][0]["state"] == "DRIFT"


class _Changed:
    """Artifacts of a night with some replaced."""

    def __init__(self, data: Any, **changes: Any) -> None:
        self._data, self._changes = data, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._data, name)


def test_a_tighter_tolerance_fails_by_name(night: FlowRun, data: Any, tmp_path: Path) -> None:
    report = judged_again(night, data, tmp_path, 0, replay_relative=1e-12)
    failed = [check["name"] for check in report.parity["checks"] if check["verdict"] == "FAIL"]
    assert report.parity["verdict"] == "FAIL"
    assert any("lockstep: relative gradient distance" in name for name in failed)
    assert not any("max |dlogprob|" in name for name in failed)


def test_rollouts_of_a_finished_run_are_taken_without_a_start(night: FlowRun, data: Any, tmp_path: Path) -> None:
    paths = RunPaths(run_id="GRPOFlow/1", run=tmp_path / "adopting", store=str(tmp_path / "store"))
    adopted = frozen_rollouts.adopt(data.config, paths, source=data.frozen.run)
    assert adopted.digest == data.frozen.digest
    assert adopted.engine_score == data.frozen.engine_score
    assert not paths.run.exists()


def test_finished_runs_are_compared_where_they_are_named(data: Any) -> None:
    assert data.comparison is None, "nobody named any"
    folder = str(data.paths.run)
    report = parity_gate.compare(data.config, replace(data.setup, runs_a=(folder,), runs_b=(folder,)))
    assert report["verdict"] != "PASS", "one run, compared with itself, proves nothing"
    assert report["tables"]["outcomes"]


def test_a_sabotaged_record_ends_the_run_with_an_error_and_the_report_stored(night: FlowRun, data: Any) -> None:
    """The index now says of two steps that each was trained on the other's rollouts."""
    index, stored = data.paths.rollout_index, data.paths.parity
    honest = {path: path.read_text() for path in (index, stored)}
    first, second, *rest = [json.loads(line) for line in honest[index].splitlines()]
    swapped = [first | {"step": second["step"]}, second | {"step": first["step"]}]
    lines = sorted([*swapped, *rest], key=lambda line: line["step"])
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        done = flow_command(
            night.folder, "resume", "gate", "--origin-run-id", night.run.id, flow="parity_flow", timeout_s=240
        )
        report = json.loads(stored.read_text())
    finally:
        for path, text in honest.items():
            path.write_text(text)
    assert done.returncode != 0
    assert "parity checks failed: " in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    latest = next(iter(metaflow.Flow("ParityFlow")))
    assert latest.id != night.run.id
    assert not latest.successful
    assert report == artifact(latest, "gate", "parity")
    failed = [check for check in report["checks"] if check["verdict"] == "FAIL"]
    assert any("identical inputs" in check["name"] for check in failed)
    assert {"parity", "verdict:FAIL"} <= latest.user_tags
    assert read_history(history_path(data.config)).nights[-1].verdict is ParityVerdict.FAIL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trainers", "olmo_core,megatron"), "trainer.backend (megatron)"),
        (("--trainers", "olmo_core,olmo_core"), "name two different trainers"),
        (("--rollouts", "987654321"), "Metaflow knows no run '987654321' here"),
        (("--rollouts", "/no/such/run"), "is neither the folder of a run nor a Metaflow run id"),
        (("--runs-a", "1"), "--runs-a and --runs-b come together"),
    ],
)
def test_mistakes_end_in_start_with_a_message_and_no_traceback(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    failed = run_flow(tmp_path, *arguments, flow="parity_flow", timeout_s=60)
    assert failed.code != 0
    assert message in failed.output
    assert "Traceback" not in failed.output
    assert "rollouts/" not in failed.output, "nothing starts after a mistake"
