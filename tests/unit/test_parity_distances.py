"""Distances of two states against hand-worked numbers; b is the reference."""

import math
import weakref

import pytest
import torch

from grpo_lib.parity import distances
from grpo_lib.parity.distances import StateDistance, state_distance

INF, NAN = math.inf, math.nan


def of(a: dict[str, list[float]], b: dict[str, list[float]]) -> StateDistance:
    return state_distance(list(a), lambda name: torch.tensor(a[name]), lambda name: torch.tensor(b[name]))


def test_hand_worked_numbers() -> None:
    found = of({"w": [3.0, 4.0], "v": [0.0]}, {"w": [3.0, 0.0], "v": [4.0]})
    w = next(tensor for tensor in found.tensors if tensor.name == "w")
    assert (w.norm_a, w.norm_b) == (5.0, 3.0)
    assert w.relative == pytest.approx(4 / 3)  # |(0, 4)| / |(3, 0)|
    assert w.cosine == pytest.approx(0.6)  # 9 / (5 · 3)
    assert w.scale == pytest.approx(1.0)  # 9 / 9
    # (3, 4, 0) and (3, 0, 4): apart (0, 4, -4), both of norm 5, product 9
    assert found.whole.relative == pytest.approx(math.sqrt(32) / 5)
    assert found.whole.cosine == found.whole.scale == pytest.approx(9 / 25)


def test_half_the_gradient_is_parallel_with_scale_one_half() -> None:
    found = of({"w": [0.5, -1.0]}, {"w": [1.0, -2.0]}).whole
    assert (found.cosine, found.scale, found.relative) == (pytest.approx(1.0), 0.5, 0.5)


def test_the_second_is_the_reference() -> None:
    assert of({"w": [2.0]}, {"w": [1.0]}).whole.relative == 1.0
    assert of({"w": [1.0]}, {"w": [2.0]}).whole.relative == 0.5


def test_zero_tensors() -> None:
    equal = of({"w": [0.0, 0.0]}, {"w": [0.0, 0.0]}).whole
    assert equal.relative == 0.0
    assert math.isnan(equal.cosine)
    assert math.isnan(equal.scale)
    only_a = of({"w": [1.0]}, {"w": [0.0]}).whole
    assert only_a.relative == INF
    assert math.isnan(only_a.scale)
    only_b = of({"w": [0.0]}, {"w": [2.0]}).whole
    assert (only_b.relative, only_b.scale) == (1.0, 0.0)
    assert math.isnan(only_b.cosine)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_a_non_finite_entry_is_never_a_number(bad: float, side: str) -> None:
    good, broken = {"w": [1.0, 2.0], "v": [1.0]}, {"w": [1.0, bad], "v": [1.0]}
    found = of(good if side == "b" else broken, good if side == "a" else broken)
    assert math.isnan(found.whole.relative)
    assert math.isnan(found.whole.cosine)
    assert math.isnan(found.whole.scale)
    assert [tensor.name for tensor in found.tensors] == ["w", "v"], "the broken tensor comes first"
    assert found.tensors[1].relative == 0.0


def test_the_farthest_tensor_comes_first() -> None:
    found = of({"far": [2.0], "near": [1.0], "lost": [1.0]}, {"far": [1.0], "near": [1.0], "lost": [0.0]})
    assert [tensor.name for tensor in found.tensors] == ["lost", "far", "near"]


def test_differences_below_fp32_resolution_of_the_sums_are_seen() -> None:
    """In fp32 the squares of these would vanish beside 1."""
    b = torch.ones(1000)
    a = b.clone()
    a[0] += 2**-23
    found = state_distance(["w"], lambda _: a, lambda _: b).whole
    assert found.relative == pytest.approx(2**-23 / math.sqrt(1000), rel=1e-6)


def test_large_tensors_are_widened_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(7, 11, generator=generator), torch.randn(7, 11, generator=generator)
    whole = state_distance(["w"], lambda _: a, lambda _: b).whole
    monkeypatch.setattr(distances, "_CHUNK", 10)
    parts = state_distance(["w"], lambda _: a, lambda _: b).whole
    assert parts.relative == pytest.approx(whole.relative, rel=1e-12)
    assert parts.relative == pytest.approx(float((a - b).double().norm() / b.double().norm()), rel=1e-6)


def test_only_one_tensor_of_each_is_held() -> None:
    alive: list[str] = []

    def read(name: str) -> torch.Tensor:
        alive.append(name)
        assert len(alive) <= 2, f"{alive} are held at the same time"
        tensor = torch.ones(3)
        weakref.finalize(tensor, alive.remove, name)
        return tensor

    assert state_distance([f"w{i}" for i in range(5)], read, read).whole.relative == 0.0


def test_two_shapes_and_no_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'w' has shape \(2,\) and \(1,\)"):
        of({"w": [1.0, 2.0]}, {"w": [1.0]})
    with pytest.raises(ValueError, match="no tensors"):
        of({}, {})
