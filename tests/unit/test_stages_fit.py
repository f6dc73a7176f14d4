"""What `fit` does with the results of a run that is finished: it keeps them until it is sure to train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo_lib.config import with_overrides
from grpo_lib.errors import RankFailure
from grpo_lib.stages import fit
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import StoredRun, open_run, write_run
from tests.unit.fakes import FakeEngine, FakeSync, FakeTrainer
from tests.unit.test_stages_continuation import stopped_run

STEPS = 2


class ExportingTrainer(FakeTrainer):
    def export_hf(self, path: Path) -> None:
        self.journal.append("export")
        path.mkdir()


@dataclass
class Parts:
    """`LiveRun` of fakes; the engines answer no request."""

    journal: list[str] = field(default_factory=list)
    processes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.trainer = ExportingTrainer(self.journal, version=STEPS)
        self.engines = FakeEngine(self.journal)
        self.sync = FakeSync(self.journal, self.engines)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    made = Parts()

    @contextmanager
    def live(*_: Any, **__: Any) -> Iterator[Parts]:
        yield made

    monkeypatch.setattr(fit, "live_run", live)
    return made


@pytest.fixture
def finished(tmp_path: Path) -> StoredRun:
    """All steps are done, exported and judged."""
    run = stopped_run(tmp_path, steps=STEPS, at=STEPS)
    rows = run.paths.metrics.read_text()
    for name in fit.SPANS:
        rows = rows.replace('"time/step_s"', f'"time/{name}_s": 0.5, "time/step_s"')
    run.paths.metrics.write_text(rows.replace('"time/step_s"', '"time/other_s": 0.5, "time/step_s"'))
    run.paths.export.mkdir()
    for path in results(run.paths):
        path.write_text("of the finished run")
    return run


def results(paths: RunPaths) -> list[Path]:
    return [paths.export / "config.json", paths.evaluation, paths.parity]


def are_kept(paths: RunPaths) -> list[bool]:
    return [path.exists() and path.read_text() == "of the finished run" for path in results(paths)]


def train(run: StoredRun) -> fit.TrainingResult:
    return fit.run(run.config, run.paths, run_id="1", from_shards=False)


def with_more_steps(run: StoredRun) -> StoredRun:
    config = with_overrides(run.config, [f"loop.steps={STEPS + 1}"])
    write_run(run.paths, run_id=run.run_id, config=config, config_hash="more", lineage=run.lineage)
    return open_run(str(run.paths.run))


def test_a_run_whose_steps_are_done_keeps_its_model_and_what_was_judged_of_it(
    finished: StoredRun, parts: Parts
) -> None:
    assert train(finished).policy_version == STEPS
    assert are_kept(finished.paths) == [True, True, True]
    assert parts.journal == [f"push v{STEPS}"]


def test_a_model_that_is_missing_is_exported_and_what_was_judged_of_it_stays(finished: StoredRun, parts: Parts) -> None:
    (finished.paths.export / "config.json").unlink()
    finished.paths.export.rmdir()
    train(finished)
    assert parts.journal == [f"push v{STEPS}", "export"]
    assert are_kept(finished.paths) == [False, True, True]


def test_parts_that_do_not_start_cost_a_finished_run_nothing(
    finished: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def live(*_: Any, **__: Any) -> Iterator[None]:
        raise RankFailure("no port")
        yield

    monkeypatch.setattr(fit, "live_run", live)
    with pytest.raises(RankFailure, match="no port"):
        train(with_more_steps(finished))
    assert are_kept(finished.paths) == [True, True, True]


def test_results_of_fewer_steps_are_gone_when_the_next_begins(
    finished: StoredRun, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_batch(*_: Any) -> None:
        raise RankFailure("engine 0 died")

    monkeypatch.setattr("grpo_lib.pipeline.RolloutPipeline.next_batch", no_batch)
    with pytest.raises(RankFailure, match="engine 0 died"):
        train(with_more_steps(finished))
    assert are_kept(finished.paths) == [False, False, False]
