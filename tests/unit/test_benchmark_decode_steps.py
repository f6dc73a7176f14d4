"""The parts of a decode step: kernels by kind, steps that are counted whole, and a probe that leaves nothing behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_steps import Event, StepProbe, busy_us, kind_of, products_ms, summary


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", "attention"),
        ("_gumbel_sample_kernel", "sampler"),
        ("_topk_log_softmax_kernel", "sampler"),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", "norms and pointwise"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16>", "norms and pointwise"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("_post_update_kernel", "other"),
    ],
)
def test_kernels_are_sorted_by_kind(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_time_in_which_two_kernels_run_counts_once() -> None:
    events = [
        Event(name="b", start=8.0, end=12.0),
        Event(name="a", start=0.0, end=10.0),
        Event(name="c", start=20, end=21),
    ]
    assert busy_us(events) == 13.0
    found = summary(
        [Event(name="nvjet", start=0.0, end=3000.0), Event(name="nvjet", start=3000.0, end=4000.0)], steps=2
    )
    assert found["busy_ms"] == 2.0
    assert found["kind_ms"] == {"products": 2.0}
    assert found["longest"] == [{"name": "nvjet", "kind": "products", "ms": 2.0, "per_step": 1.0}]


class Core:
    """A core whose step multiplies once, so that a recording counts its steps."""

    def __init__(self) -> None:
        engine = SimpleNamespace(scheduler=self.Scheduler(), model_executor=self.Executor())
        self.llm: Any = SimpleNamespace(engine_core=SimpleNamespace(engine_core=engine))
        self.engine = engine

    class Scheduler:
        def schedule(self) -> str:
            return "batch"

        def update_from_output(self, output: str) -> str:
            return output

    class Executor:
        def execute_model(self, batch: str) -> Any:
            assert batch == "batch"
            torch.mm(torch.ones(4, 4), torch.ones(4, 4))
            return SimpleNamespace(result=lambda: "tokens")

        def sample_tokens(self) -> None:
            return None

    def step(self) -> list[str]:
        future = self.engine.model_executor.execute_model(self.engine.scheduler.schedule())
        self.engine.model_executor.sample_tokens()
        return [self.engine.scheduler.update_from_output(future.result())]


def test_a_probe_records_whole_steps_and_leaves_nothing_behind() -> None:
    core = Core()
    before = dict(vars(core.engine.scheduler)), dict(vars(core.engine.model_executor))
    with StepProbe(core, first=3, steps=5) as probe:
        assert [core.step() for _ in range(14)] == [["tokens"]] * 14
    assert (vars(core.engine.scheduler), vars(core.engine.model_executor)) == before
    assert "step" not in vars(core)
    found = probe.result()
    (products,) = (kernel for kernel in found["longest"] if kernel["name"] == "aten::mm")
    assert products["per_step"] == 1.0
    assert set(found["host_ms"]) == {
        "schedule", "execute_model", "wait", "sample_tokens", "update_from_output", "outputs and rest",
    }  # fmt: skip
    assert sum(found["host_ms"].values()) == pytest.approx(found["wall_ms"])


def test_too_few_steps_are_an_error() -> None:
    core = Core()
    with StepProbe(core, first=3, steps=5) as probe:
        for _ in range(10):
            core.step()
    with pytest.raises(RuntimeError, match="10 steps are too few to record 5 from step 3 on"):
        probe.result()


def test_products_of_all_matrices_are_timed() -> None:
    small = [torch.ones(64, 32), torch.ones(32, 64)]
    assert 0 < products_ms(small, 4, rounds=2) < products_ms(small * 200, 64, rounds=2)
