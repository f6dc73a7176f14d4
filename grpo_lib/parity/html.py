"""Any report of `report.to_dict` as one page that needs nothing else: no script, no network, everything escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from grpo_lib.parity.report import visible
from grpo_lib.parity.terminal import figure

Row = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #1b1f24; }
table { border-collapse: collapse; font-size: 13px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dee4; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
div.wide { overflow-x: auto; }
.PASS { color: #116329; } .FAIL { color: #a40e26; font-weight: 700; } .INCONCLUSIVE { color: #7d4e00; }
figure { display: inline-block; margin: 0 1rem 1rem 0; } figcaption { font-size: 13px; }
svg text { font-size: 11px; fill: #57606a; }
"""
# Two hues that differ in brightness too; further sides of a chart take the rest.
_COLOURS = ("#0550ae", "#bc4c00", "#1a7f37", "#8250df")
_WIDTH, _HEIGHT = 460, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 8, 10, 24
_APART = ("curves", "limits")  # tables that have a form of their own
_LONG = 60  # rows; a longer table is folded


def page(report: Mapping[str, Any], *, title: str) -> str:
    """The whole page: verdict, checks, curves, every table, limits."""
    verdict = _text(report["verdict"])
    tables = {name: rows for name, rows in report["tables"].items() if rows}
    parts = [
        f"<h1>{_text(title)}: <span class='{verdict}'>{verdict}</span></h1>",
        _table(report["checks"]),
        *_curves(tables.get("curves", ())),
        *(_section(name, rows) for name, rows in tables.items() if name not in _APART),
        *_limits(tables.get("limits", ())),
    ]
    body = "\n".join(parts)
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{_text(title)}: {verdict}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _section(name: str, rows: Sequence[Row]) -> str:
    heading = f"<h2>{_text(name.replace('_', ' '))}</h2>"
    if len(rows) <= _LONG:
        return heading + _table(rows)
    return f"{heading}<details><summary>{len(rows):,} rows</summary>{_table(rows)}</details>"


def _limits(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    items = "".join(f"<li><b>{_text(row['metric'])}</b>: {_text(row['cannot_show'])}</li>" for row in rows)
    return [f"<h2>What the numbers cannot show</h2><ul>{items}</ul>"]


def _table(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    head = "".join(f"<th>{_text(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(_cell(column, row.get(column)) for column in columns)}</tr>" for row in rows)
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _cell(column: str, value: object) -> str:
    if value is None:
        return "<td class='number'>–</td>"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"<td class='number'>{figure(value)}</td>"
    text = _text(value)
    return f"<td class='{text}'>{text}</td>" if column == "verdict" else f"<td>{text}</td>"


def _text(value: object) -> str:
    return escape(visible(value))


def _curves(rows: Sequence[Row]) -> list[str]:
    """A chart for each metric of rows {metric, side, step, mean, low, high}; a band where low and high are there."""
    if not rows:
        return []
    by_metric: dict[str, list[Row]] = {}
    for row in rows:
        by_metric.setdefault(row["metric"], []).append(row)
    return ["<h2>Learning curves</h2>", *(_chart(metric, points) for metric, points in by_metric.items())]


def _chart(metric: str, rows: Sequence[Row]) -> str:
    seen = [row for row in rows if row["mean"] is not None]
    if not seen:
        return f"<figure><figcaption>{_text(metric)}: nothing was observed</figcaption></figure>"
    values = [row[key] for row in seen for key in ("mean", "low", "high") if row[key] is not None]
    steps = [row["step"] for row in seen]
    left, right, bottom, top = min(steps), max(steps), min(values), max(values)
    across, up = (right - left) or 1, (top - bottom) or 1

    def at(step: float, value: float) -> str:
        x = _LEFT + (step - left) / across * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - (value - bottom) / up * (_HEIGHT - _BOTTOM - _TOP)
        return f"{x:.1f},{y:.1f}"

    sides = list(dict.fromkeys(row["side"] for row in seen))
    shapes, legend = [], []
    for colour, side in zip(_COLOURS, sides, strict=False):
        own = [row for row in seen if row["side"] == side]
        banded = [row for row in own if row["low"] is not None and row["high"] is not None]
        outline = [at(row["step"], row["high"]) for row in banded]
        outline += [at(row["step"], row["low"]) for row in reversed(banded)]
        if outline:
            shapes.append(f"<polygon points='{' '.join(outline)}' fill='{colour}' opacity='.15'/>")
        line = " ".join(at(row["step"], row["mean"]) for row in own)
        shapes.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='1.6'/>")
        legend.append(f"<span style='color:{colour}'>■</span> {_text(side)}")
    labels = (
        f"<text x='{_LEFT - 4}' y='{_TOP + 8}' text-anchor='end'>{figure(top)}</text>"
        f"<text x='{_LEFT - 4}' y='{_HEIGHT - _BOTTOM}' text-anchor='end'>{figure(bottom)}</text>"
        f"<text x='{_LEFT}' y='{_HEIGHT - 6}'>step {figure(left)}</text>"
        f"<text x='{_WIDTH - _RIGHT}' y='{_HEIGHT - 6}' text-anchor='end'>{figure(right)}</text>"
    )
    return (
        f"<figure><figcaption>{_text(metric)} &nbsp; {' &nbsp; '.join(legend)}</figcaption>"
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='{_text(metric)}'>"
        f"{''.join(shapes)}{labels}</svg></figure>"
    )
