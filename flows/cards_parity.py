"""The card of the nightly gate: verdicts, drifts, distances per step on logarithmic axes, and the probe.

Plain data in; what `cards` says of text that a model wrote holds here too.
"""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cards import SCHEMA, Card, finite, histogram_spec, pair_table, record_table, step_card, thinned, verdict_table
from metaflow.cards import Markdown, VegaChart
from metaflow.plugins.cards.card_modules.card import MetaflowCardComponent

from grpo_lib.config import ParityConfig

_FLOOR = "floor of "  # prefix of a column of the table `free_running`
_LINES = ("difference", "noise floor", "tolerance")
_STEP_COLUMNS = ("step", "pair", "tokens", "max |dlogprob|", "gradient", "weight", "update", "farthest gradient")

Row = Mapping[str, Any]


def gate_card(parity: Mapping[str, Any], tolerances: ParityConfig, *, card: Card | None = None) -> None:
    """Append the night's report to the card "gate" of the running step.

    Args:
        parity: `parity.report.to_dict` of probe and replay together, with the table `drift`.
    """
    card = card if card is not None else step_card("gate")
    for component in gate_components(parity, tolerances):
        card.append(component)


def gate_components(parity: Mapping[str, Any], tolerances: ParityConfig) -> list[MetaflowCardComponent]:
    """The card, top to bottom."""
    tables = parity["tables"]
    return [
        Markdown(f"# Parity gate: {parity['verdict']}"),
        verdict_table(parity),
        Markdown("## Drift\n\nValues above the band of the nights before. A drift warns; it changes no verdict."),
        record_table(tables["drift"]),
        Markdown(
            "## Lockstep\n\nEach step from the same weights and optimiser state. What is exactly 0 has no place on a "
            "logarithmic axis and is not drawn."
        ),
        VegaChart(distance_spec(lockstep_lines(tables["lockstep"], tolerances))),
        record_table([{name: row[name] for name in _STEP_COLUMNS} for row in tables["lockstep"]]),
        Markdown(
            "## Free-running\n\nEach trainer on its own way, beside the noise floor: one trainer and itself with "
            "another micro-batch split."
        ),
        VegaChart(distance_spec(free_lines(tables["free_running"], tolerances, parity["checks"]))),
        Markdown("## Probe: log-probability differences\n\nTokens by |difference| in nats, both axes logarithmic."),
        VegaChart(histogram_spec(tables["histogram"])),
        pair_table(parity),
        Markdown("## What these numbers cannot show"),
        record_table(tables["limits"]),
    ]


def comparison_card(report: Mapping[str, Any], *, card: Card | None = None) -> None:
    """Append the comparison of finished runs to the card "compare" of the running step.

    Args:
        report: `parity.report.to_dict`; every table but its curves is shown.
    """
    card = card if card is not None else step_card("compare")
    card.append(Markdown(f"# Comparison of runs: {report['verdict']}"))
    card.append(verdict_table(report))
    for name, rows in report["tables"].items():
        if rows and name != "curves":
            card.append(Markdown(f"## {name.replace('_', ' ').capitalize()}"))
            card.append(record_table(rows))


def lockstep_lines(rows: Sequence[Row], tolerances: ParityConfig) -> list[Row]:
    """Points of the distances of log-probabilities, gradients and weights, and their tolerances."""
    limits = {
        "max |dlogprob|": tolerances.replay_max_abs,
        "gradient": tolerances.replay_relative,
        "weight": tolerances.replay_relative,
    }
    return [
        _point(f"{row['pair']}: {name}", row["step"], line, value)
        for row in thinned(rows)
        for name, limit in limits.items()
        for line, value in (("difference", row[name]), ("tolerance", limit))
    ]


def free_lines(rows: Sequence[Row], tolerances: ParityConfig, checks: Sequence[Row]) -> list[Row]:
    """Points of every quantity and its noise floor; where a check holds it to a multiple of the floor, that too."""
    names = [check["name"] for check in checks]
    points = []
    for row in thinned(rows):
        for quantity in (column.removeprefix(_FLOOR) for column in row if column.startswith(_FLOOR)):
            panel, floor = f"{row['pair']}: {quantity}", row[_FLOOR + quantity]
            points += [_point(panel, row["step"], "difference", row[quantity])]
            points += [_point(panel, row["step"], "noise floor", floor)]
            if floor is not None and any(f"{quantity} over noise floor" in name for name in names):
                points += [_point(panel, row["step"], "tolerance", floor * tolerances.noise_factor)]
    return points


def _point(panel: str, step: int, line: str, value: object) -> Row:
    return {"panel": panel, "step": step, "line": line, "value": finite(value) or None}


def distance_spec(points: Sequence[Row]) -> dict[str, Any]:
    """Vega-Lite lines over steps, one panel per quantity; what is 0 or no number leaves a gap."""
    return {
        "$schema": SCHEMA,
        "height": 110,
        "width": 600,
        "data": {"values": [point for point in points if point["value"] is not None]},
        "mark": {"type": "line", "tooltip": True, "point": True},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "axis": {"tickMinStep": 1}},
            "y": {
                "field": "value",
                "type": "quantitative",
                "scale": {"type": "log"},
                "axis": {"format": ".0e", "tickCount": 5},
                "title": None,
            },
            "color": {"field": "line", "type": "nominal", "scale": {"domain": _LINES}, "title": None},
            "facet": {"field": "panel", "type": "nominal", "columns": 1, "title": None},
        },
        "resolve": {"scale": {"y": "independent"}},
    }
