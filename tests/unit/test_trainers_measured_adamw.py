"""AdamW that measures itself steps as PyTorch's does, and says what it did."""

from __future__ import annotations

import pytest
import torch

from grpo_lib.trainers.measured_adamw import MeasuredAdamW

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((30, 7), (11,), (2, 3, 4))]


def test_weights_are_pytorchs_bit_for_bit_and_the_change_is_counted() -> None:
    ours, theirs = parameters(), parameters()
    measured, plain = MeasuredAdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        before = [parameter.detach().clone() for parameter in ours]
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn(mine.shape, generator=generator)
            other.grad = mine.grad.clone()
        measured.start(step)
        measured.step()
        plain.step()
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
        moved = torch.cat([(new.detach() - old).flatten() for new, old in zip(ours, before, strict=True)])
        num_changed, sum_of_squares = measured.change().tolist()
        assert num_changed == int(moved.count_nonzero())
        torch.testing.assert_close(sum_of_squares, float(moved.double().square().sum()), rtol=1e-6, atol=0)


def test_parts_of_one_step_add_up_and_a_new_one_starts_from_nothing() -> None:
    """ZeRO-3 steps one group of parameters after the other."""
    first, second, _ = parameters()
    adamw = MeasuredAdamW([first, second], **OPTIONS)  # pyright: ignore[reportArgumentType]
    adamw.start(0)
    for parameter in (first, second):
        first.grad = second.grad = None
        parameter.grad = torch.ones_like(parameter)
        adamw.step()
    assert adamw.change()[0] == first.numel() + second.numel()
    adamw.start(1)
    adamw.step()
    assert adamw.change()[0] == second.numel()


def test_a_step_that_changes_nothing_says_so() -> None:
    (first, *_) = parameters()
    adamw = MeasuredAdamW([first], **{**OPTIONS, "lr": 0.0})  # pyright: ignore[reportArgumentType]
    first.grad = torch.ones_like(first)
    adamw.start(0)
    adamw.step()
    assert not adamw.change().any()


def test_tensors_are_looked_at_again_when_they_were_replaced() -> None:
    (parameter,) = parameters()[:1]
    adamw = MeasuredAdamW([parameter], **OPTIONS)  # pyright: ignore[reportArgumentType]
    state = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    held = adamw._held(parameter, state)
    assert adamw._held(parameter, state) is held
    state["exp_avg"] = torch.ones_like(parameter)
    assert adamw._held(parameter, state).exp_avg is state["exp_avg"]
    adamw.copies = {parameter: parameter.detach().bfloat16()}
    assert adamw._held(parameter, state).copy is adamw.copies[parameter]
    state["exp_avg_sq"] = torch.zeros(7, 30).t()
    with pytest.raises(AssertionError):
        adamw._held(parameter, state)
