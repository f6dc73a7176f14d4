"""The gate's card rendered to what the browser gets: complete, strict JSON, tolerances where a rule has one."""

import importlib
import json
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

os.environ.setdefault("METAFLOW_USER", "tests")  # metaflow refuses to be imported by an unknown user

from grpo_lib.config import ParityConfig
from grpo_lib.parity.report import to_dict
from tests.unit.test_cards import HOSTILE, RecordingCard, by_type
from tests.unit.test_parity_verdicts import report

PAIR = "hf_deepspeed vs olmo_core"
TOLERANCES = ParityConfig(replay_max_abs=2e-5, replay_relative=1e-5, noise_factor=3.0)


@pytest.fixture(scope="module")
def cards_parity() -> ModuleType:
    """Imported as the flow does, with its folder first on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).resolve().parents[2] / "flows")
        return importlib.import_module("cards_parity")


def gate_report(**changes: Any) -> dict[str, Any]:
    plain = to_dict(report())
    plain["checks"].append(plain["checks"][0] | {"name": f"free-running: weight over noise floor, {PAIR}"})
    plain["tables"] |= {
        "lockstep": [
            {
                "step": step, "pair": PAIR, "tokens": 700, "max |dlogprob|": 4e-6, "gradient": 2e-6, "weight": 1e-8,
                "update": 1e-4, "farthest gradient": "model.norm.weight",
            }
            | changes
            for step in (1, 2)
        ],
        "free_running": [
            {
                "step": step, "pair": PAIR, "weight": 3e-7, "floor of weight": 2e-7, "loss": 1e-8,
                "floor of loss": 0.0,
            }
            for step in (1, 2)
        ],
        "drift": [
            {
                "state": "DRIFT", "check": "a", "value": 4e-6, "median": 1e-6, "limit": 2e-6, "tolerance": 1e-5,
                "nights": 9,
            }
        ],
    }  # fmt: skip
    return plain


def rendered(cards_parity: ModuleType, **changes: Any) -> list[dict[str, Any]]:
    return [part.render() for part in cards_parity.gate_components(gate_report(**changes), TOLERANCES)]


def points(chart: dict[str, Any], panel: str, line: str) -> list[float]:
    values = chart["spec"]["data"]["values"]
    return [point["value"] for point in values if point["panel"] == f"{PAIR}: {panel}" and point["line"] == line]


def test_the_card_shows_verdicts_drifts_steps_and_probe(cards_parity: ModuleType) -> None:
    parts = rendered(cards_parity)
    assert by_type(parts, "markdown")[0]["source"] == "# Parity gate: PASS"
    checks, drift, steps, pairs, limits = by_type(parts, "table")
    assert len(checks["data"]) == len(gate_report()["checks"])
    assert drift["data"] == [["DRIFT", "a", "4e-06", "1e-06", "2e-06", "1e-05", "9"]]
    assert steps["columns"][:4] == ["step", "pair", "tokens", "max |dlogprob|"]
    assert len(steps["data"]) == 2
    assert len(pairs["data"]) == 5
    assert len(limits["data"]) > 5


def test_lockstep_stands_beside_its_tolerances(cards_parity: ModuleType) -> None:
    lockstep, _, _ = by_type(rendered(cards_parity), "vegaChart")
    assert points(lockstep, "max |dlogprob|", "difference") == [4e-6, 4e-6]
    assert points(lockstep, "max |dlogprob|", "tolerance") == [2e-5, 2e-5]
    assert points(lockstep, "gradient", "tolerance") == points(lockstep, "weight", "tolerance") == [1e-5, 1e-5]


def test_free_running_stands_beside_its_floor_and_where_a_check_says_so_its_multiple(cards_parity: ModuleType) -> None:
    _, free, _ = by_type(rendered(cards_parity), "vegaChart")
    assert points(free, "weight", "noise floor") == [2e-7, 2e-7]
    assert points(free, "weight", "tolerance") == pytest.approx([6e-7, 6e-7])
    assert points(free, "loss", "difference") == [1e-8, 1e-8]
    assert points(free, "loss", "tolerance") == [], "no check is about it"


@pytest.mark.parametrize("value", [0.0, None, math.nan, math.inf])
def test_what_a_logarithmic_axis_cannot_show_leaves_a_gap(cards_parity: ModuleType, value: float | None) -> None:
    parts = rendered(cards_parity, gradient=value)
    json.dumps(parts, allow_nan=False)
    lockstep, free, _ = by_type(parts, "vegaChart")
    assert points(lockstep, "gradient", "difference") == []
    assert points(lockstep, "gradient", "tolerance") == [1e-5, 1e-5]
    assert points(free, "loss", "noise floor") == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_stay_text(cards_parity: ModuleType, text: str) -> None:
    parts = rendered(cards_parity, **{"farthest gradient": text})
    json.dumps(parts, allow_nan=False).encode()
    steps = by_type(parts, "table")[2]
    assert all(type(value) is str and value.isprintable() for line in steps["data"] for value in line)


def test_the_card_receives_everything(cards_parity: ModuleType) -> None:
    card = RecordingCard()
    cards_parity.gate_card(gate_report(), TOLERANCES, card=card)
    assert len(card.components) == len(rendered(cards_parity))


def test_a_comparison_shows_its_verdict_and_every_table_but_curves(cards_parity: ModuleType) -> None:
    card = RecordingCard()
    plain = to_dict(report())
    plain["tables"] = {"outcomes": [{"what": "accuracy", "a": 0.5}], "curves": [{"side": "A"}], "counts": []}
    cards_parity.comparison_card(plain, card=card)
    parts = [component.render() for component in card.components]
    assert [part["source"] for part in by_type(parts, "markdown")] == ["# Comparison of runs: PASS", "## Outcomes"]
    assert by_type(parts, "table")[1]["data"] == [["accuracy", "0.5"]]
