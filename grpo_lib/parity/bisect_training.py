"""One training step of one trainer, judged alone: is its gradient the reference's, and its update AdamW's?

The two halves are apart. The gradient is held against a plain model's on the same rows; the update against AdamW on the
trainer's *own* gradient with the configured learning rate, so that a wrong gradient is not blamed twice. Both halves
start from a dumped state, so nothing earlier counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from grpo_lib import loop
from grpo_lib.algo.faults import Fault
from grpo_lib.algo.losses import build_loss
from grpo_lib.config import RunConfig, TrainerConfig
from grpo_lib.interfaces import ReplayTrainer
from grpo_lib.parity.bisect import Cause, Diagnosis, Finding, Reference, listed
from grpo_lib.parity.bisect_advantages import explain_gradient
from grpo_lib.parity.distances import StateDistance, TensorDistance, state_distance
from grpo_lib.parity.replay import StateReader, TensorReader, score_plan
from grpo_lib.types import PackedBatch, StateKind, StepPlan

_PARALLEL = 1e-6  # 1 - cosine of two gradients that differ by rounding and length only, at least
_SAME_SCALE = 1e-4  # likewise, of two equal lengths
_SAME_PART = 1e-3  # relative distance of a gradient from one part of the right one
UPDATE_TOLERANCE = 1e-3  # relative; an update is a small difference of fp32 weights, so rounding is a part of it
_UPDATE_PARALLEL = 1e-3
_SHOWN_TENSORS = 12
_CORRECT = Fault()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TakenStep:
    """What one trainer did with one plan from one state; tensors are read when they are needed."""

    name: str
    config: RunConfig
    plan: StepPlan
    scores: Mapping[str, np.ndarray]  # sample id → [R], before the step
    version_before: int
    version_after: int
    learning_rate: float  # as the trainer reports it
    start: Mapping[StateKind, TensorReader]  # weights and moments before the step
    gradient: TensorReader
    after: TensorReader  # weights

    @property
    def batches(self) -> tuple[PackedBatch, ...]:
        """All ranks' micro-batches."""
        return tuple(batch for rank in self.plan.micro_batches for batch in rank)


def take_step(
    trainer: ReplayTrainer, plan: StepPlan, *, config: RunConfig, start: Path, folder: Path, read: StateReader
) -> TakenStep:
    """Put the trainer into a dumped state, score, differentiate and step.

    Args:
        config: The trainer's own.
        start: Folder of a dump of the whole training state.
        folder: Where the gradient and the new weights go; must outlive the result.
    """
    trainer.restore_state(start)
    version = trainer.policy_version
    scores = score_plan(trainer, plan)
    loop.forward_backward(config, trainer, plan)
    trainer.dump_state(folder, [StateKind.GRADIENT])
    stepped = trainer.optim_step().values()
    trainer.dump_state(folder, [StateKind.WEIGHT])
    return TakenStep(
        name=trainer.name,
        config=config,
        plan=plan,
        scores=scores,
        version_before=version,
        version_after=trainer.policy_version,
        learning_rate=stepped["optim/lr"],
        start={kind: read(start, kind) for kind in (StateKind.WEIGHT, StateKind.FIRST_MOMENT, StateKind.SECOND_MOMENT)},
        gradient=read(folder, StateKind.GRADIENT),
        after=read(folder, StateKind.WEIGHT),
    )


# -- gradient ----------------------------------------------------------------------------------------------------------


def gradient_distance(taken: TakenStep, reference: Reference) -> StateDistance:
    """From a plain model's gradient on the same rows.

    Args:
        reference: Holding the weights of `taken.start`.
    """
    right = _right_gradient(taken, reference, _CORRECT)
    return state_distance(sorted(right), taken.gradient, right.__getitem__)


def bisect_gradient(taken: TakenStep, reference: Reference, distance: StateDistance) -> Diagnosis:
    """Name what is wrong with a gradient whose log-probabilities are right.

    Args:
        distance: `gradient_distance`.
    """
    tolerance = taken.config.parity.replay_relative
    if distance.whole.relative <= tolerance:
        return Diagnosis()
    tables = Diagnosis(tables={"gradients": _tensor_rows(taken.name, distance, tolerance)})
    scaled = _scaled(taken, distance, tolerance)
    if scaled is not None:
        return Diagnosis.merged([tables, Diagnosis(findings=(scaled,))])
    untied = bisect_head(taken, reference)
    if untied.findings:
        return Diagnosis.merged([tables, untied])
    recovered = explain_gradient(
        taken.name,
        taken.gradient,
        taken.plan,
        reference,
        build_loss(taken.config.algorithm),
        batches=with_frozen_policy(taken.batches, taken.config, reference),
        loss_denominator=loop.loss_denominator(taken.config, taken.plan),
    )
    # Kept only where nothing better founded is known.
    return Diagnosis.merged([tables, recovered, Diagnosis(findings=(_unlike(taken, distance, tolerance),))])


def _unlike(taken: TakenStep, distance: StateDistance, tolerance: float) -> Finding:
    whole = distance.whole
    worst = [tensor.name for tensor in distance.tensors if not tensor.relative <= tolerance]
    return Finding(
        cause=Cause.UNEXPLAINED,
        subject=taken.name,
        where=f"gradient of the step from version {taken.version_before}: {listed(worst)}",
        evidence=(
            f"relative distance {whole.relative:.2g} from a plain model's gradient (cosine {whole.cosine:.6f}, scale "
            f"{whole.scale:.4g}) in {len(worst)} of {len(distance.tensors)} tensors, and no set of advantages gives it"
        ),
    )


def with_frozen_policy(batches: Sequence[PackedBatch], config: RunConfig, reference: Reference) -> list[PackedBatch]:
    """The batches as the loss needs them: with the base model's log-probabilities where there is a KL term."""
    if config.algorithm.kl_beta == 0:
        return list(batches)
    return [batch.with_logprobs(ref=reference.logprobs(batch, Fault(version=0))) for batch in batches]


def _scaled(taken: TakenStep, distance: StateDistance, tolerance: float) -> Finding | None:
    """Every tensor parallel to the reference's, by one factor."""
    whole = distance.whole
    parallel, same_scale = max(_PARALLEL, 10 * tolerance**2), max(_SAME_SCALE, 10 * tolerance)
    if not (whole.cosine >= 1 - parallel and abs(whole.scale - 1) > same_scale):
        return None
    return Finding(
        cause=Cause.LOSS_DENOMINATOR,
        subject=taken.name,
        where=f"gradient of the step from version {taken.version_before}, all {len(distance.tensors)} tensors",
        evidence=(
            f"parallel to a plain model's gradient (1 - cosine {1 - whole.cosine:.1g}) and {whole.scale:.6g} times as "
            f"long{_factor_name(whole.scale, taken.plan)}"
        ),
        unexplained=_left_by_scale(whole),
    )


def _left_by_scale(whole: TensorDistance) -> float:
    """Share of the difference that is left after one factor."""
    apart = whole.relative * whole.norm_b
    across = whole.norm_a * math.sqrt(max(0.0, 1 - whole.cosine**2))
    return across / apart if apart else math.nan


def _factor_name(scale: float, plan: StepPlan) -> str:
    ranks, micro_batches = len(plan.micro_batches), len(plan.micro_batches[0])
    names = {
        "the number of ranks": ranks,
        "1 / the number of ranks": 1 / ranks,
        "the number of micro-batches of a rank": micro_batches,
        "1 / the number of micro-batches of a rank": 1 / micro_batches,
        "the number of trained tokens": plan.num_trained_tokens,
        "trained tokens / samples": plan.num_trained_tokens / plan.num_samples,
        "trained tokens / real tokens": plan.num_trained_tokens / plan.num_real_tokens,
    }
    fitting = [name for name, value in names.items() if value != 1 and math.isclose(scale, value, rel_tol=_SAME_SCALE)]
    return f": {' or '.join(fitting)}" if fitting else ""


def bisect_head(taken: TakenStep, reference: Reference) -> Diagnosis:
    """Name a tied head that lost its tie: only what comes through the inputs reaches the embedding.

    Where the log-probabilities are right, its gradient is then the plain model's without the head's part. Where the
    head has gone its own way already, rows of tokens that are no input still show it: they stay 0.
    """
    name = reference.tied_embedding
    if name is None:
        return Diagnosis()
    own = taken.gradient(name)
    whole = _right_gradient(taken, reference, _CORRECT)[name]
    inputs_only = _right_gradient(taken, reference, Fault(head_detached=True))[name]
    apart = state_distance([name], lambda _: own, lambda _: inputs_only).whole
    unread = torch.ones(len(whole), dtype=torch.bool)
    for batch in taken.batches:
        unread[batch.input_ids[batch.doc_ids > 0].unique()] = False
    if apart.relative <= _SAME_PART:
        says = f"it is a plain model's gradient without the output head's part ({apart.relative:.1g} relative)"
    elif not own[unread].any() and own[~unread].any() and whole[unread].any():
        says = (
            f"its rows of the {int(unread.sum())} tokens that are no input are exactly 0, where the output head's part "
            f"reaches {float(whole[unread].abs().max()):.2g}"
        )
    else:
        return Diagnosis()
    finding = Finding(
        cause=Cause.HEAD_UNTIED,
        subject=taken.name,
        where=f"{name}, gradient of the step from version {taken.version_before}",
        evidence=f"{says}; the head's own gradient goes elsewhere",
    )
    return Diagnosis(findings=(finding,))


def _right_gradient(taken: TakenStep, reference: Reference, fault: Fault) -> Mapping[str, torch.Tensor]:
    batches = with_frozen_policy(taken.batches, taken.config, reference)
    denominator = loop.loss_denominator(taken.config, taken.plan)
    loss = build_loss(taken.config.algorithm)
    return reference.gradient(batches, loss, loss_denominator=denominator, fault=fault)


# -- update ------------------------------------------------------------------------------------------------------------


def update_distance(taken: TakenStep) -> StateDistance:
    """From AdamW's change on the trainer's own gradient, at the configured learning rate."""
    weights = taken.start[StateKind.WEIGHT]
    return state_distance(
        sorted(taken.after.names),
        lambda name: taken.after(name).double() - weights(name).double(),
        _expected_update(taken),
    )


def _expected_update(taken: TakenStep) -> Callable[[str], torch.Tensor]:
    clip, rate = _clip_factor(taken), _configured_rate(taken)
    return lambda name: adamw_update(taken, name, rate, clip)


def _configured_rate(taken: TakenStep) -> float:
    return configured_learning_rate(taken.config.trainer, taken.version_before, taken.config.loop.steps)


def bisect_update(taken: TakenStep, distance: StateDistance) -> Diagnosis:
    """Name what is wrong with an update, whatever its gradient was.

    Args:
        distance: `update_distance`.
    """
    tables = {"updates": _tensor_rows(taken.name, distance, UPDATE_TOLERANCE)}
    whole = distance.whole
    if whole.norm_a == 0 or taken.version_after != taken.version_before + 1:
        return Diagnosis(findings=(_skipped(taken, distance),), tables=tables)
    if whole.relative <= UPDATE_TOLERANCE:
        return Diagnosis()
    finding = (
        _rounded(taken)
        or _other_rate(taken, distance)
        or Finding(
            cause=Cause.UNEXPLAINED,
            subject=taken.name,
            where=f"update from version {taken.version_before}: {listed([t.name for t in distance.tensors[:4]])}",
            evidence=(
                f"relative distance {whole.relative:.2g} from AdamW on the trainer's own gradient (cosine "
                f"{whole.cosine:.6f}, scale {whole.scale:.4g})"
            ),
        )
    )
    return Diagnosis(findings=(finding,), tables=tables)


def _clip_factor(taken: TakenStep) -> float:
    total = sum(float(taken.gradient(name).double().square().sum()) for name in taken.gradient.names)
    return min(1.0, taken.config.trainer.max_grad_norm / (math.sqrt(total) + 1e-6))


def adamw_update(taken: TakenStep, name: str, rate: float, clip: float) -> torch.Tensor:
    """float64 change of one tensor by AdamW (arXiv 1711.05101) on the trainer's own gradient.

    Args:
        clip: Factor that brings the gradient within the norm limit.
    """
    config = taken.config.trainer
    step = taken.version_before + 1
    weight, first, second = (taken.start[kind](name).double() for kind in taken.start)
    gradient = taken.gradient(name).double() * clip
    first = config.adam_beta1 * first + (1 - config.adam_beta1) * gradient
    second = config.adam_beta2 * second + (1 - config.adam_beta2) * gradient.square()
    first, second = first / (1 - config.adam_beta1**step), second / (1 - config.adam_beta2**step)
    return -rate * (config.weight_decay * weight + first / (second.sqrt() + config.adam_eps))


def configured_learning_rate(config: TrainerConfig, step: int, total_steps: int, scheduler: str | None = None) -> float:
    """What a schedule's name means for the step that `step` applied ones precede.

    Args:
        scheduler: Instead of the configured one.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    name = scheduler or config.lr_scheduler
    return peak * {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[name]


def _skipped(taken: TakenStep, distance: StateDistance) -> Finding:
    what = f"weights moved by {distance.whole.norm_a:.3g}" if distance.whole.norm_a else "no weight changed"
    return Finding(
        cause=Cause.STEP_SKIPPED,
        subject=taken.name,
        where=f"step from version {taken.version_before} to {taken.version_before + 1}",
        evidence=(
            f"{what} where AdamW on its own gradient moves them by {distance.whole.norm_b:.3g} (L2); the trainer says "
            f"it is at version {taken.version_after}"
        ),
    )


def _rounded(taken: TakenStep) -> Finding | None:
    """All moved weights are numbers that bfloat16 holds, and the right ones, rounded."""
    names, expected = sorted(taken.after.names), _expected_update(taken)
    moved = held = 0
    for name in names:
        after, before = taken.after(name), taken.start[StateKind.WEIGHT](name)
        changed = after != before
        rounded = (before.double() + expected(name)).to(after.dtype).bfloat16().to(after.dtype)
        # The sum is rounded twice here, and once or step by step there: neighbours of a tie may part.
        near = (after - rounded).abs() <= rounded.abs() * 2**-7
        moved += int(changed.sum())
        held += int((changed & near & (after.bfloat16().to(after.dtype) == after)).sum())
    if not moved or held < moved * (1 - UPDATE_TOLERANCE):
        return None
    return Finding(
        cause=Cause.ROUNDED_MASTERS,
        subject=taken.name,
        where=f"weights of version {taken.version_after}, all {len(names)} tensors",
        evidence=(
            f"{held:,} of the {moved:,} weights that the step changed are numbers that bfloat16 holds exactly (two in "
            "100,000 are by chance), and they are AdamW's, rounded: updates below 2^-9 of a weight are lost"
        ),
    )


def _other_rate(taken: TakenStep, distance: StateDistance) -> Finding | None:
    """The right update times a factor."""
    whole, rate = distance.whole, _configured_rate(taken)
    if not whole.cosine >= 1 - _UPDATE_PARALLEL or abs(whole.scale - 1) <= UPDATE_TOLERANCE:
        return None
    trainer, total = taken.config.trainer, taken.config.loop.steps
    used = rate * whole.scale
    fitting = [
        name
        for name in ("constant", "linear", "cosine")
        if name != trainer.lr_scheduler
        and math.isclose(
            used, configured_learning_rate(trainer, taken.version_before, total, name), rel_tol=UPDATE_TOLERANCE
        )
    ]
    schedule = f", which is what the schedule {' or '.join(fitting)} gives there" if fitting else ""
    return Finding(
        cause=Cause.LEARNING_RATE,
        subject=taken.name,
        where=f"step from version {taken.version_before} to {taken.version_after}",
        evidence=(
            f"its update is AdamW's on its own gradient times {whole.scale:.6g} (1 - cosine {1 - whole.cosine:.1g}): a "
            f"learning rate of {used:.6g} where {trainer.lr_scheduler} gives {rate:.6g}{schedule}; the trainer reports "
            f"{taken.learning_rate:.6g}"
        ),
        unexplained=_left_by_scale(whole),
    )


def _tensor_rows(name: str, distance: StateDistance, tolerance: float) -> list[dict[str, object]]:
    return [
        {
            "trainer": name,
            "tensor": tensor.name,
            "relative": tensor.relative,
            "cosine": tensor.cosine,
            "scale": tensor.scale,
        }
        for tensor in (distance.whole, *distance.tensors[:_SHOWN_TENSORS])
        if tensor is distance.whole or not tensor.relative <= tolerance
    ]
