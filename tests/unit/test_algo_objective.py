"""The micro-batch objective, and that a step's gradient depends neither on its split nor on its ranks."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from grpo_lib.algo.logprobs import token_logprobs
from grpo_lib.algo.losses import build_loss
from grpo_lib.algo.objective import micro_batch_objective
from grpo_lib.algo.packing import pack, plan_step
from grpo_lib.config import AlgorithmConfig
from grpo_lib.errors import NonFiniteLogprobs
from grpo_lib.types import PackedBatch, StepMetrics, StepPlan, TrainingSample
from tests.unit.algo_cases import make_sample

VOCAB, HIDDEN, PACK = 11, 6, 24
SPLITS = [(1, 1), (1, 3), (2, 1), (2, 2), (5, 1), (3, 4)]  # (ranks, packs per micro-batch)


class ToyPolicy:
    """Logits from the token, its position and the previous token of the same document; fp64."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((VOCAB, HIDDEN), (VOCAB, HIDDEN), (PACK, HIDDEN), (VOCAB, HIDDEN))
        self.parameters = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]

    def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        token, previous, position, head = self.parameters
        before = torch.where(batch.position_ids > 0, batch.input_ids.roll(1, dims=1), 0)
        hidden = torch.tanh(token[batch.input_ids] + previous[before] + position[batch.position_ids])
        logprobs, entropy = token_logprobs(
            hidden.flatten(0, 1), lambda h: h @ head.T, batch.labels.flatten(), temperature=0.8, chunk_tokens=64
        )
        shape = batch.labels.shape
        return logprobs.view(shape), entropy.view(shape)

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.parameters)])


def step_samples() -> list[TrainingSample]:
    shapes = [(2, 5), (3, 9), (1, 1), (4, 12), (2, 3), (5, 8), (1, 15), (2, 2), (3, 6)]
    return [make_sample(f"e0.p{i}/0", p, r, advantage=(-1) ** i * (i + 1) / 4) for i, (p, r) in enumerate(shapes)]


def with_old(batch: PackedBatch) -> PackedBatch:
    """Proximal log-probabilities that depend on the tokens only, so that they survive repacking."""
    return batch.with_logprobs(old=-1.5 - 0.1 * (batch.labels % 3).float())


def objective(
    policy: ToyPolicy, batch: PackedBatch, cfg: AlgorithmConfig, denominator: float
) -> tuple[torch.Tensor, StepMetrics]:
    logprobs, entropy = policy.logprobs(batch)
    return micro_batch_objective(
        logprobs, entropy, batch, build_loss(cfg), loss_denominator=denominator, correction_cap=cfg.correction_cap
    )


def summed(
    policy: ToyPolicy, batches: Sequence[PackedBatch], cfg: AlgorithmConfig, denominators: Sequence[float]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient accumulated over micro-batches, and the merged metrics."""
    results = [objective(policy, batch, cfg, d) for batch, d in zip(batches, denominators, strict=True)]
    gradient = torch.stack([policy.gradient(loss) for loss, _ in results]).sum(0)
    return gradient, StepMetrics.merged([metrics for _, metrics in results]).values()


def plan_of(ranks: int, packs: int) -> tuple[StepPlan, list[PackedBatch]]:
    plan = plan_step(step_samples(), num_ranks=ranks, pack_length=PACK, micro_batch_packs=packs)
    return plan, [with_old(batch) for rank in plan.micro_batches for batch in rank]


@pytest.mark.parametrize(("loss", "correction"), [("dapo", "tis"), ("cispo", "mask"), ("gspo", "sequence")])
def test_gradient_and_metrics_do_not_depend_on_split_or_ranks(loss: str, correction: str):
    """open-instruct 1161, trl 6024. The yardstick is every document alone in a row of its own."""
    cfg = AlgorithmConfig.model_validate({"loss": loss, "correction": correction})
    policy, samples = ToyPolicy(), step_samples()
    tokens = float(sum(sample.num_trained_tokens for sample in samples))
    alone = [with_old(pack([sample], PACK)) for sample in samples]
    expected, expected_metrics = summed(policy, alone, cfg, [tokens] * len(alone))
    assert expected.abs().max() > 1e-3
    for ranks, packs in SPLITS:
        plan, batches = plan_of(ranks, packs)
        assert plan.num_trained_tokens == tokens
        gradient, metrics = summed(policy, batches, cfg, [tokens] * len(batches))
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)
        assert metrics == pytest.approx(expected_metrics, rel=1e-6, nan_ok=True)


def test_the_invariance_check_notices_a_mean_per_micro_batch():
    cfg, policy = AlgorithmConfig(), ToyPolicy()
    gradients = []
    for ranks, packs in ((2, 1), (2, 2)):
        _, batches = plan_of(ranks, packs)
        batches = [batch for batch in batches if batch.num_trained_tokens]
        local = [float(batch.num_trained_tokens) * len(batches) for batch in batches]
        gradients.append(summed(policy, batches, cfg, local)[0])
    assert (gradients[0] - gradients[1]).abs().max() > 1e-4


def test_the_invariance_check_notices_a_leak_between_documents():
    class Leaky(ToyPolicy):
        def logprobs(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
            flat = torch.arange(PACK).expand_as(batch.position_ids)
            return super().logprobs(replace(batch, position_ids=flat))

    cfg, policy = AlgorithmConfig(), Leaky()
    alone = [with_old(pack([sample], PACK)) for sample in step_samples()]
    expected = summed(policy, alone, cfg, [1.0] * len(alone))[0]
    packed = summed(policy, plan_of(1, 1)[1], cfg, [1.0] * len(plan_of(1, 1)[1]))[0]
    assert (packed - expected).abs().max() > 1e-3


def test_a_micro_batch_of_padding_gives_zero_with_a_graph():
    policy = ToyPolicy()
    _, batches = plan_of(5, 2)
    empty = next(batch for batch in batches if batch.num_trained_tokens == 0)
    for loss in ("grpo", "dapo", "cispo", "dr_grpo", "gspo"):
        cfg = AlgorithmConfig.model_validate({"loss": loss, "correction": "sequence"})
        value, metrics = objective(policy, empty, cfg, 9.0)
        assert value.item() == 0
        assert value.requires_grad
        assert not policy.gradient(value).any()
        assert all(stat.weight == 0 or stat.value() == 0 for stat in metrics.stats.values())


def test_one_sample_changed_changes_only_its_own_gradient():
    """Group isolation in the loss: another document's advantage moves no other document's gradient."""
    samples = step_samples()[:3]
    gradients = []
    for scale in (1.0, 50.0):
        scaled = replace(samples[1], advantages=samples[1].advantages * scale)
        batch = pack([samples[0], scaled, samples[2]], PACK)
        logprobs = torch.full((batch.num_rows, PACK), -1.0, dtype=torch.float64, requires_grad=True)
        loss, _ = build_loss(AlgorithmConfig(loss="gspo"))(logprobs, batch, 7.0)
        gradients.append(torch.autograd.grad(loss, logprobs)[0])
    other = batch.doc_ids != 2
    torch.testing.assert_close(gradients[0][other], gradients[1][other], rtol=0, atol=0)
    assert (gradients[0] != gradients[1]).any()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_a_trained_token_without_a_finite_logprob_stops_the_step_by_name(bad: float):
    """trl 6166, 6693."""
    batch = pack(step_samples()[:3], PACK)
    row, column = next((r, c) for r, c in batch.response_mask.nonzero().tolist() if batch.doc_ids[r, c] == 2)
    sample_id = batch.sample_ids[row][1]
    token = int(batch.position_ids[row, column]) + 1
    logprobs = torch.full((batch.num_rows, PACK), -1.0)
    logprobs[row, column] = bad
    message = rf"1 of 15 trained tokens have a non-finite policy value: {re.escape(sample_id)} token {token} \({bad}\)"
    with pytest.raises(NonFiniteLogprobs, match=message):
        run_plain(logprobs, batch)


def test_the_message_names_three_tokens_and_counts_all():
    batch = pack(step_samples()[:3], PACK)
    with pytest.raises(NonFiniteLogprobs) as caught:
        run_plain(torch.full((batch.num_rows, PACK), float("nan")), batch)
    assert "15 of 15 trained tokens" in str(caught.value)
    assert str(caught.value).count("(nan)") == 3
    assert "e0.p0/0 token 2 (nan)" in str(caught.value)  # two prompt tokens, 0 and 1


def test_the_sampler_the_proximal_and_the_reference_policy_are_checked_too():
    batch = pack(step_samples()[:1], PACK)
    fine = torch.full((1, PACK), -1.0)
    broken = torch.where(batch.response_mask, float("nan"), fine)
    for batch_with_fault, name in (
        (replace(batch, rollout_logprobs=broken), "rollout"),
        (batch.with_logprobs(old=broken), "old"),
        (batch.with_logprobs(ref=broken), "reference"),
    ):
        with pytest.raises(NonFiniteLogprobs, match=f"non-finite {name} value"):
            run_plain(fine, batch_with_fault)


def test_untrained_positions_may_hold_anything():
    batch = pack(step_samples()[:3], PACK)
    logprobs = torch.where(batch.response_mask, -1.0, float("nan")).requires_grad_()
    value, metrics = run_plain(logprobs, batch)
    value.backward()
    assert torch.isfinite(value)
    assert logprobs.grad is not None
    assert (logprobs.grad[~batch.response_mask] == 0).all()
    assert metrics.values()["mismatch/nan_count"] == 0


def test_metrics_of_loss_mismatch_and_entropy_arrive_together():
    batch = pack(step_samples()[:2], PACK)
    _, metrics = run_plain(torch.full((batch.num_rows, PACK), -1.0), batch)
    values = metrics.values()
    assert values["policy/entropy"] == pytest.approx(0.5)
    rollout = batch.rollout_logprobs[batch.response_mask].double()
    assert values["mismatch/k1"] == pytest.approx((rollout + 1).mean().item(), rel=1e-6)
    assert {"loss/policy", "policy/clipfrac", "mismatch/tis_clipfrac", "mismatch/abs_p99"} <= set(values)


def test_with_a_proximal_policy_the_cap_counts_old_against_rollout():
    batch = pack([make_sample("e0.p0/0", 2, 4, rollout_logprobs=[-2.0] * 4)], PACK)
    batch = batch.with_logprobs(old=torch.full((1, PACK), -0.5))
    values = run_plain(torch.full((1, PACK), -2.0), batch)[1].values()
    assert values["mismatch/tis_clip_count"] == 4  # exp(1.5) > 2
    assert values["mismatch/abs_max"] == 0


def run_plain(logprobs: torch.Tensor, batch: PackedBatch) -> tuple[torch.Tensor, StepMetrics]:
    entropy = torch.full_like(logprobs, 0.5).detach()
    return micro_batch_objective(
        logprobs, entropy, batch, build_loss(AlgorithmConfig()), loss_denominator=4.0, correction_cap=2.0
    )
