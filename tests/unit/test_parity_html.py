"""The page of a report: everything in it, nothing from outside, and text of others only as text."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from grpo_lib.parity.html import page
from grpo_lib.parity.report import to_dict
from grpo_lib.parity.runs import compare_runs
from grpo_lib.parity.terminal import render_report
from tests.unit.finished_runs import make_run, side

HOSTILE = "<script>alert(1)</script>\u202e&\x1b[31m"
VOID = {"meta", "polygon", "polyline"}


class Reader(HTMLParser):
    """Text, tags and attributes of a page; what is opened must be closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def close(self) -> None:
        super().close()
        assert self._open == []


def read(report: dict[str, Any], title: str = "a title") -> Reader:
    reader = Reader()
    reader.feed(page(report, title=title))
    reader.close()
    return reader


@pytest.fixture(scope="module")
def comparison() -> dict[str, Any]:
    return to_dict(compare_runs(side((1, 2, 3)), side((11, 12, 13), tis_rate=3e-3)))


def test_everything_is_on_the_page(comparison: dict[str, Any]) -> None:
    reader = read(comparison)
    text = " ".join(reader.text)
    for check in comparison["checks"]:
        assert check["name"] in text
        assert check["evidence"] in text
    for name in comparison["tables"].keys() - {"curves", "limits"}:
        assert name.replace("_", " ") in reader.text
    assert all(row["cannot_show"] in text for row in comparison["tables"]["limits"])
    assert "compute = forward_backward + optim" in text
    metrics = {row["metric"] for row in comparison["tables"]["curves"]}
    assert reader.tags.count("svg") == len(metrics)
    assert reader.tags.count("polyline") == reader.tags.count("polygon") == 2 * len(metrics), "a line and a band a side"


def test_it_needs_nothing_from_elsewhere(comparison: dict[str, Any]) -> None:
    reader = read(comparison)
    assert not {"script", "link", "img", "iframe", "object"} & set(reader.tags)
    assert not {"src", "href"} & reader.attributes.keys()
    assert "url(" not in page(comparison, title="")


def test_a_curve_is_drawn_where_its_numbers_are() -> None:
    """From step 1 at the lowest value to step 3 at the highest: left bottom to right top."""
    rows = [
        {"metric": "m", "side": "A", "step": step, "mean": value, "low": None, "high": None}
        for step, value in ((1, 0.0), (2, 0.5), (3, 1.0))
    ]
    report = {"verdict": "PASS", "checks": [], "tables": {"curves": rows}}
    (points,) = read(report).attributes["points"]
    assert points == "58.0,176.0 255.0,93.0 452.0,10.0"
    assert "polygon" not in read(report).tags, "no band for one seed"


def test_curves_without_a_value_or_without_a_range() -> None:
    def drawn(*means: float | None) -> Reader:
        rows = [
            {"metric": "m", "side": "A", "step": step, "mean": mean, "low": None, "high": None}
            for step, mean in enumerate(means, start=1)
        ]
        return read({"verdict": "PASS", "checks": [], "tables": {"curves": rows}})

    assert "m: nothing was observed" in drawn(None, None).text
    assert drawn(0.5).attributes["points"] == ["58.0,176.0"]
    assert drawn(0.5, None, 0.5).attributes["points"] == ["58.0,176.0 452.0,176.0"]


def hostile() -> dict[str, Any]:
    check = {
        "name": HOSTILE, "verdict": "FAIL", "value": None, "tolerance": 0.0, "num_observations": 1, "evidence": HOSTILE,
    }  # fmt: skip
    curve = {"metric": HOSTILE, "side": HOSTILE, "step": 1, "mean": 1.0, "low": 0.5, "high": 1.5}
    tables = {
        HOSTILE: [{HOSTILE: HOSTILE, "verdict": "' onload='x"}],
        "curves": [curve],
        "limits": [{"metric": HOSTILE, "cannot_show": HOSTILE}],
    }
    return {"verdict": "FAIL", "checks": [check], "tables": tables}


def test_text_of_others_stays_text() -> None:
    reader = read(hostile(), title=HOSTILE)
    assert "script" not in reader.tags
    assert "onload" not in reader.attributes
    whole = page(hostile(), title=HOSTILE)
    assert "\u202e" not in whole
    assert "\x1b" not in whole
    assert "<script>alert(1)</script>\\u202e&\\x1b[31m" in reader.text, "spelled out, so that it can be seen"


def test_terminals_get_no_control_characters_either() -> None:
    text = render_report(hostile())
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_long_tables_are_folded() -> None:
    def details(count: int) -> int:
        rows = [{"step": step} for step in range(count)]
        return read({"verdict": "PASS", "checks": [], "tables": {"steps": rows}}).tags.count("details")

    assert (details(60), details(61)) == (0, 1)


def test_one_run_a_side_has_a_page_too() -> None:
    reader = read(to_dict(compare_runs([make_run(1)], [make_run(2)])))
    assert "INCONCLUSIVE" in reader.text
