import itertools
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from grpo_lib.algo.corrections import NoCorrection
from grpo_lib.algo.losses import CorrectedSurrogate, build_loss
from grpo_lib.algo.packing import pack, unpack_tokens
from grpo_lib.algo.terms import TokenTerms
from grpo_lib.config import AlgorithmConfig
from grpo_lib.types import PackedBatch
from tests.unit.algo_cases import make_sample, place

LOSSES = ("grpo", "dapo", "cispo", "dr_grpo", "gspo")
CORRECTIONS = ("tis", "two_sided", "mask", "sequence", "off")
KL_KINDS = ("k1", "k2", "k3", "k3_weighted")


@dataclass(frozen=True, kw_only=True)
class Doc:
    """One document's trained tokens, as plain numbers."""

    advantage: float
    new: list[float]
    rollout: list[float]
    old: list[float] | None = None  # None: the current policy
    ref: list[float] | None = None


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def reference_token(cfg: AlgorithmConfig, doc: Doc, frozen: Doc, t: int) -> tuple[float, float, bool]:
    """(policy loss, KL, clip active) of one token by the formulas; `frozen.new` stands where a gradient is stopped."""
    advantage = doc.advantage
    old = frozen.new if doc.old is None else doc.old
    ratio = math.exp(doc.new[t] - old[t])
    low, high = 1 - cfg.clip_lower, 1 + (cfg.clip_lower if cfg.loss in ("grpo", "dr_grpo") else cfg.clip_higher)
    if cfg.loss == "cispo":
        stopped = math.exp(frozen.new[t] - old[t])
        policy, active = -advantage * min(stopped, high) * doc.new[t], stopped > high
    else:
        if cfg.loss == "gspo":
            sequence = math.exp(sum(n - o for n, o in zip(frozen.new, old, strict=True)) / len(old))
            r = sequence * math.exp(doc.new[t] - frozen.new[t])
        else:
            r = ratio
        policy = max(-advantage * r, -advantage * clip(r, low, high))
        active = -advantage * clip(r, low, high) > -advantage * r
    cap = cfg.correction_cap
    log_rho = [o - r for o, r in zip(old, doc.rollout, strict=True)]
    rho = math.exp(clip(log_rho[t], -10, 10))
    weight = {
        "off": 1.0,
        "tis": min(rho, cap),
        "two_sided": clip(rho, 1 / cap, cap),
        "mask": rho if 1 / cap <= rho <= cap else 0.0,
        "sequence": clip(math.exp(sum(log_rho) / len(log_rho)), 1 / cap, cap),
    }[cfg.correction]
    if doc.ref is None:
        return policy * weight, 0.0, active
    d = clip(doc.new[t] - doc.ref[t], -40, 40)
    kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d, "k3_weighted": ratio * d}[cfg.kl_estimator]
    return policy * weight, kl, active


def reference_loss(cfg: AlgorithmConfig, docs: Sequence[Doc], denominator: float, frozen: Sequence[Doc]) -> float:
    total = 0.0
    for doc, stopped in zip(docs, frozen, strict=True):
        for t in range(len(doc.new)):
            policy, kl, _ = reference_token(cfg, doc, stopped, t)
            total += policy + cfg.kl_beta * kl
    return total / denominator


def random_docs(seed: int, *, with_old: bool, with_ref: bool) -> list[Doc]:
    rng = np.random.default_rng(seed)

    def near(base: np.ndarray, spread: float) -> list[float]:
        return [float(np.float32(x)) for x in base + rng.normal(0, spread, base.shape)]

    docs = []
    for length in (1, 4, 7, 3):
        base = rng.uniform(-3, -0.2, length)
        docs.append(
            Doc(
                advantage=float(np.float32(rng.normal())),
                new=near(base, 0.3),
                rollout=near(base, 0.8),
                old=near(base, 0.3) if with_old else None,
                ref=near(base, 0.5) if with_ref else None,
            )
        )
    return docs


def build(docs: Sequence[Doc], *, junk: float = 0.0, pack_length: int = 16) -> tuple[torch.Tensor, PackedBatch]:
    """Logprobs [B, T] float64 that require grad, and the batch; `junk` fills every untrained position."""
    samples = [
        make_sample(f"d{i}", 2, len(doc.new), advantage=doc.advantage, rollout_logprobs=doc.rollout)
        for i, doc in enumerate(docs)
    ]
    batch = pack(samples, pack_length)

    def field(values: list[list[float]]) -> torch.Tensor:
        return place(batch, {f"d{i}": v for i, v in enumerate(values)}, elsewhere=junk)

    if docs[0].old is not None:
        batch = batch.with_logprobs(old=field([doc.old or [] for doc in docs]).float())
    if docs[0].ref is not None:
        batch = batch.with_logprobs(ref=field([doc.ref or [] for doc in docs]).float())
    if junk:
        rollout = torch.where(batch.response_mask, batch.rollout_logprobs, junk)
        batch = replace(batch, rollout_logprobs=rollout)
    return field([doc.new for doc in docs]).requires_grad_(), batch


def finite_differences(cfg: AlgorithmConfig, docs: list[Doc], denominator: float) -> dict[str, list[float]]:
    eps, grads = 1e-6, {}
    for i, doc in enumerate(docs):
        grads[f"d{i}"] = []
        for t in range(len(doc.new)):
            sides = []
            for sign in (1, -1):
                moved = replace(doc, new=[x + sign * eps * (k == t) for k, x in enumerate(doc.new)])
                sides.append(reference_loss(cfg, [*docs[:i], moved, *docs[i + 1 :]], denominator, docs))
            grads[f"d{i}"].append((sides[0] - sides[1]) / (2 * eps))
    return grads


def all_configs(*, kl_beta: float) -> list[AlgorithmConfig]:
    return [
        AlgorithmConfig(loss=loss, correction=correction, kl_beta=kl_beta)
        for loss, correction in itertools.product(LOSSES, CORRECTIONS)
    ]


CASES = [
    (AlgorithmConfig(loss=loss, correction=correction, kl_beta=0.1), with_old)
    for loss, correction, with_old in itertools.product(LOSSES, CORRECTIONS, (True, False))
] + [(AlgorithmConfig(kl_beta=0.3, kl_estimator=kind), with_old) for kind in KL_KINDS for with_old in (True, False)]


@pytest.mark.parametrize(
    ("cfg", "with_old"), CASES, ids=lambda v: v if isinstance(v, bool) else f"{v.loss}-{v.correction}-{v.kl_estimator}"
)
def test_loss_and_gradient_equal_a_plain_loop_and_finite_differences(cfg: AlgorithmConfig, with_old: bool):
    docs = random_docs(7, with_old=with_old, with_ref=True)
    logprobs, batch = build(docs)
    loss, metrics = build_loss(cfg)(logprobs, batch, 11.0)
    loss.backward()
    assert loss.item() == pytest.approx(reference_loss(cfg, docs, 11.0, docs), rel=1e-6)
    assert logprobs.grad is not None
    grads = unpack_tokens(batch, logprobs.grad)
    for sample_id, expected in finite_differences(cfg, docs, 11.0).items():
        np.testing.assert_allclose(grads[sample_id], expected, rtol=1e-5, atol=1e-7)
    tokens = [reference_token(cfg, doc, doc, t) for doc in docs for t in range(len(doc.new))]
    values = metrics.values()
    assert values["loss/policy"] == pytest.approx(sum(t[0] for t in tokens) / len(tokens), rel=1e-6)
    assert values["loss/kl"] == pytest.approx(sum(t[1] for t in tokens) / len(tokens), rel=1e-5, abs=1e-7)
    assert values["policy/clipfrac"] == pytest.approx(sum(t[2] for t in tokens) / len(tokens))
    assert metrics.stats["loss/policy"].weight == len(tokens)


def one_token(
    cfg: AlgorithmConfig, *, advantage: float, ratio: float = 1.0, rho: float = 1.0
) -> tuple[float, dict[str, float]]:
    old = -3.0
    doc = Doc(advantage=advantage, new=[old + math.log(ratio)], old=[old], rollout=[old - math.log(rho)])
    logprobs, batch = build([doc])
    loss, metrics = build_loss(cfg)(logprobs, batch, 1.0)
    return loss.item(), metrics.values()


@pytest.mark.parametrize(
    ("loss", "advantage", "ratio", "expected", "clipped"),
    [
        ("dapo", 1.0, 1.5, -1.272, 1),  # no gain beyond 1 + clip_higher
        ("dapo", 1.0, 1.25, -1.25, 0),
        ("dapo", -1.0, 1.5, 1.5, 0),  # a bad token that became likelier is never clipped
        ("dapo", -1.0, 0.5, 0.8, 1),
        ("dapo", 1.0, 0.5, -0.5, 0),
        ("grpo", 1.0, 1.25, -1.2, 1),  # symmetric: clip_lower on both sides
        ("grpo", -1.0, 0.5, 0.8, 1),
        ("dr_grpo", 1.0, 1.25, -1.2, 1),
        ("cispo", 1.0, 1.5, -1.272 * (-3 + math.log(1.5)), 1),
        ("cispo", -1.0, 0.5, 0.5 * (-3 + math.log(0.5)), 0),
        ("gspo", 1.0, 1.5, -1.272, 1),
    ],
)
def test_hand_worked_surrogates(loss: str, advantage: float, ratio: float, expected: float, clipped: int):
    value, metrics = one_token(AlgorithmConfig.model_validate({"loss": loss}), advantage=advantage, ratio=ratio)
    assert value == pytest.approx(expected, rel=1e-6)
    assert metrics["policy/clipfrac"] == clipped


@pytest.mark.parametrize(
    ("correction", "rho", "weight", "metric", "share"),
    [
        ("tis", 3.0, 2.0, "correction/bounded_share", 1),
        ("tis", 1.5, 1.5, "correction/bounded_share", 0),
        ("tis", 0.1, 0.1, "correction/bounded_share", 0),
        ("two_sided", 0.1, 0.5, "correction/bounded_share", 1),
        ("mask", 3.0, 0.0, "correction/masked_share", 1),
        ("mask", 0.4, 0.0, "correction/masked_share", 1),
        ("mask", 1.5, 1.5, "correction/masked_share", 0),
        ("sequence", 3.0, 2.0, "correction/bounded_share", 1),
        ("sequence", 0.1, 0.5, "correction/bounded_share", 1),
        ("off", 3.0, 1.0, "correction/bounded_share", 0),
        ("tis", math.exp(50), 2.0, "correction/bounded_share", 1),
    ],
)
def test_hand_worked_corrections(correction: str, rho: float, weight: float, metric: str, share: int):
    cfg = AlgorithmConfig.model_validate({"correction": correction})
    value, metrics = one_token(cfg, advantage=-1.0, rho=rho)
    assert value == pytest.approx(weight, rel=1e-5)
    assert metrics[metric] == share


def test_correction_carries_no_gradient():
    """With old = the current policy, rho depends on the parameters; its gradient must not."""
    docs = random_docs(3, with_old=False, with_ref=False)
    logprobs, batch = build(docs)
    build_loss(AlgorithmConfig())(logprobs, batch, 1.0)[0].backward()
    assert logprobs.grad is not None
    grads = unpack_tokens(batch, logprobs.grad)
    for i, doc in enumerate(docs):
        expected = [-doc.advantage * min(math.exp(n - r), 2.0) for n, r in zip(doc.new, doc.rollout, strict=True)]
        np.testing.assert_allclose(grads[f"d{i}"], expected, rtol=1e-6)


@pytest.mark.parametrize("junk", [float("-inf"), float("nan"), float("inf"), -1e4])
def test_untrained_positions_get_exactly_zero_gradient_whatever_they_hold(junk: float):
    """verl 721: inf at a padded position times a mask of 0 is NaN."""
    docs = random_docs(5, with_old=True, with_ref=True)
    for cfg in all_configs(kl_beta=0.1):
        logprobs, batch = build(docs, junk=junk)
        clean, clean_batch = build(docs)
        value = build_loss(cfg)(logprobs, batch, 5.0)[0]
        value.backward()
        assert value.item() == build_loss(cfg)(clean, clean_batch, 5.0)[0].item()
        assert logprobs.grad is not None
        assert (logprobs.grad[~batch.response_mask] == 0).all()
        assert (logprobs.grad[batch.response_mask] != 0).any()


def test_multiplying_by_the_mask_would_not_do():
    """The sabotage of the test above: the same sum with a product instead of a selection is NaN."""
    logprobs, batch = build(random_docs(5, with_old=True, with_ref=True), junk=float("-inf"))
    assert batch.old_logprobs is not None
    product = (torch.exp(logprobs - batch.old_logprobs) * batch.response_mask).sum()
    product.backward()
    assert torch.isnan(product)


def gspo_doc(length: int, per_token: float) -> Doc:
    return Doc(advantage=1.0, new=[-1.0 + per_token] * length, old=[-1.0] * length, rollout=[-1.0] * length)


def test_gspo_ratio_does_not_grow_with_length_and_stays_in_its_document():
    cfg = AlgorithmConfig(loss="gspo", clip_lower=0.2, clip_higher=0.2)
    for length in (1, 10, 1000):
        logprobs, batch = build([gspo_doc(length, 0.1), gspo_doc(5, -0.1)], pack_length=1024)
        loss, _ = build_loss(cfg)(logprobs, batch, 1.0)
        loss.backward()
        assert loss.item() == pytest.approx(-(length * math.exp(0.1) + 5 * math.exp(-0.1)), rel=1e-5)
        assert logprobs.grad is not None
        grads = unpack_tokens(batch, logprobs.grad)
        np.testing.assert_allclose(grads["d0"], -math.exp(0.1), rtol=1e-6)
        np.testing.assert_allclose(grads["d1"], -math.exp(-0.1), rtol=1e-6)
    assert math.exp(1000 * 0.1) > 1e40, "the ratio of the whole sequence would have overflowed"


def test_sequence_weight_does_not_collapse_with_length():
    """NeMo-RL 2269: exp(sum of log-ratios) of a long document is 0 or at the bound, so it trains on nothing."""
    cfg = AlgorithmConfig(correction="sequence")
    for length in (1, 20, 2000):
        doc = Doc(advantage=-1.0, new=[-1.0] * length, rollout=[-1.0 + 0.05] * length)
        logprobs, batch = build([doc], pack_length=2048)
        value, metrics = build_loss(cfg)(logprobs, batch, float(length))
        assert value.item() == pytest.approx(math.exp(-0.05), rel=1e-5)
        assert metrics.values()["correction/bounded_share"] == 0
    assert math.exp(-0.05 * 2000) < 1e-40


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_ratios_beyond_float32_leave_loss_and_gradient_finite(correction: str):
    """exp(150) is inf in float32, and inf times a zero advantage or a zero gradient is NaN."""
    cfg = AlgorithmConfig.model_validate({"correction": correction})
    for advantage, old, rollout in ((0.0, -150.0, -0.1), (1.0, -0.1, -150.0), (-1.0, -150.0, -0.1)):
        doc = Doc(advantage=advantage, new=[-0.1, -0.1], old=[old, -0.1], rollout=[rollout, -0.1])
        logprobs, batch = build([doc])
        single = logprobs.detach().float().requires_grad_()
        loss, _ = build_loss(cfg)(single, batch, 1.0)
        loss.backward()
        assert math.isfinite(loss.item())
        assert single.grad is not None
        assert torch.isfinite(single.grad).all()


@pytest.mark.parametrize("junk", [float("-inf"), float("nan")])
def test_terms_are_finite_everywhere_and_zero_where_nothing_is_trained(junk: float):
    logprobs, batch = build(random_docs(5, with_old=True, with_ref=True), junk=junk)
    terms = TokenTerms.of(logprobs, batch)
    for values in (terms.new, terms.old, terms.rollout, terms.advantages):
        assert torch.isfinite(values).all()
        assert not values[~batch.response_mask].any()


def constant_surrogate(terms: TokenTerms) -> tuple[torch.Tensor, torch.Tensor]:
    return terms.new + 1.0, torch.ones_like(terms.mask)


def test_only_trained_tokens_count_whatever_a_surrogate_says_elsewhere():
    logprobs, batch = build(random_docs(5, with_old=False, with_ref=False))
    loss = CorrectedSurrogate(surrogate=constant_surrogate, correction=NoCorrection())
    value, metrics = loss(logprobs, batch, 3.0)
    expected = (logprobs[batch.response_mask] + 1).sum() / 3
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    assert metrics.values()["policy/clipfrac"] == 1


def test_losses_survive_pickling():
    logprobs, batch = build(random_docs(1, with_old=True, with_ref=True))
    for cfg in (*all_configs(kl_beta=0.0), *all_configs(kl_beta=0.1)):
        policy_loss = build_loss(cfg)
        restored = pickle.loads(pickle.dumps(policy_loss))
        assert restored == policy_loss
        assert restored(logprobs, batch, 3.0)[0].item() == policy_loss(logprobs, batch, 3.0)[0].item()


def test_missing_reference_and_empty_denominator_are_refused():
    logprobs, batch = build(random_docs(1, with_old=False, with_ref=False))
    with pytest.raises(ValueError, match=r"algorithm\.kl_beta is 0\.1 but the batch carries no ref_logprobs"):
        build_loss(AlgorithmConfig(kl_beta=0.1))(logprobs, batch, 1.0)
    for denominator in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="loss_denominator is"):
            build_loss(AlgorithmConfig())(logprobs, batch, denominator)


def test_zero_beta_needs_no_reference_and_reports_no_kl():
    logprobs, batch = build(random_docs(1, with_old=False, with_ref=False))
    _, metrics = build_loss(AlgorithmConfig())(logprobs, batch, 1.0)
    assert set(metrics.stats) == {"loss/policy", "policy/clipfrac", "correction/bounded_share"}
