"""Card components rendered to what the browser gets: complete, strict JSON, and deaf to hostile text."""

import base64
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("METAFLOW_USER", "tests")  # metaflow refuses to be imported by an unknown user

from flows import cards
from grpo_lib.parity.report import to_dict
from grpo_lib.timing import SPANS
from tests.unit.test_parity_verdicts import report, row

HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[click](javascript:alert(1))",
    "![x](http://tracker.example/pixel.png)",
    "line\nbreak\ttab\x00nul\x1b[31mred",
    "\u202egnp.exe\u2066",  # right-to-left override
    "a\ud800b",  # a lone surrogate, which UTF-8 cannot carry
    "</td></table>{{constructor.constructor('alert(1)')()}}",
    "$x^2$ **bold** | pipe",
    "long " * 1000,
]


def estimate(value: float | None) -> dict[str, Any]:
    bounds = (None, None) if value is None else (value - 0.02, value + 0.02)
    return {"value": value, "low": bounds[0], "high": bounds[1], "num_prompts": 150}


def evaluation(warning: str | None = None) -> dict[str, Any]:
    def side(value: float) -> dict[str, Any]:
        return {
            "sampled_pass_at_1": estimate(value),
            "greedy_pass_at_1": estimate(1.0),
            "pass_at_k": {"4": estimate(value), "8": estimate(None)},
            "warnings": [warning] if warning else [],
        }

    gain = {"sampled_pass_at_1": estimate(0.4), "greedy_pass_at_1": estimate(0.0), "confidence": 0.95}
    return {"before": side(0.5), "after": side(0.9), "gain": gain}


def rows(count: int = 5, **changes: Any) -> list[dict[str, Any]]:
    return [
        row(s, **{"reward/mean": s / count, "reward/correct_rate": s / count, **changes}) for s in range(1, count + 1)
    ]


def samples(texts: list[str]) -> list[dict[str, object]]:
    return [{"prompt": text, "answer": "7", "text": text, "reward": 1.0} for text in texts]


def rendered(
    texts: list[str] | None = None, warning: str | None = None, changes: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    components = cards.report_components(
        to_dict(report()),
        metrics=rows(**(changes or {})),
        evaluation=evaluation(warning),
        samples=samples(texts if texts is not None else ["7"]),
    )
    return [component.render() for component in components]  # pyright: ignore[reportReturnType]


def by_type(parts: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [part for part in parts if part["type"] == kind]


def test_report_shows_all_parts() -> None:
    parts = rendered()
    assert {part["type"] for part in parts} == {"markdown", "table", "vegaChart"}
    assert by_type(parts, "markdown")[0]["source"] == "# Parity: PASS"
    checks, accuracy, pairs, rollouts, limits = by_type(parts, "table")
    assert checks["columns"] == ["verdict", "check", "value", "tolerance", "observed", "evidence"]
    assert len(checks["data"]) == len(report().checks)
    assert accuracy["data"][0] == [
        "sampled pass@1", "0.500 [0.480, 0.520]", "0.900 [0.880, 0.920]", "0.400 [0.380, 0.420]",
    ]  # fmt: skip
    assert accuracy["data"][-1] == ["pass@8", "–", "–", ""]
    assert len(pairs["data"]) == 5
    assert rollouts["data"] == [["7", "7", "7", "1"]]
    assert rollouts["columns"] == ["prompt", "answer", "text", "reward"]
    assert len(limits["data"]) > 5


def test_charts_hold_the_numbers() -> None:
    curve, times, histogram = (part["spec"] for part in by_type(rendered(), "vegaChart"))
    assert [v["value"] for v in curve["data"]["values"] if v["metric"] == "reward/mean"] == [0.2, 0.4, 0.6, 0.8, 1.0]
    seconds = [v["seconds"] for v in times["data"]["values"] if v["step"] == 1]
    assert sum(seconds) == pytest.approx(0.5)  # step_s itself is not one of its own parts
    assert {v["span"] for v in times["data"]["values"]} == {*SPANS, "other"}
    assert sum(v["tokens"] for v in histogram["data"]["values"]) == 5 * 4000
    assert all(0 < v["low"] < v["high"] for v in histogram["data"]["values"])  # for logarithmic axes


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_no_value_breaks_the_json_of_a_card(value: float | None) -> None:
    """One NaN in the data and JSON.parse fails in the browser, which then shows an empty page."""
    parts = rendered(changes={"reward/mean": value, "time/pack_s": value})
    json.dumps(parts, allow_nan=False)
    assert [v for v in parts[5]["spec"]["data"]["values"] if v["metric"] == "reward/mean"] == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_rollouts_stay_text(text: str) -> None:
    parts = rendered([text])
    json.dumps(parts, allow_nan=False).encode()
    for part in by_type(parts, "table"):
        assert all(type(value) is str for line in part["data"] for value in line)  # strings become text nodes
    shown = by_type(parts, "table")[3]["data"][0][2]
    assert len(shown) < 1000
    assert shown.isprintable()
    shown.encode("utf-8")
    # Nothing of it reaches a component whose text is interpreted.
    others = [part for part in rendered([text], warning=text) if part["type"] != "table"]
    assert text[:12] not in json.dumps(others, ensure_ascii=False)


def test_a_doubtful_evaluation_says_so_in_a_table_of_its_own() -> None:
    assert len(by_type(rendered(), "table")) == 5
    tables = by_type(rendered(warning=HOSTILE[0]), "table")
    assert tables[2]["columns"] == ["warning"]
    assert tables[2]["data"] == [[HOSTILE[0]], [HOSTILE[0]]]  # before and after


def test_plain_text_is_left_readable() -> None:
    assert cards.cell("12+3= 15 · größer 漢字") == "12+3= 15 · größer 漢字"
    assert cards.cell("a\nb") == "a\\nb"
    assert cards.cell("x" * 500).endswith("… (500 characters)")


def test_metaflow_still_treats_cell_strings_as_text() -> None:
    """The escaping rests on this: the viewer creates a text node for a cell that is no component."""
    import metaflow.plugins.cards.card_modules.components as components

    viewer = Path(components.__file__).with_name("main.js").read_text()
    assert re.search(r"function (\w+)\(e\)\{let t;return\{c\(\)\{t=(\w+)\(e\[0\]\)\}", viewer)


def test_a_whole_card_carries_the_components() -> None:
    """Through Metaflow's own template, as the browser loads it."""
    from metaflow.plugins.cards.card_modules.basic import BlankCard, SectionComponent

    class Task:
        pathspec = "GRPOFlow/1/parity_report/2"

    html = BlankCard(components=[SectionComponent(contents=rendered(HOSTILE)).render()]).render(Task())
    assert "<script>alert(1)" not in html
    encoded = re.search(r'__MF_DATA__\["[^"]*"\] = "([^"]+)"', html)
    assert encoded
    page = json.loads(base64.b64decode(encoded.group(1)))
    assert page["metadata"] == {"pathspec": Task.pathspec}
    assert "# Parity: PASS" in json.dumps(page)


class RecordingCard:
    """What a running step's card would receive."""

    def __init__(self) -> None:
        self.components: list[Any] = []
        self.refreshed: list[list[dict[str, Any]]] = []

    def append(self, component: Any, id: str | None = None) -> None:  # noqa: A002
        self.components.append(component)

    def refresh(self) -> None:
        self.refreshed.append([json.loads(json.dumps(c.render(), allow_nan=False)) for c in self.components])


def test_live_card_follows_the_run_at_a_distance() -> None:
    now = [100.0]
    card = RecordingCard()
    live = cards.LiveCard(total_steps=100, card=card, min_interval_s=10.0, clock=lambda: now[0])
    assert len(card.refreshed) == 1  # the empty card appears at once
    for step, metrics in enumerate(rows(100), start=1):
        now[0] += 1.0
        live.update(step, metrics)
    assert len(card.refreshed) == 1 + 10
    progress = card.refreshed[5][0]
    assert (progress["value"], progress["max"]) == (50, 100)
    assert progress["details"] == "reward 0.5, 0.50 s a step, 25 s left"
    curve = card.refreshed[5][2]["spec"]["data"]["values"]
    assert max(v["step"] for v in curve) == 50
    assert [len(page) for page in card.refreshed] == [5] * 11  # updated in place, so that the page is not reloaded


def test_live_card_always_shows_the_last_step() -> None:
    card = RecordingCard()
    live = cards.LiveCard(total_steps=3, card=card, min_interval_s=1e9, clock=lambda: 0.0)
    for step, metrics in enumerate(rows(3), start=1):
        live.update(step, metrics)
    assert [page[0]["value"] for page in card.refreshed] == [0, 3]
    assert card.refreshed[-1][0]["details"].endswith("0 s left")


def test_long_runs_are_thinned_to_their_ends() -> None:
    many = cards.thinned(rows(5000))
    assert len(many) == 300
    assert (many[0]["step"], many[-1]["step"]) == (1, 5000)
    steps = [entry["step"] for entry in many]
    assert steps == sorted(set(steps))


def test_report_card_appends_everything() -> None:
    card = RecordingCard()
    cards.report_card(to_dict(report()), metrics=rows(), evaluation=evaluation(), samples=[], card=card)
    assert len(card.components) == len(rendered())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (40, "40 s"), (125, "2 min 05 s"), (3600, "1 h 00 min"), (7500, "2 h 05 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert cards.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.5, "0.5"), (3.0, "3"), (20553, "20,553"), (1.2346e-7, "1.235e-07"), (math.nan, "–"), (None, "–"), (True, "–")],
)
def test_figure(value: object, text: str) -> None:
    assert cards.figure(value) == text
