"""What people see of a run: a live card while `fit` trains, and the report card.

Everything here takes plain data. Text that a model wrote is data of someone else: it only ever goes into table cells,
which Metaflow's viewer writes as text nodes, never into Markdown, which it renders with raw HTML.
"""

# pyright: reportPrivateImportUsage=false
# (metaflow declares no exports)

from __future__ import annotations

import math
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from metaflow import current
from metaflow.cards import Markdown, ProgressBar, Table, VegaChart
from metaflow.plugins.cards.card_modules.card import MetaflowCardComponent

SCHEMA = "https://vega.github.io/schema/vega-lite/v5.json"
_MOST_POINTS = 300  # per chart; more steps are thinned, so that a card stays small
_MOST_CHARACTERS = 400  # of a cell
_RECENT_STEPS = 20  # that the time left is estimated from
_LIVE_SERIES = ("reward/mean", "reward/correct_rate")
_NOT_SPANS = ("time/step_s", "time/group_latency_max_s")

MetricRow = Mapping[str, Any]


class Card(Protocol):
    """The part of Metaflow's card manager used here."""

    def append(self, component: MetaflowCardComponent, id: str | None = None) -> None: ...  # noqa: A002  # Metaflow's

    def refresh(self) -> None: ...


class LiveCard:
    """The card of a running `fit`: progress, reward, times, time left.

    A refresh starts a process that costs about a second of CPU, so refreshes keep their distance; the last step always
    refreshes.

    Args:
        card: Where to draw; by default the card "live" of the running step.
        min_interval_s: Smallest distance of two refreshes.
    """

    def __init__(
        self,
        *,
        total_steps: int,
        card: Card | None = None,
        min_interval_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._card = card if card is not None else step_card("live")
        self._total_steps = total_steps
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._rows: list[MetricRow] = []
        self._progress = ProgressBar(max=total_steps, label="steps", value=0, metadata="starting")
        self._curve = VegaChart(curve_spec([], _LIVE_SERIES))
        self._times = VegaChart(time_spec([]))
        for component in (self._progress, Markdown("## Reward"), self._curve, Markdown("## Seconds"), self._times):
            self._card.append(component)
        self._refresh()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show one more finished step."""
        self._rows.append({"step": step, **metrics})
        if step < self._total_steps and self._clock() - self._refreshed < self._min_interval_s:
            return
        self._progress.update(step, metadata=self._status(step))
        self._curve.update(curve_spec(self._rows, _LIVE_SERIES))
        self._times.update(time_spec(self._rows))
        self._refresh()

    def _refresh(self) -> None:
        self._refreshed = self._clock()
        self._card.refresh()

    def _status(self, step: int) -> str:
        recent = [row["time/step_s"] for row in self._rows[-_RECENT_STEPS:]]
        seconds = sum(recent) / len(recent)
        left = duration((self._total_steps - step) * seconds)
        return f"reward {figure(self._rows[-1].get('reward/mean'))}, {seconds:.2f} s a step, {left} left"


def step_card(card_id: str) -> Card:
    """The card with that id of the step that is running."""
    return current.card[card_id]  # pyright: ignore[reportAttributeAccessIssue]  # set by @card at run time


def report_card(
    parity: Mapping[str, Any],
    *,
    metrics: Sequence[MetricRow],
    evaluation: Mapping[str, Any],
    samples: Sequence[Mapping[str, object]],
    card: Card | None = None,
) -> None:
    """Append the report to the card "report" of the running step.

    Args:
        parity: `parity.report.to_dict`.
        metrics: Rows of the metrics file.
        evaluation: `EvaluationResult.to_dict`.
        samples: Rows for people, e.g. prompt, answer, text, reward; column names are the keys of the first.
    """
    card = card if card is not None else step_card("report")
    for component in report_components(parity, metrics=metrics, evaluation=evaluation, samples=samples):
        card.append(component)


def report_components(
    parity: Mapping[str, Any],
    *,
    metrics: Sequence[MetricRow],
    evaluation: Mapping[str, Any],
    samples: Sequence[Mapping[str, object]],
) -> list[MetaflowCardComponent]:
    """The report, top to bottom."""
    return [
        Markdown(f"# Parity: {parity['verdict']}"),
        verdict_table(parity),
        Markdown("## Held-out accuracy"),
        evaluation_table(evaluation),
        *warning_tables(evaluation),
        Markdown("## Reward over training"),
        VegaChart(curve_spec(metrics, _LIVE_SERIES)),
        Markdown("## Seconds of a step"),
        VegaChart(time_spec(metrics)),
        Markdown("## Log-probability differences\n\nTokens by |difference| in nats; both axes are logarithmic."),
        VegaChart(histogram_spec(parity["tables"]["histogram"])),
        pair_table(parity),
        Markdown("## Rollouts"),
        record_table(samples),
        Markdown("## What these numbers cannot show"),
        record_table(parity["tables"]["limits"]),
    ]


def verdict_table(parity: Mapping[str, Any]) -> Table:
    """One row per check."""
    rows = [
        [
            cell(check["verdict"]),
            cell(check["name"]),
            figure(check["value"]),
            figure(check["tolerance"]),
            f"{check['num_observations']:,}",
            cell(check["evidence"]),
        ]
        for check in parity["checks"]
    ]
    return _table(["verdict", "check", "value", "tolerance", "observed", "evidence"], rows)


def evaluation_table(evaluation: Mapping[str, Any]) -> Table:
    """Before, after and gain with their intervals."""
    before, after, gain = evaluation["before"], evaluation["after"], evaluation["gain"]
    rows = [
        [cell(label), interval(before[name]), interval(after[name]), interval(gain[name])]
        for name, label in (("sampled_pass_at_1", "sampled pass@1"), ("greedy_pass_at_1", "greedy pass@1"))
    ]
    rows += [
        [cell(f"pass@{k}"), interval(value), interval(after["pass_at_k"][k]), ""]
        for k, value in before["pass_at_k"].items()
    ]
    return _table(["", "before", "after", f"gain ({gain['confidence']:.0%} interval)"], rows)


def warning_tables(evaluation: Mapping[str, Any]) -> list[Table]:
    """What makes an evaluation doubtful; nothing when nothing does."""
    warnings = [*evaluation["before"]["warnings"], *evaluation["after"]["warnings"]]
    return [_table(["warning"], [[cell(text)] for text in warnings])] if warnings else []


def pair_table(parity: Mapping[str, Any]) -> Table:
    """Statistics of every pair of scorers."""
    columns = ("num_tokens", "nan_count", "mean_abs", "p99_abs", "p999_abs", "max_abs", "k1", "k3", "tis_clip_count")
    rows = [
        [cell(f"{pair['name_a']} vs {pair['name_b']}"), *(figure(pair[name]) for name in columns)]
        for pair in parity["tables"]["pairs"]
    ]
    return _table(["pair", *columns], rows)


def record_table(records: Sequence[Mapping[str, object]]) -> Table:
    """Any plain records; the text in them may be hostile."""
    names = list(records[0]) if records else []
    return _table(names, [[cell(record.get(name)) for name in names] for record in records])


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    cells: list[list[str | MetaflowCardComponent]] = [list(row) for row in rows]
    return Table(cells or [["none"]], headers=list(headers))


def curve_spec(rows: Sequence[MetricRow], series: Sequence[str]) -> dict[str, Any]:
    """Vega-Lite lines of some metrics over steps; values that were not observed leave gaps."""
    values = [
        {"step": row["step"], "metric": name, "value": value}
        for row in thinned(rows)
        for name in series
        if (value := finite(row.get(name))) is not None
    ]
    return {
        "$schema": SCHEMA,
        "height": 240,
        "data": {"values": values},
        "mark": {"type": "line", "tooltip": True},
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "y": {"field": "value", "type": "quantitative"},
            "color": {"field": "metric", "type": "nominal"},
        },
    }


def time_spec(rows: Sequence[MetricRow]) -> dict[str, Any]:
    """Vega-Lite bars of the seconds of each step, stacked by span."""
    values = [
        {"step": row["step"], "span": name.removeprefix("time/").removesuffix("_s"), "seconds": seconds}
        for row in thinned(rows)
        for name, value in row.items()
        if name.startswith("time/") and name not in _NOT_SPANS and (seconds := finite(value)) is not None
    ]
    return {
        "$schema": SCHEMA,
        "height": 240,
        "data": {"values": values},
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "x": {"field": "step", "type": "ordinal", "axis": {"labelOverlap": True, "labelAngle": 0}},
            "y": {"field": "seconds", "type": "quantitative", "stack": "zero"},
            "color": {"field": "span", "type": "nominal"},
        },
    }


def histogram_spec(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Vega-Lite histogram of |difference| on logarithmic axes, one panel per pair.

    A logarithmic axis has no 0: the bin of differences that are exactly or nearly 0 is drawn one decade wide.
    """
    values = [
        {
            "pair": str(row["pair"]),
            "low": row["low"] or row["high"] / 10,
            "high": row["low"] * 10 if row["high"] is None else row["high"],
            "tokens": row["tokens"],
        }
        for row in rows
    ]
    return {
        "$schema": SCHEMA,
        "height": 80,
        "width": 600,
        "data": {"values": values},
        "mark": {"type": "bar", "tooltip": True},
        "encoding": {
            "x": {
                "field": "low",
                "type": "quantitative",
                "scale": {"type": "log"},
                "axis": {"format": ".0e"},
                "title": "nats",
            },
            "x2": {"field": "high"},
            "y": {"field": "tokens", "type": "quantitative", "scale": {"type": "symlog"}},
            "y2": {"datum": 0},  # without it both axes look ranged and the bars are drawn as ticks
            "facet": {"field": "pair", "type": "nominal", "columns": 1, "title": None},
        },
    }


def thinned(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """At most `_MOST_POINTS` rows, evenly spaced, the last one included."""
    if len(rows) <= _MOST_POINTS:
        return list(rows)
    indices = [round(i * (len(rows) - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)]
    return [rows[i] for i in indices]


def cell(value: object) -> str:
    """A table cell as visible text: control and direction-changing characters are spelled out, long text is cut."""
    text = figure(value) if isinstance(value, float) else str(value)
    shown = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} … ({len(text):,} characters)"
    return "".join(c if c == " " or unicodedata.category(c)[0] not in "CZ" else _spelled(c) for c in shown)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def figure(value: object) -> str:
    """A number for people; what was not observed is a dash."""
    number = finite(value)
    if number is None:
        return "–"
    return f"{number:,.0f}" if float(number).is_integer() and abs(number) < 1e15 else f"{number:.4g}"


def interval(estimate: Mapping[str, float | None]) -> str:
    """E.g. ``"0.887 [0.861, 0.910]"``."""
    value, low, high = (finite(estimate[name]) for name in ("value", "low", "high"))
    if value is None:
        return "–"
    return f"{value:.3f}" if low is None or high is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def duration(seconds: float) -> str:
    """E.g. ``"1 h 04 min"``, ``"2 min 05 s"`` or ``"40 s"``."""
    whole = round(seconds)
    for (big, unit), (small, smaller) in pairwise([(3600, "h"), (60, "min"), (1, "s")]):
        if whole >= big:
            return f"{whole // big} {unit} {whole % big // small:02d} {smaller}"
    return f"{whole} s"


def finite(value: object) -> float | int | None:
    """The number, or None for what is none or not finite.

    JSON has no NaN: one of them in a card's data and the browser shows nothing at all.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None
