"""Lockstep isolates steps; free-running is measured by its own noise floor; inputs are identified and audited."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_lib import loop
from grpo_lib.config import RunConfig
from grpo_lib.parity.free_running import (
    FreeRunning,
    Split,
    Trajectory,
    compare_trajectories,
    free_running,
    noise_splits,
    resplit,
)
from grpo_lib.parity.replay import ReplayStep, lockstep
from grpo_lib.parity.replay_inputs import ReplayBatch, audit_inputs, plan_digest
from grpo_lib.types import TRAINING_STATE
from tests.unit.replay_fakes import NUM_STEPS, PlainTrainer, StateFiles, replay_config, stored_steps

CONFIG = replay_config()


def in_lockstep(
    tmp_path: Path,
    follower: PlainTrainer,
    *,
    steps: Sequence[ReplayBatch] | None = None,
    leader: PlainTrainer | None = None,
    follower_config: RunConfig | None = None,
) -> list[ReplayStep]:
    return list(
        lockstep(
            leader or PlainTrainer(CONFIG, name="leader"),
            follower,
            stored_steps(CONFIG) if steps is None else steps,
            config=CONFIG,
            scratch=tmp_path,
            read=StateFiles,
            follower_config=follower_config,
        )
    )


def trajectory(folder: Path, trainer: PlainTrainer, split: Split = Split.CONFIGURED) -> Trajectory:
    folder.mkdir(exist_ok=True)
    return free_running(trainer, stored_steps(CONFIG), config=trainer.config, folder=folder, split=split)


# -- lockstep ----------------------------------------------------------------------------------------------------------


def test_equal_trainers_agree_and_every_step_moves(tmp_path: Path) -> None:
    steps = in_lockstep(tmp_path, PlainTrainer(CONFIG, name="follower"))
    assert [step.step for step in steps] == list(range(1, NUM_STEPS + 1))
    assert [step.policy_version for step in steps] == list(range(NUM_STEPS))
    for step in steps:
        assert (step.name_a, step.name_b) == ("follower", "leader")
        assert step.pair.max_abs == step.gradient.whole.relative == step.weight.whole.relative == 0.0
        assert step.moved_a
        assert step.moved_b
        assert step.version_after_a == step.version_after_b == step.policy_version + 1
        assert step.gradient.whole.norm_b == pytest.approx(step.grad_norm_b, rel=1e-6), "the dumped gradient is whole"
        assert step.update.whole.norm_b > 0
        assert step.bf16_share_a < 0.01


def test_a_fault_in_one_step_does_not_smear_into_the_next(tmp_path: Path) -> None:
    """Without the leader's state at the start of step 4, its weights would still differ there."""

    def nudge(trainer: PlainTrainer) -> None:
        with torch.no_grad():
            trainer.weights["head"][0, 0] += 0.5
            trainer.adamw.state[trainer.weights["head"]]["exp_avg"][0, 0] += 0.5

    steps = in_lockstep(tmp_path, PlainTrainer(CONFIG, after_step={2: nudge}))
    assert [step.weight.whole.relative > 0 for step in steps] == [False, False, True, False]
    assert steps[2].weight.tensors[0].name == "head"
    assert steps[2].update.whole.norm_a != steps[2].update.whole.norm_b
    assert steps[3].pair.max_abs == steps[3].gradient.whole.relative == steps[3].weight.whole.relative == 0.0


def test_a_gradient_of_another_scale_shows_as_scale(tmp_path: Path) -> None:
    def halve(trainer: PlainTrainer) -> None:
        for name in trainer.weights:
            trainer.gradient(name).mul_(0.5)

    step = in_lockstep(tmp_path, PlainTrainer(CONFIG, after_gradient={1: halve}))[1]
    assert step.gradient.whole.cosine == pytest.approx(1.0)
    assert step.gradient.whole.scale == pytest.approx(0.5)
    assert step.grad_norm_a == pytest.approx(0.5 * step.grad_norm_b)


def test_log_probabilities_are_those_before_the_step(tmp_path: Path) -> None:
    steps = in_lockstep(tmp_path, PlainTrainer(CONFIG, logprob_offset={2: 0.25}))
    assert [step.pair.max_abs for step in steps] == pytest.approx([0, 0, 0.25, 0], abs=1e-6)
    assert steps[2].pair.mean_signed == pytest.approx(0.25)  # a - b
    assert "e0.p3-" in steps[2].pair.worst


def test_the_follower_is_put_into_the_leaders_state_first(tmp_path: Path) -> None:
    leader, follower = PlainTrainer(CONFIG, name="leader"), PlainTrainer(CONFIG, name="follower")
    with torch.no_grad():
        follower.weights["embedding"].add_(1.0)
    follower.policy_version = 7
    steps = in_lockstep(tmp_path, follower, leader=leader)
    assert steps[0].weight.whole.relative == 0.0
    assert steps[0].version_after_a == 1


def test_a_step_that_trains_nothing_is_seen_whatever_the_trainer_says(tmp_path: Path) -> None:
    def undo(trainer: PlainTrainer) -> None:
        trainer.restore_state(tmp_path / "kept")
        trainer.policy_version += 1

    leader = PlainTrainer(CONFIG, name="leader")
    leader.dump_state(tmp_path / "kept", TRAINING_STATE)
    idle = in_lockstep(tmp_path, PlainTrainer(CONFIG, after_step={0: undo}), leader=leader)[0]
    assert not idle.moved_a
    assert idle.moved_b
    assert math.isnan(idle.bf16_share_a)


def test_bfloat16_master_weights_show(tmp_path: Path) -> None:
    def rounded(trainer: PlainTrainer) -> None:
        with torch.no_grad():
            for weight in trainer.weights.values():
                weight.copy_(weight.bfloat16().float())

    step = in_lockstep(tmp_path, PlainTrainer(CONFIG, after_step={0: rounded}))[0]
    assert step.bf16_share_a == 1.0
    assert step.bf16_share_b < 0.01


def test_a_step_without_trainable_tokens_is_applied_by_neither(tmp_path: Path) -> None:
    leader, follower = PlainTrainer(CONFIG, name="leader"), PlainTrainer(CONFIG, name="follower")
    steps = in_lockstep(tmp_path, follower, leader=leader, steps=stored_steps(CONFIG, empty=[2]))
    assert [(step.step, step.policy_version) for step in steps] == [(1, 0), (3, 1), (4, 2)]
    assert follower.journal.count("optim_step") == leader.journal.count("optim_step") == 3


def test_each_side_packs_for_its_own_ranks(tmp_path: Path) -> None:
    other = replay_config(trainer={"num_ranks": 1, "pack_length": 8, "micro_batch_packs": 1, "learning_rate": 1e-2})
    (step, *_) = in_lockstep(tmp_path, PlainTrainer(other, num_ranks=2), follower_config=other)
    assert step.inputs_a == step.inputs_b, "the same documents, however they are packed"
    assert 0 < step.gradient.whole.relative < 1e-5


def test_one_steps_dumps_exist_at_a_time(tmp_path: Path) -> None:
    left = []
    steps = lockstep(
        PlainTrainer(CONFIG), PlainTrainer(CONFIG), stored_steps(CONFIG), config=CONFIG, scratch=tmp_path,
        read=lambda folder, kind: left.append(len(list(tmp_path.iterdir()))) or StateFiles(folder, kind),
    )  # fmt: skip
    for _ in steps:
        assert list(tmp_path.iterdir()) == []
    assert set(left) == {1}


def test_dumps_are_removed_when_a_step_fails(tmp_path: Path) -> None:
    def fail(_: PlainTrainer) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        in_lockstep(tmp_path, PlainTrainer(CONFIG, after_step={1: fail}))
    assert list(tmp_path.iterdir()) == []


# -- free-running ------------------------------------------------------------------------------------------------------


def test_a_trajectory_carries_its_weights_along(tmp_path: Path) -> None:
    own = trajectory(tmp_path / "a", PlainTrainer(CONFIG, name="a"))
    steps = in_lockstep(tmp_path, PlainTrainer(CONFIG))
    assert [step.loss for step in own.steps] == [step.loss_b for step in steps], "the leader runs free too"
    same = compare_trajectories(
        own, trajectory(tmp_path / "b", PlainTrainer(CONFIG, name="b")), cap=2.0, read=StateFiles
    )
    assert [step.weight.whole.relative for step in same] == [0.0] * NUM_STEPS

    def nudge(trainer: PlainTrainer) -> None:
        with torch.no_grad():
            trainer.weights["head"][0, 0] += 0.5

    nudged = trajectory(tmp_path / "c", PlainTrainer(CONFIG, name="c", after_step={1: nudge}))
    apart = compare_trajectories(nudged, own, cap=2.0, read=StateFiles)
    assert [step.weight.whole.relative > 0 for step in apart] == [False, True, True, True], "and the fault stays"
    assert [step.pair.max_abs > 0 for step in apart] == [False, False, True, True]
    assert (apart[0].name_a, apart[0].name_b) == ("c", "a")


@pytest.mark.parametrize("split", [Split.HALVES, Split.SINGLES])
def test_another_split_is_the_same_step_in_another_order(tmp_path: Path, split: Split) -> None:
    own = trajectory(tmp_path / "own", PlainTrainer(CONFIG))
    twin = trajectory(tmp_path / "twin", PlainTrainer(CONFIG), split)
    assert all(a.num_micro_batches > b.num_micro_batches for a, b in zip(twin.steps, own.steps, strict=True))
    assert [step.inputs for step in twin.steps] == [step.inputs for step in own.steps]
    floor = compare_trajectories(twin, own, cap=2.0, read=StateFiles)
    assert 0 < floor[-1].weight.whole.relative < 1e-5


def test_trajectories_of_other_steps_are_refused(tmp_path: Path) -> None:
    own = trajectory(tmp_path / "own", PlainTrainer(CONFIG, name="a"))
    with pytest.raises(ValueError, match=r"a took the steps \[1, 2, 3\] and a \[1, 2, 3, 4\]"):
        compare_trajectories(replace(own, steps=own.steps[:3]), own, cap=2.0, read=StateFiles)


def test_the_floor_is_the_largest_so_far_of_either_backend(tmp_path: Path) -> None:
    own = trajectory(tmp_path / "own", PlainTrainer(CONFIG))
    step = compare_trajectories(own, own, cap=2.0, read=StateFiles)[0]

    def losses(*values: float):
        return tuple(replace(step, loss_a=value, loss_b=0.0) for value in values)

    free = FreeRunning(steps=losses(9, 9, 9), floors=(losses(1, 3, 2), losses(2, 1, 2.5)))
    assert free.floor("loss") == (2, 3, 3)
    assert math.isnan(FreeRunning(steps=losses(9), floors=(losses(1), losses(math.nan))).floor("loss")[0])


@pytest.mark.parametrize(
    ("micro_batch_packs", "split", "count"),
    [(8, Split.HALVES, 2), (8, Split.SINGLES, 7), (2, Split.HALVES, 7), (1, Split.HALVES, 4), (1, Split.SINGLES, 4)],
)
def test_another_split_always_has_another_number_of_micro_batches(
    micro_batch_packs: int, split: Split, count: int
) -> None:
    config = replay_config(trainer={"micro_batch_packs": micro_batch_packs, "pack_length": 8, "num_ranks": 1})
    batch = stored_steps(config)[0]
    plan = loop.plan_rollouts(config, 1, batch.rollouts)
    assert plan is not None
    assert sum(bool(ids) for micro_batch in plan.micro_batches[0] for ids in micro_batch.sample_ids) == 7, "packs"
    other = resplit(config, batch, plan, split)
    assert len(other.micro_batches[0]) != len(plan.micro_batches[0])
    assert len(other.micro_batches[0]) == count
    assert plan_digest(other) == plan_digest(plan)


def test_a_single_pack_has_no_other_split() -> None:
    config = replay_config(trainer={"pack_length": 128})
    batch = stored_steps(config)[0]
    plan = loop.plan_rollouts(config, 1, batch.rollouts)
    assert plan is not None
    with pytest.raises(ValueError, match=r"one pack of trainer.pack_length \(128\).*smaller trainer.pack_length"):
        resplit(config, batch, plan, Split.HALVES)


def test_splits_that_would_be_the_same_are_measured_once() -> None:
    def splits(micro_batch_packs: int) -> tuple[Split, ...]:
        config = replay_config(trainer={"micro_batch_packs": micro_batch_packs, "pack_length": 8})
        return noise_splits(config, 1, stored_steps(config))

    assert splits(8) == (Split.HALVES, Split.SINGLES)
    assert splits(2) == splits(1) == (Split.HALVES,)


# -- inputs ------------------------------------------------------------------------------------------------------------


def digest(batch: ReplayBatch, **trainer: object) -> str:
    config = replay_config(trainer=trainer)
    plan = loop.plan_rollouts(config, 2, batch.rollouts)
    assert plan is not None
    return plan_digest(plan)


def with_advantages(batch: ReplayBatch, order: Sequence[int]) -> ReplayBatch:
    return replace(batch, assessments=tuple(batch.assessments[index] for index in order))


def with_completion(batch: ReplayBatch, **changes: object) -> ReplayBatch:
    """The first sample of the first group with another completion."""
    group = batch.groups[0]
    first, *rest = group.rollouts
    changed = replace(first, completion=replace(first.completion, **changes))
    return replace(batch, groups=(replace(group, rollouts=(changed, *rest)), *batch.groups[1:]))


def test_identity_is_of_the_samples_and_not_of_their_packing() -> None:
    batch = stored_steps(CONFIG)[0]
    assert digest(batch) == digest(batch, pack_length=8, micro_batch_packs=1)
    completion = batch.groups[0].rollouts[0].completion
    assert digest(with_completion(batch, token_ids=completion.token_ids + 1)) != digest(batch)
    assert digest(with_completion(batch, logprobs=completion.logprobs - np.float32(1e-6))) != digest(batch)
    assert digest(with_advantages(batch, (1, 0))) != digest(batch)
    assert digest(stored_steps(CONFIG)[1]) != digest(batch)


def test_a_consistent_record_has_nothing_to_report() -> None:
    audits = audit_inputs(stored_steps(CONFIG, empty=[2]), CONFIG)
    assert [audit.step for audit in audits] == [1, 2, 3, 4]
    assert all((audit.num_groups, audit.num_samples) == (2, 8) for audit in audits)
    assert not any((*audit.wrong_advantages, *audit.wrong_versions, *audit.wrong_seeds) for audit in audits)


def test_swapped_advantages_name_both_groups() -> None:
    steps = stored_steps(CONFIG)
    steps[1] = with_advantages(steps[1], (1, 0))
    audits = audit_inputs(steps, CONFIG)
    assert [audit.wrong_advantages for audit in audits] == [(), ("e0.p2-0", "e0.p2-1"), (), ()]


def test_samples_of_another_version_or_seed_are_named() -> None:
    steps = stored_steps(CONFIG)
    span = steps[2].groups[0].rollouts[0].completion.version_spans[0]
    steps[2] = with_completion(steps[2], version_spans=(replace(span, version=1),), seed=12345)
    audit = audit_inputs(steps, CONFIG)[2]
    assert len(audit.wrong_seeds) == 1
    assert (
        audit.wrong_versions[0].startswith("e0.p3-0/0 (version 1 at 2)") or "version 1 at 2" in audit.wrong_versions[0]
    )
    stale = replay_config(loop={"max_staleness": 1})
    assert audit_inputs(steps, stale)[2].wrong_versions == ()


def test_versions_are_known_only_from_the_first_step_on() -> None:
    with pytest.raises(ValueError, match=r"steps \[2, 3, 4\] are not consecutive from 1"):
        audit_inputs(stored_steps(CONFIG)[1:], CONFIG)
