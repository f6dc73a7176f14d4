"""Generated and hand-written pages keep up with the code."""

import re
from pathlib import Path

from grpo_lib.cli import configuration_markdown
from grpo_lib.config import settings
from grpo_lib.parity.report import LIMITS
from grpo_lib.rules import RULES
from grpo_lib.timing import SPANS
from grpo_lib.types import GroupStatus

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = (
    r"(?:advantage|batch|correction|group|loss|mismatch|optim|policy|response|reward|sampling|staleness|time|throughput"
    r"|verdict)"
)


def documented_metrics() -> dict[str, str]:
    """Name → reduction, from the tables."""
    lines = (ROOT / "docs/metrics.md").read_text().splitlines()
    return {match[1]: match[2] for line in lines if (match := re.match(r"\| `([a-z_]+/\w+)` \| ([^|]+) \|", line))}


def emitted_metrics() -> set[str]:
    """Every metric name written as a literal in the package, and those made from spans and group states."""
    literals = {
        name
        for path in (ROOT / "grpo_lib").rglob("*.py")
        for name in re.findall(rf'"({FAMILIES}/\w+)"', path.read_text())
    }
    spans = {f"time/{span}_s" for span in (*SPANS, "other", "step")}
    return literals | spans | {f"group/{status}" for status in GroupStatus}


def test_configuration_page_is_up_to_date() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    assert page == configuration_markdown(), "run: grpo config-docs > docs/configuration.md"


def test_configuration_page_has_every_setting_and_rule() -> None:
    page = configuration_markdown()
    for key, field in settings().items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{key.rpartition('.')[2]}` |"))
        assert row.count(" | ") >= 3
        assert (field.description or "").replace("|", r"\|") in page
    assert all(rule.__name__.replace("_", " ") in page for rule in RULES)
    assert "| `kl_estimator` | `k1` or `k2` or `k3` or `k3_weighted` |" in page
    assert "| `correction_cap` | float, > 1 | `2.0` |" in page
    assert "| `train_path` | str or null | `null` |" in page


def test_every_emitted_metric_is_documented_and_every_documented_one_emitted() -> None:
    documented = documented_metrics()
    assert emitted_metrics() - documented.keys() == set()
    assert documented.keys() - emitted_metrics() == set()
    assert len(emitted_metrics()) > 50
    assert {value.split()[0] for value in documented.values()} <= {"mean", "sum", "min", "max", "p95", "p99", "driver"}


def test_parity_page_names_every_check() -> None:
    page = (ROOT / "docs/parity.md").read_text()
    source = (ROOT / "grpo_lib/parity/verdicts.py").read_text()
    names = re.findall(r'^        "([a-z][\w ,-]+)",$', source, re.MULTILINE)
    assert len(names) >= 7
    assert [name for name in names if name not in page] == []
    assert len(LIMITS) >= 7
