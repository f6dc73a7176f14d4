"""A run that is killed in every phase of a step and continued is the run that was not, for every trainer.

NeMo-RL 3599 (buffered prompts lost), TRL 1.16 (the first epoch's order replayed in the second), AReaL 1342 (versions
start again), open-instruct 1627 (no sync after a resume), verl 7401 (no step after a resume at an epoch's end).
"""

from __future__ import annotations

import random
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_lib.config import TRAINERS, RunConfig, resolve
from grpo_lib.parity.resume_proof import ProvenRun, same_run_checks
from grpo_lib.stages import begin, prepare_data, run_diff
from grpo_lib.stages.attempts import attempts_of, holder_of
from grpo_lib.stages.checkpoints import newest_complete
from grpo_lib.stages.doomed_attempt import Death
from grpo_lib.stages.prove_resume import EPOCH_STEPS, PHASES, proof_config, proven_run, steps_ahead
from grpo_lib.stages.run_paths import RunPaths
from grpo_lib.stages.stored_run import open_run
from grpo_lib.types import ParityVerdict
from tests.distributed.forked_fit import ForkedFits

pytestmark = pytest.mark.timeout(600)

_SMALL = (
    "loop.prompts_per_step=4", "rollout.group_size=4", "data.num_heldout=8", "trainer.num_ranks=1",
)  # fmt: skip


@dataclass(kw_only=True)
class Proof:
    """A straight run and a killed one of the same configuration."""

    config: RunConfig
    straight: RunPaths
    killed: RunPaths
    codes: list[int | None] = field(default_factory=list)  # of the attempts that were killed
    places: list[tuple[int | None, str | None]] = field(default_factory=list)  # that they last reported


@pytest.fixture(scope="module")
def fits() -> ForkedFits:
    return ForkedFits()


@pytest.fixture(scope="module")
def proofs(fits: ForkedFits, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Proof]:
    """By trainer, side by side: an attempt keeps one core busy."""
    roots = {trainer: tmp_path_factory.mktemp(trainer) for trainer in TRAINERS}
    with ThreadPoolExecutor(len(TRAINERS)) as threads:
        made = {trainer: threads.submit(prove, fits, trainer, root) for trainer, root in roots.items()}
        return {trainer: proof.result() for trainer, proof in made.items()}


@pytest.fixture(params=TRAINERS)
def proof(request: pytest.FixtureRequest, proofs: dict[str, Proof]) -> Proof:
    return proofs[request.param]


def prove(fits: ForkedFits, trainer: str, root: Path) -> Proof:
    config = proof_config(resolve("embedded_addition", _SMALL, trainer=trainer), num_kills=len(PHASES), root=root)
    setup = begin.check(config)
    made = Proof(config=config, straight=begin.record(setup, "Proof/1"), killed=begin.record(setup, "Proof/2"))
    for paths in (made.straight, made.killed):
        prepare_data.run(config, paths)
    assert fits.run(config, made.straight) == 0
    rng = random.Random(7)
    for number, phase in enumerate(PHASES):
        point = newest_complete(made.killed)
        begins_after = 0 if point is None else point.state.steps_done
        death = Death(
            step=begins_after + steps_ahead(number),
            span=phase,
            visit=2 if phase == "checkpoint" else 1,  # the first one stores rollouts
            delay_s=rng.random() * 0.002,
        )
        made.codes.append(fits.run(config, made.killed, death))
        last = holder_of(made.killed)
        made.places.append((None, None) if last is None else (last.step, last.span))
    assert fits.run(config, made.killed) == 0
    return made


@pytest.fixture
def runs(proof: Proof) -> tuple[ProvenRun, ProvenRun]:
    return proven_run(proof.straight), proven_run(proof.killed)


def test_every_attempt_died_in_the_phase_that_was_meant(proof: Proof) -> None:
    assert proof.codes == [-signal.SIGALRM] * len(PHASES)
    # A phase may end while the signal is on its way; the kill is then in what follows it.
    in_place = [span == phase for (_, span), phase in zip(proof.places, PHASES, strict=True)]
    assert sum(in_place) >= len(PHASES) - 2, proof.places


def test_nothing_differs_from_the_run_that_was_not_killed(proof: Proof, runs: tuple[ProvenRun, ProvenRun]) -> None:
    restored = [line["policy_version"] for line in attempts_of(proof.killed) if line["event"] == "continues"]
    checks = same_run_checks("killed", *runs, restored=restored)
    assert {check.name: check.evidence for check in checks if check.verdict is not ParityVerdict.PASS} == {}
    assert run_diff.run(open_run(str(proof.straight.run)), open_run(str(proof.killed.run))) == ()


def test_it_was_continued_inside_epochs_and_at_their_ends(proof: Proof) -> None:
    resumed = [line["from_step"] for line in attempts_of(proof.killed) if line["event"] == "continues"]
    assert len(resumed) == len(PHASES), "each attempt found a checkpoint of the one before"
    assert {step % EPOCH_STEPS for step in resumed} == {0, 1}
    assert resumed == sorted(set(resumed))
    assert resumed[-1] < proof.config.loop.steps


def test_several_epochs_visit_every_prompt_in_orders_of_their_own(runs: tuple[ProvenRun, ProvenRun]) -> None:
    epochs: dict[str, list[str]] = {}
    for visit in runs[1].prompts:
        epoch, _, prompt = str(visit).partition(".")
        epochs.setdefault(epoch, []).append(prompt)
    whole = [tuple(order) for order in epochs.values() if len(order) == 4 * EPOCH_STEPS]
    assert len(whole) >= 3
    assert len(set(whole)) == len(whole)
    assert len({frozenset(order) for order in whole}) == 1


def test_lost_rows_are_kept_aside(proof: Proof) -> None:
    assert list(proof.killed.lost.glob("metrics-*.jsonl"))
    assert not list(proof.straight.lost.glob("*"))


def test_a_run_whose_steps_are_done_is_exported_where_it_was_not_and_not_trained(
    proof: Proof, fits: ForkedFits
) -> None:
    before = proven_run(proof.straight)
    shutil.rmtree(proof.straight.export)
    assert fits.run(proof.config, proof.straight) == 0
    after = proven_run(proof.straight)
    assert (after.rows, after.samples, after.weights) == (before.rows, before.samples, before.weights)
    assert attempts_of(proof.straight)[-2]["from_step"] == proof.config.loop.steps
