"""The judge of a resumed run notices every kind of loss, one at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_lib.config import ParityConfig
from grpo_lib.parity.resume_proof import ProvenRun, other_ranks_checks, same_run_checks
from grpo_lib.types import ParityVerdict

STRAIGHT = ProvenRun(
    rows=[{"step": step, "loss/policy": 0.1 * step, "optim/grad_norm": None} for step in (1, 2, 3, 4)],
    prompts=["e0.a", "e0.b", "e1.b", "e1.a"],
    samples=[(f"{visit}/{index}", index, b"tokens") for visit in ("e0.a", "e0.b", "e1.b", "e1.a") for index in (0, 1)],
    certified=[(version, f"sum{version}") for version in range(5)],
    weights={"embed": "aa", "norm": "bb"},
)
CONTINUED = replace(STRAIGHT, certified=[(0, "sum0"), (1, "sum1"), (2, "sum2"), (2, "sum2"), (3, "sum3"), (4, "sum4")])
RESTORED = [2]


def failed(continued: ProvenRun, restored: list[int] = RESTORED) -> list[str]:
    checks = same_run_checks("run", STRAIGHT, continued, restored=restored)
    return [check.name.partition(": ")[2] for check in checks if check.verdict is not ParityVerdict.PASS]


def test_the_same_run_passes() -> None:
    assert failed(CONTINUED) == []


@pytest.mark.parametrize(
    ("loss", "check"),
    [
        ({"rows": STRAIGHT.rows[:-1]}, "one row per step"),
        ({"rows": [*STRAIGHT.rows[:2], *STRAIGHT.rows[1:]]}, "one row per step"),
        ({"rows": [STRAIGHT.rows[1], STRAIGHT.rows[0], *STRAIGHT.rows[2:]]}, "one row per step"),
        ({"prompts": ["e0.a", "e0.b", "e1.b", "e1.b"]}, "prompts"),
        ({"prompts": ["e0.a", "e0.b", "e0.a", "e0.b"]}, "prompts"),  # the first epoch again
        ({"samples": [*STRAIGHT.samples[:-1], ("e1.a/1", 7, b"tokens")]}, "samples"),  # another seed
        ({"samples": [*STRAIGHT.samples[:-1], ("e1.a/1", 1, b"others")]}, "samples"),
        (
            {"rows": [*STRAIGHT.rows[:3], {**STRAIGHT.rows[3], "loss/policy": 0.4 + 1e-16 * 2**3}]},
            "metrics, bit for bit",
        ),
        ({"rows": [*STRAIGHT.rows[:3], {"step": 4, "optim/grad_norm": None}]}, "metrics, bit for bit"),
        ({"weights": {"embed": "aa", "norm": "bc"}}, "final weights, bit for bit"),
        ({"weights": {"embed": "aa"}}, "final weights, bit for bit"),
    ],
)
def test_a_loss_is_noticed(loss: dict[str, object], check: str) -> None:
    assert check in failed(replace(CONTINUED, **loss))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "certified",
    [
        [(0, "sum0"), (1, "sum1"), (2, "sum2"), (3, "sum3"), (4, "sum4")],  # no push after the resume
        [(0, "sum0"), (1, "sum1"), (2, "sum2"), (0, "sum0"), (3, "sum3"), (4, "sum4")],  # version 0 again
    ],
)
def test_a_resume_that_does_not_send_the_restored_version_is_noticed(certified: list[tuple[int, str]]) -> None:
    assert failed(replace(CONTINUED, certified=certified)) == ["first push of each resume"]


def test_base_weights_under_the_restored_version_are_noticed() -> None:
    certified = [(2, "sum0") if index == 3 else push for index, push in enumerate(CONTINUED.certified)]
    assert failed(replace(CONTINUED, certified=certified)) == ["weights sent, by version"]


def test_nothing_compared_proves_nothing() -> None:
    nothing = ProvenRun(rows=[], prompts=[], samples=[], certified=[], weights={})
    verdicts = {check.verdict for check in same_run_checks("run", nothing, nothing, restored=[])}
    assert verdicts == {ParityVerdict.INCONCLUSIVE}


def ranks(
    *, loss: float = 0.3, distance: float = 2e-8, noise: float = 1e-8, samples: object = None
) -> list[ParityVerdict]:
    rows = [{**row, "loss/policy": loss} if row["step"] == 3 else row for row in STRAIGHT.rows]
    other = replace(STRAIGHT, rows=rows, samples=samples or STRAIGHT.samples)  # type: ignore[arg-type]
    checks = other_ranks_checks(
        "ranks", straight=STRAIGHT, other=other, first_step=3, distance=distance, noise=noise, config=ParityConfig()
    )
    return [check.verdict for check in checks]


PASS, FAIL, OPEN = ParityVerdict.PASS, ParityVerdict.FAIL, ParityVerdict.INCONCLUSIVE


def test_other_ranks_agree_within_rounding_and_then_within_noise() -> None:
    assert ranks() == [PASS, PASS]
    assert ranks(loss=0.3 + 9e-6) == [PASS, PASS]
    assert ranks(loss=0.3 + 2e-5) == [FAIL, PASS]
    assert ranks(distance=4e-8) == [PASS, FAIL]
    assert ranks(noise=0.0) == [PASS, PASS], "a trainer that repeats itself to the bit is held to one step's rounding"
    assert ranks(noise=0.0, distance=1e-4) == [PASS, FAIL]
    assert ranks(samples=[*STRAIGHT.samples[:-1], ("e1.a/1", 1, b"flipped")], distance=1.0) == [PASS, OPEN]
