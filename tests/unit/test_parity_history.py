"""Nights and drifts: the rule on worked numbers, its false alarms by simulation, and a history file that survives."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_lib.config import RunConfig, resolve
from grpo_lib.parity.history import (
    Drift,
    DriftState,
    Night,
    NightlyCheck,
    comparable,
    drift_lines,
    drift_rows,
    drifts,
)
from grpo_lib.stages import parity_history
from grpo_lib.stages.parity_history import append_night, history_path, read_history
from grpo_lib.types import ParityVerdict

CHECK = "lockstep: gradient"


def night(
    value: float | None,
    *,
    index: int = 0,
    name: str = CHECK,
    tolerance: float = 1e-5,
    verdict: ParityVerdict = ParityVerdict.PASS,
    **changes: Any,
) -> Night:
    fields: dict[str, Any] = {
        "date": f"2026-01-{index + 1:02d}T03:00:00+00:00",
        "run_id": f"ParityFlow/{index}",
        "recipe": "embedded_addition",
        "model_sha256": "a" * 64,
        "trainers": ("olmo_core", "hf_deepspeed"),
        "workload": "b" * 64,
        "commit": "c" * 40,
        "packages": {"torch": "2.13.0", "vllm": None},
        "verdict": verdict,
        "checks": (NightlyCheck(name=name, verdict=verdict, value=value, tolerance=tolerance),),
        "seconds": {"rollouts": 60.0},
    }
    return Night(**fields | changes)


def nights(*values: float, **changes: Any) -> list[Night]:
    return [night(value, index=index, **changes) for index, value in enumerate(values)]


def drift(value: float | None, past: list[Night], **changes: Any) -> Drift:
    (found,) = drifts(night(value, index=30, **changes), past)
    return found


def test_the_band_on_worked_numbers() -> None:
    """Logs in units of log 2 around 1e-6: -2 -1 0 1 2, so the median is 1e-6 and the MAD 1 doubling."""
    past = nights(0.25e-6, 0.5e-6, 1e-6, 2e-6, 4e-6)
    limit = 1e-6 * 2 ** (5 * 1.4826)
    found = drift(limit * 0.999, past)
    assert found.median == pytest.approx(1e-6)
    assert found.limit == pytest.approx(limit)
    assert found.num_nights == 5
    assert found.state is DriftState.STEADY
    assert drift(limit * 1.001, past).state is DriftState.DRIFT


def test_identical_nights_leave_a_doubling() -> None:
    past = nights(*[1e-6] * 14)
    assert drift(1.99e-6, past).state is DriftState.STEADY
    assert drift(2.01e-6, past).state is DriftState.DRIFT


def test_one_odd_night_moves_the_band_by_nothing() -> None:
    assert drift(2.01e-6, nights(*[1e-6] * 13, 9e-6)).state is DriftState.DRIFT


def test_a_fall_is_no_drift() -> None:
    assert drift(1e-9, nights(*[1e-6] * 14)).state is DriftState.STEADY


def test_what_is_below_rounding_counts_as_rounding() -> None:
    past = nights(*[0.0] * 14)
    assert drift(2 * 2**-24, past).state is DriftState.STEADY
    assert drift(3 * 2**-24, past).state is DriftState.DRIFT


def test_four_nights_are_no_band() -> None:
    found = drift(1.0, nights(*[1e-6] * 4))
    assert found.state is DriftState.TOO_FEW_NIGHTS
    assert math.isnan(found.limit)
    assert drift(1.0, nights(*[1e-6] * 5)).state is DriftState.DRIFT


def test_a_value_that_is_no_number_is_outside_of_every_band() -> None:
    assert drift(None, nights(*[1e-6] * 5)).state is DriftState.DRIFT
    broken = [night(None, index=index, verdict=ParityVerdict.FAIL) for index in range(5)]
    assert drift(1e-6, broken).state is DriftState.TOO_FEW_NIGHTS, "nor is it a part of one"


def test_values_that_failed_do_not_widen_the_band() -> None:
    failed = [night(9e-4, index=index, verdict=ParityVerdict.FAIL) for index in range(10, 16)]
    found = drift(3e-6, [*nights(*[1e-6] * 5), *failed])
    assert (found.state, found.num_nights) == (DriftState.DRIFT, 5)


def test_a_check_without_room_passes_or_fails_and_never_drifts() -> None:
    assert drifts(night(1.0, tolerance=0.0), nights(*[0.0] * 14, tolerance=0.0)) == []


def test_a_check_of_another_name_is_another_series() -> None:
    assert drift(1.0, nights(*[1e-6] * 14, name="free-running: weights")).state is DriftState.TOO_FEW_NIGHTS


def test_the_farthest_above_its_band_comes_first_and_what_has_none_last() -> None:
    values = {"steady": 1e-6, "worst": 9e-6, "new": 1.0, "bad": 4e-6}
    old = [
        night(0.0, index=index, checks=_checks({name: 1e-6 for name in values if name != "new"})) for index in range(5)
    ]
    found = drifts(night(0.0, index=30, checks=_checks(values)), old)
    assert [one.check for one in found] == ["worst", "bad", "steady", "new"]


def _checks(values: dict[str, float]) -> tuple[NightlyCheck, ...]:
    return tuple(
        NightlyCheck(name=name, verdict=ParityVerdict.PASS, value=value, tolerance=1e-5)
        for name, value in values.items()
    )


def alarm_share(num_nights: int, scatter: float, *, factor: float = 1.0, repetitions: int = 4000) -> float:
    """Share of nights that raise an alarm where values scatter log-normally and tonight's is `factor` times larger."""
    random = np.random.default_rng(7)
    values = 1e-6 * np.exp(random.normal(0.0, scatter, size=(repetitions, num_nights + 1)))
    flagged = 0
    for row in values:
        past = nights(*row[:-1].tolist())
        flagged += drift(row[-1] * factor, past).state is DriftState.DRIFT
    return flagged / repetitions


@pytest.mark.parametrize(
    ("num_nights", "scatter", "bound"),
    [(5, 0.1, 0.0005), (14, 0.1, 0.0005), (5, 0.2, 0.001), (14, 0.2, 0.001), (5, 0.5, 0.025), (14, 0.5, 0.0033)],
)
def test_false_alarms_stay_below_the_stated_rate(num_nights: int, scatter: float, bound: float) -> None:
    assert alarm_share(num_nights, scatter) <= bound


def test_a_tripled_value_is_noticed() -> None:
    assert alarm_share(14, 0.1, factor=3.0) >= 0.99
    assert alarm_share(5, 0.1, factor=3.0) >= 0.95


def test_a_lasting_rise_is_flagged_for_half_of_the_window() -> None:
    past, flagged = nights(*[1e-6] * 14), []
    for index in range(14, 28):
        tonight = night(4e-6, index=index)
        (found,) = drifts(tonight, comparable(tonight, past, most=14))
        flagged.append(found.state is DriftState.DRIFT)
        past.append(tonight)
    assert flagged == [True] * 7 + [False] * 7


@pytest.mark.parametrize(
    "change",
    [{"recipe": "other"}, {"model_sha256": "d" * 64}, {"trainers": ("olmo_core",)}, {"workload": "e" * 64}],
)
def test_nights_that_measured_something_else_are_left_out(change: dict[str, Any]) -> None:
    other = night(1e-6, index=3, **change)
    same = night(1e-6, index=4, commit=None, packages={})
    assert comparable(night(1e-6, index=9), [other, same], most=14) == [same]


def test_only_the_last_nights_count_and_tonight_is_none_of_them() -> None:
    past = nights(*[1e-6] * 20)
    tonight = past[-1]
    assert [one.run_id for one in comparable(tonight, past, most=14)] == [f"ParityFlow/{i}" for i in range(5, 19)]


def test_a_night_that_was_tried_again_counts_once() -> None:
    again = night(2e-6, index=1)
    found = comparable(night(1e-6, index=9), [night(1e-6, index=1), again], most=14)
    assert found == [again]


def test_rows_are_strict_json() -> None:
    rows = drift_rows([drift(1e-6, nights(*[1e-6] * 3)), drift(None, nights(*[1e-6] * 5))])
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert rows[0] == {
        "state": "not enough nights", "check": CHECK, "value": 1e-6, "median": None, "limit": None,
        "tolerance": 1e-5, "nights": 3,
    }  # fmt: skip
    assert (rows[1]["state"], rows[1]["value"]) == ("DRIFT", None)


def test_a_terminal_gets_a_line_for_what_left_its_band() -> None:
    past = nights(*[1e-6] * 6)
    assert drift_lines([drift(1e-6, past[:3])]) == ["drift: not enough nights for a band (3 of 5)"]
    assert drift_lines([drift(1e-6, past)]) == ["drift: 0 of 1 values are above the band of the last 6 nights"]
    assert drift_lines([drift(4e-6, past)]) == [
        "drift: 1 of 1 values are above the band of the last 6 nights",
        "  lockstep: gradient: 4e-06, median 1e-06, band up to 2e-06, tolerance 1e-05",
    ]
    assert drift_lines([]) == ["drift: not enough nights for a band (0 of 5)"]


def test_nights_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [night(1e-6, index=0), night(None, index=1, verdict=ParityVerdict.FAIL), night(0.0, index=2, commit=None)]
    for one in written:
        append_night(tmp_path / "new" / "history.jsonl", one)
    history = read_history(tmp_path / "new" / "history.jsonl")
    assert history.nights == tuple(written)
    assert history.damaged == ()


def test_no_file_is_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none.jsonl").nights == ()


def test_half_a_last_line_is_reported_and_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_night(path, night(1e-6, index=0))
    append_night(path, night(1e-6, index=1))
    path.write_bytes(path.read_bytes()[:-40])
    history = read_history(path)
    assert [one.run_id for one in history.nights] == ["ParityFlow/0"]
    assert len(history.damaged) == 1
    assert "line 2 is not a night and is left out" in history.damaged[0]
    append_night(path, night(1e-6, index=2))
    assert [one.run_id for one in read_history(path).nights] == ["ParityFlow/0", "ParityFlow/2"]


@pytest.mark.parametrize("line", [b"{}", b"[1]", b"\xff\xfe", b'{"date": 3}'])
def test_a_line_that_is_no_night_is_reported_by_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(line + b"\n")
    append_night(path, night(1e-6))
    history = read_history(path)
    assert len(history.nights) == 1
    assert "line 1 is not a night" in history.damaged[0]


def test_nights_that_end_together_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    threads = [threading.Thread(target=append_night, args=(path, night(1e-6, index=i))) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = read_history(path)
    assert sorted(one.run_id for one in history.nights) == sorted(f"ParityFlow/{i}" for i in range(20))
    assert history.damaged == ()


def configuration(root: Path, *overrides: str) -> RunConfig:
    return resolve("embedded_addition", [f"storage.root={root}", *overrides])


def report(value: float | None, tolerance: float = 1e-5) -> dict[str, Any]:
    verdict = "FAIL" if value is None or value > tolerance else "PASS"
    check = {"name": CHECK, "verdict": verdict, "value": value, "tolerance": tolerance}
    return {"verdict": verdict, "checks": [check | {"num_observations": 1, "evidence": ""}], "tables": {}}


def record(config: RunConfig, value: float | None, index: int) -> parity_history.NightRecord:
    return parity_history.run(
        config,
        report(value),
        run_id=f"ParityFlow/{index}",
        trainers=("olmo_core", "hf_deepspeed"),
        lineage={"git": None, "packages": {"torch": "2.13.0"}, "model_sha256": "a" * 64},
        seconds={"rollouts": 1.5},
    )


def test_the_sixth_night_has_a_band_and_leaves_it(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    lines = [record(config, value, index).lines[0] for index, value in enumerate([1e-6] * 5 + [5e-6])]
    assert lines[4] == "drift: not enough nights for a band (4 of 5)"
    assert lines[5] == "drift: 1 of 1 values are above the band of the last 5 nights"
    (last,) = read_history(history_path(config)).nights[5:]
    assert last.verdict is ParityVerdict.PASS, "a drift is no failure"
    assert last.seconds == {"rollouts": 1.5}


def test_a_damaged_line_is_shown_to_the_night_after_it(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    history_path(config).write_text('{"date": "2026-')
    assert "line 1 is not a night" in record(config, 1e-6, 0).lines[-1]


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("parity.replay_max_abs=1e-9", True),
        ("seed=5", True),
        ("deadlines.train_s=9", True),
        ("trainer.backend=hf_deepspeed", True),
        ("parity.replay_steps=4", False),
        ("trainer.learning_rate=1e-4", False),
        ("evaluation.samples_per_prompt=20", False),
    ],
)
def test_what_is_computed_makes_a_series_and_how_it_is_judged_does_not(
    tmp_path: Path, override: str, same: bool
) -> None:
    for config in (configuration(tmp_path), configuration(tmp_path, override)):
        record(config, 1e-6, 0)
    first, second = read_history(tmp_path / parity_history.FILE).nights
    assert (first.series == second.series) is same


def test_a_history_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    from grpo_lib.errors import StorageError

    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"parity-history\.jsonl"):
        record(configuration(tmp_path / "file"), 1e-6, 0)
