"""Random kills of a small real run, each followed by a resume; `make soak` does 200 of them.

The driver, a trainer rank or an engine gets SIGKILL at a random moment: while it starts, in a step, while it writes.
Each attempt is the real command. `SOAK_KILLS` says how many, `SOAK_SEED` which.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_lib import cli
from grpo_lib.config import resolve
from grpo_lib.parity.resume_proof import ProvenRun
from grpo_lib.stages import begin
from grpo_lib.stages.attempts import Holder, attempts_of
from grpo_lib.stages.doomed_attempt import DoomedAttempt, Ending
from grpo_lib.stages.prove_resume import proven_run
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import open_run

KILLS = int(os.environ.get("SOAK_KILLS", "3"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
STEPS_PER_RUN = 40  # a run that reaches its end is checked, and the next kills are of a new one
ENGINE, RANK, DRIVER = "engine 0", "olmo_core trainer rank 0", None
_VICTIMS = {"driver": DRIVER, "rank": RANK, "engine": ENGINE}
_START_S = 30.0  # in which a kill during the start falls
_NOTICED_S = 90.0  # from the death of a part to the end of the run: the deadline of a call, and of closing
_LAST_CHARS = 1500
_DEADLINE_S = 600.0  # of an attempt whose part was killed; its own deadlines are far below

log = logging.getLogger(__name__)

pytestmark = pytest.mark.timeout(300 + 120 * KILLS)


@dataclass(kw_only=True)
class Soak:
    """What was done to a series of runs."""

    finished: list[RunPaths] = field(default_factory=list)
    endings: list[tuple[str, Ending]] = field(default_factory=list)  # victim, how its attempt ended
    attempts: list[DoomedAttempt] = field(default_factory=list)
    slowest_end_s: float = 0.0  # from the death of a rank or an engine to the end of the run


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Soak:
    root, rng, done = tmp_path_factory.mktemp("soak"), random.Random(SEED), Soak()
    paths = new_run(root, 0)
    # Every kind of victim has its turn early, so that a short soak has met all of them.
    victims = [name for _ in range(KILLS // 3 + 1) for name in rng.sample(sorted(_VICTIMS), 3)][:KILLS]
    for number, victim in enumerate(victims, start=1):
        attempt = DoomedAttempt(paths, log=paths.run.with_suffix(".log"))
        done.attempts.append(attempt)
        was_killed = attempt.kill_when(moment(rng, victim), part=_VICTIMS[victim], delay_s=rng.random() * 0.3)
        killed_at = time.monotonic()
        ending = attempt.wait(deadline_s=_DEADLINE_S)
        done.endings.append((victim, ending))
        if was_killed and victim != "driver":
            done.slowest_end_s = max(done.slowest_end_s, time.monotonic() - killed_at)
        place = "after its end" if attempt.seen is None else f"seen in step {attempt.seen.step}, {attempt.seen.span}"
        log.info("kill %d of %d: %s, %s; exit code %d", number, KILLS, victim, place, ending.code)
        if not was_killed:  # the run came to its end first
            assert ending.code == 0, ending.output
            done.finished.append(paths)
            paths = new_run(root, number)
    ending = (last := DoomedAttempt(paths, log=paths.run.with_suffix(".log"))).wait(deadline_s=_DEADLINE_S)
    assert ending.code == 0, ending.output
    done.attempts.append(last)
    done.finished.append(paths)
    return done


def new_run(root: Path, number: int) -> RunPaths:
    """The leanest real run: one rank, one engine, steps of 16 samples."""
    config = resolve(
        "embedded_addition",
        [
            f"storage.root={root}", f"loop.steps={STEPS_PER_RUN if KILLS > 3 else 12}", "loop.checkpoint_every=3",
            "loop.prompts_per_step=4", "rollout.group_size=4", "data.num_train=20", "data.num_heldout=8",
            "trainer.num_ranks=1", "weight_sync.canary_every=1000", "deadlines.train_s=60", "deadlines.generate_s=60",
        ],
        trainer="olmo_core",
    )  # fmt: skip
    return begin.record(begin.check(config), f"Soak/{number}")


def moment(rng: random.Random, victim: str) -> Callable[[Holder], bool]:
    """One in five kills of the driver falls into the start; the others some steps after where the attempt starts."""
    started = time.monotonic()
    if victim == "driver" and rng.random() < 0.2:
        after_s = rng.random() * _START_S
        return lambda report: time.monotonic() - started > after_s
    steps, first = rng.randrange(1, 8), []

    def is_there(report: Holder) -> bool:
        if report.step is None:
            return False
        first.append(report.step)
        return report.step >= first[0] + steps

    return is_there


@pytest.fixture(scope="module")
def runs(soak: Soak) -> list[ProvenRun]:
    return [proven_run(paths) for paths in soak.finished]


def test_every_resume_succeeded(soak: Soak) -> None:
    """An attempt may only end because of the kill; what it finds of the one before never stops it."""
    for victim, ending in soak.endings:
        if victim == "driver":
            assert ending.code in (-9, 0), ending.output
        else:
            assert ending.code in (1, 0), ending.output


def test_a_dead_part_is_named_in_time(soak: Soak) -> None:
    for victim, ending in soak.endings:
        if victim != "driver" and ending.code:
            last_lines = ending.output[-_LAST_CHARS:]
            assert f"{_VICTIMS[victim]}: " in last_lines, ending.output
            assert "the process died" in last_lines, ending.output
    assert soak.slowest_end_s < _NOTICED_S


def test_no_step_is_missing_or_there_twice(soak: Soak) -> None:
    for paths in soak.finished:
        stored = open_run(str(paths.run))
        steps = list(range(1, stored.config.loop.steps + 1))
        assert [row["step"] for row in stored.metrics()] == steps
        assert [step for step, _ in stored.rollout_refs()] == steps
        assert [row["policy_version"] for row in stored.metrics()][-1] == stored.certificates()[-1].policy_version
        assert all(certificate.ok for certificate in stored.certificates())


def test_no_prompt_is_lost(soak: Soak, runs: list[ProvenRun]) -> None:
    """Whole epochs visit every prompt once; a visit that is lost or repeated changes the multiset."""
    for paths, run in zip(soak.finished, runs, strict=True):
        config = open_run(str(paths.run)).config
        visits = Counter(run.prompts)
        assert set(visits.values()) == {1}
        drawn = config.loop.steps * config.loop.prompts_per_step
        assert len(visits) == drawn
        by_epoch = Counter(str(visit).partition(".")[0] for visit in visits)
        whole, rest = divmod(drawn, config.data.num_train)
        assert sorted(by_epoch.values(), reverse=True) == [config.data.num_train] * whole + [rest] * bool(rest)


def test_two_runs_of_one_configuration_have_the_same_metrics(runs: list[ProvenRun]) -> None:
    for run in runs[1:]:
        assert run.rows == runs[0].rows
        assert run.weights == runs[0].weights


def test_the_store_verifies_clean(soak: Soak, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["store", "verify", "--store", str(soak.finished[0].store)])
    assert code == 0, capsys.readouterr()
    for paths in soak.finished:
        assert not list(paths.checkpoints.glob(".partial-*"))


def test_every_attempt_is_on_record(soak: Soak) -> None:
    begun = [line for paths in soak.finished for line in attempts_of(paths) if line["event"] == "begin"]
    of_fit = [line for line in begun if line["stage"] == "fit"]
    assert 1 <= len(of_fit) <= len(soak.attempts), "a kill may come before an attempt has begun"
    for paths in soak.finished:
        assert attempts_of(paths)[-1]["event"] == "done"


def test_nothing_is_left_running(soak: Soak) -> None:
    assert [left for attempt in soak.attempts for left in attempt.leftovers(deadline_s=60.0)] == []
