"""Both trainers on a GPU: kernels against fp32, documents that stay apart, gradients, steps, and what they may not do.

Models are tiny and random; every check has the mistake beside it that it is there to notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lib.algo.packing import pack, plan_step, unpack_tokens
from grpo_lib.errors import GrpoError, NonFiniteGradient
from grpo_lib.interfaces import InspectableTrainer
from grpo_lib.trainers.measured_adamw import MeasuredAdamW, global_norm, local_tensor
from grpo_lib.trainers.output_head import HeadOptions, TorchRows, fused_logprobs, projected_logprobs
from grpo_lib.trainers.varlen_attention import DocumentKernel, document_kernel
from grpo_lib.types import StateKind, TrainingSample
from tests.distributed.trainer_cases import (
    CONFIG,
    OLMO_CORE,
    ZERO,
    BackendCase,
    largest_difference,
    policy_loss,
    samples,
)
from tests.document_kernels import masked_attention
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PACK = 256
GPU: Mapping[str, Any] = {"device": "cuda", "dtype": "bfloat16", "fp32_head": True}
COMPILED = BackendCase(name="olmo_core_compiled", backend="olmo_core", settings={"compile": True})
HF_COMPILED = BackendCase(name="hf_compiled", backend="hf_deepspeed", settings={"zero_stage": 2, "compile": True})
RECOMPUTED = BackendCase(
    name="olmo_core_recomputed", backend="olmo_core", settings={"compile": True, "activation_checkpointing": True}
)
CASES = (OLMO_CORE, COMPILED, RECOMPUTED, ZERO[2], ZERO[3], HF_COMPILED)
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def own_graphs() -> Iterator[None]:
    """A process may hold the graphs of a policy and its reference, not those of all models here."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3_tied"), "qwen3_tied")


def build(case: BackendCase, model: Path, **options: Any) -> InspectableTrainer:
    return case.build(0, 1, model, **{**GPU, **options})


def scores(trainer: InspectableTrainer, some: Sequence[TrainingSample]) -> dict[str, np.ndarray]:
    batch = pack(some, PACK)
    return unpack_tokens(batch, trainer.logprobs(batch))


def gradients(trainer: InspectableTrainer) -> dict[str, np.ndarray]:
    plan = plan_step(samples(), num_ranks=1, pack_length=PACK, micro_batch_packs=1)
    trainer.forward_backward(plan.micro_batches[0], policy_loss(), loss_denominator=float(plan.num_trained_tokens))
    return device_state(trainer, StateKind.GRADIENT)


def device_state(trainer: InspectableTrainer, kind: StateKind) -> dict[str, np.ndarray]:
    return {name: t.cpu().numpy().copy() for bucket in trainer.named_state(kind) for name, t in bucket.tensors}


def cosine(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    x, y = (np.concatenate([side[name].ravel() for name in sorted(a)]).astype(np.float64) for side in (a, b))
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))


# --- Kernels ----------------------------------------------------------------------------------------------------------


def attention_inputs(lens: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """q, k, v of 8 and 2 heads, and boundaries."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (sum(lens), 128)
    q, k, v = (
        torch.randn(shape[0], heads, shape[1], generator=generator, device="cuda").bfloat16().requires_grad_()
        for heads in (8, 2, 2)
    )
    return q, k, v, torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32, device="cuda")


def kernel() -> DocumentKernel:
    found = document_kernel(torch.device("cuda"), torch.bfloat16)
    assert found is not None
    return found


def test_the_attention_kernel_and_its_gradients_are_near_fp32() -> None:
    lens = (300, 1, 700, 23)
    q, k, v, bounds = attention_inputs(lens)
    wide = [x.detach().float().cpu().requires_grad_() for x in (q, k, v)]
    out = kernel()(q, k, v, bounds, max(lens), None)
    expected = masked_attention(wide[0], wide[1], wide[2], bounds.cpu(), max(lens), None)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = (out, *torch.autograd.grad(out, (q, k, v), upstream.cuda().bfloat16()))
    for a, b in zip(found, (expected, *torch.autograd.grad(expected, wide, upstream)), strict=True):
        assert float((a.float().cpu() - b).norm() / b.norm()) < 1e-2


def test_the_attention_kernel_gives_a_document_the_same_bits_alone_and_packed() -> None:
    lens = (300, 1, 700, 23)
    q, k, v, bounds = attention_inputs(lens)
    packed = kernel()(q, k, v, bounds, max(lens), None)
    leaking = kernel()(q, k, v, bounds[[0, -1]], sum(lens), None)
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = torch.tensor([0, stop - start], dtype=torch.int32, device="cuda")
        alone = kernel()(q[start:stop], k[start:stop], v[start:stop], own, stop - start, None)
        assert torch.equal(packed[start:stop], alone)
        assert start == 0 or not torch.equal(leaking[start:stop], alone)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fused_logprobs_equal_their_reference(temperature: float, fp32: bool, recompute: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    hidden = torch.randn(300, 128, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(151_936, 128, generator=generator, device="cuda").mul_(0.3).bfloat16().requires_grad_()
    labels = torch.randint(151_936, (300,), generator=generator, device="cuda")
    upstream = torch.randn(300, generator=generator, device="cuda")
    options = HeadOptions(temperature=temperature, chunk_tokens=128, recompute=recompute, fp32=fp32)
    triton = projected_logprobs(hidden, weight, labels, options)
    plain = fused_logprobs(hidden, weight, labels, options, kernels=TorchRows())
    for a, b in zip(triton, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = torch.log_softmax(wide[0] @ wide[1].t() / temperature, -1).gather(1, labels[:, None])[:, 0]
    error = float((triton[0].double() - exact).abs().max())
    assert error < (1e-4 if fp32 else 0.2)
    assert fp32 or error > 1e-3, "bfloat16 logits would round more than this"
    found = torch.autograd.grad(triton[0], (hidden, weight), upstream)
    for a, b in zip(found, torch.autograd.grad(exact, wide, upstream.double()), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < (1e-2 if fp32 else 3e-2)


# --- Documents stay apart (invariant 1) -------------------------------------------------------------------------------


@each_case
def test_documents_score_the_same_in_any_pack(model: Path, case: BackendCase) -> None:
    trainer, some = build(case, model), samples()
    packed = scores(trainer, some)
    assert largest_difference(packed, scores(trainer, some[::-1])) == 0  # rows of one length: the same products
    alone = {key: value for sample in some for key, value in scores(trainer, [sample]).items()}
    # Rows are padded to one length here too, but the head's product is of as many rows as there are labels.
    assert largest_difference(packed, alone) < 1e-4
    exact = build(OLMO_CORE, model, device="cpu", dtype="float32")
    assert largest_difference(packed, scores(exact, some)) < 0.25


def without_boundaries(device: torch.device, dtype: torch.dtype) -> DocumentKernel | None:
    """A kernel that takes a row for one document."""
    found = document_kernel(device, dtype)
    assert found is not None

    def leaking(q: Any, k: Any, v: Any, cu_lens: torch.Tensor, max_len: int, scale: float | None) -> torch.Tensor:
        return found(q, k, v, cu_lens[[0, -1]], len(q), scale)

    return leaking


@pytest.mark.parametrize("case", [OLMO_CORE, ZERO[2]], ids=lambda case: case.name)
def test_removed_boundaries_are_noticed_at_construction(
    model: Path, case: BackendCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_lib.trainers import hf_deepspeed, olmo_core_model

    for module in (hf_deepspeed, olmo_core_model):
        monkeypatch.setattr(module, "document_kernel", without_boundaries)
    with pytest.raises(GrpoError, match="cross document boundaries"):
        build(case, model)


# --- What the engine gets (invariant 2) -------------------------------------------------------------------------------


@each_case
def test_weights_are_plain_full_tensors_of_the_folder(model: Path, case: BackendCase) -> None:
    from safetensors.torch import load_file

    trainer = build(case, model)
    folder = {name: t for file in model.glob("*.safetensors") for name, t in load_file(file).items()}
    sent = {name: t for bucket in trainer.named_weights() for name, t in bucket.tensors}
    assert sent.keys() == folder.keys() == {entry.name for entry in trainer.manifest().entries}
    for name, tensor in sent.items():
        assert type(tensor) is torch.Tensor
        assert tensor.is_contiguous()
        assert tensor.device.type == "cuda"
        assert torch.equal(tensor.cpu(), folder[name].bfloat16()), name


@each_case
def test_weights_are_the_rounded_masters_after_a_step(model: Path, case: BackendCase) -> None:
    trainer = build(case, model)
    gradients(trainer)
    trainer.optim_step()
    sent = {name: t for bucket in trainer.named_weights() for name, t in bucket.tensors}
    masters = {name: t for bucket in trainer.named_state(StateKind.WEIGHT) for name, t in bucket.tensors}
    assert all(torch.equal(sent[name], masters[name].bfloat16()) for name in sent)
    before = scores(trainer, samples())
    trainer.load_state(StateKind.WEIGHT, lambda name: masters[name].cpu())
    assert largest_difference(before, scores(trainer, samples())) == 0, "the model computes with what is sent"


# --- Gradients and steps ----------------------------------------------------------------------------------------------


@each_case
def test_gradients_point_where_fp32_ones_do(model: Path, case: BackendCase) -> None:
    exact = gradients(build(OLMO_CORE, model, device="cpu", dtype="float32"))
    found = gradients(build(case, model))
    assert found.keys() == exact.keys()
    assert cosine(found, exact) > 0.99
    lengths = [np.linalg.norm(np.concatenate([g.ravel() for g in side.values()])) for side in (found, exact)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.05)
    shuffled = {name: np.roll(g, 1) for name, g in found.items()}
    assert cosine(shuffled, exact) < 0.9, "nothing would be noticed"


@each_case
def test_a_step_is_that_of_pytorchs_adamw(model: Path, case: BackendCase) -> None:
    trainer = build(case, model)
    before, gradient = device_state(trainer, StateKind.WEIGHT), gradients(trainer)
    values = trainer.optim_step().values()
    norm = float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values())))
    assert values["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert values["optim/weights_moved"] == 1
    parameters = {name: torch.nn.Parameter(torch.from_numpy(w.copy())) for name, w in before.items()}
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(gradient[name]) * min(1.0, CONFIG.max_grad_norm / (norm + 1e-6))
    torch.optim.AdamW(
        parameters.values(),
        lr=values["optim/lr"],
        betas=(CONFIG.adam_beta1, CONFIG.adam_beta2),
        eps=CONFIG.adam_eps,
        weight_decay=CONFIG.weight_decay,
    ).step()
    after = device_state(trainer, StateKind.WEIGHT)
    squares, num = 0.0, 0
    for name, parameter in parameters.items():
        np.testing.assert_allclose(after[name], parameter.detach().numpy(), rtol=1e-5, atol=2e-6)
        squares, num = squares + float(((after[name] - before[name]) ** 2.0).sum()), num + after[name].size
    assert values["optim/update_rms"] == pytest.approx((squares / num) ** 0.5, rel=1e-3)


def test_gradients_of_micro_batches_add_up_in_fp32(model: Path) -> None:
    """One micro-batch leaves its gradients in bfloat16; the sum of several would lose them there."""
    trainer = build(OLMO_CORE, model)
    plan = plan_step(samples(), num_ranks=1, pack_length=64, micro_batch_packs=1)
    batches = plan.micro_batches[0]
    assert len(batches) > 1
    total: dict[str, np.ndarray] = {}
    for batch in batches:
        trainer.forward_backward([batch], policy_loss(), loss_denominator=10.0)
        for name, gradient in device_state(trainer, StateKind.GRADIENT).items():
            total[name] = total[name] + gradient if name in total else gradient
        weights = device_state(trainer, StateKind.WEIGHT)
        trainer.load_state(StateKind.WEIGHT, lambda name, weights=weights: torch.tensor(weights[name]))  # drops them
    trainer.forward_backward(batches, policy_loss(), loss_denominator=10.0)
    together = device_state(trainer, StateKind.GRADIENT)
    rounded = {name: torch.tensor(gradient).bfloat16().float().numpy() for name, gradient in total.items()}
    # Documents are shorter than a tile, so that attention adds up its gradients in one order.
    assert relative_difference(together, total) < 1e-5
    assert relative_difference(rounded, total) > 1e-4, "a sum in bfloat16 would not be noticed"


def relative_difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """Largest over all tensors, relative to the tensor's largest element."""
    return max(float(np.abs(found[name] - expected[name]).max() / np.abs(expected[name]).max()) for name in expected)


@pytest.mark.parametrize("size", [5000, 20480], ids=["unaligned", "aligned"])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.bfloat16])
def test_one_pass_adamw_is_pytorchs_and_writes_the_rounded_copy(gradient_dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(4)
    weight = torch.nn.Parameter(torch.randn(size, generator=generator, device="cuda"))
    weight.grad_dtype = None
    gradient = torch.randn(size, generator=generator, device="cuda").to(gradient_dtype)
    copy = torch.zeros(size, device="cuda", dtype=torch.bfloat16)
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    ours = MeasuredAdamW([weight], **options)
    ours.copies = {weight: copy}
    ours.state[weight] = {
        "step": torch.zeros((), device="cuda"),
        "exp_avg": torch.zeros_like(weight),
        "exp_avg_sq": torch.zeros_like(weight),
    }
    other = torch.nn.Parameter(weight.detach().clone())
    theirs = torch.optim.AdamW([other], **options)
    for step in range(3):
        norm = global_norm([gradient])
        torch.testing.assert_close(norm, gradient.double().norm().float(), rtol=1e-6, atol=0)
        weight.grad, other.grad = gradient, gradient.float() * (0.5 / (norm + 1e-6))
        ours.start(step, norm=norm, max_norm=0.5)
        ours.step()
        theirs.step()
        torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)
        assert torch.equal(copy, weight.detach().bfloat16())


@pytest.mark.parametrize("case", [OLMO_CORE, ZERO[2], ZERO[3]], ids=lambda case: case.name)
def test_a_gradient_that_is_not_finite_changes_nothing(model: Path, case: BackendCase) -> None:
    trainer = build(case, model)
    gradients(trainer)
    state = {kind: device_state(trainer, kind) for kind in (StateKind.WEIGHT, StateKind.FIRST_MOMENT)}
    spoil_gradient(trainer)
    with pytest.raises(NonFiniteGradient, match="nan"):
        trainer.optim_step()
    assert trainer.policy_version == 0
    for kind, expected in state.items():
        for name, tensor in device_state(trainer, kind).items():
            np.testing.assert_array_equal(tensor, expected[name])
    gradients(trainer)
    assert trainer.optim_step().values()["optim/weights_moved"] == 1


def spoil_gradient(trainer: Any) -> None:
    if hasattr(trainer, "_state") and not callable(trainer._state):
        name = next(iter(trainer._parameters))
        trainer._state.held(StateKind.GRADIENT, name).values[0] = float("nan")
    else:
        local_tensor(next(iter(trainer._masters.parameters())).grad).view(-1)[0] = float("nan")


# --- Speed is not bought with waiting or compiling --------------------------------------------------------------------


@pytest.mark.parametrize("case", [OLMO_CORE, COMPILED, ZERO[2]], ids=lambda case: case.name)
def test_no_host_waits_between_the_batch_and_its_backward_pass(model: Path, case: BackendCase) -> None:
    trainer: Any = build(case, model)
    gradients(trainer)  # compiles, and fills caches of memory
    trainer.optim_step()
    batch = pack(samples(), PACK)
    labels = torch.where(batch.response_mask, batch.labels, -100)
    torch.cuda.set_sync_debug_mode("error")
    try:
        logprobs, _ = trainer._forward(batch.input_ids, labels, batch.doc_ids, batch.position_ids)
        value, _ = policy_loss()(logprobs, batch.to("cuda"), 100.0)
        if case.backend == "olmo_core":  # DeepSpeed's own backward pass waits
            trainer._weights.backward(value, is_last=True)
        with pytest.raises(RuntimeError, match="synchroniz"):
            value.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", [COMPILED, HF_COMPILED], ids=lambda case: case.name)
def test_packs_of_other_lengths_are_not_compiled_again(model: Path, case: BackendCase) -> None:
    trainer = build(case, model, config=CONFIG.model_copy(update={"pack_length": 1024, "micro_batch_packs": 1}))
    rng = np.random.default_rng(0)

    def train_on(lengths: Sequence[int]) -> None:
        some = []
        for index, length in enumerate(lengths):
            mask = np.arange(length) > 2
            zeros = np.zeros(length, np.float32)
            some.append(
                TrainingSample(
                    sample_id=f"e0.p{index}/0",
                    input_ids=rng.integers(3, 90, length),
                    response_mask=mask,
                    advantages=np.where(mask, 1, 0).astype(np.float32),
                    rollout_logprobs=zeros,
                )
            )
        plan = plan_step(some, num_ranks=1, pack_length=1024, micro_batch_packs=1)
        trainer.forward_backward(plan.micro_batches[0], policy_loss(), loss_denominator=float(plan.num_trained_tokens))
        trainer.optim_step()

    train_on([300, 100])
    train_on([700])
    torch._dynamo.config.error_on_recompile = True
    try:
        for lengths in ([50, 60, 70], [900, 100], [1024], [200] * 5):
            train_on(lengths)
    finally:
        torch._dynamo.config.error_on_recompile = False


def test_reference_scores_do_not_change_the_policy(model: Path) -> None:
    """A frozen trainer shares the process, and with it PyTorch's settings of compilation and kernels."""
    trainer = build(COMPILED, model)
    before = scores(trainer, samples())
    frozen = build(COMPILED, model, trainable=False)
    assert largest_difference(before, scores(frozen, samples())) == 0
    assert largest_difference(before, scores(trainer, samples())) == 0
