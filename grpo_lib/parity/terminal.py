"""Any report of `report.to_dict` as text, at most 120 columns wide: tables, what they cannot show, and the checks."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_lib.parity.report import WIDTH, render, visible

Row = Mapping[str, Any]

# For files and pages: too many rows to read, or drawn there. Causes stand below the checks, in full.
_NOT_SHOWN = frozenset({"histogram", "curves", "limits", "diagnosis"})
_MOST_ROWS = 40
_MOST_CHARACTERS = 44  # of a cell in a table with several columns
_GAP = 2


def render_report(report: Mapping[str, Any]) -> str:
    """Checks, tables, limits."""
    parts = [_table_text(name, rows) for name, rows in report["tables"].items() if rows and name not in _NOT_SHOWN]
    limits = [
        textwrap.fill(f"{visible(row['metric'])}: {visible(row['cannot_show'])}", WIDTH, subsequent_indent="  ")
        for row in report["tables"].get("limits", ())
    ]
    if limits:
        parts.append("\n".join(("what the numbers cannot show", *limits)))
    return "\n\n".join([*parts, render(report)])


def _table_text(name: str, rows: Sequence[Row]) -> str:
    """A table; one with too many columns continues below, its first column repeated."""
    shown = rows[:_MOST_ROWS]
    names = {column: visible(column) for row in shown for column in row}
    columns = list(names.values())
    cells = {name: [_cell(row.get(column)) for row in shown] for column, name in names.items()}
    texts = {name for column, name in names.items() if any(isinstance(row.get(column), str) for row in shown)}
    widths = {column: max(len(column), *map(len, values)) for column, values in cells.items()}
    blocks = []
    for block in _blocks(columns, widths):
        lines = [[column, *cells[column]] for column in block]
        aligned = [
            [value.ljust(widths[column]) if column in texts else value.rjust(widths[column]) for value in values]
            for column, values in zip(block, lines, strict=True)
        ]
        blocks.append("\n".join((" " * _GAP).join(line).rstrip() for line in zip(*aligned, strict=True)))
    left_out = [f"… {len(rows) - len(shown)} more rows, see --json or --html"] if len(rows) > len(shown) else []
    return "\n".join([visible(name.replace("_", " ")), *("\n\n".join(blocks)).splitlines(), *left_out])


def _blocks(columns: Sequence[str], widths: Mapping[str, int]) -> list[list[str]]:
    blocks = [[columns[0]]]
    for column in columns[1:]:
        if sum(widths[c] + _GAP for c in (*blocks[-1], column)) - _GAP > WIDTH:
            blocks.append([columns[0]])
        blocks[-1].append(column)
    return blocks


def _cell(value: object) -> str:
    if isinstance(value, (bool, str)):
        text = visible(value)
        return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"
    if value is None:
        return "–"
    return figure(value) if isinstance(value, (int, float)) else visible(value)


def figure(value: float) -> str:
    """A number for people: whole ones in full, others with four digits."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"
