"""The GRPO loop: one step, for every backend.

    draw groups ─► advantages ─► samples ─► pack ─► forward, backward ─► optimiser step ─► push weights ─► record

The driver decides everything here; ranks and engines only answer. docs/architecture.md has the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from grpo_lib.algo.advantages import GroupAssessment
from grpo_lib.algo.metrics import rollout_metrics
from grpo_lib.algo.packing import plan_step
from grpo_lib.algo.samples import training_samples
from grpo_lib.config import RunConfig
from grpo_lib.errors import MismatchError, NoLearningSignal, WeightSyncError
from grpo_lib.interfaces import TrainerGroup, WeightSync
from grpo_lib.pipeline import RolloutPipeline, StepRollouts
from grpo_lib.timing import StepTimer
from grpo_lib.types import RolloutGroup, Stat, StepMetrics, StepPlan, SyncCertificate, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecord:
    """What one step leaves behind. `metrics` are plain numbers under the names of docs/metrics.md."""

    step: int  # 1-based: the number of steps done
    policy_version: int  # after the step
    applied: bool  # whether the optimiser stepped
    metrics: dict[str, float]


class RunRecorder(Protocol):
    """Keeps what a run leaves behind; called by the loop only."""

    def certificate(self, certificate: SyncCertificate) -> None: ...

    def rollouts(self, step: int, groups: tuple[RolloutGroup, ...], assessments: tuple[GroupAssessment, ...]) -> None:
        """Begin to store a step's groups, before they are trained on."""
        ...

    def flush(self) -> None:
        """Wait until the groups are stored."""
        ...

    def checkpoint(self, step: int, prompt_state: dict[str, int], empty_steps: int) -> None: ...

    def step(self, record: StepRecord) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where a run stands between two steps."""

    steps_done: int = 0
    empty_steps: int = 0  # in a row, without a trainable token


def fit(
    config: RunConfig,
    *,
    trainer: TrainerGroup,
    sync: WeightSync,
    pipeline: RolloutPipeline,
    recorder: RunRecorder,
    state: LoopState = LoopState(),
    timer: StepTimer | None = None,
    before_step: Callable[[int], None] | None = None,
) -> LoopState:
    """Run the loop to `loop.steps`.

    The first push happens before the first rollout, with whatever weights the trainer holds: the base model's or, after
    a resume, the restored ones.

    Args:
        state: Where to continue.
        timer: Of this run's steps.
        before_step: Called with the number of the step about to start.

    Raises:
        WeightSyncError: a push could not be certified.
        NoLearningSignal: `loop.max_empty_steps` steps in a row had nothing to train on.
    """
    timer = timer or StepTimer()
    _certified_push(sync, trainer.policy_version, recorder)
    timer.finish_step()  # the initial push belongs to start-up, not to the first step
    while state.steps_done < config.loop.steps:
        step = state.steps_done + 1
        if before_step is not None:
            before_step(step)
        rollouts = pipeline.next_batch(trainer.policy_version, timer)
        with timer.span("pack"):
            metrics = _rollout_metrics(rollouts, trainer.policy_version)
            plan = plan_rollouts(config, trainer.num_ranks, rollouts)
        with timer.span("checkpoint"):
            recorder.rollouts(step, rollouts.groups, rollouts.assessments)
        if plan is not None:
            if config.rollout.sleep_while_training:
                with timer.span("weight_sync"):
                    sync.release()
            trained = train_step(config, trainer, plan, timer)
            metrics = StepMetrics.merged([metrics, _plan_metrics(plan), trained])
            with timer.span("weight_sync"):
                certificate = _certified_push(sync, trainer.policy_version, recorder)
            if certificate.canary is not None:
                timer.move(certificate.canary.seconds, source="weight_sync", target="canary")
        state = replace(state, steps_done=step, empty_steps=state.empty_steps + 1 if plan is None else 0)
        with timer.span("checkpoint"):
            recorder.flush()
            if step % config.loop.checkpoint_every == 0 or step == config.loop.steps:
                recorder.checkpoint(step, pipeline.prompts.state(), state.empty_steps)
        times = timer.finish_step()
        with timer.span("record"):  # charged to the step that begins here: a record cannot hold its own time
            recorder.step(_record(step, trainer.policy_version, plan is not None, metrics, times))
        if step < config.loop.steps:
            _check_signal(config, state, rollouts)
    return state


def plan_rollouts(config: RunConfig, num_ranks: int, rollouts: StepRollouts) -> StepPlan | None:
    """From judged groups to every rank's work; None when no group has anything to teach.

    Such a step is not applied: weights, version and schedule stay, so that the optimiser's momentum cannot move a
    policy that got no signal.
    """
    samples = trainable_samples(config, rollouts)
    if not samples:
        return None
    return plan_step(
        samples,
        num_ranks=num_ranks,
        pack_length=config.trainer.pack_length,
        micro_batch_packs=config.trainer.micro_batch_packs,
    )


def train_step(config: RunConfig, trainer: TrainerGroup, plan: StepPlan, timer: StepTimer) -> StepMetrics:
    """The training half of a step: gradients of the whole plan, then exactly one optimiser step.

    Raises:
        MismatchError: the correction leaves out more than `algorithm.max_masked_share` of the tokens.
    """
    with timer.span("forward_backward"):
        trained = forward_backward(config, trainer, plan)
    _check_masked_share(config, trained)
    with timer.span("optim"):
        stepped = trainer.optim_step()
    return StepMetrics.merged([trained, stepped])


def forward_backward(config: RunConfig, trainer: TrainerGroup, plan: StepPlan) -> StepMetrics:
    """Gradients of the whole plan; the frozen reference scores it first where there is one."""
    if trainer.has_reference:
        plan = _with_reference(plan, trainer)
    return trainer.forward_backward(plan, loss_denominator=loss_denominator(config, plan))


def trainable_samples(config: RunConfig, rollouts: StepRollouts) -> list[TrainingSample]:
    """The documents of all groups that have spread, in the order they were drawn."""
    return [
        sample
        for group, assessment in zip(rollouts.groups, rollouts.assessments, strict=True)
        for sample in training_samples(group, assessment, mask_truncated=config.algorithm.mask_truncated)
    ]


def loss_denominator(config: RunConfig, plan: StepPlan) -> float:
    """What the summed token loss of the whole step is divided by."""
    if config.algorithm.loss_denominator == "constant":
        assert config.algorithm.constant_denominator is not None, "a config rule requires it"
        return config.algorithm.constant_denominator
    return float(plan.num_trained_tokens)


def _with_reference(plan: StepPlan, trainer: TrainerGroup) -> StepPlan:
    reference = trainer.logprobs(plan, reference=True)
    micro_batches = tuple(
        tuple(batch.with_logprobs(ref=ref) for batch, ref in zip(batches, refs, strict=True))
        for batches, refs in zip(plan.micro_batches, reference, strict=True)
    )
    return replace(plan, micro_batches=micro_batches)


def _certified_push(sync: WeightSync, policy_version: int, recorder: RunRecorder) -> SyncCertificate:
    certificate = sync.push(policy_version)
    recorder.certificate(certificate)
    if not certificate.ok:
        raise WeightSyncError(f"weights of version {policy_version} are not certified: {certificate}")
    return certificate


def _check_signal(config: RunConfig, state: LoopState, rollouts: StepRollouts) -> None:
    if state.empty_steps >= config.loop.max_empty_steps:
        rewards = [r.verdict.reward for group in rollouts.groups for r in group.rollouts]
        raise NoLearningSignal(
            f"{state.empty_steps} steps in a row had no group with any spread in its rewards "
            f"(last mean reward {sum(rewards) / len(rewards):.3f}): the task is hopeless or solved for this policy. "
            "Choose other prompts, raise rollout.group_size or rollout.temperature, or raise loop.max_empty_steps"
        )


def _check_masked_share(config: RunConfig, trained: StepMetrics) -> None:
    """A correction that drops most tokens trains on the rest without a word; the engine and the trainer disagree."""
    share = trained.stats.get("correction/masked_share")
    limit = config.algorithm.max_masked_share
    if share is not None and share.value() > limit:
        raise MismatchError(
            f"algorithm.correction={config.algorithm.correction} leaves out {share.value():.1%} of the step's tokens, "
            f"more than algorithm.max_masked_share ({limit:g}): sampler and trainer disagree. Look at mismatch/* and "
            "the last certificate, lower loop.max_staleness, or raise algorithm.correction_cap"
        )


def _rollout_metrics(rollouts: StepRollouts, policy_version: int) -> StepMetrics:
    completions = [rollout.completion for group in rollouts.groups for rollout in group.rollouts]
    judged = rollout_metrics(rollouts.groups, rollouts.assessments, policy_version=policy_version)
    drawn = StepMetrics(
        stats={
            "response/tokens": Stat.sum(sum(len(completion.token_ids) for completion in completions)),
            "time/group_latency_max_s": Stat.max(max(completion.latency_s for completion in completions)),
            "batch/draws": Stat.sum(rollouts.num_draws),
        }
    )
    return StepMetrics.merged([judged, drawn])


def _plan_metrics(plan: StepPlan) -> StepMetrics:
    return StepMetrics(
        stats={
            "batch/samples": Stat.sum(plan.num_samples),
            "batch/trained_tokens": Stat.sum(plan.num_trained_tokens),
            "batch/real_tokens": Stat.sum(plan.num_real_tokens),
            "throughput/padding_share": Stat.mean(plan.padding_share, 1.0),
        }
    )


def _record(step: int, policy_version: int, applied: bool, metrics: StepMetrics, times: dict[str, float]) -> StepRecord:
    values = metrics.values()
    values.update({f"time/{name}": seconds for name, seconds in times.items()})
    if applied:
        train_s = times["forward_backward_s"] + times["optim_s"]
        values["throughput/train_tokens_per_s"] = values["batch/real_tokens"] / train_s
    values["throughput/rollout_tokens_per_s"] = values["response/tokens"] / times["wait_for_rollouts_s"]
    values["optim/applied"] = float(applied)
    return StepRecord(step=step, policy_version=policy_version, applied=applied, metrics=values)
